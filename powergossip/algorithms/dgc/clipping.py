"""Local clipping of gradients in Deep Gradient Compression."""

from collections.abc import Generator
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from powergossip.network import Conversation, Mean, Network
from powergossip.parameters import Layout

CLIPPING = ("gradient", "norm", "value", "global-norm", "global-value")


class Clipping:
    """Local clipping of the gradient g of each worker, in place, before it is accumulated.

    With c = clip, for n workers, by the value of clip_by::

        gradient       g ← g · min(1, √n c / ‖g‖), all tensors together
        norm           g ← g · min(1, c / ‖g‖) for each tensor g
        value          each element ← the nearest number in [−c, c]
        global-norm    g ← g · min(1, c / G) for each tensor, G² = 1/n Σ_i ‖g_i‖²
        global-value   each element ← the nearest number in [−G, G]

    The first is Lin et al. (2018), arXiv:1712.01887, § 3.2: there, worker i's gradient is g_i / n,
    and is clipped at c / √n, so that the sum of n independent gradients has a norm of c at most, as
    a rule. The others are clip_grad_norm_, clip_grad_value_, clip_grad_norm_2_by_global_ and
    clip_grad_value_by_global_norm_ of the published code. It clips tensors that are not compressed
    after the average.

    Cost on the wire of the global ones: an all-reduce of one element for each tensor.
    """

    def __init__(self, network: Network, layout: Layout, clip: float | None, by: str):
        self._clip, self._by, self._n = clip, by, network.n_workers
        self._spans = [span for i in range(len(layout.shapes)) for span in layout.spans([i])]
        shape = network.rows, len(self._spans)
        squares = torch.zeros(shape, dtype=network.dtype, device=network.device)
        self._squares = Mean(squares)

    def step(self, gradient: Tensor) -> Conversation:
        """Clip gradient [worker, D]."""
        if self._by == "global-norm":
            norms = yield from self._global_norms(gradient)
            self._scale_tensors(gradient, norms)
        elif self._by == "global-value":
            norms = yield from self._global_norms(gradient)
            for span, norm in zip(self._spans, norms.unbind(1), strict=True):
                limit = norm[:, None]
                gradient[:, span].clamp_(min=-limit, max=limit)
        elif self._clip is None:
            return
        elif self._by == "gradient":
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_(_factors(self._clip * sqrt(self._n), norms))
        elif self._by == "norm":
            self._scale_tensors(gradient, self._square_norms(gradient).sqrt())
        else:
            gradient.clamp_(min=-self._clip, max=self._clip)

    def _square_norms(self, gradient: Tensor) -> Tensor:
        """‖g‖² of each tensor g: [worker, tensor]."""
        return torch.stack([gradient[:, span].square().sum(1) for span in self._spans], 1)

    def _scale_tensors(self, gradient: Tensor, norms: Tensor) -> None:
        assert self._clip is not None
        factors = _factors(self._clip, norms)
        for span, factor in zip(self._spans, factors.unbind(1), strict=True):
            gradient[:, span].mul_(factor[:, None])

    def _global_norms(self, gradient: Tensor) -> Generator[Any, Any, Tensor]:
        """The root of the mean over all workers of each tensor's squared norm [worker, tensor]."""
        self._squares.tensor.copy_(self._square_norms(gradient))
        squares: Tensor = yield self._squares
        return squares.sqrt()


def _factors(limit: float, norms: Tensor) -> Tensor:
    """min(1, limit / norm), as torch.nn.utils.clip_grad_norm_ computes it."""
    return (limit / (norms + 1e-6)).clamp_(max=1)
