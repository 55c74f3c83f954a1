"""D-PSGD over any averaging algorithm."""

from typing import ClassVar

from torch import Tensor

from powergossip.algorithms.averaging import Kind, Weighted
from powergossip.algorithms.learning.gossip_rule import GossipRule, Variable, Workers
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
    overlaps: ClassVar[frozenset[Kind]] = frozenset(Kind)
    stateless = True
    state: ClassVar[dict[str, Variable]] = {"steps": Variable.KEPT}

    def __init__(self, workers: Workers, *, overlapping: bool = True, local_steps: int = 1):
        super().__init__(workers)
        self.overlapping = overlapping and not isinstance(self._averaging, ExactMean)
        self._local_steps, self._steps = local_steps, 0
        self._weighted = self._averaging if isinstance(self._averaging, Weighted) else None
        self.in_place = self._weighted is None

    @property
    def exchanging(self) -> bool:
        return (self._steps + 1) % self._local_steps == 0

    def begin_after(self, steps: int) -> None:
        self._steps = steps

    def update(self, u: Tensor | None) -> None:
        if u is not None and self._weighted is not None:
            self._weighted.scale(u)
        super().update(u)

    def settle(self) -> None:
        self._steps += 1
