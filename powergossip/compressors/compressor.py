"""The interface of compressors, and the types in it. See compressors/__init__.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.parameters import Stack

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
        return (self.count - 1).bit_length()


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
        size: Number D of elements.
    """

    def __init__(self, key: Tensor, workers: Tensor, counter: int, size: int):
        self.key, self.counter = key, counter
        self._workers, self._size = workers, size

    @cached_property
    def uniform(self) -> Tensor:
        """Uniform on [0, 1), for rounding, drawn at the first access: float32 `[*, D]`."""
        keys = randomness.bits(self.key, 0, (1,), self._workers)[..., 0]
        return randomness.uniform(keys, self.counter, self._size)


class Stream(NamedTuple):
    """Random numbers of the layers of a stack, the same at sender and receiver.

    Each worker has one stream of D random numbers for each counter, and all workers share another.
    A matrix uses the part of either that corresponds to its elements among the D.
    """

    senders: Senders  # [*]
    stack: Stack
    kept: dict[str, Tensor]  # values of `once`, for one counter

    def uniform(self) -> Tensor:
        """Uniform float32 `[*, layer, rows · columns]` on [0, 1), for rounding."""
        of_stack = self.senders.uniform[..., self.stack.start : self.stack.stop]
        return of_stack.unflatten(-1, (self.stack.layers, -1))

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
        linear: Whether C is a linear map that is the same for all workers, with floats for fields.
            See compressors/__init__.py.
        stable_rate: Default stable_rate(rows, columns) of γ max_i (1 − w_ii) for CHOCO-Gossip with
            C of a matrix of this shape. It converges on every graph.
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
