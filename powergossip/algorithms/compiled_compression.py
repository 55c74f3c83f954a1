"""Compiled loops for compressed messages on a CPU, see powergossip/kernels/compressed.c.

They write and read the same messages as PyTorch's code. Encoding is fused with the arithmetic that
makes the compressed vectors, and decoding with the arithmetic that uses them, so that a step takes
few passes over memory. Some compressors have none, such as SVD.

Axes: worker (hosted here), neighbor (slot).
"""

import ctypes

import torch
from torch import Tensor

from powergossip import kernels
from powergossip.compressors import QSGD, Codec, Compressor, RandomBlock, RandomK, SignAndNorm, TopK
from powergossip.compressors.sparse import number_of_draws
from powergossip.network import Network

# As in compressed.c.
_KINDS: dict[type[Compressor], int] = {SignAndNorm: 0, QSGD: 1, TopK: 2, RandomK: 3, RandomBlock: 3}
_AT_POSITIONS = 3
_BLOCK, _ALL, _ELSEWHERE = -1, -2, -3
_MOST_SORTED = 4096


class _Tensor(ctypes.Structure):
    """A tensor and the places of its fields in a message: `Tensor` of compressed.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "length", "kept", "floats", "rest")),
        *((name, ctypes.c_int64) for name in ("width", "draws")),
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
    known = type(codec.compressor) in _KINDS and codec.layout.shards is None
    if library is None or not known or not codec.size:
        return None
    return Loops(library, codec)


class Loops:
    """The compiled loops of a codec.

    x [worker, D] is float32, with rows of any stride. `rates` r_ij are [worker, neighbor], 0 for a
    slot without a neighbor. `received` are the messages [worker, neighbor, bytes].
    """

    def __init__(self, library: kernels.Kernels, codec: Codec):
        self._codec = codec
        self._draw = kernels.function(library, "draw_positions", "pu", "i")
        self._encode = kernels.function(library, "compressed_encode", "piupipp")
        self._flow = kernels.function(library, "choco_flow", "pipppp")
        self._choco = kernels.function(library, "choco_average", "pippppippp")
        self._deepsqueeze = kernels.function(library, "deepsqueeze_average", "pippppi")
        tensors = _tensors(codec)
        longest = max(t.length for t in tensors)
        kind = _KINDS[type(codec.compressor)]
        self._has_flow = kind == _AT_POSITIONS
        self._drawn: int | None = None  # the counter of the positions
        # Memory that the plan refers to.
        self._table = (_Tensor * len(tensors))(*tensors)
        count = sum(t.kept for t in tensors) if kind == _AT_POSITIONS else 0
        self._places = torch.zeros(count, dtype=torch.int32)
        self._keys = torch.empty(3 * longest, dtype=torch.int32)
        self._plan = _Plan(
            kind=kind,
            rows=len(codec.workers),
            elements=codec.elements,
            bytes=codec.size,
            tensors=len(tensors),
            tensor=ctypes.addressof(self._table),
            workers=kernels.address(codec.workers),
            key=int(codec.key),
            places=kernels.address(self._places),
            keys=kernels.address(self._keys),
        )
        self._at = ctypes.addressof(self._plan)

    def encode(self, difference: bool, x: Tensor, other: Tensor, counter: int) -> Tensor:
        """The messages [worker, bytes]: C(x − other) of a difference, otherwise C(v) of
        v = x + other. other ← v − C(v)."""
        message = self._codec.message
        if len(self._places) and counter != self._drawn:
            self._draw_positions(counter)
        self._encode(
            *(self._at, difference, counter, _rows(x), x.stride(0)),
            *(kernels.address(other), kernels.address(message)),
        )
        return message

    def _draw_positions(self, counter: int) -> None:
        """The positions of the `counter`-th message, the same as the compressor's."""
        codec, start = self._codec, 0
        assert isinstance(codec.compressor, RandomK | RandomBlock)
        enough = self._draw(self._at, counter)
        for stack, stream in zip(codec.stacks, codec.streams(codec.workers, counter), strict=True):
            kept = codec.compressor.kept(stack.rows, stack.columns)
            stop = start + stack.layers * kept
            elsewhere = _draws(codec.compressor, stack.rows, stack.columns) == _ELSEWHERE
            if elsewhere or not enough:
                positions = codec.compressor.positions(stream, stack.rows, stack.columns)
                self._places[start:stop] = positions.flatten()
            start = stop
        self._drawn = counter

    def flow(self, rates: Tensor, public: Tensor, publics: Tensor) -> Tensor:
        """Σ_j r_ij (x̂_j − x̂_i) [worker, D], for public copies x̂_i [worker, D] and x̂_j
        [worker, neighbor, D]. Empty unless all workers send the same positions."""
        if not self._has_flow:
            return public.new_empty(0)
        flow = torch.empty_like(public)
        tensors = (kernels.address(t) for t in (rates, public, publics, flow))
        self._flow(self._at, rates.shape[1], *tensors)
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

        The own messages are those encoded last. `flow` is the copies' flow, and is kept up to date.
        """
        self._choco(
            *(self._at, rates.shape[1], kernels.address(rates)),
            *(kernels.address(self._codec.message), kernels.address(received)),
            *(_rows(x), x.stride(0)),
            *(kernels.address(tensor) for tensor in (public, publics, flow)),
        )

    def deepsqueeze(self, x: Tensor, rates: Tensor, received: Tensor) -> None:
        """x ← x + Σ_j r_ij (c_j − c_i). The own messages are those encoded last."""
        self._deepsqueeze(
            *(self._at, rates.shape[1], kernels.address(rates)),
            *(kernels.address(self._codec.message), kernels.address(received)),
            *(_rows(x), x.stride(0)),
        )


def _rows(x: Tensor) -> int:
    """The address of x [worker, D]."""
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
    assert x.stride(1) == 1 or x.shape[1] == 1
    return x.data_ptr()


def _tensors(codec: Codec) -> list[_Tensor]:
    """The tensors in the order of a message."""
    compressor, plan, found = codec.compressor, codec.plan, []
    for stack, (floats, *others) in zip(codec.stacks, plan.places, strict=True):
        length = stack.rows * stack.columns
        for layer in range(stack.layers):
            tensor = _Tensor(
                start=stack.start + layer * length,
                length=length,
                kept=floats.length,
                floats=4 * (floats.start + layer * floats.length),
            )
            for field in others:
                tensor.rest = field.start + layer * field.length
                if field.dtype is not None:  # positions
                    tensor.width = field.dtype.itemsize
                    tensor.rest *= tensor.width
                else:
                    assert plan.levels is not None
                    tensor.width = plan.levels.bits
                    tensor.rest = 8 * plan.wide + tensor.width * tensor.rest
            if isinstance(compressor, RandomK | RandomBlock):
                tensor.rest = floats.start + layer * floats.length  # floats are all there is
                tensor.draws = _draws(compressor, stack.rows, stack.columns)
            if isinstance(compressor, QSGD):
                tensor.levels, tensor.factor = compressor.levels, compressor.factor(length)
            found.append(tensor)
    return found


def _draws(compressor: RandomK | RandomBlock, rows: int, columns: int) -> int:
    """How the positions of a matrix are drawn, as in compressed.c."""
    if isinstance(compressor, RandomBlock):
        return _BLOCK
    count, entries = compressor.kept(rows, columns), rows * columns
    if count == 1:
        return 1
    return number_of_draws(count, entries) or (_ALL if entries <= _MOST_SORTED else _ELSEWHERE)


class MoniquaLoops:
    """The compiled loops of Moniqua. Symbols as in compressed_gossip.py, x as above."""

    def __init__(self, library: kernels.Kernels):
        self._encode = kernels.function(library, "moniqua_encode", "iiuupippp")
        self._average = kernels.function(library, "moniqua_average", "iiipppppi")

    def encode(
        self, x: Tensor, thrice: Tensor, key: Tensor, counter: int, message: Tensor, c: Tensor
    ) -> None:
        """Write the levels l_i, packed, to message, and the cells to c."""
        rest = (kernels.address(tensor) for tensor in (thrice, message, c))
        self._encode(*x.shape, int(key), counter, _rows(x), x.stride(0), *rest)

    def average(
        self, x: Tensor, rates: Tensor, message: Tensor, received: Tensor, c: Tensor
    ) -> None:
        """x_i ← x_i + Σ_j r_ij (mod(l_j − c, 3) + c − l_i)"""
        tensors = (kernels.address(tensor) for tensor in (rates, message, received, c))
        sizes = x.shape[0], rates.shape[1], x.shape[1]
        self._average(*sizes, *tensors, _rows(x), x.stride(0))
