"""Quantization: sign and norm, rounding, also by blocks, QSGD, and the identity."""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from powergossip import checks
from powergossip.compressors.compressor import BySize, Field, Levels, Stream


@dataclass(frozen=True)
class Identity:
    """C(v) = v.

    Message: N floats, row by row. δ = 1.
    """

    linear: ClassVar[bool] = True
    divides: ClassVar[str] = "rows"
    unbiased: ClassVar[bool] = True
    deepsqueeze_rate: ClassVar[float] = 1.0

    def stable_rate(self, rows: int, columns: int) -> float:
        """1"""
        return 1.0

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return (Field(torch.float32, rows * columns),)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        return (v.flatten(-2),)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        out.flatten(-2).add_(fields[0])


@dataclass(frozen=True)
class SignAndNorm:
    """C(v) = sign(v) ‖v‖₁/N, with sign(0) = +1.

    Message: the float ‖v‖₁/N, then N bits, 1 for +.
    δ = ‖v‖₁²/(N ‖v‖²) (Karimireddy, Rebjock, Stich & Jaggi 2019, arXiv:1901.09847, Lemma 8).

    A NaN or infinity reaches every decoded entry through the mean.
    """

    divides: ClassVar[str] = "rows"
    undirected: ClassVar[bool] = True  # entries that are large beside the mean grow on others

    def stable_rate(self, rows: int, columns: int) -> float:
        """1/3. With more, a few entries that are large beside the mean may grow."""
        return 1 / 3

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        return Field(torch.float32, 1), Field(Levels(-1, step=2, count=2), rows * columns)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        if stream.shards is None:  # a sum of magnitudes is several times faster than a 1-norm
            return v.abs().mean(-1, keepdim=True), torch.ge(v, 0)
        mean = stream.norm(v, 1).div_(stream.entries)
        return mean, torch.ge(v, 0)

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        mean, signs = fields
        out.flatten(-2).addcmul_(signs, mean)  # a product without rounding


@dataclass(frozen=True)
class _Integers:
    """A compressor whose messages are a norm and N integers from −levels to levels."""

    divides: ClassVar[str] = "rows"

    levels: int = 4

    def __post_init__(self) -> None:
        checks.between("levels", self.levels, 1, 127)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        levels = Levels(-self.levels, step=1, count=2 * self.levels + 1)
        return Field(torch.float32, 1), Field(levels, rows * columns)


@dataclass(frozen=True)
class Rounding(_Integers):
    """C(v) = ‖v‖_∞ ξ(v)/s, where s v_j/‖v‖_∞ is rounded to the nearest integer ξ_j ∈ {−s … s}.

    Message: the float ‖v‖_∞, then N integers of ⌈log₂(2s + 1)⌉ bits each: 3 for s = 3, 4 up to 7.
    `δ = 1 − Σ_j min(|v_j|, ‖v‖_∞/(2 s))²/‖v‖²`.
    Liu, Li, Wang, Tang & Yan (2021), arXiv:2007.00232, § 5, but rounded to the nearest integer.
    Their random dither makes C unbiased, and no contraction.

    A NaN or infinity reaches every decoded entry through the norm.

    Args:
        levels: Levels s above zero. A message has 3 bits an element with 3, 4 bits up to 7.

    Raises:
        ValueError: For levels below 1 or above 127 (more than 8 bits).
    """

    def stable_rate(self, rows: int, columns: int) -> float:
        """s/(s + 4). Entries below ‖v‖_∞/(2 s) are not sent."""
        return self.levels / (self.levels + 4)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        largest = stream.norm(v, torch.inf)
        rounded = v.div(largest).mul_(self.levels).round_()
        return largest, rounded.add_(self.levels).nan_to_num_()  # 0/0 too: the norm is 0

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        largest, rounded = fields
        out = out.flatten(-2)
        out.add_(rounded * (largest / self.levels))


BLOCK = 64  # entries with one scale


