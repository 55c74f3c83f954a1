"""Rounds and topologies: mixing matrices, who talks to whom, how fast gossip averages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components, shortest_path

from powergossip.topologies import spectra

_ROUNDING = 1e-9  # how far a sum of weights may be from 1


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
        refuse_disconnected(self.union, self._subject)

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
        return union_pattern(self.rounds)

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
        if self.n_workers > spectra.DENSE:
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
        return spectra.norm_beside_the_mean(steps) ** (1 / self.period)

    @cached_property
    def averages_exactly(self) -> bool:
        """Whether one period of plain gossip at rate 1 brings all workers to their mean.

        Up to 1e-12 of the distance, for rounding. ValueError as `contraction`.
        """
        return self._kept**self.period < spectra.EXACT

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
            f"{self.name}: {counted(self.n_workers, 'worker')}, {counted(len(self.edges), 'edge')}"
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
            lines.append(f"  diameter                       {counted(int(hops.max()), 'hop')}")
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
                f"0 at rate 1: averages exactly after its period of {counted(self.period, 'round')}"
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
        if self.n_workers <= spectra.DENSE:
            return float(self.eigenvalues[1]), float(self.eigenvalues[-1])
        return spectra.sparse_extremes(laplacian)


def union_pattern(rounds: Sequence[Round]) -> csr_array:
    """The pattern of all rounds' weights together: csr [worker, worker], entries 1, sorted."""
    coordinates = np.concatenate([np.stack(r.weights.nonzero()) for r in rounds], axis=1)
    union = csr_array((np.ones(coordinates.shape[1]), coordinates), shape=rounds[0].weights.shape)
    union.sum_duplicates()
    union.data[:] = 1
    return union


def refuse_disconnected(weights: csr_array, what: str) -> None:
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


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _entries(matrix: csr_array, row: int) -> list[tuple[int, float]]:
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return list(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))
