"""How messages travel: in memory between the workers of a process, by MPI between processes."""

import weakref
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from powergossip.network.mpi import Processes
from powergossip.topologies import Round

if TYPE_CHECKING:
    from powergossip.network.workers import Network


class Edges:
    """Who sends what to whom in a round, for the workers that a process hosts. numpy arrays.

    A row is a hosted worker of a copy: copy · hosted + position among the hosted.

    neighbors, weights  # [row, slot], see Slots
    out_degrees         # [row]
    slots, targets      # int: the largest numbers of workers that one hears, and sends to

    Each kind of edge is a pair of arrays, row and slot (among the worker's targets for what leaves,
    among its neighbors for what arrives):
    inside_from, inside_to  both ends are hosted here, in the same order
    sent, received          the other end is in `sent_process`, `received_process`; ordered by
                            process, in an order that both processes share
    """

    def __init__(self, of_round: Round, workers: range, copies: int):
        weights, n, hosted = of_round.weights, of_round.n_workers, len(workers)
        degrees = np.diff(weights.indptr)
        hears = np.repeat(np.arange(n), degrees)  # an edge: worker `hears` hears worker `sends`
        sends = weights.indices.astype(np.int64)
        in_slot = np.arange(len(sends)) - weights.indptr[hears]
        out_slot = np.empty_like(in_slot)
        by_sender = np.lexsort((hears, sends))
        sent_by = np.bincount(sends, minlength=n)
        first = np.concatenate(([0], np.cumsum(sent_by)))
        out_slot[by_sender] = np.arange(len(sends)) - first[sends[by_sender]]

        self.slots = int(degrees.max(initial=0))
        self.targets = int(sent_by.max(initial=0))
        self.out_degrees = np.tile(sent_by[workers.start : workers.stop], copies)
        here = (workers.start <= hears) & (hears < workers.stop)
        mine = (workers.start <= sends) & (sends < workers.stop)
        neighbors = np.full((hosted, self.slots), -1, dtype=np.int64)
        own_weights = np.zeros((hosted, self.slots))
        neighbors[hears[here] - workers.start, in_slot[here]] = sends[here]
        own_weights[hears[here] - workers.start, in_slot[here]] = weights.data[here]
        self.neighbors = np.tile(neighbors, (copies, 1))
        self.weights = np.tile(own_weights, (copies, 1))

        def in_all_copies(
            chosen: np.ndarray, worker: np.ndarray, slot: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            offsets = hosted * np.arange(copies)[:, None]
            rows = (worker[chosen] - workers.start + offsets).ravel()
            return rows, np.tile(slot[chosen], copies)

        inside, away, back = here & mine, mine & ~here, here & ~mine
        self.inside_from = in_all_copies(inside, sends, out_slot)
        self.inside_to = in_all_copies(inside, hears, in_slot)
        # By process, copy, hearing worker, slot there; edges are in the order of the last two.
        process = np.tile(hears[away] // hosted, copies)
        order = np.argsort(process, kind="stable")
        row, slot = in_all_copies(away, sends, out_slot)
        self.sent, self.sent_process = (row[order], slot[order]), process[order]
        process = np.tile(sends[back] // hosted, copies)
        order = np.argsort(process, kind="stable")
        row, slot = in_all_copies(back, hears, in_slot)
        self.received, self.received_process = (row[order], slot[order]), process[order]


class Transport:
    """One message: `post` lets it leave, `wait` returns what arrived."""

    bits: np.ndarray  # int64 [worker]  sent by each hosted worker
    messages: np.ndarray  # int64 [worker]

    def post(self) -> None:
        raise NotImplementedError

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once; does not block."""
        raise NotImplementedError

    def wait(self) -> Tensor | list[Tensor]:
        raise NotImplementedError


class Delivery(Transport):
    """A message to neighbors, and the memory that their messages arrive in.

    Seen as rows: tensor[worker, slot] (ToEach) or tensor[worker] (ToAll) is a row that leaves, and
    received[worker, slot] a row that arrives.
    """

    def __init__(self, network: "Network", tensor: Tensor, to_each: bool, index: int):
        edges, rows = network.edges[index], network.rows
        axes = 2 if to_each else 1
        expected = (rows, edges.targets)[:axes]
        assert tensor.shape[:axes] == expected, f"message {tensor.shape}, expected {expected}, ..."
        numbers = prod(tensor.shape[axes:])
        self.bits = edges.out_degrees * (numbers * tensor.element_size() * 8)
        self.messages = edges.out_degrees
        self._received = tensor.new_zeros(rows, edges.slots, *tensor.shape[axes:])
        leaving = tensor.view(prod(expected), numbers)
        arriving = self._received.view(rows * edges.slots, numbers)

        def leaving_rows(row: np.ndarray, slot: np.ndarray) -> np.ndarray:
            return row * edges.targets + slot if to_each else row

        def arriving_rows(row: np.ndarray, slot: np.ndarray) -> np.ndarray:
            return row * edges.slots + slot

        self._inside = self._between = None
        if len(edges.inside_from[0]):
            # A slot that nothing arrives in shows its own worker's row: one indexing fills all.
            own = np.repeat(np.arange(rows), edges.slots)
            source = leaving_rows(own, np.zeros_like(own))
            source[arriving_rows(*edges.inside_to)] = leaving_rows(*edges.inside_from)
            self._inside = leaving, torch.from_numpy(source).to(tensor.device), arriving
        if len(edges.sent_process) or len(edges.received_process):
            self._between = _Between(
                network,
                leaving,
                leaving_rows(*edges.sent),
                edges.sent_process,
                arriving,
                arriving_rows(*edges.received),
                edges.received_process,
            )

    def post(self) -> None:
        if self._inside:
            leaving, index, arriving = self._inside
            torch.index_select(leaving, 0, index, out=arriving)
        if self._between:
            self._between.post()

    def has_arrived(self) -> bool:
        return self._between is None or self._between.has_arrived()

    def wait(self) -> Tensor:
        if self._between:
            self._between.wait()
        return self._received


class _Between:
    """Rows that travel between processes, with their persistent MPI requests.

    A process that hosts one worker sends from and receives into the rows themselves; with more
    workers, all rows for one process are packed into one message. `sent` and `received` are the
    rows of `leaving` and `arriving`, ordered by process.
    """

    def __init__(
        self,
        network: "Network",
        leaving: Tensor,
        sent: np.ndarray,
        sent_process: np.ndarray,
        arriving: Tensor,
        received: np.ndarray,
        received_process: np.ndarray,
    ):
        device = leaving.device
        self._leaving, self._arriving = leaving, arriving
        self._on_gpu = leaving.is_cuda
        self._pack = self._unpack = None
        if network.rows > 1:
            self._pack = torch.from_numpy(sent).to(device)
            self._unpack = torch.from_numpy(received).to(device)
            leaving = leaving.new_empty(len(sent), leaving.shape[1])
            arriving = arriving.new_empty(len(received), arriving.shape[1])
            sent, received = np.arange(len(sent)), np.arange(len(received))
        self._outgoing, self._incoming = leaving, arriving
        self._host_outgoing, self._host_incoming = leaving, arriving
        self._stage = network.stage
        if self._stage:
            self._host_outgoing, self._host_incoming = (
                torch.zeros(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
                for t in (leaving, arriving)
            )

        from mpi4py import MPI

        self._start_all, self._wait_all = MPI.Prequest.Startall, MPI.Request.Waitall
        self._test_all = MPI.Request.Testall
        communicator = network.processes.communicator
        self._requests = [
            communicator.Recv_init([_memory(rows), MPI.BYTE], process)
            for process, rows in _pieces(self._host_incoming, received, received_process)
        ] + [
            communicator.Send_init([_memory(rows), MPI.BYTE], process)
            for process, rows in _pieces(self._host_outgoing, sent, sent_process)
        ]
        # At exit MPI frees them itself.
        weakref.finalize(self, _free, self._requests).atexit = False

    def post(self) -> None:
        if self._pack is not None:
            torch.index_select(self._leaving, 0, self._pack, out=self._outgoing)
        if self._stage:
            self._host_outgoing.copy_(self._outgoing, non_blocking=True)
        if self._on_gpu:  # what MPI reads must be there, and what it overwrites must have been read
            torch.cuda.current_stream().synchronize()
        self._start_all(self._requests)

    def has_arrived(self) -> bool:
        return bool(self._test_all(self._requests))

    def wait(self) -> None:
        self._wait_all(self._requests)
        if self._stage:
            self._incoming.copy_(self._host_incoming, non_blocking=True)
        if self._unpack is not None:
            self._arriving.index_copy_(0, self._unpack, self._incoming)


def _free(requests: list[Any]) -> None:
    for request in requests:
        request.Free()


def _pieces(rows: Tensor, chosen: np.ndarray, process: np.ndarray) -> list[tuple[int, Tensor]]:
    """The chosen rows for each process; they lie next to each other, as a message must."""
    starts = np.flatnonzero(np.diff(process, prepend=-1))
    stops = np.append(starts, len(process))[1:]
    return [
        (int(process[start]), rows[chosen[start] : chosen[stop - 1] + 1])
        for start, stop in zip(starts, stops, strict=True)
    ]


_LONGEST = 2**31 - 1  # bytes


def _memory(rows: Tensor) -> Any:
    """The memory of rows for MPI, without a copy: bytes, whatever the numbers' type.

    Raises ValueError for more than MPI can count.
    """
    assert rows.is_contiguous(), "a message must lie in one piece"
    if rows.nbytes > _LONGEST:
        raise ValueError(
            f"a message of {rows.nbytes} bytes, of which MPI can count {_LONGEST}; send fewer "
            f"numbers at a time"
        )
    octets = rows.detach().view(-1).view(torch.uint8)
    return octets if octets.is_cuda else octets.numpy()


def all_reduce_cost(n: int, bits: int) -> tuple[int, int]:
    """Bits and messages that each of n workers sends of so many bits: 2 (n − 1)/n of them, in
    2 (n − 1) messages. Fewer bits would not do (Patarasuk & Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002)."""
    return round(2 * (n - 1) * bits / n), 2 * (n - 1)


# Requests of MPI; the next ones are made when these are done.
Steps = Iterator[list[Any]]


class _Collective:
    """Messages between all processes, under way as steps that follow one another."""

    def __init__(self, steps: Steps):
        from mpi4py import MPI

        self._wait_all, self._test_all = MPI.Request.Waitall, MPI.Request.Testall
        self._steps = steps
        self._requests = next(steps, None)

    def is_done(self) -> bool:
        """Does not block; lets the next step begin."""
        while self._requests is not None:
            if not self._test_all(self._requests):
                return False
            self._requests = next(self._steps, None)
        return True

    def wait(self) -> None:
        while self._requests is not None:
            self._wait_all(self._requests)
            self._requests = next(self._steps, None)


def _exchange(
    among: Processes, tag: int, leaving: Sequence[Tensor], arriving: Sequence[Tensor]
) -> list[Any]:
    """Requests: a tensor leaves for each process and one arrives from each; this process' own are
    left out.

    All processes call it with the same tag: 0, as all other messages have, where it is called when
    a message is posted, so that order tells them apart. What begins later, at a time of its own in
    each process, takes a tag of its own.
    """
    from mpi4py import MPI

    def away(steps: int) -> int:
        return (among.rank + steps) % among.size

    receive, send = among.communicator.Irecv, among.communicator.Isend
    senders, receivers = map(away, range(-1, -among.size, -1)), map(away, range(1, among.size))
    return [
        *(receive([_memory(arriving[process]), MPI.BYTE], process, tag) for process in senders),
        *(send([_memory(leaving[process]), MPI.BYTE], process, tag) for process in receivers),
    ]


def _sum(among: Processes, tag: int, parts: Sequence[Tensor], collected: Tensor) -> Steps:
    """Where p processes have a tensor in p parts each, the sums of these come in their place.

    Each process receives its part from all others (collected [process, number]); then it sends
    them that part's sum. A part is summed in one place, in an order that does not depend on who is
    faster: all see the same, to the bit, every time.

    MPI's own all-reduce that does not block would send other bytes than are counted (Open MPI's, in
    place: all numbers up and down a tree, which takes several times as long on slow links), and
    ends the process where the numbers are on a GPU (github.com/open-mpi/ompi/issues/9845).
    """
    own = parts[among.rank]
    yield _exchange(among, 0, parts, collected.unbind())
    collected[among.rank] = own
    _sum_in_pairs(collected[None], own[None])
    if own.is_cuda:
        torch.cuda.current_stream().synchronize()
    yield _exchange(among, tag, [own] * among.size, parts)


# Numbers that a sum takes at a time: on a CPU, what its caches hold.
_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}


def _sum_in_pairs(rows: Tensor, out: Tensor) -> None:
    """out [copy, number] becomes the sum of rows [copy, row, number], added in pairs.

    It is the same to the bit where blocks of 2, 4, 8, … rows are summed first, in other processes.
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


class Reduction(Transport):
    """All-reduce: among the workers of a process by a sum, between processes by `_sum`."""

    def __init__(self, network: "Network", tensor: Tensor, to_each: bool = False, index: int = 0):
        assert tensor.shape[0] == network.rows
        n = network.n_workers
        size = tensor[0].numel() * tensor.element_size() * 8
        bits, messages = all_reduce_cost(n, size)
        self.bits = np.full(network.rows, bits, dtype=np.int64)
        self.messages = np.full(network.rows, messages, dtype=np.int64)
        self._by_copy = tensor.unflatten(0, (network.copies, network.hosted))
        self._n_workers, self._hosted = n, network.hosted
        self._total = tensor.new_empty(network.copies, *tensor.shape[1:])
        self._on_gpu = tensor.is_cuda
        self._shared = self._total  # the memory that MPI sees
        if network.stage:
            self._shared = torch.empty(
                self._total.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        among = self._among = network.processes
        self._tag = among.new_tag()
        self._parts = self._shared.view(-1).tensor_split(among.size)
        alone, own = among.communicator is None, self._parts[among.rank]
        self._collected = own.new_empty(0 if alone else among.size, len(own))
        self._under_way: _Collective | None = None

    def post(self) -> None:
        _sum_in_pairs(self._by_copy[..., None].flatten(2), self._total[..., None].flatten(1))
        if self._among.communicator is None:
            return
        if self._shared is not self._total:
            self._shared.copy_(self._total, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        steps = _sum(self._among, self._tag, self._parts, self._collected)
        self._under_way = _Collective(steps)

    def has_arrived(self) -> bool:
        return self._under_way is None or self._under_way.is_done()

    def wait(self) -> Tensor:
        if self._under_way is not None:
            self._under_way.wait()
            if self._shared is not self._total:
                self._total.copy_(self._shared, non_blocking=True)
        mean = self._total.div_(self._n_workers)
        return mean if len(mean) == 1 else mean.repeat_interleave(self._hosted, dim=0)


class Gathering(Transport):
    """All-gather of pieces [length] that differ in length, which all workers first tell each other.

    Every worker sends its piece to all others, and its length in 32 bits.
    """

    def __init__(self, network: "Network", pieces: Sequence[Tensor]):
        assert network.copies == 1, "a gather knows no copies"
        assert len(pieces) == network.hosted, f"{len(pieces)} pieces, {network.hosted} workers"
        for piece in pieces:
            assert piece.ndim == 1, f"a piece of shape {tuple(piece.shape)}, expected [length]"
            assert piece.dtype == pieces[0].dtype, "pieces of one type, please"
        self._network, self._pieces = network, pieces
        self._on_gpu = pieces[0].is_cuda
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int32)
        others = network.n_workers - 1
        self.bits = others * (lengths.astype(np.int64) * (8 * pieces[0].element_size()) + 32)
        self.messages = np.full(len(pieces), 2 * others, dtype=np.int64)
        self._own_lengths = lengths
        self._under_way: _Collective | None = None

    def post(self) -> None:
        network, among = self._network, self._network.processes
        lengths = self._own_lengths
        if among.communicator is not None:
            lengths = np.empty(network.n_workers, dtype=np.int32)
            among.communicator.Allgather(self._own_lengths, lengths)
        self._lengths = lengths.tolist()
        self._received = self._pieces[0].new_empty(sum(self._lengths))
        self._shared = self._received  # the memory that MPI sees
        if network.stage:
            self._shared = torch.empty(
                self._received.shape, dtype=self._received.dtype, pin_memory=self._on_gpu
            )
        by_process = lengths.reshape(among.size, -1).sum(1, dtype=np.int64)
        parts = self._shared.split(by_process.tolist())
        own = parts[among.rank]
        own.copy_(torch.cat(list(self._pieces)), non_blocking=True)
        if among.communicator is None:
            return
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        requests = _exchange(among, 0, [own] * among.size, parts)
        self._under_way = _Collective(iter([requests]))

    def has_arrived(self) -> bool:
        return self._under_way is None or self._under_way.is_done()

    def wait(self) -> list[Tensor]:
        if self._under_way is not None:
            self._under_way.wait()
        if self._shared is not self._received:
            self._received.copy_(self._shared, non_blocking=True)
        return list(self._received.split(self._lengths))
