"""Gradient tracking: a second variable follows the mean of the workers' gradients.

Neighbors mix y beside x, and y_i changes by what the worker's own gradient changes. The mean of the
y_i is then always the mean of the latest gradients, and the fixed point is the optimum of the mean
loss, however different the data are.
"""

from typing import ClassVar

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Kind, begin_at
from powergossip.algorithms.learning.gossip_rule import (
    COPIES,
    WITHOUT_COPIES,
    GossipRule,
    Joint,
    Workers,
)
from powergossip.algorithms.learning.interface import Gradient, Mix, RuleStep, Update
from powergossip.network import Conversation


class _Tracking(GossipRule):
    """y_i ← G(y)_i + v_i − v_i', with v_i' that of the step before. y and v start at 0.

    x and y travel in one message per neighbor, twice the size of D-PSGD's.
    """

    overlaps = True
    sequential: ClassVar[frozenset[Kind]] = WITHOUT_COPIES
    variables: ClassVar[tuple[str, ...]] = ("y", "v")

    def __init__(self, workers: Workers, *, overlapping: bool = False):
        super().__init__(workers)
        self._overlapping = overlapping or self.always_overlaps
        self._joint = Joint(self._layout, self._x)
        self._averaging = self._make(self._joint.layout)
        self._y = torch.zeros_like(self._x)
        self._v = torch.zeros_like(self._x)

    def _mixing(self) -> Conversation:
        """x ← G(x), y ← G(y)"""
        self._joint.load(self._x, self._y)
        yield from self._averaging.step(self._joint.buffer)
        self._joint.store(self._x, self._y)

    def begin_at(self, point: Tensor) -> None:
        self._joint.load(point.expand_as(self._x), torch.zeros_like(self._x))
        begin_at(self._averaging, self._joint.buffer[0])

    def _follow(self, v: Tensor) -> None:
        """y ← y + v − v'"""
        self._y.add_(v).sub_(self._v)
        self._v.copy_(v)


class GradientTracking(_Tracking):
    """DSGT: the local optimizer's displacements u_i are tracked, −η g_i for plain SGD::

        y_i ← G(y)_i + u_i − u_i'            u_i at x_i, u_i' at the x_i before
        x ← G(x + y)                         or with overlapping, x ← G(x) + y

    Di Lorenzo & Scutari (2016), doi:10.1109/TSIPN.2016.2524588; Pu & Nedić (2021),
    arXiv:1805.11454. Tracking the displacement, with momentum, clipping and weight decay inside, is
    the form of Vogels et al. (2021), arXiv:2110.04175, appendix. With a changed learning rate, the
    mean of the y_i changes at once, and their differences with the rate of the mixing.

    With CHOCO-Gossip and overlapping it is C-GT (Liao et al. 2022, arXiv:2205.12623) with α = 1.
    Exact with biased compressors, too, for a small enough diffusion rate.

    Invariant: mean_i y_i = mean_i u_i after the local update of every step.
    """

    def step(self) -> RuleStep:
        g = yield Gradient(self._mixing() if self._overlapping else None)
        u = yield Update(g)
        self._follow(u)
        self._x.add_(self._y)
        if not self._overlapping:
            yield Mix(self._mixing())


class _TrackedDirection(_Tracking):
    """The local optimizer follows y: x ← G(x + u(y)), or with overlapping, x ← G(x) + u(y)::

        v_i ← β v_i + (1 − β) g_i            v_i = g_i in the first step; β = 0 without momentum
        y_i ← G(y)_i + v_i − v_i'

    The direction is y_i, or y_i/‖y_i‖ for rules with needs_norm.
    """

    owns_momentum = True
    variables: ClassVar[tuple[str, ...]] = ("steps", "y", "v")
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)

    def __init__(self, workers: Workers, *, overlapping: bool = False):
        super().__init__(workers, overlapping=overlapping)
        self._momentum, self._steps = 0.0, 0

    def step(self) -> RuleStep:
        g = yield Gradient(self._mixing() if self._overlapping else None)
        if g is not None:
            self._follow(g.lerp_(self._v, self._momentum if self._steps else 0.0))
            self._steps += 1
            g.copy_(self._y)
            if self.needs_norm:
                g.div_(self._layout.norms(g).clamp_(min=torch.finfo(g.dtype).tiny))
        u = yield Update(g)
        self._x.add_(u)
        if not self._overlapping:
            yield Mix(self._mixing())


class NormalizedGradientTracking(_TrackedDirection):
    """GT-NSGDm: the step has length η in every worker, along the tracked momentum::

        v_i ← β v_i + (1 − β) g_i            v_i = g_i in the first step
        y_i ← G(y)_i + v_i − v_i'
        x ← G(x − η y_i/‖y_i‖)               or with overlapping, x ← G(x) − η y_i/‖y_i‖

    Yu, Jakovetić & Kar (2025), arXiv:2505.03736, for heavy-tailed noise. ‖·‖ is over all parameters
    of a worker. Momentum and normalization come in this order: normalized gradients do not average
    to the normalized mean. The paper mixes y + v − v' in a message of its own before x moves. Here
    y is mixed one step earlier, in the message of x.

    Args:
        momentum: Momentum β.
    """

    needs_norm = True

    def __init__(self, workers: Workers, *, overlapping: bool = False, momentum: float = 0.9):
        super().__init__(workers, overlapping=overlapping)
        self._momentum = momentum


class BEER(_TrackedDirection):
    """Gradient tracking with error feedback, over CHOCO-Gossip's public copies::

        v_i ← G(v)_i + g_i − g_i'
        x ← G(x) − η v

    Zhao et al. (2022), arXiv:2201.13320, Algorithm 1. G is a step of CHOCO-Gossip, whose copies of
    x and v start at 0. The paper updates the copies after x and v, here they are updated before:
    the same steps but for the first one, in which the workers have equal models. Exact with biased
    compressors, for a small enough diffusion rate. Messages are always those of x and v before the
    gradient, so that they are in flight while it is computed.
    """

    kinds: ClassVar[frozenset[Kind]] = COPIES
    static = always_overlaps = True


class MoTEF(BEER):
    """BEER with momentum::

        m_i ← (1 − λ) m_i + λ g_i            λ = 1 − momentum, and m_i = g_i in the first step
        v_i ← G(v)_i + m_i − m_i'
        x ← G(x) − η v

    Islamov, Gao & Stich (2024), arXiv:2405.20114, Algorithm 1. λ = 1 is BEER.

    Args:
        momentum: Momentum 1 − λ.
    """

    def __init__(self, workers: Workers, *, overlapping: bool = True, momentum: float = 0.9):
        super().__init__(workers, overlapping=overlapping)
        self._momentum = momentum
