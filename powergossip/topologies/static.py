"""Static topologies, undirected and directed."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from powergossip import checks, randomness
from powergossip.topologies.topology import Round, Topology, Tree, check_connected
from powergossip.topologies.weights import Weights, metropolis_hastings

if TYPE_CHECKING:
    from networkx import Graph

MOST_EDGES = 4 * 10**7  # gigabytes
EQUI_SAMPLES = 100  # of the shifts of `equi_static`


# Undirected graphs


def undirected(
    name: str,
    graph: "Graph[Any]",
    weights: Weights = metropolis_hastings,
    note: str = "",
    trees: tuple[Tree, ...] | None = None,
) -> Topology:
    """The static topology of a networkx graph.

    Nodes 0 … n−1 are the indices of the workers. Other nodes are workers in the graph's own order.
    Self-loops and edge attributes are ignored. `trees` as in `Topology`.

    Raises:
        ValueError: If the graph is directed, or not connected.
    """
    if graph.is_directed():
        raise ValueError(
            f'topology "{name}" is directed: use an undirected graph, or write it to a file for '
            "topology_options.directed=true"
        )
    n = len(graph)
    if n == 0:
        raise ValueError(f'topology "{name}" has no workers; use a graph with nodes')
    index = {node: i for i, node in enumerate(graph)}
    if index.keys() == set(range(n)):
        index = {i: i for i in range(n)}
    edges = [(index[a], index[b]) for a, b in graph.edges()]
    return from_edges(name, n, edges, weights, note, trees)


def from_edges(
    name: str,
    n_workers: int,
    edges: ArrayLike,
    weights: Weights = metropolis_hastings,
    note: str = "",
    trees: tuple[Tree, ...] | None = None,
    subject: str = "",
) -> Topology:
    """The static topology of undirected edges, pairs of workers [edge, 2], as `undirected`.

    An edge that is listed several times counts once.

    Args:
        subject: Subject of an error about them.
    """
    pairs = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    graph = adjacency(n_workers, np.concatenate([pairs, pairs[:, ::-1]]))
    # Before the weights, which may require it.
    check_connected(graph, subject or f'topology "{name}"')
    return Topology(name, (Round(weights(graph)),), note=note, trees=trees)


def adjacency(n_workers: int, edges: np.ndarray) -> csr_array:
    """0/1 matrix of directed edges (row, column), [edge, 2], without the diagonal.

    csr [worker, worker], columns sorted.
    """
    row, column = edges[edges[:, 0] != edges[:, 1]].T
    found = csr_array((np.ones(len(row)), (row, column)), shape=(n_workers, n_workers))
    found.sum_duplicates()
    found.data[:] = 1
    return found


def check_degree(n_workers: int, degree: int) -> None:
    """Raise ValueError for a graph of too many edges to be stored."""
    accepted = f"{MOST_EDGES // degree} or less with {degree} neighbors" if degree else "1"
    checks.check("n_workers", n_workers, n_workers * degree <= MOST_EDGES, accepted)


# The graphs


def ring(n_workers: int, seed: int, *, weights: Weights = metropolis_hastings) -> Topology:
    """Workers i and i ± 1 are neighbors. Two workers share one edge."""
    i = np.arange(n_workers)
    return from_edges("ring", n_workers, np.stack([i, (i + 1) % n_workers], 1), weights)


def unidirectional_ring(n_workers: int, seed: int) -> Topology:
    """Worker i receives from i − 1 only, with weight 1/2. Directed."""
    hops = [1] if n_workers > 1 else []
    return Topology("unidirectional-ring", (circulant(n_workers, hops),))


def chain(n_workers: int, seed: int, *, weights: Weights = metropolis_hastings) -> Topology:
    """A ring without one edge."""
    return from_edges("chain", n_workers, _path(n_workers), weights)


def _path(n_workers: int) -> np.ndarray:
    """The edges of a chain."""
    i = np.arange(1, n_workers)
    return np.stack([i - 1, i], 1)


def star(n_workers: int, seed: int, *, weights: Weights = metropolis_hastings) -> Topology:
    """Worker 0 is the only neighbor of every other worker."""
    i = np.arange(1, n_workers)
    return from_edges("star", n_workers, np.stack([0 * i, i], 1), weights)


def fully_connected(
    n_workers: int, seed: int, *, weights: Weights = metropolis_hastings
) -> Topology:
    """Every two workers are neighbors. Plain gossip at rate 1 averages in one step."""
    check_degree(n_workers, n_workers - 1)
    graph = csr_array(np.ones((n_workers, n_workers)) - np.eye(n_workers))
    return Topology("fully-connected", (Round(weights(graph)),))


def torus(n_workers: int, seed: int, *, weights: Weights = metropolis_hastings) -> Topology:
    """A grid of a × b workers closed in both directions, a the largest divisor of n up to √n.

    A dimension of size 2 has single edges (8 workers: 2 × 4, three neighbors each). A prime number
    of workers gives a ring. Indices are row-major.
    """
    a = next(d for d in range(math.isqrt(n_workers), 0, -1) if n_workers % d == 0)
    i = np.arange(n_workers).reshape(a, -1)
    edges = np.concatenate([np.stack([i, np.roll(i, -1, axis)], -1) for axis in (0, 1)])
    return from_edges("torus", n_workers, edges, weights)


def hypercube(n_workers: int, seed: int, *, weights: Weights = metropolis_hastings) -> Topology:
    """Two workers are neighbors if their indices differ in one bit.

    Raises:
        ValueError: Unless n is a power of two.
    """
    dimension = n_workers.bit_length() - 1
    if n_workers != 2**dimension:
        raise ValueError(
            f"n_workers={n_workers}: use a power of two, like {2**dimension} or "
            f'{2 ** (dimension + 1)}, with topology "hypercube"'
        )
    i = np.arange(n_workers)
    edges = [np.stack([i, i ^ 2**bit], 1) for bit in range(dimension)]
    return from_edges("hypercube", n_workers, edges, weights)


def binary_tree(n_workers: int, seed: int, *, weights: Weights = metropolis_hastings) -> Topology:
    """Worker i's parent is ⌊i/2⌋. The root, worker 0, has one child.

    References:
        Vogels et al. (2021), arXiv:2110.04175, and github.com/epfml/relaysgd.
    """
    return from_edges("binary-tree", n_workers, _binary_tree(n_workers), weights)


def double_binary_tree(
    n_workers: int, seed: int, *, weights: Weights = metropolis_hastings
) -> Topology:
    """The edges of two binary trees: `binary_tree`, and the same with reversed indices.

    In the second tree, worker i has the place of n − 1 − i. A worker has at most three neighbors in
    a tree and four in all: it is a leaf in one of them, or, in the middle of an odd number of
    workers, has two neighbors in each. Relaying sends the even coordinates over `trees[0]` and the
    odd ones over `trees[1]`, which balances the messages. Gossip averages on the union of their
    edges.

    References:
        - Vogels et al. (2021), arXiv:2110.04175.
        - Sanders, Speck & Träff (2009), doi:10.1016/j.parco.2009.09.001, for two trees.
    """
    down = _binary_tree(n_workers)
    up = [(n_workers - 1 - j, n_workers - 1 - i) for i, j in down]
    trees = tuple(sorted(down)), tuple(sorted(up))
    return from_edges("double-binary-tree", n_workers, [*down, *up], weights, trees=trees)


def _binary_tree(n_workers: int) -> list[tuple[int, int]]:
    """The edges (⌊i/2⌋, i) of `binary_tree`."""
    return [(i // 2, i) for i in range(1, n_workers)]


def exponential(n_workers: int, seed: int) -> Topology:
    """Worker i receives from i − 1, i − 2, i − 4, … (mod n), ⌈log2 n⌉ workers, with equal weights.

    Directed and doubly stochastic.

    References:
        Ying et al. (2021), arXiv:2110.13363, the static exponential graph.
    """
    hops = [2**k for k in range((n_workers - 1).bit_length())]
    return Topology("exponential", (circulant(n_workers, hops),))


def equi_static(n_workers: int, seed: int, *, degree: int | None = None) -> Topology:
    """Worker i receives from i − u (mod n) for `degree` random shifts u, the same for all workers.

    w_i,i−u = (n − 1)/(n · degree), and w_ii = 1/n. Directed and doubly stochastic. Of 100 samples
    of the shifts, that with the smallest ‖W − J‖₂ is used. For degree ∝ ln n, it does not depend on
    n in expectation.

    Args:
        degree: Number of neighbors, at least 1 and less than n, by default ⌈log2 n⌉, as
            `exponential`.

    Raises:
        ValueError: For another degree.

    References:
        Song et al. (2022), arXiv:2210.07881, D-EquiStatic, here with distinct shifts.
    """
    if n_workers == 1:
        return Topology("equi-static", (circulant(1, []),))
    if degree is None:
        degree = (n_workers - 1).bit_length()
    accepted = f"1 or more, less than n_workers={n_workers}"
    checks.check("topology_options.degree", degree, 1 <= degree < n_workers, accepted)
    check_degree(n_workers, degree)
    best, smallest = np.arange(0), math.inf
    for sample in range(EQUI_SAMPLES):
        random = randomness.generator(seed, "topology equi-static", sample)
        shifts = 1 + np.sort(random.permutation(n_workers - 1)[:degree])
        norm = _circulant_norm(n_workers, shifts)
        if norm < smallest - 1e-9:  # more than rounding, which differs between machines
            best, smallest = shifts, norm
    weight = (n_workers - 1) / (n_workers * degree)
    return Topology("equi-static", (circulant(n_workers, best.tolist(), weight),))


def _circulant_norm(n_workers: int, shifts: np.ndarray) -> float:
    """‖W − J‖₂ of `equi_static`: the largest |λ_k|, k ≠ 0, of a normal matrix."""
    row = np.zeros(n_workers)
    row[0] = 1 / n_workers
    row[shifts] = (n_workers - 1) / (n_workers * len(shifts))
    return float(np.abs(np.fft.fft(row)[1:]).max())


def social_network(
    n_workers: int, seed: int, *, weights: Weights = metropolis_hastings
) -> Topology:
    """The social network of Natchez in the 1930s: 18 women and the 14 events that they attended.

    The women come first, as networkx ships it.

    Raises:
        ValueError: Unless n is 32.

    References:
        Davis, Gardner & Gardner (1941), Deep South.
    """
    import networkx as nx

    graph = nx.davis_southern_women_graph()
    if n_workers != len(graph):
        raise ValueError(f'n_workers={n_workers}: use {len(graph)} with topology "social-network"')
    return undirected("social-network", graph, weights)


def watts_strogatz(
    n_workers: int,
    seed: int,
    *,
    degree: int | None = None,
    rewiring: float = 0.1,
    weights: Weights = metropolis_hastings,
) -> Topology:
    """A ring lattice with `degree` neighbors per worker and edges rewired at random.

    Each edge is rewired with probability `rewiring`. The graph is resampled until it is connected.

    Args:
        degree: Even number of neighbors, less than n, by default 4 (less for fewer than 5 workers).

    Raises:
        ValueError: For another degree, or if none of 100 samples is connected.

    References:
        Watts & Strogatz (1998), doi:10.1038/30918.
    """
    name = "watts-strogatz"
    if degree is None:
        degree = min(4, (n_workers - 1) // 2 * 2)
        if n_workers <= 2:
            return from_edges(name, n_workers, _path(n_workers), weights)
    ok = degree % 2 == 0 and 2 <= degree < n_workers
    accepted = f"an even number of 2 or more, less than n_workers={n_workers}"
    checks.check("topology_options.degree", degree, ok, accepted)
    ok = 0 <= rewiring <= 1
    checks.check("topology_options.rewiring", rewiring, ok, "a number from 0 to 1")
    check_degree(n_workers, degree)
    import networkx as nx

    def sample(seed: int) -> "Graph[Any]":
        return nx.watts_strogatz_graph(n_workers, degree, rewiring, seed)

    return _connected(name, n_workers, seed, weights, sample)


def random_regular(
    n_workers: int,
    seed: int,
    *,
    degree: int | None = None,
    weights: Weights = metropolis_hastings,
) -> Topology:
    """A random connected graph where every worker has `degree` neighbors.

    Args:
        degree: Number of neighbors, less than n, with n · degree even, by default 4 (n − 1 for
            fewer than 5 workers).

    Raises:
        ValueError: For another degree, or if none of 100 samples is connected.
    """
    name = "random-regular"
    if degree is None:
        degree = min(4, n_workers - 1)
    ok = 0 <= degree < n_workers and n_workers * degree % 2 == 0
    accepted = f"less than n_workers={n_workers}, with an even product of the two"
    checks.check("topology_options.degree", degree, ok, accepted)
    check_degree(n_workers, degree)
    import networkx as nx

    def sample(seed: int) -> "Graph[Any]":
        return nx.random_regular_graph(degree, n_workers, seed)

    return _connected(name, n_workers, seed, weights, sample)


UNDIRECTED: dict[str, Callable[..., Topology]] = {  # static, symmetric weights
    "ring": ring,
    "chain": chain,
    "star": star,
    "fully-connected": fully_connected,
    "torus": torus,
    "hypercube": hypercube,
    "binary-tree": binary_tree,
    "double-binary-tree": double_binary_tree,
    "social-network": social_network,
    "watts-strogatz": watts_strogatz,
    "random-regular": random_regular,
}


def circulant(n_workers: int, hops: Sequence[int], weight: float | None = None) -> Round:
    """Worker i receives from i − hop (mod n) for each hop, with one weight.

    It is 1/(1 + number of hops) by default.
    """
    weight = 1 / (1 + len(hops)) if weight is None else weight
    row = np.repeat(np.arange(n_workers), len(hops))
    column = (row - np.tile(np.asarray(hops, dtype=np.int64), n_workers)) % n_workers
    values = np.full(len(row), weight)
    return Round(csr_array((values, (row, column)), shape=(n_workers,) * 2))


def _connected(
    name: str, n_workers: int, seed: int, weights: Weights, sample: Callable[[int], "Graph[Any]"]
) -> Topology:
    """The topology of the first connected graph of 100 samples with derived seeds."""
    import networkx as nx

    for attempt in range(100):
        derived = int(randomness.generator(seed, f"topology {name}", attempt).integers(2**32))
        sampled = sample(derived)
        if nx.is_connected(sampled):
            return from_edges(name, n_workers, [list(edge) for edge in sampled.edges()], weights)
    raise ValueError(
        f'topology "{name}": none of 100 random graphs is connected; use a larger degree'
    )
