"""Averaging algorithms, and the learning algorithms built on them.

An averaging algorithm's `step(x)` changes x [worker, D] in place. It is a generator that does no
communication itself: it yields messages and is resumed with what arrived (see network).

    uncompressed.py   all numbers as they are: plain gossip, all-reduce, Chebyshev, finite time
    compressed.py     CHOCO-Gossip, DeepSqueeze, Moniqua
    power_gossip.py   PowerGossip
    averaging.py      what they have in common
    learning.py       D-PSGD, on top of any of them

To add one: write its class in a module beside this one and its row in `AVERAGING` here; train.py,
the benchmark and the tests of the laws that every averaging algorithm obeys
(tests/test_algorithms.py) find it there.

Axes: worker (hosted here), neighbor (slot), batch (matrices of one shape that one product serves:
the layers of one worker, or one layer of all workers), rank, row, column.
Symbols: x_i worker i's numbers; w_ij the weight with which i uses what j sends; γ the diffusion
rate; X_i one of i's parameter tensors seen as a matrix [row, column].
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from powergossip import compressors
from powergossip.algorithms.averaging import Averaging, MatricesOnly, Rate
from powergossip.algorithms.compressed import ChocoGossip, DeepSqueeze, Moniqua
from powergossip.algorithms.learning import DPSGD, Correction
from powergossip.algorithms.plain import AllReduce, ChebyshevGossip, FiniteTimeGossip, PlainGossip
from powergossip.algorithms.power_gossip import PowerGossip
from powergossip.compressors import Codec
from powergossip.network import Network
from powergossip.parameters import Layout

__all__ = [
    "AVERAGING",
    "CONSENSUS_ONLY",
    "DPSGD",
    "AllReduce",
    "Averaging",
    "Builder",
    "ChebyshevGossip",
    "ChocoGossip",
    "Correction",
    "DeepSqueeze",
    "FiniteTimeGossip",
    "MatricesOnly",
    "Moniqua",
    "Options",
    "PlainGossip",
    "PowerGossip",
    "Rate",
    "make",
]


@dataclass(frozen=True)
class Options:
    """What averaging algorithms can be told; each takes what concerns it."""

    diffusion_rate: Rate = 1.0  # γ
    rank: int = 1  # power-gossip
    num_iterations: int = 1  # power-gossip: of power iteration, a step
    warm_start: bool = True  # power-gossip
    round_weights: bool = False  # power-gossip
    compressor: str = "sign-and-norm"  # choco, deepsqueeze: a row of compressors.COMPRESSORS
    compressor_options: compressors.Options = field(default_factory=compressors.Options)
    theta: Rate = 0.25  # moniqua: θ
    seed: int = 0


Builder = Callable[[Network, Layout, Options], Averaging]


def _power_gossip(network: Network, layout: Layout, options: Options) -> Averaging:
    power_gossip = PowerGossip(
        network,
        layout,
        diffusion_rate=options.diffusion_rate,
        rank=options.rank,
        num_iterations=options.num_iterations,
        warm_start=options.warm_start,
        round_weights=options.round_weights,
        seed=options.seed,
    )
    return MatricesOnly(layout, power_gossip, PlainGossip(network))


def _codec(network: Network, layout: Layout, options: Options) -> Codec:
    compressor = compressors.make(options.compressor, options.compressor_options)
    senders = network.row_workers.tolist()
    return Codec(layout, compressor, senders, options.seed, network.device)


# The names that users choose from: optimizer in train.py, algorithm in the benchmark.
AVERAGING: dict[str, Builder] = {
    "all-reduce": lambda network, layout, options: AllReduce(network),
    "dpsgd": lambda network, layout, options: PlainGossip(network, options.diffusion_rate),
    "power-gossip": _power_gossip,
    "choco": lambda network, layout, options: ChocoGossip(
        network, _codec(network, layout, options), options.diffusion_rate
    ),
    "deepsqueeze": lambda network, layout, options: DeepSqueeze(
        network, _codec(network, layout, options), options.diffusion_rate
    ),
    "moniqua": lambda network, layout, options: Moniqua(
        network, layout.size, options.theta, options.diffusion_rate, options.seed
    ),
}

# Limits to hold the others against. They take x for what they left, so not for learning.
CONSENSUS_ONLY: dict[str, Builder] = {
    "chebyshev": lambda network, layout, options: ChebyshevGossip(network),
    "finite-time": lambda network, layout, options: FiniteTimeGossip(network),
}


def make(name: str, network: Network, layout: Layout, options: Options) -> Averaging:
    """The averaging algorithm of that name. ValueError for an unknown name or bad options."""
    builders = AVERAGING | CONSENSUS_ONLY
    if name not in builders:
        choices = ", ".join(sorted(builders))
        raise ValueError(f'algorithm "{name}" is unknown; choose from {choices}')
    return builders[name](network, layout, options)
