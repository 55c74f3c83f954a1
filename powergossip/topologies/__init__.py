"""networkx graph → mixing matrix → who talks to whom in each round.

**W[i, j] is the weight with which worker i uses what worker j sends**; what is left, w_ii = 1 − Σ_j
w_ij, is the weight of i's own model. So row i lists whom i hears, and column j lists who hears j. W
is doubly stochastic (every row and every column sums to 1, which keeps the workers' mean where it
is) unless a topology says `row_stochastic`.

A `Topology` is a sequence of rounds that repeats; a static graph has one. `make` builds one by name
or from a file, and `TOPOLOGIES` lists the names. The spectrum is that of I − W: its non-zero
eigenvalues λ_2 ≤ … ≤ λ_max say how fast gossip averages (Xiao & Boyd 2004,
doi:10.1016/j.sysconle.2004.02.022). Several rounds have none; what counts is by how much a whole
period shrinks the distance to the mean, and some periods average exactly.

Axes: worker, edge, group, member, block. Matrices over the workers are [worker that hears, worker
that sends].
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from powergossip.topologies.files import from_file, means_a_file
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
    """The topology of that name for `n_workers`, or the graph in the file of that name.

    A name that is not in `TOPOLOGIES` is a file if it has a path separator, ends in .edgelist,
    .adjlist or .txt, or exists. `options` go to the topology's function; files take none.
    ValueError for an unknown name or option, an option of the wrong type, a graph of another size
    or that is not connected, and a file that cannot be read.
    """
    options = dict(options or {})
    if n_workers < 1:
        raise ValueError(f"n_workers={n_workers} must be at least 1")
    if name in TOPOLOGIES:
        _refuse_options(name, TOPOLOGIES[name], options)
        return TOPOLOGIES[name](n_workers, seed, **options)
    if not means_a_file(name):
        raise ValueError(
            f'topology "{name}" is unknown; choose from {", ".join(sorted(TOPOLOGIES))}, '
            f"or give the path of an edge-list or adjacency file"
        )
    if options:
        raise ValueError(f'topology "{name}" is a file and has no options, not {_quote(options)}')
    return from_file(Path(name), n_workers)


# What is refused


def _refuse_options(name: str, function: Callable[..., Topology], options: dict[str, Any]) -> None:
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
        wanted = (int | float) if known[key] is float else known[key]
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = {float: "a number", str: "a name"}.get(known[key], "a whole number")
            raise ValueError(f'topology "{name}": {key}={value!r} must be {kind}')


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
