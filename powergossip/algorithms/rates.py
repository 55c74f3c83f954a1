"""Diffusion rates γ: the best one, the largest one that converges, rates of compressed messages.

The defaults of the methods are in registry.py, `default_rate`.

Symbols: W the mixing matrix, λ_2 ≤ … ≤ λ_max the non-zero eigenvalues of I − W.
"""

import math
import warnings
from weakref import WeakSet

import torch

from powergossip import checks
from powergossip.algorithms.averaging import Rate
from powergossip.compressors import BySize, Compressor, matrices
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.topologies import Topology

AUTO = "auto"
_ROUNDING = 1e-6  # relative, of a rate in single precision
STABLE = 0.9  # of a default rate, relative to the largest stable rate of a learning rule
DIRECTED = 2 / 3  # of default rates on a directed graph, relative to the largest stable ones

_warned: WeakSet[Topology] = WeakSet()


def best(topology: Topology) -> float:
    """Return γ* = 2/(λ_2 + λ_max), the value of `auto`. Xiao & Boyd (2004), section 4.

    Raises BadValue for a directed or time-varying topology, which has no such spectrum.
    """
    try:
        return topology.best_diffusion_rate
    except ValueError as error:
        kind = "time-varying" if topology.period > 1 else "directed"
        name = f"topology={topology.name}"
        raise checks.BadValue(
            "diffusion_rate",
            AUTO,
            f"a number, such as 1; {name} is {kind}: it has no spectrum of I - W, and thus no best "
            f"diffusion rate",
        ) from error


def at_most(
    rate: float | BySize | None, largest: float, lags: bool = False
) -> float | BySize | None:
    """The rate, or rates of tensors by their size, but at most the largest.

    Args:
        lags: True if the inverses of both add up: copies that lag limit a rate on a directed graph
            as momentum does.
    """

    def limited(one: float) -> float:
        return 1 / (1 / one + 1 / largest) if lags else min(one, largest)

    if callable(rate):
        return lambda elements: limited(rate(elements))
    return None if rate is None else limited(rate)


def checked(network: Network, rate: Rate | str) -> Rate:
    """Return the rate of an algorithm that the spectrum of W bounds, where "auto" is the best one.

    Warns of a rate above 2/λ_max on a static undirected topology, once per topology and only on
    process 0. For other topologies that bound means nothing, and no warning is given.

    Raises BadValue for "auto" without a spectrum, and for other strings.
    """
    if isinstance(rate, str):
        checks.check("diffusion_rate", rate, rate == AUTO, "a number above 0, or auto")
        return best(network.topology)
    topology, largest = network.topology, float(torch.as_tensor(rate).max())
    if (
        1 < largest < math.inf  # λ_max ≤ 2, so that γ ≤ 1 converges on every graph
        and topology.n_workers > 1
        and topology.symmetric
        and topology.period == 1
        and largest > topology.largest_diffusion_rate * (1 + _ROUNDING)
    ):
        safe = math.floor(topology.largest_diffusion_rate * 1e4 + 0.01) / 1e4
        warn_once(
            network,
            f"a diffusion rate of {largest:.4g} is too large for topology={topology.name} with "
            f"{topology.n_workers} workers: above {safe:g} (2/λ_max of I - W) plain gossip "
            f"diverges, and so does PowerGossip at a high rank; the best rate of plain gossip is "
            f"{topology.best_diffusion_rate:.4g} (auto)",
        )
    return rate


def is_directed(topology: Topology) -> bool:
    """True if W may have complex eigenvalues: a static directed graph."""
    return topology.period == 1 and not topology.symmetric


def diverges(topology: Topology, compressor: Compressor) -> bool:
    """True if CHOCO-Gossip and DeepSqueeze diverge at small rates, too."""
    return is_directed(topology) and getattr(compressor, "undirected", False)


def default_choco_rate(
    topology: Topology, layout: Layout, compressor: Compressor, factor: float = 1.0
) -> float | BySize:
    """Return the default γ of CHOCO-Gossip, with m the largest weight given to neighbors::

        γ = factor · min(1, min_X s(X)/m)        m = max_i (1 − w_ii)

    s(X), the `stable_rate` of the compressor for a tensor X, is K/N for top-k, for example. Between
    two messages of an entry, x moves for N/K steps by γ (1 − w_ii) of the distance between the
    copies. Workers whose messages are not synchronous overshoot beyond γ (1 − w_ii) N/K = 2, and
    synchronous ones beyond γ λ_max N/K = 2, where λ_max ≤ 2 m.

    On a static directed graph, ⅔ s/(2 − s) takes the place of s. The eigenvalues λ of I − W are
    complex there, with |λ − m| ≤ m. Copies that follow x at a rate δ, E C(v) = δ v, are stable for
    all of these λ up to γ = δ/(m (2 − δ)).

    If tensors have their own copy rates, they have such γ, too: a function of their size.

    Args:
        factor: Factor of a learning rule.
    """
    if hasattr(compressor, "gossip_rate") or not hasattr(compressor, "stable_rate"):
        own = getattr(compressor, "gossip_rate", 1.0)
        return (lambda elements: factor * own(elements)) if callable(own) else factor * own
    rate_of, directed, move = compressor.stable_rate, is_directed(topology), topology.largest_move

    def stable(rows: int, columns: int) -> float:
        s = min(1.0, rate_of(rows, columns))
        return (DIRECTED * s / (2 - s) if directed else s) / move

    if callable(copy_rate(compressor)):
        return lambda elements: factor * min(1.0, stable(elements, 1))
    return factor * min([1.0, *(stable(m.rows, m.columns) for m in matrices(layout.whole))])


def copy_rate(compressor: Compressor) -> float | BySize:
    """Return the default copy rate of CHOCO-Gossip with a compressor."""
    found: float | BySize = getattr(compressor, "copy_rate", 1.0)
    return found


def default_deepsqueeze_rate(
    topology: Topology, layout: Layout, compressor: Compressor, factor: float = 1.0
) -> float:
    """Return the default γ of DeepSqueeze: CHOCO-Gossip's, but at most 0.1.

    Its errors do not vanish at agreement, and grow with γ.
    """
    largest = getattr(compressor, "deepsqueeze_rate", 0.1)
    rate = default_choco_rate(topology, layout, compressor, factor)
    return float(largest if callable(rate) else min(largest, rate))


def warn_of_rule(name: str, network: Network, rate: float, largest: float) -> None:
    """Warn of a rate that makes a learning rule unstable, `largest` or more.

    Once per topology, and only on process 0.
    """
    if rate < largest:
        return
    safe = math.floor(largest * 1e3) / 1e3
    warn_once(
        network,
        f"a diffusion rate of {rate:.4g} is too large for learning={name} on "
        f"topology={network.topology.name}: from {safe:g} on, disagreement of the workers grows "
        "with its momentum; use a smaller rate or momentum",
    )


def warn_once(network: Network, text: str) -> None:
    """Warn about the topology, once, and only on process 0."""
    if network.processes.rank == 0 and network.topology not in _warned:
        _warned.add(network.topology)
        warnings.warn(text, stacklevel=3)
