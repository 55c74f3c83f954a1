"""Time-varying topologies.

The cost of a topology is the number of messages that a worker receives per round.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from powergossip import checks, randomness
from powergossip.formatting import counted
from powergossip.topologies.coloring import edge_colors, is_bipartite
from powergossip.topologies.graph_files import from_file, is_path
from powergossip.topologies.static import UNDIRECTED, circulant
from powergossip.topologies.topology import Round, Topology, is_connected, union_pattern


def one_peer_exponential(n_workers: int, seed: int) -> Topology:
    """In round t, worker i receives from i − 2^(t mod ⌈log2 n⌉) (mod n), with weight 1/2.

    Directed and doubly stochastic, cost 1, period ⌈log2 n⌉: the edges of `exponential`, one hop per
    round. Averages exactly after a period if n is a power of two.

    References:
        Assran et al. (2019), arXiv:1811.10792, and Ying et al. (2021), arXiv:2110.13363.
    """
    hops = [2**t for t in range((n_workers - 1).bit_length())]
    rounds = [circulant(n_workers, [hop]) for hop in hops] or [circulant(n_workers, [])]
    return Topology("one-peer-exponential", tuple(rounds))


def one_peer_equi(n_workers: int, seed: int, *, period: int = 16) -> Topology:
    """In round t, worker i receives from i − u_t (mod n), with weight (n − 1)/(2n).

    Directed and doubly stochastic, cost 1. For u_t uniform in 1 … n − 1, a round multiplies the
    squared distance to the mean by ½(1 − 1/n) in expectation, for any models.

    The shifts are random permutations of 1 … n − 1, one after the other, in place of independent
    samples. They repeat after `period` rounds, and are resampled until they connect all workers.

    Raises:
        ValueError: If none of 100 samples connects all workers, or for a period below 1.

    References:
        Song et al. (2022), arXiv:2210.07881, OD-EquiDyn, with weight 1/2.
    """
    if n_workers == 1:
        checks.at_least_one("topology_options.period", period)
        return Topology("one-peer-equi", (circulant(1, []),))
    remaining: list[int] = []

    def sample(generator: np.random.Generator) -> Round:
        if not remaining:
            remaining.extend((1 + generator.permutation(n_workers - 1)).tolist())
        return circulant(n_workers, [remaining.pop()], (n_workers - 1) / (2 * n_workers))

    return Topology("one-peer-equi", _connecting_sample("one-peer-equi", seed, period, sample))


def base_graph(n_workers: int, seed: int, *, k: int = 1) -> Topology:
    """The Base-(k+1) graph: exact averaging within a period for any n, with cost at most k.

    Undirected, period at most 2 log_{k+1} n + 2. Let n = p · q, where the prime factors of p are at
    most k + 1 and the prime factors of q are larger. First, each of p blocks of q workers averages
    internally (simple base-(k+1) graph). Then the first workers of all blocks average, as do the
    second, and so on (hyper-hypercube). The simple graph of all n workers is used instead if it has
    fewer rounds.

    Raises:
        ValueError: For k < 1.

    References:
        Takezawa et al. (2023), arXiv:2305.11420, algorithms 1 to 3.
    """
    checks.at_least_one("topology_options.k", k)
    q = n_workers
    for factor in range(2, min(k + 1, n_workers) + 1):
        while q % factor == 0:
            q //= factor
    workers = np.arange(n_workers)
    blocks = workers.reshape(-1, q)
    factored = _simple_base_graph(blocks, k) + [
        [_cliques(groups)] for groups in _hyper_hypercube(blocks.T, k)
    ]
    rounds = min(factored, _simple_base_graph(workers[None], k), key=len) or [[]]
    return Topology("base-graph", tuple(_grouped(n_workers, groups) for groups in rounds))


def random_matching(n_workers: int, seed: int, *, period: int = 16) -> Topology:
    """A uniformly random perfect matching in each round. The two workers of a pair average.

    Undirected, cost 1, weights 1/2. If n is odd, one worker has no partner. The matchings repeat
    after `period` rounds, and are resampled until they connect all workers.

    Raises:
        ValueError: If none of 100 samples connects all workers, or for a period below 1.

    References:
        Boyd et al. (2006), doi:10.1109/TIT.2006.874516, randomized gossip, here with all workers
        awake.
    """

    def sample(generator: np.random.Generator) -> Round:
        pairs = generator.permutation(n_workers)[: n_workers // 2 * 2].reshape(-1, 2)
        return _grouped(n_workers, [_cliques(pairs)])

    return Topology("random-matching", _connecting_sample("random-matching", seed, period, sample))


def epidemic(n_workers: int, seed: int, *, s: int | None = None, period: int = 16) -> Topology:
    """In each round every worker sends to s random others, and averages the models that it receives
    with its own: w_ij = 1/(1 + number of messages received by i).

    Directed and only row-stochastic: the mean may move, but not in expectation. A worker sends s
    messages per round and receives s on average. The rounds repeat after `period`, and are
    resampled until they connect all workers.

    Args:
        s: Number of receivers, at least 1 and less than n, by default 2 (1 for two workers).

    Raises:
        ValueError: For another s, a period below 1, or if none of 100 samples connects all workers.

    References:
        de Vos et al. (2023), arXiv:2310.01972, EL-Local of Epidemic Learning.
    """
    if s is None:
        s = min(2, n_workers - 1)
    else:
        accepted = f"a whole number of 1 or more, less than n_workers={n_workers}"
        checks.check("topology_options.s", s, 1 <= s < n_workers, accepted)

    def sample(generator: np.random.Generator) -> Round:
        targets = _distinct(generator, n_workers - 1, (n_workers, s))
        targets += targets >= np.arange(n_workers)[:, None]  # skips the worker itself
        receiver, sender = targets.ravel(), np.repeat(np.arange(n_workers), s)
        weights = 1 / (1 + np.bincount(receiver, minlength=n_workers))
        return Round(csr_array((weights[receiver], (receiver, sender)), shape=(n_workers,) * 2))

    rounds = _connecting_sample("epidemic", seed, period, sample)
    return Topology("epidemic", rounds, row_stochastic=True)


def round_robin(n_workers: int, seed: int, *, graph: str = "ring") -> Topology:
    """The edges of a graph, one matching per round: every edge once per period.

    Undirected, cost 1, period as `matchings`.

    Args:
        graph: Name of a static undirected topology, taken with its default options, or path of a
            file.

    Raises:
        ValueError: For another graph.
    """
    if graph in UNDIRECTED:
        static = UNDIRECTED[graph](n_workers, seed)
    elif is_path(graph):
        static = from_file(Path(graph), n_workers)
    else:
        raise ValueError(
            f"topology_options.graph={graph}: use the path of an edge-list or adjacency file, or a "
            f"static undirected topology: {', '.join(sorted(UNDIRECTED))}"
        )
    note = f"the rounds are matchings of {graph}" + (f"; {static.note}" if static.note else "")
    return Topology("round-robin", matchings(static), note=note)


def matchings(topology: Topology) -> tuple[Round, ...]:
    """Partition the edges of an undirected topology into matchings, one per round.

    Edges are colored such that no two edges of a worker have the same color. Each color is a round,
    where a worker has at most one neighbor. The two workers of a pair average with weights 1/2,
    whatever the weights of the topology are: they agree afterwards, and γ = 1 is the best rate of a
    single pair. There are at most Δ + 1 rounds (Δ: the largest degree), Δ if the graph is
    bipartite, and one round without edges for a single worker.
    """
    edges = topology.edges
    colors = edge_colors(topology.n_workers, edges, is_bipartite(topology.union))
    by_color = np.argsort(colors, kind="stable")
    starts = np.flatnonzero(np.diff(colors[by_color])) + 1
    return tuple(
        _grouped(topology.n_workers, [_cliques(pairs)])
        for pairs in np.split(edges[by_color], starts)
    )


# Disjoint groups of workers, [group, member], and the weight of all edges within a group

Groups = tuple[np.ndarray, float]


def _cliques(groups: np.ndarray) -> Groups:
    """Groups whose members average, with weights 1/size."""
    return groups, 1 / groups.shape[1]


def _grouped(n_workers: int, groups: Iterable[Groups]) -> Round:
    """The round with all edges within the groups, and no others."""
    weights = csr_array((n_workers, n_workers))
    for members, weight in groups:
        size = members.shape[1]
        row, column = np.repeat(members, size, axis=1).ravel(), np.tile(members, size).ravel()
        others = row != column
        entries = np.full(others.sum(), weight), (row[others], column[others])
        weights = csr_array(weights + csr_array(entries, shape=weights.shape))
    return Round(weights)


def _hyper_hypercube(blocks: np.ndarray, k: int) -> list[np.ndarray]:
    """The groups of each round of a hyper-hypercube, which averages within each block.

    Args:
        blocks: Workers of each block [block, worker], which form a grid. Its side lengths are the
            fewest factors ≤ k + 1 of the block size. In round l the workers on each line along axis
            l average.

    References:
        Takezawa et al. (2023), algorithm 1.
    """
    rounds, stride = [], 1
    for factor in _fewest_factors(blocks.shape[1], k + 1):
        lines = blocks.reshape(len(blocks), -1, factor, stride)
        rounds.append(np.moveaxis(lines, 2, -1).reshape(-1, factor))
        stride *= factor
    return rounds


@cache
def _fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """The shortest tuple of factors ≤ largest whose product is `number`. There must be one."""
    if number <= largest:
        return (number,) if number > 1 else ()
    divisors = (d for d in range(largest, 1, -1) if number % d == 0)
    return min(((d, *_fewest_factors(number // d, largest)) for d in divisors), key=len)


def _simple_base_graph(blocks: np.ndarray, k: int) -> list[list[Groups]]:
    """The rounds of a simple base-(k+1) graph, which averages within each block of any size.

    The digits of the block size in base k + 1, Σ_l a_l (k + 1)^p_l with p_1 > p_2 > …, split a
    block into V_1, V_2, …, and each V_l into a_l parts of (k + 1)^p_l workers. Let later(l) be the
    union of V_l+1, V_l+2, …

    1. Every V_l averages internally by hyper-hypercubes, in the number of rounds that V_1 needs.
    2. One round for each l = 1, 2, …: every worker of later(l) is paired with one worker of each
       part of V_l, and takes |V_l| / (|V_l| + |later(l)|) of V_l's mean. Then each part of V_l has
       the mean of the block, and so has later(l). The remaining workers of V_l agree already. They
       average in groups of k + 1, which only matters if learning moves them apart.
    3. After its step 2, each part of V_l averages internally, until V_1 has finished. The last V_l,
       which has no step 2, starts with the one before it.

    Args:
        blocks: Workers of each block [block, worker].

    References:
        Takezawa et al. (2023), algorithm 2.
    """
    base, size = k + 1, blocks.shape[1]
    power = 1
    while power * base <= size:
        power *= base
    V: list[np.ndarray] = []  # each [block, part, worker]
    later = [blocks]  # later[l]: the workers of V_l, V_l+1, … (indices from 0)
    while later[-1].shape[1]:
        a = later[-1].shape[1] // power
        if a:
            V.append(later[-1][:, : a * power].reshape(len(blocks), a, power))
            later.append(later[-1][:, a * power :])
        power //= base

    whole = [_hyper_hypercube(v.reshape(len(blocks), -1), k) for v in V]
    parts = [
        _hyper_hypercube(v.reshape(-1, v.shape[2]), k) if v.shape[2] > 1 else own
        for v, own in zip(V, whole, strict=True)
    ]
    rounds = [[_cliques(own[t % len(own)]) for own in whole if own] for t in range(len(whole[0]))]
    if len(V) == 1:
        return rounds
    last = len(V) - 1
    for t in range(1 + len(parts[0])):
        groups = [
            _cliques(own[(t - start) % len(own)])
            for own, start in zip(parts, [*range(1, last + 1), last], strict=True)
            if own and start <= t
        ]
        if t < last:
            receivers = later[t + 1][:, None]
            partners, rest = np.split(V[t], [receivers.shape[2]], axis=2)
            pairs = np.stack(np.broadcast_arrays(receivers, partners), axis=-1).reshape(-1, 2)
            groups.append((pairs, V[t].shape[2] / later[t].shape[1]))
            rest = rest.reshape(len(blocks), -1)
            full = rest.shape[1] // base * base
            groups.append(_cliques(rest[:, :full].reshape(-1, base)))
            if full < rest.shape[1]:
                groups.append(_cliques(rest[:, full:]))
        rounds.append(groups)
    return rounds


# Random rounds


def _connecting_sample(
    name: str, seed: int, period: int, sample: Callable[[np.random.Generator], Round]
) -> tuple[Round, ...]:
    """The first of 100 samples of `period` rounds that together are strongly connected."""
    checks.at_least_one("topology_options.period", period)
    for attempt in range(100):
        generator = randomness.generator(seed, f"topology {name}", attempt)
        rounds = tuple(sample(generator) for _ in range(period))
        if is_connected(union_pattern(rounds)):
            return rounds
    raise ValueError(
        f"topology_options.period={period}: use more; none of 100 samples of "
        f'{counted(period, "round")} of "{name}" connects all workers'
    )


def _distinct(generator: np.random.Generator, below: int, shape: tuple[int, int]) -> np.ndarray:
    """Sample without replacement from 0 … below − 1: int64 [row, element].

    Each row is a uniformly random subset, in an order that is not random. Floyd's algorithm for all
    rows at once.

    References:
        Bentley & Floyd (1987), doi:10.1145/30401.315746.
    """
    chosen = np.empty(shape, dtype=np.int64)
    for column, top in enumerate(range(below - shape[1], below)):
        drawn = generator.integers(top + 1, size=shape[0])
        taken = (chosen[:, :column] == drawn[:, None]).any(axis=1)
        chosen[:, column] = np.where(taken, top, drawn)
    return chosen
