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
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components, shortest_path

import randomness

Weights = Callable[[csr_array], csr_array]

_ROUNDING = 1e-9  # how far a sum of weights may be from 1
_EXACT = 1e-12  # what may be left of a distance that is averaged exactly
_DENSE = 2000  # workers up to which the whole spectrum is computed


@dataclass(frozen=True, eq=False)
class Round:
    """Who hears whom in one round: the weights w_ij of W off its diagonal, csr [worker, worker].

    Kept with sorted columns, without zeros. ValueError for a diagonal entry, a negative weight, or
    a row that sums to more than 1.
    """

    weights: csr_array

    def __post_init__(self) -> None:
        weights = csr_array(self.weights.astype(np.float64))  # a copy
        weights.sum_duplicates()
        weights.eliminate_zeros()
        object.__setattr__(self, "weights", weights)
        if weights.shape[0] != weights.shape[1]:
            raise ValueError(f"weights must be square, not {weights.shape[0]} × {weights.shape[1]}")
        if weights.diagonal().any():
            raise ValueError(f"worker {np.flatnonzero(weights.diagonal())[0]} is its own neighbor")
        if not np.isfinite(weights.data).all() or (weights.data < 0).any():
            raise ValueError("a weight is negative or not a number")
        heard = weights.sum(axis=1)
        if (heard > 1 + _ROUNDING).any():
            worst = int(heard.argmax())
            raise ValueError(
                f"worker {worst} gives its neighbors {heard[worst]:g} in all, more than 1"
            )

    @property
    def n_workers(self) -> int:
        return int(self.weights.shape[0])

    def sources(self, worker: int) -> list[tuple[int, float]]:
        """Whom `worker` hears: (j, w_worker,j), ascending."""
        return _entries(self.weights, worker)

    def targets(self, worker: int) -> list[tuple[int, float]]:
        """Who hears `worker`: (i, w_i,worker), ascending."""
        return _entries(self._transposed, worker)

    @cached_property
    def symmetric(self) -> bool:
        """Whether W = Wᵀ: who hears me, I hear with the same weight."""
        difference = abs(self.weights - self._transposed)
        return difference.nnz == 0 or bool(difference.max() <= _ROUNDING)

    def matrix(self) -> csr_array:
        """The mixing matrix W, with its diagonal: csr [worker, worker], each row sums to 1."""
        own = np.clip(1 - self.weights.sum(axis=1), 0, None)
        return csr_array(self.weights + diags_array(own))

    @cached_property
    def _transposed(self) -> csr_array:
        transposed = csr_array(self.weights.T)
        transposed.sort_indices()
        return transposed


