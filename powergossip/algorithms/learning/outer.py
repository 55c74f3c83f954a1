"""Outer optimizers: rounds of local steps, and one step on the displacement of a round.

A round has H = local_steps steps. Worker i has a slow model φ_i and a fast model x_i. The fast
model takes the local steps from φ_i, and returns to the new φ_i at the end of the round. G is any
averaging rule::

    x_i ← x_i + u_i(g_i)                    H times, u_i the local optimizer's displacement
    φ ← the outer step, with G              messages once a round
    x ← φ

Gradient correction. If the workers' data differ, the local steps lead each worker towards its own
optimum. The fixed point is then biased, with all-reduce too. A correction of the displacement, as
in K-GT, removes the bias of SGD only. Here c corrects the gradient before clipping and the local
optimizer. This also serves optimizers that are not linear in the gradient, such as Adam and Muon::

    g̃_i = g_i(x_i) + c_i                    in place of g_i, clipped afterwards
    z_i = mean of g̃_i over the round
    c ← c + α (G(z) − z)                    in one message with the model

At a fixed point, all z_i agree. Since Σ_i c_i = 0, they equal the mean gradient. With all-reduce, c
averages the differences between the mean gradient and the worker's gradient. The difference of t
rounds ago has weight α (1 − α)^t. With α = 1, c is the last difference, with all its noise, which
then enters all H steps of a round. A small α averages the noise over 2/α − 1 rounds, and adapts in
1/α rounds.

Fragments. The tensors are divided into P = fragments parts of nearly equal size. Part p ends its
rounds p H/P steps later than part 0. Messages thus have 1/P of the size, P times as often. This is
Streaming DiLoCo, Douillard et al. (2025), arXiv:2501.18512, without its delay.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Averaging, Kind, kind_of
from powergossip.algorithms.learning import outer_stability
from powergossip.algorithms.learning.fragments import Fragment, Fragments, divided
from powergossip.algorithms.learning.gossip_rule import (
    ANY,
    MEAN_PRESERVING,
    GossipRule,
    Variable,
    Workers,
)
from powergossip.algorithms.plain import ExactMean
from powergossip.algorithms.quantized_mean import QuantizedMean
from powergossip.network import Conversation, Network, together
from powergossip.network.conversation import mapped
from powergossip.topologies import Topology


class Variables(NamedTuple):
    """The variables of a fragment, [worker, element] each. They are changed in place.

    Attributes:
        x: Fast models.
        slow: φ, slow models at the start of the round.
        previous: Memory of the outer momentum.
        c: Corrections. Without elements if gradients are not corrected.
        sum: Sum of the corrected gradients of the round. Without elements like c.
    """

    x: Tensor
    slow: Tensor
    previous: Tensor
    c: Tensor
    sum: Tensor


class OuterRule(GossipRule):
    """Rounds of local steps with an optional gradient correction. A subclass has the outer step.

    x holds the fast model during a round, and the slow model at its end.

    A late message has the same effect on the next slow model as one in time. A worker that learns
    of a death or a join restarts with c = 0. It applies an exchange of z only if both messages and
    the worker have the same view, as in GradientTracking.

    Invariant: Σ_i c_i = 0.

    Args:
        local_steps: Number H of local steps in a round.
        outer_rate: Outer learning rate μ.
        outer_momentum: Outer momentum β.
        gradient_correction: If True, gradients are corrected, for workers with different data.
        correction_rate: Rate α of the correction. By default 0.1.
        fragments: Number P of parts of the model whose rounds end at different steps.

    Raises:
        BadValue: Unless H ≥ 1, μ > 0, 0 ≤ β < 1, 0 < α ≤ 1, and P divides H and is at most the
            number of tensors.
        ValueError: For a correction with averaging that does not keep the mean, and for fragments
            and a period of the topology with a common divisor.
    """

    kinds: ClassVar[frozenset[Kind]] = ANY
    in_place = True
    state: ClassVar[dict[str, Variable]] = {
        "steps": Variable.KEPT,
        "slow": Variable.CONSERVED,
        "previous": Variable.CONSERVED,
        "c": Variable.RESET,
        "sum": Variable.RESET,
        "begun": Variable.IN_STEP,
        "averaged": Variable.IN_STEP,
    }
    messages: ClassVar[int] = 1  # of D elements a round, without the correction's
    common: ClassVar[bool] = True  # whether all φ are the same over all-reduce

    def __init__(
        self,
        workers: Workers,
        *,
        local_steps: int = 1,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.5,
        gradient_correction: bool = False,
        correction_rate: float | None = None,
        fragments: int = 1,
    ):
        super().__init__(workers, variables=0)
        checks.at_least_one("local_steps", local_steps)
        _check_rates(outer_rate, outer_momentum)
        self._alpha = 0.1 if correction_rate is None else correction_rate
        accepted = "above 0 and at most 1, with gradient_correction=true"
        ok = correction_rate is None or gradient_correction
        ok = ok and checks.is_finite(self._alpha) and 0 < self._alpha <= 1
        checks.check("correction_rate", correction_rate, ok, accepted)
        _check_fragments(self._network, fragments, local_steps)
        self._local_steps, self._steps, self._interval = local_steps, 0, local_steps // fragments
        self._mu, self._beta, self._corrects = outer_rate, outer_momentum, gradient_correction
        count = self.messages + gradient_correction
        self._fragments = [
            Fragment(self._layout, tensors, self._x, self._make, count)
            for tensors in divided(self._layout, fragments)
        ]
        self._averaging = Fragments(self._fragments)
        if count > 1:
            self.layout = self._fragments[0].joint.layout
        if gradient_correction:
            _check_correction(self._network, self._fragments[0].averaging)
        self._slow, self._previous = torch.zeros_like(self._x), torch.zeros_like(self._x)
        corrected = self._x if gradient_correction else self._x[:, :0]
        self._c, self._sum = torch.zeros_like(corrected), torch.zeros_like(corrected)
        self._begun = False
        # The variables that the messages of this step average, and the fragment's variables.
        self._averaged: list[Tensor] = []
        self._own = self._flat()

    @classmethod
    def largest_rate(cls, topology: Topology, options: Mapping[str, Any]) -> float:
        mu, beta = options["outer_rate"], options["outer_momentum"]
        _check_rates(mu, beta)
        recurrence, *more = cls._recurrence(options)
        return outer_stability.largest_rate(topology, recurrence, mu, beta, *more)

    @classmethod
    def _recurrence(cls, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The recurrence of the disagreement, and its options beside μ and β. See
        outer_stability."""
        raise NotImplementedError

    def begin_after(self, steps: int) -> None:
        self._steps = steps

    @property
    def exchanging(self) -> bool:
        return self._steps % self._interval == 0

    def begin(self) -> None:
        if not self._begun:
            self._slow.copy_(self._x)
            self._previous.copy_(self._first_memory())
            self._refer(self._fragments)
            self._begun = True

    def correct(self, g: Tensor) -> None:
        if self._corrects:
            self._sum.add_(g.add_(self._c))

    def update(self, u: Tensor | None) -> None:
        self._steps += 1
        if self.exchanging:
            own = self._own = Variables(*self._due().take(*self._flat()))
            if not self.overlapping:
                self._averaged = [*self._outgoing(own), *self._correcting(own)]

    def variables(self) -> Tensor:
        settled = [self._x] * self.messages + [self._c] * self._corrects
        return self._fragments[0].joint.load(*(self._averaged or settled))

    def mixing(self) -> Conversation:
        yield from self._due().mix(*self._averaged)

    def add(self, u: Tensor, edge: int | None = None, agreed: bool = True) -> None:
        """Apply an exchange of the whole model. Its effect is the same after its round."""
        changes = self._fragments[0].joint.split(u)
        of_z = [changes.pop()] if self._corrects else []
        if self._averaged:
            changes += of_z if agreed else []
            for variable, change in zip(self._averaged, changes, strict=False):
                variable.add_(change)
            return
        self._add_late(*changes)
        for change in of_z if agreed else []:
            self._c.add_(change, alpha=self._alpha)

    def settle(self) -> None:
        if self.exchanging:
            own = self._own
            self._outer_step(own, *self._averaged[: self.messages])
            self._corrected(own, *self._averaged[self.messages :])
            own.slow.copy_(own.x)
            self._due().put(own, *self._flat())
            self._averaged = []
            self._refer([self._due()])

    def restart(self) -> None:
        self._c.zero_()
        for z in self._averaged[self.messages :]:
            self._c.sub_(z, alpha=self._alpha)  # since it is added when the round ends

    def load_variables(self, state: Mapping[str, Any]) -> None:
        super().load_variables(state)
        self._begun = state.get("begun", self._steps > 0)
        self._own = self._flat()

    def _due(self) -> Fragment:
        """The fragment with the end of a round between this step and the next."""
        return self._fragments[self._steps // self._interval % len(self._fragments)]

    def _refer(self, fragments: Sequence[Fragment]) -> None:
        """Make φ, which all workers have, the reference of messages of few bits."""
        for fragment in fragments:
            if self.common and isinstance(fragment.averaging, QuantizedMean):
                fragment.begin_at(self._slow[0])

    def _flat(self) -> Variables:
        """The variables of all fragments."""
        return Variables(self._x, self._slow, self._previous, self._c, self._sum)

    def _first_memory(self) -> Tensor:
        """The memory of the outer momentum at the start."""
        return self._x

    def _outgoing(self, own: Variables) -> list[Tensor]:
        """The variables that messages average, from the fast model and the old slow model."""
        raise NotImplementedError

    def _outer_step(self, own: Variables, *averaged: Tensor) -> None:
        """x ← the new slow model, from the averaged variables."""
        raise NotImplementedError

    def _add_late(self, *changes: Tensor) -> None:
        """Apply late changes of averaged variables, after the round has ended."""
        raise NotImplementedError

    def _correcting(self, own: Variables) -> list[Tensor]:
        """[z] to be averaged, and c ← c − α z. Without a correction: no variables."""
        if not self._corrects:
            return []
        z = own.sum.div_(max(1, min(self._steps, self._local_steps)))
        own.c.sub_(z, alpha=self._alpha)
        return [z]

    def _corrected(self, own: Variables, *averaged: Tensor) -> None:
        """c ← c + α G(z)"""
        for z in averaged:
            own.c.add_(z, alpha=self._alpha)
            own.sum.zero_()


def _check_rates(outer_rate: float, outer_momentum: float) -> None:
    checks.positive("outer_rate", outer_rate)
    checks.below_one("outer_momentum", outer_momentum)


def _check_fragments(network: Network, fragments: int, local_steps: int) -> None:
    ok = type(fragments) is int and fragments > 0 and local_steps % fragments == 0
    checks.check("fragments", fragments, ok, f"a divisor of local_steps={local_steps}")
    topology, period = network.topology, len(network.rounds)
    if gcd(fragments, period) > 1:
        raise ValueError(
            f"fragments={fragments} with topology={topology.name}: use a number without a common "
            f"divisor with its period of {period} rounds, or each fragment would have some of them "
            "only"
        )


def _check_correction(network: Network, averaging: Averaging) -> None:
    topology = network.topology
    if kind_of(averaging) not in MEAN_PRESERVING and not isinstance(averaging, ExactMean):
        raise checks.BadValue(
            "gradient_correction",
            "true",
            "false, or optimizer=all-reduce, dpsgd, power-gossip or choco; errors of the messages "
            "of other averaging rules would stay in the corrections",
        )
    if topology.row_stochastic and not isinstance(averaging, ExactMean):
        raise checks.BadValue(
            "gradient_correction",
            "true",
            f"false with topology={topology.name}, or a topology that conserves the mean, such as "
            "ring; the sum of the corrections drifts otherwise",
        )


class DiLoCo(OuterRule):
    """DiLoCo on a graph, with the outer momentum after the mixing::

        y = φ + μ (x − φ)
        v = G(y)                             overlapping: v = G(φ) + μ (x − φ)
        φ ← v + β (v − v'),   v' ← v         v' = φ at the start

    Over all-reduce it is DiLoCo with Nesterov's momentum: Douillard et al. (2023),
    arXiv:2311.08105, Algorithm 1. On a graph the momentum is mixed with the models, so that it does
    not enlarge their bias. One worker: Lookahead with β = 0 (Zhang et al. 2019, arXiv:1907.08610).
    μ = 1, β = 0: D-PSGD with local steps.

    Let q be the fraction of the distance to its own optimum that a worker covers in a round. If W
    has real eigenvalues λ, the method is stable if λ (1 − μ q) > −1/(1 + 2 β) for all λ. See
    outer_stability.

    With `overlapping`, G(φ) is in flight during the whole round. With fragments, it is in flight
    until the next fragment's round begins. Messages of several iterations are spread over these
    steps. With the correction, G(φ) and G(z) are in flight during the first gradient of the round,
    since the local steps need c.

    Cost of a round: a message of the averaging rule, or two in one with the correction.

    Args:
        overlapping: True if messages are in flight during a gradient.
    """

    state: ClassVar[dict[str, Variable]] = {**OuterRule.state, "mixed": Variable.CONSERVED}

    def __init__(self, workers: Workers, *, overlapping: bool = False, **base_options: Any):
        super().__init__(workers, **base_options)
        self.overlapping = overlapping
        self._mixed = torch.zeros_like(self._x if overlapping else self._x[:, :0])
        self._taken, self._all_turns = 0, self._interval  # of the messages in flight

    @classmethod
    def _recurrence(cls, options: Mapping[str, Any]) -> tuple[Any, ...]:
        overlaps = options["overlapping"]
        return (outer_stability.overlapping_diloco if overlaps else outer_stability.diloco,)

    def before(self) -> Conversation | None:
        if not self.overlapping:
            return None
        position, meanwhile = self._steps % self._interval, None
        if position == 0:
            due = self._fragments if self._steps == 0 else [self._due()]
            meanwhile = self._counted(together(*(self._mix_slow(fragment) for fragment in due)))
            self._taken = 0
        is_last = self._corrects or position == self._interval - 1
        until_now = (position + 1) * self._all_turns // self._interval
        self.turns = None if is_last else until_now - self._taken
        return meanwhile

    def _counted(self, conversation: Conversation) -> Conversation:
        """Count the turns of a conversation. Each round has the same number."""

        def count(_: Any, answers: tuple[Any, ...]) -> tuple[Any, ...]:
            self._taken += 1
            return answers

        yield from mapped(conversation, count)
        self._all_turns = self._taken

    def _mix_slow(self, fragment: Fragment) -> Conversation:
        own = Variables(*fragment.take(*self._flat()))
        mixed, z = own.slow.clone(), self._correcting(own)
        yield from fragment.mix(mixed, *z)
        self._corrected(own, *z)
        fragment.put([own.c, own.sum], self._c, self._sum)
        if len(self._fragments) == 1:
            self._mixed.copy_(mixed)
        else:
            fragment.put([mixed], self._mixed)

    def _outgoing(self, own: Variables) -> list[Tensor]:
        return [own.slow.lerp_(own.x, self._mu)]

    def _outer_step(self, own: Variables, *averaged: Tensor) -> None:
        if self.overlapping:
            (mixed,) = self._due().take(self._mixed)
            v = own.slow.sub_(own.x).mul_(-self._mu).add_(mixed)
        else:
            (v,) = averaged
        torch.sub(v, own.previous, out=own.x).mul_(self._beta).add_(v)
        own.previous.copy_(v)

    def _add_late(self, *changes: Tensor) -> None:
        (change,) = changes
        self._previous.add_(change)
        for variable in (self._x, self._slow):
            variable.add_(change, alpha=1 + self._beta)


class GASLoC(OuterRule):
    """GASLoC: each worker keeps its own outer momentum, which is not mixed::

        y = φ + μ (x − φ)
        φ ← G(y) + β (y − y'),   y' ← y      y' = φ at the start

    arXiv:2606.11081. On undirected static graphs it is stable if λ > −1 − 2 β for all eigenvalues λ
    of W. On directed and time-varying ones, momentum limits the diffusion rate, see
    outer_stability, and so does strong compression.

    Cost of a round: the same as DiLoCo's.
    """

    state: ClassVar[dict[str, Variable]] = {**OuterRule.state, "momentum": Variable.IN_STEP}
    common = False
    _momentum = torch.zeros(0)  # β (y − y') while y is averaged

    @classmethod
    def _recurrence(cls, options: Mapping[str, Any]) -> tuple[Any, ...]:
        return (outer_stability.gasloc,)

    def _outgoing(self, own: Variables) -> list[Tensor]:
        y = own.slow.lerp_(own.x, self._mu)
        self._momentum = torch.sub(y, own.previous).mul_(self._beta)
        own.previous.copy_(y)
        return [y]

    def _outer_step(self, own: Variables, *averaged: Tensor) -> None:
        (y,) = averaged
        torch.add(self._momentum, y, out=own.x)
        self._momentum = y.new_zeros(0)

    def _add_late(self, *changes: Tensor) -> None:
        (change,) = changes
        for variable in (self._x, self._slow):
            variable.add_(change)


class NoLoCo(OuterRule):
    """NoLoCo: heavy-ball momentum, and a pull to the mixed models::

        Δ = x − φ
        δ ← β δ + μ G(Δ) + γ (G(φ) − φ)      δ = 0 at the start
        φ ← φ + δ

    Kolehmainen et al. (2025), arXiv:2506.10911, with random pairs for G (topology=random-matching).
    The sign of Δ follows the published code; the paper's ascends. Momentum slows down agreement to
    √β a round at best. With a correction at α = 1 and β = 0.9 it may diverge.

    Cost of a round: two messages of the averaging rule in one, or three with the correction.

    Args:
        consensus_rate: Rate γ of the pull. By default μ, as in the published code.

    Raises:
        BadValue: Unless γ > 0.
    """

    messages = 2

    def __init__(
        self,
        workers: Workers,
        *,
        outer_momentum: float = 0.3,
        consensus_rate: float | None = None,
        **base_options: Any,
    ):
        super().__init__(workers, outer_momentum=outer_momentum, **base_options)
        self._gamma = self._mu if consensus_rate is None else consensus_rate
        checks.positive("consensus_rate", self._gamma)

    @classmethod
    def _recurrence(cls, options: Mapping[str, Any]) -> tuple[Any, ...]:
        rate = options["consensus_rate"]
        return outer_stability.noloco, options["outer_rate"] if rate is None else rate

    def _first_memory(self) -> Tensor:
        return torch.zeros_like(self._x)

    def _outgoing(self, own: Variables) -> list[Tensor]:
        return [own.slow.clone(), own.x - own.slow]

    def _outer_step(self, own: Variables, *averaged: Tensor) -> None:
        mixed, delta = averaged
        momentum = own.previous.mul_(self._beta).add_(delta, alpha=self._mu)
        momentum.add_(mixed.sub_(own.slow), alpha=self._gamma)
        torch.add(own.slow, momentum, out=own.x)

    def _add_late(self, *changes: Tensor) -> None:
        pull, delta = changes
        change = delta.mul_(self._mu).add_(pull, alpha=self._gamma)
        for variable in (self._x, self._slow, self._previous):
            variable.add_(change)
