"""The tables of the PowerGossip paper, with the published settings, and their small forms.

A small form takes half an hour on two cores. It has FashionMNIST and a small CNN instead of
CIFAR-10 and ResNet-20, and Python's reference texts and a small LSTM instead of WikiText-2 and a
large one. Tuned values (diffusion rates, and learning rates relative to those of other methods)
stay as published, so that a small form shows how well they transfer.

Source: Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import learning
from experiments.presets import preset
from experiments.runner import Experiment, Results, Run

Values = dict[str, Any]

CIFAR10, WIKITEXT2 = "cifar10_resnet20", "wikitext2_lstm"

IMAGES = {  # name of a method in the table: its preset
    "all-reduce": "all-reduce",
    "D-PSGD": "dpsgd",
    "PowerGossip, 1 iteration": "power-gossip",
    "PowerGossip, 2 iterations": "power-gossip-2-iterations",
    "CHOCO, sign": "choco-sign",
    "CHOCO, sign, untuned": "choco-sign-untuned",
    "CHOCO, top 1 %": "choco-top-1",
    "DeepSqueeze, sign": "deepsqueeze",
    "Moniqua, 2 bits": "moniqua",
}
LANGUAGE = {
    "all-reduce": "all-reduce",
    "D-PSGD": "dpsgd",
    "PowerGossip, rank 1, 8 iterations": "power-gossip-8-iterations",
    "PowerGossip, rank 1, 16 iterations": "power-gossip-16-iterations",
    "PowerGossip, rank 1, 32 iterations": "power-gossip-32-iterations",
    "PowerGossip, rank 2, 16 iterations": "power-gossip-rank-2",
    "PowerGossip, rank 8, 4 iterations": "power-gossip-rank-8",
    "PowerGossip, rank 32, 1 iteration": "power-gossip-rank-32",
    "CHOCO, sign": "choco-sign",
    "CHOCO, top 1 %": "choco-top-1",
    "DeepSqueeze, sign": "deepsqueeze",
}
# The learning rate factor of uncompressed gossip, which corresponds to 1 in the small form.
_PLAIN = preset(CIFAR10)["distributed_lr_warmup_factor"]
_TUNED = (
    "optimizer",
    "optimizer_diffusion_rate",
    "optimizer_rank",
    "optimizer_num_iterations",
    "optimizer_compressor",
    "optimizer_keep_ratio",
    "optimizer_theta",
)


def cifar10() -> Experiment:
    """ResNet-20, ring of 8, 300 epochs, 6 seeds."""
    values = {method: preset(CIFAR10, name) for method, name in IMAGES.items()}
    return _experiment(
        "the paper's table on CIFAR-10: ResNet-20, ring of 8, 300 epochs, 6 seeds",
        values,
        range(1, 7),
        "accuracy",
        processes=8,
    )


def cifar10_small() -> Experiment:
    """FashionMNIST, the small CNN, ring of 8, 5 epochs, 3 seeds."""

    def small(name: str) -> Values:
        published = preset(CIFAR10, name)
        rate = 0.1 * published["distributed_lr_warmup_factor"] / _PLAIN
        return learning.FASHION_MNIST | _method(published) | {"learning_rate": round(rate, 6)}

    return _experiment(
        "the paper's CIFAR-10 table, small: its diffusion rates on FashionMNIST, 5 epochs, 3 seeds",
        {method: small(name) for method, name in IMAGES.items()},
        (1, 2, 3),
        "accuracy",
    )


def wikitext2() -> Experiment:
    """The LSTM of 3 × 650 units, ring of 16, 90 epochs."""
    values = {method: preset(WIKITEXT2, name) for method, name in LANGUAGE.items()}
    return _experiment(
        "the paper's table on WikiText-2: LSTM of 3 × 650 units, ring of 16, 90 epochs, 3 seeds",
        values,
        (1, 2, 3),
        "perplexity",
        processes=16,
    )


def wikitext2_small() -> Experiment:
    """Python's reference texts, one layer of 128 units, ring of 16, 5 epochs."""
    values = {
        method: learning.TOPICS_LSTM
        | _method(preset(WIKITEXT2, name))
        | {"n_workers": 16, "batch_size": 4, "learning_rate": 10.0}
        for method, name in LANGUAGE.items()
    }
    return _experiment(
        "the paper's WikiText-2 table, small: its diffusion rates on Python's texts, 5 epochs",
        values,
        (1, 2),
        "perplexity",
    )


def _method(published: Mapping[str, Any]) -> Values:
    return {key: published[key] for key in _TUNED if key in published}


def _experiment(
    title: str,
    values: Mapping[str, Values],
    seeds: "range | tuple[int, ...]",
    measure: str,
    processes: int = 1,
) -> Experiment:
    runs = {
        method: [
            Run("train", {**v, "seed": seed}, {"method": method, "seed": seed}, processes)
            for seed in seeds
        ]
        for method, v in values.items()
    }

    def report(results: Results, folder: Path) -> str:
        note = "diffusion rates and, up to a common factor, learning rates are the published ones."
        return learning.compared(title, runs, results, folder, measure, note)

    return Experiment(title, [lambda results: [r for rs in runs.values() for r in rs]], report)
