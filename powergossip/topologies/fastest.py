"""The fastest-mixing weights of an undirected graph."""

import math

import numpy as np
from scipy.sparse import csr_array

from powergossip.topologies.weights import best_constant, metropolis_hastings

MAX_EDGES = 1200  # a Newton step is cubic in them
_GAP = 1e-7  # of the solver, in ‖W − J‖₂
_BLEND = 2e-6  # fraction of Metropolis weights in the result: no edge has weight 0
_GRID = 2**30  # weights are multiples of 1/_GRID, so that they are the same on most machines


def fastest_mixing(adjacency: csr_array) -> csr_array:
    """The symmetric weights with the smallest ‖W − J‖₂, among those with w_ij > 0 and w_ii ≥ 0.

    csr [worker, worker], of a symmetric 0/1 adjacency matrix of a connected graph. The accuracy is
    5e-6. The same weights as `best_constant` or `metropolis_hastings` where no others are better
    than that.

    Negative weights could be faster on some graphs. They are excluded, since the laws of compressed
    gossip hold for weights ≥ 0.

    Raises:
        ValueError: For more than 1200 edges.

    References:
        Boyd, Diaconis & Xiao (2004), doi:10.1137/S0036144503423264.
    """
    row, column = adjacency.nonzero()
    i, j = row[row < column], column[row < column]
    n, n_edges = adjacency.shape[0], len(i)
    if n_edges > MAX_EDGES:
        raise ValueError(
            f"topology_options.weights=fastest: use constant or metropolis; the graph has "
            f"{n_edges} edges, more than {MAX_EDGES}"
        )
    metropolis = metropolis_hastings(adjacency)
    if n == 1:
        return metropolis
    start = np.asarray(metropolis[i, j]).ravel()
    best = (1 - _BLEND) * _interior_point(n, i, j, start) + _BLEND * start
    best = np.floor(best * _GRID) / _GRID
    constant = np.asarray(best_constant(adjacency)[i, j]).ravel()
    chosen, smallest = constant, _norm(n, i, j, constant)
    for weights, better in ((start, 1e-9), (best, 2 * _BLEND)):  # by more than rounding
        norm = _norm(n, i, j, weights)
        if norm < smallest - better:
            chosen, smallest = weights, norm
    both = np.concatenate([chosen, chosen])
    return csr_array((both, (np.concatenate([i, j]), np.concatenate([j, i]))), shape=(n, n))


def _laplacian(n: int, i: np.ndarray, j: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Σ_k w_k b_k b_kᵀ = I − W, where b_k = e_i − e_j is edge k: [worker, worker]."""
    L = np.zeros((n, n))
    L[i, j] = L[j, i] = -w
    np.fill_diagonal(L, -L.sum(axis=1))
    return L


def _norm(n: int, i: np.ndarray, j: np.ndarray, w: np.ndarray) -> float:
    """‖W − J‖₂"""
    values = np.linalg.eigvalsh(_laplacian(n, i, j, w))[1:]
    return float(max(abs(1 - values[0]), abs(1 - values[-1])))


def _interior_point(n: int, i: np.ndarray, j: np.ndarray, w: np.ndarray) -> np.ndarray:
    """min s over (w, s): −sI ⪯ W − J ⪯ sI, w ≥ 0, w_ii ≥ 0, to 1e-7 of s: [edge].

    Newton steps on t s − log det F₁ − log det F₂ − Σ log w − Σ log w_ii for increasing t, where F₁
    = sI − W + J and F₂ = sI + W − J. The error of s is at most ν/t, ν the sum of the sizes of the
    four terms.

    Args:
        w: A start with w > 0, w_ii > 0.

    References:
        Boyd & Vandenberghe (2004), Convex Optimization, section 11.6.
    """
    n_edges = len(w)
    edges = np.arange(n_edges)
    B = np.zeros((n, n_edges))
    B[i, edges], B[j, edges] = 1, -1
    ends = abs(B)
    J = np.full((n, n), 1 / n)

    def blocks(w: np.ndarray, s: float) -> tuple[np.ndarray, np.ndarray]:
        M = np.eye(n) - _laplacian(n, i, j, w) - J
        return s * np.eye(n) - M, s * np.eye(n) + M

    def value(w: np.ndarray, s: float, t: float) -> float:
        slack = 1 - ends @ w
        if w.min() <= 0 or slack.min() <= 0:
            return math.inf
        try:
            factors = [np.diag(np.linalg.cholesky(F)) for F in blocks(w, s)]
        except np.linalg.LinAlgError:
            return math.inf
        logs = sum(float(np.log(v).sum()) for v in (*factors, *factors, w, slack))
        return t * s - logs

    s = _norm(n, i, j, w) + 1
    size = 3 * n + n_edges  # ν
    t = float(size)
    while True:
        last = size / t <= _GAP
        for _ in range(50):
            X1, X2 = (np.linalg.inv(F) for F in blocks(w, s))
            X1B, X2B = X1 @ B, X2 @ B
            Q1, Q2 = B.T @ X1B, B.T @ X2B
            slack = 1 - ends @ w
            gradient = np.append(
                np.diag(Q2) - np.diag(Q1) - 1 / w + ends.T @ (1 / slack),
                t - np.trace(X1) - np.trace(X2),
            )
            H = np.empty((n_edges + 1, n_edges + 1))
            H[:-1, :-1] = Q1**2 + Q2**2 + np.diag(w**-2) + ends.T @ (ends / slack[:, None] ** 2)
            H[:-1, -1] = H[-1, :-1] = (X1B**2).sum(axis=0) - (X2B**2).sum(axis=0)
            H[-1, -1] = (X1**2).sum() + (X2**2).sum()
            step = np.linalg.solve(H, -gradient)
            decrement = -float(gradient @ step)  # twice the expected decrease
            if decrement < (1e-10 if last else 1e-2):
                break
            now, length = value(w, s, t), 1.0
            while length > 1e-12:
                w_next, s_next = w + length * step[:-1], s + length * float(step[-1])
                if value(w_next, s_next, t) < now - 0.1 * length * decrement:
                    break
                length /= 2
            else:
                break  # at the precision of float64
            w, s = w_next, s_next
        if last:
            return w
        t *= 10
