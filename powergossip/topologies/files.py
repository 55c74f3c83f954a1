"""Graphs from edge-list and adjacency files."""

import os
from pathlib import Path

import networkx as nx

from powergossip.topologies.mixing import Topology, refuse_disconnected
from powergossip.topologies.static import adjacency_matrix, undirected


def means_a_file(name: str) -> bool:
    separators = {os.sep, "/", os.altsep or os.sep}
    return (
        any(s in name for s in separators)
        or Path(name).suffix in (".edgelist", ".adjlist", ".txt")
        or Path(name).is_file()
    )


def from_file(path: Path, n_workers: int) -> Topology:
    """The undirected graph in an edge-list or adjacency file, as networkx writes them.

    Edge list: two workers a line; what follows them (networkx's `{...}`, a number) is not used.
    Adjacency list: a worker and then its neighbors, each edge once or twice. `#` begins a comment.
    The suffix .edgelist or .adjlist tells which; of another file, lines of two say the same either
    way, and otherwise the contents decide. Workers are numbered as in the file if its names
    are 0 … n−1; if not, names are sorted (whole numbers as numbers) and numbered, and the
    topology's note says so. ValueError naming file and line for what cannot be read.
    """
    what = f"the graph in {path}"
    graph: nx.Graph[str] = nx.Graph()
    for names, neighbors in _read_lines(path):
        graph.add_node(names)
        graph.add_edges_from((names, neighbor) for neighbor in neighbors)
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
        note = f"the file's names are sorted and numbered: {shown}{', ...' * (len(order) > 4)}"
    if len(order) != n_workers:
        missing = set(range(int(order[-1]) + 1)) - set(map(int, order)) if integers else set()
        hint = f" (no line names worker {min(missing)})" if missing else ""
        raise ValueError(f"{what} has {len(order)} workers{hint}, n_workers is {n_workers}")
    ordered = nx.empty_graph(0)
    ordered.add_nodes_from(order)
    ordered.add_edges_from(graph.edges())
    refuse_disconnected(adjacency_matrix(ordered), what)
    return undirected(str(path), ordered, note=note)


def _read_lines(path: Path) -> list[tuple[str, list[str]]]:
    """(a worker's name, the names of neighbors) of each line; ValueError naming file and line."""
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
                f"{path} may be an edge list with weights or an adjacency list: "
                f"name it .edgelist or .adjlist"
            )
    read = []
    for number, line in lines:
        first, *others = line.split()
        if is_edge_list:
            if not others or not (len(others) < 3 or others[1].startswith("{")):
                raise ValueError(
                    f'{path}, line {number}: "{line}" is not an edge; an edge list has two '
                    f"workers a line"
                )
            others = others[:1]
        odd = [name for name in (first, *others) if set(name) & set("{}[](),;:")]
        if odd:
            raise ValueError(f'{path}, line {number}: "{odd[0]}" is not the name of a worker')
        read.append((first, others))
    return read
