"""Mean gradients in a training loop: the common part of PowerSGD, DGC and others."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip import topologies
from powergossip.network import Network, checked_barrier_at_exit, processes_of
from powergossip.optimizers.checks import (
    Params,
    check_gradients,
    check_optimizer,
    check_owner,
    check_same_everywhere,
    check_same_parameters,
    clear_frozen_gradients,
    is_frozen,
    named,
    not_compiled,
    owner_of,
    warn_of_buffers,
    working_dtype,
)
from powergossip.optimizers.dgc_sgd import check_momentum
from powergossip.optimizers.sharded_parameters import memory, replicas
from powergossip.parameters import Layout, check_parameters

Tensors = Sequence[Tensor]


class Traffic:
    """The cost so far of communication over a network with one worker per process."""

    network: Network

    @property
    def n_workers(self) -> int:
        """The number of workers, one per process."""
        return self.network.n_workers

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return int(self.network.bits[0])

    @property
    def messages(self) -> int:
        """Messages that this worker has sent since the start."""
        return int(self.network.messages[0])


class Gradients:
    """The parameters of a training loop, and buffers for a gradient and for the workers' mean.

    Args:
        params: Tensors or (name, tensor) pairs, in an order that all processes share. Frozen ones
            (requires_grad=False) are skipped. Construction gives all workers the values of process
            0.
        process_group: A group of torch.distributed, an mpi4py communicator, a `Processes`, or None
            for all processes of the run.
        mesh: For parameters that are sharded over another dimension of a DeviceMesh, the one along
            which replicas differ. Each shard's block of a parameter then counts as a parameter.
        dtypes: Accepted dtypes of parameters.

    Attributes:
        parameters: The trained parameters, in the given order, as far as this shard has rows of
            them.
        network, layout: The network, and the layout of the parameters.
        owner: The worker of this process, as in its states.
        dtype: Dtype of the buffers, see `working_dtype`.
        gradient, mean: Buffers [1, D] for a gradient and for the workers' mean.
        gradients, means: Views of the buffers in the shapes of the parameters.

    Raises:
        ValueError: In all processes, for parameters that are not dense tensors of these dtypes, or
            differ in shape, dtype or requires_grad between processes.
    """

    def __init__(
        self,
        params: Params,
        *,
        process_group: Any = None,
        mesh: Any = None,
        dtypes: Collection[torch.dtype] = (torch.float32,),
    ):
        names, tensors = named(params)
        pairs = [*zip(names, tensors, strict=True)]
        self._names = [name for name, tensor in pairs if not is_frozen(tensor)]
        self.parameters = [tensor for tensor in tensors if not is_frozen(tensor)]
        self._frozen = {name: tensor for name, tensor in pairs if is_frozen(tensor)}
        self._dtypes = dtypes
        if mesh is None:
            comm = processes_of(process_group)
        else:
            comm, shards = replicas(mesh, names, tensors, process_group)
        self._without_rows: list[Tensor] = []
        with comm.agreed():
            if not tensors:
                raise ValueError("there are no parameters; use model.parameters()")
            if not self.parameters:
                raise ValueError(
                    f"all {len(tensors)} parameters are frozen; use requires_grad_() for those "
                    "that are trained"
                )
            check_parameters(self._names, self.parameters, dtypes, sharded=mesh is not None)
            for name, parameter in zip(self._names, self.parameters, strict=True):
                if not parameter.numel():
                    raise ValueError(f"{name} has no elements; leave it out")
        device = self.parameters[0].device
        # Means do not depend on the topology.
        self.network = Network(topologies.make("ring", comm.size), comm, device)
        self.owner = owner_of(comm)
        if mesh is not None:
            self.owner |= {"n_shards": shards.size, "shard": shards.rank}
        check_same_parameters(comm, self.parameters)
        check_same_everywhere(comm, {"the list of frozen parameters": [*self._frozen]})
        if mesh is not None:
            with comm.agreed():
                self._leave_out_empty_blocks()
        self.layout = Layout(memory(p).shape for p in self.parameters)
        self.dtype = working_dtype(self.parameters)
        self.gradient = torch.zeros(1, self.layout.size, device=device, dtype=self.dtype)
        self.mean = torch.zeros_like(self.gradient)
        self.gradients = self._views(self.gradient)
        self.means = self._views(self.mean)
        comm.broadcast_tensors([*map(memory, self.parameters)])
        warn_of_buffers(comm, self.parameters)
        checked_barrier_at_exit(comm, lambda: None)

    def _views(self, flat: Tensor) -> list[Tensor]:
        tensors = zip(self.layout.tensors(flat[0]), self.parameters, strict=True)
        return [tensor.view(memory(parameter).shape) for tensor, parameter in tensors]

    def _leave_out_empty_blocks(self) -> None:
        found = list(zip(self._names, self.parameters, strict=True))
        self._without_rows = [p for _, p in found if not memory(p).numel()]
        self._names = [name for name, p in found if memory(p).numel()]
        self.parameters = [p for _, p in found if memory(p).numel()]
        if not self.parameters:
            raise ValueError("a shard has no rows of any parameter; use fewer shards")

    def loop_gradients(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the gradients p.grad, or their blocks, in the order of the parameters. Clear the
        gradients of frozen parameters.

        Raises ValueError if one is missing, sparse or of another dtype, for an optimizer of other
        parameters, and for a parameter that was frozen or released since construction.
        """
        for name, parameter in zip(self._names, self.parameters, strict=True):
            if is_frozen(parameter):
                raise ValueError(f"{name} was frozen after construction; construct this again")
        for name, parameter in self._frozen.items():
            if not is_frozen(parameter):
                raise ValueError(f"{name} was frozen at construction; construct this again")
        check_optimizer(optimizer, [*self.parameters, *self._without_rows])
        clear_frozen_gradients(optimizer)
        gradients = check_gradients(
            self.parameters, self._names, required=True, dtypes=self._dtypes
        )
        return [*map(memory, gradients)]


