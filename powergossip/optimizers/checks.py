"""Checks of a training loop's parameters and gradients, and a common start of all workers."""

import gc
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from powergossip.errors import BadInput
from powergossip.network import Processes
from powergossip.parameters import PRECISIONS, listed
from powergossip.state_trees import sha256

# A decorator of functions that communicate, which torch.compile then leaves as they are. The public
# torch.compiler.disable imports torch._dynamo at once, which takes a second.
not_compiled = _disable_dynamo

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*PRECISIONS, *HALF)  # of trainable parameters

Params = Iterable[Tensor | tuple[str, Tensor]]  # model.parameters() or model.named_parameters()


def named(params: Params) -> tuple[list[str], list[Tensor]]:
    """Return the parameters' names in error messages, and the parameters."""
    names: list[str] = []
    tensors: list[Tensor] = []
    for index, entry in enumerate(params):
        if isinstance(entry, tuple):
            name, tensor = entry
            names.append(f'parameter "{name}"')
        else:
            tensor = entry
            shape = "" if is_lazy(tensor) else f" of shape {tuple(tensor.shape)}"
            names.append(f"parameter {index}{shape}")
        tensors.append(tensor)
    return names, tensors


def working_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """float64 if one of the tensors has it, otherwise float32, for half precision too."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def is_frozen(tensor: Tensor) -> bool:
    """True for a parameter of a model that is not trained. Plain tensors are not frozen."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def clear_frozen_gradients(optimizer: torch.optim.Optimizer) -> None:
    """p.grad ← None for frozen parameters. torch's optimizers would apply one from before."""
    for group in optimizer.param_groups:
        for parameter in filter(is_frozen, group["params"]):
            parameter.grad = None


def check_gradients(
    parameters: Sequence[Tensor],
    names: Sequence[str] | None = None,
    *,
    required: bool,
    dtypes: Collection[torch.dtype] = (torch.float32,),
) -> list[Tensor]:
    """Return the gradients p.grad.

    Args:
        names: Names in error messages, by default the names from `named`.
        required: True if a missing gradient is an error. Otherwise the result has the others only.

    Raises:
        ValueError: For a gradient that is sparse or of another dtype.
    """
    gradients = []
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            if not required:
                continue
            fault = "has no gradient; call backward first, or leave it out"
        elif gradient.layout is not torch.strided:
            fault = "has a sparse gradient; use sparse=False in its embedding layer"
        elif gradient.dtype not in dtypes:
            fault = f"has a gradient of {gradient.dtype}; use {listed(dtypes)}"
        else:
            gradients.append(gradient)
            continue
        raise ValueError(f"{(named(parameters)[0] if names is None else names)[index]} {fault}")
    return gradients


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless the optimizer has exactly these parameters, and frozen ones."""
    theirs = {
        id(p) for group in optimizer.param_groups for p in group["params"] if not is_frozen(p)
    }
    if theirs != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer has {len(theirs)} parameters that are not the {len(parameters)} whose "
            "gradients are averaged; use the same list for both"
        )


def check_same_everywhere(processes: Processes, facts: Mapping[str, Any]) -> None:
    """Raise BadInput in all processes unless these facts, by their names, are equal in all."""
    processes.check_same(
        facts,
        "{key} differs between processes: {other} in process {process}, {first} in process 0; use "
        "the same in all",
    )


def check_same_parameters(processes: Processes, parameters: Sequence[Tensor]) -> None:
    """Raise BadInput in all processes unless the number, shapes and dtypes are equal in all, and
    the same are frozen."""
    facts: dict[str, Any] = {"the number of parameters": len(parameters)}
    for index, parameter in enumerate(parameters):
        kind = "frozen" if is_frozen(parameter) else str(parameter.dtype)
        facts[f"parameter {index}"] = f"{kind} of shape {tuple(parameter.shape)}"
    check_same_everywhere(processes, facts)


def check_shapes(shapes: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise BadInput unless these lists of shapes, in a state and here, are equal."""
    if len(shapes) != len(expected):
        raise BadInput(
            f"{len(shapes)} parameters in the state, {len(expected)} here; use the same model"
        )
    for index, (shape, other) in enumerate(zip(shapes, expected, strict=True)):
        if tuple(shape) != tuple(other):
            raise BadInput(
                f"parameter {index} is of shape {tuple(shape)} in the state, {tuple(other)} here; "
                "use the same model"
            )


def owner_of(processes: Processes) -> dict[str, int]:
    """The worker of this process, and the number of workers, for its states."""
    return {"n_workers": processes.size, "worker": processes.rank}


def check_owner(saved: Mapping[str, Any], owner: Mapping[str, int]) -> None:
    """Raise ValueError if a saved state names another owner than this one."""
    for key, own in owner.items():
        if saved.get(key) != own:
            raise ValueError(
                f"the state has {key}={saved.get(key)} (here {own}); save the state of every "
                "process, and load it into as many"
            )


def _modules_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The modules that have one of these parameters, in their submodules, too."""
    own = {id(parameter) for parameter in parameters}
    return [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        and "_modules" in module.__dict__  # nn.Module.__init__ was called
        and any(id(parameter) in own for parameter in module.parameters())
    ]


def warn_of_buffers(processes: Processes, parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Warn, in process 0, if a buffer in the modules of these parameters, which are returned,
    differs elsewhere."""
    modules = _modules_of(parameters) if processes.size > 1 else []
    inner = {id(child) for module in modules for child in module.children()}
    digests: dict[str, set[str]] = {}
    for module in modules:
        for name, buffer in () if id(module) in inner else module.named_buffers():
            if type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta:
                digests.setdefault(name, set()).add(sha256(buffer))
    everywhere = processes.everywhere(digests)
    differing = [k for k, own in digests.items() if any(d.get(k, own) != own for d in everywhere)]
    if differing and processes.rank == 0:
        warnings.warn(
            f'buffer "{differing[0]}" differs between processes, and is not made equal; if it '
            "should be, call torch.manual_seed(0) before the model is made, or "
            "model.load_state_dict(powergossip.network.processes().broadcast(model.state_dict()))",
            stacklevel=2,
        )
    return modules


def check_own_gradients(groups: Iterable[Mapping[str, Any]], n_workers: int) -> None:
    """Raise RuntimeError if DistributedDataParallel averages gradients over that many processes."""
    if n_workers == 1 or not dist.is_initialized():
        return
    for module in _modules_of(p for group in groups for p in group["params"]):
        if (
            isinstance(module, DistributedDataParallel)
            and not module._comm_hooks
            and module.process_group.size() == n_workers
        ):
            raise RuntimeError(
                "the model is in DistributedDataParallel, which averages the gradients of all "
                "processes, so that gossip has nothing to do: leave the model unwrapped (with "
                "accelerate: do not prepare it), or register gossip_hook with a GossipState"
            )
