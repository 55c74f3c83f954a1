"""What a message looks like: compressors, and the codec that turns a worker's numbers into bytes.

A compressor C sees matrices v [*, row, column] — any leading axes, all matrices at once — and knows
nothing of bytes, layouts or workers. It makes a few *fields* of each matrix, rows of numbers of one
type; their types and lengths follow from the matrix' shape alone:

    fields(rows, columns)           what a message consists of, hence its size
    compress(v, stream)             v → the fields, one tensor [*, length] each
    decompress(fields, out, stream) out [*, row, column] ← out + C(v)

A field may also be of *levels*, one of a few whole numbers for each entry: `compress` says which,
and the codec packs them to as few bits as that takes.

`stream` is the matrix' own source of random numbers, a function of (seed, sending worker, place of
the matrix in the layout, step counter), or, for what all workers share, of the others alone: sender
and receiver have the same one. So RandomK sends no positions, and QSGD's rounding does not depend
on which process hosts the worker.

`Codec` does this for a whole layout: x [worker, D] → message [worker, bytes], and back for any
number of senders at once. All matrices of one shape are one call, as are all vectors of one length
(n × 1 matrices). In a message

    all 4-byte numbers of all tensors, then all 2-byte numbers, then all bytes, then all levels
    as one string of bits,

each section in the order of the layout's tensors and of a compressor's fields: thus every number is
aligned, and nothing is padded. Numbers are in the machine's byte order.

Decoding uses elementwise arithmetic only, so that its result is the same to the bit whatever else
is decoded beside it: CHOCO-Gossip and DeepSqueeze need the sender's own C(v), decoded from its own
message, to be exactly what its neighbors see. It adds, since a sparse C(v) then costs as little
time as it does memory.

    compressor.py   what a compressor is, and what it works with
    sparse.py       TopK, RandomK
    quantized.py    SignAndNorm, QSGD, Identity
    low_rank.py     SVD
    codec.py        a whole worker's message
    packing.py      levels as bits

To add a compressor: write its class in a module beside this one and its row in `COMPRESSORS` here;
the tests of the laws that every compressor obeys (tests/test_compressors.py) find it there.

Axes: worker (hosted here), neighbor (slot), layer (tensors of one shape), row, column.
Symbols: v a matrix of N = rows · columns numbers; K the numbers kept; δ the contraction,
E‖v − C(v)‖² ≤ (1 − δ)‖v‖².
"""

from typing import Any

from powergossip import options as _options
from powergossip.compressors.codec import Codec, size
from powergossip.compressors.compressor import Compressor, Field, Levels, Senders, Stream
from powergossip.compressors.low_rank import SVD
from powergossip.compressors.packing import pack, packed_size, unpack
from powergossip.compressors.quantized import QSGD, Identity, SignAndNorm
from powergossip.compressors.sparse import RandomK, TopK

__all__ = [
    "COMPRESSORS",
    "QSGD",
    "SVD",
    "Codec",
    "Compressor",
    "Field",
    "Identity",
    "Levels",
    "Options",
    "RandomK",
    "Senders",
    "SignAndNorm",
    "Stream",
    "TopK",
    "make",
    "pack",
    "packed_size",
    "size",
    "unpack",
]


# The names that users choose from: `optimizer_compressor` in train.py. A row's options are the
# fields of its class.
COMPRESSORS: dict[str, _options.Row] = {
    "identity": Identity,
    "qsgd": QSGD,
    "random-k": RandomK,
    "sign-and-norm": SignAndNorm,
    "svd": SVD,
    "top-k": TopK,
}


class Options(_options.Options):
    """Options of all compressors as attributes, for a row that takes them in one object."""

    def __init__(self, **given: Any):
        super().__init__(COMPRESSORS, given)


def make(name: str, options: Options | None = None, **given: Any) -> Compressor:
    """Build the compressor of that name with the options `given`.

    From an `options` object it takes its own. Raises ValueError for an unknown name, an option that
    the compressor does not have, or a bad value.
    """
    row = _options.find(COMPRESSORS, "compressor", name)
    if _options.takes_all(row):
        built: Compressor = row(options or Options(**given))
        return built
    known = _options.defaults(row)
    if options is not None:
        given = {option: value for option, value in options.given.items() if option in known}
    _options.check(name, given, known)
    built = row(**given)
    return built
