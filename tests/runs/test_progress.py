"""Progress: a bar on a terminal, in a log file a line now and then."""

import pytest

from powergossip.runs import progress
from powergossip.runs.progress import Progress


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


def test_a_terminal_has_a_bar_above_which_lines_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(3) as bar:
        bar.write("a line")
        bar.update(3)
    shown = capsys.readouterr()
    assert shown.out == "a line\n"
    assert "0/3" in shown.err
    assert "3/3" in shown.err
