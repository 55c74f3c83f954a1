"""The README's commands run, and its tables agree with the code and the reports."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from powergossip import algorithms, compressors, tasks, topologies
from powergossip.algorithms import aggregation, ddp_hooks
from powergossip.benchmark import comparison, page, results
from powergossip.benchmark.tasks import QUICK, TASKS
from tests.harness import launch

README = (launch.ROOT / "README.md").read_text()
CONTRIBUTING = (launch.ROOT / "CONTRIBUTING.md").read_text()
RUNNING = (launch.ROOT / "docs" / "running.md").read_text()


BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


def run(command: str, *more: str, cwd: Path = launch.ROOT) -> subprocess.CompletedProcess[str]:
    words = [
        str(launch.ROOT / word) if word.endswith(".py") else word for word in shlex.split(command)
    ]
    place = words.index("python")
    # A script may run in a fork, which starts fast.
    words[place : place + 1] = [sys.executable] if "-m" in words else launch.stand_in()
    with launch.one_mpirun_at_a_time() if words[0] == "mpirun" else nullcontext():
        return subprocess.run(
            [*words, *more],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            capture_output=True,
            timeout=240,
        )


TRAINING = [
    line
    for line in COMMANDS
    if "python train.py" in line and not re.search("--help|--config|examples", line)
]


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_run(command: str, tmp_path: Path) -> None:
    """With one epoch. CI runs `make train` to its end."""
    ended = run(command, "num_epochs=1", "--output-dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "test accuracy, mean model" in ended.stdout
    assert (tmp_path / "figure.png").exists()


def test_the_consensus_command_runs_as_it_stands(tmp_path: Path) -> None:
    (command,) = [line for line in COMMANDS if "gossip_run.py" in line]
    ended = run(command, "--output-dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "uncompressed" in ended.stdout
    assert (tmp_path / "figure.png").exists()


def test_the_map_has_every_file_and_folder_of_the_top_level() -> None:
    listing = CONTRIBUTING.split("## Map of the repository")[1].split("##")[0]
    shown = re.findall(r"^    ([a-z_]+(?:\.py|/))", listing, flags=re.MULTILINE)
    tracked = subprocess.check_output(["git", "ls-files"], cwd=launch.ROOT, text=True).split()
    folders = {name.split("/")[0] + "/" for name in tracked if "/" in name if name[0] != "."}
    programs = {name for name in tracked if "/" not in name and name.endswith(".py")}
    assert sorted(shown) == sorted(folders | programs)
    assert len(shown) == 13


def test_every_row_of_a_registry_is_in_the_table() -> None:
    table = RUNNING.split("## Methods, topologies, tasks")[1].split("##")[0]
    named = set(re.findall(r"`([^`]+)`", table))
    registries = (
        algorithms.AVERAGING,
        aggregation.AGGREGATIONS,
        ddp_hooks.HOOKS,
        compressors.COMPRESSORS,
        topologies.TOPOLOGIES,
        tasks.TASKS,
    )
    assert {row for registry in registries for row in registry} <= named


def test_the_table_of_the_benchmark_has_the_published_results() -> None:
    section = README.split("## Is my method better?")[1].split("##")[0]
    shown = re.findall(r"^\| (?!entry|---)(\S+) \| (.*) \|$", section, re.MULTILINE)
    assert len(shown) >= 2
    entries = results.read_all([results.OF_LIBRARY])
    columns = [
        ("fashion_mnist_same", (1, 5)),
        ("fashion_mnist_sorted", (1,)),
        ("text_same", (1, 5)),
    ]
    expected: dict[str, list[str]] = {}
    for task, places in columns:
        for row in page.table(comparison.lines(TASKS[task], QUICK, entries)[0])[1:]:
            expected.setdefault(row[0], []).extend(row[place] for place in places)
    for name, cells in shown:
        assert cells.split(" | ") == expected[name], " | ".join(expected[name])