class Aggregator(Traffic):
    """The mean of the compressed gradients of a training loop over all processes.

    Attributes:
        flat: The parameters, a gradient and the mean of the workers.
    """

    def __init__(self, flat: Gradients, aggregation: Any):
        self.flat, self.network, self._aggregation = flat, flat.network, aggregation
        self.processes = flat.network.processes

    def collect(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return `Gradients.loop_gradients`, and set the learning rates of the next step.

        Raises ValueError for a momentum of the optimizer that does not fit the method's.
        """
        gradients, method = self.flat.loop_gradients(optimizer), self._aggregation
        if method.owns_momentum:
            check_momentum(optimizer, method.momentum, method.nesterov)
        rates: dict[int, float] = {}
        for group in optimizer.param_groups:
            rates |= dict.fromkeys(map(id, group["params"]), float(group.get("lr", 0.0)))
        method.at_learning_rate(*(rates[id(parameter)] for parameter in self.flat.parameters))
        return gradients

    def mean_of(self, gradients: Tensors) -> list[Tensor]:
        """Return the mean of gradients and errors, keep the new errors, and change no gradient."""
        return self.aggregate(gradients)

    def aggregate(self, gradients: Tensors) -> list[Tensor]:
        """Return the mean over all workers, which the next call overwrites.

        Gradients are in the order of the parameters. They are not changed.
        """
        torch._foreach_copy_(self.flat.gradients, list(gradients))
        self.network.run(self._aggregation.step(self.flat.gradient, self.flat.mean))
        return self.flat.means

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits of a worker's messages for it, as compressed at present.

        For PowerSGD, elements over elements per step, on average.
        """
        return float(self._aggregation.compression_rate)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, such as the error of this worker."""
        return {
            **self.flat.owner,
            "aggregation": self._aggregation.state_dict(),
            "network": self.network.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`.

        Raises ValueError if it does not fit, or comes from another worker or number of workers.
        """
        check_owner(state, self.flat.owner)
        self._aggregation.load_state_dict(state["aggregation"])
        self.network.load_state_dict(state["network"])


@not_compiled
@torch.no_grad()
def optimizer_step(
    optimizer: torch.optim.Optimizer,
    aggregator: Aggregator,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """A step of the optimizer with the mean of all workers' gradients by an aggregator.

    Takes the gradients p.grad and clears them. Errors are kept apart.

    Args:
        aggregator: `PowerSGD`, `DGC`, `ErrorFeedback` or `SignSGD`.
        scaler: A GradScaler that has unscaled the gradients. If they are not finite in a process,
            all processes skip the step, and errors stay as they are.

    Raises:
        ValueError: Before anything is sent, for a parameter with a missing or sparse gradient, and
            for an optimizer of other parameters, or with momentum where the method owns it.
    """
    gradients = aggregator.collect(optimizer)
    left_out = False
    if scaler is not None and scaler.is_enabled():
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        left_out = not all(aggregator.processes.everywhere(finite))
    try:
        if not left_out:
            torch._foreach_copy_(gradients, aggregator.mean_of(gradients))
            optimizer.step()
    finally:
        torch._foreach_zero_(gradients)
