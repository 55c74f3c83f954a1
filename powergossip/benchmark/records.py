"""Records: the fewest megabytes with which an entry reaches a target, in the full tier."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powergossip import formatting
from powergossip.benchmark.comparison import Line, deviation, lines
from powergossip.benchmark.tasks import FULL, TASKS, BenchmarkTask

FILE = "RECORDS.md"
TARGETS: Mapping[str, float] = {"fashion_mnist_sorted": 0.88, "text_same": 2.8}  # of each track
CHANCE = 0.01  # of passing without being better than the target

ABOUT = """# Records

**How few megabytes are enough?** Each track has a task of [the benchmark](docs/benchmark.md), a
target and one number: the megabytes that the busiest of 8 workers has sent when the mean model
passes the target. Where the workers' models differ, it includes a merge, one all-reduce.

- A method passes at the first evaluation, one for each quarter of training, at which the mean over
  the seeds 1, 2 and 3 is beyond the target with p < .01 (Student's t test, one-sided).
- The task fixes data, model, steps and batches. A method tries at most 8 settings, on held-out
  data, in the tier `full`. A record is a file of results: source, settings and all evaluations.
  `powergossip-benchmark check` passes, also with a repetition.
- Central training (`mean-gradient`) ends at 90.5 % and 2.26 bits per byte. The targets are such
  that methods with compressed messages pass them.

```
powergossip-benchmark run my_method.py
powergossip-benchmark run my_method.py --tier full --task {tasks}
powergossip-benchmark submit my_method
```

The second command has 11 runs for each track, of 1 to 3 minutes of a core each. `submit` is for a
clone of the repository: it writes the files of a pull request and checks them. These are
`powergossip/benchmark/submissions/NAME.json`, and this page with its tables."""


@dataclass(frozen=True)
class Record:
    """The first evaluation at which an entry passes.

    Attributes:
        values: The measure of the mean model, one for each seed.
        chance: The p value of the test.
    """

    line: Line
    step: int
    megabytes: float
    values: Sequence[float]
    chance: float


def record(line: Line) -> Record | None:
    """None if the entry does not pass."""
    for at in zip(*(run["evaluations"] for run in line.runs), strict=False):
        values = [float(of_run["mean"]) for of_run in at]
        chance = chance_of(values, TARGETS[line.task.name], line.task)
        if chance < CHANCE and not line.diverged:
            megabytes = sum(of_run["MB"] for of_run in at) / len(at) + line.merge
            return Record(line, at[0]["step"], megabytes, values, chance)
    return None


def chance_of(values: Sequence[float], target: float, task: BenchmarkTask) -> float:
    """The p value of the one-sided t test that the mean is better than a target."""
    from scipy.stats import t

    n, sign = len(values), 1 if task.measure.larger_is_better else -1
    gain = sign * (sum(values) / n - target)
    deviates = max(deviation(values), 1e-9)  # equal values
    return float(t.sf(gain * math.sqrt(n) / deviates, max(1, n - 1)))


def track(task: BenchmarkTask, entries: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The records of a task, fewest megabytes first."""
    found = [of for line in lines(task, FULL, entries)[0] if (of := record(line))]
    return sorted(found, key=lambda of: of.megabytes)


def title(task: BenchmarkTask) -> str:
    """The target in words."""
    unit = " %" if task.measure.factor == 100 else f" {task.measure.title}"
    return f"{task.measure.factor * TARGETS[task.name]:g}{unit}"


def page(entries: Sequence[Mapping[str, Any]]) -> str:
    """The contents of RECORDS.md."""
    parts = [ABOUT.replace("{tasks}", " --task ".join(TARGETS))]
    for name in TARGETS:
        task = TASKS[name]
        measure, of_task = task.measure, track(task, entries)
        header = ["", "MB", "entry", f"{measure.title}, then", "p", "steps", "date", "commit"]
        rows = [
            [
                str(rank),
                f"**{formatting.short(of.megabytes)}**",
                of.line.name,
                formatting.spread([measure.factor * v for v in of.values], measure.places),
                f"{of.chance:.2g}",
                str(of.step),
                *(str(of.line.found["made"].get(key, "")) for key in ("date", "commit")),
            ]
            for rank, of in enumerate(of_task, 1)
        ]
        about = f"{task.title[:1].upper()}{task.title[1:]} (`{name}`), 8 workers."
        parts += [f"## Megabytes to {title(task)}", about, formatting.markdown(header, rows)]
    return "\n\n".join(parts) + "\n"


def sentence(task: BenchmarkTask, name: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """The place of an entry in a track, or why it has none."""
    of_task, goal = track(task, entries), f"{task.name}, {title(task)}"
    for rank, of in enumerate(of_task, 1):
        if of.line.name == name:
            place = f"{formatting.ordinal(rank)} of {len(of_task)}"
            return f"{goal}: {place}, for {formatting.short(of.megabytes)} MB"
    own = next((line for line in lines(task, FULL, entries)[0] if line.name == name), None)
    if own is None:
        return f"{goal}: no results; run it with --tier {FULL} --task {task.name}"
    if own.diverged:
        return f"{goal}: not passed, since {formatting.counted(own.diverged, 'run')} diverged"
    chance = chance_of(own.last("mean"), TARGETS[task.name], task)
    shown = formatting.spread(
        [task.measure.factor * v for v in own.last("mean")], task.measure.places
    )
    return f"{goal}: not passed, {shown} in the end, p = {chance:.2g}"
