"""The cost of late exchanges, lost workers and lost messages, on the virtual clock.

Sixteen workers on a ring, FashionMNIST, fixed shards with label proportions from a Dirichlet
distribution. All methods have the same learning rate and momentum, which are not tuned.

- message_loss: 0, 1 and 10 % of the messages are lost, at one end or at both ends of an exchange.
- late_exchanges: a worker is 4 times slower, and 10 % of the exchanges arrive 4 seconds late.
- churn: a quarter of the workers die during training.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.study import SEEDS, Axes, Outcome, Outcomes, crossed, grid, study, table
from experiments.tuned_methods import FASHION_MNIST
from powergossip.formatting import counted, spread
from powergossip.runner.runner import Experiment, Values
from powergossip.runs import figures
from powergossip.runs.metrics import select_rows

if TYPE_CHECKING:
    from pandas import DataFrame


FAILING: Values = FASHION_MNIST | {
    "n_workers": 16,
    "reshuffle_data": False,
    "decentralized_data_dirichlet_alpha": 0.1,
    "evaluation_interval": 1,
    "evaluate_workers": False,
}
# Of the experiment with most runs.
LOSING: Values = FAILING | {
    "num_epochs": 4,
    "lr_schedule_milestones": [[3, 0.1]],
    "evaluation_interval": 100,  # the last epoch only
}
STEPS = 117  # of an epoch, a virtual second each: 60,000/(16 · 32)


def _lost(fraction: float, ends: str) -> str:
    """The name of a column."""
    return f"{100 * fraction:g} %, {'both ends' if ends == 'both' else 'one end'}"


_SLOW: Values = {"momentum": 0.9, "learning_rate": 0.02}
_POWER: Values = {"optimizer": "power-gossip", "optimizer_num_iterations": 8}
METHODS: dict[str, Values] = {
    "D-PSGD": {"optimizer": "dpsgd", **_SLOW},
    "quasi-global momentum": {
        "optimizer": "dpsgd",
        "learning": "quasi-global-momentum",
        **_SLOW,
    },
    "exact diffusion": {"optimizer": "dpsgd", "learning": "exact-diffusion", **_SLOW},
    "gradient tracking": {
        "optimizer": "dpsgd",
        "learning": "gradient-tracking",
        "overlapping": False,
        **_SLOW,
    },
    "CHOCO, sign": {"optimizer": "choco", **_SLOW},
    "PowerGossip, 8 iterations": {**_POWER, **_SLOW},
    "PowerGossip, 8 iterations, random directions": {
        **_POWER,
        "optimizer_warm_start": False,
        **_SLOW,
    },
    "PowerGossip, exact diffusion": {**_POWER, "learning": "exact-diffusion", **_SLOW},
    "push-sum": {"optimizer": "push-sum", **_SLOW},
    "push-sum, running sums": {"optimizer": "push-sum", "optimizer_running_sums": True, **_SLOW},
    "RelaySGD, chain": {
        "optimizer": "dpsgd",
        "learning": "relay-sgd",
        "topology": "chain",
        **_SLOW,
    },
}
FRACTIONS = (0.01, 0.1)
ENDS = ("both", "one")
LOSSES: dict[str, Values | None] = {"0": None} | {
    _lost(fraction, ends): {"fraction": fraction, "ends": ends}
    for fraction in FRACTIONS
    for ends in ENDS
}
LATE: Values = {"speeds": {"0": 0.25}, "late": {"fraction": 0.1, "seconds": 4.0}}
POLICIES: dict[str, Values] = {
    "synchronous": {},
    "bounded, 4": {"gossip": "bounded", "max_delay": 4},
    "asynchronous": {"gossip": "asynchronous"},
}
OF_LATE = ("D-PSGD", "CHOCO, sign", "PowerGossip, 8 iterations", "exact diffusion")
OF_CHURN = ("D-PSGD", "PowerGossip, 8 iterations", "CHOCO, sign", "exact diffusion")
CHURN = {"a quarter dies": 0.25, "nobody dies": 0.0}


def message_loss(values: Values = LOSING, seeds: Sequence[int] = SEEDS[:1]) -> Experiment:
    """Accuracy with lost messages."""
    columns = {
        column: {"scenario": {} if loss is None else {"loss": loss}}
        for column, loss in LOSSES.items()
    }

    def draw(outcomes: Outcomes, path: Path) -> None:
        percent = [0.0, *(100 * fraction for fraction in FRACTIONS)]
        panels = {}
        for ends, title in (("both", "at both ends"), ("one", "at one end")):
            columns = ("0", *(_lost(fraction, ends) for fraction in FRACTIONS))
            panels[title] = {
                method: (percent, [100 * _mean(_accuracies(outcomes[method, c])) for c in columns])
                for method in METHODS
            }
        figures.curves(panels, path, "messages lost (%)", "accuracy of the mean model (%)")

    title = "accuracy with lost messages, at one end or at both ends of an exchange"
    return _experiment(title, values, tuple(METHODS), columns, seeds, draw)


def late_exchanges(
    values: Values = FAILING, seeds: Sequence[int] = SEEDS[:2], late: Values = LATE
) -> Experiment:
    """Accuracy against virtual time with a slow worker and late exchanges."""
    columns = {policy: {"scenario": late, **more} for policy, more in POLICIES.items()}

    def draw(outcomes: Outcomes, path: Path) -> None:
        panels = _curves(outcomes, "seconds")
        figures.curves(panels, path, "virtual seconds", "accuracy of the mean model", log_x=True)

    def with_seconds(outcome: Outcome) -> str:
        return f"{_accuracy(outcome)} ({float(outcome.rows[0]['seconds'].max()):.0f} s)"

    title = "accuracy against virtual time: a worker is 4 times slower, 10 % of exchanges are late"
    return _experiment(title, values, OF_LATE, columns, seeds, draw, with_seconds)


def churn(
    values: Values = FAILING,
    seeds: Sequence[int] = SEEDS,
    first: float = STEPS,
    last: float = 4 * STEPS,
) -> Experiment:
    """Accuracy while a quarter of the workers die between two virtual times."""
    columns: dict[str, Values] = {}
    for name, fraction in CHURN.items():
        deaths = {"fraction": fraction, "from": first, "until": last}
        columns[name] = {"scenario": {"deaths": deaths, "detection": 1.0} if fraction else {}}

    def draw(outcomes: Outcomes, path: Path) -> None:
        panels = _curves(outcomes, "epoch")
        rows = outcomes[OF_CHURN[0], "a quarter dies"].rows[0]
        alive = rows[rows["name"] == "workers"]
        curve = (alive["epoch"].tolist(), alive["value"].tolist())
        panels["workers alive, first seed"] = {"workers": curve}
        figures.curves(panels, path, "epoch", "accuracy of the mean model")

    title = "accuracy while a quarter of the workers die"
    return _experiment(title, values, OF_CHURN, columns, seeds, draw)


def _experiment(
    title: str,
    values: Values,
    methods: Sequence[str],
    columns: Mapping[str, Values],
    seeds: Sequence[int],
    draw: Callable[[Outcomes, Path], None],
    cell: Callable[[Outcome], str] = lambda outcome: _accuracy(outcome),
) -> Experiment:
    """An experiment of one stage, with a run for each method, column of the table, and seed."""

    def report(outcomes: Outcomes, folder: Path) -> str:
        several = f"mean ± standard deviation of {counted(len(seeds), 'seed')}"
        note = (
            f"Accuracy of the mean model of {values['n_workers']} workers "
            f"after {counted(values['num_epochs'], 'epoch')}, "
            f"{several if len(seeds) > 1 else 'one seed'}, on the virtual clock."
        )
        draw(outcomes, folder / "figure.svg")
        found = table(folder / "table.csv", crossed(outcomes, "method", cell))
        return "\n\n".join([note, f"![{title}](figure.svg)", found])

    axes: Axes = {"method": {method: METHODS[method] for method in methods}, "case": columns}
    return study(title, grid(values, axes, seeds), report)


def _accuracy(outcome: Outcome) -> str:
    found = _accuracies(outcome)
    diverged = found.count(None)
    if diverged:
        return f"{diverged} of {len(found)} diverged" if len(found) > 1 else "diverged"
    return f"{spread([100 * value for value in found if value is not None], 2)} %"


def _accuracies(outcome: Outcome) -> list[float | None]:
    """The measure of the mean model at the end, None for a run that diverged."""
    found: list[float | None] = []
    for rows in map(_tested, outcome.rows):
        ended = len(rows) and rows["epoch"].max() == outcome.values["num_epochs"]
        found.append(float(rows["value"].iloc[-1]) if ended else None)
    return found


def _tested(rows: "DataFrame") -> "DataFrame":
    """Rows of evaluations. A run that diverged before the first one has none."""
    return select_rows(rows, "accuracy", split="test_avg")


def _mean(values: Sequence[float | None]) -> float:
    """The mean, 0.1 for a run that diverged: that of a guess."""
    return sum(0.1 if value is None else value for value in values) / len(values)


def _curves(outcomes: Outcomes, x: str) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """x and accuracies by epoch, means over the seeds, by method and column."""
    import pandas as pd

    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for (method, column), outcome in outcomes.items():
        rows = pd.concat([_tested(rows) for rows in outcome.rows])
        means = rows.groupby("epoch")[["seconds", "value"]].mean().reset_index()
        panels.setdefault(method, {})[column] = means[x].tolist(), means["value"].tolist()
    return panels
