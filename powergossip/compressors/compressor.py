"""The interface of compressors, and the types in it. See compressors/__init__.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.parameters import Layout, Stack
from powergossip.replica_group import Shards

BySize = Callable[[int], float]  # the number of elements of a tensor → a rate


@dataclass(frozen=True)
class Levels:
    """`count` integers within ±127: first, first + step, …. Their indices start at 0."""

    first: int
    step: int
    count: int

    @property
    def bits(self) -> int:
        """Bits per level: ⌈log₂ count⌉."""
        return int(self.count - 1).bit_length()


class Field(NamedTuple):
    """A part of a message: `length` elements of one type, or of one kind of levels."""

    kind: torch.dtype | Levels
    length: int


class Senders:
    """The senders of messages `[*]` and the step, from which random numbers are derived.

    Args:
        key: Key of the seed.
        workers: Indices of the senders, int64 `[*]`.
        counter: Index of the step.
        layout: Layout of the D elements.
    """

    def __init__(self, key: Tensor, workers: Tensor, counter: int, layout: Layout):
        self.key, self.counter = key, counter
        self._workers, self._layout = workers, layout

    @cached_property
    def uniform(self) -> Tensor:
        """Uniform on [0, 1), for rounding, drawn at the first access: float32 `[*, D]`."""
        keys = randomness.bits(self.key, 0, (1,), self._workers)[..., 0]
        return self._layout.uniform(keys, self.counter)


class Stream(NamedTuple):
    """Random numbers of the layers of a stack, the same at sender and receiver, and norms.

    Each worker has one stream of D random numbers for each counter, and all workers share another.
    A matrix uses the part of either that corresponds to its elements among the D.

    Attributes:
        senders: The senders `[*]`.
        stack: The stack of whole matrices.
        own: The same, or this process' rows of it.
        shards: The processes over which rows are divided, or None.
        kept: Values of `once`, for one counter.
    """

    senders: Senders
    stack: Stack
    own: Stack
    shards: Shards | None
    kept: dict[str, Tensor]

    @property
    def entries(self) -> int:
        """The number of entries of a whole matrix."""
        return self.stack.rows * self.stack.columns

    @property
    def first(self) -> int:
        """The position of this process' first entry in the whole matrix."""
        return (
            0
            if self.shards is None
            else self.shards.rows(self.stack.rows).start * self.stack.columns
        )

    def norm(self, v: Tensor, order: float) -> Tensor:
        """The 1-, 2- or ∞-norm of each whole matrix, for entries v [*, entry]: [*, 1]."""
        if self.shards is None:
            return torch.linalg.vector_norm(v, order, dim=-1, keepdim=True)
        if order == torch.inf:
            padded = torch.nn.functional.pad(v.abs(), (0, 1))  # a block may be without rows
            return self.shards.max_(padded.amax(-1, keepdim=True))
        own = torch.linalg.vector_norm(v, order, dim=-1, keepdim=True).double()
        total = self.shards.sum_(own.pow_(order))
        return total.pow_(1 / order).to(v.dtype)

    def uniform(self) -> Tensor:
        """Uniform float32 `[*, layer, rows · columns]` on [0, 1), for rounding."""
        of_stack = self.senders.uniform[..., self.own.start : self.own.stop]
        return of_stack.unflatten(-1, (self.own.layers, self.own.rows * self.own.columns))

    def shared_bits(self, count: int) -> Tensor:
        """Random int64 [layer, count], the same for all senders."""
        stack, device = self.stack, self.senders.key.device
        starts = torch.arange(stack.start, stack.stop, stack.rows * stack.columns, device=device)
        return randomness.bits(self.senders.key, 1 + self.senders.counter, (count,), starts)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """make(), cached per step, for values shared by all senders."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


class Compressor(Protocol):
    """Conversion of matrices to the fields of messages, and back.

    All attributes may be left out.

    Attributes:
        divides: How a matrix whose rows are divided over processes is compressed: "rows", each
            process its own, with norms of `Stream.norm`; or "whole", all of them the same message.
            If left out, such matrices are rejected.
        linear: True if C is a linear map that is the same for all workers, with floats for fields.
            See compressors/__init__.py.
        stable_rate: Default stable_rate(rows, columns) of γ max_i (1 − w_ii) for CHOCO-Gossip with
            C of a matrix of this shape. It converges on every undirected graph. If E C(v) = δ v, it
            is at most δ.
        undirected: True if such a rate does not exist for directed graphs.
        gossip_rate: Default of γ itself in its place, a number or a function of a tensor's number
            of elements. With neither, γ = 1.
        copy_rate: Default copy rate, a number or such a function, 1 if left out.
        deepsqueeze_rate: Largest default γ of DeepSqueeze, 0.1 if left out.
    """

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        """The fields of a matrix of this shape."""
        ...

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        """The fields `[*, length]` of v `[*, row, column]`, float32.

        Integers may have a wider type, which the codec narrows. Levels are given by their indices
        0, 1, … in any type. The fields of a matrix with a NaN decompress to at least one NaN, so
        that divergence stays visible.
        """
        ...

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        """out ← out + C(v), for out `[*, row, column]` that is contiguous in its last two axes.

        Elementwise arithmetic only. Each element of C(v) is rounded before it is added. Levels are
        given by their values, float32.
        """
        ...


def nan_if_not_finite(v: Tensor) -> Tensor:
    """0 for a row of v `[*, n]` that is finite, NaN for any other: `[*, 1]`."""
    return v.abs().amax(-1, keepdim=True).mul_(0)
