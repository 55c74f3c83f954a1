"""What a message looks like: compressors, and the codec that turns a worker's numbers into bytes.

A compressor C sees matrices v [*, row, column] — any leading axes, all matrices at once — and knows
nothing of bytes, layouts or workers. It makes a few *fields* of each matrix, rows of numbers of one
type; their types and lengths follow from the matrix' shape alone:

    fields(rows, columns)           what a message consists of, hence its size
    compress(v, stream)             v → the fields, one tensor [*, length] each
    decompress(fields, out, stream) out [*, row, column] ← out + C(v)

A field may also be of *levels*, one of a few whole numbers for each entry: `compress` says which,
and the codec packs them to as few bits as that takes.

`stream` is the matrix' own source of random numbers, a function of (seed, sending worker, place of
the matrix in the layout, step counter), or, for what all workers share, of the others alone: sender
and receiver have the same one. So RandomK sends no positions, and QSGD's rounding does not depend
on which process hosts the worker.

`Codec` does this for a whole layout: x [worker, D] → message [worker, bytes], and back for any
number of senders at once. All matrices of one shape are one call, as are all vectors of one length
(n × 1 matrices). In a message

    all 4-byte numbers of all tensors, then all 2-byte numbers, then all bytes, then all levels
    as one string of bits,

each section in the order of the layout's tensors and of a compressor's fields: thus every number is
aligned, and nothing is padded. Numbers are in the machine's byte order.

Decoding uses elementwise arithmetic only, so that its result is the same to the bit whatever else
is decoded beside it: CHOCO-Gossip and DeepSqueeze need the sender's own C(v), decoded from its own
message, to be exactly what its neighbors see. It adds, since a sparse C(v) then costs as little
time as it does memory.

To add a compressor: write its class here and its row in `COMPRESSORS`; the tests of the laws that
every compressor obeys (tests/test_compressors.py) find it there.

Axes: worker (hosted here), neighbor (slot), layer (tensors of one shape), row, column.
Symbols: v a matrix of N = rows · columns numbers; K the numbers kept; δ the contraction,
E‖v − C(v)‖² ≤ (1 − δ)‖v‖².
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, floor, log, prod, sqrt
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import randomness
from parameters import Layout, Stack


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
        in any type. A matrix with a NaN makes fields
        that decompress to at least one NaN, so that divergence is seen.
        """
        ...

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        """out ← out + C(v), for out [*, row, column] that is contiguous in its last two axes.

        By elementwise arithmetic, each number of C(v) rounded before it is added. Levels arrive
        as what they are, float32.
        """
        ...


def size(compressor: Compressor, rows: int, columns: int) -> int:
    """Bytes that a matrix of this shape takes in a message."""
    return _Plan(compressor, [Stack(rows, columns, layers=1, start=0)]).size


