"""Deep Gradient Compression in your own training loop, one worker per process::

    from powergossip.optimizers.dgc import DGC, DGCSGD, DGCConfig, optimizer_step

    config = DGCConfig(compress_ratio=0.001, warmup_epochs=4, momentum=0.9)
    dgc = DGC(model.named_parameters(), config)
    optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(num_epochs):
        dgc.at_epoch(epoch)
        for batch in batches:
            loss(model, batch).backward()
            optimizer_step(optimizer, dgc)  # in place of optimizer.step() and zero_grad()

DGCSGD takes the place of torch.optim.SGD with the same lr, momentum, weight_decay and nesterov. DGC
applies the momentum to the gradients, since it corrects it for elements that are not sent yet, and
DGCSGD to the weight decay. Both need the same momentum.

An optimizer with its own momentum is rejected. torch.optim.SGD without momentum is accepted. Its
weight decay has no momentum either, so that it is 1 − momentum times as strong as DGCSGD's. The
algorithm is algorithms.dgc.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from powergossip import checks
from powergossip.algorithms.dgc import DGCAggregation, DGCConfig
from powergossip.network import Network
from powergossip.optimizers.checks import Params
from powergossip.optimizers.gradients import CompressedMean, Gradients, optimizer_step
from powergossip.optimizers.precision import HALF, MESSAGE_DTYPES

__all__ = ["DGC", "DGCSGD", "DGCConfig", "check_momentum", "optimizer_step"]


class DGC(CompressedMean):
    """The mean of the sparsified gradients of these parameters over all processes.

    Gradients are float32, bfloat16 or float16. They are accumulated in float32.

    Args:
        params, network, process_group: As for `PowerSGD`.
        message_dtype: "float32", or "parameter", which sends values of parameters in half precision
            in their dtype. Rounding errors are sent later.

    Attributes:
        flat: The parameters, the mean of this step's batches and the mean of the workers.

    Raises:
        ValueError: In all processes, for parameters that are not dense tensors of these dtypes.
    """

    def __init__(
        self,
        params: Params,
        config: DGCConfig | None = None,
        network: Network | None = None,
        *,
        process_group: Any = None,
        message_dtype: str = "float32",
    ):
        checks.one_of("message_dtype", message_dtype, MESSAGE_DTYPES)
        self.config = config or DGCConfig()
        dtypes = (torch.float32, *HALF)
        super().__init__(Gradients(params, network, process_group=process_group, dtypes=dtypes))
        self._aggregation = DGCAggregation(
            self.network, self.flat.layout, self.config, self.flat.message_dtype(message_dtype)
        )
        self._calls = 0  # since the last step

    def at_epoch(self, epoch: float) -> None:
        """Set the fraction that is sent, which follows the warm-up. Call it at every epoch."""
        self._aggregation.at_epoch(epoch)

    def collect(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and their gradients.

        Raises ValueError for an optimizer with its own momentum (such as Adam), or, if it is
        DGCSGD, with another momentum than in the configuration.
        """
        check_momentum(optimizer, self.config.momentum, self.config.nesterov)
        return super().collect(optimizer)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor] | None:
        """Accumulate gradients, given in the order of the parameters, without changing them.

        Every num_batches_per_step-th call returns the mean over all workers, which the next call
        overwrites. The other calls return None.
        """
        weight = 1 / self.config.num_batches_per_step
        torch._foreach_add_(self.flat.gradients, list(gradients), alpha=weight)
        self._calls += 1
        if self._calls < self.config.num_batches_per_step:
            return None
        self._calls = 0
        self.network.run(self._aggregation.step(self.flat.gradient, self.flat.mean))
        return self.flat.means

    def state_dict(self) -> dict[str, Any]:
        """The aggregation's state, and the gradients accumulated since the last step."""
        gradient = self.flat.gradient.clone()
        return super().state_dict() | {"gradient": gradient, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        super().load_state_dict(state)
        self.flat.gradient.copy_(state["gradient"])
        self._calls = state["calls"]


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
