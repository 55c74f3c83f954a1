"""PowerSGD in your own training loop, one worker per process (`mpirun -np 8 python mine.py`)::

    from powergossip.optimizers import Config, PowerSGD, optimizer_step

    powersgd = PowerSGD(list(model.parameters()), Config(rank=1))
    for batch in batches:
        loss(model, batch).backward()
        optimizer_step(optimizer, powersgd)  # in place of optimizer.step() and zero_grad()

Names, signatures and defaults are the same as in the package that the authors of PowerSGD published
(github.com/epfml/powersgd). It uses all processes of the run, or `process_group`. The algorithm is
algorithms.power_sgd.

Precision: gradients are float32, float64, bfloat16 or float16, also mixed. All are computed and
sent in float64 if one of them is float64, otherwise in float32, so that an element of a
half-precision gradient takes 32 bits in a message that is not compressed. The mean is rounded to
the precision of the gradient.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.power_sgd import PowerSGDAggregation, PowerSGDConfig
from powergossip.optimizers.checks import DTYPES, Params
from powergossip.optimizers.gradients import Aggregator, Gradients, Tensors


class PowerSGD(Aggregator):
    """The approximate mean of the gradients of these parameters over all processes.

    The error is kept in `flat`, in float32 for gradients in half precision.

    Args:
        params: Tensors or (name, tensor) pairs, in an order that all processes share. All workers
            start from the parameters of process 0. Frozen parameters (requires_grad=False) are
            neither changed nor sent.
        process_group: A group of torch.distributed, an mpi4py communicator, a `Processes`, or None
            for all processes of the run.
        mesh: The dimension of a DeviceMesh along which replicas differ, such as mesh["replica"],
            for parameters that are sharded along another one. Each shard compresses its blocks.

    Attributes:
        flat: The parameters, the error and the mean as `Gradients`.

    Raises:
        ValueError: In all processes, for parameters that are not dense floating-point tensors.
    """

    def __init__(
        self,
        params: Params,
        config: PowerSGDConfig,
        *,
        process_group: Any = None,
        mesh: Any = None,
    ):
        flat = Gradients(params, process_group=process_group, mesh=mesh, dtypes=DTYPES)
        super().__init__(flat, PowerSGDAggregation(flat.network, flat.layout, config, flat.dtype))
        self.config = config

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the approximate mean over all workers, which the next call overwrites.

        `gradients`, in the order of the parameters without frozen ones, are replaced by the error
        in their precision: the part of them that was not sent. Add it to the gradients of the next
        step.

        Raises ValueError for another number of gradients.
        """
        errors = self.flat.gradients
        if len(gradients) != len(errors):
            raise ValueError(
                f"{len(gradients)} gradients, where {len(errors)} parameters are trained; give one "
                "for each"
            )
        torch._foreach_copy_(errors, list(gradients))
        self.network.run(self._aggregation.step(self.flat.gradient, self.flat.mean))
        torch._foreach_copy_(list(gradients), errors)
        means = zip(self.flat.means, gradients, strict=True)
        return [mean.to(gradient.dtype) for mean, gradient in means]

    def mean_of(self, gradients: Tensors) -> list[Tensor]:
        """Return the mean of gradients plus errors, and keep the new errors. See `Aggregator`."""
        torch._foreach_add_(self.flat.gradients, list(gradients))
        self.network.run(self._aggregation.step(self.flat.gradient, self.flat.mean))
        return self.flat.means

    def state_dict(self) -> dict[str, Any]:
        """Directions, counters and the error."""
        return super().state_dict() | {"error": self.flat.gradient.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        error = self.flat.gradient
        if state["error"].shape != error.shape:
            raise ValueError(
                f"PowerSGD's state has {state['error'].shape[1]} elements, "
                f"these parameters have {error.shape[1]}; use the same model"
            )
        super().load_state_dict(state)
        error.copy_(state["error"])
