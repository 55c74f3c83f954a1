"""RelaySGD's table on CIFAR-10, with the published settings, and a small form.

The small form has FashionMNIST and a small CNN instead of CIFAR-10 and VGG-11, and the methods with
momentum. Learning rates relative to those of other methods stay as published, and that of gradient
tracking, which the table lacks, is that of exact diffusion.

References:
    Vogels et al. (2021), arXiv:2110.04175, table 2, and its published program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments import tuned_methods
from experiments.presets import preset
from experiments.study import (
    SEEDS,
    Axes,
    Cases,
    Outcome,
    Outcomes,
    crossed,
    grid,
    quality,
    study,
    table,
)
from powergossip.runner.runner import Experiment, Values

BASE = "cifar10_vgg11"
ALPHAS = (1.0, 0.1, 0.01)  # of the Dirichlet distribution
SMALL = 0.3  # learning rates of the small form, relative to the published ones


@dataclass(frozen=True)
class PresetRow:
    """A row of the table: a preset, the published learning rates, one for each of ALPHAS, and
    changes of the preset."""

    preset: str
    rates: tuple[float, float, float]
    changes: Values = field(default_factory=dict)


WITHOUT_MOMENTUM = {
    "all-reduce": PresetRow("all-reduce", (0.1, 0.1, 0.1)),
    "RelaySGD, two binary trees": PresetRow("relay-sgd", (1.2, 0.6, 0.3)),
    "RelaySGD, chain": PresetRow("relay-sgd-chain", (2.0, 2.0, 1.0)),
    "D-PSGD, ring": PresetRow("dpsgd", (0.4, 0.1, 0.2)),
    "exact diffusion, ring": PresetRow("exact-diffusion", (0.2, 0.2, 0.1)),
    "push-sum, one-peer exponential": PresetRow("push-sum", (0.4, 0.2, 0.2)),
}
WITH_MOMENTUM = {
    "all-reduce, momentum": PresetRow("all-reduce-momentum", (0.1, 0.1, 0.1)),
    "RelaySGD, two binary trees, momentum": PresetRow("relay-sgd-momentum", (0.6, 0.3, 0.15)),
    "RelaySGD, chain, momentum": PresetRow("relay-sgd-chain-momentum", (0.5, 0.5, 0.125)),
    "D-PSGD, ring, momentum": PresetRow("dpsgd-momentum", (0.1, 0.05, 0.0125)),
    "quasi-global momentum, ring": PresetRow("quasi-global-momentum", (0.1, 0.025, 0.05)),
    "exact diffusion, ring, momentum": PresetRow("exact-diffusion-momentum", (0.05, 0.05, 0.0126)),
    "push-sum, one-peer exponential, momentum": PresetRow("push-sum-momentum", (0.1, 0.1, 0.025)),
}
_METHOD = (
    "n_workers",
    "optimizer",
    "topology",
    "learning",
    "learning_options",
    "momentum",
    "nesterov",
    "overlapping",
    "reshuffle_data",
)


def published() -> Experiment:
    """VGG-11, 16 workers, 200 epochs, 3 seeds."""

    def values(row: PresetRow, rate: float) -> Values:
        of_preset = preset(BASE, row.preset)
        start = float(f"{rate / of_preset['distributed_lr_warmup_factor']:.6g}")
        return {**of_preset, **row.changes, "learning_rate": start}

    title = "RelaySGD's table on CIFAR-10: VGG-11, 16 workers, 200 epochs, 3 seeds"
    return _experiment(title, WITHOUT_MOMENTUM | WITH_MOMENTUM, values, processes=16)


def small() -> Experiment:
    """FashionMNIST, the small CNN, 16 workers, 5 epochs, 3 seeds."""

    def values(row: PresetRow, rate: float) -> Values:
        of_preset = preset(BASE, row.preset)
        method = {key: of_preset[key] for key in _METHOD if key in of_preset}
        own = {**row.changes, "learning_rate": float(f"{SMALL * rate:.6g}")}
        return tuned_methods.FASHION_MNIST | method | own

    diffusion = WITH_MOMENTUM["exact diffusion, ring, momentum"]
    tracking = replace(diffusion, changes={"learning": "gradient-tracking"})
    rows = WITH_MOMENTUM | {"gradient tracking, ring, momentum": tracking}
    title = "RelaySGD's CIFAR-10 table, small: FashionMNIST, 16 workers, 5 epochs, 3 seeds"
    return _experiment(title, rows, values)


def _experiment(
    title: str,
    rows: Mapping[str, PresetRow],
    values: Callable[[PresetRow, float], Values],
    processes: int = 1,
) -> Experiment:
    cases: Cases = {}
    for name, row in rows.items():
        for alpha, rate in zip(ALPHAS, row.rates, strict=True):
            of_alpha = {"decentralized_data_dirichlet_alpha": alpha}
            axes: Axes = {"method": {name: values(row, rate)}, "alpha": {alpha: of_alpha}}
            cases |= grid({}, axes, SEEDS, processes=processes)

    def report(outcomes: Outcomes, folder: Path) -> str:
        found = crossed(outcomes, "method", _cell, column=lambda a: f"α = {a:g}")
        return (
            "Accuracy of the worst worker after the last epoch, mean ± standard deviation of the "
            "seeds, with labels drawn from a Dirichlet distribution with α.\n\n"
            + table(folder / "table.csv", found)
        )

    return study(title, cases, report)


def _cell(outcome: Outcome) -> str:
    if outcome.diverged("accuracy"):
        return "diverged"
    return quality("accuracy")["worst worker"](outcome)
