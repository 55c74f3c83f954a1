"""The workers of this process, and the messages between all workers. Nothing else knows MPI.

An algorithm's step is a conversation: a generator that yields what leaves and is resumed with what
arrived. It yields a message, or several in a tuple, to travel at the same time:

    yields                                                        is resumed with
    ToEach(tensor)  # [worker, neighbor, ...]  each its own       [worker, neighbor, ...]
    ToAll(tensor)   # [worker, ...]            all the same       [worker, neighbor, ...]
    Mean(tensor)    # [worker, ...]            all-reduce         [1, ...], the mean
    Gather(pieces)  # worker × [any length]    all-gather         n × [length], of all workers

What arrives lies in memory that the next message of the same object overwrites. A message object
that is yielded again (its tensor refilled) reuses its receive buffer and MPI requests; so a method
that sends the same shape at each step keeps its message objects.

Axes: worker (hosted by this process), neighbor (a slot; padded to the largest degree: weight 0,
number −1, nothing sent, and what "arrives" there is finite but has no meaning).

Bits and messages are counted here and nowhere else, from the bytes that leave a worker: messages
between workers of one process count as those between processes do, so that the layout of workers
over processes does not show.
"""

import ctypes
import os
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from errors import BadInput, Interrupted, Stopped
from topologies import Round, Topology

T = TypeVar("T")


@dataclass(eq=False)
class ToEach:
    """A message of its own for every neighbor: tensor [worker, neighbor, ...], contiguous."""

    tensor: Tensor


@dataclass(eq=False)
class ToAll:
    """The same message for every neighbor: tensor [worker, ...]."""

    tensor: Tensor


@dataclass(eq=False)
class Mean:
    """All-reduce: every worker receives the mean over all n workers. tensor [worker, ...]."""

    tensor: Tensor


@dataclass(eq=False)
class Gather:
    """All-gather: every worker receives the pieces of all n workers, in the order of their numbers.

    pieces: a contiguous tensor [length] for each hosted worker; lengths may differ between workers
    and from one time to the next, the type of the numbers must not differ between workers.
    """

    pieces: Sequence[Tensor]


Message = ToEach | ToAll | Mean | Gather
Conversation = Generator[Any, Any, None]  # yields Message | tuple[Message, ...]


# --- The processes of a run ----------------------------------------------------------------------


