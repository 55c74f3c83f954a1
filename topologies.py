"""networkx graph → mixing matrix → who talks to whom in each round.

**W[i, j] is the weight with which worker i uses what worker j sends**; what is left, w_ii = 1 − Σ_j
w_ij, is the weight of i's own model. So row i lists whom i hears, and column j lists who hears j. W
is doubly stochastic (every row and every column sums to 1, which keeps the workers' mean where it
is) unless a topology says `row_stochastic`.

A `Topology` is a sequence of rounds that repeats; a static graph has one. `make` builds one by name
or from a file, and `TOPOLOGIES` lists the names. The spectrum is that of I − W: its non-zero
eigenvalues λ_2 ≤ … ≤ λ_max say how fast gossip averages (Xiao & Boyd 2004,
doi:10.1016/j.sysconle.2004.02.022).

Axes: worker, edge. Matrices over the workers are [worker that hears, worker that sends].
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components, shortest_path

import randomness

Weights = Callable[[csr_array], csr_array]

_ROUNDING = 1e-9  # how far a sum of weights may be from 1
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
        _refuse_disconnected(self._union, self._subject)

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
    def edges(self) -> np.ndarray:
        """Every pair that talks in some round of the period, in either direction: int64 [edge, 2],
        lower worker first, ascending."""
        pairs = np.stack(self._union.nonzero(), axis=1).astype(np.int64)
        return np.unique(np.sort(pairs, axis=1), axis=0)

    @cached_property
    def degrees(self) -> np.ndarray:
        """How many workers each one hears over the period: int64 [worker]."""
        return np.diff(self._union.indptr).astype(np.int64)

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
        ValueError for a time-varying topology of more than 2000 workers.
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
            + ("" if self.symmetric else ", directed"),
            f"  neighbors heard by a worker    {low if low == high else f'{low} to {high}'}",
        ]
        if self.n_workers * self._union.nnz <= 2 * 10**7:  # what it costs
            hops = shortest_path(self._union, unweighted=True)
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
        elif self.period == 1 or self.n_workers <= _DENSE:
            lines.append(f"  distance kept by a step        {self.contraction(1.0):.6f} at rate 1")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    @property
    def _subject(self) -> str:
        return f'topology "{self.name}"'

    @cached_property
    def _union(self) -> csr_array:
        """All weights of the period together: csr [worker, worker], for who talks to whom."""
        union = self.rounds[0].weights
        for r in self.rounds[1:]:
            union = csr_array(union + r.weights)
        union.sort_indices()
        return union

    @property
    def _laplacian(self) -> csr_array:
        if self.period > 1 or not self.symmetric:
            kind = "changes from round to round" if self.period > 1 else "is directed"
            raise ValueError(
                f"{self._subject} {kind}: I - W has no spectrum from which a best diffusion rate "
                f"follows; give a rate, for example 1"
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
    return _circulant("unidirectional-ring", n_workers, [1] if n_workers > 1 else [])


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
    return _circulant("exponential", n_workers, hops)


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


TOPOLOGIES: dict[str, Callable[..., Topology]] = {  # name → function(n_workers, seed, **options)
    "ring": ring,
    "unidirectional-ring": unidirectional_ring,
    "chain": chain,
    "star": star,
    "fully-connected": fully_connected,
    "torus": torus,
    "hypercube": hypercube,
    "binary-tree": binary_tree,
    "exponential": exponential,
    "social-network": social_network,
    "watts-strogatz": watts_strogatz,
    "random-regular": random_regular,
}


def _circulant(name: str, n_workers: int, hops: Sequence[int]) -> Topology:
    """Worker i hears i − hop (mod n) for each hop, all weights 1/(1 + number of hops)."""
    row = np.repeat(np.arange(n_workers), len(hops))
    column = (row - np.tile(np.asarray(hops, dtype=np.int64), n_workers)) % n_workers
    values = np.full(len(row), 1 / (1 + len(hops)))
    return Topology(name, (Round(csr_array((values, (row, column)), shape=(n_workers,) * 2)),))


def _first_connected(name: str, seed: int, draw: Callable[[int], nx.Graph]) -> nx.Graph:
    """The first connected graph of 100 draws, each from a seed of its own; nodes in order."""
    for attempt in range(100):
        drawn = draw(int(randomness.generator(seed, f"topology {name}", attempt).integers(2**32)))
        if nx.is_connected(drawn):
            graph = nx.empty_graph(len(drawn))
            graph.add_edges_from(drawn.edges())
            return graph
    raise ValueError(f'topology "{name}": none of 100 draws is connected; use a larger degree')


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
    separators = {os.sep, "/", os.altsep or os.sep}
    if not (
        any(s in name for s in separators)
        or Path(name).suffix in (".edgelist", ".adjlist", ".txt")
        or Path(name).is_file()
    ):
        raise ValueError(
            f'topology "{name}" is unknown; choose from {", ".join(sorted(TOPOLOGIES))}, '
            f"or give the path of an edge-list or adjacency file"
        )
    if options:
        raise ValueError(f'topology "{name}" is a file and has no options, not {_quote(options)}')
    return from_file(Path(name), n_workers)


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
            kind = "a number" if known[key] is float else "a whole number"
            raise ValueError(f'topology "{name}": {key}={value!r} must be {kind}')


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

    Dense up to 2000 workers; above, the largest singular value of a sparse matrix (one step only).
    """
    n = steps[0].shape[0]
    if n <= _DENSE:
        product = np.eye(n) - 1 / n
        for step in steps:
            product = step @ product
        return float(np.linalg.norm(product - product.mean(axis=0), 2))
    if len(steps) > 1:
        raise ValueError(f"the contraction of {len(steps)} rounds of {n} workers takes too long")
    from scipy.sparse.linalg import LinearOperator, eigsh

    step = steps[0]

    def apply(x: np.ndarray) -> np.ndarray:  # the square, (W(I − J))ᵀ W(I − J) with the mean out
        y = step @ (x.ravel() - x.mean())
        z = step.T @ (y - y.mean())
        return z - z.mean()

    square = LinearOperator((n, n), matvec=apply, dtype=np.float64)
    start = randomness.generator(0, "Lanczos").standard_normal(n)
    value = eigsh(square, k=1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)[0]
    return math.sqrt(max(float(value), 0.0))
