"""Progress: a bar on a terminal, in a log file a line now and then."""

import io
import os
import pty
import subprocess
import sys

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


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(3) as bar:
        bar.update(3)
    assert "3/3" in terminal.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_of_mpirun_counts(terminal: bool) -> None:
    """Its processes have a pipe to it."""
    master, slave = pty.openpty()
    command = ["mpirun", "-np", "1", sys.executable, "-c", PROGRAM]
    with launch.one_mpirun_at_a_time():
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=slave if terminal else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(launch.ROOT)},
            timeout=60,
        )
    os.close(master)
    os.close(slave)
    assert ended.stdout.strip() == str(terminal)


PROGRAM = "from powergossip.runs.progress import on_terminal; print(on_terminal())"
