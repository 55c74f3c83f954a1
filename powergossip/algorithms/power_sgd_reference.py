"""PowerSGD on one matrix, as plainly as in the paper: the reference that power_sgd.py agrees with.

Symbols of Vogels et al. (2019), arXiv:1905.13727, Algorithm 1: M [.., row, column] is a worker's
gradient plus its error, P [.., row, rank] and Q [.., column, rank] are the two factors. P̄ and Q̄
are means over all workers. A leading axis may hold several workers.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def step(
    M: Tensor,
    factor: Tensor,
    iteration: int,
    all_reduce: Callable[[Tensor], Tensor],
    num_iterations: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean that all workers apply, this worker's error, and the next factor.

    Args:
        iteration: Half-iterations before this step: with an even count, factor is Q̄, else P̄.
        all_reduce: Function that gives the mean over the workers, in place of communication.
    """
    mean = torch.zeros_like(M)
    for half_iteration in range(iteration, iteration + num_iterations):
        if half_iteration % 2 == 0:
            Q = _orthonormalize(factor)
            P = M @ Q
            M = M - P @ Q.mT
            factor = all_reduce(P)
            mean = mean + factor @ Q.mT
        else:
            P = _orthonormalize(factor)
            Q = M.mT @ P
            M = M - P @ Q.mT
            factor = all_reduce(Q)
            mean = mean + P @ factor.mT
    return mean, M, factor


def _orthonormalize(factor: Tensor) -> Tensor:
    return torch.linalg.qr(factor.double()).Q.to(factor.dtype)
