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

from typing import Any

import torch

from powergossip.algorithms.dgc import DGCAggregation, DGCConfig
from powergossip.optimizers.checks import HALF, Params
from powergossip.optimizers.dgc_sgd import DGCSGD
from powergossip.optimizers.gradients import Aggregator, Gradients, optimizer_step

__all__ = ["DGC", "DGCSGD", "DGCConfig", "optimizer_step"]


class DGC(Aggregator):
    """The mean of the sparsified gradients of these parameters over all processes.

    Gradients are float32, bfloat16 or float16. They are accumulated in float32.

    Args:
        params, process_group: As for `PowerSGD`.

    Attributes:
        flat: The parameters, a gradient and the mean of the workers.

    Raises:
        ValueError: In all processes, for parameters that are not dense tensors of these dtypes.
    """

    def __init__(
        self,
        params: Params,
        config: DGCConfig | None = None,
        *,
        process_group: Any = None,
    ):
        self.config = config or DGCConfig()
        dtypes = (torch.float32, *HALF)
        flat = Gradients(params, process_group=process_group, dtypes=dtypes)
        super().__init__(flat, DGCAggregation(flat.network, flat.layout, self.config))

    def at_epoch(self, epoch: float) -> None:
        """Set the fraction that is sent, which follows the warm-up. Call it at every epoch."""
        self._aggregation.at_epoch(epoch)
