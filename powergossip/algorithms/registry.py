"""Averaging algorithms by name: `AVERAGING`, their options and default diffusion rates."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import Parameter
from typing import Any

from powergossip import checks, compressors
from powergossip import registry_options as _options
from powergossip.algorithms import rates
from powergossip.algorithms.averaging import Averaging, Rate
from powergossip.algorithms.compressed_gossip import ChocoGossip, DeepSqueeze, Moniqua
from powergossip.algorithms.plain import (
    ChebyshevGossip,
    ExactMean,
    FiniteTimeGossip,
    PlainGossip,
    RandomEntries,
)
from powergossip.algorithms.power_gossip import PowerGossip
from powergossip.algorithms.push_sum import PushSum
from powergossip.algorithms.quantized_mean import QuantizedMean
from powergossip.compressors import Codec
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.topologies import Topology


def _deepsqueeze(
    network: Network,
    layout: Layout,
    *,
    diffusion_rate: Rate | None = None,
    compressor: str = "sign-and-norm",
    seed: int = 0,
    **compressor_options: Any,
) -> Averaging:
    """DeepSqueeze, with a compressor by its name.

    Args:
        diffusion_rate: Diffusion rate γ. By default it follows from the compressor, the tensors and
            the topology.
        compressor: Name of the compressor.
    """
    rate: Any = diffusion_rate
    if rate is None:
        given = {"compressor": compressor, **compressor_options}
        rate = default_rate("deepsqueeze", network.topology, layout, given)
    return DeepSqueeze(network, _codec(network, layout, compressor, compressor_options, seed), rate)


def _choco(
    network: Network,
    layout: Layout,
    *,
    diffusion_rate: Rate | compressors.BySize | None = None,
    compressor: str = "sign-and-norm",
    copy_rate: float | None = None,
    seed: int = 0,
    **compressor_options: Any,
) -> Averaging:
    """CHOCO-Gossip, with a compressor by its name.

    Args:
        diffusion_rate: Diffusion rate γ. By default it follows from the compressor, the tensors and
            the topology.
        compressor: Name of the compressor.
        copy_rate: Rate at which public copies follow the parameters. By default the compressor's,
            less than 1 for an unbiased one.
    """
    codec = _codec(network, layout, compressor, compressor_options, seed)
    rate: Any = diffusion_rate
    if rate is None:
        given = {"compressor": compressor, **compressor_options}
        rate = default_rate("choco", network.topology, layout, given)
    copies = rates.copy_rate(codec.compressor) if copy_rate is None else copy_rate
    return ChocoGossip(network, codec, rate, copies)


def _codec(
    network: Network, layout: Layout, name: str, options: Mapping[str, Any], seed: int
) -> Codec:
    compressor = compressors.make(name, **options)
    workers = [*network.workers] * network.copies
    return Codec(layout, compressor, workers, seed, network.device)


def _all_reduce(network: Network, layout: Layout, *, bits: int = 32) -> Averaging:
    """The mean of all workers.

    Args:
        bits: Bits of an element, 2 to 8, or 32.
    """
    checks.check("bits", bits, bits == 32 or 2 <= bits <= 8, "2 to 8, or 32")
    return ExactMean(network) if bits == 32 else QuantizedMean(network, layout, bits)


def _dpsgd(network: Network, layout: Layout, *, diffusion_rate: Rate | str = 1.0) -> Averaging:
    """Plain gossip.

    Args:
        diffusion_rate: Diffusion rate γ, or "auto": the best one on this topology.
    """
    return PlainGossip(network, rates.checked(network, diffusion_rate))


# Registry names: `optimizer` in train.py, `algorithm` in gossip_run.py. A row is called with the
# network and the layout. Its other parameters are the algorithm's options.
AVERAGING: dict[str, _options.Builder] = {
    "all-reduce": _all_reduce,
    "dpsgd": _dpsgd,
    "power-gossip": PowerGossip,
    "choco": _choco,
    "deepsqueeze": _deepsqueeze,
    "moniqua": Moniqua,
    "push-sum": PushSum,
    "sparta": RandomEntries,
}

# Limits for comparison, not for learning: they assume that nothing else changes x.
CONSENSUS_ONLY: dict[str, _options.Builder] = {
    "chebyshev": lambda network, layout: ChebyshevGossip(network),
    "finite-time": lambda network, layout: FiniteTimeGossip(network),
}


def defaults(name: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return option → default of an algorithm, including the options of its compressor: the one
    that `given` names, or the default one.

    The diffusion rate is None where it depends on the graph and the tensors: see `default_rate`.
    The compressor has the copy rate. It is None where it depends on the sizes of tensors, and for
    bad options of the compressor, for which `make` raises ValueError.

    Raises:
        ValueError: For an unknown name.
    """
    row = _options.find(AVERAGING | CONSENSUS_ONLY, "algorithm", name)
    found = _options.defaults(row, given, compressor=compressors.COMPRESSORS)
    return with_copy_rate(found, given or {})


