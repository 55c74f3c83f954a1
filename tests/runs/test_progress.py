"""Progress: a bar on a terminal, in a log file a line now and then."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from powergossip.runs import progress
from powergossip.runs.progress import Progress
from tests.harness import launch


def test_a_log_file_has_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress(100, initial=10) as bar:
        for _ in range(90):
            bar.note("accuracy 50%")
            bar.update()
            now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "41 of 100 steps after 00:30, accuracy 50%",
        "71 of 100 steps after 01:00, accuracy 50%",
    ]


def test_tokens_per_second_are_those_of_the_steps_of_this_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress(100, initial=10, tokens=1024) as bar:
        for _ in range(60):
            now += 0.5
            bar.update()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "70 of 100 steps after 00:30, 2,048 tokens/s"


def test_a_hidden_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, shown=False) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_of_mpirun_has_a_bar_and_a_file_has_none(
    terminal: bool, tmp_path: Path
) -> None:
    """mpirun forwards lines only: the bar appears while the program waits for that."""
    (tmp_path / "program.py").write_text(PROGRAM)
    main, other = pty.openpty()
    with (
        launch.one_mpirun_at_a_time(),
        (tmp_path / "log").open("w") as log,
        launch.started(
            ["mpirun", "-np", "1", sys.executable, "program.py"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=other if terminal else log,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(launch.ROOT)},
        ) as program,
    ):
        shown = b""
        while terminal and b"0/3" not in shown:
            assert select.select([main], [], [], 60)[0], shown
            shown += os.read(main, 4096)
        program.communicate(b"go\n", timeout=60)
    os.close(other)
    os.close(main)
    assert (tmp_path / "log").read_text() == "a line\n"


PROGRAM = """
from powergossip.runs.progress import Progress
with Progress(3) as bar:
    bar.update()
    input()
    bar.write("a line")
    bar.update(2)
"""
