"""PowerSGD in a training loop of one's own, one worker a process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.power_sgd import Aggregation, Config
from powergossip.network import Network, processes
from powergossip.optimizers.checks import (
    Params,
    gradient_of,
    named,
    network_of_processes,
    refuse_odd,
    refuse_others,
    start_together,
)
from powergossip.parameters import Layout


class PowerSGD:
    """Averages the gradients of these parameters over the processes of this run.

    params: tensors, or (name, tensor) pairs, in an order that all processes share. All workers
    start from process 0's parameters.

    Raises ValueError for parameters that are not of 32-bit floating point.
    """

    def __init__(
        self,
        params: Params,
        config: Config | None = None,
        network: Network | None = None,
    ):
        self.config = config or Config()
        self._names, self._params = named(params)
        who = processes()
        who.agree(lambda: refuse_odd(self._names, self._params))
        device = self._params[0].device
        self.network = network or network_of_processes(who, device)
        self._layout = Layout(p.shape for p in self._params)
        self._aggregation = Aggregation(self.network, self._layout, self.config)
        self._error = torch.zeros(1, self._layout.size, device=device)
        self._mean = torch.zeros_like(self._error)
        self._error_views = self._layout.tensors(self._error[0])
        self._mean_views = self._layout.tensors(self._mean[0])
        start_together(who, self._params)

    @property
    def compression_rate(self) -> float:
        """Numbers of a gradient over the numbers that travel of it in a step, on average."""
        return self._aggregation.compression_rate

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return int(self.network.bits[0])

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The approximate mean over all workers, which the next call overwrites.

        From `gradients`, in the order of the parameters, what was sent of them is subtracted: the
        error, to be part of the next step's gradients.
        """
        for gradient, view in zip(gradients, self._error_views, strict=True):
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
        self.network.run(self._aggregation.step(self._error, self._mean))
        for gradient, view in zip(gradients, self._error_views, strict=True):
            if gradient.data_ptr() != view.data_ptr():
                gradient.copy_(view)
        return self._mean_views

    def state_dict(self) -> dict[str, Any]:
        """Directions, counters and the error."""
        return {
            "aggregation": self._aggregation.state_dict(),
            "network": self.network.state_dict(),
            "error": self._error.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was; p.grad becomes the error. ValueError for a state of
        other parameters."""
        if state["error"].shape != self._error.shape:
            raise ValueError(
                f"PowerSGD's state is of {state['error'].shape[1]} numbers, "
                f"these parameters have {self._error.shape[1]}; use the same model"
            )
        self._aggregation.load_state_dict(state["aggregation"])
        self.network.load_state_dict(state["network"])
        self._error.copy_(state["error"])
        for parameter, view in zip(self._params, self._error_views, strict=True):
            parameter.grad = view


def optimizer_step(optimizer: torch.optim.Optimizer, powersgd: PowerSGD) -> None:
    """A step of the optimizer with the mean of all workers' gradients.

    Leaves the error in p.grad, onto which the next backward pass adds, so that zero_grad is not
    needed; zero_grad(set_to_none=False) would lose it. Raises ValueError for a parameter without
    gradient or with a sparse one.
    """
    params, names = powersgd._params, powersgd._names
    refuse_others(optimizer, params)
    gradients = [gradient_of(name, p) for name, p in zip(names, params, strict=True)]
    for gradient, error in zip(gradients, powersgd._error_views, strict=True):
        if gradient.data_ptr() != error.data_ptr():  # at first, and after zero_grad
            error.add_(gradient)
    means = powersgd.aggregate(powersgd._error_views)
    for parameter, mean in zip(params, means, strict=True):
        parameter.grad = mean
    try:
        optimizer.step()
    finally:
        for parameter, error in zip(params, powersgd._error_views, strict=True):
            parameter.grad = error
