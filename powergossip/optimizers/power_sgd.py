"""PowerSGD in a training loop of your own, one worker per process (`mpirun -np 8 python mine.py`).

    from powergossip.optimizers import Config, PowerSGD, optimizer_step

    powersgd = PowerSGD(list(model.parameters()), Config(rank=1))
    for batch in batches:
        loss(model, batch).backward()        # adds to p.grad, which holds the error
        optimizer_step(optimizer, powersgd)  # in place of optimizer.step() and zero_grad()

The algorithm is algorithms.power_sgd.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.power_sgd import Aggregation, Config
from powergossip.network import Network
from powergossip.optimizers.checks import Params
from powergossip.optimizers.gradients import Gradients


class PowerSGD:
    """The approximate mean of the gradients of these parameters over all processes.

    params: tensors, or (name, tensor) pairs, in an order that all processes share. All workers
    start from the parameters of process 0. network: a network with one worker per process, by
    default that of all processes.

    flat  # the parameters, the error and the mean as `Gradients`

    Raises ValueError, in all processes, for parameters that are not dense float32 tensors.
    """

    def __init__(
        self,
        params: Params,
        config: Config | None = None,
        network: Network | None = None,
    ):
        self.config = config or Config()
        self.flat = Gradients(params, network)
        self.network = self.flat.network
        self._aggregation = Aggregation(self.network, self.flat.layout, self.config)

    @property
    def compression_rate(self) -> float:
        """Elements of a gradient over the elements sent for it per step, on average."""
        return self._aggregation.compression_rate

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return self.flat.bits

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the approximate mean over all workers, which the next call overwrites.

        `gradients`, in the order of the parameters, are replaced by the error: the part of them
        that was not sent. Add it to the gradients of the next step.
        """
        errors = self.flat.gradients
        for gradient, error in zip(gradients, errors, strict=True):
            if gradient.data_ptr() != error.data_ptr():
                error.copy_(gradient)
        self.network.run(self._aggregation.step(self.flat.gradient, self.flat.mean))
        for gradient, error in zip(gradients, errors, strict=True):
            if gradient.data_ptr() != error.data_ptr():
                gradient.copy_(error)
        return self.flat.means

    def state_dict(self) -> dict[str, Any]:
        """Directions, counters and the error."""
        return {
            "aggregation": self._aggregation.state_dict(),
            "network": self.network.state_dict(),
            "error": self.flat.gradient.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. p.grad becomes the error.

        Raises ValueError for a state of other parameters.
        """
        error = self.flat.gradient
        if state["error"].shape != error.shape:
            raise ValueError(
                f"PowerSGD's state has {state['error'].shape[1]} elements, "
                f"these parameters have {error.shape[1]}; use the same model"
            )
        self._aggregation.load_state_dict(state["aggregation"])
        self.network.load_state_dict(state["network"])
        error.copy_(state["error"])
        for parameter, view in zip(self.flat.parameters, self.flat.gradients, strict=True):
            parameter.grad = view


def optimizer_step(optimizer: torch.optim.Optimizer, powersgd: PowerSGD) -> None:
    """A step of the optimizer with the approximate mean of all workers' gradients.

    The error is left in p.grad, where the next backward pass adds to it, so zero_grad is not
    needed. zero_grad() is harmless, but zero_grad(set_to_none=False) would clear the error.

    Raises ValueError, before anything is sent, for a parameter with a missing or sparse gradient,
    and for an optimizer of other parameters.
    """
    flat = powersgd.flat
    for gradient, error in zip(flat.of_loop(optimizer), flat.gradients, strict=True):
        if gradient.data_ptr() != error.data_ptr():  # at first, and after zero_grad
            error.add_(gradient)
    means = powersgd.aggregate(flat.gradients)
    for parameter, mean in zip(flat.parameters, means, strict=True):
        parameter.grad = mean
    try:
        optimizer.step()
    finally:
        for parameter, error in zip(flat.parameters, flat.gradients, strict=True):
            parameter.grad = error
