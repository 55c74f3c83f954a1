"""PowerSGD in a training loop of your own, one worker per process (`mpirun -np 8 python mine.py`)::

    from powergossip.optimizers import Config, PowerSGD, optimizer_step

    powersgd = PowerSGD(list(model.parameters()), Config(rank=1))
    for batch in batches:
        loss(model, batch).backward()        # adds to p.grad, which holds the error
        optimizer_step(optimizer, powersgd)  # in place of optimizer.step() and zero_grad()

Names, signatures and defaults are those of the package that the authors of PowerSGD published
(github.com/epfml/powersgd). Processes are those of the run, or of `process_group`. The algorithm is
algorithms.power_sgd.

Precision: gradients are float32, float64, bfloat16 or float16, also mixed. All are computed and
sent in float64 if one of them is float64, otherwise in float32, so that an element of a
half-precision gradient takes 32 bits in a message that is not compressed. With
message_dtype="parameter", messages about parameters in half precision, and the sums of messages,
have their precision. The mean is rounded to the precision of the gradient. Bits are counted as
sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms import plain
from powergossip.algorithms.power_sgd import Aggregation, PowerSGDConfig
from powergossip.network import Network
from powergossip.optimizers.checks import (
    Params,
    check_gradients,
    check_same_everywhere,
    clear_frozen_gradients,
    is_frozen,
    named,
    not_compiled,
)
from powergossip.optimizers.gradients import (
    FLOATING_POINT,
    CompressedMean,
    Gradients,
    check_one_worker,
    network_of_all,
    processes_for,
)
from powergossip.optimizers.precision import MESSAGE_DTYPES, Rounding, working_dtype
from powergossip.optimizers.sharded_parameters import shaped_like
from powergossip.parameters import matrix_shape


class Aggregator(ABC):
    """A mean of the gradients of all workers, exact or approximate. See `optimizer_step`."""

    @abstractmethod
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over all workers, and replace `gradients` by the errors.

        The error is the part of a gradient that the mean lacks, for error feedback: add it to the
        gradient of the next step. It is 0 without compression.
        """

    def collect(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return the optimizer's parameters that are not frozen, and their gradients.

        Gradients of frozen parameters are cleared.

        Raises:
            ValueError: For a gradient that is missing or sparse.
        """
        clear_frozen_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names, trained = named(p for p in parameters if not is_frozen(p))
        return trained, check_gradients(names, trained, required=True, dtypes=FLOATING_POINT)


class AllReduce(Aggregator):
    """The exact mean: x̄ = (1/n) Σ_j x_j. Sends 2 (n − 1)/n times the size of the gradients.

    Args:
        network: A network with one worker per process, by default that of the process group.
        process_group: As for `PowerSGD`.
    """

    def __init__(self, network: Network | None = None, *, process_group: Any = None):
        self._processes = processes_for(network, process_group)
        if network is not None:
            check_one_worker(network)
        self.network = network  # None: created with the first gradients
        self._flat: Tensor | None = None  # [1, D]
        self._sizes: list[int] = []

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over all workers, and set `gradients` to 0.

        Raises:
            BadInput: In all processes, if sizes or precision differ between processes.
        """
        if not gradients:
            return []
        network, flat = self._prepared(gradients)
        parts = flat[0].split(self._sizes)
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.reshape(-1))
            gradient.zero_()
        network.run(plain.ExactMean(network).step(flat))
        return [
            part.view(gradient.shape).to(gradient.dtype, copy=True)
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    def _prepared(self, gradients: Sequence[Tensor]) -> tuple[Network, Tensor]:
        """The network and the buffer for these gradients. All processes make them together."""
        device, dtype = gradients[0].device, working_dtype(gradients)
        sizes = [gradient.numel() for gradient in gradients]
        if self.network is None:
            self.network = network_of_all(self._processes, device)
        if self._flat is None or self._flat.dtype != dtype or self._sizes != sizes:
            check_same_everywhere(
                self.network.processes, "the list of gradients", (str(dtype), sizes)
            )
            self._flat = torch.empty(1, sum(sizes), device=device, dtype=dtype)
            self._sizes = sizes
        return self.network, self._flat

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return 0 if self.network is None else int(self.network.bits[0])


class _LowRank(CompressedMean, Aggregator):
    """The common part of PowerSGD and BasicPowerSGD."""

    def __init__(
        self,
        params: Params,
        config: PowerSGDConfig,
        network: Network | None,
        process_group: Any,
        message_dtype: str,
        mesh: Any,
        *,
        vectors_are_matrices: bool = False,
    ):
        checks.one_of("message_dtype", message_dtype, MESSAGE_DTYPES)
        flat = Gradients(
            params,
            network,
            process_group=process_group,
            mesh=mesh,
            dtypes=FLOATING_POINT,
            vectors_are_matrices=vectors_are_matrices,
        )
        super().__init__(flat)
        dtype = self.flat.message_dtype(message_dtype)
        self._rounding = None if dtype is None else Rounding(dtype)
        self._aggregation = Aggregation(self.network, self.flat.layout, config, self.flat.dtype)

    @property
    def step_counter(self) -> int:
        """The number of calls of `aggregate`."""
        return self._aggregation.steps

    @property
    def uncompressed_num_floats(self) -> int:
        """Elements of a gradient."""
        return self.flat.layout.size

    @property
    def compressed_num_floats(self) -> float:
        """Elements that are sent for a gradient per step of compression, on average.

        A convolution counts as the matrix that is sent, [first dimension, all the others]. The
        published property adds up its four dimensions.
        """
        return self._aggregation.elements_sent

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
        apart = [  # from the flat buffer
            (gradient, error)
            for gradient, error in zip(gradients, errors, strict=True)
            if gradient.data_ptr() != error.data_ptr()
        ]
        for gradient, error in apart:
            error.copy_(gradient)
        conversation = self._aggregation.step(self.flat.gradient, self.flat.mean)
        self.network.run(conversation if self._rounding is None else self._rounding(conversation))
        for gradient, error in apart:
            gradient.copy_(error)
        means = zip(self.flat.means, gradients, strict=True)
        return [mean.to(gradient.dtype) for mean, gradient in means]

    def collect(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters, and the flat buffer's views of gradient plus error.

        Raises ValueError for a gradient that is missing or sparse, and for an optimizer of other
        parameters.
        """
        errors = self.flat.gradients
        for gradient, error in zip(self.flat.of_loop(optimizer), errors, strict=True):
            if gradient.data_ptr() != error.data_ptr():  # at first, and after zero_grad
                error.add_(gradient)
        return self.flat.parameters, errors

    def state_dict(self) -> dict[str, Any]:
        """Directions, counters and the error."""
        return super().state_dict() | {"error": self.flat.gradient.clone()}

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
        super().load_state_dict(state)
        error.copy_(state["error"])
        _set_errors(self.flat.parameters, self.flat.gradients)


class PowerSGD(_LowRank):
    """The approximate mean of the gradients of these parameters over all processes.

    Half-precision gradients have an error in float32, which p.grad cannot hold. It is kept here,
    and p.grad is None after a step.

    Args:
        params: Tensors or (name, tensor) pairs, in an order that all processes share. All workers
            start from the parameters of process 0. Frozen parameters (requires_grad=False) are
            neither changed nor sent.
        network: A network with one worker per process, by default that of the process group.
        process_group: A group of torch.distributed, an mpi4py communicator, a `Processes`, or None
            for all processes of the run.
        message_dtype: "float32", or "parameter", with which messages about parameters in bfloat16
            or float16 have half the bits. Their rounding errors are not in the error that is fed
            back.
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
        network: Network | None = None,
        *,
        process_group: Any = None,
        message_dtype: str = "float32",
        mesh: Any = None,
    ):
        self.config = config
        super().__init__(params, config, network, process_group, message_dtype, mesh)

    @property
    def is_compressed_mask(self) -> list[bool]:
        """Whether each parameter is compressed."""
        return [
            len(shape) >= 2 and self.config.compresses(*matrix_shape(shape))
            for shape in self.flat.layout.shapes
        ]


@dataclass(frozen=True)
class BasicConfig:
    """Options of `BasicPowerSGD`.

    Args:
        rank: Rank of the approximation in each half-iteration.
        num_iters_per_step: Half-iterations of power iteration per step.
    """

    rank: int
    num_iters_per_step: int = 1


class BasicPowerSGD(_LowRank):
    """PowerSGD that compresses all parameters from the first step on, whatever the gain.

    A vector is a matrix with one column. The other parameters are those of `PowerSGD`, and
    ValueError is raised for the same reasons.
    """

    def __init__(
        self,
        params: Params,
        config: BasicConfig,
        network: Network | None = None,
        *,
        process_group: Any = None,
        message_dtype: str = "float32",
        mesh: Any = None,
    ):
        self.config = config
        everything = PowerSGDConfig(
            config.rank,
            min_compression_rate=0.0,
            num_iters_per_step=config.num_iters_per_step,
            start_compressing_after_num_steps=0,
        )
        super().__init__(
            params,
            everything,
            network,
            process_group,
            message_dtype,
            mesh,
            vectors_are_matrices=True,
        )


@not_compiled
def optimizer_step(optimizer: torch.optim.Optimizer, aggregator: Aggregator) -> None:
    """A step of the optimizer with the mean of all workers' gradients by an aggregator.

    The error is left in p.grad, where the next backward pass adds to it, so zero_grad is not
    needed. With PowerSGD, zero_grad() is harmless, but zero_grad(set_to_none=False) would clear the
    error. Frozen parameters are left out.

    Raises:
        ValueError: Before anything is sent, for a parameter with a missing or sparse gradient, and
            for an optimizer of other parameters.
    """
    parameters, gradients = aggregator.collect(optimizer)
    means = aggregator.aggregate(gradients)
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = shaped_like(mean.to(parameter.dtype), parameter)
    try:
        optimizer.step()
    finally:
        _set_errors(parameters, gradients)


def _set_errors(parameters: Sequence[Tensor], errors: Sequence[Tensor]) -> None:
    """p.grad ← the error, or None if it has another precision."""
    for parameter, error in zip(parameters, errors, strict=True):
        same = error.dtype == parameter.dtype
        parameter.grad = shaped_like(error, parameter) if same else None
