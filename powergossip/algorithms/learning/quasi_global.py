"""Quasi-global momentum: momentum of the displacement that gossip leaves, not of own gradients."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Kind
from powergossip.algorithms.learning import outer_stability
from powergossip.algorithms.learning.gossip_rule import ANY, GossipRule, Variable, Workers
from powergossip.topologies import Topology

_LEAST_RATE = 1e-8  # by which a displacement is divided
_RESTART = 10.0  # times the learning rate of the step before, or more


def restart(before: float, rate: float) -> float:
    """The factor of m if the learning rate was `before` in the last step, or 0 in the first one.

    Displacements by gossip do not vanish with η, so that m grows as η decays towards 0. A restart
    with a much larger η keeps η m, not m.
    """
    return before / rate if before and rate > _RESTART * before else 1.0


class _QuasiGlobal(GossipRule):
    """x_i ← G(x + u)_i, or with overlapping G(x)_i + u_i; then m from x' − x of the whole step.

    Where messages may be late, the displacement of x_i between own steps has its place.
    """

    kinds: ClassVar[frozenset[Kind]] = ANY
    overlaps: ClassVar[frozenset[Kind]] = ANY

    def __init__(self, workers: Workers, *, overlapping: bool = False):
        super().__init__(workers)
        self.overlapping = overlapping
        self._before = torch.empty_like(self._x)

    def begin(self) -> None:
        self._before.copy_(self._x)


class QuasiGlobalAdam(_QuasiGlobal):
    """QG-Adam: Adam whose moments follow the direction of the displacement after gossip::

        m̃_i = β1 m_i + (1 − β1) g_i,   ṽ_i = β2 v_i + (1 − β2) g_i²
        x ← G(x − η m̃/(1 − β1ᵗ) / (√(ṽ/(1 − β2ᵗ)) + ε))
        δ_i = (x_i before − x_i after)/‖·‖,   m_i ← β1 m_i + (1 − β1) δ_i,   v_i likewise with δ_i²

    Lin, Karimireddy, Stich & Jaggi (2021), arXiv:2102.04761, Algorithm 2. ‖·‖ is over all
    parameters of a worker. Their published code adds g with weight 1 in m̃; here the weight is the
    paper's. Weight decay is decoupled, as in AdamW.

    Args:
        adam_beta1: Decay rate β1 of m.
        adam_beta2: Decay rate β2 of v.
        adam_epsilon: Number ε added to the root.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    state: ClassVar[dict[str, Variable]] = {
        "steps": Variable.KEPT,
        "m": Variable.KEPT,
        "v": Variable.KEPT,
        "before": Variable.IN_STEP,
    }

    def __init__(
        self,
        workers: Workers,
        *,
        overlapping: bool = False,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
    ):
        super().__init__(workers, overlapping=overlapping)
        self._norms = workers.norms
        self._betas, self._epsilon = (adam_beta1, adam_beta2), adam_epsilon
        self._m, self._v = torch.zeros_like(self._x), torch.zeros_like(self._x)
        self._steps = 0

    def direct(self, g: Tensor) -> None:
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in self._betas)
        m, v = self._moments(g)
        torch.div(m, v.div_(second).sqrt_().add_(self._epsilon), out=g).div_(first)

    def settle(self) -> None:
        moved = self._before.sub_(self._x)
        self._m, self._v = self._moments(moved.div_(self._norms(moved)))

    def _moments(self, of: Tensor) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self._betas
        return torch.lerp(of, self._m, beta1), torch.lerp(of * of, self._v, beta2)


class QuasiGlobalMomentum(_QuasiGlobal):
    """QG-DSGDm: SGD whose momentum buffer follows the displacement after gossip::

        m̃_i = β m_i + g_i                   x ← G(x − η m̃), with nesterov x ← G(x − η (g + β m̃))
        m_i ← β m_i + (1 − β) (x_i before − x_i after)/η

    Lin, Karimireddy, Stich & Jaggi (2021), arXiv:2102.04761, Algorithm 1, with μ = β. m̃ is not
    kept. The fixed point is D-PSGD's: less oscillation between workers, the same bias.

    The division needs an η that does not vanish: a step with η = 0 leaves m as it is, and one whose
    η is more than ten times the last one begins with m η'/η, with η' the last one.

    Args:
        momentum: Momentum β.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)
    variants = (QuasiGlobalAdam,)
    reads_rate = True
    state: ClassVar[dict[str, Variable]] = {
        "m": Variable.KEPT,
        "rate": Variable.KEPT,
        "before": Variable.IN_STEP,
    }

    def __init__(
        self,
        workers: Workers,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        **base_options: Any,
    ):
        super().__init__(workers, **base_options)
        self._momentum, self._nesterov = momentum, nesterov
        self._m = torch.zeros_like(self._x)
        self._tilde = torch.zeros_like(self._x)
        self._rate = 0.0  # η of the last step that was not 0

    @classmethod
    def largest_rate(cls, topology: Topology, options: Mapping[str, Any]) -> float:
        beta, overlapping = options["momentum"], options["overlapping"]
        recurrence = (
            outer_stability.overlapping_quasi_global
            if overlapping
            else outer_stability.quasi_global
        )
        weight = beta**2 if options["nesterov"] else beta
        return outer_stability.largest_rate(topology, recurrence, 0.0, beta, weight)

    def direct(self, g: Tensor) -> None:
        factor = restart(self._rate, self._local.rate)
        if factor != 1:
            self._m.mul_(factor)
        tilde = torch.add(g, self._m, alpha=self._momentum, out=self._tilde)
        if self._nesterov:
            g.add_(tilde, alpha=self._momentum)
        else:
            g.copy_(tilde)

    def settle(self) -> None:
        if self._local.rate >= _LEAST_RATE:  # gradients contribute to the displacement
            self._rate, beta = self._local.rate, self._momentum
            self._m.mul_(beta).add_(self._before.sub_(self._x), alpha=(1 - beta) / self._rate)
