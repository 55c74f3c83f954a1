"""Parameters that are DTensors, sharded over the processes of a replica, as by FSDP2.

Of each, this process has a block of rows.

torch.distributed.tensor and FSDP2 are imported where they are used: together they take as long as
torch, and most programs have no sharded parameters.
"""

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from powergossip import checks
from powergossip.errors import BadInput
from powergossip.network import Processes, processes_of, processes_of_replicas
from powergossip.parameters import Layout
from powergossip.replica_group import Shards
from powergossip.sharded_layout import BlockLayout, ShardedLayout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True if a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def memory(tensor: Tensor) -> Tensor:
    """The memory that this process has of a tensor: all of it, or a block of rows."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def shaped_like(own: Tensor, parameter: Tensor) -> Tensor:
    """A block of this process as a tensor of the same kind as its parameter."""
    if not is_distributed(parameter):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first tensor of each pair, in one call."""
    listed = list(pairs)
    if listed:
        torch._foreach_copy_([pair[0] for pair in listed], [pair[1] for pair in listed])


class Sharding:
    """The shards of a replica, and how its parameters are laid out.

    Args:
        per_shard: True if each block counts as a separate tensor.
    """

    def __init__(self, shards: Shards, per_shard: bool):
        self.shards, self.per_shard = shards, per_shard

    def facts(self) -> dict[str, Any]:
        """Values that must be equal where a state is loaded."""
        facts: dict[str, Any] = {"per_shard": self.per_shard}
        return facts | {"shards": self.shards.size} if self.per_shard else facts

    def saved(self, state: Mapping[str, Any], own: int) -> dict[str, Any]:
        """The state of `Averaged`, where all tensors are DTensors or equal in all shards.

        `own` is the number of bits inside before that state was made, which is not counted.
        """
        network = dict(state["network"])
        counts = torch.stack([network.pop("bits"), network.pop("messages")])
        counts = torch.cat([counts, torch.full_like(counts[:1], own)])
        everywhere = self.shards.gather(counts.to(self.shards.device))
        self.shards.bits = own
        averaging: Any = state["averaging"]
        if self.per_shard:
            averaging = {f"shard {self.shards.rank}": averaging}
        return {
            **state,
            "averaging": averaging,
            "network": network | {"of_shards": everywhere[..., 0].tolist()},
        }

    def loaded(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state that `Averaged` loads, from that which `saved` returned in all shards.

        With another number of shards, the sums of counts stay as they are.
        """
        network, averaging = dict(saved["network"]), saved["averaging"]
        counts = torch.tensor(network.pop("of_shards"))
        if len(counts) != self.shards.size:
            total, size = counts.sum(0), self.shards.size
            counts = (total // size).repeat(size, 1)
            counts[0] += total % size
        bits, messages, inside = counts[self.shards.rank]
        self.shards.bits = int(inside)
        if self.per_shard:
            averaging = averaging[f"shard {self.shards.rank}"]
        return {
            **saved,
            "averaging": averaging,
            "network": network | {"bits": bits[None], "messages": messages[None]},
        }

    def layout(self, whole: Layout) -> Layout:
        """The layout of this process' blocks of the parameters."""
        sharded = ShardedLayout(whole, self.shards)
        return BlockLayout(sharded) if self.per_shard else sharded


def check_sharding_options(mesh: Any, per_shard: bool) -> None:
    """Raise ValueError for options that do not fit."""
    checks.check("per_shard", per_shard, isinstance(per_shard, bool), "True or False")
    if mesh is None and per_shard:
        raise ValueError("per_shard=True: use it with mesh=, for sharded parameters")


def replicas(
    mesh: Any, names: Sequence[str], parameters: Sequence[Tensor], group: Any = None
) -> tuple[Processes, Shards]:
    """The processes with this shard of all replicas, and the shards of this replica.

    Args:
        mesh: The dimension of a mesh along which replicas differ.
        group: What was given as process_group, which must be None.

    Raises:
        ValueError: For another mesh, and unless all parameters are sharded along one other
            dimension.
    """
    with processes_along(mesh, group).agreed():
        shards = _mesh_of_shards(mesh, names, parameters)
    found = processes_of_replicas(mesh.get_group(), shards.get_group())
    return found, Shards(shards, memory(parameters[0]).device)


def processes_along(mesh: Any, group: Any = None) -> Processes:
    """The processes of a mesh of one dimension. Raises ValueError for another."""
    if group is not None:
        raise BadInput("process_group: leave it out with mesh=, which has its own processes")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        found = mesh if isinstance(mesh, DeviceMesh | str) else type(mesh).__name__
        raise BadInput(
            f"mesh={found!r}: use one dimension of a DeviceMesh, that of the replicas, such as "
            "mesh['replica']"
        )
    return processes_of(mesh.get_group())


def _mesh_of_shards(
    mesh: DeviceMesh, names: Sequence[str], parameters: Sequence[Tensor]
) -> DeviceMesh:
    """The mesh over which all parameters are sharded."""
    first: DeviceMesh | None = None
    for name, parameter in zip(names, parameters, strict=True):
        if not is_distributed(parameter):
            raise ValueError(
                f"{name} is not sharded; use fully_shard(model, mesh=mesh['shard']) before the "
                "optimizer is made, or leave mesh= out"
            )
        its_mesh, placements = parameter.device_mesh, parameter.placements
        if its_mesh.ndim != 1:
            raise ValueError(
                f"{name} is on a mesh of {its_mesh.ndim} dimensions; use "
                "fully_shard(model, mesh=mesh['shard']), since gossip takes the place of the "
                "all-reduce between replicas"
            )
        placement = placements[0]
        if not placement.is_shard(0):
            raise ValueError(f"{name} has the placement {placement}; use Shard(0), as fully_shard")
        if first is None:
            ranks = (set(dist.get_process_group_ranks(m.get_group())) for m in (mesh, its_mesh))
            if set.intersection(*ranks) != {dist.get_rank()}:
                raise ValueError(
                    f"{name} is sharded along {its_mesh}, which is no other dimension than "
                    f"mesh={mesh}; use two dimensions of one mesh, such as mesh['shard'] in "
                    "fully_shard and mesh['replica'] here"
                )
            first = its_mesh
        elif its_mesh != first:
            raise ValueError(f"{name} is on {its_mesh}, others on {first}; use one mesh")
    if first is None:
        raise ValueError("there are no parameters; use model.parameters()")
    return first


def reshard_modules() -> None:
    """Free the whole parameters that a forward pass without a backward pass has left in modules of
    FSDP2, which would otherwise compute with them after the blocks have changed."""
    from torch.distributed.fsdp import FSDPModule

    for module in gc.get_objects():
        if issubclass(type(module), FSDPModule):
            module.reshard()


def initial_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer that has not made a step, with all entries that it has after one.

    torch.distributed.checkpoint loads into the entries that exist. The values come from a step with
    a learning rate of 0, which leaves the optimizer as before.
    """
    groups = optimizer.param_groups
    before = [(group["lr"], [p.grad for p in group["params"]]) for group in groups]
    for group in groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    finally:
        for group, (rate, gradients) in zip(groups, before, strict=True):
            group["lr"] = rate
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.grad = gradient
    state = optimizer.state_dict()
    optimizer.state.clear()
    return state
