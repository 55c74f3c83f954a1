"""Transports of messages between all workers: all-reduce and all-gather."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from powergossip import kernels
from powergossip.network.neighbor_transport import Transport
from powergossip.network.processes import Pieces, Requests
from powergossip.network.staging import Connection


def all_reduce_cost(n: int, bits: int) -> tuple[int, int]:
    """Bits and messages that each of n workers sends in an all-reduce of `bits` bits.

    2 (n − 1)/n · bits in 2 (n − 1) messages, the lower bound.

    References:
        Patarasuk & Yuan (2009), doi:10.1016/j.jpdc.2008.09.002.
    """
    return round(2 * (n - 1) * bits / n), 2 * (n - 1)


# The requests of each step of a collective, which are made when the step before is complete.
Steps = Iterator[Requests]


class _Collective:
    """Messages between all processes in successive steps."""

    def __init__(self, steps: Steps):
        self._steps = steps
        self._requests: Requests | None = None
        self._start_next()

    def _start_next(self) -> None:
        self._requests = next(self._steps, None)
        if self._requests is not None:
            self._requests.start()

    def is_done(self) -> bool:
        """True if all steps are complete. Does not block. Starts the next step if one is due."""
        while self._requests is not None:
            if not self._requests.test():
                return False
            self._requests.wait()
            self._start_next()
        return True

    def wait(self) -> None:
        while self._requests is not None:
            self._requests.wait()
            self._start_next()


def _exchange(
    connection: Connection,
    tag: int,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
) -> Requests:
    """Requests for the exchange of one tensor with every other process.

    All processes call it with the same tag. A call at the time when a message is posted uses tag 0,
    like all other messages. Their order identifies them. A call at a later time, which differs
    between processes, needs its own tag.
    """
    comm, channel = connection.processes, connection.channel
    assert channel is not None

    def others(direction: int, tensors: Sequence[Tensor]) -> Pieces:
        processes = ((comm.rank + direction * step) % comm.size for step in range(1, comm.size))
        return [(process, tensors[process]) for process in processes]

    return channel.requests(others(-1, incoming), others(1, outgoing), tag)


# Elements of a sum per block. On a CPU, a block fits in the caches.
_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}


def _sum_in_pairs(rows: Tensor, out: Tensor) -> None:
    """out [copy, element] ← the sum of rows [copy, row, element], added in pairs.

    The result is the same to the bit if blocks of 2, 4, 8, … rows are summed first, in other
    processes.
    """
    width = max(1, _AT_ONCE[rows.device.type] // (rows.shape[0] * rows.shape[1]))
    for terms, total in zip(rows.split(width, 2), out.split(width, 1), strict=True):
        while (count := terms.shape[1]) > 2:
            pairs = terms[:, :-1:2] + terms[:, 1::2]
            terms = torch.cat([pairs, terms[:, -1:]], 1) if count % 2 else pairs
        if count == 2:
            torch.add(terms[:, 0], terms[:, 1], out=total)
        else:
            total.copy_(terms[:, 0])


class _Mean:
    """out [element] ← the sum of rows [row, element], added in pairs, ÷ n.

    Args:
        own: Index of a row and the tensor that takes its place.
    """

    def __init__(self, rows: Tensor, out: Tensor, n: int, own: tuple[int, Tensor] | None = None):
        self._rows, self._out, self._n, self._own = rows, out, n, own
        self._sum = None
        terms = list(rows)
        if own is not None:
            terms[own[0]] = own[1]
        if all(
            t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous()
            for t in (out, *terms)
        ):
            library = kernels.compiled()
            if library is not None:
                self._sum = kernels.function(library, "sum_in_pairs", "piifp")
                self._addresses = np.array([t.data_ptr() for t in terms], dtype=np.uint64)

    def compute(self) -> None:
        if self._sum is not None:
            addresses, count = self._addresses.ctypes.data, len(self._rows)
            self._sum(addresses, count, self._out.numel(), self._n, self._out.data_ptr())
            return
        if self._own is not None:
            self._rows[self._own[0]] = self._own[1]
        _sum_in_pairs(self._rows[None, ..., None].flatten(2), self._out[None, ..., None].flatten(1))
        if self._n > 1:
            self._out.div_(self._n)


class Reduction(Transport):
    """All-reduce: a local sum over the workers of a process, then one between processes.

    Each process receives its part of all elements from all others, then sends them the mean of that
    part. A part is summed in one process, in an order that does not depend on timing, so the result
    is the same to the bit in all processes, every time, with any transport.

    The libraries' own all-reduces are unsuitable. Their order of summation is theirs. MPI's
    non-blocking one sends other bytes than are counted (Open MPI's, in place: all elements up and
    down a tree, which takes several times as long on slow links), and it ends the process for
    tensors on a GPU (github.com/open-mpi/ompi/issues/9845).

    Args:
        tensor: [copy · worker, ...], with the hosted workers of each copy.
        out: Memory [copy, ...] of the mean, or None for new.
    """

    def __init__(self, connection: Connection, tensor: Tensor, out: Tensor | None, copies: int):
        rows, comm = tensor.shape[0], connection.processes
        hosted = rows // copies
        n = hosted * comm.size
        channel = None if comm.size == 1 else connection.channel
        self._alone = channel is None
        size = tensor[0].numel() * tensor.element_size() * 8
        bits, messages = all_reduce_cost(n, size)
        self.bits = np.full(rows, bits, dtype=np.int64)
        self.messages = np.full(rows, messages, dtype=np.int64)
        self._connection, self._hosted = connection, hosted
        self._tag = 0 if connection.stream_ordered else comm.new_tag()
        self._collective: _Collective | None = None
        by_copy = tensor.unflatten(0, (copies, hosted))
        self._total = tensor.new_empty(copies, *tensor.shape[1:]) if out is None else out
        self._shared = connection.shared(self._total)
        # The sums over the hosted workers. A single worker's message is sent from its own memory.
        in_place = hosted == 1 and tensor.is_contiguous() and not connection.stage
        self._local: list[_Mean] = []
        if not in_place or channel is None:
            n_local = n if channel is None else 1
            self._local = [
                _Mean(rows, total, n_local)
                for rows, total in zip(by_copy, self._total, strict=True)
            ]
        if channel is None:
            return
        outgoing = (self._shared if self._local else tensor).view(-1).tensor_split(comm.size)
        incoming = self._shared.view(-1).tensor_split(comm.size)
        mean = incoming[comm.rank]
        collected = mean.new_empty(comm.size, len(mean))
        self._steps = [
            _exchange(connection, 0, outgoing, collected.unbind()),
            _exchange(connection, self._tag, [mean] * comm.size, incoming),
        ]
        self._part_mean = _Mean(collected, mean, n, (comm.rank, outgoing[comm.rank]))

    def post(self) -> None:
        for mean in self._local:
            mean.compute()
        if self._alone:
            return
        if self._shared is not self._total:
            self._shared.copy_(self._total, non_blocking=True)
        self._connection.wait_for_kernels()
        self._collective = _Collective(self._in_steps())
        if self._connection.stream_ordered:
            self._collective.wait()  # starts the second step after the first one in the stream

    def _in_steps(self) -> Steps:
        yield self._steps[0]
        self._part_mean.compute()
        if not self._connection.stage:
            self._connection.wait_for_kernels()
        yield self._steps[1]

    def has_arrived(self) -> bool:
        return self._collective is None or self._collective.is_done()

    def wait(self) -> Tensor:
        if self._collective is not None:
            self._collective.wait()
            if self._shared is not self._total:
                self._total.copy_(self._shared, non_blocking=True)
        mean = self._total
        return mean if len(mean) == 1 else mean.repeat_interleave(self._hosted, dim=0)


class Gathering(Transport):
    """All-gather of pieces [length] of different lengths.

    Every worker sends its piece, and its length in 32 bits, to all others.
    """

    def __init__(self, connection: Connection, pieces: Sequence[Tensor]):
        for piece in pieces:
            if piece.ndim != 1 or piece.dtype != pieces[0].dtype:
                raise ValueError(
                    f"Gather of a piece of shape {tuple(piece.shape)}: use one of shape (length,), "
                    "such as piece.flatten(), all of one dtype"
                )
        self._connection, self._pieces = connection, pieces
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int32)
        others = len(pieces) * connection.processes.size - 1
        self.bits = others * (lengths.astype(np.int64) * (8 * pieces[0].element_size()) + 32)
        self.messages = np.full(len(pieces), 2 * others, dtype=np.int64)
        self._own_lengths = lengths
        self._collective: _Collective | None = None

    def post(self) -> None:
        connection, comm = self._connection, self._connection.processes
        by_process = comm.gather_arrays(self._own_lengths)
        self._lengths = by_process.reshape(-1).tolist()
        self._received = self._pieces[0].new_empty(sum(self._lengths))
        self._shared = connection.shared(self._received)
        parts = self._shared.split(by_process.sum(1, dtype=np.int64).tolist())
        own = parts[comm.rank]
        own.copy_(torch.cat(list(self._pieces)), non_blocking=True)
        if comm.size == 1:
            return
        connection.wait_for_kernels()
        self._collective = _Collective(iter([_exchange(connection, 0, [own] * comm.size, parts)]))

    def has_arrived(self) -> bool:
        return self._collective is None or self._collective.is_done()

    def wait(self) -> list[Tensor]:
        if self._collective is not None:
            self._collective.wait()
        if self._shared is not self._received:
            self._received.copy_(self._shared, non_blocking=True)
        return list(self._received.split(self._lengths))
