"""D-PSGD over any averaging algorithm."""

from typing import ClassVar

import torch

from powergossip.algorithms.averaging import Kind, Weighted
from powergossip.algorithms.learning.gossip_rule import GossipRule, Workers
from powergossip.algorithms.learning.interface import Gradient, Mix, RuleStep, Update
from powergossip.algorithms.plain import ExactMean


class DPSGD(GossipRule):
    """Decentralized parallel SGD with any averaging algorithm G and local update u::

        overlapping:  x_{t+1} = G(x_t) − η u(g(x_t))
        otherwise:    x_{t+1} = G(x_t − η u(g(x_t)))

    Lian et al. (2017), arXiv:1705.09056, Algorithm 1. There the gradient is taken at the same x_t
    that neighbors receive, so messages are in flight while it is computed. All-reduce always
    follows the update, which makes it SGD on the mean gradient.

    Over push-sum, which averages x̂_i = w_i x_i, u is added to x̂_i: x_i ← x_i + u_i / w_i.

    Args:
        local_steps: Number k: gossip in every k-th step only (Stich 2019, arXiv:1805.09767).
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset(Kind)
    half_precision = in_place = overlaps = overlaps_mean = True
    for_different_data = False
    resumes_with: ClassVar[tuple[str, ...]] = ("overlapping", "local_steps")
    variables: ClassVar[tuple[str, ...]] = ("steps",)
    kept: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(self, workers: Workers, *, overlapping: bool = True, local_steps: int = 1):
        super().__init__(workers)
        self._averaging = averaging = self._make(self._layout)
        self._overlapping = overlapping and not isinstance(averaging, ExactMean)
        self._local_steps, self._steps = local_steps, 0
        self._weighted = averaging if isinstance(averaging, Weighted) else None
        self.rescales = self._weighted is not None
        self._before = torch.empty_like(self._x if self.rescales else self._x[:0])

    def begin_after(self, steps: int) -> None:
        self._steps = steps

    def step(self) -> RuleStep:
        x, weighted = self._x, self._weighted
        gossips = (self._steps + 1) % self._local_steps == 0
        g = yield Gradient(self._averaging.step(x) if gossips and self._overlapping else None)
        if weighted is not None:
            self._before.copy_(x)
        yield Update(g)
        if weighted is not None:
            weighted.rescale(self._before, x)
        if gossips and not self._overlapping:
            yield Mix(self._averaging.step(x))
        self._steps += 1
