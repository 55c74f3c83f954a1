"""Mean gradients of any aggregation in a training loop: the common part of ErrorFeedback and
SignSGD."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.error_feedback import ErrorFeedback as ErrorFeedbackAggregation
from powergossip.algorithms.sign_sgd import SignSGDAggregation
from powergossip.network import Network
from powergossip.optimizers.checks import Params
from powergossip.optimizers.dgc import check_momentum
from powergossip.optimizers.gradients import CompressedMean, Gradients
from powergossip.parameters import Layout

Build = Callable[[Network, Layout], ErrorFeedbackAggregation | SignSGDAggregation]


class Aggregated(CompressedMean):
    """The mean of the compressed gradients of these parameters over all processes.

    Args:
        params, network, process_group, mesh: As for `PowerSGD`.
        build: Function that constructs the aggregation.

    Attributes:
        flat: The parameters, a gradient and the mean of the workers as `Gradients`.

    Raises:
        ValueError: In all processes, for parameters that are not dense float32 tensors.
    """

    def __init__(
        self,
        params: Params,
        build: Build,
        network: Network | None = None,
        process_group: Any = None,
        mesh: Any = None,
    ):
        super().__init__(Gradients(params, network, process_group=process_group, mesh=mesh))
        self._aggregation = build(self.network, self.flat.layout)

    @property
    def owns_momentum(self) -> bool:
        """True if the momentum is part of the method, so that the optimizer must have no
        momentum."""
        return self._aggregation.owns_momentum

    @property
    def decay_momentum(self) -> tuple[float, bool]:
        """The momentum that weight decay needs to fit the method's, and whether it is Nesterov's.
        `DGCSGD` has it."""
        return self._aggregation.momentum, self._aggregation.nesterov

    def at_learning_rate(self, *rates: float) -> None:
        """Set the learning rate of the next step: one for all parameters, or one for each.
        `optimizer_step` does this with the rates of the optimizer."""
        self._aggregation.at_learning_rate(*rates)

    def collect(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and their gradients. Each has the learning rate of its group."""
        parameters, gradients = super().collect(optimizer)
        if self.owns_momentum:
            check_momentum(optimizer, *self.decay_momentum)
        rates: dict[int, float] = {}
        for group in optimizer.param_groups:
            rates |= {id(parameter): float(group["lr"]) for parameter in group["params"]}
        self.at_learning_rate(*(rates[id(parameter)] for parameter in parameters))
        return parameters, gradients

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over all workers, which the next call overwrites.

        Gradients are in the order of the parameters. They are not changed.
        """
        torch._foreach_copy_(self.flat.gradients, list(gradients))
        self.network.run(self._aggregation.step(self.flat.gradient, self.flat.mean))
        return self.flat.means