@dataclass(frozen=True, eq=False)
class Topology:
    """A sequence of rounds that repeats, `rounds[t % period]` at step t.

    ValueError if a round is not doubly stochastic (if `row_stochastic`, columns may sum to
    anything), or if the edges of the whole period do not connect every worker to every other.
    """

    name: str
    rounds: tuple[Round, ...]
    row_stochastic: bool = False
    note: str = ""  # a sentence for the summary, e.g. how a file's names were numbered

    def __post_init__(self) -> None:
        if len({r.n_workers for r in self.rounds}) != 1:
            raise ValueError(f"{self._subject}: the rounds are not of one size, or there are none")
        for t, r in enumerate(self.rounds):
            # W's column sums are 1 where a worker gives its neighbors what they give it.
            excess = np.abs(r.weights.sum(axis=0) - r.weights.sum(axis=1))
            if not self.row_stochastic and (excess > _ROUNDING).any():
                raise ValueError(
                    f"{self._subject} is not doubly stochastic in round {t}: the weights given to "
                    f"worker {excess.argmax()} do not sum to 1, so the mean would move"
                )
        _refuse_disconnected(self.union, self._subject)

    @property
    def n_workers(self) -> int:
        return self.rounds[0].n_workers

    @property
    def period(self) -> int:
        return len(self.rounds)

    def round(self, t: int) -> Round:
        """The round of step t."""
        return self.rounds[t % self.period]

    @cached_property
    def symmetric(self) -> bool:
        """Whether W = Wᵀ in every round."""
        return all(r.symmetric for r in self.rounds)

    @cached_property
    def union(self) -> csr_array:
        """Who hears whom in some round of the period: csr [worker, worker], entries 1, sorted.

        State kept per edge has a place for each entry: row i lists whom i hears, ascending, and
        every round's weights are zero elsewhere.
        """
        return _union(self.rounds)

    @cached_property
    def edges(self) -> np.ndarray:
        """Every pair that talks in some round of the period, in either direction: int64 [edge, 2],
        lower worker first, ascending."""
        pairs = np.stack(self.union.nonzero(), axis=1).astype(np.int64)
        return np.unique(np.sort(pairs, axis=1), axis=0)

    @cached_property
    def degrees(self) -> np.ndarray:
        """How many workers each one hears over the period: int64 [worker]."""
        return np.diff(self.union.indptr).astype(np.int64)

    # Spectrum. One worker agrees with itself at once, as if λ_2 = λ_max = 1.

    @cached_property
    def eigenvalues(self) -> np.ndarray:
        """All eigenvalues of I − W, ascending, the first one 0: float64 [worker].

        ValueError where there is no such spectrum (directed, time-varying), or for more than
        2000 workers (the dense computation is cubic).
        """
        laplacian = self._laplacian
        if self.n_workers > _DENSE:
            raise ValueError(
                f"{self._subject}: all eigenvalues of {self.n_workers} workers take too long; "
                f"the spectral gap and the largest one are known for any number"
            )
        values = np.linalg.eigvalsh(laplacian.toarray())
        values[0] = 0.0
        return values

    @cached_property
    def distinct_eigenvalues(self) -> np.ndarray:
        """The distinct non-zero eigenvalues of I − W, ascending: float64 [at most worker − 1].

        Plain gossip with the diffusion rates 1/λ_t, one of these a step, averages exactly.
        ValueError as `eigenvalues`.
        """
        values = self.eigenvalues[1:]
        return values[np.flatnonzero(np.diff(values, prepend=0.0) > 1e-8)]

    @cached_property
    def spectral_gap(self) -> float:
        """λ_2, the smallest non-zero eigenvalue of I − W.

        ValueError if directed or time-varying.
        """
        return self._extremes[0]

    @cached_property
    def largest_eigenvalue(self) -> float:
        """λ_max of I − W. ValueError if directed or time-varying."""
        return self._extremes[1]

    @property
    def best_diffusion_rate(self) -> float:
        """γ* = 2/(λ_2 + λ_max), the best fixed rate of plain gossip. Xiao & Boyd (2004), section 4.

        ValueError if directed or time-varying.
        """
        return 2 / (self.spectral_gap + self.largest_eigenvalue)

    def contraction(self, diffusion_rate: float = 1.0) -> float:
        """By how much a step of plain gossip shrinks the distance to the mean, at worst.

        Symmetric: max(|1 − γλ_2|, |1 − γλ_max|). Else the largest singular value of what the
        rounds of one period, (1 − γ)I + γW, make of the distance, per round (geometric mean).
        ValueError if that takes too long, which it may for more than 2000 workers.
        """
        if self.n_workers == 1:
            return 0.0
        if self.symmetric and self.period == 1:
            return max(
                abs(1 - diffusion_rate * self.spectral_gap),
                abs(1 - diffusion_rate * self.largest_eigenvalue),
            )
        identity = diags_array(np.ones(self.n_workers))
        steps = [
            csr_array((1 - diffusion_rate) * identity + diffusion_rate * r.matrix())
            for r in self.rounds
        ]
        return _norm_beside_the_mean(steps) ** (1 / self.period)

    @cached_property
    def averages_exactly(self) -> bool:
        """Whether one period of plain gossip at rate 1 brings all workers to their mean.

        Up to 1e-12 of the distance, for rounding. ValueError as `contraction`.
        """
        return self._kept**self.period < _EXACT

    @cached_property
    def _kept(self) -> float:
        """contraction(1.0), which takes a while."""
        return self.contraction(1.0)

    @property
    def chebyshev_contraction(self) -> float:
        """(1 − √ξ)/(1 + √ξ), ξ = λ_2/λ_max: what no fixed linear iteration with two memories beats.

        ValueError if directed or time-varying.
        """
        root = math.sqrt(self.spectral_gap / self.largest_eigenvalue)
        return (1 - root) / (1 + root)

    def summary(self) -> str:
        """Several lines a person understands: size, degrees, diameter, how fast gossip averages."""
        low, high = self.degrees.min(), self.degrees.max()
        lines = [
            f"{self.name}: {_count(self.n_workers, 'worker')}, {_count(len(self.edges), 'edge')}"
            + (f", {self.period} rounds" if self.period > 1 else "")
            + ("" if self.symmetric else ", directed")
            + (", row-stochastic: the mean may move" if self.row_stochastic else ""),
            f"  neighbors heard by a worker    {_range(low, high)}",
        ]
        if self.period > 1:
            heard = [np.diff(r.weights.indptr) for r in self.rounds]
            each = _range(min(h.min() for h in heard), max(h.max() for h in heard))
            lines[-1] = (
                f"  neighbors heard by a worker    {each} a round, {_range(low, high)} in all"
            )
        elif self.n_workers * self.union.nnz <= 2 * 10**7:  # what it costs
            hops = shortest_path(self.union, unweighted=True)
            lines.append(f"  diameter                       {_count(int(hops.max()), 'hop')}")
        if self.symmetric and self.period == 1:
            best = self.best_diffusion_rate
            lines += [
                f"  spectral gap of I - W          {self.spectral_gap:.6g}"
                f"   (largest eigenvalue {self.largest_eigenvalue:.6g})",
                f"  best diffusion rate            {best:.6f}",
                "  distance kept by a step        "
                f"{self.contraction(best):.6f} at that rate, {self.contraction(1.0):.6f} at rate 1",
                f"  Chebyshev bound                {self.chebyshev_contraction:.6f}",
            ]
        else:
            lines.append(f"  distance kept by a step        {self._kept_by_a_step}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    @property
    def _subject(self) -> str:
        return f'topology "{self.name}"'

    @property
    def _kept_by_a_step(self) -> str:
        """The line of a summary for a directed or time-varying topology."""
        try:
            kept = self._kept
        except ValueError:
            return "not computed: it takes too long for so many workers"
        if self.averages_exactly:
            return (
                f"0 at rate 1: averages exactly after its period of {_count(self.period, 'round')}"
            )
        mean = f", the mean of its {self.period} rounds" if self.period > 1 else ""
        return f"{kept:.6f} at rate 1{mean}"

    @property
    def _laplacian(self) -> csr_array:
        if self.period > 1 or not self.symmetric:
            kind = "changes from round to round" if self.period > 1 else "is directed"
            raise ValueError(
                f"{self._subject} {kind}: I - W has no spectrum from which a best diffusion rate "
                f"follows; give a rate as a number, 1 to mix with the weights as they are"
            )
        return csr_array(diags_array(np.ones(self.n_workers)) - self.rounds[0].matrix())

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        laplacian = self._laplacian
        if self.n_workers == 1:
            return 1.0, 1.0
        if self.n_workers <= _DENSE:
            return float(self.eigenvalues[1]), float(self.eigenvalues[-1])
        return _sparse_extremes(laplacian)


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
    return Topology(name, (Round(weights(_adjacency(graph))),), note=note)


def _adjacency(graph: nx.Graph) -> csr_array:
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
    return Topology("unidirectional-ring", (_circulant(n_workers, hops),))


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
    return Topology("exponential", (_circulant(n_workers, hops),))


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


def _circulant(n_workers: int, hops: Sequence[int]) -> Round:
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


# Topologies that change from round to round. "Cost" is what a worker hears in a round: messages.


def one_peer_exponential(n_workers: int, seed: int) -> Topology:
    """In round t, worker i hears i − 2^(t mod ⌈log2 n⌉) (mod n), with weight 1/2.

    Directed and doubly stochastic, cost 1, period ⌈log2 n⌉: the rounds of `exponential`, one hop
    at a time. Averages exactly after a period if n is a power of two. Assran et al. (2019), arXiv
    1811.10792; Ying et al. (2021), arXiv 2110.13363.
    """
    hops = [2**t for t in range((n_workers - 1).bit_length())]
    rounds = [_circulant(n_workers, [hop]) for hop in hops] or [_circulant(n_workers, [])]
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
    if graph not in UNDIRECTED and not _means_a_file(graph):
        raise ValueError(
            f'topology "round-robin": graph="{graph}" is not a static undirected topology; choose '
            f"from {', '.join(sorted(UNDIRECTED))}, or give the path of an edge-list or adjacency "
            f"file"
        )
    static = make(graph, n_workers, seed=seed)
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
    colors = _edge_colors(topology.n_workers, edges, _is_bipartite(topology.union))
    by_color = np.argsort(colors, kind="stable")
    starts = np.flatnonzero(np.diff(colors[by_color])) + 1
    return tuple(
        _grouped(topology.n_workers, [_cliques(pairs)])
        for pairs in np.split(edges[by_color], starts)
    )


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
        count, _ = connected_components(_union(rounds), directed=True, connection="strong")
        if count == 1:
            return rounds
    raise ValueError(
        f'topology "{name}": none of 100 draws of {_count(period, "round")} connects all workers; '
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


def _union(rounds: Sequence[Round]) -> csr_array:
    """The pattern of all rounds' weights together: csr [worker, worker], entries 1, sorted."""
    coordinates = np.concatenate([np.stack(r.weights.nonzero()) for r in rounds], axis=1)
    union = csr_array((np.ones(coordinates.shape[1]), coordinates), shape=rounds[0].weights.shape)
    union.sum_duplicates()
    union.data[:] = 1
    return union


# Edge coloring


def _is_bipartite(adjacency: csr_array) -> bool:
    return bool(nx.is_bipartite(nx.from_scipy_sparse_array(adjacency)))


class _Coloring:
    """The colors of edges so far, no two of them the same at a worker.

    neighbor[u]  # color → the neighbor on the edge of that color
    free[u]      # int: bit c is 1 if none of u's edges has color c
    """

    def __init__(self, n_workers: int, colors: int):
        self.neighbor: list[dict[int, int]] = [{} for _ in range(n_workers)]
        self.free = [(1 << colors) - 1] * n_workers

    def put(self, u: int, v: int, color: int) -> None:
        for end, other in ((u, v), (v, u)):
            self.neighbor[end][color] = other
            self.free[end] ^= 1 << color

    def remove(self, u: int, v: int, color: int) -> None:
        for end in (u, v):
            del self.neighbor[end][color]
            self.free[end] ^= 1 << color

    def swap(self, u: int, a: int, b: int) -> None:
        """Exchange colors a and b on the path of those colors that starts with a at u."""
        path = []
        following: int | None = u
        while following is not None:
            path.append(following)
            following = self.neighbor[following].get(b if len(path) % 2 == 0 else a)
        for worker in path:
            of = self.neighbor[worker]
            swapped = {d: of.pop(c) for c, d in ((a, b), (b, a)) if c in of}
            of.update(swapped)
            if len(swapped) == 1:  # an end
                self.free[worker] ^= 1 << a | 1 << b


def _edge_colors(n_workers: int, edges: np.ndarray, bipartite: bool) -> np.ndarray:
    """A color for each edge [edge, 2] that none next to it has: int64 [edge].

    One edge after the other takes a color free at both ends, for which others change theirs if
    there is none. Colors are 0 … Δ − 1 if the graph is bipartite (Kőnig 1916,
    doi:10.1007/BF01456961), else 0 … Δ (Misra & Gries 1992, doi:10.1016/0020-0190(92)90041-S).
    Usually few others change; all of them for every edge at worst.
    """
    largest = int(np.bincount(edges.ravel(), minlength=n_workers).max())
    coloring = _Coloring(n_workers, largest if bipartite else largest + 1)
    for u, v in edges.tolist():
        common = coloring.free[u] & coloring.free[v]
        if common:
            coloring.put(u, v, _lowest(common))
        elif bipartite:
            a, b = _lowest(coloring.free[u]), _lowest(coloring.free[v])
            coloring.swap(v, a, b)  # comes to u's side of the graph with a, so never to u
            coloring.put(u, v, a)
        else:
            _put_with_fan(coloring, u, v)
    color = [{v: c for c, v in of.items()} for of in coloring.neighbor]
    return np.array([color[u][v] for u, v in edges.tolist()], dtype=np.int64)


def _put_with_fan(coloring: _Coloring, u: int, v: int) -> None:
    """Color the edge (u, v), whose ends have no free color in common.

    Neighbors of u are a fan v = f_0, f_1, … if (u, f_i+1) has a color that is free at f_i: each can
    pass its color on to the one before, and the last takes a new one.
    """
    free, neighbor = coloring.free, coloring.neighbor[u]
    fan = [v]
    while not free[u] & free[fan[-1]]:
        d = _lowest(free[fan[-1]])
        if neighbor[d] in fan:
            # d is free at the fan's end and at the one before `neighbor[d]`. Making it free at u,
            # too, takes it from one of them at most.
            before = fan.index(neighbor[d]) - 1
            coloring.swap(u, d, _lowest(free[u]))
            if free[fan[before]] >> d & 1:
                fan = fan[: before + 1]
            break
        fan.append(neighbor[d])
    new = _lowest(free[u] & free[fan[-1]])
    color = {w: c for c, w in neighbor.items()}
    passed_on = [color[w] for w in fan[1:]]
    for w, c in zip(fan[1:], passed_on, strict=True):
        coloring.remove(u, w, c)
    for w, c in zip(fan, [*passed_on, new], strict=True):
        coloring.put(u, w, c)


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is 1."""
    return (bits & -bits).bit_length() - 1


# By name, or from a file


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
    if not _means_a_file(name):
        raise ValueError(
            f'topology "{name}" is unknown; choose from {", ".join(sorted(TOPOLOGIES))}, '
            f"or give the path of an edge-list or adjacency file"
        )
    if options:
        raise ValueError(f'topology "{name}" is a file and has no options, not {_quote(options)}')
    return from_file(Path(name), n_workers)


def _means_a_file(name: str) -> bool:
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
    _refuse_disconnected(_adjacency(ordered), what)
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


def _refuse_less_than_one(name: str, key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f'topology "{name}": {key}={value} must be at least 1')


def _refuse_size(what: str, found: int, n_workers: int) -> None:
    if found != n_workers:
        raise ValueError(f"{what} has {found} workers, n_workers is {n_workers}")


def _refuse_disconnected(weights: csr_array, what: str) -> None:
    """ValueError unless everyone hears everyone, directly or through others."""
    count, member = connected_components(weights, directed=True, connection="strong")
    if count <= 1:
        return
    apart = np.flatnonzero(member != np.bincount(member).argmax())
    workers = ", ".join(map(str, apart[:8])) + (", ..." if len(apart) > 8 else "")
    are = "worker {} is" if len(apart) == 1 else "workers {} are"
    raise ValueError(
        f"{what} is not connected: it has {count} components, {are.format(workers)} apart; "
        f"add edges between the components, or leave those workers out"
    )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _entries(matrix: csr_array, row: int) -> list[tuple[int, float]]:
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return list(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))


# Large spectra. scipy.sparse.linalg takes half a second to import, and few runs need it.


def _sparse_extremes(laplacian: csr_array) -> tuple[float, float]:
    """λ_2 and λ_max of a large sparse I − W, to about 1e-8.

    Lanczos on the vectors of mean 0. It converges fast if the wanted end of the spectrum is not
    crowded, as on random graphs; if it is, as on a long ring, the graph has small separators, and
    a sparse factorization of the matrix shifted to that end is cheap.
    """
    bound = 2 * float(laplacian.diagonal().max())  # Gershgorin
    shift = 1e-8
    smallest = _eigenvalue_nearest(laplacian, -shift, 2 * bound)
    largest = _eigenvalue_nearest(laplacian, bound + shift, 2 * bound)
    return smallest, largest


def _eigenvalue_nearest(laplacian: csr_array, end: float, scale: float) -> float:
    """The eigenvalue nearest to `end`, outside the spectrum, on the vectors of mean 0."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, splu

    n = laplacian.shape[0]
    start = randomness.generator(0, "Lanczos").standard_normal(n)
    start -= start.mean()
    sign = 1.0 if end < 0 else -1.0  # at the low end, the largest of scale − λ

    def apply(x: np.ndarray) -> np.ndarray:
        x = x.ravel() - x.mean()
        y = scale * x - sign * (laplacian @ x)
        return y - y.mean()

    operator = LinearOperator((n, n), matvec=apply, dtype=np.float64)
    options: dict[str, Any] = {"k": 1, "which": "LA", "v0": start, "return_eigenvectors": False}
    try:
        value = eigsh(operator, ncv=30, maxiter=60, tol=1e-8, **options)[0]
        return float(sign * (scale - value))
    except ArpackNoConvergence:
        pass
    shifted = csr_array(laplacian - end * diags_array(np.ones(n))) * sign
    solve = splu(shifted.tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}).solve

    def invert(x: np.ndarray) -> np.ndarray:
        y = solve(x.ravel() - x.mean())
        return y - y.mean()

    operator = LinearOperator((n, n), matvec=invert, dtype=np.float64)
    value = eigsh(operator, tol=1e-10, **options)[0]
    return float(end + sign / value)


def _norm_beside_the_mean(steps: Sequence[csr_array]) -> float:
    """‖(I − J) W_T … W_1‖₂, J the averaging matrix: how much of the distance to the mean is kept.

    Dense up to 2000 workers; above, Lanczos. ValueError if that does not converge.
    """
    n = steps[0].shape[0]
    if n <= _DENSE:
        product = np.eye(n) - 1 / n
        for step in steps:
            product = step @ product
        return float(np.linalg.norm(product - product.mean(axis=0), 2))
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    def apply(x: np.ndarray) -> np.ndarray:
        x = x.ravel() - x.mean()
        for step in steps:
            x = step @ x
        return x - x.mean()

    def apply_transposed(x: np.ndarray) -> np.ndarray:
        for step in reversed(steps):
            x = step.T @ x
        return x - x.mean()

    start = randomness.generator(0, "Lanczos").standard_normal(n)
    frobenius = float(np.linalg.norm(apply(start)))  # of the product, on average
    if frobenius < _EXACT:
        return frobenius
    square = LinearOperator((n, n), matvec=lambda x: apply_transposed(apply(x)), dtype=np.float64)
    options: dict[str, Any] = {"k": 1, "which": "LA", "v0": start, "return_eigenvectors": False}
    try:
        value = eigsh(square, maxiter=100, tol=1e-6, **options)[0]
    except ArpackNoConvergence as error:
        raise ValueError(f"the contraction of {n} workers takes too long") from error
    return math.sqrt(max(float(value), 0.0))
