"""Sparsification: top-k, random-k."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log, sqrt

import torch
from torch import Tensor

from powergossip import checks
from powergossip.compressors.compressor import Field, Stream, nan_if_not_finite


@dataclass(frozen=True)
class TopK:
    """C(v) = the K entries of v with the largest magnitudes, 0 elsewhere.

    Message: K floats, the values, then their K positions in the matrix, row by row, as unsigned
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
            checks.at_least_one("rank", self.rank)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        kept, entries = self.kept(rows, columns), rows * columns
        assert entries <= 2**31, "positions are int32"
        width = torch.uint8 if entries <= 2**8 else torch.uint16
        return (
            Field(torch.float32, kept),
            Field(width if entries <= 2**16 else torch.int32, kept),
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
            return _fraction(self.keep_ratio, rows * columns)
        return min(rows * columns, max(1, self.rank * (rows + columns) // 4))


def _largest(a: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest of a [*, n] ≥ 0: int64 [*, count]. NaN is largest.

    For a small fraction, entries are arranged in columns of 8. The `count` columns with the largest
    maxima contain the `count` largest entries (up to ties), so only these columns are searched.
    Twice as fast on a CPU as a search of all entries.
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
    """C(v) = K entries of v at random positions, 0 elsewhere, not scaled up.

    Message: K floats, the values. The positions are a uniform random choice of K, resampled in each
    step from the stream that all workers share: all of them send the same entries.
    K = max(1, ⌊keep_ratio · N⌋).
    δ = K/N in expectation.    Stich, Cordonnier & Jaggi (2018), arXiv:1809.07599, Definition 2.1

    If an entry is NaN or infinite, sent or not, all values are sent as NaN. Raises ValueError for
    keep_ratio outside (0, 1].
    """

    keep_ratio: float = 0.01

    def __post_init__(self) -> None:
        _check_keep_ratio(self.keep_ratio)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return (Field(torch.float32, _fraction(self.keep_ratio, rows * columns)),)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        positions = self.positions(stream, v.shape[-1]).expand(*v.shape[:-1], -1)
        return (v.gather(-1, positions).add_(nan_if_not_finite(v)),)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        out = out.flatten(-2)
        positions = self.positions(stream, out.shape[-1]).expand(*out.shape[:-1], -1)
        out.scatter_add_(-1, positions, fields[0])

    def positions(self, stream: Stream, entries: int) -> Tensor:
        """The positions of the values among N entries, in the message's order: int64 [layer, K]."""
        count = _fraction(self.keep_ratio, entries)
        return stream.once("positions", lambda: _distinct(stream.shared_bits, count, entries))


def _distinct(bits: Callable[[int], Tensor], count: int, n: int) -> Tensor:
    """Sample `count` of the positions 0 … n − 1 without replacement: int64 [*, count].

    bits(m) gives m random int64 for each matrix: [*, m].

    For a small fraction, positions are drawn with replacement and repeated ones are rejected, which
    costs O(count) random numbers. `_smallest(bits(n), count)` alone would be right too, but costs n
    of them: for 1 % of n = 10⁵ or 10⁶ positions it takes 15 times as long. It serves as the
    fallback, for a large fraction and for a matrix with too many repeated positions. The number of
    draws is the mean that `count` distinct ones take (the coupon collector's) plus 8 standard
    deviations.
    """
    if count == 1:
        return _below(n, bits(1))
    mean = n * log(n / (n - count)) if count < n else n
    deviation = count / (n - count) * sqrt(n / 2) if count < n else n
    draws = ceil(mean + 8 * deviation) + _SPARE_DRAWS
    if draws > n // 2:
        return _smallest(bits(n), count)
    position, order = _first_occurrences(_below(n, bits(draws)), count)
    enough = order[..., -1:] < _REPEATED
    if not enough.all():
        position = torch.where(enough, position, _smallest(bits(n), count))
    return position


def _first_occurrences(position: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` of the positions [*, draw] after moving repeated ones to the end, and the
    index of each draw, plus `_REPEATED` for a repeated one."""
    order = torch.arange(position.shape[-1], device=position.device)
    position, order = _sorted_pairs(position, order)
    order[..., 1:] += (position[..., 1:] == position[..., :-1]).long() * _REPEATED
    order, position = _sorted_pairs(order, position, count)
    return position, order


def _sorted_pairs(first: Tensor, second: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first `count` of pairs [*, pair] of integers in lexicographic order. A pair is sorted as
    one int64, its halves are below 2³¹ and 2³²."""
    pairs = (first << 32 | second).sort(-1).values[..., :count]
    return pairs >> 32, pairs & 0xFFFFFFFF


def _below(n: int, bits: Tensor) -> Tensor:
    """Uniform integers from 0 to n − 1."""
    return (bits >> 32 & 0xFFFFFFFF) * n >> 32


def _smallest(a: Tensor, count: int) -> Tensor:
    """The positions of the `count` smallest of a [*, n], all different, in ascending order."""
    return a.topk(count, largest=False).indices


_SPARE_DRAWS = 8
_REPEATED = 1 << 30  # more than the number of draws


def _fraction(ratio: float, entries: int) -> int:
    """max(1, ⌊ratio · entries⌋), with 0.29 · 100 = 29 where floats give 28.999999999999996."""
    return max(1, floor(ratio * entries * (1 + 1e-12)))


def _check_keep_ratio(value: float) -> None:
    if not 0 < value <= 1:
        raise checks.BadValue("keep_ratio", value, "a number above 0 and at most 1")
