"""Gradient tracking: a second variable follows the mean of the workers' gradients.

Neighbors mix y beside x, and y_i changes by as much as the worker's own gradient. The mean of the
y_i is then always the mean of the latest gradients, and the fixed point is the optimum of the mean
loss, however different the data are.
"""

from typing import ClassVar

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Kind
from powergossip.algorithms.learning.gossip_rule import (
    COPIES,
    WITHOUT_COPIES,
    GossipRule,
    Variable,
    Workers,
)


class _Tracking(GossipRule):
    """y_i ← G(y)_i + v_i − v_i', with v_i' the v_i of the step before. y and v start at 0.

    x and y travel in one message per neighbor, twice the size of D-PSGD's. Σ_i y_i, with the
    messages about y that are not applied yet, is Σ_i v_i, so that late messages do not change the
    optimum.

    The y of a lost worker is lost. A worker that learns of a death or a join restarts with y_i ←
    v_i, and applies an exchange of y only if both messages and the worker have the same view. Both
    ends skip all other exchanges: either their messages have different views, or an end that has
    applied them restarts. Once all have the same view, Σ_i y_i = Σ_i v_i again. They need not
    restart in the same step.
    """

    overlaps: ClassVar[frozenset[Kind]] = COPIES
    state: ClassVar[dict[str, Variable]] = {"y": Variable.RESET, "v": Variable.RESET}

    def __init__(self, workers: Workers, *, overlapping: bool = False):
        super().__init__(workers, variables=2)
        self.overlapping = overlapping
        self._y = torch.zeros_like(self._x)
        self._v = torch.zeros_like(self._x)

    def mixed(self) -> tuple[Tensor, ...]:
        return self._x, self._y

    def restart(self) -> None:
        self._y.copy_(self._v)

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

    undamped = True

    def update(self, u: Tensor | None) -> None:
        assert u is not None
        self._follow(u)
        self._x.add_(self._y)


class _TrackedDirection(_Tracking):
    """The local optimizer follows y: x ← G(x + u(y)), or with overlapping, x ← G(x) + u(y)::

        v_i ← β v_i + (1 − β) g_i            v_i = g_i in the first step; β = 0 without momentum
        y_i ← G(y)_i + v_i − v_i'

    The direction is y_i.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)
    state: ClassVar[dict[str, Variable]] = {"steps": Variable.RESET, **_Tracking.state}

    def __init__(self, workers: Workers, *, overlapping: bool = False):
        super().__init__(workers, overlapping=overlapping)
        self._momentum, self._steps = 0.0, 0

    def direct(self, g: Tensor) -> None:
        self._follow(g.lerp_(self._v, self._momentum if self._steps else 0.0))
        self._steps += 1
        g.copy_(self._y)


class NormalizedGradientTracking(_TrackedDirection):
    """GT-NSGDm: the step has length η in every worker, along the tracked momentum::

        v_i ← β v_i + (1 − β) g_i            v_i = g_i in the first step
        y_i ← G(y)_i + v_i − v_i'
        x ← G(x − η y_i/‖y_i‖)               or with overlapping, x ← G(x) − η y_i/‖y_i‖

    Yu, Jakovetić & Kar (2025), arXiv:2505.03736, for heavy-tailed noise. ‖·‖ is over all parameters
    of a worker. Momentum and normalization come in this order: normalized gradients do not average
    to the normalized mean. The paper mixes y + v − v' in a separate message before x moves. Here y
    is mixed one step earlier, in the message of x.

    Args:
        momentum: Momentum β.
    """

    def __init__(self, workers: Workers, *, overlapping: bool = False, momentum: float = 0.9):
        super().__init__(workers, overlapping=overlapping)
        self._norms = workers.norms
        self._momentum = momentum

    def direct(self, g: Tensor) -> None:
        super().direct(g)
        g.div_(self._norms(g))


class BEER(_TrackedDirection):
    """Gradient tracking with error feedback, over CHOCO-Gossip's public copies::

        v_i ← G(v)_i + g_i − g_i'
        x ← G(x) − η v

    Zhao et al. (2022), arXiv:2201.13320, Algorithm 1. G is a step of CHOCO-Gossip, whose copies of
    x and v start at 0. The paper updates the copies after x and v, here they are updated before:
    the same steps but for the first one, when the workers have equal models. Exact with biased
    compressors, for a small enough diffusion rate. Messages always have x and v from before the
    gradient, so that they are in flight while it is computed.
    """

    kinds: ClassVar[frozenset[Kind]] = COPIES
    static = undamped = True

    def __init__(self, workers: Workers):
        super().__init__(workers, overlapping=True)


class MoTEF(BEER):
    """BEER with momentum::

        m_i ← (1 − λ) m_i + λ g_i            λ = 1 − momentum, and m_i = g_i in the first step
        v_i ← G(v)_i + m_i − m_i'
        x ← G(x) − η v

    Islamov, Gao & Stich (2024), arXiv:2405.20114, Algorithm 1. λ = 1 is BEER.

    Args:
        momentum: Momentum 1 − λ.
    """

    def __init__(self, workers: Workers, *, momentum: float = 0.9):
        super().__init__(workers)
        self._momentum = momentum


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
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)
    state: ClassVar[dict[str, Variable]] = {"m": Variable.KEPT, "c": Variable.RESET}

    def __init__(self, workers: Workers, *, momentum: float = 0.9, overlapping: bool = True):
        super().__init__(workers, variables=2)
        self._momentum, self.overlapping = momentum, overlapping
        self._m, self._c = torch.zeros_like(self._x), torch.zeros_like(self._x)

    def direct(self, g: Tensor) -> None:
        self._m.mul_(self._momentum).add_(g)
        torch.sub(self._m, self._c, out=g)

    def mixed(self) -> tuple[Tensor, ...]:
        return self._x, self._c - self._m

    def add(self, u: Tensor, edge: int | None = None, agreed: bool = True) -> None:
        self._joint.add(u, self._x, self._c if agreed else ())

    def restart(self) -> None:
        self._c.zero_()
