"""Extreme eigenvalues of a large I − W, and the norm of a product of mixing matrices.

scipy.sparse.linalg takes half a second to import and few runs need it: hence the local imports.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array, diags_array

from powergossip import randomness

EXACT = 1e-12  # relative distance to the mean that counts as an exact average
DENSE = 2000  # workers: the largest size for dense computations


def extremes(laplacian: csr_array) -> tuple[float, float]:
    """λ_2 and λ_max of I − W, of two or more workers.

    Above 2000 workers, to about 1e-8, by Lanczos on the vectors of mean 0. It converges fast where
    eigenvalues are well separated, as on random graphs. Where they are not, as on a long ring, the
    graph has small separators, and a sparse factorization of the matrix shifted to that end of the
    spectrum is cheap.
    """
    if laplacian.shape[0] <= DENSE:
        values = np.linalg.eigvalsh(laplacian.toarray())
        return float(values[1]), float(values[-1])
    bound = 2 * float(laplacian.diagonal().max())  # Gershgorin
    shift = 1e-8
    smallest = _eigenvalue_nearest(laplacian, -shift, 2 * bound)
    largest = _eigenvalue_nearest(laplacian, bound + shift, 2 * bound)
    return smallest, largest


def _eigenvalue_nearest(laplacian: csr_array, end: float, scale: float) -> float:
    """The eigenvalue nearest to `end`, a point outside the spectrum, on the vectors of mean 0."""
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


def norm_beside_the_mean(steps: Sequence[csr_array]) -> float:
    """‖(I − J) W_T … W_1‖₂, where J averages: the contraction of the distance to the mean.

    Dense up to 2000 workers, Lanczos above. Raises ValueError if Lanczos does not converge.
    """
    n = steps[0].shape[0]
    if n <= DENSE:
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
    frobenius = float(np.linalg.norm(apply(start)))  # estimate of the product's Frobenius norm
    if frobenius < EXACT:
        return frobenius
    square = LinearOperator((n, n), matvec=lambda x: apply_transposed(apply(x)), dtype=np.float64)
    options: dict[str, Any] = {"k": 1, "which": "LA", "v0": start, "return_eigenvectors": False}
    try:
        value = eigsh(square, maxiter=100, tol=1e-6, **options)[0]
    except ArpackNoConvergence as error:
        raise ValueError(f"the contraction of {n} workers takes too long") from error
    return math.sqrt(max(float(value), 0.0))