def with_copy_rate(defaults: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of an algorithm, with the copy rate of the chosen compressor."""
    if "copy_rate" in defaults:
        with suppress(ValueError, TypeError):
            rate = rates.copy_rate(_compressor(defaults, given))
            defaults["copy_rate"] = None if callable(rate) else rate
    return defaults


def _compressor(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> compressors.Compressor:
    """The compressor of an algorithm's options. Raises ValueError."""
    chosen = {**defaults, **{k: v for k, v in given.items() if k in defaults and v is not None}}
    own = _options.defaults(compressors.COMPRESSORS[chosen["compressor"]])
    return compressors.make(chosen["compressor"], **{k: chosen[k] for k in own})


_DEFAULT_RATES: dict[str, Callable[..., Any]] = {
    "choco": rates.default_choco_rate,
    "deepsqueeze": rates.default_deepsqueeze_rate,
}


def default_rate(
    name: str,
    topology: Topology,
    layout: Layout,
    given: Mapping[str, Any] | None = None,
    factor: float = 1.0,
    largest: float = math.inf,
) -> float | compressors.BySize | None:
    """Return the default diffusion rate of an algorithm, or None if it has none.

    It may depend on the graph, the tensors, and the options `given`. A function of the number of
    elements of a tensor gives each its own rate.

    Args:
        factor: Factor of a learning rule on a rate that depends on graph and tensors.
        largest: Largest stable rate of a learning rule.

    Raises:
        ValueError: For bad options, and for a compressor without such a rate on a directed graph.
    """
    found = defaults(name, given)
    rate: float | compressors.BySize | None = found.get("diffusion_rate")
    if name in _DEFAULT_RATES:
        compressor = _compressor(found, given or {})
        chosen = (given or {}).get("compressor", found["compressor"])
        ok = topology.biased or not rates.diverges(topology, compressor)  # `_unbiased` rejects it
        accepted = (
            f"another one, such as qsgd, with topology={topology.name}, or an undirected topology; "
            "on a directed graph, workers move apart with it, at small diffusion rates, too"
        )
        checks.check("compressor", chosen, ok, accepted)
        rate = _DEFAULT_RATES[name](topology, layout, compressor, factor)
    lags = name in _DEFAULT_RATES and rates.is_directed(topology)
    return rates.at_most(rate, rates.STABLE * largest, lags)


def make(name: str, network: Network, layout: Layout, /, **given: Any) -> Averaging:
    """Build the averaging algorithm of that name with the options `given`.

    Raises:
        ValueError: For an unknown name, an option that the algorithm does not have, a bad value, or
            a directed graph on which it would be biased.
    """
    row = _options.find(AVERAGING | CONSENSUS_ONLY, "algorithm", name)
    known = _options.parameters(row, given, compressor=compressors.COMPRESSORS)
    return build(name, network, layout, checked_options(name, given, known))


def checked_options(
    name: str, given: Mapping[str, Any], known: Mapping[str, Parameter]
) -> dict[str, Any]:
    """The options of an algorithm, with their types checked. Raises ValueError.

    A diffusion rate of auto is left to the row, whose error names the page with its default.
    """
    auto = {
        k: v for k, v in given.items() if k == "diffusion_rate" in known and str(v) == rates.AUTO
    }
    return _options.check(name, {k: v for k, v in given.items() if k not in auto}, known) | auto


def build(name: str, network: Network, layout: Layout, options: Mapping[str, Any]) -> Averaging:
    """Build the averaging algorithm of that name with options that have been checked.

    Raises:
        ValueError: For a bad value, or a directed graph on which it would be biased.
    """
    row = (AVERAGING | CONSENSUS_ONLY)[name]
    return _unbiased(name, network, row(network, layout, **options))


def _unbiased(name: str, network: Network, averaging: Averaging) -> Averaging:
    """The algorithm. Raises ValueError if the workers would not agree on their mean.

    An algorithm that averages over every graph has the attribute `needs_doubly_stochastic`, False.
    """
    if network.topology.row_stochastic and isinstance(averaging, DeepSqueeze | Moniqua):
        raise ValueError(
            f"topology={network.topology.name}: use push-sum in place of {name}, or a topology "
            "that conserves the mean, such as one-peer-exponential; errors of the messages would "
            "move the mean"
        )
    if network.topology.biased and getattr(averaging, "needs_doubly_stochastic", True):
        raise ValueError(
            f"topology={network.topology.name}: use push-sum in place of {name}; W is not doubly "
            "stochastic, so that workers would count unequally"
        )
    return averaging
