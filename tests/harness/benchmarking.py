"""Entries of the benchmark and results without runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powergossip.benchmark.comparison import Line
from powergossip.benchmark.tasks import QUICK, TASKS

MINE = """
import algorithms
from powergossip.network import Mean, ToAll

class Half:
    def __init__(self, network, layout, *, weight=0.5):
        self.weight = weight

    def step(self, x):
        received = yield ToAll(x)
        x.lerp_(received.mean(1), self.weight)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

algorithms.AVERAGING["half"] = Half
inf = float("inf")
SETTINGS = SETTINGS_OF_TEST
"""


class Half:
    """A rule without state."""

    def __init__(self, network: Any, layout: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def written(folder: Path, settings: object, name: str = "mine") -> Path:
    path = folder / f"{name}.py"
    path.write_text(MINE.replace("SETTINGS_OF_TEST", repr(settings)))
    return path


def result(
    *means: float, diverged: Sequence[int] = (), data: str = "d", mb: float = 10.0, **more: Any
) -> dict[str, Any]:
    """Results of runs that end with these values."""
    return {
        "version": TASKS["fashion_mnist_same"].version,
        "data": data,
        "setting": {},
        "tried": [],
        "runs": [
            {
                "seed": seed,
                "diverged": seed in diverged,
                "evaluations": [
                    {"step": 10, "mean": 0.5 * mean, "worst": 0.1, "MB": 0.5 * mb, "seconds": 1.0},
                    {"step": 20, "mean": mean, "worst": 0.2, "MB": mb, "seconds": 2.0},
                ],
            }
            for seed, mean in enumerate(means, 1)
        ],
        **more,
    }


def entry_of(name: str, found: dict[str, Any], task: str = "fashion_mnist_same") -> dict[str, Any]:
    tiers = {QUICK: {task: found}}
    return {"name": name, "source": "", "tiers": tiers}


def line(*means: float, name: str = "a", **more: Any) -> Line:
    task = TASKS["fashion_mnist_same"]
    return Line(name, task, task.targets[QUICK], result(*means, **more))
