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

from collections.abc import Mapping
from typing import Any

from powergossip import compressors
from powergossip import options as _options
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
    "defaults",
    "make",
]


def _power_gossip(
    network: Network,
    layout: Layout,
    *,
    diffusion_rate: Rate = 1.0,
    rank: int = 1,
    num_iterations: int = 1,
    warm_start: bool = True,
    round_weights: bool = False,
    seed: int = 0,
) -> Averaging:
    power_gossip = PowerGossip(
        network,
        layout,
        diffusion_rate=diffusion_rate,
        rank=rank,
        num_iterations=num_iterations,
        warm_start=warm_start,
        round_weights=round_weights,
        seed=seed,
    )
    return MatricesOnly(layout, power_gossip, PlainGossip(network))


def _choco(
    network: Network,
    layout: Layout,
    *,
    diffusion_rate: Rate = 1.0,
    compressor: str = "sign-and-norm",
    seed: int = 0,
    **compressor_options: Any,
) -> Averaging:
    codec = _codec(network, layout, compressor, compressor_options, seed)
    return ChocoGossip(network, codec, diffusion_rate)


def _deepsqueeze(
    network: Network,
    layout: Layout,
    *,
    diffusion_rate: Rate = 1.0,
    compressor: str = "sign-and-norm",
    seed: int = 0,
    **compressor_options: Any,
) -> Averaging:
    codec = _codec(network, layout, compressor, compressor_options, seed)
    return DeepSqueeze(network, codec, diffusion_rate)


def _codec(
    network: Network, layout: Layout, name: str, options: Mapping[str, Any], seed: int
) -> Codec:
    compressor = compressors.make(name, **options)
    return Codec(layout, compressor, network.row_workers.tolist(), seed, network.device)


def _dpsgd(network: Network, layout: Layout, *, diffusion_rate: Rate = 1.0) -> Averaging:
    return PlainGossip(network, diffusion_rate)


def _moniqua(
    network: Network,
    layout: Layout,
    *,
    theta: Rate = 0.25,
    diffusion_rate: Rate = 1.0,
    seed: int = 0,
) -> Averaging:
    return Moniqua(network, layout.size, theta, diffusion_rate, seed)


# The names that users choose from: `optimizer` in train.py, `algorithm` in the benchmark. A row is
# called with the network and the layout; its other parameters are the algorithm's options.
AVERAGING: dict[str, _options.Row] = {
    "all-reduce": lambda network, layout: AllReduce(network),
    "dpsgd": _dpsgd,
    "power-gossip": _power_gossip,
    "choco": _choco,
    "deepsqueeze": _deepsqueeze,
    "moniqua": _moniqua,
}

# Limits to compare the others with. They assume that nothing else changes x: not for learning.
CONSENSUS_ONLY: dict[str, _options.Row] = {
    "chebyshev": lambda network, layout: ChebyshevGossip(network),
    "finite-time": lambda network, layout: FiniteTimeGossip(network),
}


class Options(_options.Options):
    """Options of all averaging algorithms as attributes, for rows that take them in one object."""

    def __init__(self, **given: Any):
        compressor_options = given.pop("compressor_options", compressors.Options())
        super().__init__(AVERAGING | CONSENSUS_ONLY, given)
        self.compressor_options = compressor_options


def defaults(name: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return option → default of an algorithm, including the options of its compressor: the one
    that `given` names, or the default one. Raises ValueError for an unknown name."""
    row = _options.find(AVERAGING | CONSENSUS_ONLY, "algorithm", name)
    return _options.defaults(row, given, compressor=compressors.COMPRESSORS)


def make(
    name: str, network: Network, layout: Layout, options: Options | None = None, **given: Any
) -> Averaging:
    """Build the averaging algorithm of that name with the options `given`.

    From an `options` object it takes its own. Raises ValueError for an unknown name, an option that
    the algorithm does not have, or a bad value.
    """
    row = _options.find(AVERAGING | CONSENSUS_ONLY, "algorithm", name)
    if _options.takes_all(row):
        built: Averaging = row(network, layout, options or Options(**given))
        return built
    if options is not None:
        own = _options.defaults(row)
        given = {option: value for option, value in options.given.items() if option in own}
        if "compressor" in own:
            given = options.compressor_options.given | given
    known = _options.defaults(row, given, compressor=compressors.COMPRESSORS)
    if options is not None:
        given = {option: value for option, value in given.items() if option in known}
    _options.check(name, given, known)
    built = row(network, layout, **given)
    return built
