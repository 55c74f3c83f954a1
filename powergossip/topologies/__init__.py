"""Topologies: networkx graph → mixing matrix → the neighbors of each worker in each round.

**W[i, j] is the weight with which worker i averages the message of worker j**, and w_ii = 1 − Σ_j
w_ij is the weight of its own model. Row i thus lists the workers that i receives from, and column j
the workers that j sends to. W is doubly stochastic: every row and every column sums to 1, which
conserves the mean of the workers. Topologies with `row_stochastic` set are the exception: random
rounds, and directed graphs from files whose in- and out-degrees differ.

A `Topology` is a sequence of rounds that repeats. A static graph has one round. `make` builds a
topology from its name in `TOPOLOGIES` or from a file.

The spectrum of a static undirected topology is that of I − W. Its non-zero eigenvalues
λ_2 ≤ … ≤ λ_max determine the speed of averaging (Xiao & Boyd 2004,
doi:10.1016/j.sysconle.2004.02.022). For several rounds the measure is the contraction of the
distance to the mean over a whole period. Some periods average exactly.

Axes: worker, edge, group, member, block. Matrices over the workers are [receiver, sender].
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from powergossip import checks
from powergossip.topologies.files import from_file, is_path
from powergossip.topologies.mixing import Round, Topology
from powergossip.topologies.static import (
    UNDIRECTED,
    Weights,
    binary_tree,
    chain,
    exponential,
    fully_connected,
    hypercube,
    metropolis_hastings,
    random_regular,
    ring,
    social_network,
    star,
    torus,
    undirected,
    unidirectional_ring,
    uniform,
    watts_strogatz,
)
from powergossip.topologies.time_varying import (
    base_graph,
    epidemic,
    matchings,
    one_peer_exponential,
    random_matching,
    round_robin,
)

__all__ = [
    "TOPOLOGIES",
    "UNDIRECTED",
    "Round",
    "Topology",
    "Weights",
    "base_graph",
    "binary_tree",
    "chain",
    "epidemic",
    "exponential",
    "from_file",
    "fully_connected",
    "hypercube",
    "make",
    "matchings",
    "metropolis_hastings",
    "one_peer_exponential",
    "random_matching",
    "random_regular",
    "ring",
    "round_robin",
    "social_network",
    "star",
    "torus",
    "undirected",
    "unidirectional_ring",
    "uniform",
    "watts_strogatz",
]

TOPOLOGIES: dict[str, Callable[..., Topology]] = {  # name → function(n_workers, seed, **options)
    **UNDIRECTED,
    "unidirectional-ring": unidirectional_ring,
    "exponential": exponential,
    "one-peer-exponential": one_peer_exponential,
    "base-graph": base_graph,
    "random-matching": random_matching,
    "epidemic": epidemic,
    "round-robin": round_robin,
}


def make(
    name: str, n_workers: int, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Topology:
    """Build the topology of this name for `n_workers`, or read the graph from the file `name`.

    A name that is not in `TOPOLOGIES` is a path if it has a path separator, ends in .edgelist,
    .adjlist or .txt, or is an existing file. `options` are passed to the topology's function, or to
    `from_file`.

    Raises ValueError for an unknown name or option, an option of the wrong type, a graph of another
    size, a graph that is not connected, and a file that cannot be read.
    """
    options = dict(options or {})
    checks.at_least_one("n_workers", n_workers)
    if name in TOPOLOGIES:
        _check_options(name, TOPOLOGIES[name], options)
        return TOPOLOGIES[name](n_workers, seed, **options)
    if not is_path(name):
        raise ValueError(
            f'topology "{name}" is unknown; choose from {", ".join(sorted(TOPOLOGIES))}, '
            f"or give the path of an edge-list or adjacency file"
        )
    _check_options(name, from_file, options)
    return from_file(Path(name), n_workers, **options)


# Validation of options


def _check_options(name: str, function: Callable[..., Topology], options: dict[str, Any]) -> None:
    """Raise ValueError unless `options` name keyword-only parameters and have their types.

    A parameter annotated as `float` accepts whole numbers.
    """
    known = {
        key: parameter.annotation
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = sorted(set(options) - set(known))
    if unknown:
        choices = f"choose from {', '.join(known)}" if known else "it has none"
        raise ValueError(f'topology "{name}" has no option {_quote(unknown)}; {choices}')
    for key, value in options.items():
        accepted = (int | float) if known[key] is float else known[key]
        is_bool = isinstance(value, bool)
        if is_bool != (accepted is bool) or not isinstance(value, accepted):
            kinds = {float: "a number", str: "a name", bool: "true or false"}
            kind = kinds.get(known[key], "a whole number")
            raise ValueError(f"topology_options.{key}={value}: use {kind}")


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
