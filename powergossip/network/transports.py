"""Transports of messages: in memory within a process, by a channel between processes."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from powergossip import kernels
from powergossip.network.processes import Pieces, Requests
from powergossip.topologies import Round

if TYPE_CHECKING:
    from powergossip.network.workers import Network


class _RoundEdges(NamedTuple):
    """All directed edges source → destination of a round, by destination, then source. [edge]

    out_slot  # index of the edge among those out of its source
    in_slot   # index of the edge among those into its destination
    """

    source: np.ndarray
    destination: np.ndarray
    out_slot: np.ndarray
    in_slot: np.ndarray

    def select(self, chosen: np.ndarray) -> "_RoundEdges":
        """The edges where a mask [edge] is true."""
        return _RoundEdges(*(of_edges[chosen] for of_edges in self))


def _edges_of(of_round: Round) -> _RoundEdges:
    weights = of_round.weights  # csr: row = destination, column = source
    source = weights.indices.astype(np.int64)
    destination = np.repeat(np.arange(of_round.n_workers), np.diff(weights.indptr))
    in_slot = np.arange(len(source)) - weights.indptr[destination]
    by_source = np.lexsort((destination, source))
    first = np.searchsorted(source[by_source], source[by_source])  # edge of the same source
    out_slot = np.empty_like(in_slot)
    out_slot[by_source] = np.arange(len(source)) - first
    return _RoundEdges(source, destination, out_slot, in_slot)


class Edges:
    """The edges of a round that start or end at a worker of this process. numpy arrays.

    A row is a hosted worker of a copy: copy · hosted + index of the worker among the hosted ones.

    neighbors, weights  # [row, in_slot], see Slots
    out_degrees         # [row]
    n_in, n_out         # int: the largest in-degree and out-degree of all workers

    The other attributes address the rows of messages by pairs of arrays (row, slot): out_slot for
    an outgoing message, in_slot for an incoming one.

    inside_source, inside_destination  # the two ends of the edges inside of this process
    outgoing, outgoing_process         # edges to other processes, and their ranks
    incoming, incoming_process         # edges from other processes, and their ranks

    The last two are ordered by process, then in an order that both processes share: by copy,
    destination and in_slot.

    Example: the chain 0 – 1 – 2 – 3 in two processes, seen by the one that hosts workers 0 and 1.

        edge    out_slot  in_slot                  neighbors    [[1, −1], [0, 2]]
        1 → 0   0         0         inside         out_degrees  [1, 2]
        0 → 1   0         0         inside         inside_source (row, out_slot)      (1, 0), (0, 0)
        2 → 1   0         1         incoming       inside_destination (row, in_slot)  (0, 0), (1, 0)
        1 → 2   1         0         outgoing       incoming (1, 1), outgoing (1, 1), with process 1
    """

    def __init__(self, of_round: Round, workers: range, copies: int):
        n, hosted = of_round.n_workers, len(workers)
        edges = _edges_of(of_round)
        source, destination = edges.source, edges.destination
        in_degrees = np.bincount(destination, minlength=n)
        all_out_degrees = np.bincount(source, minlength=n)
        self.n_in = int(in_degrees.max(initial=0))
        self.n_out = int(all_out_degrees.max(initial=0))
        self.out_degrees = np.tile(all_out_degrees[workers.start : workers.stop], copies)

        starts_here = (workers.start <= source) & (source < workers.stop)
        ends_here = (workers.start <= destination) & (destination < workers.stop)
        neighbors = np.full((hosted, self.n_in), -1, dtype=np.int64)
        weights = np.zeros((hosted, self.n_in))
        place = destination[ends_here] - workers.start, edges.in_slot[ends_here]
        neighbors[place] = source[ends_here]
        weights[place] = of_round.weights.data[ends_here]
        self.neighbors = np.tile(neighbors, (copies, 1))
        self.weights = np.tile(weights, (copies, 1))

        def rows_and_slots(
            worker: np.ndarray, slot: np.ndarray, process: np.ndarray
        ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
            """(row, slot) of some edges in all copies, and the process of each, ordered by it."""
            rows = (worker - workers.start + hosted * np.arange(copies)[:, None]).ravel()
            slots, processes = np.tile(slot, copies), np.tile(process, copies)
            order = np.argsort(processes, kind="stable")
            return (rows[order], slots[order]), processes[order]

        inside = edges.select(starts_here & ends_here)
        here = np.zeros_like(inside.source)
        self.inside_source, _ = rows_and_slots(inside.source, inside.out_slot, here)
        self.inside_destination, _ = rows_and_slots(inside.destination, inside.in_slot, here)
        leaving = edges.select(starts_here & ~ends_here)
        self.outgoing, self.outgoing_process = rows_and_slots(
            leaving.source, leaving.out_slot, leaving.destination // hosted
        )
        arriving = edges.select(ends_here & ~starts_here)
        self.incoming, self.incoming_process = rows_and_slots(
            arriving.destination, arriving.in_slot, arriving.source // hosted
        )


class Transport:
    """The memory and requests of one message: `post` sends it, `wait` returns the received one."""

    bits: np.ndarray  # int64 [worker]  sent by each hosted worker
    messages: np.ndarray  # int64 [worker]
    busy = False  # between `post` and `wait`, set by Network

    def post(self) -> None:
        raise NotImplementedError

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. Does not block."""
        raise NotImplementedError

    def wait(self) -> Tensor | list[Tensor]:
        raise NotImplementedError


