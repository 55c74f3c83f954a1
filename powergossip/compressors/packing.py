"""Packing of small integers into bytes."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` integers of `bits` bits: ⌈count · bits / 8⌉."""
    return -(-count * bits // 8)


def pack(levels: Tensor, bits: int) -> Tensor:
    """levels `[*, n]`, uint8 below 2^bits → uint8 `[*, ⌈n · bits / 8⌉]`, for 1 to 8 bits.

    The bytes are one little-endian string of bits, where integer j has the bits j · bits to (j + 1)
    · bits − 1. Unused bits at the end are 0.
    """
    count = levels.shape[-1]
    if not count:
        return levels
    if 8 % bits == 0:  # a word of 8/bits integers becomes a byte
        fields = 8 // bits
        words = _words(levels, fields)
        # A sum of shifted copies of the word: integer i of copy i gets into the topmost byte, and
        # no two integers overlap there or below.
        top = 8 * (fields - 1)
        factor = sum(1 << (top - i * (8 - bits)) for i in range(fields))
        return words.mul(factor).bitwise_right_shift_(top).to(torch.uint8)
    words = _words(
        levels, 8
    )  # a word of 8 integers becomes `bits` bytes, by closing the gaps in three steps
    for half in (8, 16, 32):
        used = half // 8 * bits
        low = words & _lowest(used, 2 * half)
        words = low | (words ^ low) >> (half - used)
    packed = words[..., None].view(torch.uint8)[..., :bits].flatten(-2)
    return packed[..., : packed_size(count, bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack` for `count` integers: uint8 `[*, count]`."""
    if not count:
        return packed
    if bits == 8:
        return packed[..., :count].clone()
    if bits == 4:  # a byte becomes two, faster than with a table
        words = packed.to(torch.int16)
        words = (words << 4).bitwise_or_(words).bitwise_and_(0x0F0F)
        return words.view(torch.uint8)[..., :count]
    if 8 % bits == 0:
        words = _unpacked_bytes(bits, packed.device).index_select(0, packed.flatten().int())
        levels = words.view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * (8 // bits))
        return levels[..., :count]
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
    """Groups of `length` levels `[*, n]` as one wider integer each, the last padded with zeros."""
    if missing := -levels.shape[-1] % length:
        levels = functional.pad(levels, (0, missing))
    elif levels.storage_offset() % length or not levels.is_contiguous():
        levels = levels.clone(memory_format=torch.contiguous_format)
    return levels.view(_INTEGERS[length])


def _lowest(ones: int, lane: int) -> int:
    """A 64-bit mask with `ones` ones at the bottom of each lane of `lane` bits."""
    return sum(((1 << ones) - 1) << start for start in range(0, 64, lane))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _unpacked_bytes(bits: int, device: torch.device) -> Tensor:
    """Each of the 256 bytes as a word of 8/bits integers, for bits that divide 8."""
    shifts = torch.arange(0, 8, bits)
    levels = (torch.arange(256)[:, None] >> shifts) & (2**bits - 1)
    return levels.to(torch.uint8).view(_INTEGERS[8 // bits])[:, 0].to(device)
