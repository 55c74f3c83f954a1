"""SparseLoCo and DeMo: the mean of the largest values of chunks of displacements, or of momenta.

Axes: worker (hosted here). Each worker has D elements.
"""

import math

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.error_feedback import ErrorFeedback, ErrorFeedbackConfig
from powergossip.compressors import ChunkTopK, chunk_shape, matrices
from powergossip.network import Conversation, Network
from powergossip.parameters import Layout


class SparseLoCo(ErrorFeedback):
    """SparseLoCo: the mean of compressed displacements of several local steps.

    With the displacement Δ_i = φ − x_i of `learning.CentralizedLocal`, and C of `ChunkTopK`::

        e_i ← β e_i + Δ_i
        mean ← α/n Σ_j C(e_j)
        e_i ← e_i − C(e_i)

    Sarfi, Thérien, Lidin & Belilovsky (2025), arXiv:2508.15706, Algorithm 1. Outer momentum would
    repeat displacements that the error already repeats, so it is not an option. Their code
    (tplr-ai/CCLoco, c01a785) has mean_over=senders, and applies α twice.

    With β < 1 the errors are forgotten, and the fixed point is biased where data differ.

    Cost on the wire: an all-gather of the messages of ChunkTopK, to n − 1 others, in every
    `local_steps`-th step. See `ErrorFeedback` for tensors that would not become smaller.

    Args:
        outer_rate: Rate α of the mean displacement.
        error_decay: Decay β of the errors.
        mean_over: Workers in the mean of an element: all, or senders, those with a value for it.
        kept: Largest values of a chunk that are sent.
        chunk: Largest number of rows and of columns of a chunk.
        bits: Bits of a value, 1 to 8, or 32 for floats.

    Raises:
        BadValue: For a value out of range.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        *,
        outer_rate: float = 1.0,
        error_decay: float = 0.95,
        mean_over: str = "all",
        kept: int = 64,
        chunk: int = 64,
        bits: int = 2,
    ):
        checks.positive("outer_rate", outer_rate)
        self._outer_rate = outer_rate
        config = ErrorFeedbackConfig(
            rescale_error=False, error_decay=error_decay, mean_over=mean_over
        )
        super().__init__(network, layout, ChunkTopK(kept, chunk, bits), config)

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Take displacements [worker, D] and clear them. Fill mean [worker, D]."""
        yield from super().step(gradient, mean)
        mean.mul_(self._outer_rate)


class DeMo(ErrorFeedback):
    """DeMo: the sign of the mean of the fast components of all momenta::

        m_i ← β m_i + η g_i
        q_i = the largest values of each chunk of DCT(m_i)
        m_i ← m_i − DCT⁻¹(q_i)
        mean ← sign(DCT⁻¹(1/n Σ_j q_j))

    Peng, Quesnelle & Kingma (2024), arXiv:2411.19870, Algorithm 1. DCT is the orthonormal cosine
    transform (type II) of both axes of each chunk. It is linear, so that the momenta are kept as
    their transforms, in units of 1/η: a gradient is transformed once, and so is the mean. The
    published code (bloc97/DeMo, 0e48145) has mean_over=senders.

    The learning rate is the length of every step of every element. Elements of the mean that are
    NaN or infinite become NaN, so that divergence stays visible.

    Cost on the wire: an all-gather of values (4 bytes) and positions, see `ChunkTopK`, to n − 1
    others. See `ErrorFeedback` for tensors that would not become smaller.

    Args:
        error_decay: Decay β of the momenta.
        mean_over: Workers in the mean of a component: all, or senders, those with a value for it.
        kept: Largest values of a chunk that are sent.
        chunk: Largest number of rows and of columns of a chunk.

    Raises:
        BadValue: For a value out of range.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        *,
        error_decay: float = 0.999,
        mean_over: str = "all",
        kept: int = 32,
        chunk: int = 64,
    ):
        config = ErrorFeedbackConfig(error_decay=error_decay, mean_over=mean_over)
        super().__init__(network, layout, ChunkTopK(kept, chunk, bits=32), config)
        self.owns_momentum = True
        self._chunks = [
            (stack, chunk_shape(stack.rows, stack.columns, chunk)) for stack in matrices(layout)
        ]
        sizes = {size for _, shape in self._chunks for size in shape}
        self._cosines = {size: cosines(size).to(self._error) for size in sizes}

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Take gradient [worker, D] and clear it. Fill mean [worker, D]."""
        for row in gradient:
            self._transform(row)
        yield from super().step(gradient, mean)
        self._transform(mean[0], inverse=True)
        mean[:] = mean[0].sign() + (mean[0] - mean[0])  # NaN where it is not finite

    def _transform(self, row: Tensor, inverse: bool = False) -> None:
        """Replace a row [D] by its transform: one worker at a time, whose bits are then the same
        in all layouts."""
        for stack, (height, width) in self._chunks:
            part = row[stack.start : stack.stop]
            chunks = part.view(stack.layers, -1, height, stack.columns // width, width)
            left, right = self._cosines[height], self._cosines[width]
            if inverse:
                left, right = left.T, right.T
            part.copy_(torch.einsum("lyhxw,bh,dw->lybxd", chunks, left, right).flatten())


def cosines(size: int) -> Tensor:
    """The matrix of the orthonormal cosine transform, float64 [frequency, position].

    Zeros are exact: DeMo takes the sign of products, which a rounding error would decide.
    """
    n = torch.arange(size, dtype=torch.float64)
    matrix = (math.pi * n[:, None] * (2 * n + 1) / (2 * size)).cos() * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.where(matrix.abs() > 1e-12, 0)
