"""The layout of the blocks of rows that a shard has of each tensor. See replica_group.py.

D is the number of elements of this shard.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.parameters import Layout, Stack, matrix_shape
from powergossip.replica_group import Shards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard


class ShardedLayout(Layout):
    """The layout of this shard's blocks of rows, in the order of the whole tensors.

    Attributes:
        shapes, starts, stacks, vectors, size: The blocks' own. A block may be without rows.
    """

    shards: Shards

    def __init__(self, whole: Layout, shards: Shards):
        self._whole, self.shards = whole, shards
        self.shapes = [(len(shards.rows(shape[0])), *shape[1:]) for shape in whole.shapes]
        order = sorted(range(len(whole.shapes)), key=whole.starts.__getitem__)
        self.starts = [0] * len(order)
        self._starts: dict[int, int] = {}  # by the start of the whole tensor
        self._pieces: list[tuple[int, int]] = []  # first index in the whole tensors, and length
        position = 0
        for index in order:
            rows, columns = matrix_shape(whole.shapes[index])
            start, own = whole.starts[index], shards.rows(rows)
            self.starts[index] = self._starts[start] = position
            self._pieces.append((start + own.start * columns, len(own) * columns))
            position += len(own) * columns
        self.size = position
        self.stacks, self.vectors = (
            [self.local(stack) for stack in stacks] for stacks in (whole.stacks, whole.vectors)
        )
        self.matrices_size = self.stacks[-1].stop if self.stacks else 0

    @property
    def whole(self) -> Layout:
        return self._whole

    def local(self, stack: Stack) -> Stack:
        rows = len(self.shards.rows(stack.rows))
        return Stack(rows, stack.columns, stack.layers, self._starts[stack.start])

    def select(self, which: Iterable[int]) -> Layout:
        return ShardedLayout(self._whole.select(which), self.shards)

    def compressible(self, rank: int) -> list[Stack]:
        return [self.local(stack) for stack in self._whole.compressible(rank)]

    def norms(self, x: Tensor) -> Tensor:
        own = torch.linalg.vector_norm(x, dim=1, keepdim=True).double()
        return self.shards.sum_(own.square_()).sqrt_().to(x.dtype)

    def uniform(self, keys: Tensor, counter: int) -> Tensor:
        pieces = (randomness.uniform(keys, counter, n, first) for first, n in self._pieces if n)
        return torch.cat([keys.new_empty(*keys.shape, 0, dtype=torch.float32), *pieces], -1)

    def check_undivided(self, what: str) -> None:
        raise ValueError(f"{what} of sharded parameters: use per_shard=True, or another method")

    def saved(self, x: Tensor) -> "list[DTensor]":
        """x tensor by tensor, as DTensors of the whole, which are independent of the shards."""
        from torch.distributed.tensor import Shard

        return [
            _divided(block, (*x.shape[:-1], *shape), Shard(x.dim() - 1), self.shards)
            for block, shape in zip(self._blocks(x), self._whole.shapes, strict=True)
        ]

    def load(self, x: Tensor, saved: Any) -> None:
        for block, tensor in zip(self._blocks(x), saved, strict=True):
            block.copy_(tensor.to_local())

    def _blocks(self, x: Tensor) -> list[Tensor]:
        """Views of x [..., D] by tensor, in the order of `shapes`: [..., *shape]."""
        return [
            x[..., start : start + prod(shape)].unflatten(-1, shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]


def _divided(block: Tensor, shape: Sequence[int], placement: "Shard", shards: Shards) -> "DTensor":
    """The DTensor of this shape, from this process's block."""
    from torch.distributed.tensor import DTensor

    stride = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    size = torch.Size(shape)
    return DTensor.from_local(
        block, shards.mesh, [placement], run_check=False, shape=size, stride=tuple(stride)
    )


class BlockLayout(Layout):
    """A layout that counts each block of a sharded one as a separate tensor. Norms of all elements
    of a worker are still the replica's norms.
    """

    def __init__(self, sharded: ShardedLayout):
        super().__init__(sharded.shapes)
        self._sharded = sharded

    def norms(self, x: Tensor) -> Tensor:
        return self._sharded.norms(x)

    def select(self, which: Iterable[int]) -> Layout:
        selected = self._sharded.select(which)
        assert isinstance(selected, ShardedLayout)
        return BlockLayout(selected)
