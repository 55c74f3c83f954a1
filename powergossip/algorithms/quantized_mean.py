"""All-reduce in few bits.

Axes: copy, worker (hosted here), neighbor (another worker), piece (of the D elements of a worker).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powergossip import topologies
from powergossip.algorithms.plain import ExactMean
from powergossip.compressors import BLOCK, BlockRounding, Codec
from powergossip.network import Conversation, Network, ToEach
from powergossip.parameters import Layout


class QuantizedMean(ExactMean):
    """x_i ← r + the mean of all x_j − r in few bits. All workers have r and hence the same x::

        p_i ← e_i + x_i − r                 worker i sends piece k of C(p_i) to worker k
        e_i ← p_i − C(p_i)
        m_k ← f_k + (1/n) Σ_j C(p_j)_k      worker k sends C(m_k) to all others
        f_k ← m_k − C(m_k)
        x_i ← r ← r + C(m)

    C is `BlockRounding`. Errors e_i of a worker and f_k of a mean are part of the next step: with
    the mean of all e_i plus f, the sum of all C(m) is the sum of all mean differences.

    The difference is what is quantized, so r should be near x. The first step is uncompressed, and
    r is its result, unless `begin_at` sets r. Learning rules with outer optimizers set it to the
    slow model before each round.

    Infinite values and NaN reach all x, but no e, f or r: x that is finite again is averaged as
    before.

    Sends 2 (n − 1) pieces of L = 64 ⌈D/(64 n)⌉ elements: b L bits each, and 16 for each 64. With
    D < 64 n, L = ⌈D/n⌉.

    Args:
        bits: Bits b of an element, 2 to 8.

    Raises:
        ValueError: For other bits, and for sharded tensors.
    """

    def __init__(self, network: Network, layout: Layout, bits: int):
        super().__init__(network)
        layout.check_undivided(f"all-reduce with bits={bits}")
        compressor = BlockRounding(bits)
        n, rows, device = network.n_workers, network.rows, network.device
        self._copies, self._n, self._size = network.copies, n, layout.size
        self._edges = network.edges_of(topologies.fully_connected(n, 0).round(0))
        block = min(BLOCK, max(1, -(-layout.size // n)))
        length = -(-layout.size // (block * n)) * block
        piece = Layout([(length,)])
        self._differences = Codec(piece, compressor, [0] * (rows * n), device=device)
        self._means = Codec(piece, compressor, [0] * rows, device=device)
        self._row = torch.arange(rows, device=device)[:, None]
        self._own = network.row_workers[:, None]
        slots = torch.arange(n - 1, device=device)
        self._others = slots + (slots >= self._own)  # [worker, neighbor]
        self._of_all = torch.zeros(network.copies, n, dtype=torch.int64, device=device)
        self._outgoing = [
            torch.zeros(rows, n - 1, self._means.size, dtype=torch.uint8, device=device)
            for _ in range(2)
        ]
        where: Any = {"dtype": network.dtype, "device": device}
        self._error = torch.zeros(rows, n * length, **where)  # e, and p within a step
        self._rest = torch.zeros(rows, length, **where)  # f, and m within a step
        self._reference: Tensor | None = None  # r [copy, 1, D]

    def step(self, x: Tensor) -> Conversation:
        """x_i ← r + C(m)"""
        models = x.unflatten(0, (self._copies, -1))
        r = self._reference
        if r is None:
            yield from super().step(x)
            self._reference = models[:, :1].nan_to_num(0, 0, 0)
            return
        p, m = self._error, self._rest
        p[:, : self._size] += (models - r).flatten(0, 1)
        message = self._encode(self._differences, p.view(-1, m.shape[1]))
        message = message.view(*self._shape, -1)
        p[:, self._size :] = 0
        first, second = self._outgoing
        first.copy_(message[self._row, self._others])
        pieces = self._all(message[self._row, self._own], (yield ToEach(first, self._edges)))
        total = torch.zeros_like(m)
        for piece in pieces.unbind(1):  # in this order in all layouts
            self._means.add(piece, self._means.workers, 0, total)
        m.add_(total.div_(self._n))
        message = self._encode(self._means, m)[:, None]
        second.copy_(message.expand_as(second))
        pieces = self._all(message, (yield ToEach(second, self._edges)))
        pieces = pieces.unflatten(0, (self._copies, -1))[:, 0]  # all workers have the same
        mean = self._means.decode(pieces, self._of_all, 0)
        models.copy_(r.add_(mean.flatten(1)[:, None, : self._size]))
        r.nan_to_num_(0, 0, 0)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self._row), self._n

    @staticmethod
    def _encode(codec: Codec, values: Tensor) -> Tensor:
        """The messages of values. The values become their errors."""
        message = codec.encode(values, 0)
        values.sub_(codec.decode(message, codec.workers, 0)).nan_to_num_(0, 0, 0)
        return message

    def _all(self, own: Tensor, received: Tensor) -> Tensor:
        """The messages of all workers [worker, n, byte], from a worker's own [worker, 1, byte]."""
        found = received.new_empty(*self._shape, received.shape[-1])
        found[self._row, self._own] = own
        found[self._row, self._others] = received
        return found

    def begin_at(self, point: Tensor) -> None:
        """r ← point [D], which all workers have. See `averaging.Copies`."""
        r = self._reference
        if r is None:
            r = self._reference = self._error.new_empty(self._copies, 1, self._size)
        r.copy_(point)

    def state_dict(self) -> dict[str, Any]:
        """The entries reference, r [worker, D] or None, error, e [worker, D], and rest, f [worker,
        element of a piece]."""
        r = self._reference
        hosted = len(self._row) // self._copies
        return {
            "reference": None if r is None else r.expand(-1, hosted, -1).flatten(0, 1).clone(),
            "error": self._error[:, : self._size].clone(),
            "rest": self._rest.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._reference = None
        if state["reference"] is not None:
            self.begin_at(state["reference"].unflatten(0, (self._copies, -1))[:, :1])
        self._error[:, : self._size] = state["error"]
        self._rest.copy_(state["rest"])
