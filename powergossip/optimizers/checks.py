"""Checks of a training loop's parameters and gradients, and a common start of all workers."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from powergossip import topologies
from powergossip.network import Network, Processes
from powergossip.parameters import matrix_shape

Params = Iterable[Tensor | tuple[str, Tensor]]  # model.parameters() or model.named_parameters()


def named(params: Params) -> tuple[list[str], list[Tensor]]:
    """What errors call the parameters, and the parameters. ValueError if there are none."""
    names: list[str] = []
    tensors: list[Tensor] = []
    for number, entry in enumerate(params):
        if isinstance(entry, tuple):
            name, tensor = entry
            names.append(f'parameter "{name}"')
        else:
            tensor = entry
            names.append(f"parameter {number} of shape {tuple(tensor.shape)}")
        tensors.append(tensor)
    if not tensors:
        raise ValueError("there are no parameters; give model.parameters()")
    return names, tensors


def refuse_odd(names: Sequence[str], params: Sequence[Tensor]) -> None:
    """Raises ValueError for parameters that cannot be compressed."""
    for name, parameter in zip(names, params, strict=True):
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}; use torch.float32")
        if parameter.layout != torch.strided:
            raise ValueError(f"{name} is {parameter.layout}; use a dense tensor")
        if parameter.device != params[0].device:
            raise ValueError(
                f"{name} is on {parameter.device}, others on {params[0].device}; use one device"
            )
        if not prod(matrix_shape(parameter.shape)):
            raise ValueError(f"{name} has no numbers; leave it out")


def refuse_others(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    """Raises ValueError unless the optimizer is of these parameters."""
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if theirs != {id(p) for p in params}:
        raise ValueError(
            f"the optimizer has {len(theirs)} parameters that are not the {len(params)} whose "
            "gradients are averaged; make both of the same list"
        )


def gradient_of(name: str, parameter: Tensor) -> Tensor:
    """p.grad. Raises ValueError if there is none, or it is sparse."""
    gradient = parameter.grad
    if gradient is None:
        raise ValueError(f"{name} has no gradient; call backward first, or leave it out")
    if gradient.layout != torch.strided:
        raise ValueError(f"{name} has a sparse gradient; use sparse=False")
    return gradient


def network_of_processes(who: Processes, device: torch.device) -> Network:
    """All processes, one worker each. The gradients' mean knows no graph, so any will do."""
    return Network(topologies.make("ring", who.size), who, device)


def start_together(who: Processes, params: Sequence[Tensor]) -> None:
    """Give all workers process 0's parameters. Raises BadInput if the shapes differ."""
    shapes = [tuple(p.shape) for p in params]
    first = who.broadcast(shapes)

    def check() -> None:
        if shapes != first:
            raise ValueError(
                "the processes have different models: "
                f"{len(shapes)} parameters here, {len(first)} in process 0, or other shapes"
            )

    who.agree(check)
    if who.size == 1:
        return
    with torch.no_grad():
        for parameter in params:
            value = parameter.detach().cpu() if who.rank == 0 else None
            parameter.copy_(who.broadcast(value))  # type: ignore[arg-type]  # rank 0 has one
