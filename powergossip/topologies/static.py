"""Weights of undirected graphs, and the topologies of one round, undirected and directed."""

import math
from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np
from scipy.sparse import csr_array

from powergossip import randomness
from powergossip.topologies.mixing import Round, Topology

Weights = Callable[[csr_array], csr_array]


# Weights of undirected graphs


def metropolis_hastings(adjacency: csr_array) -> csr_array:
    """w_ij = 1/(1 + max(deg_i, deg_j)) on the edges of a symmetric 0/1 adjacency matrix.

    csr [worker, worker]. Xiao, Boyd & Lall (2005), doi:10.1109/IPSN.2005.1440896.
    """
    degree = np.diff(adjacency.indptr)
    row = np.repeat(np.arange(len(degree)), degree)
    values = 1 / (1 + np.maximum(degree[row], degree[adjacency.indices]))
    return csr_array((values, adjacency.indices, adjacency.indptr), shape=adjacency.shape)


def uniform(adjacency: csr_array) -> csr_array:
    """w_ij = 1/(1 + the largest degree of the graph) on the edges of a 0/1 adjacency matrix.

    csr [worker, worker]; symmetric as the adjacency matrix is.
    """
    largest = np.diff(adjacency.indptr).max(initial=0)
    return csr_array(adjacency / (1 + largest))


def undirected(
    name: str, graph: nx.Graph, weights: Weights = metropolis_hastings, note: str = ""
) -> Topology:
    """The static topology of a networkx graph: its nodes, in its own order, are the workers.

    Loops and whatever stands on the edges are left out. ValueError if it is not connected.
    """
    return Topology(name, (Round(weights(adjacency_matrix(graph))),), note=note)


def adjacency_matrix(graph: nx.Graph) -> csr_array:
    """Symmetric 0/1 matrix without a diagonal: csr [worker, worker], columns sorted."""
    numbers = {node: i for i, node in enumerate(graph)}
    pairs = np.array([(numbers[a], numbers[b]) for a, b in graph.edges() if a != b], dtype=np.int64)
    pairs = pairs.reshape(-1, 2)
    row, column = np.concatenate([pairs, pairs[:, ::-1]]).T
    adjacency = csr_array((np.ones(len(row)), (row, column)), shape=(len(numbers), len(numbers)))
    adjacency.sort_indices()
    return adjacency


# The graphs


def ring(n_workers: int, seed: int) -> Topology:
    """Worker i and i ± 1 talk. Two workers share one edge."""
    return undirected("ring", nx.cycle_graph(n_workers))


def unidirectional_ring(n_workers: int, seed: int) -> Topology:
    """Worker i hears only i − 1, with weight 1/2. Directed."""
    hops = [1] if n_workers > 1 else []
    return Topology("unidirectional-ring", (circulant(n_workers, hops),))


def chain(n_workers: int, seed: int) -> Topology:
    """A ring that is not closed."""
    return undirected("chain", nx.path_graph(n_workers))


def star(n_workers: int, seed: int) -> Topology:
    """Everyone talks to worker 0 only."""
    return undirected("star", nx.star_graph(n_workers - 1))


def fully_connected(n_workers: int, seed: int) -> Topology:
    """Everyone talks to everyone; plain gossip at rate 1 averages in one step."""
    weights = np.full((n_workers, n_workers), 1 / n_workers)
    np.fill_diagonal(weights, 0)
    return Topology("fully-connected", (Round(csr_array(weights)),))


