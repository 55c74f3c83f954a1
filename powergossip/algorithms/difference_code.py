"""Differences of neighbors' vectors from messages of few bits: integers modulo 2^b.

Axes: worker (hosted here), neighbor (slot), part (a direction or a tensor of the vector), element.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor

from powergossip import randomness
from powergossip.algorithms.directions import EdgeConstants
from powergossip.compressors.packing import pack, packed_size, unpack
from powergossip.shards import Shards

WHOLE = 32  # bits of an element that is not coded
_BLOCK = 64  # elements that are rotated together, of norm 8
FINE, PEAK, WIDE, DROP = 6, 0.375, 2, 1
_STEPS = 4  # steps of a range in an octave
_CLEAR = 2**33  # first index of the dither in a random stream, behind those of directions


class DifferenceCode:
    """d = s_j − s_i for the ends i and j of an edge, from b bits an element.

    Vectors s of neighbors are large, and their difference is small. Both ends round s on the same
    grid, with the same dither u, and send integers modulo 2^b::

        y_i = H (s_i/σ)                  H: rotation of blocks of 64 elements, in a random order
        k_i = ⌊y_i/Δ + u⌋                sent modulo 2^b
        d = σ Hᵀ Δ mod(k_j − k_i)        mod: to −2^(b−1) … 2^(b−1)

    Both ends have the same d to the bit, since it is a function of integers. E d = s_j − s_i over
    u, and the error is relative to d, not to s. Modulo rounding with the receiver's own vector as
    reference: Davies et al. (2021), arXiv:2002.09268; there the ends do not have the same d.

    The size σ of each part follows the last d. The rotation gives all elements of a block the same
    distribution, whatever the parts and their outliers. The step Δ leaves room for changes, and
    follows the largest integers.

    A difference beyond the range would wrap around. Each block has a checksum of 8 bits, the sum of
    the carries ⌊k/2^b⌋ with odd weights modulo 256. It finds one or two wraps, and others with
    probability 255/256. Both ends find the same. They leave the block out, and widen Δ. If more
    than half of the blocks wrap, d = 0.

    Args:
        lengths: Elements of the parts.
        shards: Processes of the replica, if parameters are divided over them. All have s, and each
            sends a piece of the message.
        index: Index of the code among those of an edge.

    Attributes:
        size: Bytes of a message.
        state: Exponents of σ by part, exponent of Δ, and number of messages in a row that were
            skipped, −1 before there are ranges: int64 [worker, neighbor, slot, part + 2].
        known: True if there are ranges, by slot.
        skipped, blocks: Number of blocks that were left out, and of all, over all edges.
    """

    def __init__(
        self,
        edges: EdgeConstants,
        bits: int,
        lengths: Sequence[int],
        slots: int,
        index: int,
        shards: Shards | None = None,
    ):
        self._edges, self._bits, self._shards = edges, bits, shards
        self._device = device = edges.key.device
        self._first = _CLEAR + index * 2**32
        count = sum(lengths)
        self.elements = count
        random = randomness.generator(0, "difference-code", count)
        order = random.permutation(count)
        signs = random.choice([-1.0, 1.0], count)
        part = np.repeat(np.arange(len(lengths)), lengths)
        self._order = torch.from_numpy(order).to(device)
        self._back = torch.from_numpy(np.argsort(order)).to(device)
        self._part = torch.from_numpy(part[order]).to(device)
        self._signs = torch.from_numpy(signs).to(device)
        self._lengths = torch.tensor(lengths, dtype=torch.float64, device=device)
        self._full = count // _BLOCK * _BLOCK
        self._rotations = [_rotation(_BLOCK).to(device), _rotation(count - self._full).to(device)]
        self._blocks = -(-count // _BLOCK)
        self._weights = 2 * torch.arange(count, device=device) % (2 * _BLOCK) + 1
        self._block = torch.arange(count, device=device) // _BLOCK
        self.size = sum(packed_size(count, b) for b in self._widths) + self._blocks
        pieces = 1 if self._shards is None else self._shards.size
        length = -(-self.size // pieces)
        self._message, self._piece = (
            torch.zeros(*edges.key.shape, n, dtype=torch.uint8, device=device)
            for n in (self.size, length)
        )
        self._shape = (*edges.key.shape, slots, len(lengths) + 2)
        self.state = self.no_ranges()
        self.known = [False] * slots
        self.skipped = self.blocks = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def _widths(self) -> tuple[int, ...]:
        """The bits of an integer, in fields of at most 8."""
        return (self._bits,) if self._bits <= 8 else (8, self._bits - 8)

    # --- Messages ---

    def encode(self, s: Tensor, slot: int, counter: int) -> Tensor:
        """The message [worker, neighbor, byte] of s [worker, neighbor, element].

        Args:
            slot: Index of the ranges.
            counter: Index of the random numbers.
        """
        sizes, step = self._ranges(slot)
        z = s.double()[..., self._order] * self._signs / sizes
        y = self._rotated(z, transposed=False).div_(8 * step)
        dither = randomness.uniform(self._edges.key, counter, self.elements, self._first)
        k = y.add_(dither).floor_().remainder_(2.0 ** (self._bits + 8)).nan_to_num_().int()
        low, carries = k & (2**self._bits - 1), k >> self._bits
        fields = [low & 255, low >> 8]
        packed = [
            pack(field.to(torch.uint8), bits)
            for field, bits in zip(fields, self._widths, strict=False)
        ]
        torch.cat([*packed, self._sums(carries).to(torch.uint8)], -1, out=self._message)
        if self._shards is None:
            return self._message
        return self._shards.piece(self._message, self._piece)

    def decode(self, own: Tensor, received: Tensor, slot: int) -> Tensor:
        """d [worker, neighbor, element], in double precision, from the messages of both ends."""
        if self._shards is not None:
            own, received = (self._shards.message(piece, self.size) for piece in (own, received))
        low, sums = self._read(received)
        own_low, own_sums = self._read(own)
        whole, half = 2**self._bits, 2 ** (self._bits - 1)
        apart = low - own_low
        k = (apart + half) % whole - half
        wrong = (self._sums((k - apart) // whole) - sums + own_sums) % 256 != 0
        wrong |= torch.zeros_like(wrong).index_reduce_(-1, self._block, k == -half, "amax")  # ±half
        present = self._edges.absent == 0
        wrong &= present[..., None]
        failed = wrong.sum(-1)
        skip = failed * 2 > self._blocks
        left = wrong[..., self._block] | (skip | ~present)[..., None]
        k = k.masked_fill(left, 0)
        sizes, step = self._ranges(slot)
        integers = self._rotated(k.double(), transposed=True)
        self._follow(slot, k, integers, failed, skip)
        return (integers * (step / 8) * sizes * self._signs)[..., self._back]

    def begin(self, d: Tensor, slot: int) -> None:
        """Take the ranges from a difference [worker, neighbor, element] that was sent whole."""
        largest = torch.zeros(*d.shape[:2], len(self._lengths), dtype=torch.float64)
        largest = largest.to(self._device).index_reduce_(
            -1, self._part, d.double()[..., self._order].abs(), "amax"
        )
        state = self.state[:, :, slot]
        state[..., :-2] = torch.frexp(largest.nan_to_num_())[1] - 2  # an amplitude, not the largest
        state[..., :-2].masked_fill_(largest == 0, -100)
        state[..., -2] = _STEPS * (4 - self._bits)
        state[..., -1] = 0
        self.known[slot] = True

    def no_ranges(self) -> Tensor:
        """The state at the start."""
        state = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
        state[..., -1] = -1
        return state

    def load(self, state: Tensor) -> None:
        """Restore `state`."""
        self.state.copy_(state)
        self.known = (self.state[..., -1] >= 0).flatten(0, 1).all(0).tolist()

    def _follow(self, slot: int, k: Tensor, integers: Tensor, failed: Tensor, skip: Tensor) -> None:
        """Change the ranges after a message. Sums of integers are exact in any order."""
        state = self.state[:, :, slot]
        squares = torch.zeros(*k.shape[:2], len(self._lengths), dtype=torch.float64)
        squares = squares.to(self._device).index_add_(-1, self._part, integers.square())
        _, step = self._ranges(slot)
        mean = squares / self._lengths * (step / 8).square()
        exponent = state[..., :-2] + torch.frexp(mean)[1] // 2
        lower = state[..., :-2] - DROP
        sizes = torch.where(mean > 0, torch.maximum(exponent, lower), lower)
        peak = k.abs().amax(-1)
        mean_square = k.double().square().sum(-1) / self._lengths.sum()
        narrow = (peak < PEAK * 2 ** (self._bits - 1)) & (failed == 0) & (mean_square < FINE)
        skips = torch.where(skip, state[..., -1] + 1, 0)
        wider = torch.where(
            skip, _STEPS * 2 ** skips.clamp(max=8), WIDE * (failed > 0) - narrow.long()
        )
        state[..., :-2] = torch.where(skip[..., None], state[..., :-2], sizes.clamp_(min=-100))
        state[..., -2] += wider
        state[..., -1] = skips
        self.skipped = self.skipped + torch.where(skip, self._blocks, failed).sum()
        self.blocks = self.blocks + self._blocks * (self._edges.absent == 0).sum()

    def _ranges(self, slot: int) -> tuple[Tensor, Tensor]:
        """σ [worker, neighbor, element], in the order of the rotation, and Δ [worker, neighbor, 1].

        They are powers of 2 and of its fourth root, from a table.
        """
        state = self.state[:, :, slot]
        one = torch.ones((), dtype=torch.float64, device=self._device)
        sizes = torch.ldexp(one.expand_as(state[..., :-2]), state[..., :-2])[..., self._part]
        exponent = state[..., -2:-1]
        roots = torch.tensor(_ROOTS, dtype=torch.float64, device=self._device)
        return sizes, torch.ldexp(roots[exponent % _STEPS], exponent // _STEPS)

    def _rotated(self, z: Tensor, *, transposed: bool) -> Tensor:
        """H z, or Hᵀ z, without the factor 1/8. Integers give the same result in any order."""
        full, rest = self._rotations
        if transposed:
            full, rest = full.mT, rest.mT
        blocks = z[..., : self._full].unflatten(-1, (-1, _BLOCK)) @ full.mT
        return torch.cat([blocks.flatten(-2), z[..., self._full :] @ rest.mT], -1)

    def _sums(self, carries: Tensor) -> Tensor:
        """Σ weight · carry modulo 256 of each block."""
        sums = carries.new_zeros(*carries.shape[:-1], self._blocks)
        return sums.index_add_(-1, self._block, carries * self._weights.int()) % 256

    def _read(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The integers [..., element] and the checksums [..., block] of a message, int32."""
        start, low = 0, torch.zeros((), dtype=torch.int32, device=self._device)
        for shift, bits in zip((0, 8), self._widths, strict=False):
            stop = start + packed_size(self.elements, bits)
            field = unpack(message[..., start:stop].contiguous(), bits, self.elements)
            low, start = low + (field.int() << shift), stop
        return low, message[..., start:].int()


_ROOTS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)  # 2^(i/4)


@cache
def _rotation(size: int) -> Tensor:
    """An orthogonal matrix times 8, of integers: a Hadamard matrix of 64, or smaller ones along the
    diagonal."""
    found = torch.zeros(size, size, dtype=torch.float64)
    start = 0
    for length in (64, 16, 4, 1):
        while size - start >= length:
            block = torch.from_numpy(hadamard(length, dtype=np.float64))
            found[start : start + length, start : start + length] = block * int(
                (64 / length) ** 0.5
            )
            start += length
    return found
