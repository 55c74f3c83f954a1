"""Transports of messages to neighbors: in memory within a process, by a channel between them."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from powergossip.network.edges import Edges
from powergossip.network.rows import Rows
from powergossip.network.staging import Connection


class Transport:
    """The memory and requests of one message: `post` sends it, `wait` returns the received one."""

    bits: np.ndarray  # int64 [worker]  sent by each hosted worker
    messages: np.ndarray  # int64 [worker]
    busy = False  # between `post` and `wait`, set by Network

    def post(self) -> None:
        raise NotImplementedError

    def has_arrived(self) -> bool:
        """True if `wait` would return at once. Does not block."""
        raise NotImplementedError

    def wait(self) -> Tensor | list[Tensor] | Rows:
        raise NotImplementedError


class Delivery(Transport):
    """A message to neighbors, and the memory for the messages received from them.

    Both are addressed by rows: tensor[worker, out_slot] (ToEach) or tensor[worker] (ToAll) is an
    outgoing row, received[worker, in_slot] an incoming one. With `shared`, Rows are received.
    """

    def __init__(
        self,
        connection: Connection,
        tensor: Tensor,
        to_each: bool,
        edges: Edges,
        memory: Tensor | None = None,
        shared: bool = False,
    ):
        rows = len(edges.neighbors)
        axes = 2 if to_each else 1
        expected = (rows, edges.n_out)[:axes]
        if tensor.shape[:axes] != expected:
            kind, found = "ToEach" if to_each else "ToAll", tuple(tensor.shape)
            beginning = ", ".join(map(str, expected))
            raise ValueError(f"{kind} of a tensor {found}: use one of shape ({beginning}, ...)")
        elements = prod(tensor.shape[axes:])
        self.bits = edges.out_degrees * (elements * tensor.element_size() * 8)
        self.messages = edges.out_degrees
        outgoing = tensor.view(prod(expected), elements)

        def outgoing_rows(row: np.ndarray, slot: np.ndarray) -> np.ndarray:
            return row * edges.n_out + slot if to_each else row

        def incoming_rows(row: np.ndarray, slot: np.ndarray) -> np.ndarray:
            return row * edges.n_in + slot

        # Slots without an edge inside get their own worker's row.
        own = np.repeat(np.arange(rows), edges.n_in)
        source = outgoing_rows(own, np.zeros_like(own))
        source[incoming_rows(*edges.inside_destination)] = outgoing_rows(*edges.inside_source)
        arriving = incoming_rows(*edges.incoming)
        self._received: Tensor | Rows
        self._inside = self._between = None
        if shared:
            source[arriving] = rows + np.arange(len(arriving))
            arriving = np.arange(len(arriving))
            incoming = tensor.new_empty(len(arriving), elements)
            index = torch.from_numpy(source.reshape(rows, edges.n_in)).to(tensor.device)
            self._received = Rows(outgoing, incoming, index)
        else:
            shape = (rows, edges.n_in, *tensor.shape[axes:])
            if memory is None:
                self._received = tensor.new_zeros(shape)
            else:
                self._received = memory[: prod(shape)].view(shape)
            incoming = self._received.view(rows * edges.n_in, elements)
            if len(edges.inside_source[0]):  # one indexing fills all slots
                self._inside = outgoing, torch.from_numpy(source).to(tensor.device), incoming
        if connection.processes.size > 1:  # also without such an edge: see Channel
            self._between = _Between(
                connection,
                rows > 1,
                outgoing,
                outgoing_rows(*edges.outgoing),
                edges.outgoing_process,
                incoming,
                arriving,
                edges.incoming_process,
            )

    def post(self) -> None:
        if self._inside:
            outgoing, index, incoming = self._inside
            torch.index_select(outgoing, 0, index, out=incoming)
        if self._between:
            self._between.post()

    def has_arrived(self) -> bool:
        return self._between is None or self._between.has_arrived()

    def wait(self) -> Tensor | Rows:
        if self._between:
            self._between.wait()
        return self._received


class _Between:
    """Rows that are sent between processes, with their requests.

    A process that hosts one worker sends from and receives into the rows themselves. With more
    workers, all rows for one process are packed into one message. `sent` and `received` are the
    indices of rows of `outgoing` and `incoming`, ordered by process.
    """

    def __init__(
        self,
        connection: Connection,
        several: bool,
        outgoing: Tensor,
        sent: np.ndarray,
        sent_process: np.ndarray,
        incoming: Tensor,
        received: np.ndarray,
        received_process: np.ndarray,
    ):
        device = outgoing.device
        self._rows_out, self._rows_in = outgoing, incoming
        self._pack = self._unpack = None
        if several:
            self._pack = torch.from_numpy(sent).to(device)
            outgoing = outgoing.new_empty(len(sent), outgoing.shape[1])
            sent = np.arange(len(sent))
        if several and not np.array_equal(received, np.arange(len(incoming))):
            self._unpack = torch.from_numpy(received).to(device)
            incoming = incoming.new_empty(len(received), incoming.shape[1])
            received = np.arange(len(received))
        self._connection = connection
        self._outgoing, self._incoming = outgoing, incoming
        self._shared_outgoing = connection.shared(outgoing)
        self._shared_incoming = connection.shared(incoming)
        assert connection.channel is not None
        self._requests = connection.channel.requests(
            _pieces(self._shared_incoming, received, received_process),
            _pieces(self._shared_outgoing, sent, sent_process),
        )

    def post(self) -> None:
        if self._pack is not None:
            torch.index_select(self._rows_out, 0, self._pack, out=self._outgoing)
        if self._shared_outgoing is not self._outgoing:
            self._shared_outgoing.copy_(self._outgoing, non_blocking=True)
        self._connection.wait_for_kernels()
        self._requests.start()

    def has_arrived(self) -> bool:
        return self._requests.test()

    def wait(self) -> None:
        self._requests.wait()
        if self._shared_incoming is not self._incoming:
            self._incoming.copy_(self._shared_incoming, non_blocking=True)
        if self._unpack is not None:
            self._rows_in.index_copy_(0, self._unpack, self._incoming)


def _pieces(rows: Tensor, chosen: np.ndarray, process: np.ndarray) -> list[tuple[int, Tensor]]:
    """The chosen rows for each process, which must be adjacent to form one message."""
    starts = np.flatnonzero(np.diff(process, prepend=-1))
    stops = np.append(starts, len(process))[1:]
    return [
        (int(process[start]), rows[chosen[start] : chosen[stop - 1] + 1])
        for start, stop in zip(starts, stops, strict=True)
    ]
