"""What the README shows works as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch

README = (launch.ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]
TRAINING = [line for line in COMMANDS if "train.py" in line and "--help" not in line]

SHOWN = {  # the end of what each Python block prints, by a word of it
    "log_metric": r"mean model: \d+\.\d%\n$",
    "PowerGossip": r"sent by worker 0: 0\.\d\d MB\n(.*\n)+",
    "OneNeighbor": r"^\[2\.0, 2\.0\] \[32, 32\]\n$",
    "Half": r"\b2\.0 times fewer bits than uncompressed gossip\n",
}


@pytest.mark.parametrize("word", SHOWN)
def test_python_blocks_run_anywhere(word: str, tmp_path: Path) -> None:
    (block,) = [block for block in blocks("python") if word in block and block not in QUOTED]
    (tmp_path / "block.py").write_text(block)
    ended = launch.python("block.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert re.search(SHOWN[word], ended.stdout), ended.stdout


QUOTED = [block for block in blocks("python") if block.startswith("# examples/")]


def test_every_python_block_is_tested() -> None:
    assert len(blocks("python")) == len(SHOWN) + len(QUOTED)


@pytest.mark.parametrize("block", QUOTED)
def test_quoted_lines_are_those_of_the_example(block: str) -> None:
    """In the same order; tests/test_examples.py runs the whole."""
    path, *lines = block.splitlines()
    left = iter((launch.ROOT / path.removeprefix("# ")).read_text().splitlines())
    for line in filter(None, lines):
        assert line in left, line


def run(command: str, *more: str, cwd: Path = launch.ROOT) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    words[words.index("python")] = sys.executable
    words = [str(launch.ROOT / word) if word == "train.py" else word for word in words]
    with launch.one_mpirun_at_a_time():
        return subprocess.run(
            [*words, *more],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            capture_output=True,
            timeout=240,
        )


@pytest.mark.parametrize("command", [c for c in TRAINING if "--output-dir" not in c])
def test_training_commands_run(command: str, tmp_path: Path) -> None:
    """With one epoch; that `make train` runs to its end is not for a test suite."""
    ended = run(command, "num_epochs=1", "--output-dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "test accuracy, mean model" in ended.stdout
    assert (tmp_path / "figure.png").exists()


def test_stopping_and_going_on(tmp_path: Path) -> None:
    """The first command with two epochs, the second with three."""
    first, second = (command for command in TRAINING if "--output-dir" in command)
    assert run(first, "num_epochs=2", cwd=tmp_path).returncode == 0
    ended = run(second, "num_epochs=3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "After 3 epochs" in ended.stdout


def test_the_consensus_command_runs_as_it_stands(tmp_path: Path) -> None:
    (command,) = [line for line in COMMANDS if "gossip_run.py" in line]
    ended = launch.python(*shlex.split(command)[1:], "--output-dir", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "uncompressed" in ended.stdout
    assert (tmp_path / "figure.png").exists()


def test_other_commands_are_tested_elsewhere() -> None:
    """make train and make test by CI, --help, mpi_check, examples and experiments by their own."""
    others = [
        command for command in COMMANDS if command not in TRAINING and "gossip_run" not in command
    ]
    assert others == [
        "make train",
        "make test",
        "python train.py --help",
        "mpirun -np 8 python -m powergossip.mpi_check",
        "mpirun -np 4 python examples/gossip.py",
        "mpirun -np 4 python examples/compressed_gradients.py",
        "python -m experiments list",
        "python -m experiments run consensus",
        "python -m experiments report consensus",
    ]


def test_files_that_are_named_exist() -> None:
    listing = README.split("## Where things are")[1]
    for name in re.findall(r"^    ([a-z_]+(?:\.py|/))", listing, flags=re.MULTILINE):
        assert (launch.ROOT / name).exists(), name
    for name in re.findall(r"\]\(((?:docs|environment)/[^)]*)\)", README):
        assert (launch.ROOT / name).exists(), name
