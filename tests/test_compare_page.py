"""powergossip-compare as a program, and its page in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.test_compare import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def test_the_program_needs_no_torch(tmp_path: Path) -> None:
    """It only reads files: importing torch takes seconds."""
    write_run(tmp_path / "a")
    program = (
        "import sys\n"
        "from powergossip.runs import compare\n"
        "compare.main(['a'])\n"
        "print(sorted({'torch', 'mpi4py', 'omegaconf', 'matplotlib'} & set(sys.modules)))\n"
    )
    ended = launch.python("-c", program, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_bad_input_is_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    ended = launch.python("-m", "powergossip.runs.compare", "nowhere", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: nowhere ")


def browse(page: Path, *options: str) -> str:
    """The elements of a page after its scripts have run."""
    assert CHROMIUM is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    command = [CHROMIUM, *fixed, *quiet, *options, page.as_uri()]
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=120)


def requests(log: Path) -> list[str]:
    """Addresses that the browser has asked for a page, from its network log."""
    events: list[dict[str, Any]] = json.loads(log.read_text())["events"]
    found = [event.get("params", {}).get("url", "") for event in events]
    return [address for address in found if re.match("(https?|wss?|ftp):", address)]


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
        "-m", "powergossip.runs.compare", "a*", "b", "--output", "page.html", cwd=tmp_path
    )
    assert written.returncode == 0, written.stderr
    log = tmp_path / "network.json"
    shown = browse(
        tmp_path / "page.html",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--log-net-log={log}",
        "--dump-dom",
    )
    assert shown.count('class="scatterlayer') == 3  # panels
    assert shown.count('class="trace scatter') == 3 * (2 + 2)  # lines, and the edges of the band
    assert "dpsgd" in re.findall(r'<text class="legendtext"[^>]*>([^<]*)<', shown)
    assert requests(log) == []
