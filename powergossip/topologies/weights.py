"""Weights of undirected graphs: functions of a symmetric 0/1 adjacency matrix."""

import math
from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_array, diags_array

from powergossip.topologies import spectra

GRID = 2**40  # weights that need an eigenvalue are multiples of 1/GRID

Weights = Callable[[csr_array], csr_array]


def metropolis_hastings(adjacency: csr_array) -> csr_array:
    """w_ij = 1/(1 + max(deg_i, deg_j)) on the edges of a symmetric 0/1 adjacency matrix.

    csr [worker, worker].

    References:
        Xiao, Boyd & Lall (2005), doi:10.1109/IPSN.2005.1440896.
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


def best_constant(adjacency: csr_array) -> csr_array:
    """w_ij = min(2/(λ_2 + λ_max), 1/the largest degree), λ of the Laplacian D − A: csr as above.

    The constant that minimizes ‖W − J‖₂ among those without a negative w_ii. The graph has to be
    connected.

    References:
        Xiao & Boyd (2004), section 4, doi:10.1016/j.sysconle.2004.02.022.
    """
    degree = np.diff(adjacency.indptr)
    if len(degree) == 1:
        return csr_array(adjacency)
    laplacian = csr_array(diags_array(degree.astype(np.float64)) - adjacency)
    weight = min(2 / sum(spectra.extremes(laplacian)), 1 / float(degree.max()))
    # Rounded, so that processes on different machines have the same weights.
    return csr_array(adjacency * math.floor(weight * GRID) / GRID)


WEIGHTS: dict[str, Weights] = {  # by name
    "metropolis": metropolis_hastings,
    "constant": best_constant,
}
