"""What do Moniqua's θ and γ have to be? Its accuracy for each pair of a grid.

θ bounds how far the numbers of two neighbors may be apart: smaller is finer, until it is wrong.

Source: Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, who tuned it so; Lu & De Sa (2020),
arXiv:2002.11787.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments import learning
from experiments.presets import preset
from experiments.runner import Experiment, Results, Run


def published() -> Experiment:
    """ResNet-20 on CIFAR-10, around what was chosen: θ = 0.25, γ = 0.005."""
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
        lines = [
            f"| θ \\ γ | {' | '.join(f'{rate:g}' for rate in rates)} |",
            f"| --- |{' --- |' * len(rates)}",
        ]
        for theta in thetas:
            cells = [_cell(results(runs[theta, rate])) for rate in rates]
            lines.append(f"| {theta:g} | {' | '.join(cells)} |")
        table = "\n".join(lines)
        return (
            f"{title[0].upper()}{title[1:]}\n\nTest accuracy of the mean model and, in brackets, "
            f"of the worst worker, in per cent:\n\n{table}\n"
        )

    return Experiment(title, [lambda results: list(runs.values())], report)


def _cell(rows: Any) -> str:
    mean = learning.last(rows, "accuracy", "test_avg")
    if mean.empty:
        return "diverged"
    worst = learning.last(rows, "accuracy", "test").min()
    return f"{100 * mean.iloc[0]:.1f} ({100 * worst:.1f})"
