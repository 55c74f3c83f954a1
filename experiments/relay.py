"""RelaySGD's table on CIFAR-10, with the published settings, and a small form.

The small form has FashionMNIST and a small CNN instead of CIFAR-10 and VGG-11, and the methods with
momentum. Learning rates relative to those of other methods stay as published, and that of gradient
tracking, which the table lacks, is that of exact diffusion.

References:
    Vogels et al. (2021), arXiv:2110.04175, table 2, and its published program.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from experiments import tuned_methods
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
from powergossip import presets
from powergossip.runner.runner import Experiment, Values

BASE = "cifar10_vgg11"
ALPHAS = (1.0, 0.1, 0.01)  # of the Dirichlet distribution
SMALL = 0.3  # learning rates of the small form, relative to the published ones


# Of the preset of this name: the learning rates, one for each of ALPHAS
Rates = tuple[float, float, float]
WITHOUT_MOMENTUM: dict[str, tuple[str, Rates]] = {
    "all-reduce": ("all-reduce", (0.1, 0.1, 0.1)),
    "RelaySGD, two binary trees": ("relay-sgd", (1.2, 0.6, 0.3)),
    "RelaySGD, chain": ("relay-sgd-chain", (2.0, 2.0, 1.0)),
    "D-PSGD, ring": ("dpsgd", (0.4, 0.1, 0.2)),
    "exact diffusion, ring": ("exact-diffusion", (0.2, 0.2, 0.1)),
    "push-sum, one-peer exponential": ("push-sum", (0.4, 0.2, 0.2)),
}
WITH_MOMENTUM: dict[str, tuple[str, Rates]] = {
    "all-reduce, momentum": ("all-reduce-momentum", (0.1, 0.1, 0.1)),
    "RelaySGD, two binary trees, momentum": ("relay-sgd-momentum", (0.6, 0.3, 0.15)),
    "RelaySGD, chain, momentum": ("relay-sgd-chain-momentum", (0.5, 0.5, 0.125)),
    "D-PSGD, ring, momentum": ("dpsgd-momentum", (0.1, 0.05, 0.0125)),
    "quasi-global momentum, ring": ("quasi-global-momentum", (0.1, 0.025, 0.05)),
    "exact diffusion, ring, momentum": ("exact-diffusion-momentum", (0.05, 0.05, 0.0126)),
    "push-sum, one-peer exponential, momentum": ("push-sum-momentum", (0.1, 0.1, 0.025)),
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

    def values(of_preset: Values, rate: float) -> Values:
        start = float(f"{rate / of_preset['distributed_lr_warmup_factor']:.6g}")
        return of_preset | {"learning_rate": start}

    title = "RelaySGD's table on CIFAR-10: VGG-11, 16 workers, 200 epochs, 3 seeds"
    return _experiment(title, WITHOUT_MOMENTUM | WITH_MOMENTUM, values, processes=16)


def small() -> Experiment:
    """FashionMNIST, the small CNN, 16 workers, 5 epochs, 3 seeds."""
    tracking = "gradient tracking, ring, momentum"

    def values(of_preset: Values, rate: float) -> Values:
        method = {key: of_preset[key] for key in _METHOD if key in of_preset}
        own = {"learning_rate": float(f"{SMALL * rate:.6g}")}
        return tuned_methods.FASHION_MNIST | method | own

    rows = WITH_MOMENTUM | {tracking: WITH_MOMENTUM["exact diffusion, ring, momentum"]}
    title = "RelaySGD's CIFAR-10 table, small: FashionMNIST, 16 workers, 5 epochs, 3 seeds"
    changes: Values = {"learning": "gradient-tracking"}
    return _experiment(title, rows, values, changes={tracking: changes})


def _experiment(
    title: str,
    rows: Mapping[str, tuple[str, Rates]],
    values: Callable[[Values, float], Values],
    processes: int = 1,
    changes: Mapping[str, Values] | None = None,
) -> Experiment:
    cases: Cases = {}
    for name, (of_preset, rates) in rows.items():
        given = presets.values(f"{BASE}/{of_preset}") | (changes or {}).get(name, {})
        for alpha, rate in zip(ALPHAS, rates, strict=True):
            of_alpha = {"decentralized_data_dirichlet_alpha": alpha}
            axes: Axes = {"method": {name: values(given, rate)}, "alpha": {alpha: of_alpha}}
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
