"""Which θ and γ does Moniqua need? Its accuracy on a grid of both.

θ bounds the difference of two neighbors' parameters. A smaller θ gives a finer quantization, until
differences exceed it.

Source: Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, for the tuning; Lu & De Sa (2020),
arXiv:2002.11787, for the method.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments import learning
from experiments.presets import preset
from experiments.runner import Experiment, Results, Run, sentence_case
from powergossip.runs.metrics import last_values
from powergossip.runs.tables import markdown


def published() -> Experiment:
    """ResNet-20 on CIFAR-10, around the published choice of θ = 0.25, γ = 0.005."""
    return _experiment(
        "Moniqua's accuracy by θ and γ: ResNet-20 on CIFAR-10, 300 epochs",
        preset("cifar10_resnet20", "moniqua"),
        (0.0625, 0.125, 0.25, 0.5, 1.0),
        (0.00125, 0.0025, 0.005, 0.01, 0.02),
        processes=8,
    )


def small() -> Experiment:
    """The small CNN on FashionMNIST, 2 epochs."""
    values = learning.FASHION_MNIST | {
        "optimizer": "moniqua",
        "num_epochs": 2,
        "learning_rate": 0.05,
        "lr_schedule_milestones": [[1, 0.1]],
        "seed": 1,
    }
    return _experiment(
        "Moniqua's grid, small: a CNN on FashionMNIST, 2 epochs",
        values,
        (0.0625, 0.25, 1.0, 4.0),
        (0.005, 0.03, 0.1, 0.3, 1.0),
    )


def _experiment(
    title: str,
    values: Mapping[str, Any],
    thetas: Sequence[float],
    rates: Sequence[float],
    processes: int = 1,
) -> Experiment:
    runs = {
        (theta, rate): Run(
            "train",
            {**values, "optimizer_theta": theta, "optimizer_diffusion_rate": rate},
            {"theta": theta, "diffusion_rate": rate},
            processes,
        )
        for theta, rate in product(thetas, rates)
    }

    def report(results: Results, folder: Path) -> str:
        table = markdown(
            ["θ \\ γ", *(f"{rate:g}" for rate in rates)],
            [
                [f"{theta:g}", *(_cell(results(runs[theta, rate])) for rate in rates)]
                for theta in thetas
            ],
        )
        return (
            f"{sentence_case(title)}\n\nTest accuracy of the mean model and, in brackets, "
            f"of the worst worker, in percent:\n\n{table}\n"
        )

    return Experiment(title, [lambda results: list(runs.values())], report)


def _cell(rows: Any) -> str:
    mean = last_values(rows, "accuracy", split="test_avg")
    if mean.empty:
        return "diverged"
    worst = last_values(rows, "accuracy", split="test").min()
    return f"{100 * mean.iloc[0]:.1f} ({100 * worst:.1f})"
