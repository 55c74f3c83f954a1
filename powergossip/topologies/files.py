"""Graphs from edge-list and adjacency files."""

import os
from pathlib import Path

import networkx as nx
import numpy as np
from scipy.sparse import csr_array

from powergossip.topologies.mixing import Round, Topology, check_connected
from powergossip.topologies.static import adjacency_matrix, undirected
from powergossip.topologies.weights import Weights, metropolis_hastings, uniform


def is_path(name: str) -> bool:
    """Whether a value of `topology` is the path of a file instead of a name."""
    separators = {os.sep, "/", os.altsep or os.sep}
    return (
        any(s in name for s in separators)
        or Path(name).suffix in (".edgelist", ".adjlist", ".txt")
        or Path(name).is_file()
    )


def from_file(
    path: Path, n_workers: int, *, weights: Weights = metropolis_hastings, directed: bool = False
) -> Topology:
    """Read the graph from an edge-list or adjacency file, as networkx writes them.

    - Edge list: two workers per line. Attributes after them (networkx's `{...}`, a weight) are
      ignored.
    - Adjacency list: a worker followed by its neighbors, each edge once or twice.
    - `#` starts a comment.

    weights: of an undirected graph. directed: the first worker of a line sends to the others, as in
    files of networkx's DiGraph. See `_directed` for the weights.

    The suffix .edgelist or .adjlist determines the format. For other suffixes the contents do:
    lines of two names mean the same in both formats. If the names are 0 … n−1, they are the worker
    indices. Otherwise the sorted names (integers by value) are the workers 0, 1, …, and the note of
    the topology lists them.

    Raises ValueError, with file and line, for a file that cannot be read.
    """
    if directed and weights is not metropolis_hastings:
        raise ValueError(
            "topology_options.directed=true: leave weights out; those of a directed graph follow "
            "from its degrees"
        )
    subject = f"the graph in {path}"
    graph: nx.Graph[str] = nx.DiGraph() if directed else nx.Graph()
    for name, neighbors in _read_lines(path):
        graph.add_node(name)
        graph.add_edges_from((name, neighbor) for neighbor in neighbors)
    if not graph:
        raise ValueError(f"{path} holds no edges")

    note = ""
    try:
        order = sorted(graph, key=int)
        integers = True
    except ValueError:
        order = sorted(graph)
        integers = False
    if not integers or [int(name) for name in order] != list(range(len(order))):
        shown = ", ".join(f"{i} is {name}" for i, name in enumerate(order[:4]))
        note = f"workers are the sorted names in the file: {shown}{', ...' * (len(order) > 4)}"
    if len(order) != n_workers:
        near = integers and int(order[0]) >= 0 and int(order[-1]) < n_workers
        missing = sorted(set(range(n_workers)) - set(map(int, order))) if near else []
        hint = f" (worker {missing[0]} is missing)" if missing else ""
        raise ValueError(
            f"n_workers={n_workers}: use {len(order)}; {subject} has {len(order)} workers{hint}"
        )
    ordered = nx.empty_graph(0, create_using=nx.DiGraph if directed else nx.Graph)
    ordered.add_nodes_from(order)
    ordered.add_edges_from((a, b) for a, b in graph.edges() if a != b)
    if directed:
        receives = csr_array(nx.to_scipy_sparse_array(ordered).T)
        check_connected(receives, subject)
        return _directed(str(path), receives, note)
    check_connected(adjacency_matrix(ordered), subject)
    return undirected(str(path), ordered, weights, note=note)


def _directed(name: str, adjacency: csr_array, note: str) -> Topology:
    """The static topology of a directed graph: adjacency csr [receiver, sender].

    Where all workers have as many sources as targets, the weights are equal, 1/(1 + the largest
    degree), and W is doubly stochastic. Otherwise they are 1/(1 + number of sources), and W is
    row-stochastic only: for push-sum, which does not use W.
    """
    sources, targets = (np.asarray(adjacency.sum(axis)).ravel() for axis in (1, 0))
    balanced = bool((sources == targets).all())
    weights = uniform(adjacency) if balanced else adjacency.multiply(1 / (1 + sources)[:, None])
    return Topology(name, (Round(csr_array(weights)),), row_stochastic=not balanced, note=note)


def _read_lines(path: Path) -> list[tuple[str, list[str]]]:
    """(name of the worker, names of its neighbors) for each line.

    Raises ValueError, with file and line, for a line of another format.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"topology {path} cannot be read: {reason}") from error
    numbered = [(k, line.partition("#")[0].strip()) for k, line in enumerate(text.split("\n"), 1)]
    lines = [(k, line) for k, line in numbered if line]

    is_edge_list = path.suffix == ".edgelist"
    if path.suffix not in (".edgelist", ".adjlist"):
        is_edge_list = any("{" in line for _, line in lines)
        if not is_edge_list and lines and all(len(line.split()) == 3 for _, line in lines):
            raise ValueError(
                f"{path} may be an edge list with weights or an adjacency list; "
                f"use the suffix .edgelist or .adjlist"
            )
    read = []
    for number, line in lines:
        first, *others = line.split()
        if is_edge_list:
            if not others or not (len(others) < 3 or others[1].startswith("{")):
                raise ValueError(
                    f'{path}, line {number}: "{line}" is not an edge; use two workers per line'
                )
            others = others[:1]
        invalid = [name for name in (first, *others) if set(name) & set("{}[](),;:")]
        if invalid:
            raise ValueError(f'{path}, line {number}: "{invalid[0]}" is not the name of a worker')
        read.append((first, others))
    return read
