"""Studies: runs of named cases, in stages, and tables of their outcomes.

A case is a combination of names, such as a method and a column of the table. It has a run for each
seed or, while settings are compared, for each setting.
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powergossip.formatting import markdown, spread
from powergossip.runner.runner import Experiment, Results, Run, Values
from powergossip.runs import figures
from powergossip.runs.metrics import last_rows, last_values, select_rows
from powergossip.runs.summaries import merge_bits

if TYPE_CHECKING:
    from pandas import DataFrame

Curve = tuple[list[float], list[float]]  # x and y
Case = tuple[Any, ...]  # a name on each axis of a grid
Cases = dict[Case, list[Run]]
Axes = Mapping[str, Mapping[Any, Values]]  # {label: {name: values}}

SEEDS = (1, 2, 3)
TUNING_SEED = 11
VALIDATION_RATIO = 0.1  # fraction of the training data held out in runs that compare settings
# Of runs that compare settings. They do not see the test data.
TUNING: Values = {
    "validation_ratio": VALIDATION_RATIO,
    "seed": TUNING_SEED,
    "evaluate_workers": False,
    "evaluate_test_data": False,
}
RELAY = "relay-sgd"
MERGE = (
    "MB with a merge include the merge into the mean model, one all-reduce, where models differ."
)


@dataclass(frozen=True)
class Outcome:
    """The runs of a case, and the rows of each."""

    runs: Sequence[Run]
    rows: Sequence["DataFrame"]

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of the first run."""
        return self.runs[0].values

    def last(
        self, name: str, worst: Callable[[Sequence[float]], float] = min, **tags: str
    ) -> list[float]:
        """The value of each run after its last evaluation, the worst of several workers."""
        return [float(worst(last_values(rows, name, **tags).tolist())) for rows in self.rows]

    def largest(self, column: str) -> float:
        """The largest value of a column of all rows, mean over the runs."""
        return sum(float(rows[column].max()) for rows in self.rows) / len(self.rows)

    def curve(self, measure: str, x: str = "epoch") -> Curve:
        """A column and the measure of the mean model, by evaluation: means over the runs."""
        import pandas as pd

        found = pd.concat([select_rows(rows, measure, split="test_avg") for rows in self.rows])
        means = found.groupby("epoch", as_index=False)[[*{x, "value"} - {"epoch"}]].mean()
        return means[x].tolist(), means["value"].tolist()

    def mean(self, measure: str) -> float:
        """The measure of the mean model at the end, mean over the runs."""
        values = self.last(measure, split="test_avg")
        return sum(values) / len(values)

    def ended(self, measure: str, split: str = "test_avg") -> "Outcome":
        """Only the runs that did not diverge, before or after their first evaluation."""
        kept = [
            (run, rows)
            for run, rows in zip(self.runs, self.rows, strict=True)
            if score(rows, measure, split) > float("-inf")
            and last_rows(rows, measure, split=split)["epoch"].max() == run.values["num_epochs"]
        ]
        return Outcome([run for run, _ in kept], [rows for _, rows in kept])

    def diverged(self, measure: str, split: str = "test_avg") -> int:
        """The number of runs that diverged."""
        return len(self.runs) - len(self.ended(measure, split).runs)

    def divergence(self, measure: str) -> str:
        """The number of runs that diverged in words, or ""."""
        n = self.diverged(measure)
        if n and len(self.runs) == 1:
            return "diverged"
        return f"{n} of {len(self.runs)} diverged" if n else ""

    @property
    def merge(self) -> float:
        """Bits that a worker would send in a merge to the mean model, 0 if all models agree."""
        return sum(map(merge_bits, self.rows)) / len(self.rows)

    @property
    def bits(self) -> float:
        """Bits sent by a worker in a run, mean over the workers and runs. Rows have worker 0's."""
        sent = self.largest("bits")
        if self.values.get("learning") != RELAY:
            return sent
        from powergossip import topologies

        n = self.values["n_workers"]
        trees = topologies.make(self.values["topology"], n).trees or ()
        of_worker_0 = sum(0 in edge for tree in trees for edge in tree) / len(trees)
        return sent * 2 * (n - 1) / n / of_worker_0


Outcomes = Mapping[Case, Outcome]
Columns = dict[str, Callable[[Outcome], str]]  # header: cell
Report = Callable[[Outcomes, Path], str]
Table = list[list[str]]  # [line][cell], the header first
STEP = ("data", "gradient", "averaging", "communication", "update")  # phases of a step

# A number with a unit that may move to the header of its column.
MEASURED = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?(?: ± [\d.]+)?) ?(%|×|ms|s|steps|[kM]?bit)")
BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6}


