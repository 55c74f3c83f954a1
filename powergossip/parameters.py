"""The flat buffer that holds the parameters of all hosted workers, and its views.

Axes: worker (hosted by this process), layer (matrices of one shape), row, column; D numbers a
worker. `x[worker, D]` is the memory; models' parameters are views into it, and so are the matrices
that compression works on. Tensors are laid out so that

- matrices of one shape lie next to each other: one batched product serves them all;
- shapes come in descending order of min(rows, columns): what a rank r can compress
  (min(rows, columns) > r) is a prefix, whatever r is;
- vectors follow (an n-vector is an n × 1 matrix of rank 1: nothing to compress), and of these
  the ones that weight decay spares come last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

NORMALIZATION_LAYERS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class Stack:
    """The matrices of one shape: `layers` of them, [rows, columns] each, from position `start`."""

    rows: int
    columns: int
    layers: int
    start: int

    @property
    def stop(self) -> int:
        """The position after the last matrix."""
        return self.start + self.layers * self.rows * self.columns


class Layout:
    """Where each tensor of a worker lies in its D numbers.

    A tensor of two or more dimensions is the matrix [first dimension, all the others]
    (Vogels et al. 2019, arXiv:1905.13727, § 3). `decayed` marks, tensor by tensor, what weight
    decay applies to; None: all.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], decayed: Sequence[bool] | None = None):
        self.shapes = [tuple(shape) for shape in shapes]
        decayed = [True] * len(self.shapes) if decayed is None else decayed
        if len(decayed) != len(self.shapes):
            raise ValueError(f"{len(self.shapes)} shapes, but {len(decayed)} marks of weight decay")

        def place(index: int) -> tuple[object, ...]:
            rows, columns = matrix_shape(self.shapes[index])
            is_vector = len(self.shapes[index]) < 2
            return is_vector, is_vector and not decayed[index], -min(rows, columns), rows, columns

        order = sorted(range(len(self.shapes)), key=lambda index: (place(index), index))
        self.starts = [0] * len(self.shapes)  # position of each tensor, in the order given
        self.stacks: list[Stack] = []
        position = 0
        for index in order:
            shape = self.shapes[index]
            self.starts[index] = position
            if len(shape) >= 2:
                rows, columns = matrix_shape(shape)
                last = self.stacks[-1] if self.stacks else None
                if last and (last.rows, last.columns) == (rows, columns):
                    self.stacks[-1] = Stack(rows, columns, last.layers + 1, last.start)
                else:
                    self.stacks.append(Stack(rows, columns, 1, position))
            position += prod(shape)
        self.size = position  # D
        self.matrices_size = self.stacks[-1].stop if self.stacks else 0

    def compressible(self, rank: int) -> list[Stack]:
        """The stacks that a rank can compress, min(rows, columns) > rank: a prefix of `stacks`."""
        return [stack for stack in self.stacks if min(stack.rows, stack.columns) > rank]

    def spans(self, which: Iterable[int]) -> list[slice]:
        """The positions of some tensors (indices in the order given), neighbors merged."""
        pieces = sorted((self.starts[i], self.starts[i] + prod(self.shapes[i])) for i in which)
        merged: list[list[int]] = []
        for start, stop in pieces:
            if merged and merged[-1][1] == start:
                merged[-1][1] = stop
            else:
                merged.append([start, stop])
        return [slice(start, stop) for start, stop in merged]

    def tensors(self, flat: Tensor) -> list[Tensor]:
        """Views of one worker's numbers [D] in the tensors' own shapes, in the order given."""
        return [
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix; a vector or number is a single column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def batches(x: Tensor, stack: Stack) -> list[Tensor]:
    """Views [batch, row, column] of a stack's matrices in x [worker, D], as few as strides allow.

    With one worker all layers are one batch; with several, each layer is a batch over workers.
    """
    size = stack.rows * stack.columns
    if x.shape[0] == 1:
        return [x[0, stack.start : stack.stop].view(stack.layers, stack.rows, stack.columns)]
    return [
        x[:, start : start + size].unflatten(1, (stack.rows, stack.columns))
        for start in range(stack.start, stack.stop, size)
    ]


def take_out(x: Tensor, spans: Iterable[slice], packed: Tensor) -> None:
    """Move the numbers of these spans of x [worker, D] to packed [worker, ...], one span behind the
    other from its start; x is zero there afterwards."""
    start = 0
    for span in spans:
        stop = start + span.stop - span.start
        packed[:, start:stop] = x[:, span]
        x[:, span] = 0
        start = stop


def put_in(packed: Tensor, spans: Iterable[slice], x: Tensor) -> None:
    """Write to the spans of x [worker, D] what lies one behind the other in packed."""
    start = 0
    for span in spans:
        stop = start + span.stop - span.start
        x[:, span] = packed[:, start:stop]
        start = stop


class Parameters:
    """The parameters, gradients and floating-point buffers of the hosted workers' models.

    x        # [worker, D]   the models' parameters are views of it
    grad     # [worker, D]   their .grad are views of it
    buffers  # [worker, B]   running statistics and the like; never gossiped

    The models (one a worker, of the same architecture) are changed to use this memory. Their
    gradients must be cleared with `grad.zero_()`, not by setting them to None.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device | None = None):
        self.models = list(models)
        first = self.models[0]
        self.names = [name for name, _ in first.named_parameters()]
        spared = {
            parameter
            for module in first.modules()
            if isinstance(module, NORMALIZATION_LAYERS)
            for parameter in module.parameters(recurse=False)
        }
        self.decayed = [parameter not in spared for parameter in first.parameters()]
        self.layout = Layout((p.shape for p in first.parameters()), self.decayed)
        self.buffer_layout = Layout(b.shape for b in _float_buffers(first).values())

        workers = len(self.models)
        self.x = torch.empty(workers, self.layout.size, device=device)
        self.grad = torch.zeros_like(self.x)
        self.buffers = torch.empty(workers, self.buffer_layout.size, device=device)
        for worker, model in enumerate(self.models):
            model.to(device)
            views = self.layout.tensors(self.x[worker])
            grads = self.layout.tensors(self.grad[worker])
            for parameter, view, grad in zip(model.parameters(), views, grads, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
                parameter.grad = grad
            float_buffers = _float_buffers(model)
            views = self.buffer_layout.tensors(self.buffers[worker])
            for (name, buffer), view in zip(float_buffers.items(), views, strict=True):
                view.copy_(buffer)
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = view

    def decay_spans(self) -> list[slice]:
        """Positions of D that weight decay applies to: all but normalization layers' own."""
        return self.layout.spans(i for i, decayed in enumerate(self.decayed) if decayed)


def _float_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in model.named_buffers() if b.is_floating_point()}
