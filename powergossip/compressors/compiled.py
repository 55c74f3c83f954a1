"""Compiled loops for the messages of a codec on a CPU, see powergossip/kernels/compressed.c.

They write and read the same messages as the codec. Encoding is fused with the arithmetic that makes
the compressed vectors, and decoding with the arithmetic that uses them, so that a step takes few
passes over memory. Some compressors have none, such as SVD.

Axes: worker (hosted here), neighbor (slot).
"""

import ctypes

import torch
from torch import Tensor

from powergossip import kernels
from powergossip.compressors.codec import Codec
from powergossip.compressors.compressor import Compressor
from powergossip.compressors.quantized import QSGD, SignAndNorm
from powergossip.compressors.sparse import TopK
from powergossip.network import Network

_KINDS: dict[type[Compressor], int] = {SignAndNorm: 0, QSGD: 1, TopK: 2}  # as in compressed.c
_SPARSE = 2  # and above


class _Tensor(ctypes.Structure):
    """A tensor and the places of its fields in a message: `Tensor` of compressed.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "length", "kept", "floats", "rest")),
        ("width", ctypes.c_int64),
        ("levels", ctypes.c_float),
        ("factor", ctypes.c_float),
    )


class _Plan(ctypes.Structure):
    """`Plan` of compressed.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "rows", "elements", "bytes", "tensors")),
        *((name, ctypes.c_void_p) for name in ("tensor", "workers")),
        ("key", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("places", "keys")),
    )


def loops(network: Network, codec: Codec) -> "Loops | None":
    """The compiled loops of a codec, or None where PyTorch is to be used: where kernels.load says
    so, and for other compressors. All processes call it."""
    library = kernels.load(network)
    if library is None or type(codec.compressor) not in _KINDS or not codec.size:
        return None
    return Loops(library, codec)


class Loops:
    """The compiled loops of a codec.

    x [worker, D] is float32, with rows of any stride. `rates` r_ij are [worker, neighbor], 0 for a
    slot without a neighbor. `received` are the messages [worker, neighbor, bytes].
    """

    def __init__(self, library: kernels.Kernels, codec: Codec):
        self._codec, self._functions = codec, _Functions(library)
        tensors = _tensors(codec)
        longest = max(t.length for t in tensors)
        self.sparse = _KINDS[type(codec.compressor)] >= _SPARSE
        # Memory that the plan refers to.
        self._table = (_Tensor * len(tensors))(*tensors)
        self._keys = torch.empty(3 * longest, dtype=torch.int32)
        self._plan = _Plan(
            kind=_KINDS[type(codec.compressor)],
            rows=len(codec.workers),
            elements=codec.elements,
            bytes=codec.size,
            tensors=len(tensors),
            tensor=ctypes.addressof(self._table),
            workers=kernels.address(codec.workers),
            key=int(codec.key),
            keys=kernels.address(self._keys),
        )
        self._at = ctypes.addressof(self._plan)

    def encode_difference(self, x: Tensor, public: Tensor, counter: int) -> Tensor:
        """The messages C(x − public) [worker, bytes]."""
        return self._encode(True, x, public, counter)

    def encode_with_error(self, x: Tensor, error: Tensor, counter: int) -> Tensor:
        """The messages C(v) [worker, bytes] of v = x + error. error ← v − C(v)."""
        return self._encode(False, x, error, counter)

    def _encode(self, difference: bool, x: Tensor, other: Tensor, counter: int) -> Tensor:
        message = self._codec.message
        self._functions.encode(
            *(self._at, difference, counter, rows(x), x.stride(0)),
            *(kernels.address(other), kernels.address(message)),
        )
        return message

    def flow(self, rates: Tensor, public: Tensor, publics: Tensor) -> Tensor:
        """Σ_j r_ij (x̂_j − x̂_i) [worker, D], for public copies x̂_i [worker, D] and x̂_j
        [worker, neighbor, D]."""
        flow = torch.empty_like(public)
        tensors = (kernels.address(t) for t in (rates, public, publics, flow))
        self._functions.flow(self._at, rates.shape[1], *tensors)
        return flow

    def choco(
        self,
        x: Tensor,
        rates: Tensor,
        received: Tensor,
        public: Tensor,
        publics: Tensor,
        flow: Tensor,
    ) -> None:
        """x̂ ← x̂ + q for all copies, then x ← x + Σ_j r_ij (x̂_j − x̂_i).

        The own messages are those encoded last. `flow` is that of the copies. It is kept up to date
        if C(v) is sparse, and not used otherwise.
        """
        self._functions.choco(
            *(self._at, rates.shape[1], kernels.address(rates)),
            *(kernels.address(self._codec.message), kernels.address(received)),
            *(rows(x), x.stride(0)),
            *(kernels.address(tensor) for tensor in (public, publics, flow)),
        )

    def deepsqueeze(self, x: Tensor, rates: Tensor, received: Tensor) -> None:
        """x ← x + Σ_j r_ij (c_j − c_i). The own messages are those encoded last."""
        self._functions.deepsqueeze(
            *(self._at, rates.shape[1], kernels.address(rates)),
            *(kernels.address(self._codec.message), kernels.address(received)),
            *(rows(x), x.stride(0)),
        )


class _Functions:
    """The functions of the library, with types."""

    def __init__(self, library: kernels.Kernels):
        self.encode = kernels.function(library, "compressed_encode", "piupipp")
        self.flow = kernels.function(library, "choco_flow", "pipppp")
        self.choco = kernels.function(library, "choco_average", "pippppippp")
        self.deepsqueeze = kernels.function(library, "deepsqueeze_average", "pippppi")


def rows(x: Tensor) -> int:
    """The address of x [worker, D]."""
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
    assert x.stride(1) == 1 or x.shape[1] == 1
    return x.data_ptr()


def _tensors(codec: Codec) -> list[_Tensor]:
    """The tensors in the order of a message."""
    compressor, plan, found = codec.compressor, codec.plan, []
    for stack, (floats, rest) in zip(codec.stacks, plan.places, strict=True):
        length = stack.rows * stack.columns
        for layer in range(stack.layers):
            tensor = _Tensor(
                start=stack.start + layer * length,
                length=length,
                kept=floats.length,
                floats=4 * (floats.start + layer * floats.length),
                rest=rest.start + layer * rest.length,
            )
            if rest.dtype is not None:  # positions
                tensor.width = rest.dtype.itemsize
                tensor.rest *= tensor.width
            else:
                assert plan.levels is not None
                tensor.width = plan.levels.bits
                tensor.rest = 8 * plan.wide + tensor.width * tensor.rest
            if isinstance(compressor, QSGD):
                tensor.levels, tensor.factor = compressor.levels, compressor.factor(length)
            found.append(tensor)
    return found