def grid(
    values: Values,
    axes: Axes,
    seeds: Sequence[int] = (),
    run: Callable[..., Run] = Run,
    **of_run: Any,
) -> Cases:
    """Return the runs of each combination of names on the axes.

    Args:
        values: Values of all runs.
        axes: Names on each axis, with their further values.
        seeds: Seeds of a case's runs. (): one run, with the seed of the values.
        run: Kind of the runs.
        of_run: Further attributes of each run, such as processes.
    """
    cases: Cases = {}
    for chosen in product(*(axis.items() for axis in axes.values())):
        case = tuple(name for name, _ in chosen)
        parts = (values, *(further for _, further in chosen))
        of_case = {key: value for part in parts for key, value in part.items()}
        labels = dict(zip(axes, case, strict=True))
        of_seeds: list[Values] = [{"seed": seed} for seed in seeds] or [{}]
        cases[case] = [run("train", of_case | s, labels | s, **of_run) for s in of_seeds]
    return cases


def study(
    title: str,
    cases: Cases,
    report: Report,
    *later: Callable[[Outcomes], Cases],
) -> Experiment:
    """Return the experiment that carries out cases and reports the outcomes of the last stage.

    Args:
        later: Cases of each further stage, given the outcomes of the one before.
    """

    def outcomes(stage: int, results: Results) -> Outcomes:
        return {
            case: Outcome(runs, [results(run) for run in runs])
            for case, runs in of_stage(stage, results).items()
        }

    def of_stage(stage: int, results: Results) -> Cases:
        return later[stage - 1](outcomes(stage - 1, results)) if stage else cases

    def runs(stage: int) -> Callable[[Results], list[Run]]:
        return lambda results: [
            run for of_case in of_stage(stage, results).values() for run in of_case
        ]

    def written(results: Results, folder: Path) -> str:
        found = outcomes(len(later), results)
        folder.mkdir(parents=True, exist_ok=True)
        return report(found, folder)

    return Experiment(title, [runs(stage) for stage in range(1 + len(later))], written)


def tuned(
    title: str,
    values: Values,
    labels: Sequence[str],
    methods: Mapping[Case, Values],
    settings: Mapping[Case, Sequence[Values]],
    few_epochs: Values,
    promoted: Callable[[list[Values]], list[Values]],
    measure: str,
    report: Report,
) -> Experiment:
    """Return an experiment of three stages:

    1. All settings of each method with `few_epochs`, on held-out data.
    2. The promoted ones with all epochs, on the same data.
    3. The best of them with further seeds and all training data, evaluated on the test data.

    Args:
        labels: Labels of the names in a case.
        settings: Settings tried for each method, with the same keys in each.
        promoted: Settings of the second stage, given those of the first one, best first.
        measure: Measure of the mean model: accuracy, or one of which smaller is better.
    """

    def run(case: Case, setting: Values, further: Values) -> Run:
        of_run = values | methods[case] | setting | further
        return Run("train", of_run, dict(zip(labels, case, strict=True)) | setting)

    def ranked(case: Case, outcome: Outcome) -> list[Values]:
        scores = [score(rows, measure, "valid_avg") for rows in outcome.rows]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        keys = settings[case][0]
        return [{key: outcome.runs[i].values[key] for key in keys} for i in order]

    return study(
        title,
        {case: [run(case, s, few_epochs | TUNING) for s in settings[case]] for case in methods},
        report,
        lambda outcomes: {
            case: [run(case, s, TUNING) for s in promoted(ranked(case, outcome))]
            for case, outcome in outcomes.items()
        },
        lambda outcomes: {
            case: [run(case, ranked(case, outcome)[0] | {"seed": seed}, {}) for seed in SEEDS]
            for case, outcome in outcomes.items()
        },
    )


def totals(rows: "DataFrame") -> "DataFrame":
    """Columns steps, seconds and bits by epoch, all since the start.

    The seconds are without evaluation and checkpoints.
    """
    phases = select_rows(rows, "phase_seconds")
    of_step = phases[phases["phase"].isin(STEP)]
    found = of_step.groupby("epoch").agg(seconds=("value", "sum"), bits=("bits", "max"))
    return found.assign(steps=phases[phases["phase"] == "gradient"].set_index("epoch")["instances"])


def score(rows: "DataFrame", measure: str, split: str) -> float:
    """The measure, negated unless it is the accuracy; −∞ for a run that diverged."""
    value = last_values(rows, measure, split=split)
    if value.empty or not value.notna().all():
        return float("-inf")
    return float(value.iloc[0]) * (1 if measure == "accuracy" else -1)


def table(file: Path, lines: Table) -> str:
    """Write a table as CSV, with units in its header, and return it in Markdown."""
    columns = [_unit_in_header(list(column)) for column in zip(*lines, strict=True)]
    header, *rows = zip(*columns, strict=True)
    with file.open("w", newline="") as opened:
        csv.writer(opened, lineterminator="\n").writerows([header, *rows])
    return f"{markdown(header, rows)}\n\n[{file.name}]({file.name})"


