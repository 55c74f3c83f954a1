"""Topologies by name: `TOPOLOGIES`, and graphs from files."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from powergossip import checks
from powergossip.registry_options import are_of_library, check, import_row
from powergossip.topologies.graph_files import from_file, is_path
from powergossip.topologies.static import (
    UNDIRECTED,
    equi_static,
    exponential,
    undirected,
    unidirectional_ring,
)
from powergossip.topologies.time_varying import (
    base_graph,
    epidemic,
    one_peer_equi,
    one_peer_exponential,
    random_matching,
    round_robin,
)
from powergossip.topologies.topology import Topology
from powergossip.topologies.weights import WEIGHTS, Weights

TOPOLOGIES: dict[str, Callable[..., Topology]] = {  # name → function(n_workers, seed, **options)
    **UNDIRECTED,
    "unidirectional-ring": unidirectional_ring,
    "exponential": exponential,
    "equi-static": equi_static,
    "one-peer-exponential": one_peer_exponential,
    "one-peer-equi": one_peer_equi,
    "base-graph": base_graph,
    "random-matching": random_matching,
    "epidemic": epidemic,
    "round-robin": round_robin,
}


def is_graph(topology: object) -> bool:
    """True for a `Topology` or a graph of networkx, False for a name or path."""
    return isinstance(topology, Topology) or hasattr(topology, "is_directed")


def name_of(topology: Any) -> str:
    """The name of a topology, of a graph, or of a file. Raises ValueError for another object."""
    if isinstance(topology, Topology):
        return topology.name
    if is_graph(topology):
        return str(topology.name or "graph")
    if not isinstance(topology, str | Path):
        raise ValueError(
            f"topology={topology!r}: use a string, a path, a Topology or a graph of networkx"
        )
    return str(topology)


def make(
    name: Any, n_workers: int, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Topology:
    """Build the topology of this name for `n_workers`, or read the graph from the file `name`.

    `name` may also be a `Topology` or an undirected graph of networkx, of this many workers.
    A name that is not in `TOPOLOGIES` is a path if it has a path separator, ends in .edgelist,
    .adjlist or .txt, or is an existing file, or else package.module:name, a function of the user.
    `options` are passed to the topology's function, or to `from_file`. `weights` is a name of
    `WEIGHTS`, for any undirected static graph.

    Raises:
        ValueError: For an unknown name or option, an option of the wrong type, a graph of another
            size, a graph that is not connected, and a file that cannot be read.
    """
    options = {key: checks.plain(value) for key, value in dict(options or {}).items()}
    n_workers, seed = checks.plain(n_workers), checks.plain(seed)
    checks.at_least_one("n_workers", n_workers)
    if is_graph(name):
        graph, title = name, name_of(name)
        build = (
            (lambda: graph) if isinstance(graph, Topology) else partial(undirected, title, graph)
        )
        own = build(**_checked_options(title, build, options))
        if own.n_workers != n_workers:
            raise ValueError(
                f"topology={own.name}: it has {own.n_workers} workers, the run has {n_workers}; "
                "use as many"
            )
        return own
    name = name_of(name)
    if not is_path(name):
        import_row(TOPOLOGIES, "topology", name, ("n_workers", "seed"))
    if name in TOPOLOGIES:
        checked = _checked_options(name, TOPOLOGIES[name], options)
        made = TOPOLOGIES[name](n_workers, seed, **checked)
        if isinstance(made, Topology) and made.n_workers == n_workers:
            if not are_of_library(TOPOLOGIES[name]):
                again = TOPOLOGIES[name](n_workers, seed, **checked).fingerprint
                if again != made.fingerprint:
                    raise ValueError(
                        f"topology={name}: its function returned two graphs for one seed; draw "
                        "random numbers from the seed, such as np.random.default_rng(seed)"
                    )
            return made
        kind = type(made).__name__
        found = f"{made.n_workers} workers" if isinstance(made, Topology) else f"a {kind}"
        raise ValueError(
            f"topology={name}: its function returned {found}; return a Topology of {n_workers} "
            "workers, such as undirected(name, graph)"
        )
    if not is_path(name):
        raise ValueError(
            f'topology "{name}" is unknown; choose from {", ".join(sorted(TOPOLOGIES))}, '
            f"or give the path of an edge-list or adjacency file"
        )
    checked = _checked_options(name, from_file, options)
    return from_file(Path(name), n_workers, **checked)


# Validation of options


def _checked_options(
    name: str, function: Callable[..., Topology], options: dict[str, Any]
) -> dict[str, Any]:
    """The options, with functions for the names of weights.

    Raises ValueError unless they name keyword-only parameters and have their types.
    """
    known = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    named = {k: v for k, v in options.items() if k in known and known[k].annotation == Weights}
    for key, value in named.items():
        checks.one_of(f"topology_options.{key}", value, WEIGHTS)
    others = {key: value for key, value in options.items() if key not in named}
    checked = check(f"topology={name}", others, known, "topology_options.")
    return checked | {key: WEIGHTS[value] for key, value in named.items()}
