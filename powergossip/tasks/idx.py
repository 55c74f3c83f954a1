"""The IDX file format of the MNIST family: arrays of bytes behind a header of big-endian integers.

    0 0 type rank | size of each axis, 32 bits each | the entries, the last axis fastest

Type 8 is unsigned bytes, the only one that images and labels use. LeCun, Cortes & Burges (1998),
"The MNIST database of handwritten digits".
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from powergossip.tasks import files

UNSIGNED_BYTE = 8


def read(path: Path, rank: int) -> Tensor:
    """The file's array, which must have `rank` axes: uint8. The file may be compressed by gzip.

    Raises ValueError, naming the file and what was found, if it is damaged, something else, or not
    what SHA256SUMS beside it says.
    """
    content = bytearray(files.uncompressed(path))
    start = 4 + 4 * rank
    if len(content) < start:
        raise ValueError(f"{path} is truncated: {len(content)} bytes, less than an IDX header")
    expected = bytes([0, 0, UNSIGNED_BYTE, rank])
    if content[:4] != expected:
        raise ValueError(
            f"{path} is not an IDX file of bytes with {rank} axes: "
            f"it starts with {content[:4].hex()} instead of {expected.hex()}"
        )
    sizes = struct.unpack(f">{rank}I", content[4:start])
    found, promised = len(content) - start, math.prod(sizes)
    if found != promised:
        shape = " × ".join(map(str, sizes))
        problem = "is truncated" if found < promised else "has too many bytes"
        raise ValueError(
            f"{path} {problem}: its header says {shape} = {promised} bytes, {found} follow"
        )
    if promised == 0:
        raise ValueError(f"{path} is empty: its header says {sizes}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(sizes)


def encoded(array: Tensor) -> bytes:
    """The content of the file, uncompressed, that holds a uint8 array."""
    header = bytes([0, 0, UNSIGNED_BYTE, array.dim()]) + struct.pack(
        f">{array.dim()}I", *array.shape
    )
    return header + array.numpy().tobytes()
