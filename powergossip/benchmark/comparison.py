"""Entries side by side on a task, and pairs of them."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from powergossip.benchmark.tasks import BenchmarkTask

LEVEL = 0.95  # of the interval of a difference


@dataclass(frozen=True)
class Line:
    """An entry's results on a task.

    Attributes:
        resolution: The difference of one test sample, at least half a unit of the last place.
    """

    name: str
    task: BenchmarkTask
    target: float
    found: Mapping[str, Any]
    resolution: float = 0.0

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """The runs that did not diverge, one for each seed."""
        return [run for run in self.found["runs"] if not run["diverged"]]

    @property
    def diverged(self) -> int:
        return len(self.found["runs"]) - len(self.runs)

    def last(self, key: str) -> list[float]:
        """The value of each run after its last evaluation."""
        return [float(run["evaluations"][-1][key]) for run in self.runs]

    @property
    def merge(self) -> float:
        """Megabytes of a worker in a merge to the mean model, 0 if all models agree."""
        return float(self.found.get("merge") or 0)

    @property
    def megabytes(self) -> list[float]:
        """Megabytes of each run for the mean model, with a merge."""
        return [of_run + self.merge for of_run in self.last("MB")]

    @property
    def cost(self) -> float:
        """The mean of the megabytes, ∞ if all runs diverged."""
        return sum(self.megabytes) / len(self.runs) if self.runs else math.inf

    @property
    def quality(self) -> float:
        """The mean model's measure, larger is better. −∞ if a run diverged."""
        if self.diverged:
            return -math.inf
        values = self.last("mean")
        return sum(values) / len(values) * self.task.measure.sign

    def to_target(self, key: str) -> list[float]:
        """The value of each run where the mean model reaches the target, ∞ if it does not.

        Linear between evaluations, but for consensus, where there are many: the first one. The
        value is an upper bound where it is the first evaluation's, see `is_bound`. Megabytes
        include a merge. [] if a run diverged.
        """
        kept, more = [] if self.diverged else self.runs, self.merge if key == "MB" else 0
        return [self._reached(run["evaluations"], key) + more for run in kept]

    @property
    def is_bound(self) -> bool:
        """True if a run has reached the target before its first evaluation."""
        sign = self.task.measure.sign
        return any(sign * (run["evaluations"][0]["mean"] - self.target) >= 0 for run in self.runs)

    def _reached(self, evaluations: Sequence[Mapping[str, Any]], key: str) -> float:
        sign = self.task.measure.sign
        before: Mapping[str, Any] | None = None
        for at in evaluations:
            beyond = sign * (at["mean"] - self.target)
            if beyond >= 0:
                if before is None or self.task.is_consensus:
                    return float(at[key])
                missing = sign * (self.target - before["mean"])
                part = missing / (missing + beyond)
                return float(before[key] + part * (at[key] - before[key]))
            before = at
        return math.inf


def lines(
    task: BenchmarkTask, tier: str, entries: Iterable[Mapping[str, Any]]
) -> tuple[list[Line], list[str]]:
    """The lines of a task, best first, and the names of entries with another version or data.

    Matrices of consensus are computed, so that their last bits depend on the processor. They are
    the same data with any hash.
    """
    results = {
        entry["name"]: entry["tiers"][tier][task.name]
        for entry in entries
        if task.name in entry["tiers"].get(tier, {})
    }
    current = {name: found for name, found in results.items() if found["version"] == task.version}
    if not current:
        return [], list(results)
    ((usual, _),) = Counter(found["data"] for found in current.values()).most_common(1)
    kept = {n: of for n, of in current.items() if task.is_consensus or of["data"] == usual}
    of_data = 1 / task.values_of(tier).get("task_options", {}).get("test_images", math.inf)
    resolution = max(of_data, 0.5 * 10**-task.measure.places / task.measure.factor)
    made = [Line(n, task, task.targets[tier], found, resolution) for n, found in kept.items()]
    made.sort(key=lambda line: line.quality, reverse=True)
    return made, [name for name in results if name not in kept]


@dataclass(frozen=True)
class Pair:
    """The difference of two entries' mean models over the same seeds.

    Attributes:
        difference: Mean of first − second.
        margin: Half of the interval of the mean difference, by Student's t.
        verdict: "better", "worse" or "noise", of the first.
    """

    difference: float
    margin: float
    verdict: str


def pair(first: Line, second: Line) -> Pair:
    """Compare two lines of a task over the seeds that they share.

    A diverged run is worse than any other. The interval of less than two seeds has no ends. It is
    at least the resolution: equal differences of a few seeds prove nothing. It is about the seeds,
    not about other test data.
    """
    from scipy.stats import t

    if first.diverged and second.diverged:
        return Pair(math.nan, math.nan, "noise")
    if first.diverged or second.diverged:
        return Pair(math.nan, math.nan, "worse" if first.diverged else "better")
    second_means = {run["seed"]: run["evaluations"][-1]["mean"] for run in second.runs}
    differences = [
        run["evaluations"][-1]["mean"] - second_means[run["seed"]]
        for run in first.runs
        if run["seed"] in second_means
    ]
    n = len(differences)
    mean, margin = sum(differences) / n if n else math.nan, math.inf
    if n > 1:
        quantile = float(t.ppf(0.5 + LEVEL / 2, n - 1))
        margin = max(quantile * stdev(differences) / math.sqrt(n), first.resolution)
    if not abs(mean) > margin:
        return Pair(mean, margin, "noise")
    return Pair(mean, margin, "better" if first.task.measure.sign * mean > 0 else "worse")
