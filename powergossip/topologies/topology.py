"""Rounds and topologies: mixing matrices, the neighbors of each worker, the speed of averaging."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array, diags_array

from powergossip.formatting import counted
from powergossip.topologies import spectra

Tree = tuple[tuple[int, int], ...]  # its edges (i, j), i < j, ascending

_ROUNDING = 1e-9  # tolerance for a sum of weights, which should be 1


@dataclass(frozen=True, eq=False)
class Round:
    """The off-diagonal weights w_ij of one round's mixing matrix W: csr [receiver, sender].

    Stored with sorted columns and without zeros.

    Raises:
        ValueError: For a diagonal entry, a negative weight, or a row that sums to more than 1.
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
        received = weights.sum(axis=1)
        if (received > 1 + _ROUNDING).any():
            worst = int(received.argmax())
            raise ValueError(
                f"the weights of worker {worst}'s neighbors sum to {received[worst]:g}; use 1 or "
                f"less"
            )

    @property
    def n_workers(self) -> int:
        return int(self.weights.shape[0])

    def sources(self, worker: int) -> list[tuple[int, float]]:
        """The workers that `worker` receives from: (j, w_worker,j), ascending."""
        return _entries(self.weights, worker)

    def targets(self, worker: int) -> list[tuple[int, float]]:
        """The workers that `worker` sends to: (i, w_i,worker), ascending."""
        return _entries(self._transposed, worker)

    @cached_property
    def symmetric(self) -> bool:
        """True if W = Wᵀ: messages go both ways on every edge, with one weight."""
        difference = abs(self.weights - self._transposed)
        return difference.nnz == 0 or bool(difference.max() <= _ROUNDING)

    def matrix(self) -> csr_array:
        """The mixing matrix W, with its diagonal: csr [receiver, sender]. Each row sums to 1."""
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

    Attributes:
        row_stochastic: True if only the rows sum to 1, and columns may have any sum.
        trees: Spanning trees that together have the graph's edges, for relays: each is a tuple of
            edges (i, j), i < j, ascending. Two for `double-binary-tree`, one for any other
            undirected static graph that is a tree, such as a chain, and none for a single worker:
            (). None for all other topologies.

    Raises:
        ValueError: If a round is not doubly stochastic, or if the edges of a whole period do not
            connect every worker to every other.
    """

    name: str
    rounds: tuple[Round, ...]
    row_stochastic: bool = False
    note: str = ""  # a sentence for the summary, e.g. the worker indices of the names in a file
    trees: tuple[Tree, ...] | None = None

    def __post_init__(self) -> None:
        if len({r.n_workers for r in self.rounds}) != 1:
            raise ValueError(f"{self._subject}: use one round or more, all of one size")
        for t, r in enumerate(self.rounds):
            # Column i of W sums to 1 if the weights to and from worker i have the same sum.
            excess = np.abs(r.weights.sum(axis=0) - r.weights.sum(axis=1))
            if not self.row_stochastic and (excess > _ROUNDING).any():
                raise ValueError(
                    f"{self._subject} is not doubly stochastic in round {t}: column "
                    f"{excess.argmax()} of W does not sum to 1, so the mean would move"
                )
        check_connected(self.union, self._subject)
        if self.trees is None or self.n_workers == 1:
            object.__setattr__(self, "trees", self._own_tree())
        else:
            self._check_trees(self.trees)

    def _own_tree(self) -> tuple[Tree, ...] | None:
        """The graph itself, if it is a static undirected tree."""
        is_tree = len(self.edges) == self.n_workers - 1
        if not is_tree or self.period > 1 or not self.symmetric:
            return None
        edges = tuple((i, j) for i, j in self.edges.tolist())
        return (edges,) if edges else ()

    def _check_trees(self, trees: tuple[Tree, ...]) -> None:
        """Raise ValueError unless these are spanning trees of the graph.

        Weights of 0 leave out edges.
        """
        edges = {(i, j) for i, j in self.edges.tolist()}
        for tree in trees:
            i, j = np.array(tree, dtype=np.int64).reshape(-1, 2).T
            pattern = csr_array((np.ones(len(tree)), (i, j)), shape=(self.n_workers,) * 2)
            spans = is_connected(csr_array(pattern + pattern.T))
            if not spans or len(tree) != self.n_workers - 1 or not edges >= set(tree):
                raise ValueError(f"{self._subject}: a tree does not span the graph by its edges")

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
        """True if W = Wᵀ in every round."""
        return all(r.symmetric for r in self.rounds)

    @property
    def biased(self) -> bool:
        """True if gossip with W agrees on a weighted mean: a static W that is row-stochastic only.

        The rounds of `epidemic` are row-stochastic, too, but random: none of them is repeated in
        every step, and all workers have the same distribution of weights.
        """
        return self.row_stochastic and self.period == 1

    @cached_property
    def union(self) -> csr_array:
        """The edges of all rounds of the period: csr [receiver, sender], entries 1, sorted.

        State per edge is stored in the order of these entries. Row i lists the workers that i
        receives from in some round, ascending.
        """
        return union_pattern(self.rounds)

    @cached_property
    def edges(self) -> np.ndarray:
        """The undirected edges of all rounds of the period: int64 [edge, 2], ascending.

        An edge joins two workers if one sends to the other in some round. The lower index is first.
        """
        i, j = np.stack(self.union.nonzero()).astype(np.int64)
        keys = np.unique(np.minimum(i, j) * self.n_workers + np.maximum(i, j))
        return np.stack(np.divmod(keys, self.n_workers), axis=1)

    @cached_property
    def degrees(self) -> np.ndarray:
        """Number of workers that each worker receives from over the period: int64 [worker]."""
        return np.diff(self.union.indptr).astype(np.int64)

    @cached_property
    def largest_move(self) -> float:
        """max_i (1 − w_ii) over all rounds, the largest weight that a worker gives to others.

        By Gershgorin's theorem, the eigenvalues of I − W are at most twice as large. 1 for a single
        worker.
        """
        if self.n_workers == 1:
            return 1.0
        return max(float(r.weights.sum(axis=1).max()) for r in self.rounds)

    @cached_property
    def fingerprint(self) -> str:
        """The number of edges, and a hash of all neighbors and of Σ_k w_k cos k over all weights,
        which is rounded: the last digits of weights may depend on the computer."""
        w = np.concatenate([r.weights.data for r in self.rounds])
        found = hashlib.sha256(f"{w @ np.cos(np.arange(len(w))):.4f}".encode())
        for r in self.rounds:
            places = np.concatenate([r.weights.indptr, r.weights.indices])
            found.update(places.astype(np.int64).tobytes())
        return f"{counted(len(self.edges), 'edge')} (hash {found.hexdigest()[:8]})"

    # Spectrum. A single worker counts as λ_2 = λ_max = 1: it agrees with itself after one step.

    @cached_property
    def eigenvalues(self) -> np.ndarray:
        """All eigenvalues of I − W, ascending, the first one 0: float64 [worker].

        Raises:
            ValueError: For directed and time-varying topologies, which have no such spectrum, and
                for more than 2000 workers, since the dense computation is cubic.
        """
        laplacian = self._laplacian
        if self.n_workers > spectra.DENSE:
            raise ValueError(
                f"{self._subject}: all eigenvalues of {self.n_workers} workers take too long; "
                f"use spectral_gap and largest_eigenvalue"
            )
        values = np.linalg.eigvalsh(laplacian.toarray())
        values[0] = 0.0
        return values

    @cached_property
    def distinct_eigenvalues(self) -> np.ndarray:
        """The distinct non-zero eigenvalues of I − W, ascending: float64 [at most worker − 1].

        Plain gossip averages exactly in one step per eigenvalue λ_t, at the diffusion rate 1/λ_t.

        Raises:
            ValueError: For the topologies that `eigenvalues` rejects.
        """
        values = self.eigenvalues[1:]
        return values[np.flatnonzero(np.diff(values, prepend=0.0) > 1e-8)]

    @cached_property
    def spectral_gap(self) -> float:
        """λ_2, the smallest non-zero eigenvalue of I − W.

        Raises:
            ValueError: If directed or time-varying.
        """
        return self._extremes[0]

    @cached_property
    def largest_eigenvalue(self) -> float:
        """λ_max of I − W. Raises ValueError if directed or time-varying."""
        return self._extremes[1]

    @property
    def best_diffusion_rate(self) -> float:
        """γ* = 2/(λ_2 + λ_max), the best fixed rate of plain gossip.

        Raises:
            ValueError: If directed or time-varying.

        References:
            Xiao & Boyd (2004), section 4, doi:10.1016/j.sysconle.2004.02.022.
        """
        return 2 / (self.spectral_gap + self.largest_eigenvalue)

    @property
    def largest_diffusion_rate(self) -> float:
        """2/λ_max: plain gossip converges below this rate and diverges above it.

        The distance to the mean grows in no step of PowerGossip up to this rate. Above it, that
        depends on the rank.

        Raises:
            ValueError: If directed or time-varying.
        """
        return 2 / self.largest_eigenvalue

    def contraction(self, diffusion_rate: float = 1.0) -> float:
        """Worst-case factor of a step of plain gossip on the distance to the mean.

        A static symmetric W gives `max(|1 − γλ_2|, |1 − γλ_max|)`. Otherwise it is the geometric
        mean over a period: ‖(I − J) M_T … M_1‖₂^(1/T), where M_t = (1 − γ)I + γW_t and J averages.

        Raises:
            ValueError: If the computation takes too long, which can happen for more than 2000
                workers.
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
        return spectra.norm_beside_the_mean(steps) ** (1 / self.period)

    @cached_property
    def averages_exactly(self) -> bool:
        """True if one period of plain gossip at rate 1 brings all workers to their mean.

        The tolerance is 1e-12 of the distance, for rounding.

        Raises:
            ValueError: If the computation takes too long, as in `contraction`.
        """
        return self._contraction_at_1**self.period < spectra.EXACT

    @cached_property
    def _contraction_at_1(self) -> float:
        """contraction(1.0), cached because it is slow."""
        return self.contraction(1.0)

    @property
    def chebyshev_contraction(self) -> float:
        """(1 − √ξ)/(1 + √ξ), ξ = λ_2/λ_max: the best contraction per step with two memories.

        No fixed linear iteration that combines the last two iterates contracts faster.

        Raises:
            ValueError: If directed or time-varying.
        """
        root = math.sqrt(self.spectral_gap / self.largest_eigenvalue)
        return (1 - root) / (1 + root)

    def summary(self) -> str:
        """A description in several lines: size, degrees, diameter, speed of averaging."""
        low, high = self.degrees.min(), self.degrees.max()
        lines = [
            f"{self.name}: {counted(self.n_workers, 'worker')}, {counted(len(self.edges), 'edge')}"
            + (f", {self.period} rounds" if self.period > 1 else "")
            + ("" if self.symmetric else ", directed")
            + (", row-stochastic: the mean may move" if self.row_stochastic else ""),
            f"  neighbors per worker           {_range(low, high)}",
        ]
        if self.period > 1:
            degrees = [np.diff(r.weights.indptr) for r in self.rounds]
            per_round = _range(min(d.min() for d in degrees), max(d.max() for d in degrees))
            lines[-1] = (
                f"  neighbors per worker           {per_round} per round, "
                f"{_range(low, high)} in all"
            )
        elif self.n_workers * self.union.nnz <= 2 * 10**7:  # operations
            from scipy.sparse.csgraph import shortest_path

            hops = shortest_path(self.union, unweighted=True)
            lines.append(f"  diameter                       {counted(int(hops.max()), 'hop')}")
        if self.symmetric and self.period == 1:
            best = self.best_diffusion_rate
            lines += [
                f"  spectral gap of I - W          {self.spectral_gap:.6g}"
                f"   (largest eigenvalue {self.largest_eigenvalue:.6g})",
                f"  best diffusion rate            {best:.6f}"
                f"   (plain gossip diverges above {self.largest_diffusion_rate:.6f})",
                "  contraction per step           "
                f"{self.contraction(best):.6f} at that rate, {self.contraction(1.0):.6f} at rate 1",
                f"  Chebyshev bound                {self.chebyshev_contraction:.6f}",
            ]
        else:
            lines.append(f"  contraction per step           {self._contraction_line}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    @property
    def _subject(self) -> str:
        return f'topology "{self.name}"'

    @property
    def _contraction_line(self) -> str:
        """The contraction in the summary of a directed or time-varying topology."""
        try:
            contraction = self._contraction_at_1
        except ValueError:
            return f"not computed: it takes too long for {self.n_workers} workers"
        if self.averages_exactly:
            return (
                f"0 at rate 1: averages exactly after its period of {counted(self.period, 'round')}"
            )
        mean = f", the mean of its {self.period} rounds" if self.period > 1 else ""
        return f"{contraction:.6f} at rate 1{mean}"

    @property
    def _laplacian(self) -> csr_array:
        if self.period > 1 or not self.symmetric:
            kind = "changes from round to round" if self.period > 1 else "is directed"
            raise ValueError(
                f"{self._subject} {kind}: it has no spectrum of I - W, and thus no best diffusion "
                f"rate; give a rate as a number, e.g. 1 for the weights of W"
            )
        return csr_array(diags_array(np.ones(self.n_workers)) - self.rounds[0].matrix())

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        laplacian = self._laplacian
        if self.n_workers == 1:
            return 1.0, 1.0
        return spectra.extremes(laplacian)


def union_pattern(rounds: Sequence[Round]) -> csr_array:
    """The edges of all rounds: csr [receiver, sender], entries 1, sorted."""
    coordinates = np.concatenate([np.stack(r.weights.nonzero()) for r in rounds], axis=1)
    union = csr_array((np.ones(coordinates.shape[1]), coordinates), shape=rounds[0].weights.shape)
    union.sum_duplicates()
    union.data[:] = 1
    return union


def is_connected(weights: csr_array) -> bool:
    """True if a directed path leads from each worker to all."""
    for ways in (weights, csr_array(weights.T)):
        found, left = {0}, [0]
        while left and len(found) < weights.shape[0]:
            new = {neighbor for neighbor, _ in _entries(ways, left.pop())} - found
            found |= new
            left += new
        if len(found) < weights.shape[0]:
            return False
    return True


def check_connected(weights: csr_array, subject: str) -> None:
    """Raise ValueError, about `subject`, unless a directed path leads from each worker to all."""
    if is_connected(weights):
        return
    from scipy.sparse.csgraph import connected_components  # imports scipy.linalg, slowly

    count, member = connected_components(weights, directed=True, connection="strong")
    outside = np.flatnonzero(member != np.bincount(member).argmax())
    workers = ", ".join(map(str, outside[:8])) + (", ..." if len(outside) > 8 else "")
    are = "worker {} is" if len(outside) == 1 else "workers {} are"
    weak = connected_components(weights, directed=False)[0] == 1
    kind, where = (
        ("strongly ", "in the other direction") if weak else ("", "between the components")
    )
    raise ValueError(
        f"{subject} is not {kind}connected: of its {count} components, {are.format(workers)} "
        f"outside the largest; add edges {where}, or remove those workers"
    )


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _entries(matrix: csr_array, row: int) -> list[tuple[int, float]]:
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return list(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))
