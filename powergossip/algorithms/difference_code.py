"""Differences of neighbors' vectors from messages of few bits: integers modulo 2^b.

Axes: worker (hosted here), neighbor (slot), part (a direction or a tensor of the vector), element.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import kernels, randomness
from powergossip.algorithms.directions import EdgeConstants
from powergossip.compressors.packing import pack, packed_size, unpack
from powergossip.replica_group import Shards

WHOLE = 32  # bits of an element that is not coded
_BLOCK = 64  # elements that are rotated together
_CHECK = 2**16  # modulus of a checksum
_FINE = 6  # mean square of the integers from which a step is narrow enough
_APART = 12  # octaves between the sizes of parts
_LARGEST = 1600  # exponent of a step
_LEAST = 30  # octaves below 1 of a part without a difference, if all are
_EXACT = 2.0**50
_STEPS = 4  # steps of a range in an octave
_START = 2  # whole messages: models often start equal, and the first differences are 0
_CLEAR = 2**32  # first index of the dither in a random stream, after the directions'


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

    A difference beyond the range would wrap around. Each block has a checksum of 16 bits, the sum
    of the carries ⌊k/2^b⌋ with weights 3^r modulo 2^16. It finds one or two wraps, and others with
    probability 1 − 2^−16. Both ends find the same. They leave the block out, and widen Δ. If more
    than a quarter of the blocks wrap, d = 0.

    Args:
        lengths: Elements of the parts.
        shards: Processes of the replica, if parameters are divided over them. All have s, and each
            sends a piece of the message.
        index: Index of the code among the codes of an edge.
        library: Compiled loops, kernels/difference_code.c. They give the same results.

    Attributes:
        size: Bytes of a message.
        state: Exponents of σ by part, exponent of Δ, and number of messages in a row that were
            skipped: int64 [worker, neighbor, slot, part + 2].
    """

    def __init__(
        self,
        edges: EdgeConstants,
        bits: int,
        lengths: Sequence[int],
        slots: int,
        index: int,
        shards: Shards | None = None,
        library: kernels.Kernels | None = None,
    ):
        self._edges, self._bits, self._shards = edges, bits, shards
        self._device = device = edges.key.device
        self._roots = torch.tensor(_ROOTS, dtype=torch.float64, device=device)
        self._first = _CLEAR + index * 2**32
        self.elements = count = sum(lengths)
        random = randomness.generator(0, "difference-code", count)
        self._signs = torch.from_numpy(random.choice([-1.0, 1.0], count)).to(device)
        self._lengths = torch.tensor(lengths, device=device)
        part = np.repeat(np.arange(len(lengths)), lengths)
        self._part = torch.from_numpy(part).to(device)
        self._columns, rest = divmod(count, _BLOCK)
        self._blocks = self._columns + (rest > 0)
        order = torch.from_numpy(random.permutation(count))
        self._order, self._back = order.to(device), order.argsort().to(device)
        self._rotations = [_rotation(size).to(device) for size in (_BLOCK, rest)]
        # ±3^r are the odd numbers modulo a power of two, each once.
        weights = torch.tensor([pow(3, row, _CHECK) for row in range(_BLOCK)])
        weights = torch.cat([weights.repeat_interleave(self._columns), weights[:rest]])
        self._weights = weights.to(device)
        self.size = sum(packed_size(count, b) for b in self._widths) + 2 * self._blocks
        pieces = 1 if self._shards is None else self._shards.size
        length = -(-self.size // pieces)
        self._message, self._piece = (
            torch.zeros(*edges.key.shape, n, dtype=torch.uint8, device=device)
            for n in (self.size, length)
        )
        self._shape = (*edges.key.shape, slots, len(lengths) + 2)
        start = self.no_ranges()
        self.state: Tensor = start["state"]
        self._whole: list[int] = start["whole"]
        self._counts = torch.zeros(2, *edges.key.shape, dtype=torch.int64, device=device)
        self._compiled = None if library is None else self._loops(library)

    @property
    def skipped(self) -> Tensor:
        """Number of blocks that were left out, over all edges."""
        return self._counts[0].sum()

    @property
    def blocks(self) -> Tensor:
        """Number of all blocks."""
        return self._counts[1].sum()

    @property
    def _widths(self) -> tuple[int, ...]:
        """The bits of an integer, in fields of at most 8."""
        return (self._bits,) if self._bits <= 8 else (8, self._bits - 8)

    def known(self, slot: int) -> bool:
        """True if there are ranges. Otherwise a message is whole."""
        return self._whole[slot] == 0

    # --- Messages ---

    def encode(self, s: Tensor, slot: int, counter: int) -> Tensor:
        """The message [worker, neighbor, byte] of s [worker, neighbor, element], or [worker, 1,
        element] if it is the same for all neighbors.

        Args:
            slot: Index of the ranges.
            counter: Index of the random numbers.
        """
        if self._compiled is None:
            self._encode(s, slot, counter)
        else:
            self._compiled.encode(s, slot, counter)
        if self._shards is None:
            return self._message
        return self._shards.piece(self._message, self._piece)

    def decode(self, own: Tensor, received: Tensor, slot: int, out: Tensor) -> Tensor:
        """Return out ← d [worker, neighbor, element] from the messages of both ends."""
        if self._shards is not None:
            own, received = (self._shards.message(piece, self.size) for piece in (own, received))
        if self._compiled is not None:
            return self._compiled.decode(own, received, slot, out)
        return out.copy_(self._decode(own, received, slot))

    def _encode(self, s: Tensor, slot: int, counter: int) -> None:
        sizes, step = self._ranges(slot)
        z = s.double() * self._signs / sizes
        y = self._rotated(z.index_select(-1, self._order)).mul_(0.125 / step)
        dither = randomness.uniform(self._edges.key, counter, self.elements, self._first)
        whole = 2.0**self._bits * _CHECK
        # Beyond double precision, the ends send different numbers, and both find that.
        sign = self._edges.sign[..., None]
        noise = (dither.double() * sign).remainder_(1).mul_(whole)
        k = torch.where(y.abs() < _EXACT, y.add(dither), noise).floor_().remainder_(whole).long()
        low, carries = k & (2**self._bits - 1), k >> self._bits
        fields = [low & 255, low >> 8]
        packed = [
            pack(field.to(torch.uint8), bits)
            for field, bits in zip(fields, self._widths, strict=False)
        ]
        sums = self._sums(carries)
        sums = torch.cat([sums & 255, sums >> 8], -1).to(torch.uint8)
        torch.cat([*packed, sums], -1, out=self._message)

    def _decode(self, own: Tensor, received: Tensor, slot: int) -> Tensor:
        low, sums = self._read(received)
        own_low, own_sums = self._read(own)
        whole, half = 2**self._bits, 2 ** (self._bits - 1)
        apart = low - own_low
        k = (apart + half) % whole - half
        wrong = (self._sums((k - apart) // whole) - sums + own_sums) % _CHECK != 0
        wrong |= self._by_block(k == -half) > 0  # ±half is none of them
        present = self._edges.absent == 0
        wrong &= present[..., None]
        failed = wrong.sum(-1)
        skip = failed * 4 > self._blocks
        left = present & (failed * 4 <= self._blocks)
        k = k * self._of_blocks((wrong == 0) & left[..., None])
        sizes, step = self._ranges(slot)
        integers = self._rotated(k.double()).index_select(-1, self._back)
        self._follow(slot, k, integers, failed, skip)
        self._counts[0] += torch.where(skip, self._blocks, failed)
        self._counts[1] += present * self._blocks
        return integers.mul_(step / 8).mul_(sizes).mul_(self._signs)

    def begin(self, d: Tensor, slot: int) -> None:
        """Take the ranges from a difference [worker, neighbor, element] that was sent whole."""
        largest = d.new_zeros(*d.shape[:2], len(self._lengths), dtype=torch.float64)
        largest.scatter_reduce_(-1, self._part.expand_as(d), d.double().abs(), "amax")
        state = self.state[:, :, slot]
        state[..., :-2] = torch.frexp(largest.nan_to_num_())[1] - 2  # an amplitude, not the largest
        sizes = state[..., :-2].masked_fill_(largest == 0, -_LEAST)
        sizes.copy_(torch.maximum(sizes, sizes.amax(-1, keepdim=True) - _APART))
        state[..., -2] = _STEPS * (4 - self._bits)
        state[..., -1] = 0
        self._whole[slot] -= 1

    def no_ranges(self) -> dict[str, Any]:
        """The state at the start, as `saved`."""
        state = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
        return {"state": state, "whole": [_START] * self._shape[2]}

    def saved(self) -> dict[str, Any]:
        """A copy of the ranges."""
        return {"state": self.state.clone(), "whole": list(self._whole)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        self.state.copy_(saved["state"])
        self._whole = list(saved["whole"])

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
        change = torch.where(good & (peak == 0), -8 * _STEPS, change)
        skips = torch.where(skip, state[..., -1] + 1, 0)
        # A step that was widened for lack of sizes is as before once there are sizes.
        again = 3 * (state[..., -1] > 0) - 2 * _STEPS * state[..., -1]
        change = torch.where(skip, 2 * _STEPS, change + again)
        state[..., :-2] = torch.where(skip[..., None], before, sizes)
        state[..., -2] = (state[..., -2] + change).clamp_(_STEPS * (2 - self._bits), _LARGEST)
        state[..., -1] = skips

    def _ranges(self, slot: int) -> tuple[Tensor, Tensor]:
        """σ [worker, neighbor, element], and Δ [worker, neighbor, 1].

        σ is a power of 2, and Δ one of its fourth root, times 2^(1/8): with powers of 2, large y of
        single precision would be multiples of 2^b, and their differences invisible.
        """
        state = self.state[:, :, slot]
        one = torch.ones((), dtype=torch.float64, device=self._device)
        sizes = torch.ldexp(one.expand_as(state[..., :-2]), state[..., :-2]).index_select(
            -1, self._part
        )
        exponent = state[..., -2:-1]
        return sizes, torch.ldexp(self._roots[exponent % _STEPS], exponent // _STEPS)

    def _rotated(self, z: Tensor) -> Tensor:
        """8 H z = 8 Hᵀ z. Integers give the same result in any order."""
        full, rest = self._split(z)
        return torch.cat([(self._rotations[0] @ full).flatten(-2), rest @ self._rotations[1]], -1)

    def _split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix [..., 64, columns] whose columns are blocks, and the block behind it."""
        full = self._columns * _BLOCK
        return z[..., :full].unflatten(-1, (_BLOCK, self._columns)), z[..., full:]

    def _sums(self, carries: Tensor) -> Tensor:
        """Σ weight · carry modulo 2^16 of each block."""
        return self._by_block(carries * self._weights) % _CHECK

    def _by_block(self, values: Tensor) -> Tensor:
        """The sums over the blocks [..., block], int64."""
        full, rest = self._split(values)
        sums = full.sum(-2), rest.sum(-1, keepdim=True)
        return torch.cat(sums, -1)[..., : self._blocks]

    def _of_blocks(self, values: Tensor) -> Tensor:
        """The values of blocks, for each element."""
        columns = values[..., : self._columns].repeat(*[1] * (values.dim() - 1), _BLOCK)
        rest = self.elements - self._columns * _BLOCK
        return torch.cat([columns, values[..., -1:].expand(*values.shape[:-1], rest)], -1)

    def _read(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The integers [..., element] and the checksums [..., block] of a message, int64."""
        start, low = 0, torch.zeros((), dtype=torch.int64, device=self._device)
        for shift, bits in zip((0, 8), self._widths, strict=False):
            stop = start + packed_size(self.elements, bits)
            field = unpack(message[..., start:stop].contiguous(), bits, self.elements)
            low, start = low + (field.long() << shift), stop
        sums = message[..., start:].long().unflatten(-1, (2, -1))
        return low, sums[..., 0, :] + (sums[..., 1, :] << 8)

    def _loops(self, library: kernels.Kernels) -> "_Loops":
        edges = self._edges
        margin = self._order.new_zeros(16)
        orders = torch.cat([self._order, margin]).int(), self._back.int()
        signs = self._signs.float()
        arrays = [self._lengths, *orders, signs, edges.sign, edges.absent, edges.key]
        arrays = [array.contiguous() for array in (*arrays, self.state, self._counts)]
        structure = _Code(
            *(edges.key.numel(), self._shape[2], len(self._lengths), self.elements),
            *(self._bits, self.size, self._first),
            *(kernels.address(array) for array in arrays),
        )
        return _Loops(library, structure, arrays, self._message)


class _Code(ctypes.Structure):
    """`Code` of difference_code.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("edges", "slots", "parts", "elements")),
        *((name, ctypes.c_int64) for name in ("bits", "size", "first")),
        *((name, ctypes.c_void_p) for name in ("length", "order", "back", "flip")),
        *((name, ctypes.c_void_p) for name in ("sign", "absent", "key")),
        *((name, ctypes.c_void_p) for name in ("state", "counts")),
    )


class _Loops:
    """The compiled loops of a code.

    Args:
        arrays: The memory of the structure.
    """

    def __init__(
        self, library: kernels.Kernels, code: _Code, arrays: Sequence[Tensor], message: Tensor
    ):
        self._code, self._arrays, self._message = code, arrays, message
        self._at = ctypes.addressof(code)
        self._encode = kernels.function(library, "difference_encode", "pipiiiupi")
        self._decode = kernels.function(library, "difference_decode", "pipppi")

    def encode(self, s: Tensor, slot: int, counter: int) -> None:
        assert s.dtype == torch.float32
        assert s.stride(2) == 1
        self._encode(
            *(self._at, slot, s.data_ptr(), s.stride(0), s.stride(1) * (s.shape[1] > 1)),
            *(self._message.shape[1], counter, self._message.data_ptr(), torch.get_num_threads()),
        )

    def decode(self, own: Tensor, received: Tensor, slot: int, out: Tensor) -> Tensor:
        both = [message.contiguous() for message in (own, received)]  # of shards: with a margin
        messages = map(kernels.address, (*both, out))
        self._decode(self._at, slot, *messages, torch.get_num_threads())
        return out


# 2^(i/4 + 1/8)
_ROOTS = (1.0905077326652577, 1.2968395546510096, 1.5422108254079407, 1.8340080864093424)


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
