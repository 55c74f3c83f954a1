"""A²CiD²: acceleration of messages that may be late, by a second copy of the model."""

import math
from typing import ClassVar, NamedTuple

from torch import Tensor

from powergossip.algorithms.learning.gossip_rule import GossipRule, Variable, Workers
from powergossip.topologies import Topology


class Acceleration(NamedTuple):
    """Constants of A²CiD², see `acceleration`.

    Attributes:
        eta: Rate η at which the two copies approach each other, per step.
        ratio: Factor α̃/α on u_ij, by which an exchange moves x̃.
    """

    eta: float
    ratio: float


def acceleration(topology: Topology, diffusion_rate: float = 1.0, delay: float = 0) -> Acceleration:
    """The constants of A²CiD² on a static undirected graph, whose exchanges take 1 + τ steps::

        η = 1/(2 (1 + τ) √(χ_1 χ_2)),   α̃/α = ½ √(χ_1/χ_2), at least 1
        χ_1 = 1/λ_2,   χ_2 = 1/(4 (2 − λ_max)),   of γ (I − W)

    χ_2 departs from the paper, where edges exchange one at a time, at random, with α = ½: there it
    is half of the largest effective resistance of an edge. Here all edges of a worker exchange in a
    step, with α = γ w_ij, for which the largest eigenvalue has that place. With a ratio of 1 the
    copies are equal, and the method is D-PSGD.

    Args:
        diffusion_rate: Diffusion rate γ.
        delay: Delay τ of an exchange, in steps.
    """
    chi_1 = 1 / (diffusion_rate * topology.spectral_gap)
    inverse = 4 * max(0.0, 2 - diffusion_rate * topology.largest_eigenvalue)  # 1/χ_2
    eta = math.sqrt(inverse / chi_1) / (2 * (1 + delay))
    return Acceleration(eta, max(1.0, math.sqrt(inverse * chi_1) / 2))


class A2CiD2(GossipRule):
    """A²CiD²: late exchanges, accelerated by a second copy x̃_i of the model::

        (x_i, x̃_i) ← ((1 − c) x_i + c x̃_i, (1 − c) x̃_i + c x_i),   c = (1 − e^(−2 η))/2
        x_i ← x_i + u_i,    x̃_i ← x̃_i + u_i          u_i the local optimizer's displacement
        exchanged:          x_i ← x_i + u_ij,   x̃_i ← x̃_i + (α̃/α) u_ij

    Nabli, Belilovsky & Oyallon (2023), arXiv:2306.08289. The unit of time is a gradient of the
    worker: the authors' code divides seconds by its duration. A worker changes x_i at the
    end of its steps only, so that the copies approach each other once in a step, for one unit.

    Without local updates, the squared distance to the mean decays in a step about as
    e^(−1/((1 + τ) √(χ_1 χ_2))), with D-PSGD as e^(−2/((1 + τ) χ_1)).

    Σ_i (x_i + x̃_i) and the exchanges that are not applied yet are conserved. A worker that joins
    begins with x̃_i = x_i. The constants remain the ones of the graph at the start.

    Args:
        acceleration: η and α̃/α.
    """

    state: ClassVar[dict[str, Variable]] = {"second": Variable.IN_STEP}

    def __init__(self, workers: Workers, *, acceleration: Acceleration):
        super().__init__(workers)
        self._second = self._x.clone()
        self._c, self._ratio = -math.expm1(-2 * acceleration.eta) / 2, acceleration.ratio

    @property
    def second(self) -> Tensor:
        """x̃_i [1, D]."""
        return self._second

    def begin(self) -> None:
        exchanged = (self._second - self._x).mul_(self._c)
        self._x.add_(exchanged)
        self._second.sub_(exchanged)

    def update(self, u: Tensor | None) -> None:
        assert u is not None
        self._x.add_(u)
        self._second.add_(u)

    def add(self, u: Tensor, edge: int | None = None, agreed: bool = True) -> None:
        self._x.add_(u)
        self._second.add_(u, alpha=self._ratio)
