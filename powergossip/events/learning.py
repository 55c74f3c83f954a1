"""Learning rules in edge form: a worker's own part of a step, apart from the exchanges.

A step of worker i, with exchanges u_ij at times of their own::

    rule.begin()        the exchanges start here, if the rule overlaps
    ... g_i at x_i      gradient
    rule.correct()      clipping and weight decay
    rule.update()       local update; before the exchanges start, unless the rule overlaps
    rule.settle()       the end of the step

    rule.add(j, u)      an exchange with j is applied, anywhere between begin and settle
    rule.restart()      the worker knows of a death or a join, at any time

`rule.variables()` [D'] are the variables of the exchanges. Without delays, a step is that of the
rule of the same name in `powergossip.algorithms.learning`, up to rounding. The rules are methods,
not one generator as there, since a worker is saved between any two messages of a step, and the
position of a generator cannot be saved.

To add a rule, write its class and its row in `RULES`.

Axes: D parameters of a worker.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from powergossip.algorithms.learning import Local
from powergossip.algorithms.learning.gossip_rule import Joint
from powergossip.algorithms.learning.outer import rate_of_correction
from powergossip.algorithms.learning.quasi_global import has_moved, restart
from powergossip.parameters import Layout
from powergossip.topologies import Topology


class Learner(NamedTuple):
    """A worker's row of the flat buffers, and its own optimizer.

    Attributes:
        x, grad: Parameters and gradient [1, D].
        correct: Correction of the gradient, in place.
        overlapping: Whether exchanges start before the gradient, if the rule overlaps.
    """

    x: Tensor
    grad: Tensor
    layout: Layout
    local: Local
    correct: Callable[[], None]
    overlapping: bool = True


class EdgeRule:
    """A learning rule without learning: x [1, D] changes by exchanges only. The base of the others.

    Attributes:
        overlaps: Whether exchanges may start before the gradient.
    """

    overlaps: ClassVar[bool] = True

    def __init__(self, x: Tensor, layout: Layout, overlapping: bool = True):
        self._x, self.layout = x, layout
        self.overlapping = overlapping and self.overlaps

    @property
    def exchanging(self) -> bool:
        """Whether exchanges start in the present step, after its local update."""
        return True

    def variables(self) -> Tensor:
        """The variables that the worker's parts are computed from: [D']."""
        return self._x[0]

    def begin(self) -> None:
        """Begin a step."""

    def correct(self) -> None:
        """Correct the gradient."""

    def update(self) -> None:
        """The local update of x."""

    def add(self, j: int, u: Tensor, agreed: bool = True) -> None:
        """Apply an exchange u_ij [D'].

        Args:
            agreed: Whether both messages have the present view of the worker.
        """
        self._x[0].add_(u)

    def settle(self) -> None:
        """End a step."""

    def forget(self, j: int) -> None:
        """Forget the state of the edge with j, whose state at the other end is lost."""

    def restart(self) -> None:
        """Restart sums over all workers: the worker's view of them has changed."""

    def state_dict(self) -> dict[str, Any]:
        """The state that the next step depends on, besides x."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""


class _Learning(EdgeRule):
    """A rule with a local optimizer."""

    def __init__(self, learner: Learner):
        super().__init__(learner.x, learner.layout, learner.overlapping)
        self._g, self._local, self._correct = learner.grad, learner.local, learner.correct

    def correct(self) -> None:
        self._correct()


class DPSGD(_Learning):
    """x_i ← x_i + Σ_j u_ij, and the local optimizer's step. See algorithms.learning.DPSGD."""

    def update(self) -> None:
        self._local.step(self._g)


class QuasiGlobal(_Learning):
    """QG-DSGDm: the displacement of x_i between own steps has the place of that between steps::

        m̃_i = β m_i + g_i                   x_i ← x_i − η m̃_i, with nesterov − η (g_i + β m̃_i)
        m_i ← β m_i + (1 − β) (x_i before − x_i after)/η

    See algorithms.learning.QuasiGlobalMomentum.

    Args:
        momentum: Momentum β.
    """

    def __init__(self, learner: Learner, *, momentum: float = 0.9, nesterov: bool = False):
        super().__init__(learner)
        self._momentum, self._nesterov = momentum, nesterov
        self._m, self._before = torch.zeros_like(self._x), self._x.clone()
        self._rate = 0.0  # η of the last step that was not 0

    def begin(self) -> None:
        self._before.copy_(self._x)

    def update(self) -> None:
        self._m.mul_(restart(self._rate, self._local.rate))
        m = torch.add(self._g, self._m, alpha=self._momentum)
        if self._nesterov:
            self._g.add_(m, alpha=self._momentum)
        else:
            self._g.copy_(m)
        self._x.add_(self._local.displacement(self._g))

    def settle(self) -> None:
        if not has_moved(self._local.rate):
            return
        self._rate = self._local.rate
        self._m.mul_(self._momentum)
        self._m.add_(self._before - self._x, alpha=(1 - self._momentum) / self._rate)

    def state_dict(self) -> dict[str, Any]:
        """m and x_i before [1, D], and the last learning rate."""
        return {"m": self._m, "before": self._before, "rate": self._rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._m.copy_(state["m"])
        self._before.copy_(state["before"])
        self._rate = state["rate"]


class ExactDiffusion(_Learning):
    """NIDS with duals per edge::

        x_i ← x_i + u_i + Σ_j d_ij           u_i the local optimizer's displacement
        δ_ij = u_ij/(1 + θ), exchanged:      x_i ← x_i + δ_ij,   d_ij ← d_ij + θ δ_ij

    See algorithms.learning.ExactDiffusion. The duals are an integral controller of the
    differences between neighbors. With exchanges that are τ steps late, it oscillates unless
    θ < 1/τ, or the loss is curved enough to damp it: NIDS itself diverges for small learning rates,
    whatever the diffusion rate. The fixed point does not depend on θ.

    d_ij = −d_ji once both ends have applied the same exchanges. A worker whose neighbor j is lost
    forgets d_ij. Σ_i d_i = 0 thus holds among those that are left, and they find the optimum of
    their mean loss.

    Args:
        dual_rate: Rate θ of the duals.
    """

    overlaps: ClassVar[bool] = False

    def __init__(self, learner: Learner, *, dual_rate: float = 1.0):
        super().__init__(learner)
        self.dual_rate = dual_rate
        self.duals: dict[int, Tensor] = {}  # j → d_ij [D]

    def update(self) -> None:
        self._x.add_(self._local.displacement(self._g))
        for _, dual in sorted(self.duals.items()):
            self._x.add_(dual)

    def add(self, j: int, u: Tensor, agreed: bool = True) -> None:
        u.div_(1 + self.dual_rate)
        self._x[0].add_(u)
        if j in self.duals:
            self.duals[j].add_(u, alpha=self.dual_rate)
        else:
            self.duals[j] = u * self.dual_rate

    def forget(self, j: int) -> None:
        self.duals.pop(j, None)

    def state_dict(self) -> dict[str, Any]:
        """duals: d_ij [D] by j."""
        return {"duals": dict(self.duals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.duals = {j: dual.to(self._x) for j, dual in state["duals"].items()}


class GradientTracking(_Learning):
    """DSGT: x and y travel together, and the local optimizer's displacements are tracked::

        y_i ← y_i + u_i − u_i'               u_i the local optimizer's displacement, u_i' the last
        x_i ← x_i + y_i
        exchanged:                           x_i ← x_i + u^x_ij,   y_i ← y_i + u^y_ij

    See algorithms.learning.GradientTracking. Σ_i y_i and the exchanges of y that are not applied
    yet are Σ_i u_i, so that late exchanges leave the optimum as it is.

    With a worker, its y is lost. A worker that knows of a death or a join restarts with y_i ← u_i,
    and applies exchanges of y only where both messages and the worker have one view. Both ends
    skip the others: either their messages have different views, or an end that has applied them
    restarts. Once all know the same, Σ_i y_i = Σ_i u_i again, without a common step of the restart.
    """

    def __init__(self, learner: Learner):
        super().__init__(learner)
        layout = self.layout
        self._joint = Joint(layout, self._x)
        self.layout = self._joint.layout
        self._y, self._u = torch.zeros_like(self._x), torch.zeros_like(self._x)

    def variables(self) -> Tensor:
        self._joint.load(self._x, self._y)
        return self._joint.buffer[0]

    def update(self) -> None:
        u = self._local.displacement(self._g)
        self._y.add_(u).sub_(self._u)
        self._u.copy_(u)
        self._x.add_(self._y)

    def add(self, j: int, u: Tensor, agreed: bool = True) -> None:
        self._joint.add(u[None], self._x, self._y if agreed else torch.zeros_like(self._y))

    def restart(self) -> None:
        self._y.copy_(self._u)

    def state_dict(self) -> dict[str, Any]:
        """y, and the last displacement u [1, D]."""
        return {"y": self._y, "u": self._u}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._y.copy_(state["y"])
        self._u.copy_(state["u"])


class Acceleration(NamedTuple):
    """Constants of A²CiD², see `acceleration`.

    Attributes:
        eta: Rate η at which the two copies approach each other, per step.
        ratio: Factor α̃/α on u_ij, by which an exchange moves x̃.
    """

    eta: float
    ratio: float


def acceleration(topology: Topology, diffusion_rate: float = 1.0, delay: float = 0) -> Acceleration:
    """The constants of A²CiD² on a static undirected graph, whose exchanges take 1 + τ steps::

        η = 1/(2 (1 + τ) √(χ_1 χ_2)),   α̃/α = ½ √(χ_1/χ_2), at least 1
        χ_1 = 1/λ_2,   χ_2 = 1/(4 (2 − λ_max)),   of γ (I − W)

    χ_2 departs from the paper, where edges exchange one at a time, at random, with α = ½: there it
    is half of the largest effective resistance of an edge. Here all edges of a worker exchange in a
    step, with α = γ w_ij, for which the largest eigenvalue has that place. With a ratio of 1 the
    copies are equal, and the method is D-PSGD.

    Args:
        diffusion_rate: Diffusion rate γ.
        delay: Delay τ of an exchange, in steps.
    """
    chi_1 = 1 / (diffusion_rate * topology.spectral_gap)
    inverse = 4 * max(0.0, 2 - diffusion_rate * topology.largest_eigenvalue)  # 1/χ_2
    eta = math.sqrt(inverse / chi_1) / (2 * (1 + delay))
    return Acceleration(eta, max(1.0, math.sqrt(inverse * chi_1) / 2))


class A2CiD2(_Learning):
    """A²CiD²: late exchanges, accelerated by a second copy x̃_i of the model::

        (x_i, x̃_i) ← ((1 − c) x_i + c x̃_i, (1 − c) x̃_i + c x_i),   c = (1 − e^(−2 η))/2
        x_i ← x_i + u_i,    x̃_i ← x̃_i + u_i          u_i the local optimizer's displacement
        exchanged:          x_i ← x_i + u_ij,   x̃_i ← x̃_i + (α̃/α) u_ij

    Nabli, Belilovsky & Oyallon (2023), arXiv:2306.08289. The unit of time is a gradient of the
    worker, by whose duration the code of the authors divides seconds. A worker changes x_i at the
    end of its steps only, so that the copies approach each other once in a step, for one unit.

    Without local updates, the squared distance to the mean decays about as
    e^(−1/((1 + τ) √(χ_1 χ_2))) per step, and that of D-PSGD as e^(−2/((1 + τ) χ_1)).

    Σ_i (x_i + x̃_i) and the exchanges that are not applied yet are conserved. A worker that joins
    begins with x̃_i = x_i. The constants stay those of the graph at the start.

    Args:
        acceleration: η and α̃/α.
    """

    overlaps: ClassVar[bool] = False

    def __init__(self, learner: Learner, *, acceleration: Acceleration):
        super().__init__(learner)
        self.second = self._x.clone()  # x̃_i [1, D]
        self._c, self._ratio = -math.expm1(-2 * acceleration.eta) / 2, acceleration.ratio

    def begin(self) -> None:
        exchanged = (self.second - self._x).mul_(self._c)
        self._x.add_(exchanged)
        self.second.sub_(exchanged)

    def update(self) -> None:
        u = self._local.displacement(self._g)
        self._x.add_(u)
        self.second.add_(u)

    def add(self, j: int, u: Tensor, agreed: bool = True) -> None:
        self._x[0].add_(u)
        self.second[0].add_(u, alpha=self._ratio)

    def state_dict(self) -> dict[str, Any]:
        """x̃_i [1, D]."""
        return {"second": self.second}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.second.copy_(state["second"])


class DiLoCo(_Learning):
    """DiLoCo with local steps between the exchanges::

        x_i ← x_i + û_i                      H times; û_i the local optimizer's displacement
        y = φ + μ (x − φ)
        φ ← y + β (y − v'),   v' ← y,   x ← φ
        exchanged, at any time:              φ ← φ + (1 + β) u_ij,   v' ← v' + u_ij,   x as φ

    See algorithms.learning.DiLoCo, where v' = G(y) and φ = v' + β (v' − v'') with v'' before it.
    Late exchanges have the same effect as those in time.

    With the gradient correction, z_i travels beside v': c ← c + α u^z_ij. Σ_i c_i and the exchanges
    that are not applied yet are 0. A worker that knows of a death or a join restarts with c = 0,
    and applies exchanges of z only where both messages and the worker have one view, as in
    GradientTracking.

    Args:
        steps: Number of steps before the start, by which rounds are counted.
    """

    overlaps: ClassVar[bool] = False

    def __init__(
        self,
        learner: Learner,
        *,
        local_steps: int = 1,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.5,
        gradient_correction: bool = False,
        correction_rate: float | None = None,
        steps: int = 0,
    ):
        super().__init__(learner)
        self._local_steps, self._mu, self._beta = local_steps, outer_rate, outer_momentum
        self._steps, self._begun = steps, False
        self._alpha = rate_of_correction(gradient_correction, correction_rate)
        self._slow, self._previous = self._x.clone(), self._x.clone()
        self._joint: Joint | None = None
        corrected = self._x if gradient_correction else self._x[:, :0]
        self._c, self._sum, self._z = (torch.zeros_like(corrected) for _ in range(3))
        if gradient_correction:
            self._joint = Joint(self.layout, self._x)
            self.layout = self._joint.layout

    @property
    def exchanging(self) -> bool:
        return self._steps % self._local_steps == 0

    def variables(self) -> Tensor:
        if self._joint is None:
            return self._previous[0]
        self._joint.load(self._previous, self._z)
        return self._joint.buffer[0]

    def begin(self) -> None:
        if not self._begun:
            self._slow.copy_(self._x)
            self._previous.copy_(self._x)
            self._begun = True

    def correct(self) -> None:
        if self._joint is not None:
            self._sum.add_(self._g.add_(self._c))
        self._correct()

    def update(self) -> None:
        self._local.step(self._g)
        self._steps += 1
        if not self.exchanging:
            return
        y = self._slow.lerp_(self._x, self._mu)
        torch.sub(y, self._previous, out=self._x).mul_(self._beta).add_(y)
        self._previous.copy_(y)
        self._slow.copy_(self._x)
        torch.div(self._sum, self._local_steps, out=self._z)
        self._sum.zero_()

    def add(self, j: int, u: Tensor, agreed: bool = True) -> None:
        change, of_z = u[None], torch.zeros_like(self._z)
        if self._joint is not None:
            change = torch.zeros_like(self._x)
            self._joint.add(u[None], change, of_z)
        self._previous.add_(change)
        for variable in (self._x, self._slow):
            variable.add_(change, alpha=1 + self._beta)
        if agreed:
            self._c.add_(of_z, alpha=self._alpha)
            self._z.add_(of_z)

    def restart(self) -> None:
        self._c.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the variables [1, D]."""
        return {name: getattr(self, f"_{name}") for name in self._NAMES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._begun = state["steps"], state["begun"]
        for name in self._NAMES[2:]:
            getattr(self, f"_{name}").copy_(state[name])

    _NAMES = ("steps", "begun", "slow", "previous", "c", "sum", "z")


# Names of `learning` in train.py with an edge form.
RULES: dict[str, type[_Learning]] = {
    "dpsgd": DPSGD,
    "quasi-global-momentum": QuasiGlobal,
    "exact-diffusion": ExactDiffusion,
    "gradient-tracking": GradientTracking,
    "diloco": DiLoCo,
}
# Names of `gossip` in train.py with a learning rule of their own, in place of D-PSGD.
OF_POLICIES: dict[str, type[A2CiD2]] = {"a2cid2": A2CiD2}
