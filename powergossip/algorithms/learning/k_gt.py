"""K-GT: gradient tracking over local steps."""

from typing import ClassVar

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Kind
from powergossip.algorithms.learning.gossip_rule import (
    WITHOUT_COPIES,
    GossipRule,
    Variable,
    Workers,
)


class KGT(GossipRule):
    """K-GT: gradient tracking with K local steps between messages::

        x_i ← x_i + u_i + c_i                K times; u_i the local optimizer's displacement
        z_i = (x_i − x_i before the K steps)/K
        c ← G(z) + c − z,   x ← G(x)         in one message per neighbor

    Liu, Lin, Koloskova & Stich (2023), arXiv:2301.01313, Algorithm 1, in units of the displacement:
    c is the paper's times −η. It is scaled with the learning rate, and left out of a step with
    η = 0. c starts at 0; the paper also has a start that needs an all-reduce. The step of the outer
    update is 1.

    Exact fixed point for every K.

    Invariant: Σ_i c_i = 0.

    Args:
        local_steps: Number K of local steps.

    Raises:
        BadValue: Unless K ≥ 1.
    """

    kinds: ClassVar[frozenset[Kind]] = WITHOUT_COPIES
    reads_rate = True
    state: ClassVar[dict[str, Variable]] = {
        "steps": Variable.RESET,
        "rate": Variable.RESET,
        "c": Variable.RESET,
        "sum": Variable.RESET,
    }

    def __init__(self, workers: Workers, *, local_steps: int = 1):
        super().__init__(workers, variables=2)
        checks.at_least_one("local_steps", local_steps)
        self._local_steps, self._steps = local_steps, 0
        self._c, self._sum = torch.zeros_like(self._x), torch.zeros_like(self._x)
        self._rate: float | None = None  # of c

    @property
    def exchanging(self) -> bool:
        return self._steps % self._local_steps == 0

    def begin_after(self, steps: int) -> None:
        self._steps = steps

    def update(self, u: Tensor | None) -> None:
        assert u is not None
        rate = self._local.rate
        if rate > 0:
            if self._rate and rate != self._rate:
                self._c.mul_(rate / self._rate)
            self._rate = rate
            u.add_(self._c)
        self._x.add_(u)
        self._sum.add_(u)
        self._steps += 1
        if self.exchanging:
            self._sum.div_(self._local_steps)

    def mixed(self) -> tuple[Tensor, ...]:
        return self._x, self._sum

    def add(self, u: Tensor, edge: int | None = None, agreed: bool = True) -> None:
        # The next exchange of an edge in the same step has z after this one.
        z = () if edge is None or not self.exchanging else (self._sum,)
        self._joint.add(u, self._x, (self._c, *z) if agreed else z)

    def settle(self) -> None:
        if self.exchanging:
            self._sum.zero_()

    def restart(self) -> None:
        self._c.zero_()
