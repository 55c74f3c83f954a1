"""Deep Gradient Compression in a training loop of one's own, one worker a process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.dgc import Config, DGCAggregation
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


class DGC:
    """Averages the gradients of these parameters over the processes of this run.

    params: tensors, or (name, tensor) pairs, in an order that all processes share. All workers
    start from process 0's parameters. network: of one worker a process; by default of all.

    Raises ValueError for parameters that are not dense and of 32-bit floating point.
    """

    def __init__(
        self,
        params: Params,
        config: Config | None = None,
        network: Network | None = None,
    ):
        self.config = config or Config()
        self._names, self._params = named(params)
        who = network.processes if network else processes()
        who.agree(lambda: refuse_odd(self._names, self._params))
        device = self._params[0].device
        self.network = network or network_of_processes(who, device)
        if self.network.rows != 1:
            raise ValueError(
                f"the network hosts {self.network.rows} workers in this process; "
                "use one worker a process"
            )
        layout = Layout(p.shape for p in self._params)
        self._aggregation = DGCAggregation(self.network, layout, self.config)
        self._gradient = torch.zeros(1, layout.size, device=device)  # mean of the calls so far
        self._mean = torch.zeros_like(self._gradient)
        self._gradient_views = layout.tensors(self._gradient[0])
        self._mean_views = layout.tensors(self._mean[0])
        self._calls = 0  # since the last step
        start_together(who, self._params)

    def at_epoch(self, epoch: float) -> None:
        """The share that travels follows the warm-up; to be called when an epoch begins."""
        self._aggregation.at_epoch(epoch)

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits that a worker tells of it, at the present share."""
        return self._aggregation.compression_rate

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return int(self.network.bits[0])

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor] | None:
        """Take in gradients, in the order of the parameters; they are left alone.

        Returns what all workers apply, which the next call overwrites; None in those of
        num_batches_per_step calls that only take in.
        """
        share = 1 / self.config.num_batches_per_step
        torch._foreach_add_(self._gradient_views, list(gradients), alpha=share)
        self._calls += 1
        if self._calls < self.config.num_batches_per_step:
            return None
        self._calls = 0
        self.network.run(self._aggregation.step(self._gradient, self._mean))
        return self._mean_views

    def state_dict(self) -> dict[str, Any]:
        """All that changes: see DGCAggregation, and gradients taken in since the last step."""
        return {
            "aggregation": self._aggregation.state_dict(),
            "network": self.network.state_dict(),
            "gradient": self._gradient.clone(),
            "calls": self._calls,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was. Raises ValueError for a state of another model."""
        self._aggregation.load_state_dict(state["aggregation"])
        self.network.load_state_dict(state["network"])
        self._gradient.copy_(state["gradient"])
        self._calls = state["calls"]


def optimizer_step(optimizer: torch.optim.Optimizer, dgc: DGC) -> None:
    """A step of the optimizer with what all workers apply, in every num_batches_per_step-th call.

    Takes the gradients p.grad and leaves them 0. Before anything is sent, raises ValueError for a
    parameter without gradient or with one that is not dense and of 32-bit floating point, and for
    an optimizer that has momentum or is of other parameters.
    """
    refuse_others(optimizer, dgc._params)
    for group in optimizer.param_groups:
        if group.get("momentum"):
            raise ValueError(
                f"the optimizer has momentum={group['momentum']}; use momentum=0 there, and "
                "Config(momentum=…)"
            )
    gradients = []
    for name, parameter in zip(dgc._names, dgc._params, strict=True):
        gradient = gradient_of(name, parameter)
        if gradient.dtype != torch.float32:
            raise ValueError(f"{name} has a gradient of {gradient.dtype}; use torch.float32")
        gradients.append(gradient)
    means = dgc.aggregate(gradients)
    if means is not None:
        torch._foreach_copy_(gradients, means)
        optimizer.step()
    torch._foreach_zero_(gradients)
