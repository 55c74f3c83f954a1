"""Outer optimizers: rounds of local steps, and one step on the displacement of a round.

A round has H = local_steps steps. φ_i is the slow model of worker i, x_i the fast one, which takes
the local steps from φ_i and returns to it at the end of the round, and G any averaging rule::

    x_i ← x_i + u_i(g_i)                    H times, u_i the local optimizer's displacement
    φ ← the outer step, with G              messages once a round
    x ← φ

Gradient correction. Where data differ, the local steps lead each worker towards its own optimum, so
that the fixed point is biased, by all-reduce too. A correction of the displacement, as in K-GT,
removes the bias of SGD only. A correction c of the gradient stands before clipping and the local
optimizer, and serves optimizers that are not linear in the gradient, such as Adam and Muon::

    g̃_i = g_i(x_i) + c_i                    in place of g_i, clipped afterwards
    z_i = mean of g̃_i over the round
    c ← c + G(z) − z                        in one message with the model

Where this is at rest, all z_i agree, and with Σ_i c_i = 0 they are the mean gradient.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Kind, begin_at, kind_of
from powergossip.algorithms.learning import outer_stability
from powergossip.algorithms.learning.gossip_rule import ANY, MEAN_PRESERVING, GossipRule, Joint
from powergossip.algorithms.learning.interface import Gradient, Mix, RuleStep, Update
from powergossip.algorithms.plain import ExactMean
from powergossip.topologies import Topology


class OuterRule(GossipRule):
    """Rounds of local steps with a gradient correction. A subclass has the outer step.

    x is the slow model at the end of a round. In between, it is the fast one.

    Invariant: Σ_i c_i = 0.

    Args:
        local_steps: Number H of local steps in a round.
        outer_rate: Outer learning rate μ.
        outer_momentum: Outer momentum β.
        gradient_correction: Whether gradients are corrected, for workers with different data.

    Raises:
        BadValue: Unless H ≥ 1, μ > 0 and 0 ≤ β < 1.
        ValueError: For a correction with averaging that does not keep the mean.
    """

    kinds: ClassVar[frozenset[Kind]] = ANY
    in_place = clips = keeps_slow = True
    variables: ClassVar[tuple[str, ...]] = ("steps", "slow", "previous", "c", "sum")
    messages: ClassVar[int] = 1  # of D elements a round, without that of the correction

    def __init__(
        self,
        *everything: Any,
        local_steps: int = 1,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.5,
        gradient_correction: bool = False,
        **options: Any,
    ):
        super().__init__(*everything, **options)
        checks.at_least_one("local_steps", local_steps)
        checks.positive("outer_rate", outer_rate)
        checks.below_one("outer_momentum", outer_momentum)
        self._local_steps, self._steps = local_steps, 0
        self._mu, self._beta, self._corrects = outer_rate, outer_momentum, gradient_correction
        count = self.messages + gradient_correction
        self._joint = Joint(self._layout, self._x, count) if count > 1 else None
        self._averaging = self._make(self._joint.layout if self._joint else self._layout)
        if gradient_correction:
            self._check_correction()
        self._slow, self._previous = torch.zeros_like(self._x), torch.zeros_like(self._x)
        corrected = self._x if gradient_correction else self._x[:, :0]
        self._c, self._sum = torch.zeros_like(corrected), torch.zeros_like(corrected)

    def _check_correction(self) -> None:
        averaging, topology = self._averaging, self._network.topology
        if kind_of(averaging) not in MEAN_PRESERVING and not isinstance(averaging, ExactMean):
            raise ValueError(
                f"gradient_correction=True with {type(averaging).__name__}: use all-reduce, dpsgd, "
                "power-gossip or choco; errors of the messages would stay in the corrections"
            )
        if topology.row_stochastic and not isinstance(averaging, ExactMean):
            raise ValueError(
                f"gradient_correction=True with topology={topology.name}: use a topology that "
                "conserves the mean, such as ring; the sum of the corrections drifts otherwise"
            )

    def begin_after(self, steps: int) -> None:
        if steps % self._local_steps:
            raise ValueError(
                f"add_param_group() after {steps} steps: call it after a multiple of "
                f"local_steps={self._local_steps}, when messages have been sent"
            )

    def begin_at(self, point: Tensor) -> None:
        if self._joint is not None:
            zeros = [torch.zeros_like(self._x)] * (self._joint.count - 1)
            self._joint.load(point.expand_as(self._x), *zeros)
            point = self._joint.buffer[0]
        begin_at(self._averaging, point)

    def step(self) -> RuleStep:
        if self._steps % self._local_steps == 0:
            self._slow.copy_(self._x)
            if self._steps == 0:
                self._previous.copy_(self._x)
        g = yield Gradient()
        if g is not None:
            if self._corrects:
                self._sum.add_(g.add_(self._c))
            self._correct()
        yield Update(g)
        self._steps += 1
        if self._steps % self._local_steps == 0:
            yield from self._outer_step()

    def _outer_step(self) -> RuleStep:
        """x ← the slow model after this round, from the fast one x and the slow one before."""
        raise NotImplementedError

    def _mix(self, *variables: Tensor) -> RuleStep:
        """The variables ← G of each of them, and c ← c + G(z) − z."""
        if self._joint is None:
            yield Mix(self._averaging.step(*variables))
            return
        z = [self._sum.div_(self._local_steps)] if self._corrects else []
        if z:
            self._c.sub_(self._sum)
        self._joint.load(*variables, *z)
        yield Mix(self._averaging.step(self._joint.buffer))
        self._joint.store(*variables, *z)
        if z:
            self._c.add_(self._sum)
            self._sum.zero_()


class DiLoCo(OuterRule):
    """DiLoCo on a graph, with the outer momentum behind the mixing::

        y = φ + μ (x − φ)
        v = G(y)
        φ ← v + β (v − v'),   v' ← v         v' = φ at the start

    Over all-reduce it is DiLoCo with Nesterov's momentum: Douillard et al. (2023),
    arXiv:2311.08105, Algorithm 1. On a graph the momentum is mixed with the models, so that it does
    not enlarge their bias. One worker: Lookahead with β = 0 (Zhang et al. 2019, arXiv:1907.08610).
    μ = 1, β = 0: D-PSGD with local steps.

    With a graph of eigenvalues λ and a share q of the way to its own optimum that a worker goes in
    a round, it is stable if λ (1 − μ q) > −1/(1 + 2 β) for all λ, where 1 is an eigenvalue.

    Cost of a round: a message of the averaging rule, or two in one with the correction.
    """

    limits_rate = True

    @classmethod
    def largest_rate(cls, topology: Topology, options: Mapping[str, Any]) -> float:
        return outer_stability.largest_rate(topology, options["outer_momentum"])

    def _outer_step(self) -> RuleStep:
        v = self._slow.lerp_(self._x, self._mu)
        yield from self._mix(v)
        torch.sub(v, self._previous, out=self._x).mul_(self._beta).add_(v)
        self._previous.copy_(v)


class GASLoC(OuterRule):
    """GASLoC: the outer momentum is that of a worker, and is not mixed::

        y = φ + μ (x − φ)
        φ ← G(y) + β (y − y'),   y' ← y      y' = φ at the start

    arXiv:2606.11081. Stable on all graphs on which G is, but not with strong compression.

    Cost of a round: that of DiLoCo.
    """

    def _outer_step(self) -> RuleStep:
        y = self._slow.lerp_(self._x, self._mu)
        torch.sub(y, self._previous, out=self._x).mul_(self._beta)
        self._previous.copy_(y)
        yield from self._mix(y)
        self._x.add_(y)


class NoLoCo(OuterRule):
    """NoLoCo: heavy-ball momentum, and a pull to the mixed models::

        Δ = x − φ
        δ ← β δ + μ G(Δ) + γ (G(φ) − φ)      δ = 0 at the start
        φ ← φ + δ

    Kolehmainen et al. (2025), arXiv:2506.10911, with random pairs for G (topology=random-matching).
    The sign of Δ is that of the published code; that of the paper ascends. Momentum slows down
    agreement to √β a round at best.

    Cost of a round: two messages of the averaging rule in one, or three with the correction.

    Args:
        consensus_rate: Rate γ of the pull. By default μ, as in the published code.

    Raises:
        BadValue: Unless γ > 0.
    """

    messages = 2

    def __init__(
        self,
        *everything: Any,
        outer_momentum: float = 0.3,
        consensus_rate: float | None = None,
        **options: Any,
    ):
        super().__init__(*everything, outer_momentum=outer_momentum, **options)
        self._gamma = self._mu if consensus_rate is None else consensus_rate
        checks.positive("consensus_rate", self._gamma)

    def _outer_step(self) -> RuleStep:
        slow, delta, momentum = self._slow, self._x.sub_(self._slow), self._previous
        if self._steps == self._local_steps:
            momentum.zero_()
        mixed = slow.clone()
        yield from self._mix(mixed, delta)
        momentum.mul_(self._beta).add_(delta, alpha=self._mu).add_(
            mixed.sub_(slow), alpha=self._gamma
        )
        torch.add(slow, momentum, out=self._x)
