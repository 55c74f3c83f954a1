"""The IDX file format of the MNIST family: a header of big-endian integers, then bytes::

    0 0 type rank | size of each axis, 32 bits each | the elements, the last axis fastest

Images and labels have type 8, unsigned bytes.

References:
    LeCun, Cortes & Burges (1998), "The MNIST database of handwritten digits".
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from powergossip.tasks import data_files

UNSIGNED_BYTE = 8


def read(path: Path, rank: int) -> Tensor:
    """Read the array of a file, which must have `rank` axes: uint8. The file may be gzipped.

    Raises ValueError, with the file and its content, if it is damaged or of another format.
    """
    content = bytearray(data_files.uncompressed(path))
    start = 4 + 4 * rank
    expected = bytes([0, 0, UNSIGNED_BYTE, rank])
    if content[:4] != expected:
        raise ValueError(
            f"{path} is not an IDX file of bytes with {rank} axes: "
            f"it starts with {content[:4].hex()} instead of {expected.hex()}"
        )
    sizes = struct.unpack(f">{rank}I", content[4:start].ljust(4 * rank, b"\0"))
    size = math.prod(sizes)
    if not size or len(content) != start + size:
        shape = " × ".join(map(str, sizes))
        raise ValueError(f"{path} is damaged: {len(content)} bytes, with a header of {shape} bytes")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(sizes)


def encoded(array: Tensor) -> bytes:
    """The content of an uncompressed IDX file with this uint8 array."""
    header = bytes([0, 0, UNSIGNED_BYTE, array.dim()]) + struct.pack(
        f">{array.dim()}I", *array.shape
    )
    return header + array.numpy().tobytes()
