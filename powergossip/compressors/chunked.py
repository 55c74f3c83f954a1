"""Top-k sparsification of the chunks of a matrix, with values of few bits.

Axes: chunk (of all chunks of a matrix), entry (of a chunk).
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from powergossip import checks
from powergossip.compressors.compressor import Field, Levels, Stream

RANGE = 6.0  # standard deviations that the bins of a quantized value cover


def chunk_shape(rows: int, columns: int, chunk: int) -> tuple[int, int]:
    """The rows and columns of a chunk: the largest divisors of a matrix' that are ≤ `chunk`."""
    height, width = (
        max(d for d in range(1, min(n, chunk) + 1) if n % d == 0) for n in (rows, columns)
    )
    return height, width


@dataclass(frozen=True)
class ChunkTopK:
    """C(v) = the K entries of each chunk with the largest magnitudes, quantized, 0 elsewhere.

    A chunk is a block of h × w entries, see `chunk_shape`, and K = min(kept, h w). With fewer than
    32 bits, the values z of a matrix are sorted into 2^bits bins. A bin is 6/2^bits standard
    deviations of z wide, and decodes to the mean of its values::

        bin = round((z − mean z)/width) + 2^bits/2, limited to 0 … 2^bits − 1

    Message: for each value 4 bytes, or the bits of its bin, with a table of 2^bits floats for the
    matrix, and its position in the chunk, as an unsigned integer of 1 byte (h w ≤ 256), 2 bytes
    (≤ 65,536) or 4. tplr-ai/CCLoco (c01a785), ccloco.py, where positions have 8 bytes.

    Args:
        kept: Number K of entries.
        chunk: Largest number of rows and of columns of a chunk.
        bits: Bits of a value, 1 to 8 or 32.

    Raises:
        BadValue: For a value out of range.
    """

    kept: int
    chunk: int
    bits: int

    def __post_init__(self) -> None:
        checks.at_least_one("kept", self.kept)
        checks.check("chunk", self.chunk, 1 <= self.chunk <= 2**15, f"1 to {2**15}")
        checks.check("bits", self.bits, self.bits in (*range(1, 9), 32), "1 to 8, or 32")

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        height, width = chunk_shape(rows, columns, self.chunk)
        size = height * width
        count = rows * columns // size * min(self.kept, size)
        small = torch.uint8 if size <= 2**8 else torch.uint16
        positions = Field(small if size <= 2**16 else torch.int32, count)
        if self.bits == 32:
            return Field(torch.float32, count), positions
        bins = torch.uint8 if self.bits == 8 else Levels(0, 1, 2**self.bits)
        return Field(torch.float32, 2**self.bits), Field(bins, count), positions

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        rows, columns = v.shape[-2:]
        height, width = chunk_shape(rows, columns, self.chunk)
        blocks = v.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
        chunks = blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)  # [*, chunk, entry]
        kept = min(self.kept, height * width)
        positions = chunks.abs().topk(kept, sorted=False).indices
        values = chunks.gather(-1, positions).flatten(-2)
        positions = positions.flatten(-2)
        return (values, positions) if self.bits == 32 else (*self._binned(values), positions)

    def _binned(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The table [*, 2^bits] and the bins [*, n] of values [*, n]."""
        bins, count = 2**self.bits, values.shape[-1]
        mean = values.mean(-1, keepdim=True)
        z = values - mean
        width = z.norm(dim=-1, keepdim=True) / sqrt(max(count - 1, 1)) * (RANGE / bins)
        width = torch.where((width > 0) & width.isfinite(), width, 1.0)
        bin_ = (z / width + bins // 2).round().clamp(0, bins - 1).nan_to_num().long()
        table = z.new_zeros(*z.shape[:-1], bins)
        sums = table.scatter_add(-1, bin_, z)
        counts = table.scatter_add(-1, bin_, torch.ones_like(z))
        return sums.div_(counts.clamp_(min=1)).add_(mean), bin_

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        *coded, positions = fields
        values = coded[0] if self.bits == 32 else coded[0].gather(-1, coded[1].long())
        rows, columns = out.shape[-2:]
        height, width = chunk_shape(rows, columns, self.chunk)
        places = positions.long().unflatten(-1, (-1, min(self.kept, height * width)))
        chunks = torch.arange(places.shape[-2], device=out.device)[:, None]
        row = chunks // (columns // width) * height + places // width
        column = chunks % (columns // width) * width + places % width
        flat = (row * columns + column).flatten(-2)
        out.flatten(-2).scatter_add_(-1, flat, values.to(out.dtype))
