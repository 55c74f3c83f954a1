"""Programs whose output has no reader, no space, no encoding, or is closed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from powergossip.runs import files, output
from tests.harness import launch

RUN = "train.py task_architecture=MLP num_epochs=2 max_steps_per_epoch=2 log_verbosity=2"
SWEEP = "gossip_run.py n_workers=4 matrix_size=10 num_steps=100 algorithm=power_gossip"


def shell(command: str, **variables: str) -> tuple[int, str]:
    """Exit code, standard output and error of a program in bash, the code before a pipe."""
    ended = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=launch.ROOT,
        env={**os.environ, "PYTHONPATH": str(launch.ROOT), **variables},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("program", ["train.py", "-m powergossip.prediction"])
def test_help_is_printed_in_any_encoding(program: str) -> None:
    """Of programs with keys and with options, which have their streams from two functions."""
    code, text = shell(f"{sys.executable} {program} --help", PYTHONIOENCODING="ascii")
    assert (code, "Traceback" in text) == (0, False), text


@pytest.mark.parametrize(
    "ending",
    [
        "> /dev/full 2>&1",
        *(pytest.param(e, marks=pytest.mark.slow) for e in (">&- 2>&-", "2>&1 | true")),
    ],
)
@pytest.mark.parametrize("program", [RUN, pytest.param(SWEEP, marks=pytest.mark.slow)])
def test_a_run_is_complete_whatever_becomes_of_its_output(
    program: str, ending: str, tmp_path: Path
) -> None:
    command = f"{sys.executable} {program} --output-dir {tmp_path / 'run'}"
    assert shell(f"{command} {ending}") == (0, "")
    if program == RUN:
        info = json.loads((tmp_path / "run" / files.INFO_FILE).read_text())
        assert info[output.ENDING] == output.COMPLETE


@pytest.mark.parametrize(
    ("ending", "code", "sentence"),
    [
        ("> /dev/full", 2, "error: the standard output: No space left on device\n"),
        ("| true", 0, ""),
    ],
)
def test_a_table_that_cannot_be_printed_is_a_sentence(
    ending: str, code: int, sentence: str
) -> None:
    program = "from powergossip import command_line; command_line.run(lambda _: print(10**5 * 'a'))"
    assert shell(f'{sys.executable} -c "{program}" {ending}') == (code, sentence)
