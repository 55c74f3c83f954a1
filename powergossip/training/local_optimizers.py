"""The local optimizer: a worker's own update."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powergossip.algorithms import learning
from powergossip.parameters import Parameters
from powergossip.training import muon
from powergossip.training.config import Settings
from powergossip.training.muon import Muon, Rows, hidden_matrices


def _leave_dynamo_out() -> None:
    """Make methods of torch's optimizers bypass torch._dynamo, since nothing compiles them.

    At their first call they import torch._dynamo, which takes as long as torch, only to leave
    themselves out of compiled code.
    """
    if "torch._dynamo" not in sys.modules:
        for name in ("add_param_group", "load_state_dict", "state_dict"):
            method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if method is not None:
                method.__dict__.setdefault("__dynamo_disable", method)


def _sgd(x: Rows, parameters: Parameters, c: Settings, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        x,
        lr=c.learning_rate,
        momentum=momentum,
        nesterov=c.nesterov and momentum > 0,
        fused=True,
    )


def _adamw(x: Rows, parameters: Parameters, c: Settings, momentum: float) -> torch.optim.Optimizer:
    """Loshchilov & Hutter (2019), arXiv:1711.05101; LocalOptimizer applies the weight decay."""
    return torch.optim.AdamW(
        x,
        lr=c.learning_rate,
        betas=(c.adam_beta1, c.adam_beta2),
        eps=c.adam_epsilon,
        weight_decay=0.0,
        fused=True,
    )


def _muon(x: Rows, parameters: Parameters, c: Settings, momentum: float) -> torch.optim.Optimizer:
    hidden = set(hidden_matrices(parameters.models[0]))
    return Muon(
        x,
        parameters.layout,
        [index for index, name in enumerate(parameters.names) if name in hidden],
        partial(_adamw, parameters=parameters, c=c, momentum=momentum),
        momentum=c.muon_momentum,
        nesterov=c.nesterov,
        steps=c.muon_steps,
        dtype=muon.PRECISIONS[c.muon_precision],
        scale=muon.SCALES[c.muon_scale],
        rate=c.muon_rate,
    )


# The names that users choose from. A row of the state is a worker's state.
LOCAL_OPTIMIZERS: dict[str, Callable[[Rows, Any, Any, float], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "muon": _muon,
}


class LocalOptimizer:
    """x ← (1 − η λ) x − η u(g) for the flat buffer x of all hosted workers.

    The decay λ is for optimizers with decoupled weight decay, and spares normalization layers.
    Otherwise it is 0 here, and `coupled_decay` is the λ that a learning rule adds to the gradient.

    Args:
        momentum: Momentum of SGD, in place of the configured one: 0 where an aggregation has its
            own.
        kind: Optimizer in place of the configured one, with the same weight decay.
    """

    def __init__(
        self,
        parameters: Parameters,
        c: Settings,
        momentum: float | None = None,
        kind: str | None = None,
    ):
        decoupled = not learning.is_sgd(c.local_optimizer)
        self.coupled_decay = 0.0 if decoupled else c.weight_decay
        # Rows, not x: torch's fused optimizers ignore strides.
        self._rows = [nn.Parameter(row) for row in parameters.x.split(1)]
        momentum = c.momentum if momentum is None else momentum
        make = LOCAL_OPTIMIZERS[kind or c.local_optimizer]
        _leave_dynamo_out()
        self._optimizer = make(self._rows, parameters, c, momentum)
        # Without the wrappers for hooks and torch.compile, which import torch._dynamo, too.
        self._step = inspect.unwrap(type(self._optimizer).step)
        decay = c.weight_decay if decoupled else 0.0
        self._decay = decay
        self._spans = parameters.decay_spans() if decay else []
        self._decayed = [parameters.x[:, span] for span in self._spans]
        self._displacement: Tensor | None = None

    @property
    def rate(self) -> float:
        """The learning rate η of the next step."""
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._optimizer.param_groups[0]["lr"] = value

    def step(self, gradient: Tensor) -> None:
        """Update x in place with a gradient [worker, D]."""
        for part in self._decayed:
            part.mul_(1 - self.rate * self._decay)
        self._update(gradient)

    def displacement(self, direction: Tensor) -> Tensor:
        """u [worker, D], for learning rules: `step` would change x to x + u.

        Computed on its own, so that it has the precision of u, not of x. Overwritten by the next
        call. Use this or `step`, not both.
        """
        if self._displacement is None:
            self._displacement = torch.zeros_like(direction)
            for row, u_i in zip(self._rows, self._displacement.split(1), strict=True):
                row.data = u_i
        u = self._displacement.zero_()
        for span, part in zip(self._spans, self._decayed, strict=True):
            u[:, span].add_(part, alpha=-self.rate * self._decay)
        self._update(direction)
        return u

    def _update(self, gradient: Tensor) -> None:
        for row, g in zip(self._rows, gradient.split(1), strict=True):
            row.grad = g
        with torch.no_grad():
            self._step(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Momenta and the like [worker, D], and the number of steps."""
        states = [self._optimizer.state[row] for row in self._rows]
        return {name: _joined([state[name] for state in states]) for name in states[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        for i, row in enumerate(self._rows):
            own = {name: _row_state(value, i) for name, value in state.items()}
            self._optimizer.state[row].update(own)


def _joined(values: list[Any]) -> Tensor | None:
    """State of the rows, as one: [worker, D], or a number that is equal in all of them."""
    first = values[0]
    if first is None:
        return None
    return torch.cat(values) if first.ndim else first


def _row_state(value: Tensor | None, i: int) -> Tensor | None:
    """The state of row i, from the state of all rows."""
    if value is None:
        return None
    return value[i : i + 1] if value.ndim else value.clone()
