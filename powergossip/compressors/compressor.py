"""What a compressor is, and what it works with. See compressors/__init__.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.parameters import Stack


@dataclass(frozen=True)
class Levels:
    """Whole numbers within ±127, numbered from 0 on: first, first + step, …; `count` of them."""

    first: int
    step: int
    count: int

    @property
    def bits(self) -> int:
        """That it takes to tell them apart: ⌈log₂ count⌉."""
        return (self.count - 1).bit_length()


class Field(NamedTuple):
    """A part of a message: so many numbers of one type, or each one of some levels."""

    kind: torch.dtype | Levels
    length: int


class Senders:
    """Who sent some messages [*], in which step: what random numbers depend on besides the seed.

    numbers  # int64 [*]: the senders' numbers
    size     # D
    """

    def __init__(self, key: Tensor, numbers: Tensor, counter: int, size: int):
        self.key, self.counter = key, counter
        self._numbers, self._size = numbers, size

    @cached_property
    def uniform(self) -> Tensor:
        """Uniform on [0, 1), for rounding, drawn when first asked for: float32 [*, D]."""
        keys = randomness.bits(self.key, 0, (1,), self._numbers)[..., 0]
        return randomness.uniform(keys, self.counter, self._size)


class Stream(NamedTuple):
    """Random numbers of the layers of a stack, the same at sender and receiver.

    A worker has one stream of numbers for each counter, and all workers share another; a matrix'
    part of either begins at the matrix' place among the worker's D numbers and has as many numbers
    as the matrix has entries.
    """

    senders: Senders  # [*]
    stack: Stack
    kept: dict[str, Tensor]  # while the counter stays as it is

    def uniform(self) -> Tensor:
        """Uniform float32 [*, layer, rows · columns] on [0, 1), for rounding."""
        of_stack = self.senders.uniform[..., self.stack.start : self.stack.stop]
        return of_stack.unflatten(-1, (self.stack.layers, -1))

    def shared_bits(self, count: int) -> Tensor:
        """Random int64 [layer, count], the same for all senders."""
        stack, device = self.stack, self.senders.key.device
        starts = torch.arange(stack.start, stack.stop, stack.rows * stack.columns, device=device)
        return randomness.bits(self.senders.key, 1 + self.senders.counter, (count,), starts)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """make(), or what it was the last time, if that was in the same step: for what all senders
        share."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


class Compressor(Protocol):
    """What is sent of a matrix, and what that means."""

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        """The parts of one matrix' message; its shape decides."""
        ...

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        """The fields [*, length] of v [*, row, column], float32.

        Integers may come in a wider type, which the codec narrows; levels by their numbers 0, 1, …
        in any type. A matrix with a NaN makes fields that decompress to at least one NaN, so that
        divergence is seen.
        """
        ...

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        """out ← out + C(v), for out [*, row, column] that is contiguous in its last two axes.

        By elementwise arithmetic, each number of C(v) rounded before it is added. Levels arrive
        as what they are, float32.
        """
        ...


def poison(v: Tensor) -> Tensor:
    """0 where a row of v [*, n] is finite, NaN where it is not: [*, 1]."""
    return v.abs().amax(-1, keepdim=True).mul_(0)
