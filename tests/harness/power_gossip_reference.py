"""PowerGossip as in the paper: one matrix, dense, one edge at a time.

The plain version beside `PowerGossip`, for reading and for tests of agreement. It has no grouping
of matrices, no memory management, no messages and no safeguards for collapsed directions.
"""

import torch
from torch import Tensor

from powergossip import randomness

Edge = tuple[int, int]  # (i, j), i < j


class PowerGossipReference:
    """Algorithm 1 of Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, on X [worker, m, k].

    Attributes:
        W: Symmetric mixing matrix of a static graph [worker, worker].
        shape: Shape (m, k) of a matrix.
        p: Edge → directions [m or k, rank], the same at both ends.
        iterations: Power iterations since the start (even: p [m, rank], odd: p [k, rank]).
    """

    def __init__(
        self,
        W: Tensor,
        shape: tuple[int, int],
        *,
        diffusion_rate: float = 1.0,
        rank: int = 1,
        num_iterations: int = 1,
        warm_start: bool = True,
        seed: int = 0,
    ):
        self.W, self.shape, self.gamma, self.rank = W, shape, diffusion_rate, rank
        self.num_iterations, self.warm_start, self.seed = num_iterations, warm_start, seed
        n = len(W)
        self.edges: list[Edge] = [(i, j) for i in range(n) for j in range(i + 1, n) if W[i, j]]
        self.iterations = 0
        self.p = {edge: self.random_directions(edge) for edge in self.edges}

    def step(self, X: Tensor) -> None:
        """num_iterations power iterations on every edge, in place on X."""
        for _ in range(self.num_iterations):
            # Sides swap: an odd iteration works on the transposed matrices.
            sided = X if self.iterations % 2 == 0 else X.mT
            update = torch.zeros_like(sided)
            for i, j in self.edges:
                if not self.warm_start:
                    self.p[i, j] = self.random_directions((i, j))
                p, _ = torch.linalg.qr(self.p[i, j].to(X))  # orthonormalize
                s_i, s_j = sided[i].T @ p, sided[j].T @ p  # exchanged between i and j
                d = s_j - s_i
                update[i] += self.gamma * self.W[i, j] * p @ d.T
                update[j] -= self.gamma * self.W[i, j] * p @ d.T
                self.p[i, j] = d
            sided += update
            self.iterations += 1

    def random_directions(self, edge: Edge) -> Tensor:
        """Directions [m or k, rank] for this iteration from the random stream of an edge."""
        length = self.shape[self.iterations % 2]
        key = randomness.keys(self.seed, "power-gossip", [edge])
        rows = randomness.normal(key, self.iterations, (self.rank, length))[0]
        return rows.T
