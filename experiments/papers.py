"""The tables of the PowerGossip paper, with the published settings, and their small forms.

A small form takes half an hour on two cores. It has FashionMNIST and a small CNN instead of
CIFAR-10 and ResNet-20, and Python's reference texts and a small LSTM instead of WikiText-2 and a
large one. Tuned values (diffusion rates, and learning rates relative to those of other methods)
stay as published, so that a small form shows how well they transfer.

References:
    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, and its published programs
    resnet20_cifar10_shuffled.py and choco_lstm_testing.py, with their seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.study import Cases, grid, study
from experiments.tuned_methods import FASHION_MNIST, TOPICS_LSTM, compared
from powergossip import presets
from powergossip.runner.runner import Experiment, Values

CIFAR10, WIKITEXT2 = "cifar10_resnet20", "wikitext2_lstm"

FEW, SOME, ALL = (10,), (10, 20, 30, 40), (10, 20, 30, 40, 50, 60)  # seeds


# A row of a published table: a preset, the seeds of its runs, changes of the preset
Row = tuple[str, Sequence[int], Values]


def _row(preset: str, seeds: Sequence[int] = FEW, **changes: Any) -> Row:
    return preset, seeds, changes


PUBLISHED_IMAGES = {
    "all-reduce": _row("all-reduce", ALL),
    **{
        f"all-reduce, rate × {f}": _row("all-reduce", distributed_lr_warmup_factor=f)
        for f in (8, 16)
    },
    "D-PSGD": _row("dpsgd", ALL),
    **{f"D-PSGD, rate × {f}": _row("dpsgd", distributed_lr_warmup_factor=f) for f in (8, 16)},
    "PowerGossip, 1 iteration": _row("power-gossip", ALL),
    "PowerGossip, 1 iteration, random": _row("power-gossip-random", SOME),
    "PowerGossip, 2 iterations": _row("power-gossip-2-iterations", ALL),
    "PowerGossip, 2 iterations, random": _row("power-gossip-2-iterations-random", SOME),
    "CHOCO, sign": _row("choco-sign", ALL),
    "CHOCO, sign, untuned": _row("choco-sign-untuned", ALL),
    "CHOCO, top 1 %": _row("choco-top-1", ALL),
    "DeepSqueeze, sign": _row("deepsqueeze", ALL),
    "Moniqua, 2 bits": _row("moniqua", ALL),
}
TWO = (10, 20)  # seeds
PUBLISHED_LANGUAGE = {
    "all-reduce": _row("all-reduce", TWO),
    "all-reduce, rate × 28": _row("all-reduce", distributed_lr_warmup_factor=28),
    "D-PSGD": _row("dpsgd", TWO),
    "D-PSGD, rate × 28": _row("dpsgd", distributed_lr_warmup_factor=28),
    "D-PSGD, 32 local steps": _row("local-steps-32"),
    **{
        f"PowerGossip, {n} iterations": _row(f"power-gossip-{n}-iterations", TWO)
        for n in (8, 16, 32)
    },
    "PowerGossip, 32 iterations, random": _row("power-gossip-32-iterations-random", TWO),
    **{
        f"PowerGossip, rank {rank}, {32 // rank} iterations": _row(f"power-gossip-rank-{rank}", TWO)
        for rank in (2, 4, 8)
    },
    "CHOCO, sign": _row("choco-sign", TWO),
    **{
        f"CHOCO, sign, γ {gamma}": _row("choco-sign", optimizer_diffusion_rate=gamma)
        for gamma in (0.4, 0.6, 1.0)
    },
    "CHOCO, top 1 %": _row("choco-top-1", TWO),
    "CHOCO, top 1 %, γ 0.1": _row("choco-top-1", optimizer_diffusion_rate=0.1),
    **{
        f"DeepSqueeze, sign, rate × {f}, γ {gamma}": _row(
            "deepsqueeze", distributed_lr_warmup_factor=f, optimizer_diffusion_rate=gamma
        )
        for f in (28, 38)
        for gamma in (0.1, 0.2, 0.4, 0.8)
    },
}

# The methods of the small forms: {name of a method in the table: its preset}.
IMAGES = {
    method: preset
    for method, (preset, _, changes) in PUBLISHED_IMAGES.items()
    if not changes and "random" not in method
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
_PLAIN = presets.values(CIFAR10)["distributed_lr_warmup_factor"]
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
    """ResNet-20, ring of 8, 300 epochs, up to 6 seeds."""
    return _published(
        "the paper's table on CIFAR-10: ResNet-20, ring of 8, 300 epochs, up to 6 seeds",
        CIFAR10,
        PUBLISHED_IMAGES,
        "accuracy",
        processes=8,
    )


def cifar10_small() -> Experiment:
    """FashionMNIST, the small CNN, ring of 8, 5 epochs, 3 seeds."""

    def small(name: str) -> Values:
        published = presets.values(f"{CIFAR10}/{name}")
        rate = 0.1 * published["distributed_lr_warmup_factor"] / _PLAIN
        return FASHION_MNIST | _method(published) | {"learning_rate": round(rate, 6)}

    return experiment(
        "the paper's CIFAR-10 table, small: its diffusion rates on FashionMNIST, 5 epochs, 3 seeds",
        {method: (small(name), (1, 2, 3)) for method, name in IMAGES.items()},
        "accuracy",
    )


def wikitext2() -> Experiment:
    """The LSTM of 3 × 650 units, ring of 16, 90 epochs, up to 2 seeds."""
    return _published(
        "the paper's table on WikiText-2: LSTM of 3 × 650 units, ring of 16, 90 epochs, up to 2 "
        "seeds",
        WIKITEXT2,
        PUBLISHED_LANGUAGE,
        "perplexity",
        processes=16,
    )


def wikitext2_small() -> Experiment:
    """Python's reference texts, one layer of 128 units, ring of 16, 5 epochs."""
    own = TOPICS_LSTM | {"n_workers": 16, "batch_size": 4, "learning_rate": 10.0}
    rows = {
        method: (own | _method(presets.values(f"{WIKITEXT2}/{name}")), (1, 2))
        for method, name in LANGUAGE.items()
    }
    return experiment(
        "the paper's WikiText-2 table, small: its diffusion rates on Python's texts, 5 epochs",
        rows,
        "perplexity",
    )


def _method(published: Mapping[str, Any]) -> Values:
    return {key: published[key] for key in _TUNED if key in published}


def _published(
    title: str, base: str, rows: Mapping[str, Row], measure: str, processes: int
) -> Experiment:
    made = {
        m: (presets.values(f"{base}/{name}") | more, of) for m, (name, of, more) in rows.items()
    }
    return experiment(title, made, measure, processes)


def experiment(
    title: str, rows: Mapping[str, tuple[Values, Sequence[int]]], measure: str, processes: int = 1
) -> Experiment:
    """An experiment of one stage: {method: (its values, its seeds)}."""
    cases: Cases = {}
    for method, (values, seeds) in rows.items():
        cases |= grid(values, {"method": {method: {}}}, seeds, processes=processes)
    note = "diffusion rates and, up to a common factor, learning rates are the published ones."
    return study(title, cases, lambda outcomes, folder: compared(outcomes, folder, measure, note))
