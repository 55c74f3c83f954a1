"""Which θ and γ does Moniqua need? Its accuracy in the published settings, and on a grid of both.

θ bounds the difference of two neighbors' parameters. A smaller θ gives a finer quantization, until
differences exceed it.

References:
    - Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, for the tuning.
    - Lu & De Sa (2020), arXiv:2002.11787, for the method.
"""

from pathlib import Path
from typing import Any

from experiments.presets import preset
from experiments.study import (
    Cases,
    Columns,
    Outcome,
    Outcomes,
    Table,
    crossed,
    grid,
    lines,
    study,
    table,
)
from experiments.tuned_methods import FASHION_MNIST
from powergossip.runner.runner import Experiment
from powergossip.runs.metrics import last_values

PUBLISHED = {"moniqua": (0,), "moniqua-theta-2": (1, 2, 3)}  # preset: seeds


def published() -> Experiment:
    """ResNet-20 on CIFAR-10 in the published settings, with their seeds.

    Of resnet20_cifar10_shuffled_moniqua_tuning.py and moniqua_test.py.
    """
    title = "Moniqua's accuracy in the published settings: ResNet-20 on CIFAR-10, 300 epochs"
    cases: Cases = {}
    for name, seeds in PUBLISHED.items():
        values = preset("cifar10_resnet20", name)
        cases |= grid(values, {"preset": {name: {}}}, seeds, processes=8)
    columns: Columns = {
        "θ": lambda o: f"{o.values['optimizer_theta']:g}",
        "γ": lambda o: f"{o.values['optimizer_diffusion_rate']:g}",
        "learning rate": _learning_rate,
        "weight decay": lambda o: f"{o.values['weight_decay']:g}",
        "test accuracy by seed": _cell,
    }

    def report(outcomes: Outcomes, folder: Path) -> str:
        return _report(folder, lines(outcomes, ["preset"], columns))

    return study(title, cases, report)


def small() -> Experiment:
    """The small CNN on FashionMNIST, 2 epochs."""
    values = FASHION_MNIST | {
        "optimizer": "moniqua",
        "num_epochs": 2,
        "learning_rate": 0.05,
        "lr_schedule_milestones": [[1, 0.1]],
        "seed": 1,
    }
    rates = (0.005, 0.03, 0.1, 0.3, 1.0)
    axes = {
        "theta": {theta: {"optimizer_theta": theta} for theta in (0.0625, 0.25, 1.0, 4.0)},
        "diffusion_rate": {rate: {"optimizer_diffusion_rate": rate} for rate in rates},
    }

    def report(outcomes: Outcomes, folder: Path) -> str:
        found = crossed(outcomes, "θ \\ γ", _cell, "{:g}".format, "{:g}".format)
        return _report(folder, found)

    title = "Moniqua's grid, small: a CNN on FashionMNIST, 2 epochs"
    return study(title, grid(values, axes), report)


def _report(folder: Path, found: Table) -> str:
    return (
        "Test accuracy of the mean model and, in brackets, of the worst worker, in percent:\n\n"
        + table(folder / "table.csv", found)
    )


def _cell(outcome: Outcome) -> str:
    """The accuracies of each run."""

    def text(rows: Any) -> str:
        mean = last_values(rows, "accuracy", split="test_avg")
        if mean.empty:
            return "diverged"
        worst = last_values(rows, "accuracy", split="test").min()
        return f"{100 * mean.iloc[0]:.1f} ({100 * worst:.1f})"

    return ", ".join(map(text, outcome.rows))


def _learning_rate(outcome: Outcome) -> str:
    """The learning rate after the warm-up."""
    values = outcome.values
    return f"{values['learning_rate'] * values['distributed_lr_warmup_factor']:g}"
