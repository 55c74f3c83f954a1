"""The mean of compressed gradients, or of displacements, in all workers."""

from typing import ClassVar

import torch

from powergossip.algorithms.averaging import Aggregation, Saved
from powergossip.algorithms.learning.interface import Correction, Decay, LocalStep
from powergossip.network import Network
from powergossip.parameters import Parameters


class CentralizedSGD(Saved):
    """x_i ← x_i − η u(mean + λ x_i), mean = aggregate(e_i + g_i), e_i ← the residual of worker i.

    Workers that start alike stay alike, to the bit within a process. The residual e_i stays in
    `parameters.grad`, where the next backward pass adds to it: error feedback costs no time.

    Weight decay is never compressed. If the aggregation owns the momentum, so that u has none, the
    decay has its own momentum buffer, as in the published code of Deep Gradient Compression
    (github.com/synxlin/deep-gradient-compression, DGCSGD). See `Decay`.

    Args:
        update: Step of a local optimizer over `parameters.x`.
        weight_decay: Weight decay λ. Normalization layers are exempt.
        clip: Largest norm of a worker's own gradient g_i, before e_i is added (see Correction).
        num_batches_per_step: Batches whose mean gradient g_i is compressed. Nothing is sent in
            between.
    """

    saved: ClassVar[dict[str, str]] = {
        "aggregation": "_aggregation",
        "decay": "_decay",
        "batches": "_batches",
        "gradient": "_gradient",
        "error": "_error",
    }
    kept = ("batches", "decay")
    conserved = ("aggregation", "error", "gradient")

    def __init__(
        self,
        network: Network,
        aggregation: Aggregation,
        parameters: Parameters,
        update: LocalStep,
        *,
        weight_decay: float = 0.0,
        clip: float | None = None,
        num_batches_per_step: int = 1,
    ):
        self._network, self._aggregation, self._update = network, aggregation, update
        self._x, self._gradient = parameters.x, parameters.grad
        self._mean = torch.zeros_like(parameters.grad)
        self._clip = Correction(parameters, 0.0, clip)
        owned = (aggregation.momentum, aggregation.nesterov) if aggregation.owns_momentum else ()
        self._decay = Decay(parameters, weight_decay, *owned)
        self._num_batches, self._batches = num_batches_per_step, 0
        # Where the gradient alone is needed, the residual has its own buffer.
        apart = clip is not None or num_batches_per_step > 1
        self._error = torch.zeros_like(parameters.grad) if apart else None

    def start(self) -> None:
        """Clear the gradient before the first batch of a step, unless it holds the residual."""
        if self._error is not None and self._batches == 0:
            self._gradient.zero_()

    def finish(self) -> None:
        """Aggregate and update after the last batch of a step. Otherwise only count the batch."""
        g = self._gradient
        self._batches = (self._batches + 1) % self._num_batches
        if self._batches:
            return
        if self._num_batches > 1:
            g.div_(self._num_batches)
        self._clip()
        if self._error is not None:
            g.add_(self._error)
        self._network.run(self._aggregation.step(g, self._mean))
        if self._error is not None:
            self._error.copy_(g)
        self._decay.add_to(self._mean)
        with self._network.measure("update"):
            self._update(self._mean)
        if len(self._x) > 1:  # torch's kernels may round the last elements of a buffer differently
            self._x[1:] = self._x[0]


class CentralizedLocal(Saved):
    """Local steps of the workers, and the mean of their compressed displacements::

        x_i ← x_i + u_i                       H times, u_i the local optimizer's displacement
        φ ← φ − aggregate(φ − x_i),   x_i ← φ

    Workers that start alike are alike after every H-th step.

    Args:
        update: Step of a local optimizer over `parameters.x`.
        local_steps: Number H of local steps.
        weight_decay: Weight decay λ of a worker's gradient. Normalization layers are exempt.
        clip: Largest norm of a worker's gradient, before the decay is added.
    """

    saved: ClassVar[dict[str, str]] = {
        "aggregation": "_aggregation",
        "slow": "_slow",
        "steps": "_steps",
    }
    kept = ("steps",)
    conserved = ("aggregation", "slow")

    def __init__(
        self,
        network: Network,
        aggregation: Aggregation,
        parameters: Parameters,
        update: LocalStep,
        *,
        local_steps: int = 1,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ):
        self._network, self._aggregation, self._update = network, aggregation, update
        self._x, self._gradient = parameters.x, parameters.grad
        self._correct = Correction(parameters, weight_decay, clip)
        self._local_steps, self._steps = local_steps, 0
        self._slow = parameters.x.clone()  # φ
        self._mean = torch.zeros_like(parameters.x)

    def start(self) -> None:
        """Clear the gradient."""
        self._gradient.zero_()

    def finish(self) -> None:
        """Take a local step, and after every H-th one aggregate the displacements."""
        self._correct()
        with self._network.measure("update"):
            self._update(self._gradient)
        self._steps = (self._steps + 1) % self._local_steps
        if self._steps:
            return
        torch.sub(self._slow, self._x, out=self._gradient)
        self._network.run(self._aggregation.step(self._gradient, self._mean))
        self._x.copy_(self._slow.sub_(self._mean))
