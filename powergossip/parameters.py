"""The flat buffer of all parameters of the hosted workers, and its views.

Axes: worker (hosted by this process), layer (among matrices of one shape), row, column. D is the
number of parameters of a worker. `x[worker, D]` is the memory. The models' parameters are views of
it, and so are the matrices that are compressed. Each row begins at a multiple of 64 bytes: the bits
of a matrix product may depend on the alignment of its operands, and a worker's bits must not depend
on its row. The order of the tensors:

- Matrices of one shape are adjacent, so that one batched product serves them all.
- Shapes are in descending order of min(rows, columns), so that the matrices compressible with rank
  r, those with min(rows, columns) > r, are a prefix for every r.
- Vectors follow: an n × 1 matrix has rank 1 and cannot be compressed. Those that are exempt from
  weight decay come last.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from powergossip import checks, randomness

if TYPE_CHECKING:
    from powergossip.replica_group import Shards

NORMALIZATION_LAYERS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
PRECISIONS = (torch.float32, torch.float64)  # of models


@dataclass(frozen=True)
class Stack:
    """The matrices of one shape: `layers` of them, [rows, columns] each, from index `start`."""

    rows: int
    columns: int
    layers: int
    start: int

    @property
    def stop(self) -> int:
        """The index after the last matrix."""
        return self.start + self.layers * self.rows * self.columns


class Layout:
    """The index ranges of a worker's tensors in its D parameters.

    A tensor of two or more dimensions counts as the matrix [first dimension, all the others]
    (Vogels et al. 2019, arXiv:1905.13727, § 3).

    Args:
        decayed: For each tensor, True if weight decay applies. None means all.

    Attributes:
        stacks: The matrices of each shape, and `vectors` the vectors, as matrices of one column.
        shards: The processes over which each tensor is divided, see ShardedLayout.
    """

    shards: "Shards | None" = None

    def __init__(self, shapes: Iterable[Sequence[int]], decayed: Sequence[bool] | None = None):
        self.shapes = [tuple(shape) for shape in shapes]
        for shape in self.shapes:
            checks.check("shape", shape, min(shape, default=0) >= 0, "sizes of 0 or more")
        decayed = [True] * len(self.shapes) if decayed is None else decayed
        if len(decayed) != len(self.shapes):
            raise ValueError(
                f"decayed has {len(decayed)} entries: use {len(self.shapes)}, one for each shape"
            )

        def order_key(index: int) -> tuple[object, ...]:
            rows, columns = matrix_shape(self.shapes[index])
            is_vector = len(self.shapes[index]) < 2
            return is_vector, is_vector and not decayed[index], -min(rows, columns), rows, columns

        order = sorted(range(len(self.shapes)), key=lambda index: (order_key(index), index))
        self.starts = [0] * len(self.shapes)  # first index of each tensor, in the order of `shapes`
        self.stacks: list[Stack] = []
        self.vectors: list[Stack] = []
        position = 0
        for index in order:
            shape = self.shapes[index]
            self.starts[index] = position
            found = self.stacks if len(shape) >= 2 else self.vectors
            rows, columns = matrix_shape(shape)
            if found and (found[-1].rows, found[-1].columns) == (rows, columns):
                found[-1] = Stack(rows, columns, found[-1].layers + 1, found[-1].start)
            else:
                found.append(Stack(rows, columns, 1, position))
            position += prod(shape)
        self.size = position  # D
        self.matrices_size = self.stacks[-1].stop if self.stacks else 0

    @property
    def whole(self) -> "Layout":
        """The layout of the whole tensors, where a worker's tensors are divided over processes."""
        return self

    def local(self, stack: Stack) -> Stack:
        """The part of a stack of whole tensors that this process has."""
        return stack

    def select(self, which: Iterable[int]) -> "Layout":
        """The layout of some of the tensors, in this order. They may be repeated."""
        return Layout(self.shapes[i] for i in which)

    def norms(self, x: Tensor) -> Tensor:
        """The norm of each worker's x [worker, D]: [worker, 1]."""
        return x.norm(dim=1, keepdim=True)

    def uniform(self, keys: Tensor, counter: int) -> Tensor:
        """Uniform numbers for rounding, see randomness.uniform: float32 `[*keys.shape, D]`."""
        return randomness.uniform(keys, counter, self.size)

    def saved(self, x: Tensor) -> Any:
        """x [..., D] for a saved state: the same memory."""
        return x

    def load(self, x: Tensor, saved: Any) -> None:
        """x [..., D] ← its value in a saved state."""
        x.copy_(saved)

    def check_undivided(self, what: str) -> None:
        """Raise ValueError if tensors are divided over processes, which this method cannot have."""

    def compressible(self, rank: int) -> list[Stack]:
        """The stacks with min(rows, columns) > rank: a prefix of `stacks`."""
        return [stack for stack in self.stacks if min(stack.rows, stack.columns) > rank]

    def spans(self, which: Iterable[int]) -> list[slice]:
        """The index ranges of some tensors, with adjacent ranges merged.

        Args:
            which: Indices of tensors, in the order of `shapes`.
        """
        pieces = sorted((self.starts[i], self.starts[i] + prod(self.shapes[i])) for i in which)
        merged: list[list[int]] = []
        for start, stop in pieces:
            if merged and merged[-1][1] == start:
                merged[-1][1] = stop
            else:
                merged.append([start, stop])
        return [slice(start, stop) for start, stop in merged]

    def tensors(self, flat: Tensor) -> list[Tensor]:
        """Views of one worker's parameters [D] as its tensors, in the order of `shapes`."""
        return [
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor as a matrix. A vector or scalar is a single column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def batches(x: Tensor, stack: Stack) -> list[Tensor]:
    """The fewest views [batch, row, column] of a stack's matrices in x [worker, D].

    For one worker, all layers are one batch. For several, each layer is a batch over workers.
    """
    size = stack.rows * stack.columns
    if x.shape[0] == 1:
        return [x[0, stack.start : stack.stop].view(stack.layers, stack.rows, stack.columns)]
    return [
        x[:, start : start + size].unflatten(1, (stack.rows, stack.columns))
        for start in range(stack.start, stack.stop, size)
    ]


def take_out(x: Tensor, spans: Iterable[slice], packed: Tensor) -> None:
    """Move the elements of x [worker, D] in these spans to the start of packed [worker, ...].

    The spans are concatenated. The elements of x in the spans become zero.
    """
    start = 0
    for span in spans:
        stop = start + span.stop - span.start
        packed[:, start:stop] = x[:, span]
        x[:, span] = 0
        start = stop


def put_in(packed: Tensor, spans: Iterable[slice], x: Tensor) -> None:
    """Write the concatenated spans at the start of packed [worker, ...] to x [worker, D]."""
    start = 0
    for span in spans:
        stop = start + span.stop - span.start
        x[:, span] = packed[:, start:stop]
        start = stop


def complement(spans: Iterable[tuple[int, int]], size: int) -> list[slice]:
    """The positions of 0 … size − 1 outside of all spans (start, stop)."""
    found, position = [], 0
    for start, stop in [*sorted(spans), (size, size)]:
        if position < start:
            found.append(slice(position, start))
        position = stop
    return found


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that require a gradient and have elements, by name."""
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and (is_lazy(p) or p.numel())}


def check_parameters(
    names: Sequence[str],
    parameters: Sequence[Tensor],
    dtypes: Collection[torch.dtype] = (torch.float32,),
    hint: str = "for instance by model.float()",
    sharded: bool = False,
) -> None:
    """Raise ValueError unless all are dense tensors of these dtypes on one device, each in its own
    memory.

    Args:
        hint: Remedy in the error about parameters in other dtypes, apart from complex ones.
        sharded: True if they may be DTensors.
    """
    first_at: dict[int, int] = {}  # address → index
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet; run a batch through the model first")
        if type(parameter.data) is not Tensor and not sharded:
            raise ValueError(
                f"{name} is a {type(parameter.data).__name__}; use plain tensors, whole in every "
                "process, or GossipOptimizer with mesh= for sharded ones"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"{name} is sparse ({parameter.layout}); use dense parameters")
        if parameter.is_complex():
            raise ValueError(
                f"{name} is {parameter.dtype}; use a real parameter p of the shape "
                f"{[*parameter.shape, 2]}, and torch.view_as_complex(p) in forward"
            )
        if parameter.dtype not in dtypes:
            raise ValueError(f"{name} is {parameter.dtype}; use {listed(dtypes)}, {hint}")
        if parameter.is_meta:
            raise ValueError(f"{name} has no memory (device meta); use model.to_empty(...)")
        if parameter.device != parameters[0].device:
            raise ValueError(
                f"{name} is on {parameter.device}, others on {parameters[0].device}; use one device"
            )
        if parameter.numel() and not sharded:
            first = first_at.setdefault(parameter.data_ptr(), index)
            if first != index:
                raise ValueError(
                    f"{name} has the same memory as parameter {first}; give each tensor once"
                )


def listed(dtypes: Collection[torch.dtype]) -> str:
    """The dtypes in an error message."""
    return " or ".join(map(str, dtypes))


class Parameters:
    """The trained parameters, gradients and floating-point buffers of the hosted workers' models.

    The models, one per worker and all of one architecture, are changed to use this memory. Clear
    their gradients by `grad.zero_()`, not by setting them to None. Frozen parameters, those with
    requires_grad=False, and parameters without elements stay as they are and have no part in x:
    models must start with equal ones.

    Without gradients, `grad` has no rows.

    Attributes:
        x: Memory [worker, D] of the models' parameters, which are views of it. It has their dtype.
        grad: Memory [worker, D] of their gradients. Each .grad is a view of it.
        buffers: Memory [worker, B] of running statistics and the like, which are never gossiped.

    Raises:
        ValueError: For a model without a parameter to train, and unless parameters and
            floating-point buffers are all in float32 or all in float64.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device | None = None,
        gradients: bool = True,
    ):
        self.models = list(models)
        first = self.models[0]
        self.names = list(trained(first))
        if not self.names:
            raise ValueError(
                "no parameter of the model has elements and requires_grad=True; use one that does"
            )
        dtype = self._dtype(first)
        exempt = {
            parameter
            for module in first.modules()
            if isinstance(module, NORMALIZATION_LAYERS)
            for parameter in module.parameters(recurse=False)
        }
        self.decayed = [parameter not in exempt for parameter in trained(first).values()]
        self.layout = Layout((p.shape for p in trained(first).values()), self.decayed)
        self.buffer_layout = Layout(b.shape for b in _float_buffers(first).values())

        workers = len(self.models)
        self.x = aligned(workers, self.layout.size, dtype, device)
        self.grad = aligned(workers * gradients, self.layout.size, dtype, device).zero_()
        self.buffers = aligned(workers, self.buffer_layout.size, dtype, device)
        for worker, model in enumerate(self.models):
            model.to(device)
            views = self.layout.tensors(self.x[worker])
            for parameter, view in zip(trained(model).values(), views, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
            float_buffers = _float_buffers(model)
            views = self.buffer_layout.tensors(self.buffers[worker])
            for (name, buffer), view in zip(float_buffers.items(), views, strict=True):
                view.copy_(buffer)
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = view
            _batch_norm_without_cudnn(model)
        for model, row in zip(self.models, self.grad, strict=gradients):
            grads = self.layout.tensors(row)
            for parameter, grad in zip(trained(model).values(), grads, strict=True):
                parameter.grad = grad

    @staticmethod
    def _dtype(model: nn.Module) -> torch.dtype:
        """The dtype of a model. Raises ValueError, see the class."""
        parameters = list(trained(model).values())
        names = [f'parameter "{name}"' for name in trained(model)]
        hint = "for instance by model.float(); precision=bf16 computes in torch.bfloat16"
        check_parameters(names, parameters, PRECISIONS, hint)
        dtype = parameters[0].dtype
        others = f"the dtype of {names[0]}"
        check_parameters(names, parameters, (dtype,), others)
        for name, buffer in _float_buffers(model).items():
            if buffer.dtype != dtype:
                raise ValueError(f'buffer "{name}" is {buffer.dtype}; use {dtype}, {others}')
        return dtype

    def decay_spans(self) -> list[slice]:
        """The ranges of D with weight decay: all parameters outside normalization layers."""
        return self.layout.spans(i for i, decayed in enumerate(self.decayed) if decayed)


def aligned(rows: int, size: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Memory [rows, size], uninitialized. Each row begins at a multiple of 64 bytes."""
    per_line = 64 // dtype.itemsize
    width = -(-size // per_line) * per_line
    return torch.empty(rows, width, dtype=dtype, device=device)[:, :size]


def is_misaligned(view: Tensor) -> bool:
    """True if a view on a GPU begins in the middle of 16 bytes. Kernels for GPUs may read 16 bytes
    at a time without a check. cuDNN's batch norm does where channels are the last axis in memory.
    """
    return view.is_cuda and view.storage_offset() * view.itemsize % 16 != 0


def _batch_norm_without_cudnn(model: nn.Module) -> None:
    """Batch norm layers with misaligned tensors are computed by PyTorch's own kernels."""
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and any(map(is_misaligned, own)):
            module.register_forward_pre_hook(_pause_cudnn)
            module.register_forward_hook(_resume_cudnn, always_call=True)


_paused: list[bool] = []


def _pause_cudnn(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled layer has no kernel of cuDNN
        _paused.append(torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False


def _resume_cudnn(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        torch.backends.cudnn.enabled = _paused.pop()


def _float_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in model.named_buffers() if b.is_floating_point()}