def _unit_in_header(column: list[str]) -> list[str]:
    """Move the unit of a column's numbers to its header if they have one: of bits the largest."""
    header, *cells = column
    found = [MEASURED.fullmatch(cell) for cell in cells]
    units = {of[2] for of in found if of}
    if not units or (len(units) > 1 and not units <= BITS.keys()):
        return column
    unit = max(units, key=lambda name: BITS.get(name, 1.0))

    def number(of: re.Match[str]) -> str:
        return of[1] if of[2] == unit else f"{float(of[1]) * BITS[of[2]] / BITS[unit]:.6g}"

    texts = [number(of) if of else cell for of, cell in zip(found, cells, strict=True)]
    return [f"{header} ({unit})", *texts]


def lines(
    outcomes: Outcomes,
    names: Sequence[str],
    columns: Columns,
    settings: Columns | None = None,
    diverged: Callable[[Outcome], str] = lambda outcome: "",
) -> Table:
    """Return a table with a line for each case.

    Args:
        names: Headers of the names in a case.
        columns: Measured columns.
        settings: Further columns, of runs that diverged too.
        diverged: Text in place of the measured columns, unless "".
    """
    settings = settings or {}
    found = [[*names, *columns, *settings]]
    for case, outcome in outcomes.items():
        text = diverged(outcome)
        measured = [text] + [""] * (len(columns) - 1)
        if not text:
            measured = [cell(outcome) for cell in columns.values()]
        found.append([*case, *measured, *(cell(outcome) for cell in settings.values())])
    return found


def crossed(
    outcomes: Outcomes,
    corner: str,
    cell: Callable[[Outcome], str],
    column: Callable[[Any], str] = str,
) -> Table:
    """Return a table of cases of two names, the line's and the column's.

    Args:
        corner: Header of the first column.
        column: Text of a column's name.
    """
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*outcomes, strict=True))
    return [
        [corner, *map(column, columns)],
        *([str(row), *(cell(outcomes[row, of]) for of in columns)] for row in rows),
    ]


def quality(measure: str, places: int = 2) -> Columns:
    """Columns of a measure: mean ± standard deviation over the seeds."""
    factor, unit, worst = _units(measure)

    def text(values: Sequence[float]) -> str:
        return f"{spread([factor * value for value in values], places)}{unit}"

    return {
        f"{measure.replace('_', ' ')}, mean model": lambda o: text(
            o.last(measure, split="test_avg")
        ),
        "worst worker": lambda o: text(o.last(measure, worst, split="test")),
    }


def size(plain: Outcome, name: str = "D-PSGD", places: int = 1) -> Columns:
    """Columns of the megabytes that a worker sends, absolute and relative to an outcome."""
    return {
        "MB sent per worker": lambda o: f"{o.bits / 8e6:.{places}f}",
        f"less than {name}": lambda o: f"{plain.bits / o.bits:.1f}×",
    }


def traffic(plain: Outcome, name: str = "D-PSGD") -> Columns:
    """The same, and those of the mean model, with a merge of models that differ, see MERGE."""

    def bits(outcome: Outcome) -> float:
        return outcome.bits + outcome.merge

    return {
        **size(plain, name),
        "MB with a merge": lambda o: f"{bits(o) / 8e6:.1f}",
        f"less than {name} with merges": lambda o: f"{bits(plain) / bits(o):.1f}×",
    }


def megabytes(places: int = 1) -> Columns:
    """Columns of the megabytes only, without and with a merge."""
    return {
        "MB sent per worker": lambda o: f"{o.bits / 8e6:.{places}f}",
        "MB with a merge": lambda o: f"{(o.bits + o.merge) / 8e6:.{places}f}",
    }


def draw_by_size(outcomes: Outcomes, measure: str, path: Path) -> None:
    """Draw the measure by megabytes sent: a point for each case, with the range of its seeds.

    PowerGossip has a color.
    """
    factor, unit, _ = _units(measure)
    points = {
        ", ".join(case): (
            outcome.bits / 8e6,
            [factor * value for value in outcome.last(measure, split="test_avg")],
        )
        for case, outcome in outcomes.items()
        if not outcome.diverged(measure)
    }
    y = f"test {measure} of the mean model" + (f",{unit}" if unit else "")
    merge = max(outcome.merge for outcome in outcomes.values()) / 8e6
    x = f"megabytes sent by a worker, before a merge of {merge:.2f} MB"
    chosen = [label for label in points if "PowerGossip" in label]
    figures.scatter(points, path, x, y, measure == "perplexity", measure == "accuracy", chosen)


def _units(measure: str) -> tuple[float, str, Callable[[Sequence[float]], float]]:
    """Factor, unit, and the function that selects the worst worker."""
    return (100.0, " %", min) if measure == "accuracy" else (1.0, "", max)
