"""Diffusion rates γ up to which an outer momentum behind the mixing is stable.

Disagreement of the workers, with W_γ = I − γ (I − W) and no gradients::

    φ ← (1 + β) W_γ φ − β v',   v' ← W_γ φ

decays if all roots of z² − (1 + β) λ z + β λ are inside the unit circle, for all eigenvalues λ ≠ 1
of W_γ. For real λ this is λ > −1/(1 + 2 β). Local steps towards an optimum multiply λ by a factor
from 0 to 1, which does not make it less stable.
"""

import math

import numpy as np

from powergossip.topologies import Topology

_LARGEST = 128  # number of workers of time-varying topologies, whose product is dense


def largest_rate(topology: Topology, momentum: float, pull: float = 0.0) -> float:
    """The rate γ from which disagreement does not decay. Infinite where it is not computed.

    Args:
        momentum: Outer momentum β.
        pull: The smallest eigenvalue is reduced by this. It is the outer rate μ if the displacement
            of a round is added behind the mixing, and 0 if it is mixed.
    """
    if topology.n_workers == 1:
        return math.inf
    if topology.symmetric and topology.period == 1:
        return max(0.0, 1 + 1 / (1 + 2 * momentum) - pull) / topology.largest_eigenvalue
    if topology.n_workers > _LARGEST:
        return math.inf
    low, high = 0.0, 2.0
    for _ in range(12):
        middle = (low + high) / 2
        stable = radius(topology, momentum, middle, pull) < 1
        low, high = (middle, high) if stable else (low, middle)
    return high


def radius(topology: Topology, momentum: float, rate: float = 1.0, pull: float = 0.0) -> float:
    """The factor of disagreement in a period of the topology, in the long run.

    Args:
        rate: Diffusion rate γ.
        pull: See `largest_rate`.
    """
    n = topology.n_workers
    identity, mean = np.eye(n), np.full((n, n), 1 / n)
    product = np.eye(2 * n)
    for t in range(topology.period):
        weights = topology.round(t).matrix().toarray()
        mixing = identity - rate * (identity - weights) - mean - pull * (identity - mean)
        step = np.block([[(1 + momentum) * mixing, -momentum * identity], [mixing, 0 * identity]])
        product = step @ product
    return float(np.abs(np.linalg.eigvals(product)).max())
