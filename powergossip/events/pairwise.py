"""A²CiD²: asynchronous gossip of pairs, accelerated by a second copy of x.

Worker i has x_i and x̃_i. Edges exchange at random times. A worker takes part in `rate` exchanges
per unit of time, which is that of a gradient, on average. Between the events of a worker, its two
copies approach each other::

    (x, x̃) ← ((1 − c) x + c x̃, (1 − c) x̃ + c x),   c = (1 − e^(−2 η Δt))/2

    gradient   x_i ← x_i + u,   x̃_i ← x̃_i + u                     the optimizer's displacement u
    exchange   δ = x_i − x_j,   x_i ← x_i − ½ δ,   x̃_i ← x̃_i − α̃ δ,   and + at j

    η = 1/(2 √(χ_1 χ_2)),   α̃ = ½ √(χ_1/χ_2)
    χ_1 = 1/λ_2(Λ),   χ_2 = ½ max_edges (e_i − e_j)ᵀ Λ⁺ (e_i − e_j)
    Λ = Σ_edges r_ij (e_i − e_j)(e_i − e_j)ᵀ

with r_ij the number of exchanges of an edge per unit of time. The squared distance to the mean
decays as e^(−t/√(χ_1 χ_2)) or faster, that of pairs without the second copy as e^(−t/χ_1). The sum
of x and x̃ over all workers is conserved. Exchanges are instantaneous.

References:
    Nabli, Belilovsky & Oyallon (2023), arXiv:2306.08289.
"""

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from powergossip import randomness
from powergossip.topologies import Topology


class Constants(NamedTuple):
    """χ_1 and χ_2 of a graph with rates of exchanges."""

    chi_1: float
    chi_2: float

    @property
    def eta(self) -> float:
        """η, the rate at which the two copies approach each other."""
        return 1 / (2 * math.sqrt(self.chi_1 * self.chi_2))

    @property
    def alpha(self) -> float:
        """α̃, the fraction of a difference that moves x̃."""
        return math.sqrt(self.chi_1 / self.chi_2) / 2


def rates_of(topology: Topology, rate: float = 1.0) -> np.ndarray:
    """Exchanges of each edge per unit of time, float64 [edge].

    Each worker starts `rate`/2 of them, with a random neighbor. It takes part in about as many that
    others start.
    """
    degrees = np.bincount(topology.edges.flatten(), minlength=topology.n_workers)
    i, j = topology.edges.T
    return np.asarray(rate / 2 * (1 / degrees[i] + 1 / degrees[j]))


def constants(topology: Topology, rates: np.ndarray) -> Constants:
    """χ_1 and χ_2 of a connected graph, whose edges exchange at these rates [edge]."""
    n = topology.n_workers
    laplacian = np.zeros((n, n))
    for (i, j), rate in zip(topology.edges, rates, strict=True):
        laplacian[[i, j], [i, j]] += rate
        laplacian[[i, j], [j, i]] -= rate
    inverse = np.linalg.pinv(laplacian)
    i, j = topology.edges.T
    resistances = inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]
    return Constants(1 / np.linalg.eigvalsh(laplacian)[1], float(resistances.max()) / 2)


class AcceleratedPairs:
    """Exchanges of random pairs of workers that hold x [worker, D], in place.

    The draws depend on (seed, index of the exchange).

    Args:
        accelerated: Whether there is a second copy of x.
        rate: Mean number of exchanges of a worker per unit of time.

    Attributes:
        now: Time of the last event.
        second: Second copy x̃ [worker, D].

    Raises:
        ValueError: For a directed or time-varying topology.
    """

    def __init__(
        self,
        topology: Topology,
        x: Tensor,
        *,
        accelerated: bool = True,
        rate: float = 1.0,
        seed: int = 0,
    ):
        if topology.period > 1 or not topology.symmetric:
            raise ValueError(f"topology={topology.name}: use an undirected static topology")
        self.now, self.second, self._x = 0.0, x.clone(), x
        rates = rates_of(topology, rate)
        self.constants = constants(topology, rates)
        self._edges, self._rate = topology.edges, float(rates.sum())
        self._chances = rates / rates.sum()
        self._eta = self.constants.eta if accelerated else 0.0
        self._alpha = self.constants.alpha if accelerated else 0.5
        self._seed, self._exchanges = seed, 0
        self._times = [0.0] * topology.n_workers  # of a worker's last event
        self._next = self._draw()

    def run(self, until: float) -> None:
        """Let all exchanges before this time happen."""
        while self._next[0] < until:
            self.now, (i, j) = self._next
            for worker in (i, j):
                self.mix(worker, self.now)
            difference = self._x[i] - self._x[j]
            self._x[i].sub_(difference, alpha=0.5)
            self._x[j].add_(difference, alpha=0.5)
            self.second[i].sub_(difference, alpha=self._alpha)
            self.second[j].add_(difference, alpha=self._alpha)
            self._exchanges += 1
            self._next = self._draw()
        self.now = until

    def move(self, worker: int, u: Tensor) -> None:
        """A gradient event of a worker now, with the displacement u [D]."""
        self.mix(worker, self.now)
        self._x[worker].add_(u)
        self.second[worker].add_(u)

    def mix(self, worker: int, time: float) -> None:
        """Let a worker's two copies approach each other until this time."""
        c = -math.expm1(-2 * self._eta * (time - self._times[worker])) / 2
        self._times[worker] = time
        exchanged = (self.second[worker] - self._x[worker]).mul_(c)
        self._x[worker].add_(exchanged)
        self.second[worker].sub_(exchanged)

    def _draw(self) -> tuple[float, tuple[int, int]]:
        """The time and the edge of the next exchange."""
        draws = randomness.generator(self._seed, "pairs", self._exchanges)
        time = self.now + draws.exponential(1 / self._rate)
        i, j = self._edges[draws.choice(len(self._edges), p=self._chances)].tolist()
        return time, (i, j)