class Delivery(Transport):
    """A message to neighbors, and the memory for the messages received from them.

    Both are addressed by rows: tensor[worker, out_slot] (ToEach) or tensor[worker] (ToAll) is an
    outgoing row, received[worker, in_slot] an incoming one.
    """

    def __init__(self, network: "Network", tensor: Tensor, to_each: bool, edges: Edges):
        rows = network.rows
        axes = 2 if to_each else 1
        expected = (rows, edges.n_out)[:axes]
        assert tensor.shape[:axes] == expected, f"message {tensor.shape}, expected {expected}, ..."
        elements = prod(tensor.shape[axes:])
        self.bits = edges.out_degrees * (elements * tensor.element_size() * 8)
        self.messages = edges.out_degrees
        self._received = tensor.new_zeros(rows, edges.n_in, *tensor.shape[axes:])
        outgoing = tensor.view(prod(expected), elements)
        incoming = self._received.view(rows * edges.n_in, elements)

        def outgoing_rows(row: np.ndarray, slot: np.ndarray) -> np.ndarray:
            return row * edges.n_out + slot if to_each else row

        def incoming_rows(row: np.ndarray, slot: np.ndarray) -> np.ndarray:
            return row * edges.n_in + slot

        self._inside = self._between = None
        if len(edges.inside_source[0]):
            # One indexing fills all slots. Those without an edge inside get their own worker's row.
            own = np.repeat(np.arange(rows), edges.n_in)
            source = outgoing_rows(own, np.zeros_like(own))
            source[incoming_rows(*edges.inside_destination)] = outgoing_rows(*edges.inside_source)
            self._inside = outgoing, torch.from_numpy(source).to(tensor.device), incoming
        if network.processes.size > 1:  # also without such an edge: see Channel
            self._between = _Between(
                network,
                outgoing,
                outgoing_rows(*edges.outgoing),
                edges.outgoing_process,
                incoming,
                incoming_rows(*edges.incoming),
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

    def wait(self) -> Tensor:
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
        network: "Network",
        outgoing: Tensor,
        sent: np.ndarray,
        sent_process: np.ndarray,
        incoming: Tensor,
        received: np.ndarray,
        received_process: np.ndarray,
    ):
        device = outgoing.device
        self._rows_out, self._rows_in = outgoing, incoming
        self._wait_for_kernels = network.waits_for_kernels
        self._pack = self._unpack = None
        if network.rows > 1:
            self._pack = torch.from_numpy(sent).to(device)
            self._unpack = torch.from_numpy(received).to(device)
            outgoing = outgoing.new_empty(len(sent), outgoing.shape[1])
            incoming = incoming.new_empty(len(received), incoming.shape[1])
            sent, received = np.arange(len(sent)), np.arange(len(received))
        self._outgoing, self._incoming = outgoing, incoming
        self._host_outgoing, self._host_incoming = outgoing, incoming
        self._stage = network.stage
        if self._stage:
            self._host_outgoing, self._host_incoming = (
                torch.zeros(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
                for t in (outgoing, incoming)
            )
        assert network.channel is not None
        self._requests = network.channel.requests(
            _pieces(self._host_incoming, received, received_process),
            _pieces(self._host_outgoing, sent, sent_process),
        )

    def post(self) -> None:
        if self._pack is not None:
            torch.index_select(self._rows_out, 0, self._pack, out=self._outgoing)
        if self._stage:
            self._host_outgoing.copy_(self._outgoing, non_blocking=True)
        if self._wait_for_kernels:
            torch.cuda.current_stream().synchronize()
        self._requests.start()

    def has_arrived(self) -> bool:
        return self._requests.test()

    def wait(self) -> None:
        self._requests.wait()
        if self._stage:
            self._incoming.copy_(self._host_incoming, non_blocking=True)
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


def all_reduce_cost(n: int, bits: int) -> tuple[int, int]:
    """Bits and messages that each of n workers sends in an all-reduce of `bits` bits.

    2 (n − 1)/n · bits in 2 (n − 1) messages, the lower bound (Patarasuk & Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002).
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
        """Whether all steps are complete. Does not block. Starts the next step if one is due."""
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
    network: "Network",
    tag: int,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    once: bool = False,
) -> Requests:
    """Requests for the exchange of one tensor with every other process.

    All processes call it with the same tag. A call at the time when a message is posted uses tag 0,
    like all other messages. Their order identifies them. A call at a later time, which differs
    between processes, needs a tag of its own.
    """
    comm, channel = network.processes, network.channel
    assert channel is not None

    def others(direction: int, tensors: Sequence[Tensor]) -> Pieces:
        processes = ((comm.rank + direction * step) % comm.size for step in range(1, comm.size))
        return [(process, tensors[process]) for process in processes]

    return channel.requests(others(-1, incoming), others(1, outgoing), tag, once)


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

    `own`: the index of a row and the tensor that takes its place.
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

    MPI's own non-blocking all-reduce is unsuitable. It sends other bytes than are counted (Open
    MPI's, in place: all elements up and down a tree, which takes several times as long on slow
    links), and it ends the process for tensors on a GPU (github.com/open-mpi/ompi/issues/9845).

    If the network's all_reduce is "native", the library's own all-reduce takes the place of the sum
    between processes.
    """

    def __init__(self, network: "Network", tensor: Tensor):
        assert tensor.shape[0] == network.rows
        n, comm = network.n_workers, network.processes
        channel = None if comm.size == 1 else network.channel
        self._alone = channel is None
        size = tensor[0].numel() * tensor.element_size() * 8
        bits, messages = all_reduce_cost(n, size)
        self.bits = np.full(network.rows, bits, dtype=np.int64)
        self.messages = np.full(network.rows, messages, dtype=np.int64)
        self._network, self._n_workers, self._hosted = network, n, network.hosted
        self._tag = 0 if network.stream_ordered else comm.new_tag()
        self._collective: _Collective | None = None
        native = network.all_reduce == "native"
        by_copy = tensor.unflatten(0, (network.copies, network.hosted))
        self._total = tensor.new_empty(network.copies, *tensor.shape[1:])
        self._shared = self._total  # the memory that the channel accesses
        if network.stage:
            self._shared = torch.empty(
                self._total.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        # The sums over the hosted workers. A single worker's message is sent from its own memory.
        in_place = network.hosted == 1 and tensor.is_contiguous() and not network.stage
        self._local: list[_Mean] = []
        if not in_place or native or channel is None:
            n_local = n if channel is None else 1
            self._local = [
                _Mean(rows, total, n_local)
                for rows, total in zip(by_copy, self._total, strict=True)
            ]
        if channel is None:
            return
        if native:
            self._steps = [channel.all_reduce(self._shared)]
            return
        outgoing = (self._shared if self._local else tensor).view(-1).tensor_split(comm.size)
        incoming = self._shared.view(-1).tensor_split(comm.size)
        mean = incoming[comm.rank]
        collected = mean.new_empty(comm.size, len(mean))
        self._steps = [
            _exchange(network, 0, outgoing, collected.unbind()),
            _exchange(network, self._tag, [mean] * comm.size, incoming),
        ]
        self._of_part = _Mean(collected, mean, n, (comm.rank, outgoing[comm.rank]))

    def post(self) -> None:
        for mean in self._local:
            mean.compute()
        if self._alone:
            return
        if self._shared is not self._total:
            self._shared.copy_(self._total, non_blocking=True)
        if self._network.waits_for_kernels:
            torch.cuda.current_stream().synchronize()
        self._collective = _Collective(self._in_steps())
        if self._network.stream_ordered:
            self._collective.wait()  # starts the second step after the first one in the stream

    def _in_steps(self) -> Steps:
        yield self._steps[0]
        if len(self._steps) > 1:
            self._of_part.compute()
            if self._network.waits_for_kernels and not self._network.stage:
                torch.cuda.current_stream().synchronize()
            yield self._steps[1]

    def has_arrived(self) -> bool:
        return self._collective is None or self._collective.is_done()

    def wait(self) -> Tensor:
        if self._collective is not None:
            self._collective.wait()
            if self._shared is not self._total:
                self._total.copy_(self._shared, non_blocking=True)
            if len(self._steps) == 1:
                self._total.div_(self._n_workers)
        mean = self._total
        return mean if len(mean) == 1 else mean.repeat_interleave(self._hosted, dim=0)


class Gathering(Transport):
    """All-gather of pieces [length] of different lengths.

    Every worker sends its piece, and its length in 32 bits, to all others.
    """

    def __init__(self, network: "Network", pieces: Sequence[Tensor]):
        assert network.copies == 1, "Gather does not support copies > 1"
        assert len(pieces) == network.hosted, f"{len(pieces)} pieces, {network.hosted} workers"
        for piece in pieces:
            assert piece.ndim == 1, f"a piece of shape {tuple(piece.shape)}, expected [length]"
            assert piece.dtype == pieces[0].dtype, "all pieces must have the same dtype"
        self._network, self._pieces = network, pieces
        self._on_gpu = pieces[0].is_cuda
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int32)
        others = network.n_workers - 1
        self.bits = others * (lengths.astype(np.int64) * (8 * pieces[0].element_size()) + 32)
        self.messages = np.full(len(pieces), 2 * others, dtype=np.int64)
        self._own_lengths = lengths
        self._collective: _Collective | None = None

    def post(self) -> None:
        network, comm = self._network, self._network.processes
        by_process = comm.gather_arrays(self._own_lengths)
        self._lengths = by_process.reshape(-1).tolist()
        self._received = self._pieces[0].new_empty(sum(self._lengths))
        self._shared = self._received  # the memory that the channel accesses
        if network.stage:
            self._shared = torch.empty(
                self._received.shape, dtype=self._received.dtype, pin_memory=self._on_gpu
            )
        parts = self._shared.split(by_process.sum(1, dtype=np.int64).tolist())
        own = parts[comm.rank]
        own.copy_(torch.cat(list(self._pieces)), non_blocking=True)
        if comm.size == 1:
            return
        if network.waits_for_kernels:
            torch.cuda.current_stream().synchronize()
        self._collective = _Collective(
            iter([_exchange(network, 0, [own] * comm.size, parts, once=True)])
        )

    def has_arrived(self) -> bool:
        return self._collective is None or self._collective.is_done()

    def wait(self) -> list[Tensor]:
        if self._collective is not None:
            self._collective.wait()
        if self._shared is not self._received:
            self._received.copy_(self._shared, non_blocking=True)
        return list(self._received.split(self._lengths))
