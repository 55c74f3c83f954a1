"""Differences of neighbors' vectors from messages of few bits: integers modulo 2^b.

Axes: worker (hosted here), neighbor (slot), part (a direction or a tensor of the vector), element.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import randomness
from powergossip.algorithms.directions import EdgeConstants
from powergossip.compressors.packing import pack, packed_size, unpack
from powergossip.shards import Shards

WHOLE = 32  # bits of an element that is not coded
_BLOCK = 64  # elements that are rotated together, of norm 8
_FINE = 6  # mean square of the integers from which a step is narrow enough
_APART = 12  # octaves between the sizes of parts
_LARGEST = 1600  # exponent of a step
_LEAST = 30  # octaves below 1 of a part without a difference, if all are
_EXACT = 2.0**50
_STEPS = 4  # steps of a range in an octave
_CLEAR = 2**32  # first index of the dither in a random stream, behind those of directions


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
    follows the largest integers. Both have a lower bound, for the time after an agreement.

    A difference beyond the range would wrap around. Each block has a checksum of 8 bits, the sum of
    the carries ⌊k/2^b⌋ with odd weights modulo 256. It finds one or two wraps, and others with
    probability 255/256. It has 16 bits in messages of up to 192 elements. Both ends find the same.
    They leave the block out, and widen Δ. If more than a quarter of the blocks wrap, d = 0.

    Args:
        lengths: Elements of the parts.
        shards: Processes of the replica, if parameters are divided over them. All have s, and each
            sends a piece of the message.
        index: Index of the code among those of an edge.

    Attributes:
        size: Bytes of a message.
        state: Exponents of σ by part, exponent of Δ, and number of messages in a row that were
            skipped: int64 [worker, neighbor, slot, part + 2].
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
        self._roots = torch.tensor(_ROOTS, dtype=torch.float64, device=device)
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
        self._bytes = 1 if self._blocks > 3 else 2  # of a checksum
        self.size = sum(packed_size(count, b) for b in self._widths) + self._bytes * self._blocks
        pieces = 1 if self._shards is None else self._shards.size
        length = -(-self.size // pieces)
        self._message, self._piece = (
            torch.zeros(*edges.key.shape, n, dtype=torch.uint8, device=device)
            for n in (self.size, length)
        )
        self._shape = (*edges.key.shape, slots, len(lengths) + 2)
        start = self.no_ranges()
        self.state: Tensor = start["state"]
        self.known: list[bool] = start["known"]
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
        z = s.double().index_select(-1, self._order) * self._signs / sizes
        y = self._rotated(z, transposed=False).div_(8 * step)
        dither = randomness.uniform(self._edges.key, counter, self.elements, self._first)
        whole = 2.0 ** (self._bits + 8 * self._bytes)
        # Beyond double precision, the ends send different numbers, and both find that.
        sign = self._edges.sign[..., None]
        noise = (dither.double() * sign).remainder_(1).mul_(whole)
        k = torch.where(y.abs() < _EXACT, y.add(dither), noise).floor_().remainder_(whole)
        k = k.nan_to_num_().long()
        low, carries = k & (2**self._bits - 1), k >> self._bits
        fields = [low & 255, low >> 8]
        packed = [
            pack(field.to(torch.uint8), bits)
            for field, bits in zip(fields, self._widths, strict=False)
        ]
        sums = self._sums(carries)
        sums = torch.cat([sums >> 8 * i & 255 for i in range(self._bytes)], -1).to(torch.uint8)
        torch.cat([*packed, sums], -1, out=self._message)
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
        wrong = (self._sums((k - apart) // whole) - sums + own_sums) % 256**self._bytes != 0
        wrong |= self._by_block(k == -half) > 0  # ±half is none of them
        present = self._edges.absent == 0
        wrong &= present[..., None]
        failed = wrong.sum(-1)
        skip = failed * 4 > self._blocks
        kept = present & (failed * 4 <= self._blocks)
        blocks = (wrong == 0) & kept[..., None]
        k = k * blocks.gather(-1, self._block.expand_as(k))
        sizes, step = self._ranges(slot)
        integers = self._rotated(k.double(), transposed=True)
        self._follow(slot, k, integers, failed, skip)
        return (integers * (step / 8) * sizes * self._signs).index_select(-1, self._back)

    def begin(self, d: Tensor, slot: int) -> None:
        """Take the ranges from a difference [worker, neighbor, element] that was sent whole."""
        sizes = d.double().index_select(-1, self._order).abs()
        largest = sizes.new_zeros(*d.shape[:2], len(self._lengths))
        largest.scatter_reduce_(-1, self._part.expand_as(sizes), sizes, "amax")
        state = self.state[:, :, slot]
        state[..., :-2] = torch.frexp(largest.nan_to_num_())[1] - 2  # an amplitude, not the largest
        sizes = state[..., :-2].masked_fill_(largest == 0, -_LEAST)
        sizes.copy_(torch.maximum(sizes, sizes.amax(-1, keepdim=True) - _APART))
        state[..., -2] = _STEPS * (4 - self._bits)
        state[..., -1] = 0
        self.known[slot] = True

    def no_ranges(self) -> dict[str, Any]:
        """The state at the start, as `saved`."""
        state = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
        return {"state": state, "known": [False] * self._shape[2]}

    def saved(self) -> dict[str, Any]:
        """A copy of `state` and `known`."""
        return {"state": self.state.clone(), "known": list(self.known)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        self.state.copy_(saved["state"])
        self.known = list(saved["known"])

    def _follow(self, slot: int, k: Tensor, integers: Tensor, failed: Tensor, skip: Tensor) -> None:
        """Change the ranges after a message. Sums of integers are exact in any order."""
        state, half = self.state[:, :, slot], 2 ** (self._bits - 1)
        squares = integers.new_zeros(*k.shape[:2], len(self._lengths))
        squares.index_add_(-1, self._part, integers.square())
        _, step = self._ranges(slot)
        mean = squares / self._lengths * (step / 8).square()
        before = state[..., :-2]
        sizes = before + torch.frexp(mean)[1] // 2
        sizes = torch.where(mean > 0, torch.maximum(sizes, before - 1), before - 3)
        sizes = torch.maximum(sizes, sizes.amax(-1, keepdim=True) - _APART).clamp_(min=-2 * _LEAST)
        peak, good = k.abs().amax(-1), failed == 0
        mean_square = k.double().square().sum(-1) / self.elements
        narrow = good & (peak < 3 / 8 * half) & (mean_square < _FINE)
        change = 2 * (failed > 0) - narrow.long()
        if half > 4:
            change = torch.where(good & (peak == 1), -_STEPS, change)
        change = torch.where(good & (peak == 0), -8 * _STEPS, change)
        skips = torch.where(skip, state[..., -1] + 1, 0)
        # A step that was widened for lack of sizes is as before once there are sizes.
        again = 3 * (state[..., -1] > 0) - 2 * _STEPS * state[..., -1]
        change = torch.where(skip, 2 * _STEPS, change + again)
        # A part may have grown alone.
        raised = torch.minimum(before + 2, before.amax(-1, keepdim=True))
        same = torch.where(skips[..., None] > 2, raised, before)
        state[..., :-2] = torch.where(skip[..., None], same, sizes)
        state[..., -2] = (state[..., -2] + change).clamp_(_STEPS * (2 - self._bits), _LARGEST)
        state[..., -1] = skips
        self.skipped = self.skipped + torch.where(skip, self._blocks, failed).sum()
        self.blocks = self.blocks + self._blocks * (self._edges.absent == 0).sum()

    def _ranges(self, slot: int) -> tuple[Tensor, Tensor]:
        """σ [worker, neighbor, element], in the order of the rotation, and Δ [worker, neighbor, 1].

        They are powers of 2 and of its fourth root, from a table.
        """
        state = self.state[:, :, slot]
        one = torch.ones((), dtype=torch.float64, device=self._device)
        sizes = torch.ldexp(one.expand_as(state[..., :-2]), state[..., :-2]).index_select(
            -1, self._part
        )
        exponent = state[..., -2:-1]
        return sizes, torch.ldexp(self._roots[exponent % _STEPS], exponent // _STEPS)

    def _rotated(self, z: Tensor, *, transposed: bool) -> Tensor:
        """H z, or Hᵀ z, without the factor 1/8. Integers give the same result in any order."""
        full, rest = self._rotations
        if transposed:
            full, rest = full.mT, rest.mT
        blocks = z[..., : self._full].unflatten(-1, (-1, _BLOCK)) @ full.mT
        return torch.cat([blocks.flatten(-2), z[..., self._full :] @ rest.mT], -1)

    def _sums(self, carries: Tensor) -> Tensor:
        """Σ weight · carry modulo 256, or 256², of each block."""
        return self._by_block(carries * self._weights) % 256**self._bytes

    def _by_block(self, values: Tensor) -> Tensor:
        """The sums over the blocks [..., block], int64."""
        shape = (*values.shape[:-1], self._blocks)
        sums = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return sums.index_add_(-1, self._block, values.long())

    def _read(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The integers [..., element] and the checksums [..., block] of a message, int64."""
        start, low = 0, torch.zeros((), dtype=torch.int64, device=self._device)
        for shift, bits in zip((0, 8), self._widths, strict=False):
            stop = start + packed_size(self.elements, bits)
            field = unpack(message[..., start:stop].contiguous(), bits, self.elements)
            low, start = low + (field.long() << shift), stop
        sums = message[..., start:].long().unflatten(-1, (self._bytes, -1))
        return low, sum((sums[..., i, :] << 8 * i for i in range(self._bytes)), sums[..., 0, :] * 0)


_ROOTS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)  # 2^(i/4)


def _rotation(size: int) -> Tensor:
    """An orthogonal matrix times 8, of integers: a Hadamard matrix of 64, or smaller ones along the
    diagonal."""
    found = torch.zeros(size, size, dtype=torch.float64)
    start = 0
    for length in (64, 16, 4, 1):
        while size - start >= length:
            block = torch.ones(1, 1, dtype=torch.float64)
            while len(block) < length:
                block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), block)
            found[start : start + length, start : start + length] = block * int(
                (64 / length) ** 0.5
            )
            start += length
    return found
