"""Which θ and γ does Moniqua need? Its accuracy in the published settings, and on a grid of both.

θ bounds the difference of two neighbors' parameters. A smaller θ gives a finer quantization, until
differences exceed it.

References:
    - Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, for the tuning.
    - Lu & De Sa (2020), arXiv:2002.11787, for the method.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments import tuned_methods
from experiments.presets import preset
from experiments.runner import Experiment, Results, Run, sentence_case
from powergossip.formatting import markdown
from powergossip.runs.metrics import last_values

PUBLISHED = {"moniqua": (0,), "moniqua-theta-2": (1, 2, 3)}  # preset: seeds
_LEGEND = "Test accuracy of the mean model and, in brackets, of the worst worker, in percent:"


def published() -> Experiment:
    """ResNet-20 on CIFAR-10 in the published settings, with their seeds.

    Of resnet20_cifar10_shuffled_moniqua_tuning.py and moniqua_test.py.
    """
    title = "Moniqua's accuracy in the published settings: ResNet-20 on CIFAR-10, 300 epochs"
    settings = {
        name: [
            Run(
                "train",
                {**preset("cifar10_resnet20", name), "seed": seed},
                {"preset": name, "seed": seed},
                processes=8,
            )
            for seed in seeds
        ]
        for name, seeds in PUBLISHED.items()
    }

    def report(results: Results, folder: Path) -> str:
        header = ["preset", "θ", "γ", "learning rate", "weight decay", "test accuracy by seed"]
        lines = []
        for name, runs in settings.items():
            values = runs[0].values
            rate = values["learning_rate"] * values["distributed_lr_warmup_factor"]
            keys = ("optimizer_theta", "optimizer_diffusion_rate", "weight_decay")
            theta, gamma, decay = (f"{values[key]:g}" for key in keys)
            accuracies = ", ".join(_cell(results(run)) for run in runs)
            lines.append([name, theta, gamma, f"{rate:g}", decay, accuracies])
        return f"{sentence_case(title)}\n\n{_LEGEND}\n\n{markdown(header, lines)}\n"

    return Experiment(title, [lambda results: [r for rs in settings.values() for r in rs]], report)


def small() -> Experiment:
    """The small CNN on FashionMNIST, 2 epochs."""
    values = tuned_methods.FASHION_MNIST | {
        "optimizer": "moniqua",
        "num_epochs": 2,
        "learning_rate": 0.05,
        "lr_schedule_milestones": [[1, 0.1]],
        "seed": 1,
    }
    return experiment(
        "Moniqua's grid, small: a CNN on FashionMNIST, 2 epochs",
        values,
        (0.0625, 0.25, 1.0, 4.0),
        (0.005, 0.03, 0.1, 0.3, 1.0),
    )


def experiment(
    title: str,
    values: Mapping[str, Any],
    thetas: Sequence[float],
    rates: Sequence[float],
) -> Experiment:
    runs = {
        (theta, rate): Run(
            "train",
            {**values, "optimizer_theta": theta, "optimizer_diffusion_rate": rate},
            {"theta": theta, "diffusion_rate": rate},
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
        return f"{sentence_case(title)}\n\n{_LEGEND}\n\n{table}\n"

    return Experiment(title, [lambda results: list(runs.values())], report)


def _cell(rows: Any) -> str:
    mean = last_values(rows, "accuracy", split="test_avg")
    if mean.empty:
        return "diverged"
    worst = last_values(rows, "accuracy", split="test").min()
    return f"{100 * mean.iloc[0]:.1f} ({100 * worst:.1f})"
