"""SGD for methods that have applied the momentum to the gradients already."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from powergossip import checks


class DGCSGD(torch.optim.Optimizer):
    """SGD whose momentum m applies to the weight decay λ x alone. With the workers' mean g::

        d ← m d + (1 − dampening) λ x         d ← λ x in the first step
        x ← x − η (g + d)
        x ← x − η (g + λ x + m d)             with Nesterov's momentum, instead

    The optimizer for DGC, which has applied the momentum to g already. As SGD's momentum is linear,
    both together are SGD(momentum=m, weight_decay=λ), but for the compression.

    Raises:
        ValueError: For a value out of range.

    References:
        DGCSGD of github.com/synxlin/deep-gradient-compression.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            checks.not_negative(name, value)
        possible = not nesterov or (momentum > 0 and dampening == 0)
        checks.check("nesterov", nesterov, possible, "False, or momentum above 0 and dampening=0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Returns the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._update(x, x.grad, group)
        return loss

    def _update(self, x: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        m, weight_decay = group["momentum"], group["weight_decay"]
        if weight_decay:
            decay = weight_decay * x
            g = g + self._with_momentum(x, decay, group) if m else g + decay
        x.sub_(g, alpha=group["lr"])

    def _with_momentum(self, x: Tensor, decay: Tensor, group: Mapping[str, Any]) -> Tensor:
        state = self.state[x]
        if "momentum_buffer" in state:
            d = state["momentum_buffer"].mul_(group["momentum"])
            d.add_(decay, alpha=1 - group["dampening"])
        else:
            d = state["momentum_buffer"] = decay.clone()
        return decay.add_(d, alpha=group["momentum"]) if group["nesterov"] else d


def check_momentum(optimizer: torch.optim.Optimizer, momentum: float, nesterov: bool) -> None:
    """Raise ValueError unless the method's momentum is the only momentum of the gradients.

    Args:
        momentum, nesterov: Momentum of the method, which `DGCSGD` has for the weight decay.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, DGCSGD):
            theirs = group["momentum"], group["nesterov"]
            if theirs != (momentum, nesterov):
                raise ValueError(
                    f"DGCSGD has momentum={theirs[0]}, nesterov={theirs[1]}; use "
                    f"momentum={momentum}, nesterov={nesterov}, as the method has for the decay"
                )
        elif own := float(group.get("momentum") or group.get("betas", [0])[0]):
            raise ValueError(
                f"{type(optimizer).__name__} has momentum of its own ({own:g}), but the momentum "
                "is part of the method; use DGCSGD with the same momentum, or torch.optim.SGD with "
                "momentum=0"
            )
