"""powergossip-compare as a program, and its page in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launch
from tests.harness.compared_runs import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def test_the_program_needs_no_torch(tmp_path: Path) -> None:
    """It only reads files: importing torch takes seconds."""
    write_run(tmp_path / "a")
    program = (
        "import sys\n"
        "from powergossip import compare\n"
        "compare.main(['a'])\n"
        "print(sorted({'torch', 'mpi4py', 'omegaconf', 'matplotlib'} & set(sys.modules)))\n"
    )
    ended = launch.python("-c", program, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def browse(page: Path, *options: str) -> str:
    """The elements of a page after its scripts have run."""
    assert CHROMIUM is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    # The browser's own requests to its maker find no server.
    quiet = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-first-run"]
    command = [CHROMIUM, *fixed, *quiet, *options, page.as_uri()]
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=120)


def requests(page: Path, folder: Path) -> list[str]:
    """Addresses that a page asks, from the browser's log: requests that an origin has begun."""
    log = folder / "network.json"
    browse(page, f"--user-data-dir={folder}", f"--log-net-log={log}", "--dump-dom")
    events: list[dict[str, Any]] = json.loads(log.read_text())["events"]
    found = [event["params"] for event in events if "initiator" in event.get("params", {})]
    return [
        params["url"]
        for params in found
        if params["initiator"] != "not an origin" and re.match("(https?|wss?):", params["url"])
    ]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_the_page_and_asks_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly", reason="the extra compare is not installed")
    write_run(tmp_path / "a1", (0.1, 0.5, 0.6))
    write_run(tmp_path / "a2", (0.2, 0.4, 0.7), seed=2)
    write_run(tmp_path / "b", (0.3, 0.2, 0.9), optimizer="dpsgd", bits=800_000_000)
    monkeypatch.chdir(tmp_path)
    written = launch.python(
        "-m", "powergossip.compare", "a*", "b", "--output", "page.html", cwd=tmp_path
    )
    assert written.returncode == 0, written.stderr
    shown = browse(tmp_path / "page.html", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    assert shown.count('class="scatterlayer') == 3  # panels
    assert shown.count('class="trace scatter') == 3 * (2 + 2)  # lines, and the edges of the band
    assert "dpsgd" in re.findall(r'<text class="legendtext"[^>]*>([^<]*)<', shown)
    assert requests(tmp_path / "page.html", tmp_path / "log") == []
    bad = '<img src="http://127.0.0.1:9/x.png">'
    (tmp_path / "bad.html").write_text(bad)
    assert requests(tmp_path / "bad.html", tmp_path / "bad") == ["http://127.0.0.1:9/x.png"]
    text = (tmp_path / "page.html").read_text()
    (tmp_path / "forbidden.html").write_text(text.replace("<body>", f"<body>{bad}"))
    assert requests(tmp_path / "forbidden.html", tmp_path / "forbidden") == []
