"""Sparsification: top-k, random-k, random block."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log, sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from powergossip import checks
from powergossip.compressors.compressor import Field, Stream, nan_if_not_finite
from powergossip.replica_group import Shards

_KEEP_RATIO = 0.01  # by default


@dataclass(frozen=True)
class _OfEntries:
    """A compressor that keeps a fraction of a matrix' entries, or as many as a rank has."""

    divides: ClassVar[str] = "whole"
    entries_of_rank: ClassVar[float] = 1.0  # in units of r (m + k)

    keep_ratio: float = _KEEP_RATIO
    rank: int | None = None

    def __post_init__(self) -> None:
        keep_ratio, rank = self.keep_ratio, self.rank
        ok = checks.is_finite(keep_ratio) and 0 < keep_ratio <= 1
        checks.check("keep_ratio", keep_ratio, ok, "a fraction above 0, at most 1")
        ok = rank is None or (isinstance(checks.plain(rank), int) and rank >= 1)
        checks.check("rank", rank, ok, "1 or more, or None")
        ok = rank is None or keep_ratio == _KEEP_RATIO
        accepted = f"either a ratio or a rank, not both (rank={rank})"
        checks.check("keep_ratio", keep_ratio, ok, accepted)

    def kept(self, rows: int, columns: int) -> int:
        """K"""
        if self.rank is None:
            return fraction(self.keep_ratio, rows * columns)
        most = floor(self.entries_of_rank * self.rank * (rows + columns))
        return min(rows * columns, max(1, most))


@dataclass(frozen=True)
class TopK(_OfEntries):
    """C(v) = the K entries of v with the largest magnitudes, 0 elsewhere.

    Message: K floats, the values, then their K positions in the matrix, row by row, as unsigned
    integers of 1 byte (N ≤ 256), 2 bytes (N ≤ 65,536) or 4. In no particular order.
    K = max(1, ⌊keep_ratio · N⌋); or, matched to a method of that rank, K = max(1, ⌊r (m + k)/4⌋)
    for m rows and k columns, at most N: keep_ratio = r (m + k)/(4 m k).
    δ = K/N (Stich, Cordonnier & Jaggi 2018, arXiv:1809.07599, Definition 2.1, Lemma A.1).

    Cost of a matrix at rank r: r (m + k)/4 · 40, 48 or 64 bits. With positions of 4 bytes these are
    the bits of one iteration of PowerGossip, 32 · r (m + k)/2, half as many as `SVD` or a step of
    PowerSGD has. Smaller matrices cost 3/4 (2 bytes) or 5/8 (1 byte) of that. K is the published
    one (Vogels et al. 2020, github.com/epfml/powergossip).

    A NaN counts as the largest and is sent.

    Args:
        keep_ratio: Fraction of a matrix' entries that is kept.
        rank: Keep r (m + k)/4 entries of an m × k matrix instead, for the rank r.

    Raises:
        ValueError: For keep_ratio outside (0, 1], a rank below 1, or both.
    """

    entries_of_rank: ClassVar[float] = 1 / 4

    def stable_rate(self, rows: int, columns: int) -> float:
        """K/N. An entry is sent every N/K steps, during which its copies stay as they are."""
        return self.kept(rows, columns) / (rows * columns)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        kept, entries = self.kept(rows, columns), rows * columns
        assert entries <= 2**31, "positions are int32"
        width = torch.uint8 if entries <= 2**8 else torch.uint16
        return (
            Field(torch.float32, kept),
            Field(width if entries <= 2**16 else torch.int32, kept),
        )

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        kept, v = self.kept(stream.stack.rows, stream.stack.columns), v.flatten(-2)
        positions = _largest(v.abs(), min(kept, v.shape[-1]))
        values = v.gather(-1, positions)
        if stream.shards is None:
            return values, positions
        return _largest_of_shards(values, positions + stream.first, kept, stream.shards)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        values, positions = fields
        _add_at(out, positions.long(), values, stream)


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
class _AtSharedPositions(_OfEntries, ABC):
    """C(v) = K entries of v at positions shared by all workers and not sent, 0 elsewhere.

    Args:
        keep_ratio: Fraction of a matrix' entries that is kept.
        rank: Keep r (m + k) entries of an m × k matrix instead, for the rank r.

    Raises:
        ValueError: For keep_ratio outside (0, 1], a rank below 1, or both.
    """

    linear: ClassVar[bool] = True

    def stable_rate(self, rows: int, columns: int) -> float:
        """⅓ K/N. Messages of an entry are t steps apart, at random: E t = N/K, E t² ≤ 2 (N/K)².

        With a = γ λ N/K, E (1 − γ λ t)² ≤ 1 − 2 a + 2 a² is least at a = 1/2, and 1 at a = 1. Here
        a ≤ 2/3, since λ ≤ 2 max_i (1 − w_ii).
        """
        return self.kept(rows, columns) / (3 * rows * columns)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return (Field(torch.float32, self.kept(rows, columns)),)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        return (_at(v, self.positions(stream, stream.stack.rows, stream.stack.columns), stream),)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        positions = self.positions(stream, stream.stack.rows, stream.stack.columns)
        _add_at(out, positions.expand(*out.shape[:-2], -1), fields[0], stream)

    def positions(self, stream: Stream, rows: int, columns: int) -> Tensor:
        """The positions of the values in a matrix, in the message's order: int64 [layer, K]."""
        count, entries = self.kept(rows, columns), rows * columns
        return stream.once("positions", lambda: self.sample(stream.shared_bits, count, entries))

    @abstractmethod
    def sample(self, bits: Callable[[int], Tensor], count: int, entries: int) -> Tensor:
        """Sample `count` of the positions 0 … entries − 1: int64 [layer, count].

        bits(m) gives m random int64 for each layer: [layer, m].
        """


