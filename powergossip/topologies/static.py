"""Static topologies, undirected and directed, and the weights of undirected graphs."""

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
    """The static topology of a networkx graph. Its nodes, in its own order, are the workers.

    Self-loops and edge attributes are ignored. Raises ValueError if the graph is not connected.
    """
    return Topology(name, (Round(weights(adjacency_matrix(graph))),), note=note)


def adjacency_matrix(graph: nx.Graph) -> csr_array:
    """Symmetric 0/1 matrix without a diagonal: csr [worker, worker], columns sorted."""
    index = {node: i for i, node in enumerate(graph)}
    pairs = np.array([(index[a], index[b]) for a, b in graph.edges() if a != b], dtype=np.int64)
    pairs = pairs.reshape(-1, 2)
    row, column = np.concatenate([pairs, pairs[:, ::-1]]).T
    adjacency = csr_array((np.ones(len(row)), (row, column)), shape=(len(index), len(index)))
    adjacency.sort_indices()
    return adjacency


# The graphs


def ring(n_workers: int, seed: int) -> Topology:
    """Workers i and i ± 1 are neighbors. Two workers share one edge."""
    return undirected("ring", nx.cycle_graph(n_workers))


def unidirectional_ring(n_workers: int, seed: int) -> Topology:
    """Worker i receives from i − 1 only, with weight 1/2. Directed."""
    hops = [1] if n_workers > 1 else []
    return Topology("unidirectional-ring", (circulant(n_workers, hops),))


def chain(n_workers: int, seed: int) -> Topology:
    """A ring without one edge."""
    return undirected("chain", nx.path_graph(n_workers))


def star(n_workers: int, seed: int) -> Topology:
    """Worker 0 is the only neighbor of every other worker."""
    return undirected("star", nx.star_graph(n_workers - 1))


def fully_connected(n_workers: int, seed: int) -> Topology:
    """Every two workers are neighbors. Plain gossip at rate 1 averages in one step."""
    weights = np.full((n_workers, n_workers), 1 / n_workers)
    np.fill_diagonal(weights, 0)
    return Topology("fully-connected", (Round(csr_array(weights)),))


def torus(n_workers: int, seed: int) -> Topology:
    """A grid of a × b workers closed in both directions, a the largest divisor of n up to √n.

    A dimension of size 2 has single edges (8 workers: 2 × 4, three neighbors each). A prime number
    of workers gives a ring. Indices are row-major.
    """
    a = next(d for d in range(math.isqrt(n_workers), 0, -1) if n_workers % d == 0)
    return undirected("torus", nx.grid_2d_graph(a, n_workers // a, periodic=True))


def hypercube(n_workers: int, seed: int) -> Topology:
    """Two workers are neighbors if their indices differ in one bit.

    Raises ValueError unless n is a power of two.
    """
    dimension = n_workers.bit_length() - 1
    if n_workers != 2**dimension:
        raise ValueError(
            f"n_workers={n_workers}: use a power of two, like {2**dimension} or "
            f'{2 ** (dimension + 1)}, with topology "hypercube"'
        )
    cube = nx.hypercube_graph(dimension) if dimension else nx.empty_graph(1)
    return undirected("hypercube", cube)


def binary_tree(n_workers: int, seed: int) -> Topology:
    """Worker i's children are 2i + 1 and 2i + 2."""
    return undirected("binary-tree", nx.full_rary_tree(2, n_workers))


def exponential(n_workers: int, seed: int) -> Topology:
    """Worker i receives from i − 1, i − 2, i − 4, … (mod n), ⌈log2 n⌉ workers, with equal weights.

    Directed and doubly stochastic. The static exponential graph of Ying et al. (2021),
    arXiv 2110.13363.
    """
    hops = [2**k for k in range((n_workers - 1).bit_length())]
    return Topology("exponential", (circulant(n_workers, hops),))


def social_network(n_workers: int, seed: int) -> Topology:
    """The social network of Natchez in the 1930s: 18 women and the 14 events that they attended.

    Davis, Gardner & Gardner (1941), as networkx ships it: the women first. Raises ValueError unless
    n is 32.
    """
    graph = nx.davis_southern_women_graph()
    if n_workers != len(graph):
        raise ValueError(f'n_workers={n_workers}: use {len(graph)} with topology "social-network"')
    return undirected("social-network", graph)


def watts_strogatz(
    n_workers: int, seed: int, *, degree: int | None = None, rewiring: float = 0.1
) -> Topology:
    """A ring lattice with `degree` neighbors per worker and edges rewired at random.

    Each edge is rewired with probability `rewiring`. The graph is resampled until it is connected.
    Watts & Strogatz (1998), doi:10.1038/30918.

    degree: even, less than n, by default 4 (less for fewer than 5 workers). Raises ValueError for
    other values, or if none of 100 samples is connected.
    """
    name = "watts-strogatz"
    if degree is None:
        degree = min(4, (n_workers - 1) // 2 * 2)
        if n_workers <= 2:
            return undirected(name, nx.path_graph(n_workers))
    if degree % 2 or not 2 <= degree < n_workers:
        raise ValueError(
            f"topology_options.degree={degree}: use an even number of 2 or more, less than "
            f"n_workers={n_workers}"
        )
    if not 0 <= rewiring <= 1:
        raise ValueError(f"topology_options.rewiring={rewiring}: use a number from 0 to 1")
    return undirected(
        name,
        _connected_sample(
            name, seed, lambda seed: nx.watts_strogatz_graph(n_workers, degree, rewiring, seed)
        ),
    )


def random_regular(n_workers: int, seed: int, *, degree: int | None = None) -> Topology:
    """A random connected graph in which every worker has `degree` neighbors.

    degree: less than n, with n · degree even, by default 4 (n − 1 for fewer than 5 workers). Raises
    ValueError for other values, or if none of 100 samples is connected.
    """
    name = "random-regular"
    if degree is None:
        degree = min(4, n_workers - 1)
    if not 0 <= degree < n_workers or n_workers * degree % 2:
        raise ValueError(
            f"topology_options.degree={degree}: use less than n_workers={n_workers}, with an even "
            f"product of the two"
        )
    return undirected(
        name,
        _connected_sample(
            name, seed, lambda seed: nx.random_regular_graph(degree, n_workers, seed)
        ),
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
    """Worker i receives from i − hop (mod n) for each hop, with weights 1/(1 + number of hops)."""
    row = np.repeat(np.arange(n_workers), len(hops))
    column = (row - np.tile(np.asarray(hops, dtype=np.int64), n_workers)) % n_workers
    values = np.full(len(row), 1 / (1 + len(hops)))
    return Round(csr_array((values, (row, column)), shape=(n_workers,) * 2))


def _connected_sample(name: str, seed: int, sample: Callable[[int], nx.Graph]) -> nx.Graph:
    """The first connected graph of 100 samples with derived seeds; nodes in order."""
    for attempt in range(100):
        derived = int(randomness.generator(seed, f"topology {name}", attempt).integers(2**32))
        sampled = sample(derived)
        if nx.is_connected(sampled):
            graph = nx.empty_graph(len(sampled))
            graph.add_edges_from(sampled.edges())
            return graph
    raise ValueError(
        f'topology "{name}": none of 100 random graphs is connected; use a larger degree'
    )
