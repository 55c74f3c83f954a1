"""Topologies that change from round to round.

"Cost" is what a worker hears in a round: messages.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from powergossip import randomness
from powergossip.topologies.coloring import edge_colors, is_bipartite
from powergossip.topologies.files import from_file, means_a_file
from powergossip.topologies.mixing import Round, Topology, counted, union_pattern
from powergossip.topologies.static import UNDIRECTED, circulant


def one_peer_exponential(n_workers: int, seed: int) -> Topology:
    """In round t, worker i hears i − 2^(t mod ⌈log2 n⌉) (mod n), with weight 1/2.

    Directed and doubly stochastic, cost 1, period ⌈log2 n⌉: the rounds of `exponential`, one hop
    at a time. Averages exactly after a period if n is a power of two. Assran et al. (2019), arXiv
    1811.10792; Ying et al. (2021), arXiv 2110.13363.
    """
    hops = [2**t for t in range((n_workers - 1).bit_length())]
    rounds = [circulant(n_workers, [hop]) for hop in hops] or [circulant(n_workers, [])]
    return Topology("one-peer-exponential", tuple(rounds))


def base_graph(n_workers: int, seed: int, *, k: int = 1) -> Topology:
    """The Base-(k+1) graph: a period averages exactly, for any n, and nobody hears more than k.

    Undirected, cost at most k, period at most 2 log_{k+1} n + 2. n = p · q, where the prime factors
    of p are at most k + 1 and those of q are larger: p blocks of q workers average each by itself
    (simple base-(k+1) graph); then the first workers of all blocks average, so do the second, and
    so on (hyper-hypercube). If the simple graph of all n has fewer rounds, it is taken instead.

    Takezawa et al. (2023), arXiv 2305.11420, algorithms 1 to 3. k: at least 1, else ValueError.
    """
    _refuse_less_than_one("base-graph", "k", k)
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
    """In each round a matching drawn from all those that leave nobody out, or one worker if n is
    odd. The two of a pair average: weights 1/2.

    Undirected, cost 1. Randomized gossip, Boyd et al. (2006), doi:10.1109/TIT.2006.874516, with
    everyone awake; the draws repeat after `period` rounds. They are drawn again until they connect
    all workers. ValueError if none of 100 draws does, or for a period of less than 1.
    """

    def draw(generator: np.random.Generator) -> Round:
        pairs = generator.permutation(n_workers)[: n_workers // 2 * 2].reshape(-1, 2)
        return _grouped(n_workers, [_cliques(pairs)])

    return Topology("random-matching", _first_connecting("random-matching", seed, period, draw))


def epidemic(n_workers: int, seed: int, *, s: int | None = None, period: int = 16) -> Topology:
    """In each round every worker sends to s random others, which average all that arrives with
    their own: w_ij = 1/(1 + how many i hears).

    Directed and only row-stochastic: the mean may move, but not in expectation. Cost s messages
    sent; how many a worker hears varies. Epidemic Learning, de Vos et al. (2023), arXiv 2310.01972,
    as EL-Local. The draws repeat after `period` rounds; they are drawn again until they connect
    all workers.

    s: at least 1 and less than n; 2 by default (1 for two workers). ValueError for other values, a
    period of less than 1, or if none of 100 draws connects all workers.
    """
    if s is None:
        s = min(2, n_workers - 1)
    elif not 1 <= s < n_workers:
        raise ValueError(
            f'topology "epidemic": s={s} must be at least 1 and less than n_workers, '
            f"which is {n_workers}"
        )

    def draw(generator: np.random.Generator) -> Round:
        targets = _distinct(generator, n_workers - 1, (n_workers, s))
        targets += targets >= np.arange(n_workers)[:, None]  # not oneself
        hears, sends = targets.ravel(), np.repeat(np.arange(n_workers), s)
        weights = 1 / (1 + np.bincount(hears, minlength=n_workers))
        return Round(csr_array((weights[hears], (hears, sends)), shape=(n_workers,) * 2))

    rounds = _first_connecting("epidemic", seed, period, draw)
    return Topology("epidemic", rounds, row_stochastic=True)


def round_robin(n_workers: int, seed: int, *, graph: str = "ring") -> Topology:
    """The edges of a graph, one matching a round: every edge once a period.

    Undirected, cost 1, period as `matchings`. graph: the name of a static undirected topology
    (with its default options), or the path of a file; else ValueError.
    """
    if graph in UNDIRECTED:
        static = UNDIRECTED[graph](n_workers, seed)
    elif means_a_file(graph):
        static = from_file(Path(graph), n_workers)
    else:
        raise ValueError(
            f'topology "round-robin": graph="{graph}" is not a static undirected topology; choose '
            f"from {', '.join(sorted(UNDIRECTED))}, or give the path of an edge-list or adjacency "
            f"file"
        )
    note = f"the rounds are matchings of {graph}" + (f"; {static.note}" if static.note else "")
    return Topology("round-robin", matchings(static), note=note)


def matchings(topology: Topology) -> tuple[Round, ...]:
    """The edges of an undirected topology, colored such that no two at a worker have the same
    color: each color is a round, in which every worker talks to at most one other.

    The two of a pair average: weights 1/2, whatever the topology's are, because then they agree
    after it, which is the most that one pair can do (γ = 1 is its best rate). At most Δ + 1 rounds
    (Δ: the largest degree), Δ if the graph is bipartite. One round without edges for one worker.
    """
    edges = topology.edges
    colors = edge_colors(topology.n_workers, edges, is_bipartite(topology.union))
    by_color = np.argsort(colors, kind="stable")
    starts = np.flatnonzero(np.diff(colors[by_color])) + 1
    return tuple(
        _grouped(topology.n_workers, [_cliques(pairs)])
        for pairs in np.split(edges[by_color], starts)
    )


# Disjoint groups of workers, [group, member], in which everyone hears everyone with one weight

Groups = tuple[np.ndarray, float]


def _cliques(groups: np.ndarray) -> Groups:
    """Groups whose members average: weight 1/size."""
    return groups, 1 / groups.shape[1]


def _grouped(n_workers: int, groups: Iterable[Groups]) -> Round:
    """The round in which these groups talk, and nobody else."""
    weights = csr_array((n_workers, n_workers))
    for members, weight in groups:
        size = members.shape[1]
        row, column = np.repeat(members, size, axis=1).ravel(), np.tile(members, size).ravel()
        others = row != column
        entries = np.full(others.sum(), weight), (row[others], column[others])
        weights = csr_array(weights + csr_array(entries, shape=weights.shape))
    return Round(weights)


def _hyper_hypercube(blocks: np.ndarray, k: int) -> list[np.ndarray]:
    """The groups of each round after which every one of the blocks [block, worker] has averaged.

    A block's workers are the corners of a box, the product of the fewest factors ≤ k + 1; in
    round l those on a line along axis l average. Takezawa et al. (2023), algorithm 1.
    """
    rounds, stride = [], 1
    for factor in _fewest_factors(blocks.shape[1], k + 1):
        lines = blocks.reshape(len(blocks), -1, factor, stride)
        rounds.append(np.moveaxis(lines, 2, -1).reshape(-1, factor))
        stride *= factor
    return rounds


@cache
def _fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """The shortest tuple of factors ≤ largest whose product is `number`, which has such factors."""
    if number <= largest:
        return (number,) if number > 1 else ()
    divisors = (d for d in range(largest, 1, -1) if number % d == 0)
    return min(((d, *_fewest_factors(number // d, largest)) for d in divisors), key=len)


def _simple_base_graph(blocks: np.ndarray, k: int) -> list[list[Groups]]:
    """The rounds after which every one of the blocks [block, worker] has averaged, for any size.

    The digits of the size in base k + 1, Σ_l a_l (k + 1)^p_l with p_1 > p_2 > …, cut a block into
    V_1, V_2, …, and V_l into a_l parts of (k + 1)^p_l. Rounds, V_l's numbers in step:

    1. Every V_l averages by itself (hyper-hypercubes), in as many rounds as V_1 takes.
    2. Round by round, l = 1, 2, …: every worker of the later V's talks to one of each part of V_l,
       and takes |V_l| / Σ_{l'≥l} |V_l'| of V_l's mean. Then the mean of every part of V_l is that
       of the block, and so is the mean of what comes later. The rest of V_l, who agree already,
       talk among themselves, k + 1 at a time; this only matters if learning moves them apart.
    3. As soon as V_l has been heard, each of its parts averages by itself, until V_1 has done so.

    Takezawa et al. (2023), algorithm 2.
    """
    base, size = k + 1, blocks.shape[1]
    power = 1
    while power * base <= size:
        power *= base
    V: list[np.ndarray] = []  # each [block, part, worker]
    later = [blocks]  # later[l]: V_l and what comes after it
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
            hears = later[t + 1][:, None]
            heard, rest = np.split(V[t], [hears.shape[2]], axis=2)
            pairs = np.stack(np.broadcast_arrays(hears, heard), axis=-1).reshape(-1, 2)
            groups.append((pairs, V[t].shape[2] / later[t].shape[1]))
            rest = rest.reshape(len(blocks), -1)
            full = rest.shape[1] // base * base
            groups.append(_cliques(rest[:, :full].reshape(-1, base)))
            if full < rest.shape[1]:
                groups.append(_cliques(rest[:, full:]))
        rounds.append(groups)
    return rounds


# Random rounds


def _first_connecting(
    name: str, seed: int, period: int, draw: Callable[[np.random.Generator], Round]
) -> tuple[Round, ...]:
    """The first `period` rounds, of 100 draws, that together lead from everyone to everyone."""
    _refuse_less_than_one(name, "period", period)
    for attempt in range(100):
        generator = randomness.generator(seed, f"topology {name}", attempt)
        rounds = tuple(draw(generator) for _ in range(period))
        count, _ = connected_components(union_pattern(rounds), directed=True, connection="strong")
        if count == 1:
            return rounds
    raise ValueError(
        f'topology "{name}": none of 100 draws of {counted(period, "round")} connects all workers; '
        f"period={period} must be larger"
    )


def _distinct(generator: np.random.Generator, below: int, shape: tuple[int, int]) -> np.ndarray:
    """Each row a random subset of 0 … below − 1: int64 [row, number], not in random order.

    Floyd's algorithm (Bentley & Floyd 1987, doi:10.1145/30401.315746) for all rows at once.
    """
    chosen = np.empty(shape, dtype=np.int64)
    for column, top in enumerate(range(below - shape[1], below)):
        drawn = generator.integers(top + 1, size=shape[0])
        taken = (chosen[:, :column] == drawn[:, None]).any(axis=1)
        chosen[:, column] = np.where(taken, top, drawn)
    return chosen


def _refuse_less_than_one(name: str, key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f'topology "{name}": {key}={value} must be at least 1')
