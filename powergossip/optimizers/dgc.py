"""Deep Gradient Compression in a training loop of your own, one worker per process.

    from powergossip.optimizers.dgc import DGC, Config, optimizer_step

    dgc = DGC(model.named_parameters(), Config(compress_ratio=0.001, warmup_epochs=4))
    for epoch in range(num_epochs):
        dgc.at_epoch(epoch)
        for batch in batches:
            loss(model, batch).backward()
            optimizer_step(optimizer, dgc)  # in place of optimizer.step() and zero_grad()

The optimizer has no momentum of its own, since DGC corrects the momentum for elements that are not
sent yet: use Config(momentum=…). The algorithm is algorithms.dgc.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.dgc import Config, DGCAggregation
from powergossip.network import Network
from powergossip.optimizers.checks import Params
from powergossip.optimizers.gradients import Gradients


class DGC:
    """The mean of the sparsified gradients of these parameters over all processes.

    params: tensors, or (name, tensor) pairs, in an order that all processes share. All workers
    start from the parameters of process 0. network: a network with one worker per process, by
    default that of all processes.

    flat  # the parameters, the mean of the batches of this step and that of the workers

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
        self._aggregation = DGCAggregation(self.network, self.flat.layout, self.config)
        self._calls = 0  # since the last step

    def at_epoch(self, epoch: float) -> None:
        """Set the fraction that is sent, which follows the warm-up. Call it at every epoch."""
        self._aggregation.at_epoch(epoch)

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits of a worker's messages, at the current fraction."""
        return self._aggregation.compression_rate

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return self.flat.bits

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
        return {
            "aggregation": self._aggregation.state_dict(),
            "network": self.network.state_dict(),
            "gradient": self.flat.gradient.clone(),
            "calls": self._calls,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        self._aggregation.load_state_dict(state["aggregation"])
        self.network.load_state_dict(state["network"])
        self.flat.gradient.copy_(state["gradient"])
        self._calls = state["calls"]


def optimizer_step(optimizer: torch.optim.Optimizer, dgc: DGC) -> None:
    """A step of the optimizer with the workers' mean, in every num_batches_per_step-th call.

    Takes the gradients p.grad and clears them.

    Raises ValueError, before anything is sent, for a parameter with a missing or sparse gradient,
    and for an optimizer that has momentum or other parameters.
    """
    gradients = dgc.flat.of_loop(optimizer)
    for group in optimizer.param_groups:
        if group.get("momentum"):
            raise ValueError(
                f"the optimizer has momentum={group['momentum']}: use momentum=0 there, and "
                "Config(momentum=…)"
            )
    means = dgc.aggregate(gradients)
    if means is not None:
        torch._foreach_copy_(gradients, means)
        optimizer.step()
    torch._foreach_zero_(gradients)
