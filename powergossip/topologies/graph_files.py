"""Graphs from edge-list and adjacency files."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import csr_array

from powergossip import reading
from powergossip.topologies.static import adjacency, from_edges
from powergossip.topologies.topology import Round, Topology, check_connected
from powergossip.topologies.weights import Weights, metropolis_hastings, uniform

_Line: TypeAlias = tuple[int, list[str]]  # its number and words


def is_path(name: str) -> bool:
    """True if a value of `topology` is the path of a file instead of a name."""
    separators = {os.sep, "/", os.altsep or os.sep}
    return (
        any(s in name for s in separators)
        or Path(name).suffix in (".edgelist", ".adjlist", ".txt", *_OF_NETWORKX)
        or Path(name).is_file()
    )


def from_file(
    path: Path, n_workers: int, *, weights: Weights = metropolis_hastings, directed: bool = False
) -> Topology:
    """Read the graph from an edge-list or adjacency file, as networkx writes them, or from another
    file that networkx reads: .gml, .graphml, .gexf, .net (Pajek) or .mtx (Matrix Market).

    - Edge list: two workers per line, each edge in one or both directions. Attributes after them
      (networkx's `{...}`, a weight) are ignored, but weights must be equal.
    - Adjacency list: a worker followed by its neighbors, each edge once or twice.
    - `#` starts a comment, and `%` a line that is one.
    - Where workers are numbers, the first line may be their number, or names of columns. After
      their number, maybe with the number of edges (METIS), each further line may have the neighbors
      only.

    The suffix .edgelist or .adjlist determines the format. For other suffixes the contents do:
    lines of two names mean the same in both formats. If the names are 0 … n−1, they are the worker
    indices. Otherwise the sorted names (integers by value) are the workers 0, 1, …, and the note of
    the topology lists them.

    Args:
        weights: Weights of an undirected graph.
        directed: True if the first worker of a line sends to the others, as in files of networkx's
            DiGraph. See `_directed` for the weights.

    Raises:
        ValueError: With file and line, for a file that cannot be read, an edge that is listed twice
            in the same direction or joins a worker with itself, and weights that differ.
    """
    if directed and weights is not metropolis_hastings:
        raise ValueError(
            "topology_options.directed=true: leave weights out; those of a directed graph follow "
            "from its degrees"
        )
    subject = f"the graph in {path}"
    index: dict[str, int] = {}  # name → position in the file
    pairs: list[int] = []
    numbers: list[int] = []  # line of each edge
    is_networkx = path.suffix in _OF_NETWORKX
    for number, first, others in (_read_graph if is_networkx else _read_lines)(path):
        own = index.setdefault(first, len(index))
        for name in others:
            pairs += own, index.setdefault(name, len(index))
            numbers.append(number)
    if not index:
        raise ValueError(f"{path} holds no edges")
    _check_edges(path, np.array(pairs, dtype=np.int64).reshape(-1, 2), numbers, [*index])
    linked = {*pairs}
    for name, own in index.items():
        if own not in linked and len(index) > 1:
            raise ValueError(f"{subject} is not connected: worker {name} has no neighbor; {_FORMS}")
    order, integers = _ordered(index)
    if len(order) != n_workers:
        near = integers and int(order[0]) >= 0 and int(order[-1]) < n_workers
        missing = sorted(set(range(n_workers)) - set(map(int, order))) if near else []
        hint = f" (worker {missing[0]} is missing)" if missing else ""
        raise ValueError(
            f"n_workers={n_workers}: use {len(order)}; {subject} has {len(order)} workers{hint}"
        )
    note = ""
    if not integers or [int(name) for name in order] != list(range(len(order))):
        shown = ", ".join(f"{i} is {name}" for i, name in enumerate(order[:4]))
        note = f"workers are the sorted names in the file: {shown}{', ...' * (len(order) > 4)}"
    worker = np.empty(n_workers, dtype=np.int64)
    worker[[index[name] for name in order]] = np.arange(n_workers)
    edges = worker[np.array(pairs, dtype=np.int64).reshape(-1, 2)]
    if directed:
        receives = adjacency(n_workers, edges[:, ::-1])
        check_connected(receives, subject)
        return _directed(str(path), receives, note)
    return from_edges(str(path), n_workers, edges, weights, note, subject=subject)


def _ordered(names: Iterable[str]) -> tuple[list[str], bool]:
    """The sorted names, and whether they are integers, which are sorted by value."""
    try:
        return sorted(names, key=int), True
    except ValueError:
        return sorted(names), False


def _check_edges(
    path: Path, edges: np.ndarray, numbers: Sequence[int], names: Sequence[str]
) -> None:
    """Raise ValueError for an edge of a worker to itself, or one that is listed twice.

    Args:
        edges: Workers [edge, 2].
        numbers: Line numbers [edge].
    """
    for edge in np.flatnonzero(edges[:, 0] == edges[:, 1])[:1]:
        name = names[edges[edge, 0]]
        raise ValueError(
            f"{path}, line {numbers[edge]}: worker {name} is listed as its own neighbor; {_FORMS}"
        )
    keys = edges[:, 0] * len(names) + edges[:, 1]
    by_key = np.argsort(keys, kind="stable")
    for edge in np.flatnonzero(np.diff(keys[by_key]) == 0)[:1]:
        first, again = by_key[edge : edge + 2]
        a, b = (names[worker] for worker in edges[again])
        raise ValueError(
            f"{path}, line {numbers[again]}: the edge {a} {b} is also in line {numbers[first]}; "
            "use it once"
        )


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


def _read_lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(number, name of the worker, names of its neighbors) for each line with workers.

    Raises ValueError, with file and line, for a line of another format.
    """
    try:
        text = reading.text(path)
    except reading.Unreadable as error:
        raise ValueError(f"topology {path} cannot be read: {error}") from error
    numbered = ((k, line.partition("#")[0].split()) for k, line in enumerate(text.split("\n"), 1))
    lines = [(k, words) for k, words in numbered if words and not words[0].startswith("%")]

    is_edge_list = path.suffix == ".edgelist"
    if path.suffix not in (".edgelist", ".adjlist"):
        is_edge_list = any("{" in word for _, words in lines for word in words)
    lines = _without_header(lines, is_edge_list)
    is_known = is_edge_list or path.suffix == ".adjlist"
    if not is_known and lines and all(len(words) == 3 for _, words in lines):
        raise ValueError(
            f"{path} may be an edge list with weights or an adjacency list; "
            f"use the suffix .edgelist or .adjlist"
        )
    all_names = not _NO_NAME.search(text)
    weight = None
    for number, words in lines:
        first, *others = words
        if is_edge_list and len(words) != 2:
            found = _WEIGHT.fullmatch(" ".join(words[2:]))
            if not others or found is None:
                raise ValueError(
                    f'{path}, line {number}: "{" ".join(words)}" is not an edge; use two workers '
                    "per line, which a weight or {...} may follow"
                )
            own = float(found["number"] or found["value"] or 1)
            weight = own if weight is None else weight
            if own != weight:
                raise ValueError(
                    f"{path}, line {number}: the weight {own:g} differs from {weight:g} above; "
                    "leave weights out, which follow from topology_options.weights"
                )
            others = others[:1]
        for name in () if all_names else (first, *others):
            if _NO_NAME.search(name):
                raise ValueError(
                    f'{path}, line {number}: "{name}" is not the name of a worker; {_FORMS}'
                )
        yield number, first, others


def _without_header(lines: list[_Line], is_edge_list: bool) -> list[_Line]:
    """The lines without the header, each with a worker and its neighbors."""
    (_, header), rest = lines[0] if lines else (0, []), lines[1:]
    names = {name for _, words in rest for name in (words[:2] if is_edge_list else words)}
    if not rest or not all(map(str.isdecimal, names)):
        return lines
    if not any(map(str.isdecimal, header)):
        return rest
    if header[0] != str(len(names)) or len(header) > 2:
        return lines
    rows = {str(i): words for i, (_, words) in enumerate(rest, min(map(int, names)))}
    both_ways = all(i != j and i in rows.get(j, ()) for i in rows for j in rows[i])
    if both_ways and len(rest) == len(names) and not is_edge_list:
        return [(k, [i, *words]) for i, (k, words) in zip(rows, rest, strict=True)]
    return rest if len(header) == 1 else lines


def _read_graph(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """The same, without lines, of a file that networkx reads. Self-loops are ignored."""
    import networkx as nx
    from scipy.io import mmread

    readers: dict[str, Callable[[Path], Any]] = {
        ".gml": partial(nx.read_gml, label="id"),
        ".graphml": nx.read_graphml,
        ".gexf": nx.read_gexf,
        ".net": nx.read_pajek,
        ".mtx": lambda path: nx.from_scipy_sparse_array(csr_array(mmread(path))),
    }
    try:
        found = readers[path.suffix](path)
    except Exception as error:  # of the readers, of many types
        raise ValueError(f"topology {path} cannot be read: {error}") from error
    graph = nx.DiGraph(found) if found.is_directed() else nx.Graph(found)
    for node in graph:
        yield 0, str(node), []
    for a, b in graph.edges():
        if a != b:
            yield 0, str(a), [str(b)]


_OF_NETWORKX = (".gml", ".graphml", ".gexf", ".net", ".mtx")
_FORMS = (
    "use two workers in a line, or a worker and its neighbors, or a file whose name ends in "
    f"{', '.join(_OF_NETWORKX)}"
)
_NO_NAME = re.compile(r'[{}\[\](),;:*"]|(?<!\S)\d+\.\d+(e[-+]\d+)?(?!\S)')
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_WEIGHT = re.compile(
    rf"(?P<number>{_NUMBER})?|\{{(?:.*'weight': (?P<value>{_NUMBER})\b)?.*\}}"
)  # after the two workers of an edge
