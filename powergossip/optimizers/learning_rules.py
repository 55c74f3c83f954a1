"""Learning rules of algorithms.learning around a torch optimizer. See GossipOptimizer.

Axes: worker (always 1: that of this process), D elements of a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip import algorithms, checks
from powergossip.algorithms import learning
from powergossip.network import Conversation, Network
from powergossip.optimizers.checks import is_frozen, named
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.optimizers.precision import HALF
from powergossip.optimizers.sharded_parameters import block, shaped_like
from powergossip.parameters import Layout


class LearningRule:
    """The learning rule of a method, around a torch optimizer.

    Args:
        wrapped: The wrapped optimizer. None: others update the parameters.

    Attributes:
        options: All options of the rule.
        has_momentum: Whether it applies momentum itself, so that the wrapped optimizer has none.

    Raises:
        ValueError: For parameters or a wrapped optimizer that the rule cannot have.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer | None,
        method: GossipMethod,
        max_norm: float | None = None,
    ):
        self._wrapped, self.name = wrapped, method.learning
        self._local_optimizer = method.local_optimizer
        found, max_norm = learning.rule(self.name, self._local_optimizer), checks.plain(max_norm)
        self._rule, self.has_momentum, self._max_norm = found, found.owns_momentum, max_norm
        self.works_alone = found.owns_momentum or found.keeps_slow
        if max_norm is not None:
            if not found.clips:
                raise ValueError(
                    f"max_norm={max_norm!r}: use torch.nn.utils.clip_grad_norm_ with "
                    f"learning={self.name}; max_norm is for rules that correct the gradient before "
                    "it is clipped, such as diloco"
                )
            checks.positive("max_norm", max_norm)
        self.options = method.learning_options
        self.corrects = bool(self.options.get("gradient_correction"))
        self.check_groups()

    # --- Checks ---

    def check_groups(self) -> None:
        """Raise ValueError for parameters or groups of the wrapped optimizer that do not fit."""
        if self._rule.half_precision:
            return
        groups = self._groups
        names, parameters = named(p for group in groups for p in group["params"])
        for name, parameter in zip(names, parameters, strict=True):
            if not is_frozen(parameter) and parameter.dtype in HALF:
                raise ValueError(
                    f"{name} is {parameter.dtype}; use torch.float32 with learning={self.name}, "
                    "whose state would be rounded away in half precision"
                )
        if not self.has_momentum:
            return
        if type(self._wrapped) is not torch.optim.SGD:
            raise ValueError(
                f"optimizer={type(self._wrapped).__name__}: use torch.optim.SGD with momentum=0 "
                f"and learning={self.name}, which applies momentum itself"
            )
        for group in groups:
            where = f"in SGD with learning={self.name}"
            own = ", and learning_options={'momentum': …}" if "momentum" in self.options else ""
            momentum, ascends = group["momentum"], group["maximize"]
            checks.check("momentum", momentum, momentum == 0, f"0 {where}{own}")
            checks.check("maximize", ascends, not ascends, f"False {where}")

    # --- The wrapped optimizer ---

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._wrapped is None else self._wrapped.param_groups

    def rate(self, parameters: Sequence[Tensor]) -> float:
        """The learning rate of these parameters. Raises ValueError if there are several."""
        ids = set(map(id, parameters))
        rates = {
            float(group["lr"])
            for group in self._groups
            if any(id(p) in ids for p in group["params"])
        }
        if len(rates) > 1:
            listed = " and ".join(f"{rate:g}" for rate in sorted(rates))
            raise ValueError(
                f"lr={listed}: use one learning rate in all parameter groups with "
                f"learning={self.name}"
            )
        return rates.pop()

    def check_rate(self, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError if the rule needs one learning rate and there are several."""
        if self._rule.reads_rate:
            self.rate(parameters)

    def decays(self) -> dict[int, float]:
        """The weight decay that is part of the gradient, by the id of a parameter. Only those that
        are not 0. Empty for QG-Adam, whose weight decay is decoupled."""
        if not self.has_momentum or self._local_optimizer != "sgd":
            return {}
        return {
            id(parameter): float(group["weight_decay"])
            for group in self._groups
            for parameter in group["params"]
            if group["weight_decay"]
        }

    # --- Construction ---

    def build(
        self,
        network: Network,
        method: GossipMethod,
        part: int,
        steps: int,
        parameters: Sequence[Tensor],
        layout: Layout,
        x: Tensor,
    ) -> "PartRule":
        """The rule for the parameters of a part, whose memory is x [1, D].

        Args:
            steps: Number of steps that other parts have taken.

        Raises:
            ValueError: For an averaging algorithm or a topology that do not fit.
        """
        if part and (self._rule.needs_norm or self._max_norm is not None):
            raise ValueError(
                f"add_param_group() with learning={self.name}: construct a new GossipOptimizer for "
                "all parameters, since a norm is over all of them"
            )
        self.check_rate(parameters)
        directs = self._rule.owns_momentum or self.corrects or self._max_norm is not None
        gradient = torch.zeros_like(x) if directs else None
        local = _Local(self, parameters, x[:, :0] if self._rule.in_place else x)

        def averaging(layout: Layout) -> algorithms.Averaging:
            made = method.build(network, layout, part)
            learning.check(self.name, network, method.averaging, made)
            return made

        own: Any = local
        buffers: Any = _Buffers(x, x if gradient is None else gradient, layout)
        workers = learning.Workers(network, averaging, buffers, own, clip=self._max_norm)
        rule = learning.make(self.name, workers, self._local_optimizer, **self.options)
        rule.begin_after(steps)
        return PartRule(self, rule, local, parameters, layout, x, gradient)


@dataclass
class _Buffers:
    """`parameters` of a learning rule."""

    x: Tensor
    grad: Tensor
    layout: Layout

    def decay_spans(self) -> list[slice]:
        return []


class _Local:
    """The wrapped optimizer as the local optimizer of a part's learning rule.

    u = x after the update − x before it. Its rounding errors are those of x.

    Attributes:
        u: Displacement of this step [1, D], 0 without an update. [1, 0] where it is made in place.
    """

    def __init__(self, learning_rule: LearningRule, parameters: Sequence[Tensor], x: Tensor):
        self._learning, self._parameters, self._x = learning_rule, parameters, x
        self._before, self.u = torch.empty_like(x), torch.zeros_like(x)

    @property
    def rate(self) -> float:
        return self._learning.rate(self._parameters)

    def start(self) -> None:
        """u ← 0, for a step without an update."""
        self.u.zero_()

    def before_update(self) -> None:
        self._before.copy_(self._x)

    def after_update(self) -> None:
        """u ← x − x before the update, x ← x before it"""
        torch.sub(self._x, self._before, out=self.u)
        self._x.copy_(self._before)


class PartRule:
    """The learning rule of a part. Its methods are called in this order, once in a step::

        start                         a conversation that may overlap with the gradient
        take_gradients                g ← p.grad, before the messages of `start` are received
        direct                        p.grad ← the rule's direction
        before_update, after_update   around the step of the wrapped optimizer
        move                          a conversation after the local update
        end                           after the last message

    A step without a local update leaves out the four in the middle. Then the displacement is 0.

    Attributes:
        reads_updates: Whether the rule depends on the local update, or changes x after messages.
    """

    def __init__(
        self,
        learning_rule: LearningRule,
        rule: learning.GossipRule,
        local: _Local,
        parameters: Sequence[Tensor],
        layout: Layout,
        x: Tensor,
        gradient: Tensor | None,
    ):
        self._learning, self._rule, self._local = learning_rule, rule, local
        self.reads_updates = rule.rescales or not rule.half_precision
        self._parameters, self._values = parameters, layout.tensors(x[0])
        self._x, self._g = x, gradient  # g is None where the rule leaves the gradient as it is
        self._directions = [] if gradient is None else layout.tensors(gradient[0])
        self._decays: dict[int, float] = {}
        self._step: learning.RuleStep  # the present one
        self._request: learning.Request | None = None  # the last one of the step
        self._gradients: list[Tensor | None] | None = None  # of the user, while g is in their place

    def check(self) -> None:
        """Raise ValueError if the rule needs one learning rate and there are several."""
        self._learning.check_rate(self._parameters)

    def start(self) -> Conversation | None:
        """The messages that may be in flight while gradients are computed. u ← 0."""
        self._local.start()
        self._step, request = self._rule.begin()
        self._request = request
        return request.meanwhile

    @property
    def turns(self) -> int | None:
        """How many times messages in flight are received before the gradients are used."""
        return self._request.turns if isinstance(self._request, learning.Gradient) else None

    def take_gradients(self) -> None:
        """g ← ∇f + λ x. A missing gradient counts as 0."""
        if self._g is None:
            return
        self._decays = self._learning.decays()
        rows = zip(self._parameters, self._directions, self._values, strict=True)
        for parameter, g, x in rows:
            if parameter.grad is None:
                g.zero_()
            else:
                g.copy_(block(parameter.grad.detach()))
            if id(parameter) in self._decays:
                g.add_(x, alpha=self._decays[id(parameter)])

    def direct(self) -> None:
        """p.grad ← the direction − λ x, since SGD adds λ x. Until `after_update`."""
        if self._g is None:
            return
        self._continue(self._g)
        self._gradients = [parameter.grad for parameter in self._parameters]
        rows = zip(self._parameters, self._directions, self._values, strict=True)
        for parameter, g, x in rows:
            if id(parameter) in self._decays:
                g.sub_(x, alpha=self._decays[id(parameter)])
            parameter.grad = shaped_like(g, parameter)

    def before_update(self) -> None:
        """Keep x, for the displacement."""
        if self._g is None:
            self._continue(self._x)
        self._local.before_update()

    def after_update(self) -> None:
        """u ← x − x before the update, x ← x before it, and x moves as the rule has it.

        The gradients are the user's again.
        """
        self._local.after_update()
        if self._gradients is not None:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
            self._gradients = None
        self._request = learning.resumed(self._step, self._local.u)

    def move(self) -> Conversation | None:
        """Mix. A displacement of 0, if there was no update."""
        self._continue(None)
        if isinstance(self._request, learning.Update):
            self._request = learning.resumed(self._step, self._local.u)
        return self._request.conversation if isinstance(self._request, learning.Mix) else None

    def end(self) -> None:
        """After the last message of the step."""
        if self._request is not None:
            self._request = learning.resumed(self._step)
        if self._request is not None:
            raise self._rule.unexpected(self._request, "one Gradient, one Update and one Mix")

    def _continue(self, g: Tensor | None) -> None:
        """Answer the request for a gradient, once. A closure may compute it several times."""
        if isinstance(self._request, learning.Gradient):
            self._request = learning.resumed(self._step, g)

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule, with that of its averaging algorithm."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._rule.load_state_dict(state)
