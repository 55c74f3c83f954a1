"""Examples run unchanged: in one process and in several."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launch

PROCESSES = 4


@dataclass
class Shown:
    """The output of an example, printed once."""

    accuracy: str  # pattern with one group: % of the final model
    alone: str  # pattern in the output of one process,
    together: str  # and of PROCESSES
    least: float = 90.0  # %
    slow: bool = False  # the run of PROCESSES
    launcher: str = "mpirun"
    needs: str | None = None  # a package of the extra `trainers`


# 20 · 11 steps: 2 · 4 · (110 · (64 + 128 + 128 + 10) + 220 · (128 + 10))
OF_A_TRAINER = r"^sent by each worker: 533\.3 kB$"
MEAN_MODEL = r"accuracy of the mean model: (\d+\.\d)%"

EXAMPLES = {
    "accelerate_loop.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        together=OF_A_TRAINER,
        slow=True,
        launcher="torchrun",
        needs="accelerate",
    ),
    "huggingface_trainer.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        together=OF_A_TRAINER,
        slow=True,
        launcher="torchrun",
        needs="transformers",
    ),
    "lightning_trainer.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        together=OF_A_TRAINER,
        slow=True,
        needs="lightning",
    ),
    "compressed_gradients.py": Shown(
        r"accuracy: (\d+\.\d)%",
        alone=r"^sent by each worker: 0\.0 kB$",
        # 240 steps of all-reduces, 2 · 3/4 · 4 bytes per element: 2 · (rows + columns) of each
        # matrix, and all biases: 240 · 1.5 · 4 · (2 · (192 + 256 + 138) + 266)
        together=r"^sent by each worker: 2070\.7 kB$",
        slow=True,
    ),
    "gossip.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        # 240 steps, two neighbors, 4 bytes per element: one side of each matrix per step, in
        # turns, and all biases:
        # 2 · 4 · (120 · (64 + 128 + 128 + 128 + 128 + 10) + 240 · (128 + 128 + 10))
        together=r"^sent by each worker: 1073\.3 kB$",
    ),
    "ddp_hook.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        together=r"^sent by each worker: 1073\.3 kB$",  # as gossip.py
        slow=True,
    ),
    "huggingface_module.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        together=r"^sent by each worker: 536\.6 kB$",  # as gossip.py, with 2 bytes per element
        slow=True,
    ),
    "model_averager.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        together=r"^sent by each worker: 268\.3 kB$",  # gossip.py in every fourth step
        slow=True,
    ),
    "plain_loop.py": Shown(
        MEAN_MODEL,
        alone=r"^sent by each worker: 0\.0 kB$",
        # 20 · 11 steps: 2 · 4 · (110 · (64 + 128 + 128 + 10) + 220 · (128 + 128 + 128 + 10))
        together=r"^sent by each worker: 983\.8 kB$",
        slow=True,
    ),
}


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
    assert sorted({**EXAMPLES, **TASKS}) == sorted(
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
