"""Diffusion rates γ up to which momentum of displacements by gossip is stable.

The disagreement of the workers, (φ, memory of the momentum), after a round without noise is a
linear function of the disagreement before it: a polynomial of the mixing matrix W_γ = I − γ (I − W)
and of the pull μ q. μ is the outer rate, and q the fraction of the distance to its own optimum that
a worker covers in the round. It decays if the eigenvalues of the product over a period are inside
the unit circle. On a static graph, they are the eigenvalues of 2 × 2 matrices, one for each
eigenvalue of W. They are complex on a directed graph, where a smaller q may be less stable.

A recurrence is a function of (w, one, pull, *options), with w the mixing matrix and `one` the
identity, or with numbers in their place. It returns the rows of the matrix of (φ, memory).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from powergossip.topologies import Topology

Recurrence = Callable[..., tuple[tuple[Any, Any], tuple[Any, Any]]]

_LARGEST = 128  # number of workers of directed and time-varying topologies, which are dense
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # q
_RATES = (*np.linspace(0, 1, 9), 2.0)  # rates may be unstable below stable ones


def diloco(w: Any, one: Any, pull: float, momentum: float) -> Any:
    """v = (1 − μ q) W φ,   φ ← (1 + β) v − β v',   v' ← v"""
    v = (1 - pull) * w
    return ((1 + momentum) * v, -momentum * one), (v, 0 * one)


def overlapping_diloco(w: Any, one: Any, pull: float, momentum: float) -> Any:
    """v = (W − μ q) φ,   φ ← (1 + β) v − β v',   v' ← v"""
    v = w - pull * one
    return ((1 + momentum) * v, -momentum * one), (v, 0 * one)


def gasloc(w: Any, one: Any, pull: float, momentum: float) -> Any:
    """y = (1 − μ q) φ,   φ ← W y + β (y − y'),   y' ← y"""
    y = 1 - pull
    return (y * (w + momentum * one), -momentum * one), (y * one, 0 * one)


def noloco(w: Any, one: Any, pull: float, momentum: float, consensus_rate: float) -> Any:
    """δ ← β δ − μ q W φ − γ (φ − W φ),   φ ← φ + δ"""
    change = -pull * w - consensus_rate * (one - w)
    return (one + change, momentum * one), (change, momentum * one)


def quasi_global(w: Any, one: Any, pull: float, momentum: float, weight: float) -> Any:
    """x' = W (x − b v),   v ← β v + (1 − β) (x − x'),   v = η m, b = β or, with nesterov, β²"""
    return _remembered((w, -weight * w), one, momentum)


def overlapping_quasi_global(w: Any, one: Any, pull: float, momentum: float, weight: float) -> Any:
    """x' = W x − b v,   v ← β v + (1 − β) (x − x')"""
    return _remembered((w, -weight * one), one, momentum)


def _remembered(moved: tuple[Any, Any], one: Any, momentum: float) -> Any:
    """The rows of (x', v)."""
    of_x, of_v = moved
    return moved, ((1 - momentum) * (one - of_x), momentum * one - (1 - momentum) * of_v)


@lru_cache(maxsize=32)
def largest_rate(
    topology: Topology, recurrence: Recurrence, outer_rate: float, *options: float
) -> float:
    """The rate γ from which disagreement does not decay. Infinite above 2, and where it is not
    computed: for more than 128 workers on directed and time-varying topologies."""
    n, is_static = topology.n_workers, topology.period == 1
    if n == 1 or (n > _LARGEST and not (is_static and topology.symmetric)):
        return math.inf

    def decays(rate: float) -> bool:
        pulls = (share * outer_rate for share in _SHARES)
        return all(radius(topology, recurrence, rate, pull, *options) < 1 for pull in pulls)

    for low, high in pairwise(_RATES):
        if not decays(high):
            while high - low > (1e-12 if is_static else 1e-3):
                middle = (low + high) / 2
                low, high = (middle, high) if decays(middle) else (low, middle)
            return float(high)
    return math.inf


def radius(
    topology: Topology, recurrence: Recurrence, rate: float, pull: float, *options: float
) -> float:
    """The factor of disagreement in a period of the topology, in the long run.

    Args:
        rate: Diffusion rate γ.
        pull: μ q.
    """
    if topology.period == 1:
        w = 1 - rate * _eigenvalues(topology)
        (a, b), (c, d) = recurrence(w, 1.0, pull, *options)
        half = (a + d) / 2
        root = np.sqrt(half**2 - (a * d - b * c) + 0j)
        return float(np.maximum(abs(half + root), abs(half - root)).max())
    n = topology.n_workers
    one = np.eye(n) - 1 / n
    product = np.eye(2 * n)
    for laplacian in _laplacians(topology):
        rows = recurrence(one - rate * laplacian, one, pull, *options)
        product = np.block([list(row) for row in rows]) @ product
    return float(np.abs(np.linalg.eigvals(product)).max())


@lru_cache(maxsize=4)
def _laplacians(topology: Topology) -> list[np.ndarray]:
    """I − W of each round: float64 [worker, worker]."""
    return [np.eye(topology.n_workers) - r.matrix().toarray() for r in topology.rounds]


@lru_cache(maxsize=4)
def _eigenvalues(topology: Topology) -> np.ndarray:
    """Eigenvalues of I − W of a static topology, without the mean's. If they are real, only the
    extremes: eigenvalues between them are not less stable."""
    if topology.symmetric:
        return np.array([topology.spectral_gap, topology.largest_eigenvalue])
    values = np.linalg.eigvals(_laplacians(topology)[0])
    return np.delete(values, np.abs(values).argmin())