class Processes:
    """The processes of a communicator, or this one alone. `processes()` are those of the run."""

    def __init__(self, communicator: Any = None):
        self.communicator = communicator
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        cores = _cores()
        self.threads = len(cores)  # this process' share of the cores of its host
        if self.communicator is not None:
            from mpi4py import MPI

            self.rank, self.size = self.communicator.rank, self.communicator.size
            host = self.communicator.Split_type(MPI.COMM_TYPE_SHARED)
            self.local_rank, self.local_size = host.rank, host.size
            all_cores = set().union(*host.allgather(cores))
            host.Free()
            self.threads = max(1, min(len(cores), len(all_cores) // self.local_size))
        self._tags = 0

    def others(self, step: int) -> list[int]:
        """All other processes, from the next one on (step 1) or from the one before back (−1): if
        all send to the first ones first, each hears one at a time."""
        return [(self.rank + step * k) % self.size for k in range(1, self.size)]

    def new_tag(self) -> int:
        """A tag for messages: 1, 2, … and again; the same in all processes, if they all ask."""
        self._tags = self._tags % 32767 + 1  # the largest that every MPI knows
        return self._tags

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` in every process; if the user's input failed in one, refuse in all.

        `action` must not communicate. Raises BadInput, everywhere the same, if it raised ValueError
        or OSError anywhere.
        """
        result, complaint = None, None
        try:
            result = action()
        except (ValueError, OSError) as error:
            complaint = str(error)
        for text in self.gather(complaint):
            if text is not None:
                raise BadInput(text)
        return result  # type: ignore[return-value]  # a complaint has been raised

    def one_by_one(self, action: Callable[[], T]) -> T:
        """`agree`, but first in one process of each host while the others wait (downloads)."""
        first = self.local_rank == 0
        result = self.agree(lambda: action() if first else None)
        others = self.agree(lambda: None if first else action())
        return result if first else others  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in all processes (pickled: for small and rare things)."""
        return [value] if self.communicator is None else self.communicator.allgather(value)

    def broadcast(self, value: T) -> T:
        """Process 0's value, in all processes."""
        return value if self.communicator is None else self.communicator.bcast(value)

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Sum of an array over the processes, in all processes."""
        if self.communicator is None:
            return array
        total = np.empty_like(array)
        self.communicator.Allreduce(np.ascontiguousarray(array), total)
        return total


@cache
def processes() -> Processes:
    """The processes of this run. Starts MPI if there is a launcher, and then takes care that an
    exception in one process ends them all."""
    found = Processes(_world_communicator())
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(found.threads)
    if found.size > 1:
        _end_together(found)
    return found


def _world_communicator() -> Any:
    """A communicator of all processes; None where no launcher is at work, which needs no MPI."""
    launchers = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in launchers):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup() if MPI.COMM_WORLD.size > 1 else None


def _cores() -> set[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _end_together(found: Processes) -> None:
    """An uncaught exception in one process would leave the others waiting for its messages."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (BadInput, Interrupted)):  # raised in all processes
            if found.rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            from mpi4py import MPI

            MPI.Finalize()
            os._exit(2 if isinstance(error, BadInput) else 128 + error.signal)
        # If several fail at once, for the same reason, the first to speak ends the others.
        # Ending them takes a while where processes share cores.
        time.sleep(0.0 if found.rank == 0 else min(0.5 + 0.1 * found.rank, 3.0))
        if isinstance(error, Stopped):
            text = f"error: {error}"
        else:
            text = f"process {found.rank} of {found.size} on {socket.gethostname()} failed:\n"
            text += "".join(traceback.format_exception(kind, error, trace))
        print(f"\n{text}", file=sys.stderr, flush=True)
        found.communicator.Abort(error.exit_code if isinstance(error, Stopped) else 1)

    sys.excepthook = hook


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """For "auto": the GPU of the local process' number modulo their count, or else the CPU.

    Raises ValueError for a device that torch does not know or that is not there.
    """
    choices = "use auto, cpu, cuda or cuda:NUMBER"
    gpus = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if gpus else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    kind, _, number = wanted.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f'device "{wanted}" is unknown; {choices}')
    if gpus == 0:
        raise ValueError(f'device "{wanted}": no GPU is visible to torch here; use cpu')
    index = int(number) if number else local_rank % gpus
    if index >= gpus:
        raise ValueError(f'device "{wanted}" is not there; the GPUs are cuda:0 to cuda:{gpus - 1}')
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def cuda_aware_mpi() -> bool | None:
    """Whether the MPI library takes GPU memory, by its own word; None if it does not say.

    Open MPI and its relatives answer MPIX_Query_cuda_support, MPICH answers
    MPIX_GPU_query_support.
    """
    from mpi4py import MPI

    del MPI  # loads the library, whose symbols the process then has
    for library in [None, *_loaded_mpi_libraries()]:
        try:
            symbols = ctypes.CDLL(library)
        except OSError:
            continue
        if hasattr(symbols, "MPIX_Query_cuda_support"):
            return bool(symbols.MPIX_Query_cuda_support())
        if hasattr(symbols, "MPIX_GPU_query_support"):
            answer = ctypes.c_int(0)
            cuda = 0  # MPIX_GPU_SUPPORT_CUDA
            return symbols.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0 and bool(answer)
    return None


def _loaded_mpi_libraries() -> list[str]:
    """Files of this process' memory map that look like an MPI library (Linux)."""
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(file for file in files if os.path.basename(file).startswith("libmpi"))


# --- The network of workers ----------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Whom the hosted workers hear in one round of the topology.

    neighbors  # int64 [worker, neighbor]  their numbers, ascending; padding: −1
    weights    # [worker, neighbor]        w_ij with which i uses what j sends; padding: 0
    """

    neighbors: Tensor
    weights: Tensor


class Network:
    """The workers 0 … n−1 of a topology, spread in equal blocks over the processes.

    workers    # range: the numbers of the workers that this process hosts
    rounds     # Slots for each round of the topology's period
    slots      # Slots of the current round; neighbors and weights are theirs
    symmetric  # whether W is symmetric; then a neighbor's slot serves for sending and receiving
    round      # number of conversations finished, t of the topology's round

    `copies` > 1 hosts as many independent copies of all workers, for many settings at once: the
    first axis of every tensor is then [copy · worker], a row for each hosted worker of each copy.

    `measure("communication")` is the context in which messages are posted and waited for; entry
    points put a clock there.

    `stage` says whether messages pass through (pinned) host memory on their way to MPI; None
    decides: where tensors are on a GPU and MPI does not take GPU memory.

    Raises ValueError if the workers cannot be spread evenly.
    """

    def __init__(
        self,
        topology: Topology,
        among: Processes | None = None,
        device: torch.device | None = None,
        stage: bool | None = None,
        copies: int = 1,
    ):
        self.processes = among or processes()
        self.device = device or torch.device("cpu")
        if stage is None:
            stage = (
                self.processes.size > 1
                and self.device.type == "cuda"
                and cuda_aware_mpi() is not True
            )
        self.stage = stage
        self.topology = topology
        self.symmetric = topology.symmetric
        self.n_workers = topology.n_workers
        size, rank = self.processes.size, self.processes.rank
        self.hosted = hosted_workers(self.n_workers, size)
        self.workers = range(rank * self.hosted, (rank + 1) * self.hosted)
        self.copies = copies
        self.rows = copies * self.hosted
        self.round = 0
        self.measure: Callable[[str], AbstractContextManager[Any]] = lambda phase: nullcontext()

        self._edges = [_Edges(r, self.workers, copies) for r in topology.rounds]
        self.rounds = [
            Slots(
                torch.from_numpy(edges.neighbors).to(self.device),
                torch.from_numpy(edges.weights).float().to(self.device),
            )
            for edges in self._edges
        ]
        self._under_way: list[_Transport] = []  # those not known to have arrived
        self._bits = np.zeros(self.rows, dtype=np.int64)
        self._messages = np.zeros(self.rows, dtype=np.int64)
        self._transports: weakref.WeakKeyDictionary[Message, dict[int, _Transport]]
        self._transports = weakref.WeakKeyDictionary()

    @property
    def slots(self) -> Slots:
        """Whom the hosted workers hear in the current round."""
        return self.rounds[self.round % len(self.rounds)]

    @property
    def neighbors(self) -> Tensor:
        """int64 [worker, neighbor] of the current round; padding: −1."""
        return self.slots.neighbors

    @property
    def weights(self) -> Tensor:
        """w_ij [worker, neighbor] of the current round; padding: 0."""
        return self.slots.weights

    @property
    def row_workers(self) -> Tensor:
        """The worker that each row of a tensor belongs to: int64 [row]."""
        return torch.tensor(self.workers, device=self.device).repeat(self.copies)

    @property
    def bits(self) -> np.ndarray:
        """Bits that each hosted worker has sent since the start: int64 [worker]."""
        return self._bits

    @property
    def messages(self) -> np.ndarray:
        """Messages that each hosted worker has sent since the start: int64 [worker]."""
        return self._messages

    def progress(self) -> None:
        """Let messages under way travel on, without waiting for them.

        MPI moves long messages only while it is called: to be called now and then between `start`
        and `finish`.
        """
        if self._under_way:
            self._under_way = [t for t in self._under_way if not t.has_arrived()]

    def count_all_reduce(self, bits: int) -> None:
        """Put an all-reduce of so many bits a worker on the counters, which someone else has made.

        As `Mean` is counted: as one that sends no more than it must.
        """
        sent, messages = _all_reduce(self.n_workers, bits)
        self._bits += sent
        self._messages += messages

    def state_dict(self) -> dict[str, Any]:
        """What is counted, by worker, and the round."""
        return {
            "round": self.round,
            "bits": torch.from_numpy(self._bits.copy()),
            "messages": torch.from_numpy(self._messages.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.round = state["round"]
        self._bits[:] = state["bits"].numpy()
        self._messages[:] = state["messages"].numpy()

    def bits_to_all(self, numbers: int, steps: int = 1) -> np.ndarray:
        """What it would cost to send so many numbers of 32 bits to all neighbors in each of the
        first `steps` rounds: bits, int64 [worker]."""
        periods, more = divmod(steps, len(self._edges))
        degrees = sum(
            edges.out_degrees * (periods + (t < more)) for t, edges in enumerate(self._edges)
        )
        return np.asarray(degrees * (32 * numbers))

    def run(self, conversation: Conversation) -> None:
        """Carry a conversation through."""
        self.start(conversation).finish()

    def start(self, conversation: Conversation) -> "Exchange":
        """Let the first messages of a conversation leave; `finish()` carries it through.

        What those messages read (the tensors yielded) must not be changed in between.
        """
        return Exchange(self, conversation)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of tensor [worker, ...] over all workers: [...]. Measuring: not counted.

        With several copies, the mean of each: [copy, ...].
        """
        transport = _Reduction(self, tensor)
        transport.post()
        means = transport.wait()
        return means[0] if self.copies == 1 else means[:: self.hosted]

    def gather(self, values: Tensor) -> Tensor:
        """values [worker, ...] of all n workers, in all processes. Measuring: not counted.

        With several copies: [copy · n, ...].
        """
        own = values.detach().cpu().numpy()
        own = own.reshape(self.copies, self.hosted, *own.shape[1:])
        parts = np.concatenate(self.processes.gather(own), axis=1)
        return torch.from_numpy(parts.reshape(self.copies * self.n_workers, *parts.shape[2:]))

    def _transport(self, message: Message) -> "_Transport":
        if isinstance(message, Gather):  # of other lengths each time: there is nothing to keep
            return _Gathering(self, message.pieces)
        of_rounds = self._transports.setdefault(message, {})
        index = 0 if isinstance(message, Mean) else self.round % len(self.rounds)
        if index not in of_rounds:
            kind = _Reduction if isinstance(message, Mean) else _Delivery
            of_rounds[index] = kind(self, message.tensor, isinstance(message, ToEach), index)
        return of_rounds[index]


def hosted_workers(n_workers: int, n_processes: int) -> int:
    """How many workers each process hosts. ValueError if they cannot be spread evenly."""
    if n_workers < 1:
        raise ValueError(f"n_workers={n_workers}: use 1 or more")
    if n_workers % n_processes:
        raise ValueError(
            f"n_workers={n_workers} cannot be spread over {n_processes} processes; "
            f"use a multiple of {n_processes}, or mpirun -np {n_workers}"
        )
    return n_workers // n_processes


class Exchange:
    """A conversation under way: its first messages have left when this object exists."""

    def __init__(self, network: Network, conversation: Conversation):
        self._network = network
        self._conversation = conversation
        self._under_way: list[_Transport] | None = []
        self._several = False
        self._advance(None)

    def finish(self) -> None:
        """Receive, answer, and so on to the conversation's end."""
        while self._under_way is not None:
            self._network._under_way = []
            with self._network.measure("communication"):
                received = [transport.wait() for transport in self._under_way]
            self._advance(tuple(received) if self._several else received[0])
        self._network.round += 1

    def _advance(self, received: Any) -> None:
        try:
            messages = self._conversation.send(received)
        except StopIteration:
            self._under_way = None
            return
        network = self._network
        self._several = isinstance(messages, tuple)
        if not self._several:
            messages = (messages,)
        self._under_way = [network._transport(message) for message in messages]
        with network.measure("communication"):
            for transport in self._under_way:
                transport.post()
                network._bits += transport.bits
                network._messages += transport.messages
        network._under_way = self._under_way


def together(*conversations: Conversation) -> Conversation:
    """Several conversations as one, whose messages travel at the same time."""
    waiting: list[tuple[Conversation, Any]] = [(c, None) for c in conversations]
    while True:
        asked: list[tuple[Conversation, tuple[Message, ...], bool]] = []
        for conversation, received in waiting:
            try:
                messages = conversation.send(received)
            except StopIteration:
                continue
            several = isinstance(messages, tuple)
            asked.append((conversation, messages if several else (messages,), several))
        if not asked:
            return
        answers = iter((yield tuple(m for _, messages, _ in asked for m in messages)))
        waiting = []
        for conversation, messages, several in asked:
            received = tuple(next(answers) for _ in messages)
            waiting.append((conversation, received if several else received[0]))


# --- How messages travel -------------------------------------------------------------------------


class _Edges:
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


class _Transport:
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


class _Delivery(_Transport):
    """A message to neighbors, and the memory that their messages arrive in.

    Seen as rows: tensor[worker, slot] (ToEach) or tensor[worker] (ToAll) is a row that leaves, and
    received[worker, slot] a row that arrives.
    """

    def __init__(self, network: Network, tensor: Tensor, to_each: bool, index: int):
        edges, rows = network._edges[index], network.rows
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
        network: Network,
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


def _memory(rows: Tensor) -> Any:
    """The memory of rows for MPI, without a copy: bytes, whatever the numbers' type."""
    assert rows.is_contiguous(), "a message must lie in one piece"
    octets = rows.detach().view(-1).view(torch.uint8)
    return octets if octets.is_cuda else octets.numpy()


def _all_reduce(n: int, bits: int) -> tuple[int, int]:
    """Bits and messages that each of n workers sends of so many bits: 2 (n − 1)/n of them, in
    2 (n − 1) messages. Fewer bits would not do (Patarasuk & Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002)."""
    return round(2 * (n - 1) * bits / n), 2 * (n - 1)


class _Sum:
    """Puts the sum over all processes in a tensor's place, in two rounds.

    In the first, each of p processes receives its p-th part of the numbers from all others; in the
    second, it sends them that part's sum. A part is summed in one place, in an order that does not
    depend on who is faster: all see the same, to the bit, every time.

    MPI's own all-reduce that does not block would send other bytes than are counted (Open MPI's, in
    place: all numbers up and down a tree, which takes several times as long on slow links), and
    ends the process where the numbers are on a GPU (github.com/open-mpi/ompi/issues/9845).
    """

    def __init__(self, among: Processes, tensor: Tensor):
        from mpi4py import MPI

        self._start_all, self._wait_all = MPI.Prequest.Startall, MPI.Request.Waitall
        self._test_all = MPI.Request.Testall
        parts = tensor.view(-1).tensor_split(among.size)
        self._own = parts[among.rank]
        self._collected = self._own.new_empty(among.size, len(self._own))
        self._place = self._collected[among.rank]
        # The second round begins at a time of its own in each process. So its messages cannot be
        # told from others by their order, as all the rest can.
        tag = among.new_tag()
        receive, send = among.communicator.Recv_init, among.communicator.Send_init
        first, second = [], []
        for sender in among.others(-1):
            first.append(receive([_memory(self._collected[sender]), MPI.BYTE], sender))
            second.append(receive([_memory(parts[sender]), MPI.BYTE], sender, tag))
        for process in among.others(1):
            first.append(send([_memory(parts[process]), MPI.BYTE], process))
            second.append(send([_memory(self._own), MPI.BYTE], process, tag))
        self._rounds = first, second
        self._round = 2  # 0, 1, or 2: all is there
        weakref.finalize(self, _free, first + second).atexit = False

    def start(self) -> None:
        """Where the tensor is on a GPU, what computes it must have ended."""
        self._round = 0
        self._start_all(self._rounds[0])

    def is_done(self) -> bool:
        """Does not block. Lets the second round begin once the first has ended."""
        while self._round < 2:
            if not self._test_all(self._rounds[self._round]):
                return False
            self._end_round()
        return True

    def wait(self) -> None:
        while self._round < 2:
            self._wait_all(self._rounds[self._round])
            self._end_round()

    def _end_round(self) -> None:
        self._round += 1
        if self._round == 1:
            self._place.copy_(self._own)
            _sum_in_pairs(self._collected[None], self._own[None])
            if self._own.is_cuda:
                torch.cuda.current_stream().synchronize()
            self._start_all(self._rounds[1])


# Numbers that a sum takes at a time: on a CPU, what its caches hold.
_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}


def _sum_in_pairs(rows: Tensor, out: Tensor) -> None:
    """out [copy, number] becomes the sum of rows [copy, row, number], ((r_0 + r_1) + (r_2 + r_3))
    + …: the same to the bit where blocks of 2, 4, 8, … rows are summed first, in other processes."""
    width = max(1, _AT_ONCE[rows.device.type] // (rows.shape[0] * rows.shape[1]))
    for terms, total in zip(rows.split(width, 2), out.split(width, 1), strict=True):
        while (count := terms.shape[1]) > 2:
            pairs = terms[:, :-1:2] + terms[:, 1::2]
            terms = torch.cat([pairs, terms[:, -1:]], 1) if count % 2 else pairs
        if count == 2:
            torch.add(terms[:, 0], terms[:, 1], out=total)
        else:
            total.copy_(terms[:, 0])


class _Reduction(_Transport):
    """All-reduce: among the workers of a process by a sum, between processes by `_Sum`."""

    def __init__(self, network: Network, tensor: Tensor, to_each: bool = False, index: int = 0):
        assert tensor.shape[0] == network.rows
        n = network.n_workers
        size = tensor[0].numel() * tensor.element_size() * 8
        bits, messages = _all_reduce(n, size)
        self.bits = np.full(network.rows, bits, dtype=np.int64)
        self.messages = np.full(network.rows, messages, dtype=np.int64)
        self._by_copy = tensor.unflatten(0, (network.copies, network.hosted))
        self._n_workers, self._hosted = n, network.hosted
        self._total = tensor.new_empty(network.copies, *tensor.shape[1:])
        self._on_gpu = tensor.is_cuda
        self._shared = self._total  # the memory that MPI sees
        self._sum: _Sum | None = None
        if network.processes.communicator is None:
            return
        if network.stage:
            self._shared = torch.empty(
                self._total.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        self._sum = _Sum(network.processes, self._shared)

    def post(self) -> None:
        _sum_in_pairs(self._by_copy[..., None].flatten(2), self._total[..., None].flatten(1))
        if self._sum is None:
            return
        if self._shared is not self._total:
            self._shared.copy_(self._total, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._sum.start()

    def has_arrived(self) -> bool:
        return self._sum is None or self._sum.is_done()

    def wait(self) -> Tensor:
        if self._sum is not None:
            self._sum.wait()
            if self._shared is not self._total:
                self._total.copy_(self._shared, non_blocking=True)
        mean = self._total.div_(self._n_workers)
        return mean if len(mean) == 1 else mean.repeat_interleave(self._hosted, dim=0)


class _Gathering(_Transport):
    """All-gather of pieces [length] that differ in length, which all workers first tell each other.

    Every worker sends its piece to all others, and its length in 32 bits.
    """

    def __init__(self, network: Network, pieces: Sequence[Tensor]):
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
        self._requests: list[Any] = []

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
        from mpi4py import MPI

        receive, send = among.communicator.Irecv, among.communicator.Isend
        self._requests = [
            *(receive([_memory(parts[sender]), MPI.BYTE], sender) for sender in among.others(-1)),
            *(send([_memory(own), MPI.BYTE], process) for process in among.others(1)),
        ]
        self._wait_all, self._test_all = MPI.Request.Waitall, MPI.Request.Testall

    def has_arrived(self) -> bool:
        return not self._requests or bool(self._test_all(self._requests))

    def wait(self) -> list[Tensor]:
        if self._requests:
            self._wait_all(self._requests)
        if self._shared is not self._received:
            self._received.copy_(self._shared, non_blocking=True)
        return list(self._received.split(self._lengths))