@dataclass(frozen=True)
class BlockRounding:
    """C(v) = s ξ(v) for each block of 64 entries, with b bits an entry.

    ξ_j is the nearest odd integer to v_j/s, at most 2^b − 1 in magnitude. With 8 bits it is the
    nearest integer up to 127. s is ‖v‖_∞/2^b, or ‖v‖_∞/127.5 with 8 bits. Then s minimizes
    ‖v − s ξ‖::

        s = ⟨v, ξ⟩/‖ξ‖²

    With 2 or 3 bits, both are repeated once.

    Message: s in bfloat16 for each block, then N integers of b bits. A block has its own
    `δ = ⟨v, ξ⟩²/(‖ξ‖² ‖v‖²)`, which is above 0.

    A NaN or infinity reaches every decoded entry of its block through the scale.

    Args:
        bits: Bits b of an entry, 2 to 8.

    Raises:
        ValueError: For other bits.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        checks.between("bits", self.bits, 2, 8)

    @property
    def _levels(self) -> Levels:
        return Levels(-127, 1, 255) if self.bits == 8 else Levels(1 - 2**self.bits, 2, 2**self.bits)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        size = rows * columns
        return Field(torch.bfloat16, -(-size // BLOCK)), Field(self._levels, size)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        levels, size = self._levels, v.shape[-2] * v.shape[-1]
        blocks = _blocks(v.flatten(-2))
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1, keepdim=True)
        scale = largest / (levels.step / 2 - levels.first)
        for _ in range(2 if self.bits < 4 else 1):
            index = (blocks / scale).sub_(levels.first).div_(levels.step).round_()
            index.clamp_(0, levels.count - 1).nan_to_num_()  # 0/0 too: all entries are 0
            entries = index.flatten(-2)[..., :size]
            integers = _blocks(entries.mul(levels.step).add_(levels.first))
            products = (blocks * 2**-16 * integers).sum(-1, keepdim=True)  # of 1e38, too
            scale = products / integers.square_().sum(-1, keepdim=True) * 2**16
        return scale.squeeze(-1), entries

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        scale, integers = fields
        out = out.flatten(-2)
        values = _blocks(integers) * scale.float()[..., None]
        out.add_(values.flatten(-2)[..., : out.shape[-1]])


def _blocks(v: Tensor) -> Tensor:
    """v by blocks [*, block, 64], of v `[*, entry]`, with zeros at the end."""
    if missing := -v.shape[-1] % BLOCK:
        v = torch.nn.functional.pad(v, (0, missing))
    return v.unflatten(-1, (-1, BLOCK))


@dataclass(frozen=True)
class QSGD(_Integers):
    """C(v) = scale · ‖v‖₂ sign(v) ξ(v)/s, with `s |v_j|/‖v‖₂` rounded to a neighboring integer
    ξ_j ∈ {0 … s} at random, so that `E ξ_j = s |v_j|/‖v‖₂`.

    Message: the float ‖v‖₂, then N integers sign(v_j) ξ_j ∈ {−s … s} of ⌈log₂(2s + 1)⌉ bits each.

    - With `unbiased`, scale = 1: E C(v) = v and E‖C(v) − v‖² ≤ ω ‖v‖² for ω = min(N/s², √N/s).
      Alistarh, Grubic, Li, Tomioka & Vojnovic (2017), arXiv:1610.02132, § 3.1, Lemma 3.1.
    - Otherwise scale = 1/(1 + ω): δ = 1/(1 + ω), for algorithms that need a contraction (CHOCO).
      Koloskova, Stich & Jaggi (2019), arXiv:1902.00340, § 3.5.

    The paper sends the integers in Elias coding, with a length that depends on v. Here they have a
    fixed width. Both ends have the random numbers, but only the sender uses them.

    A NaN or infinity reaches every decoded entry through the norm.

    Args:
        levels: Levels s above zero. A message has 4 bits an element with 4 to 7.
        unbiased: Leave out the scaling to a contraction.

    Raises:
        ValueError: For levels below 1 or above 127 (more than 8 bits).
    """

    unbiased: bool = False

    def stable_rate(self, rows: int, columns: int) -> float:
        """δ. If unbiased, 2/3 of 1/(5 ω), at most 2/3.

        Let D = x − x̂ and e = q − D, with E e = 0 and E‖e‖² ≤ ω ‖D‖². On an eigenvector of I − W
        with eigenvalue λ, a step of CHOCO-Gossip with copy rate α adds −(α + γ λ) e to (1 − α) D.
        D thus shrinks if (α + γ λ)² ω < 1 − (1 − α)². Both default rates satisfy this, since
        λ ≤ 2 max_i (1 − w_ii) and hence γ λ ≤ 4/3 min(1, 1/(5 ω)).
        """
        variance = self.variance_bound(rows * columns)
        return 2 / 3 / max(1.0, 5 * variance) if self.unbiased else 1 / (1 + variance)

    @property
    def copy_rate(self) -> float | BySize:
        """1 for a contraction. If unbiased, a function of N: 1/(1 + ω), at most 1/2."""
        if self.unbiased:
            return lambda elements: 1 / (1 + max(1.0, self.variance_bound(elements)))
        return 1.0

    def variance_bound(self, elements: int) -> float:
        """ω for N elements."""
        return min(elements / self.levels**2, sqrt(elements) / self.levels)

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        v = v.flatten(-2)
        norm = stream.norm(v, 2)
        scaled = v.abs().div_(norm).mul_(self.levels)
        rounded = scaled.add_(stream.uniform()).floor_().clamp_(max=self.levels)
        rounded = rounded.copysign_(v).add_(self.levels).nan_to_num_()  # 0/0 too: the norm is 0
        return norm, rounded

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        norm, rounded = fields
        out = out.flatten(-2)
        out.add_(rounded * (norm * self.factor(stream.entries)))

    def factor(self, elements: int) -> float:
        """scale/s for N elements."""
        scale = 1.0 if self.unbiased else 1 / (1 + self.variance_bound(elements))
        return scale / self.levels
