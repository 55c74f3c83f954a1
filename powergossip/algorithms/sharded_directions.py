"""The directions of PowerGossip for matrices with rows divided over the shards of a worker.

X consists of blocks of rows X_k. An iteration gives the same result as with the whole matrix:

- Side 0, p in blocks p_k: s = Σ_k X_kᵀ p_k is summed inside the replica. Each shard sends a part of
  it, and the parts that arrive are gathered. All shards then have d.
- Side 1, p whole in all shards: s_k = X_k p is sent to shard k of the neighbor. d is in blocks.

Norms, Gram matrices (r × r) and the largest magnitudes of directions in blocks are reduced inside
the replica. Random directions are the same as with the whole matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from powergossip.algorithms.directions import EdgeConstants, MatrixSide, PerDirection
from powergossip.network import ToEach
from powergossip.parameters import Stack
from powergossip.replica_group import Shards


class WholeSide(MatrixSide):
    """Side 1: directions as long as a row of X, whole in all shards."""

    def __init__(self, edges: EdgeConstants, rank: int, stacks: Sequence[Stack], shards: Shards):
        super().__init__(edges, rank, stacks, side=1)
        self._shards = shards
        length = -(-self._message_size // shards.size)
        self._part = self._message.new_zeros(*self._message.shape[:2], length)

    def message(self) -> ToEach:
        """This shard's part of the sum of the shards' products."""
        self._shards.sum_(self.own.flat)
        return ToEach(self._shards.piece(super().message().tensor, self._part))

    def take_differences(self, received: Tensor) -> None:
        super().take_differences(self._shards.message(received, self._message_size))


class DividedSide(MatrixSide):
    """Side 0: directions as long as a column of X, in blocks.

    `packed` and `unpack` copy whole directions.
    """

    def __init__(
        self,
        edges: EdgeConstants,
        rank: int,
        stacks: Sequence[Stack],
        whole: Sequence[Stack],
        shards: Shards,
    ):
        self._rows = [stack.rows for stack in whole]
        self._shards = shards
        super().__init__(edges, rank, stacks, side=0)
        self.branches = True  # to skip collectives

    def _whole_of(self, stacks: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        return [(layers, rows) for (layers, _), rows in zip(stacks, self._rows, strict=True)]

    def _own(self, stack: int, whole: Tensor) -> Tensor:
        rows = self._shards.rows(self._rows[stack])
        return whole[..., rows.start : rows.stop]

    def packed(self) -> Tensor:
        return self._gathered(self.views)

    def products(self) -> Tensor:
        return self._gathered(self.own.views)

    def _gathered(self, views: Sequence[Tensor]) -> Tensor:
        """Whole directions or products in the form of a message, from the blocks of all shards."""
        message = self.flat.new_zeros(*self._message.shape[:2], self._whole_size)
        whole = self._views_of(message, self._whole)
        for stack, (view, block) in enumerate(zip(whole, views, strict=True)):
            self._own(stack, view).copy_(block)
        return self._shards.sum_(message)

    def _compute_norms(self, vectors: PerDirection, out: PerDirection) -> None:
        super()._compute_norms(vectors, out)
        squares = self._shards.sum_(out.flat.double().square_())
        out.flat.copy_(squares.sqrt_())

    def _compute_gram(self) -> None:
        super()._compute_gram()
        self._shards.sum_(self._gram)

    def _largest(self, views: Sequence[Tensor], out: PerDirection) -> None:
        for view, largest in zip(views, out.views, strict=True):
            # A block may be without rows.
            torch.amax(torch.nn.functional.pad(view.abs(), (0, 1)), -1, out=largest)
        self._shards.max_(out.flat)


def sharded_sides(
    edges: EdgeConstants,
    rank: int,
    stacks: Sequence[Stack],
    whole: Sequence[Stack],
    shards: Shards,
) -> tuple[MatrixSide, MatrixSide]:
    """Both sides of the edges of one round, for stacks of blocks of whole matrices."""
    p, q = DividedSide(edges, rank, stacks, whole, shards), WholeSide(edges, rank, stacks, shards)
    p.other, q.other = q, p
    return p, q
