"""The cost of late exchanges, lost workers and lost messages, on the virtual clock.

Sixteen workers on a ring, FashionMNIST, fixed shards with label proportions from a Dirichlet
distribution. All methods have the same learning rate and momentum, which are not tuned.

- message_loss: 0, 1 and 10 % of the messages are lost, at one end or at both ends of an exchange.
- late_exchanges: a worker is 4 times slower, and 10 % of the exchanges arrive 4 seconds late.
- churn: a quarter of the workers die during training.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.study import SEEDS, Axes, Curve, Outcome, Outcomes, crossed, grid, study, table
from experiments.tuned_methods import FASHION_MNIST
from powergossip.formatting import counted, spread
from powergossip.runner.runner import Experiment, Values
from powergossip.runs import figures

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


_POWER: Values = {"optimizer": "power-gossip", "optimizer_num_iterations": 8}
_PLAIN: Values = {"optimizer": "dpsgd"}
_PUSH_SUM: Values = {"optimizer": "push-sum"}
METHODS: dict[str, Values] = {
    method: {**values, "momentum": 0.9, "learning_rate": 0.02}
    for method, values in {
        "D-PSGD": _PLAIN,
        "quasi-global momentum": _PLAIN | {"learning": "quasi-global-momentum"},
        "exact diffusion": _PLAIN | {"learning": "exact-diffusion"},
        "gradient tracking": _PLAIN | {"learning": "gradient-tracking", "overlapping": False},
        "CHOCO, sign": {"optimizer": "choco"},
        "PowerGossip, 8 iterations": _POWER,
        "PowerGossip, 8 iterations, random directions": _POWER | {"optimizer_warm_start": False},
        "PowerGossip, exact diffusion": _POWER | {"learning": "exact-diffusion"},
        "push-sum": _PUSH_SUM,
        "push-sum, running sums": _PUSH_SUM | {"optimizer_running_sums": True},
        "RelaySGD, chain": _PLAIN | {"learning": "relay-sgd", "topology": "chain"},
    }.items()
}
FRACTIONS = (0.01, 0.1)
LOSSES: dict[str, Values] = {"0": {"scenario": {}}} | {
    _lost(fraction, ends): {"scenario": {"loss": {"fraction": fraction, "ends": ends}}}
    for fraction in FRACTIONS
    for ends in ("both", "one")
}
LATE: Values = {"speeds": {"0": 0.25}, "late": {"fraction": 0.1, "seconds": 4.0}}
POLICIES: dict[str, Values] = {
    "synchronous": {},
    "bounded, 4": {"gossip": "bounded", "max_delay": 4},
    "asynchronous": {"gossip": "asynchronous"},
}
CHOSEN = ("D-PSGD", "CHOCO, sign", "PowerGossip, 8 iterations", "exact diffusion")
CHURNING = ("D-PSGD", "PowerGossip, 8 iterations", "CHOCO, sign", "exact diffusion")


def message_loss() -> Experiment:
    """Accuracy with lost messages."""

    def draw(outcomes: Outcomes, path: Path) -> None:
        percent = [0.0, *(100 * fraction for fraction in FRACTIONS)]
        panels = {}
        for ends, title in (("both", "at both ends"), ("one", "at one end")):
            columns = ("0", *(_lost(fraction, ends) for fraction in FRACTIONS))
            panels[title] = {
                method: (percent, [_shown(outcomes[method, c]) for c in columns])
                for method in METHODS
            }
        figures.curves(panels, path, "messages lost (%)", "accuracy of the mean model (%)")

    title = "accuracy with lost messages, at one end or at both ends of an exchange"
    return _experiment(title, LOSING, tuple(METHODS), LOSSES, SEEDS[:1], draw)


def late_exchanges() -> Experiment:
    """Accuracy against virtual time with a slow worker and late exchanges."""
    columns = {policy: {"scenario": LATE, **more} for policy, more in POLICIES.items()}

    def draw(outcomes: Outcomes, path: Path) -> None:
        panels = _curves(outcomes, "seconds")
        figures.curves(panels, path, "virtual seconds", "accuracy of the mean model", log_x=True)

    def with_seconds(outcome: Outcome) -> str:
        return f"{_accuracy(outcome)} ({float(outcome.rows[0]['seconds'].max()):.0f} s)"

    title = "accuracy against virtual time: a worker is 4 times slower, 10 % of exchanges are late"
    return _experiment(title, FAILING, CHOSEN, columns, SEEDS[:2], draw, with_seconds)


def churn() -> Experiment:
    """Accuracy while a quarter of the workers die between two virtual times."""
    deaths = {"fraction": 0.25, "from": STEPS, "until": 4 * STEPS}
    columns: dict[str, Values] = {
        "a quarter dies": {"scenario": {"deaths": deaths, "detection": 1.0}},
        "nobody dies": {"scenario": {}},
    }

    def draw(outcomes: Outcomes, path: Path) -> None:
        figures.curves(_curves(outcomes, "epoch"), path, "epoch", "accuracy of the mean model")

    title = "accuracy while a quarter of the workers die"
    return _experiment(title, FAILING, CHURNING, columns, SEEDS, draw)


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
    if outcome.diverged("accuracy"):
        return outcome.divergence("accuracy")
    return f"{spread([100 * value for value in outcome.last('accuracy', split='test_avg')], 2)} %"


def _shown(outcome: Outcome) -> float:
    """The accuracy in a figure, of a run that diverged that of a guess."""
    return 10.0 if outcome.diverged("accuracy") else 100 * outcome.mean("accuracy")


def _curves(outcomes: Outcomes, x: str) -> dict[str, dict[str, Curve]]:
    """A column and accuracies, by method and column of the table."""
    panels: dict[str, dict[str, Curve]] = {}
    for (method, column), outcome in outcomes.items():
        panels.setdefault(method, {})[column] = outcome.curve("accuracy", x)
    return panels