def torus(n_workers: int, seed: int) -> Topology:
    """A grid of a × b workers closed in both directions, a the largest divisor of n up to √n.

    A dimension of size 2 has single edges (8 workers: 2 × 4, three neighbors each), and a prime
    number of workers makes a ring. Row-major numbers.
    """
    a = next(d for d in range(math.isqrt(n_workers), 0, -1) if n_workers % d == 0)
    return undirected("torus", nx.grid_2d_graph(a, n_workers // a, periodic=True))


def hypercube(n_workers: int, seed: int) -> Topology:
    """Workers whose numbers differ in one bit talk. ValueError unless n is a power of two."""
    dimension = n_workers.bit_length() - 1
    if n_workers != 2**dimension:
        raise ValueError(
            f'topology "hypercube" needs a power of two, n_workers is {n_workers}; '
            f"use {2**dimension} or {2 ** (dimension + 1)}"
        )
    cube = nx.hypercube_graph(dimension) if dimension else nx.empty_graph(1)
    return undirected("hypercube", cube)


def binary_tree(n_workers: int, seed: int) -> Topology:
    """Worker i's children are 2i + 1 and 2i + 2."""
    return undirected("binary-tree", nx.full_rary_tree(2, n_workers))


def exponential(n_workers: int, seed: int) -> Topology:
    """Worker i hears i − 1, i − 2, i − 4, … (mod n), ⌈log2 n⌉ workers, all weights the same.

    Directed and doubly stochastic. The static exponential graph of Ying et al. (2021),
    arXiv 2110.13363.
    """
    hops = [2**k for k in range((n_workers - 1).bit_length())]
    return Topology("exponential", (circulant(n_workers, hops),))


def social_network(n_workers: int, seed: int) -> Topology:
    """Who met whom in Natchez in the 1930s: 18 women and 14 events, 32 workers, no other number.

    Davis, Gardner & Gardner (1941), as networkx ships it: the women first.
    """
    graph = nx.davis_southern_women_graph()
    _refuse_size("social-network", len(graph), n_workers)
    return undirected("social-network", graph)


def watts_strogatz(
    n_workers: int, seed: int, *, degree: int | None = None, rewiring: float = 0.1
) -> Topology:
    """A ring lattice, each worker joined to its `degree` nearest, each edge moved with probability
    `rewiring`; drawn again until it is connected. Watts & Strogatz (1998), doi:10.1038/30918.

    degree: even, less than n; 4 by default (less for fewer than 5 workers). ValueError for other
    values, or if none of 100 draws is connected.
    """
    name = "watts-strogatz"
    if degree is None:
        degree = min(4, (n_workers - 1) // 2 * 2)
        if n_workers <= 2:
            return undirected(name, nx.path_graph(n_workers))
    if degree % 2 or not 2 <= degree < n_workers:
        raise ValueError(
            f'topology "{name}": degree={degree} must be even, at least 2 and less than '
            f"n_workers, which is {n_workers}"
        )
    if not 0 <= rewiring <= 1:
        raise ValueError(f'topology "{name}": rewiring={rewiring} must be between 0 and 1')
    return undirected(
        name,
        _first_connected(
            name, seed, lambda draw: nx.watts_strogatz_graph(n_workers, degree, rewiring, draw)
        ),
    )


def random_regular(n_workers: int, seed: int, *, degree: int | None = None) -> Topology:
    """A graph drawn from all those in which every worker has `degree` neighbors, and connected.

    degree: less than n, n · degree even; 4 by default (n − 1 for fewer than 5 workers).
    ValueError for other values, or if none of 100 draws is connected.
    """
    name = "random-regular"
    if degree is None:
        degree = min(4, n_workers - 1)
    if not 0 <= degree < n_workers or n_workers * degree % 2:
        raise ValueError(
            f'topology "{name}": degree={degree} must be less than n_workers, which is '
            f"{n_workers}, and their product even"
        )
    return undirected(
        name,
        _first_connected(name, seed, lambda draw: nx.random_regular_graph(degree, n_workers, draw)),
    )


UNDIRECTED: dict[str, Callable[..., Topology]] = {  # static, symmetric weights
    "ring": ring,
    "chain": chain,
    "star": star,
    "fully-connected": fully_connected,
    "torus": torus,
    "hypercube": hypercube,
    "binary-tree": binary_tree,
    "social-network": social_network,
    "watts-strogatz": watts_strogatz,
    "random-regular": random_regular,
}


def circulant(n_workers: int, hops: Sequence[int]) -> Round:
    """Worker i hears i − hop (mod n) for each hop, all weights 1/(1 + number of hops)."""
    row = np.repeat(np.arange(n_workers), len(hops))
    column = (row - np.tile(np.asarray(hops, dtype=np.int64), n_workers)) % n_workers
    values = np.full(len(row), 1 / (1 + len(hops)))
    return Round(csr_array((values, (row, column)), shape=(n_workers,) * 2))


def _first_connected(name: str, seed: int, draw: Callable[[int], nx.Graph]) -> nx.Graph:
    """The first connected graph of 100 draws, each from a seed of its own; nodes in order."""
    for attempt in range(100):
        drawn = draw(int(randomness.generator(seed, f"topology {name}", attempt).integers(2**32)))
        if nx.is_connected(drawn):
            graph = nx.empty_graph(len(drawn))
            graph.add_edges_from(drawn.edges())
            return graph
    raise ValueError(f'topology "{name}": none of 100 draws is connected; use a larger degree')


def _refuse_size(what: str, found: int, n_workers: int) -> None:
    if found != n_workers:
        raise ValueError(f"{what} has {found} workers, n_workers is {n_workers}")
