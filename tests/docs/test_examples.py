"""Examples run unchanged: in one process and in several."""

import importlib.util
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launch
from tests.harness.examples import EXAMPLES, PROCESSES


@dataclass
class Trained:
    """An example of a task, for train.py."""

    arguments: list[str]
    metric: str  # its line in the table of a run
    bounds: tuple[float, float]


TASKS = {
    "tabular.py": Trained(
        ["task=examples.tabular:task", "task_options.file=diabetes.csv"],
        "test r2, mean model",
        (0.35, 0.65),
    ),
    "tokens.py": Trained(
        [
            "task=examples.tokens:task",
            f"task_options.files='{launch.ROOT / 'docs/[r-w]*.md'}'",
            "num_epochs=1",
        ],
        "test perplexity, mean model",
        (5, 23),  # that of single bytes by their frequencies is 31
    ),
}


def test_every_example_has_its_row() -> None:
    assert sorted([*EXAMPLES, *TASKS, "fsdp.py"]) == sorted(
        p.name for p in (launch.ROOT / "examples").glob("*.py")
    )


def runs() -> Iterator[Any]:
    for name, shown in EXAMPLES.items():
        marks = [pytest.mark.slow] if shown.slow else []
        yield pytest.param(name, None, id=f"{name}-alone", marks=marks if shown.needs else [])
        yield pytest.param(name, PROCESSES, id=f"{name}-together", marks=marks)


@pytest.mark.parametrize(("name", "processes"), list(runs()))
def test_an_example_learns(name: str, processes: int | None) -> None:
    shown = EXAMPLES[name]
    if shown.needs is not None and importlib.util.find_spec(shown.needs) is None:
        pytest.skip(f"{shown.needs} is not installed (make trainers)")
    # Four processes that import torch on a busy machine take long.
    ended = launch.python(
        f"examples/{name}", processes=processes, launcher=shown.launcher, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    (accuracy,) = re.findall(shown.accuracy, ended.stdout)  # only process 0 prints
    assert float(accuracy) > shown.least
    expected = shown.alone if processes is None else shown.together
    assert re.search(expected, ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.slow
def test_sharded_replicas_learn_and_resume_with_other_shards(tmp_path: Path) -> None:
    def ends(processes: int, *arguments: str) -> str:
        given = ["replicas=2", "steps=60", "every=40", f"folder={tmp_path}", *arguments]
        ended = launch.python(
            *("examples/fsdp.py", *given), processes=processes, launcher="torchrun", timeout=240
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    whole = ends(4)
    (bits,) = re.findall(r"mean model: (\d\.\d+) bits per byte", whole)
    assert float(bits) < 3.9
    # 3 rounds of an iteration of rank 8, two of them on one side, one neighbor, 4 bytes an element
    assert "sent by each replica: 183.6 kB" in whole
    for replica in range(2):
        shutil.rmtree(tmp_path / f"replica-{replica}-of-2" / "60")
    again = ends(4)
    assert again.splitlines()[0] == "resumed after step 40"
    assert again.splitlines()[-2:] == whole.splitlines()[-2:]
    assert "resumed after step 60" in ends(2)
    ended = launch.python("examples/fsdp.py", "replicas=1", f"folder={tmp_path}")
    assert ended.returncode == 2
    assert "is of another number of replicas than 1" in ended.stderr


@pytest.mark.parametrize(("name", "processes"), [("tabular.py", PROCESSES), ("tokens.py", None)])
def test_an_example_of_a_task_learns(name: str, processes: int | None, tmp_path: Path) -> None:
    """Four workers, in a folder of their own."""
    if name == "tabular.py":
        assert launch.python(launch.ROOT / "examples" / name, cwd=tmp_path).returncode == 0
    task = TASKS[name]
    ended = launch.python(
        launch.ROOT / "train.py",
        *task.arguments,
        f"n_workers={PROCESSES}",
        processes=processes,
        cwd=tmp_path,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    (value,) = re.findall(rf"{task.metric}\s+(\S+)", ended.stdout)
    assert task.bounds[0] < float(value) < task.bounds[1]
