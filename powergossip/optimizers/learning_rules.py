"""Learning rules of algorithms.learning around a torch optimizer. See GossipOptimizer.

Axes: worker (always 1: this process' worker), D elements of a part.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip import algorithms, checks
from powergossip.algorithms import learning
from powergossip.network import Network
from powergossip.optimizers.checks import HALF, is_frozen, named
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.optimizers.sharded_parameters import memory, shaped_like
from powergossip.parameters import Layout


class LearningRule:
    """The learning rule of a method, around a torch optimizer.

    Args:
        wrapped: The wrapped optimizer. None: others update the parameters.

    Attributes:
        method: The method.
        has_momentum: True if it applies momentum itself, so that the wrapped optimizer has none.

    Raises:
        ValueError: For parameters or a wrapped optimizer that the rule cannot have.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer | None,
        method: GossipMethod,
        max_norm: float | None = None,
    ):
        self._wrapped, self.method, self.name = wrapped, method, method.learning
        found, max_norm = learning.rule(self.name, method.local_optimizer), checks.plain(max_norm)
        self._rule, self.has_momentum, self._max_norm = found, found.directs(), max_norm
        self.works_alone = found.directs() or found.corrects()
        if max_norm is not None:
            if not found.corrects():
                raise ValueError(
                    f"max_norm={max_norm!r}: use torch.nn.utils.clip_grad_norm_ with "
                    f"learning={self.name}; max_norm is for rules that correct the gradient before "
                    "it is clipped, such as diloco"
                )
            checks.positive("max_norm", max_norm)
        self._check_groups()

    # --- Checks ---

    def _check_groups(self) -> None:
        """Raise ValueError for parameters or groups of the wrapped optimizer that do not fit."""
        if self._rule.stateless:
            return
        groups, options = self._groups, self.method.learning_options
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
            own = ", and learning_options={'momentum': …}" if "momentum" in options else ""
            momentum, ascends = group["momentum"], group["maximize"]
            checks.check("momentum", momentum, momentum == 0, f"0 {where}{own}")
            checks.check("maximize", ascends, not ascends, f"False {where}")

    # --- The wrapped optimizer ---

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._wrapped is None else self._wrapped.param_groups

    @property
    def rate(self) -> float:
        """The learning rate of all parameters. Raises ValueError if there are several."""
        rates = {float(group["lr"]) for group in self._groups}
        if len(rates) > 1:
            listed = " and ".join(f"{rate:g}" for rate in sorted(rates))
            raise ValueError(
                f"lr={listed}: use one learning rate in all parameter groups with "
                f"learning={self.name}"
            )
        return rates.pop()

    def check_rate(self) -> None:
        """Raise ValueError if the rule needs one learning rate and there are several."""
        if self._rule.reads_rate:
            _ = self.rate

    def decays(self) -> dict[int, float]:
        """The weight decay that is part of the gradient, by the id of a parameter. Only those that
        are not 0. Empty for QG-Adam, whose weight decay is decoupled."""
        if not self.has_momentum or not learning.is_sgd(self.method.local_optimizer):
            return {}
        return {
            id(parameter): float(group["weight_decay"])
            for group in self._groups
            for parameter in group["params"]
            if group["weight_decay"]
        }

    # --- Construction ---

    def build(
        self, network: Network, part: int, parameters: Sequence[Tensor], layout: Layout, x: Tensor
    ) -> "tuple[learning.GossipRule, Wrapped]":
        """The rule for the parameters of a part, whose memory is x [1, D], and its local optimizer.

        Raises ValueError for an averaging algorithm or a topology that do not fit.
        """
        self.check_rate()
        method, options = self.method, self.method.learning_options
        directs = self.has_momentum or options.get("gradient_correction") or self._max_norm
        gradient = torch.zeros_like(x) if directs else None
        local = Wrapped(self, parameters, layout, x, gradient)

        def averaging(layout: Layout) -> algorithms.Averaging:
            made = method.build(network, layout, part)
            learning.check(self.name, network, method.averaging, made)
            return made

        buffers = learning.Buffers(x, x if gradient is None else gradient, layout)
        workers = learning.Workers(network, averaging, buffers, local, clip=self._max_norm)
        return learning.make(self.name, workers, method.local_optimizer, **options), local


class Wrapped:
    """The wrapped optimizer as the local optimizer of a part's learning rule.

    Args:
        gradient: Memory of the gradient of a rule that changes it, [1, D].
    """

    def __init__(
        self,
        learning_rule: LearningRule,
        parameters: Sequence[Tensor],
        layout: Layout,
        x: Tensor,
        gradient: Tensor | None,
    ):
        self._learning, self._parameters, self.x = learning_rule, parameters, x
        self.g, self._values = gradient, layout.tensors(x[0])
        self._directions = [] if gradient is None else layout.tensors(gradient[0])
        self._decays: dict[int, float] = {}
        self._own: list[Tensor | None] | None = None  # gradients, while g is in their place

    @property
    def rate(self) -> float:
        return self._learning.rate

    def step(self, gradient: Tensor) -> None:
        raise NotImplementedError

    def displacement(self, direction: Tensor) -> Tensor:
        raise NotImplementedError

    def take_gradients(self) -> None:
        """g ← ∇f + λ x, if the rule changes the gradient. A missing gradient counts as 0."""
        if self.g is None:
            return
        self._decays = self._learning.decays()
        for parameter, g, x in zip(self._parameters, self._directions, self._values, strict=True):
            if parameter.grad is None:
                g.zero_()
            else:
                g.copy_(memory(parameter.grad.detach()))
            if id(parameter) in self._decays:
                g.add_(x, alpha=self._decays[id(parameter)])

    def put_gradients(self) -> None:
        """p.grad ← g − λ x, since SGD adds λ x. Until `restore_gradients`."""
        self._own = [parameter.grad for parameter in self._parameters]
        for parameter, g, x in zip(self._parameters, self._directions, self._values, strict=True):
            if id(parameter) in self._decays:
                g.sub_(x, alpha=self._decays[id(parameter)])
            parameter.grad = shaped_like(g, parameter)

    def restore_gradients(self) -> None:
        """p.grad ← the gradients of the user."""
        if self._own is not None:
            for parameter, gradient in zip(self._parameters, self._own, strict=True):
                parameter.grad = gradient
            self._own = None
