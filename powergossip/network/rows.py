"""Messages that the workers of a process read where they are, without copies."""

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from powergossip.network.conversation import ToAll

_AT_ONCE = {"cpu": 2**17, "cuda": 2**26}  # elements of a block


class Shared(ToAll):
    """The same message for every neighbor: tensor [worker, D]. `Rows` are received."""


class Rows(NamedTuple):
    """Messages from neighbors: row[worker, neighbor] of `own`, and after them of `others`."""

    own: Tensor  # [row, D]  messages of the workers of this process
    others: Tensor  # [row, D]  messages from other processes
    row: Tensor  # int64 [worker, neighbor], contiguous

    def part(self, span: slice) -> "Rows":
        """A span of the elements."""
        return Rows(self.own[:, span], self.others[:, span], self.row)

    def by_blocks(self) -> Iterator[tuple[slice, Iterator[Tensor]]]:
        """A part of the elements, and copies of it of each slot's messages [worker, element].

        `own` may change there before they are used.
        """
        width = max(1, _AT_ONCE[self.own.device.type] // len(self.row))
        for start in range(0, self.own.shape[1], width):
            part = slice(start, start + width)
            rows = torch.cat([self.own[:, part], self.others[:, part]])
            yield part, map(rows.index_select, repeat(0), self.row.unbind(1))