# --- Small numbers packed into bytes -------------------------------------------------------------


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` numbers of so many bits take: ⌈count · bits / 8⌉."""
    return -(-count * bits // 8)


def pack(levels: Tensor, bits: int) -> Tensor:
    """levels [*, n], uint8 below 2^bits → uint8 [*, ⌈n · bits / 8⌉], for 1 to 8 bits.

    The bytes are one little-endian string of bits, in which number j has the bits j · bits to
    (j + 1) · bits − 1; what is left over at the end is 0.
    """
    count = levels.shape[-1]
    if 8 % bits == 0:  # a word of 8/bits numbers becomes a byte
        fields = 8 // bits
        words = _words(levels, fields)
        # Shifted copies of the word add up; number i of copy i lands in the topmost byte, and no
        # two numbers meet there or below.
        top = 8 * (fields - 1)
        factor = sum(1 << (top - i * (8 - bits)) for i in range(fields))
        return words.mul(factor).bitwise_right_shift_(top).to(torch.uint8)
    words = _words(levels, 8)  # a word of 8 numbers becomes `bits` bytes: close the gaps, thrice
    for half in (8, 16, 32):
        used = half // 8 * bits
        low = words & _lowest(used, 2 * half)
        words = low | (words ^ low) >> (half - used)
    packed = words[..., None].view(torch.uint8)[..., :bits].flatten(-2)
    return packed[..., : packed_size(count, bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """What `pack` made of `count` numbers: uint8 [*, count]."""
    if 8 % bits == 0:
        words = _unpacked_bytes(bits, packed.device).index_select(0, packed.flatten().int())
        numbers = words.view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * (8 // bits))
        return numbers[..., :count]
    groups = -(-count // 8)
    padded = functional.pad(packed, (0, groups * bits - packed.shape[-1]))
    padded = functional.pad(padded.unflatten(-1, (groups, bits)), (0, 8 - bits))
    words = padded.view(torch.int64)[..., 0]
    for half in (32, 16, 8):
        used = half // 8 * bits
        low = words & _lowest(used, 2 * half)
        words = low | (words ^ low) << (half - used)
    return words.view(torch.uint8)[..., :count]


def _words(levels: Tensor, length: int) -> Tensor:
    """Each `length` numbers of levels [*, n] as one integer; zeros fill up the last."""
    if missing := -levels.shape[-1] % length:
        levels = functional.pad(levels, (0, missing))
    elif levels.storage_offset() % length or not levels.is_contiguous():
        levels = levels.clone(memory_format=torch.contiguous_format)
    return levels.view(_INTEGERS[length])


def _lowest(ones: int, lane: int) -> int:
    """A 64-bit mask: so many ones at the bottom of each lane."""
    return sum(((1 << ones) - 1) << start for start in range(0, 64, lane))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _unpacked_bytes(bits: int, device: torch.device) -> Tensor:
    """Each of the 256 bytes as a word of 8/bits numbers, for bits that divide 8."""
    shifts = torch.arange(0, 8, bits)
    numbers = (torch.arange(256)[:, None] >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).view(_INTEGERS[8 // bits])[:, 0].to(device)


# --- Compressors ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """C(v) = v.

    Message: N floats, row by row. δ = 1.
    """

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return (Field(torch.float32, rows * columns),)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        return (v.flatten(-2),)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        out.flatten(-2).add_(fields[0])


@dataclass(frozen=True)
class TopK:
    """C(v) = the K entries of v that are largest by magnitude, 0 elsewhere.

    Message: K floats, the values; then their K positions in the matrix, row by row, as unsigned
    integers of 1 byte (N ≤ 256), 2 bytes (N ≤ 65,536) or 4. In no particular order.
    K = max(1, ⌊keep_ratio · N⌋); or, matched to a method of that rank, K = max(1, ⌊r (m + k)/4⌋)
    for m rows and k columns, at most N: keep_ratio = r (m + k)/(4 m k).
    δ = K/N.    Stich, Cordonnier & Jaggi (2018), arXiv:1809.07599, Definition 2.1, Lemma A.1

    A NaN counts as the largest and is sent. Raises ValueError for keep_ratio outside (0, 1], or a
    rank below 1.
    """

    keep_ratio: float = 0.01
    rank: int | None = None

    def __post_init__(self) -> None:
        _check_keep_ratio(self.keep_ratio)
        if self.rank is not None:
            _check_at_least_one("rank", self.rank)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        kept, numbers = self.kept(rows, columns), rows * columns
        assert numbers <= 2**31, "positions have 4 bytes, signed where torch computes with them"
        width = torch.uint8 if numbers <= 2**8 else torch.uint16
        return (
            Field(torch.float32, kept),
            Field(width if numbers <= 2**16 else torch.int32, kept),
        )

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        kept, v = self.kept(*v.shape[-2:]), v.flatten(-2)
        positions = _largest(v.abs(), kept)
        return v.gather(-1, positions), positions

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        values, positions = fields
        out.flatten(-2).scatter_add_(-1, positions.long(), values)

    def kept(self, rows: int, columns: int) -> int:
        """K"""
        if self.rank is None:
            return _share(self.keep_ratio, rows * columns)
        return min(rows * columns, max(1, self.rank * (rows + columns) // 4))


def _largest(a: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest of a [*, n] ≥ 0: int64 [*, count]; NaN is largest.

    Where few are wanted of many: columns of 8 numbers each; none of the largest is missing from the
    `count` columns with the largest maxima (but for ties), so only these need to be searched. Twice
    as fast on a CPU as to search all.
    """
    height = 8
    width = a.shape[-1] // height
    if width < 4 * count or width < 1024:
        return a.topk(count, sorted=False).indices
    a = a.view(torch.int32)  # of the same order, and faster to compare
    table = a[..., : height * width].unflatten(-1, (height, width))
    columns = table.amax(-2).topk(count, sorted=False).indices[..., None, :]
    in_columns = columns.expand(*columns.shape[:-2], height, count)
    rows = torch.arange(0, height * width, width, device=a.device)[:, None]
    candidates = table.gather(-1, in_columns).flatten(-2)
    positions = (columns + rows).flatten(-2)
    if height * width < a.shape[-1]:
        rest = torch.arange(height * width, a.shape[-1], device=a.device)
        candidates = torch.cat([candidates, a[..., height * width :]], -1)
        positions = torch.cat([positions, rest.expand(*positions.shape[:-1], -1)], -1)
    return positions.gather(-1, candidates.topk(count, sorted=False).indices)


@dataclass(frozen=True)
class RandomK:
    """C(v) = K entries of v at random positions, 0 elsewhere; not scaled up.

    Message: K floats, the values. The positions are K distinct ones, every choice of K as likely as
    any other, drawn anew in each step from what all workers share: they send the same entries.
    K = max(1, ⌊keep_ratio · N⌋).
    δ = K/N in expectation.    Stich, Cordonnier & Jaggi (2018), arXiv:1809.07599, Definition 2.1

    If an entry is NaN or infinite, sent or not, all values are sent as NaN. Raises ValueError for
    keep_ratio outside (0, 1].
    """

    keep_ratio: float = 0.01

    def __post_init__(self) -> None:
        _check_keep_ratio(self.keep_ratio)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return (Field(torch.float32, _share(self.keep_ratio, rows * columns)),)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        positions = self.positions(stream, v.shape[-1]).expand(*v.shape[:-1], -1)
        return (v.gather(-1, positions).add_(_poison(v)),)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        out = out.flatten(-2)
        positions = self.positions(stream, out.shape[-1]).expand(*out.shape[:-1], -1)
        out.scatter_add_(-1, positions, fields[0])

    def positions(self, stream: Stream, numbers: int) -> Tensor:
        """Where the values stand among N numbers, in the message's order: int64 [layer, K]."""
        count = _share(self.keep_ratio, numbers)
        return stream.once("positions", lambda: _distinct(stream.shared_bits, count, numbers))


def _distinct(bits: Callable[[int], Tensor], count: int, n: int) -> Tensor:
    """`count` distinct positions below n for each matrix, a uniform choice: int64 [*, count].

    bits(m) gives m random int64 for each matrix: [*, m].

    Few of many: the first `count` different ones of a sequence of positions drawn with replacement.
    It is as long as these take on average plus 8 standard deviations. Should it ever be too short,
    or is a large share wanted: n random numbers, and where the smallest of them stand.
    """
    if count == 1:
        return _below(n, bits(1))
    mean = n * log(n / (n - count)) if count < n else n
    deviation = count / (n - count) * sqrt(n / 2) if count < n else n
    draws = ceil(mean + 8 * deviation) + _SPARE_DRAWS
    if draws > n // 2:
        return _smallest(bits(n), count)
    position = _below(n, bits(draws))
    order = torch.arange(draws, device=position.device)
    position, order = _halves((position << 32 | order).sort(-1).values)  # equal ones together
    order[..., 1:] += (position[..., 1:] == position[..., :-1]).long() << 30  # the repeated: last
    order, position = _halves((order << 32 | position).sort(-1).values[..., :count])
    enough = order[..., -1:] < 1 << 30
    if not enough.all():
        position = torch.where(enough, position, _smallest(bits(n), count))
    return position


def _below(n: int, bits: Tensor) -> Tensor:
    """Uniform whole numbers from 0 to n − 1."""
    return (bits >> 32 & 0xFFFFFFFF) * n >> 32


def _smallest(a: Tensor, count: int) -> Tensor:
    """The positions of the `count` smallest of a [*, n], all different, in ascending order."""
    return a.topk(count, largest=False).indices


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits."""
    return a >> 32, a & 0xFFFFFFFF


_SPARE_DRAWS = 8


@dataclass(frozen=True)
class SignAndNorm:
    """C(v) = sign(v) ‖v‖₁/N, with sign(0) = +1.

    Message: the float ‖v‖₁/N; then N bits, 1 for +.
    δ = ‖v‖₁²/(N ‖v‖²).    Karimireddy, Rebjock, Stich & Jaggi (2019), arXiv:1901.09847, Lemma 8

    A NaN or infinity comes out through the mean, at every entry.
    """

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return Field(torch.float32, 1), Field(Levels(-1, step=2, count=2), rows * columns)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        mean = torch.linalg.vector_norm(v, 1, dim=-1, keepdim=True).div_(v.shape[-1])
        return mean, torch.ge(v, 0)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        mean, signs = fields
        out.flatten(-2).addcmul_(signs, mean)  # a product without rounding


@dataclass(frozen=True)
class SVD:
    """C(v) = the best approximation of v that has rank r = min(rank, m, k), for m rows, k columns.

    Message: r · min(m, k) floats, orthonormal singular vectors of the shorter side, one after the
    other in ascending order of singular value; then r · max(m, k) floats, those of the longer side
    times their singular values. Where this is not less than N floats: v itself, as `Identity`.
    δ = Σ_{i ≤ r} σ_i² / Σ_i σ_i² ≥ r/min(m, k).    Eckart & Young (1936), doi:10.1007/BF02288367

    The vectors are eigenvectors of the shorter side's Gram matrix, which is several times faster
    than a singular value decomposition; in double precision, since squares lose half the digits
    (which the first vector does not miss).

    A matrix with a NaN or infinity arrives as NaN throughout. Raises ValueError for a rank below 1.
    """

    rank: int = 1

    def __post_init__(self) -> None:
        _check_at_least_one("rank", self.rank)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        rank = self._rank_sent(rows, columns)
        if rank is None:
            return (Field(torch.float32, rows * columns),)
        return (
            Field(torch.float32, rank * min(rows, columns)),
            Field(torch.float32, rank * max(rows, columns)),
        )

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        rank = self._rank_sent(*v.shape[-2:])
        if rank is None:
            return (v.flatten(-2),)
        poison = _poison(v.flatten(-2))  # [*, 1]
        short, long = _largest_singular(_wide(v).where(poison[..., None] == 0, 0), rank)
        return short.flatten(-2), long.flatten(-2) + poison

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        rank = self._rank_sent(*out.shape[-2:])
        if rank is None:
            out.flatten(-2).add_(fields[0])
            return
        # One rank after the other: a matrix product may round differently in another batch.
        short, long = (field.unflatten(-1, (rank, -1)).unbind(-2) for field in fields)
        out = _wide(out)
        total = short[0][..., :, None] * long[0][..., None, :]
        for u, w in zip(short[1:], long[1:], strict=True):
            total.add_(u[..., :, None] * w[..., None, :])
        out.add_(total)

    def _rank_sent(self, rows: int, columns: int) -> int | None:
        """r; None if the matrix is sent whole."""
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else None


def _largest_singular(wide: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left singular vectors [*, rank, row] of matrices [*, row, column] of at least as many columns
    as rows, by ascending singular value; and their products with the matrices [*, rank, column]."""
    rows, columns = wide.shape[-2:]
    if wide.is_cuda or rows < 50 or 10 * rank > rows:
        wide = wide.double()
        vectors = torch.linalg.eigh(wide @ wide.mT).eigenvectors.mT[..., -rank:, :]
        return vectors, vectors @ wide

    # On a CPU, a few vectors of a large matrix take less than half the time that all take; PyTorch
    # has no way to ask for them. The very first is as sharp from a Gram matrix in single precision,
    # if the squares are within its range.
    from scipy.linalg import eigh  # a fifth of a second, which few programs need

    precision = np.float32 if rank == 1 else np.float64
    vectors = torch.empty(*wide.shape[:-2], rank, rows)
    products = torch.empty(*wide.shape[:-2], rank, columns)
    for matrix, u, w in zip(
        wide.reshape(-1, rows, columns).numpy(),
        vectors.view(-1, rank, rows).numpy(),
        products.view(-1, rank, columns).numpy(),
        strict=True,
    ):
        scaled = matrix.astype(precision) / max(np.abs(matrix).max(), _TINY)
        u[:] = eigh(scaled @ scaled.T, subset_by_index=(rows - rank, rows - 1), check_finite=False)[
            1
        ].T
        np.matmul(u, matrix, out=w)
    return vectors, products


_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class QSGD:
    """C(v) = scale · ‖v‖₂ sign(v) ξ(v)/s, where s |v_j|/‖v‖₂ is rounded to a neighboring integer
    ξ_j ∈ {0 … s} at random, so that E ξ_j = s |v_j|/‖v‖₂.

    Message: the float ‖v‖₂; then N numbers sign(v_j) ξ_j ∈ {−s … s} of ⌈log₂(2s + 1)⌉ bits each.
    With `unbiased`, scale = 1: E C(v) = v and E‖C(v) − v‖² ≤ ω ‖v‖² for ω = min(N/s², √N/s).
        Alistarh, Grubic, Li, Tomioka & Vojnovic (2017), arXiv:1610.02132, § 3.1, Lemma 3.1
    Otherwise, for what needs a contraction (CHOCO-Gossip), scale = 1/(1 + ω): δ = 1/(1 + ω).
        Koloskova, Stich & Jaggi (2019), arXiv:1902.00340, § 3.5

    The paper sends the numbers in Elias coding, whose length depends on v; here they have a fixed
    width. Both ends have the random numbers, but only the sender uses them.

    A NaN or infinity comes out through the norm, at every entry. Raises ValueError for levels s
    below 1 or above 127 (more than 8 bits).
    """

    levels: int = 4
    unbiased: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ValueError(f"levels={self.levels}: use a number from 1 to 127")

    def variance_bound(self, numbers: int) -> float:
        """ω for N numbers."""
        return min(numbers / self.levels**2, sqrt(numbers) / self.levels)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        levels = Levels(-self.levels, step=1, count=2 * self.levels + 1)
        return Field(torch.float32, 1), Field(levels, rows * columns)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        share = v.abs().div_(norm).mul_(self.levels)
        rounded = share.add_(stream.uniform()).floor_().clamp_(max=self.levels)
        rounded = rounded.copysign_(v).add_(self.levels).nan_to_num_()  # 0/0 too: the norm is 0
        return norm, rounded

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        norm, rounded = fields
        out = out.flatten(-2)
        scale = 1.0 if self.unbiased else 1 / (1 + self.variance_bound(out.shape[-1]))
        out.add_(rounded * (norm * (scale / self.levels)))


def _wide(v: Tensor) -> Tensor:
    """A view of v [*, row, column] with the shorter side first."""
    return v.mT if v.shape[-2] > v.shape[-1] else v


def _poison(v: Tensor) -> Tensor:
    """0 where a row of v [*, n] is finite, NaN where it is not: [*, 1]."""
    return v.abs().amax(-1, keepdim=True).mul_(0)


def _share(ratio: float, numbers: int) -> int:
    """max(1, ⌊ratio · numbers⌋), with 0.29 · 100 = 29 although floats say 28.999999999999996."""
    return max(1, floor(ratio * numbers * (1 + 1e-12)))


def _check_keep_ratio(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"keep_ratio={value:g}: use a number above 0 and at most 1")


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value}: use 1 or more")


# --- By name -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What compressors can be told; each takes what concerns it."""

    keep_ratio: float = 0.01  # top-k, random-k: share of the numbers that is sent
    rank: int | None = None  # svd (None: 1); top-k: in place of keep_ratio, as large as that rank's
    levels: int = 4  # qsgd: s
    unbiased: bool = False  # qsgd: not scaled down to a contraction


# The names that users choose from: optimizer_compressor in train.py.
COMPRESSORS: dict[str, Callable[[Options], Compressor]] = {
    "identity": lambda options: Identity(),
    "qsgd": lambda options: QSGD(options.levels, options.unbiased),
    "random-k": lambda options: RandomK(options.keep_ratio),
    "sign-and-norm": lambda options: SignAndNorm(),
    "svd": lambda options: SVD(1 if options.rank is None else options.rank),
    "top-k": lambda options: TopK(options.keep_ratio, options.rank),
}


def make(name: str, options: Options | None = None) -> Compressor:
    """The compressor of that name. ValueError for an unknown name or bad options."""
    if name not in COMPRESSORS:
        choices = ", ".join(sorted(COMPRESSORS))
        raise ValueError(f'compressor "{name}" is unknown; choose from {choices}')
    return COMPRESSORS[name](options or Options())


# --- A whole worker's message --------------------------------------------------------------------


class Codec:
    """Messages of workers' numbers x [worker, D], tensor by tensor through a compressor.

    size     # bytes of one worker's message
    numbers  # D
    workers  # int64 [worker]: the numbers of the workers whose x is encoded here, row by row

    Messages are views of memory that the next `encode` overwrites, and decoded numbers of memory
    that the next `decode` with as many senders overwrites.
    """

    def __init__(
        self,
        layout: Layout,
        compressor: Compressor,
        workers: Sequence[int],
        seed: int = 0,
        device: torch.device | None = None,
    ):
        self._compressor, self.numbers = compressor, layout.size
        self._stacks = [*layout.stacks, *_stacks_of_vectors(layout)]
        self._plan = _Plan(compressor, self._stacks)
        self.size = self._plan.size
        self.workers = torch.tensor(workers, dtype=torch.int64, device=device)
        self._key = randomness.keys(seed, "compressor", [()])[0].to(device)
        self._counter = -1  # of the last message
        self._kept: list[dict[str, Tensor]] = []  # for it, of each stack
        self._x: Tensor | None = None
        self._matrices: list[Tensor] = []  # views of x
        self._outgoing = _Fields(self._plan, (len(workers),), torch.uint8, device)
        self._message = torch.zeros(len(workers), self.size, dtype=torch.uint8, device=device)
        # By the senders' shape: their messages, what they decode to, and views of the last `out`.
        self._incoming: dict[tuple[int, ...], _Fields] = {}
        self._decoded: dict[tuple[int, ...], Tensor] = {}
        self._added: dict[tuple[int, ...], tuple[Tensor, list[Tensor]]] = {}

    def encode(self, x: Tensor, counter: int) -> Tensor:
        """The message of each worker: uint8 [worker, bytes], contiguous, the same memory each time.

        x is [worker, D], float32, of any row stride. `counter` is the number of the step (or of the
        message, where a step has several): it chooses the random numbers.
        """
        assert x.shape == (len(self.workers), self.numbers), x.shape
        if x is not self._x:
            self._x, self._matrices = x, _matrices(x, self._stacks)
        streams = self._streams(self.workers, counter)
        for v, fields, stream in zip(self._matrices, self._outgoing.fields, streams, strict=True):
            parts = self._compressor.compress(v, stream)
            for field, part in zip(fields, parts, strict=True):
                field.copy_(part)
        self._outgoing.write(self._message)
        return self._message

    def decode(self, message: Tensor, senders: Tensor, counter: int) -> Tensor:
        """C(x) of each sender: [*, D], for messages [*, bytes] of the workers `senders` [*].

        Leading axes are arbitrary, such as [worker] or [worker, neighbor]. `counter` is what the
        senders encoded with. Padding (sender −1) decodes to zeros where its message
        is zeros.
        """
        leading = tuple(senders.shape)
        if leading not in self._decoded:
            self._decoded[leading] = torch.empty(*leading, self.numbers, device=message.device)
        out = self._decoded[leading].zero_()
        self.add(message, senders, counter, out)
        return out

    def add(self, message: Tensor, senders: Tensor, counter: int, out: Tensor) -> None:
        """out ← out + C(x), for a contiguous out [*, D]; otherwise as `decode`."""
        leading = tuple(senders.shape)
        assert message.shape == (*leading, self.size), (message.shape, leading, self.size)
        if leading not in self._incoming:
            self._incoming[leading] = _Fields(self._plan, leading, torch.float32, message.device)
        if leading not in self._added or self._added[leading][0] is not out:
            self._added[leading] = out, _matrices(out, self._stacks)
        incoming, (_, matrices) = self._incoming[leading], self._added[leading]
        incoming.read(message)
        streams = self._streams(senders, counter)
        for fields, matrix, stream in zip(incoming.fields, matrices, streams, strict=True):
            self._compressor.decompress(fields, matrix, stream)

    def _streams(self, senders: Tensor, counter: int) -> list[Stream]:
        """Of each stack [*, layer]."""
        if counter != self._counter:
            self._counter, self._kept = counter, [{} for _ in self._stacks]
        of_all = Senders(self._key, senders, counter, self.numbers)
        pairs = zip(self._stacks, self._kept, strict=True)
        return [Stream(of_all, stack, kept) for stack, kept in pairs]


class _Plan:
    """Where the fields of each stack lie in a message.

    places  # of each stack, by the compressor's order
    wide    # bytes of all numbers but levels, which come first
    levels  # the kind of all levels, or None
    count   # how many
    size    # bytes of all
    """

    def __init__(self, compressor: Compressor, stacks: Sequence[Stack]):
        fields = [compressor.fields(stack.rows, stack.columns) for stack in stacks]
        self.places: list[list[_Place]] = [[] for _ in stacks]
        self.wide = self.count = 0
        self.levels: Levels | None = None
        order = [(s, f) for s in range(len(stacks)) for f in range(len(fields[s]))]

        def width(index: tuple[int, int]) -> int:
            kind = fields[index[0]][index[1]].kind
            return 0 if isinstance(kind, Levels) else kind.itemsize

        for s, f in sorted(order, key=width, reverse=True):  # stable
            kind, length = fields[s][f]
            layers = stacks[s].layers
            if isinstance(kind, Levels):
                assert self.levels in (None, kind), "a message has one kind of levels"
                self.levels = kind
                self.places[s].append(_Place(None, layers, length, self.count))
                self.count += layers * length
            else:
                start = self.wide // kind.itemsize
                self.places[s].append(_Place(kind, layers, length, start))
                self.wide += layers * length * kind.itemsize
        self.size = self.wide
        if self.levels:
            self.size += packed_size(self.count, self.levels.bits)


class _Place(NamedTuple):
    """A field of the layers of a stack, in memory of its type."""

    dtype: torch.dtype | None  # None: levels
    layers: int
    length: int
    start: int

    def view(self, wide: Tensor, levels: Tensor) -> Tensor:
        """uint8 [*, bytes], or levels [*, number] → [*, layer, length]"""
        memory = levels if self.dtype is None else wide.view(self.dtype)
        numbers = memory[..., self.start : self.start + self.layers * self.length]
        return numbers.unflatten(-1, (self.layers, self.length))


class _Fields:
    """The fields of messages of senders [*], in memory where every number is aligned.

    fields  # of each stack, by the compressor's order: views [*, layer, length]
    """

    def __init__(
        self,
        plan: _Plan,
        senders: tuple[int, ...],
        type_of_levels: torch.dtype,
        device: torch.device | None,
    ):
        wide = torch.zeros(*senders, -(-plan.wide // 8) * 8, dtype=torch.uint8, device=device)
        self._levels = torch.zeros(*senders, plan.count, dtype=type_of_levels, device=device)
        self.fields = [tuple(p.view(wide, self._levels) for p in of) for of in plan.places]
        self._wide, self._plan = wide[..., : plan.wide], plan

    def write(self, message: Tensor) -> None:
        """To message [*, bytes]; levels are by their numbers."""
        plan = self._plan
        message[..., : plan.wide].copy_(self._wide)
        if plan.levels:
            message[..., plan.wide :].copy_(pack(self._levels, plan.levels.bits))

    def read(self, message: Tensor) -> None:
        """From message [*, bytes]; levels are what they stand for."""
        plan = self._plan
        self._wide.copy_(message[..., : plan.wide])
        if plan.levels:
            packed = message[..., plan.wide :]
            levels = unpack(packed, plan.levels.bits, plan.count).view(torch.int8)
            self._levels.copy_(levels.mul_(plan.levels.step).add_(plan.levels.first))


def _stacks_of_vectors(layout: Layout) -> list[Stack]:
    """Vectors of one length that lie next to each other, as matrices of one column."""
    vectors = sorted(
        (start, prod(shape))
        for start, shape in zip(layout.starts, layout.shapes, strict=True)
        if len(shape) < 2
    )
    stacks: list[Stack] = []
    for start, length in vectors:
        if stacks and stacks[-1].rows == length:
            stacks[-1] = Stack(length, 1, stacks[-1].layers + 1, stacks[-1].start)
        else:
            stacks.append(Stack(length, 1, 1, start))
    return stacks


def _matrices(x: Tensor, stacks: Iterable[Stack]) -> list[Tensor]:
    """Views [*, layer, row, column] of x [*, D]."""
    return [
        x[..., stack.start : stack.stop].unflatten(-1, (stack.layers, stack.rows, stack.columns))
        for stack in stacks
    ]
