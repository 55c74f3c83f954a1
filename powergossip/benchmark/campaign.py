"""All runs of an entry in a tier: each setting with the tuning seed, then the best ones."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import (
    FINAL,
    RESULT,
    SEEDS,
    TASKS,
    TRIES,
    TUNING,
    TUNING_SEED,
    BenchmarkTask,
    Values,
)
from powergossip.errors import BadInput
from powergossip.runner.runner import Experiment, Folder, Run

PROGRAM = "powergossip.benchmark.entry_runs"


class Campaign:
    """The runs of an entry on some tasks.

    Args:
        method: Name or path of the entry, for the program of its runs.
        output: Folder of all campaigns.
    """

    def __init__(self, entry: Entry, method: str, tier: str, names: list[str], output: Path):
        self.entry, self.tier = entry, tier
        self.tasks = [TASKS[name] for name in names]
        self.folder = Folder(f"{entry.name}-{tier}", output)
        self._method = method
        stages: list[Callable[[Any], list[Run]]] = [
            lambda _: [self.tuning(task) for task in self.tasks],
            lambda _: [self.final(task) for task in self.tasks if self._is_done(self.tuning(task))],
        ]
        self.experiment = Experiment(
            f"{entry.name}, {tier}", stages, lambda *_: "", independent=True
        )

    def _is_done(self, run: Run) -> bool:
        return self.folder.state(run) == "done"

    def tuning(self, task: BenchmarkTask) -> Run:
        """The runs of all settings on held-out data."""
        settings = list(self.entry.settings[task.name][: TRIES[self.tier]])
        return self._run(task, TUNING, settings, [TUNING_SEED])

    def final(self, task: BenchmarkTask) -> Run:
        """The runs of the best setting. Raises ValueError if it is not known yet."""
        return self._run(task, FINAL, [self.chosen(task)], list(SEEDS))

    def chosen(self, task: BenchmarkTask) -> Values:
        runs = self._result(self.tuning(task))["runs"]
        best = max(range(len(runs)), key=lambda i: score(task, runs[i]))  # the first of equals
        return dict(self.entry.settings[task.name][best])

    def _run(self, task: BenchmarkTask, stage: str, settings: list[Values], seeds: Any) -> Run:
        values = {
            "method": self._method,
            "code": self.entry.code,
            "task": task.name,
            "version": task.version,
            "tier": self.tier,
            "stage": stage,
            "settings": settings,
            "seeds": seeds,
        }
        return Run(PROGRAM, values, {"task": task.name, "stage": stage})

    def _result(self, run: Run) -> dict[str, Any]:
        if not self._is_done(run):
            raise ValueError(f"{run.labels} is not done")
        file = self.folder.of(run) / RESULT
        try:
            return dict(json.loads(file.read_text()))
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{file} is missing or damaged; remove its folder and run again"
            ) from error

    def results(self) -> dict[str, Any]:
        """Known facts of each task whose runs are done."""
        found = {}
        for task in self.tasks:
            if not (self._is_done(self.tuning(task)) and self._is_done(self.final(task))):
                continue
            tuned = self._result(self.tuning(task))["runs"]
            final = self._result(self.final(task))
            runs = final.pop("runs")
            found[task.name] = {
                "version": task.version,
                "data": runs[0]["data"],
                "tried": [
                    {"setting": setting, "score": _finite(score(task, run))}
                    for setting, run in zip(self.entry.settings[task.name], tuned, strict=False)
                ],
                "setting": self.chosen(task),
                "runs": [
                    {key: run[key] for key in ("seed", "diverged", "evaluations")} for run in runs
                ],
                **final,
            }
        return found


def score(task: BenchmarkTask, run: Mapping[str, Any]) -> float:
    """The last measure of the mean model, larger is better; −∞ for a run that diverged."""
    if run["diverged"] or not run["evaluations"]:
        return -math.inf
    return task.measure.sign * float(run["evaluations"][-1]["mean"])


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
