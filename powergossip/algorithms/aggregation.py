"""The centralized relatives of gossip: all workers apply one mean of their compressed gradients.

A gradient aggregation's `step(gradient, mean)` is a conversation (see network), as an averaging
algorithm's step is. To add one: write its class and its row in `AGGREGATIONS`; train.py and the
tests of the laws that every aggregation obeys (tests/test_centralized.py) find it there.

Axes: worker (hosted here); D numbers a worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from powergossip.algorithms import Correction, dgc, power_sgd
from powergossip.network import Conversation, Network
from powergossip.parameters import Layout, Parameters

V = TypeVar("V")


class Aggregation(Protocol):
    """The workers' mean gradient, approximately; what is left of each waits for the next step."""

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """gradient [worker, D]: taken; left is what is to be part of the next step's. mean
        [worker, D]: filled with what all workers apply."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on besides the gradient; tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        ...


class CentralizedSGD:
    """x_i ← x_i − η u(mean), mean = aggregate(e_i + g_i), e_i ← what is left of it in worker i.

    Workers that start together stay together. `update(mean)` is the step of a local optimizer over
    `parameters.x`. The error e_i stays in `parameters.grad`, where the next backward pass adds to
    it: error feedback costs nothing.

    weight_decay, clip      of a worker's own gradient g_i, before e_i is added; as in DPSGD
    num_batches_per_step    g_i is the mean over so many batches; between them nothing is sent
    """

    def __init__(
        self,
        network: Network,
        aggregation: Aggregation,
        parameters: Parameters,
        update: Callable[[Tensor], Any],
        *,
        weight_decay: float = 0.0,
        clip: float | None = None,
        num_batches_per_step: int = 1,
    ):
        self._network, self._aggregation, self._update = network, aggregation, update
        self._gradient = parameters.grad
        self._mean = torch.zeros_like(parameters.grad)
        self._correct = Correction(parameters, weight_decay, clip)
        self._num_batches, self._batches = num_batches_per_step, 0
        # Where the gradient alone has to be seen, the error waits elsewhere.
        apart = clip is not None or num_batches_per_step > 1
        self._error = torch.zeros_like(parameters.grad) if apart else None

    def step(self, compute_gradient: Callable[[], V]) -> V:
        """One batch; `compute_gradient` adds to `parameters.grad`, and what it returns is
        returned."""
        g = self._gradient
        if self._error is not None and self._batches == 0:
            g.zero_()
        result = compute_gradient()
        self._batches = (self._batches + 1) % self._num_batches
        if self._batches:
            return result
        if self._num_batches > 1:
            g.div_(self._num_batches)
        self._correct()
        if self._error is not None:
            g.add_(self._error)
        self._network.run(self._aggregation.step(g, self._mean))
        if self._error is not None:
            self._error.copy_(g)
        self._update(self._mean)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Of the aggregation, the errors, and batches that wait; tensors are [worker, ...]."""
        return {
            "aggregation": self._aggregation.state_dict(),
            "batches": self._batches,
            "gradient": self._gradient,
            "error": self._error,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        self._aggregation.load_state_dict(state["aggregation"])
        self._batches = state["batches"]
        self._gradient.copy_(state["gradient"])
        if self._error is not None:
            self._error.copy_(state["error"])


# --- By name -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What gradient aggregations can be told; each takes what concerns it."""

    powersgd: power_sgd.Config
    dgc: dgc.Config


Builder = Callable[[Network, Layout, Options], Aggregation]

# The names that users choose from: optimizer in train.py.
AGGREGATIONS: dict[str, Builder] = {
    "powersgd": lambda network, layout, options: power_sgd.Aggregation(
        network, layout, options.powersgd
    ),
    "dgc": lambda network, layout, options: dgc.DGCAggregation(network, layout, options.dgc),
}