@dataclass(frozen=True)
class RandomK(_AtSharedPositions):
    """C(v) = K entries of v at random positions, 0 elsewhere, not scaled up.

    Message: K floats, the values. The positions are a uniform random choice of K, resampled in each
    step from the stream that all workers share: all of them send the same entries.
    K = max(1, ⌊keep_ratio · N⌋); or, matched to factors of that rank, K = min(N, r (m + k)) for m
    rows and k columns.
    δ = K/N in expectation (Stich, Cordonnier & Jaggi 2018, arXiv:1809.07599, Definition 2.1).

    Cost of a matrix at rank r: 32 · r (m + k) bits, as many as `SVD` or a step of PowerSGD has, as
    in "Random K" of Vogels et al. (2019), arXiv:1905.13727, Table 4. One iteration of PowerGossip
    costs half of that, and so does `TopK` at this rank, or less. At a rank, vectors are sent whole.

    If an entry is NaN or infinite, sent or not, all values are sent as NaN.
    """

    def sample(self, bits: Callable[[int], Tensor], count: int, entries: int) -> Tensor:
        return distinct(bits, count, entries)


@dataclass(frozen=True)
class RandomBlock(_AtSharedPositions):
    """C(v) = K consecutive entries of v, row by row, from a random position on, 0 elsewhere.

    After the last entry the block continues at the first. The position is uniform, and resampled in
    each step from the stream that all workers share. Message, K, cost, δ, NaN and errors are the
    same as for `RandomK`.

    Entries of a block depend on each other more than entries of `RandomK`, but are next to each
    other in memory.

    References:
        Vogels, Karimireddy & Jaggi (2019), arXiv:1905.13727, Table 4, "Random Block".
    """

    def sample(self, bits: Callable[[int], Tensor], count: int, entries: int) -> Tensor:
        first = _below(entries, bits(1))
        return (first + torch.arange(count, device=first.device)) % entries


def _at(v: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """The entries of v [*, layer, row, column] at positions [layer, K]: [*, layer, K]. All are NaN
    if an entry of their matrix is not finite."""
    v = v.flatten(-2)
    positions = positions.expand(*v.shape[:-1], -1)
    if stream.shards is None:
        return v.gather(-1, positions).add_(nan_if_not_finite(v))
    inside, own = _inside(positions, v.shape[-1], stream)
    v = functional.pad(v, (0, 1))  # a block may be without rows
    values = v.gather(-1, own).mul_(inside).add_(nan_if_not_finite(v))
    return stream.shards.sum_(values)


def _add_at(out: Tensor, positions: Tensor, values: Tensor, stream: Stream) -> None:
    """Add values at positions, both [*, layer, K], to out [*, layer, row, column]."""
    out, values = out.flatten(-2), values.to(out.dtype)
    if stream.shards is not None:
        inside, positions = _inside(positions, out.shape[-1], stream)
        values = values.where(inside, 0)
    if out.numel():
        out.scatter_add_(-1, positions, values)


def _inside(positions: Tensor, entries: int, stream: Stream) -> tuple[Tensor, Tensor]:
    """True where positions in whole matrices lie in this process' rows, and their positions there,
    or 0."""
    own = positions - stream.first
    inside = (own >= 0) & (own < entries)
    return inside, own.where(inside, 0)


def _largest_of_shards(
    values: Tensor, positions: Tensor, count: int, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The `count` values [*, own] of largest magnitude of all shards, and their positions."""
    missing = (0, count - values.shape[-1])
    values = torch.cat(list(shards.gather(functional.pad(values, missing))), -1)
    positions = torch.cat(list(shards.gather(functional.pad(positions, missing, value=-1))), -1)
    largest = values.abs().where(positions >= 0, -1).topk(count, sorted=False).indices
    return values.gather(-1, largest), positions.gather(-1, largest)


def distinct(bits: Callable[[int], Tensor], count: int, n: int) -> Tensor:
    """Sample `count` of the positions 0 … n − 1 without replacement: int64 [*, count].

    bits(m) gives m random int64 for each matrix: [*, m].

    For a small fraction, positions are drawn with replacement and repeated ones are rejected, which
    costs O(count) random numbers. `_smallest(bits(n), count)` alone would be right too, but costs n
    of them: for 1 % of n = 10⁵ or 10⁶ positions it takes 15 times as long. It serves as the
    fallback, for a large fraction and for a matrix with too many repeated positions. The number of
    draws is the mean that `count` distinct ones take (the coupon collector's) plus 8 standard
    deviations, see `number_of_draws`.
    """
    if count == 1:
        return _below(n, bits(1))
    draws = number_of_draws(count, n)
    if draws is None:
        return _smallest(bits(n), count)
    position, order = _first_occurrences(_below(n, bits(draws)), count)
    enough = order[..., -1:] < _REPEATED
    if not enough.all():
        position = torch.where(enough, position, _smallest(bits(n), count))
    return position


def number_of_draws(count: int, n: int) -> int | None:
    """The number of draws with replacement that give `count` of n positions, or None where a random
    number for every position is cheaper."""
    mean = n * log(n / (n - count)) if count < n else n
    deviation = count / (n - count) * sqrt(n / 2) if count < n else n
    draws = ceil(mean + 8 * deviation) + SPARE_DRAWS
    return draws if draws <= n // 2 else None


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


SPARE_DRAWS = 8
_REPEATED = 1 << 30  # more than the number of draws


def fraction(ratio: float, entries: int) -> int:
    """max(1, ⌊ratio · entries⌋), with 0.29 · 100 = 29 where floats give 28.999999999999996."""
    return max(1, floor(ratio * entries * (1 + 1e-12)))
