"""Compressors of matrices, and the codec that turns a worker's tensors into a message of bytes.

A compressor C works on matrices v `[*, row, column]`, any leading axes, all matrices at once. It
does not depend on bytes, layouts or workers. It converts each matrix to a few *fields*, rows of
elements of one type. Their types and lengths follow from the shape of the matrix::

    fields(rows, columns)           the fields of a matrix, hence the size of a message
    compress(v, stream)             v → the fields, one tensor [*, length] each
    decompress(fields, out, stream) out [*, row, column] ← out + C(v)

The elements of a field may also be *levels*, a small set of integers. `compress` returns the index
of each level, and the codec packs the indices to the least number of bits.

`stream` is the source of random numbers of a matrix, a function of (seed, sending worker, place of
the matrix in the layout, step counter), or of all these but the worker for values that all workers
share. Sender and receiver have the same stream. Hence RandomK sends no positions, and QSGD's
rounding does not depend on which process hosts the worker.

A compressor with `linear = True` is a linear map that is the same for all workers: all its random
numbers are shared, and its fields are floats. Then the mean of all fields decompresses to the mean
of all C(v), so that an all-reduce can take the place of an all-gather.

`Codec` does this for a whole layout: x [worker, D] → message [worker, bytes], and back for any
number of senders at once. All matrices of one shape are one call, as are all vectors of one length
(n × 1 matrices). A message consists of::

    all 4-byte elements of all tensors, then all 2-byte elements, then all 1-byte elements, then all
    levels as one string of bits,

each section in the order of the layout's tensors and of a compressor's fields. Thus every element
is aligned without padding. The byte order is the machine's.

Decoding uses elementwise arithmetic only, so that its result is the same to the bit in any batch.
CHOCO-Gossip and DeepSqueeze rely on this: the sender's own C(v), decoded from its own message, must
equal the C(v) of its neighbors. Decoding adds to its output, since a sparse C(v) then costs time in
proportion to its message.

Modules::

    compressor.py   the interface
    sparse.py       TopK, RandomK, RandomBlock
    chunked.py      ChunkTopK, of sparse-loco and demo alone
    quantized.py    SignAndNorm, Rounding, QSGD, Identity; BlockRounding, of all-reduce alone
    low_rank.py     SVD
    codec.py        a worker's message
    packing.py      levels as bits

To add a compressor, write its class in a module beside this one and its row in `COMPRESSORS` here.
The tests of the laws of all compressors (tests/compressors/test_compressors.py) use the registry.

Axes: worker (hosted here), neighbor (slot), layer (tensors of one shape), row, column.
Symbols: v (a matrix of N = rows · columns entries), K (the number of entries kept), δ (the
contraction, E‖v − C(v)‖² ≤ (1 − δ)‖v‖²).
"""

from typing import Any

from powergossip import registry_options as _options
from powergossip.compressors.chunked import ChunkTopK, chunk_shape
from powergossip.compressors.codec import Codec, matrices, size
from powergossip.compressors.compressor import (
    BySize,
    Compressor,
    Field,
    Levels,
    Senders,
    Stream,
)
from powergossip.compressors.low_rank import SVD
from powergossip.compressors.packing import pack, packed_size, unpack
from powergossip.compressors.quantized import (
    BLOCK,
    QSGD,
    BlockRounding,
    Identity,
    Rounding,
    SignAndNorm,
)
from powergossip.compressors.sparse import RandomBlock, RandomK, TopK

__all__ = [
    "BLOCK",
    "COMPRESSORS",
    "QSGD",
    "SVD",
    "BlockRounding",
    "BySize",
    "ChunkTopK",
    "Codec",
    "Compressor",
    "Field",
    "Identity",
    "Levels",
    "RandomBlock",
    "RandomK",
    "Rounding",
    "Senders",
    "SignAndNorm",
    "Stream",
    "TopK",
    "chunk_shape",
    "make",
    "matrices",
    "pack",
    "packed_size",
    "size",
    "unpack",
]


# Registry names: `optimizer_compressor` in train.py. The options of a row are the fields of its
# class.
COMPRESSORS: dict[str, _options.Builder] = {
    "identity": Identity,
    "qsgd": QSGD,
    "random-block": RandomBlock,
    "random-k": RandomK,
    "rounding": Rounding,
    "sign-and-norm": SignAndNorm,
    "svd": SVD,
    "top-k": TopK,
}


def make(name: str, /, **given: Any) -> Compressor:
    """Build the compressor of that name with the options `given`.

    Raises:
        ValueError: For an unknown name, an option that the compressor does not have, or a bad
            value.
    """
    row = _options.find(COMPRESSORS, "compressor", name)
    known = _options.parameters(row)
    built: Compressor = row(**_options.check(name, given, known))
    for method in ("fields", "compress", "decompress"):
        if not callable(getattr(built, method, None)):
            raise TypeError(f"compressor {name} has no method {method}; see compressors.Compressor")
    return built
