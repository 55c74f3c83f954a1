"""Corrections of local updates: K-GT and momentum tracking."""

from typing import ClassVar

import torch

from powergossip import checks
from powergossip.algorithms.averaging import Incremental, Kind, incremental
from powergossip.algorithms.learning.gossip_rule import (
    WITHOUT_COPIES,
    GossipRule,
    Joint,
    Workers,
)
from powergossip.algorithms.learning.interface import Gradient, Mix, RuleStep, Update
from powergossip.network import Conversation


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
    variables: ClassVar[tuple[str, ...]] = ("steps", "rate", "c", "sum")

    _averaging: Incremental

    def __init__(self, workers: Workers, *, local_steps: int = 1):
        super().__init__(workers)
        checks.at_least_one("local_steps", local_steps)
        self._local_steps, self._steps = local_steps, 0
        self._joint = Joint(self._layout, self._x)
        self._increment = torch.zeros_like(self._joint.buffer)
        self._averaging = incremental(self._make(self._joint.layout))
        self._c, self._sum = torch.zeros_like(self._x), torch.zeros_like(self._x)
        self._rate: float | None = None  # of c

    def begin_after(self, steps: int) -> None:
        if steps % self._local_steps:
            raise ValueError(
                f"add_param_group() after {steps} steps: call it after a multiple of "
                f"local_steps={self._local_steps}, when messages have been sent"
            )

    def step(self) -> RuleStep:
        x, c = self._x, self._c
        g = yield Gradient()
        u = yield Update(g)
        rate = self._local.rate
        if rate > 0:
            if self._rate and rate != self._rate:
                c.mul_(rate / self._rate)
            self._rate = rate
            u.add_(c)
        x.add_(u)
        self._sum.add_(u)
        self._steps += 1
        if self._steps % self._local_steps == 0:
            self._joint.load(x, self._sum.div_(self._local_steps))
            yield Mix(self._averaging.increment(self._joint.buffer, self._increment))
            self._joint.add(self._increment, x, c)
            self._sum.zero_()


class MomentumTracking(GossipRule):
    """Momentum tracking: the momenta of all workers are tracked, and x moves by their mean::

        m_i ← β m_i + g_i
        x ← G(x) − η (m − c),   c ← G(c − m) + m

    Takezawa, Bao, Niwa, Sato & Yamada (2023), arXiv:2209.15505, Algorithm 1. x and c − m travel in
    one message per neighbor, while the next gradient is computed. m and c start at 0; the published
    start needs an all-reduce. Nesterov's momentum and optimizers other than SGD are not in the
    paper.

    Exact fixed point. Invariant: Σ_i c_i = 0.

    Args:
        momentum: Momentum β.
    """

    kinds: ClassVar[frozenset[Kind]] = WITHOUT_COPIES
    owns_momentum = overlaps = True
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)
    sequential: ClassVar[frozenset[Kind]] = WITHOUT_COPIES
    variables: ClassVar[tuple[str, ...]] = ("m", "c")
    kept: ClassVar[tuple[str, ...]] = ("m",)

    _averaging: Incremental

    def __init__(self, workers: Workers, *, momentum: float = 0.9, overlapping: bool = True):
        super().__init__(workers)
        self._momentum, self._overlapping = momentum, overlapping
        self._joint = Joint(self._layout, self._x)
        self._increment = torch.zeros_like(self._joint.buffer)
        self._averaging = incremental(self._make(self._joint.layout))
        self._m, self._c = torch.zeros_like(self._x), torch.zeros_like(self._x)

    def step(self) -> RuleStep:
        x, m, c = self._x, self._m, self._c
        g = yield Gradient(self._mixing() if self._overlapping else None)
        if g is not None:
            m.mul_(self._momentum).add_(g)
            torch.sub(m, c, out=g)
        u = yield Update(g)
        x.add_(u)
        if not self._overlapping:
            yield Mix(self._mixing())

    def _mixing(self) -> Conversation:
        """x ← G(x), c ← c + Δ(c − m)"""
        self._joint.load(self._x, self._c - self._m)
        yield from self._averaging.increment(self._joint.buffer, self._increment)
        self._joint.add(self._increment, self._x, self._c)
