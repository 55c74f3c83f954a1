"""The workers of this process among all workers, and their conversations."""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import checks
from powergossip.network import launch
from powergossip.network.collectives import Gathering, Reduction, all_reduce_cost
from powergossip.network.conversation import Conversation, Gather, Mean, Message, ToAll, ToEach
from powergossip.network.counter import Counter
from powergossip.network.edges import Edges
from powergossip.network.lost_messages import Losses
from powergossip.network.neighbor_transport import Delivery, Transport
from powergossip.network.processes import Processes
from powergossip.network.rows import Shared
from powergossip.network.staging import Connection
from powergossip.tensor_cache import TensorCache
from powergossip.topologies import Round, Topology

MOST_WORKERS = 10**6  # beyond them, the topology alone takes seconds and gigabytes


@dataclass(frozen=True)
class Slots:
    """The neighbors from which the hosted workers receive in one round of the topology.

    Attributes:
        neighbors: Worker indices, int64 [worker, neighbor], ascending, padded with −1.
        weights: w_ij, i's weight for the values of j: [worker, neighbor], padded with 0.
        on_host: The neighbors, in the memory of the host.
    """

    neighbors: Tensor
    weights: Tensor
    on_host: np.ndarray


class Network:
    """The workers 0 … n−1 of a topology, in equal blocks over the processes.

    Args:
        stage: See Connection, as for `processes` and `device`.
        copies: Number of independent copies of all workers, to run several settings concurrently.
            The first axis of every tensor is then [copy · worker], one row for each hosted worker
            of each copy.
        measure: Context of a phase, such as a clock. `measure("communication")` wraps posting and
            waiting for messages, `measure("update")` local updates in learning rules.
        dtype: Precision of x, float32 or float64. In double precision, elements that are sent
            uncompressed have 64 bits, and there are no compiled loops. Codecs work in single
            precision.
        losses: Losses of messages, where one process hosts all workers.
        connection: The processes and the device, in place of `processes`, `device` and `stage`.

    Attributes:
        workers: Range of the indices of the workers that this process hosts.
        rounds: Slots for each round of the topology's period.
        slots: Slots of the current round. `neighbors` and `weights` are theirs.
        symmetric: True if W is symmetric, so that a neighbor's slot serves for sending and
            receiving.
        round: Number of conversations finished, t of the topology's round.
        counter: Counter of bits and messages.
        edges: Edges of each round that start or end in this process.

    Raises:
        ValueError: If the workers cannot be spread evenly.
    """

    shares = True  # whether `Shared` messages are received as Rows, not as a tensor like others

    def __init__(
        self,
        topology: Topology,
        processes: Processes | None = None,
        device: torch.device | None = None,
        stage: bool | None = None,
        copies: int = 1,
        measure: Callable[[str], AbstractContextManager[Any]] | None = None,
        dtype: torch.dtype = torch.float32,
        losses: Losses | None = None,
        connection: Connection | None = None,
    ):
        if connection is None:
            where = device or torch.device("cpu")
            connection = Connection(processes or launch.processes(), where, stage)
        self.connection = connection
        self.dtype = dtype
        self._losses = losses
        self.topology = topology
        self.symmetric = topology.symmetric
        self.n_workers = topology.n_workers
        size, rank = self.processes.size, self.processes.rank
        self.hosted = hosted_workers(self.n_workers, size)
        self.workers = range(rank * self.hosted, (rank + 1) * self.hosted)
        self.copies = copies
        self.rows = copies * self.hosted
        self.round = 0
        self.measure = measure or (lambda phase: nullcontext())

        self.edges = [Edges(r, self.workers, copies) for r in topology.rounds]
        self.rounds = [
            Slots(
                torch.from_numpy(edges.neighbors).to(self.device),
                torch.from_numpy(edges.weights).to(self.device, dtype),
                edges.neighbors,
            )
            for edges in self.edges
        ]
        self.counter = Counter(self.rows)
        self._transports = TensorCache[Transport]()
        self._in_flight: list[Transport] = []

    @property
    def processes(self) -> Processes:
        return self.connection.processes

    @property
    def device(self) -> torch.device:
        return self.connection.device

    def in_precision(self, dtype: torch.dtype) -> "Network":
        """The same network for x of this dtype, with counters at 0."""
        return Network(
            self.topology,
            copies=self.copies,
            measure=self.measure,
            dtype=dtype,
            losses=self._losses,
            connection=self.connection,
        )

    @property
    def slots(self) -> Slots:
        """The neighbors of the hosted workers in the current round."""
        return self.rounds[self.round % len(self.rounds)]

    @property
    def neighbors(self) -> Tensor:
        """int64 [worker, neighbor] of the current round, padded with −1."""
        return self.slots.neighbors

    @property
    def weights(self) -> Tensor:
        """w_ij [worker, neighbor] of the current round, padded with 0."""
        return self.slots.weights

    @property
    def row_workers(self) -> Tensor:
        """The index of the worker in each row of a tensor: int64 [row]."""
        return torch.tensor(self.workers, device=self.device).repeat(self.copies)

    @property
    def bits(self) -> np.ndarray:
        """Bits that each hosted worker has sent since the start: int64 [worker]."""
        return self.counter.bits

    @property
    def messages(self) -> np.ndarray:
        """Messages that each hosted worker has sent since the start: int64 [worker]."""
        return self.counter.messages

    @property
    def in_flight(self) -> int:
        """The number of messages posted that were not complete at the last `progress`."""
        return len(self._in_flight)

    def progress(self) -> None:
        """Advance the messages in flight without waiting for them.

        MPI transfers long messages only during calls of its functions. Call this now and then
        between `start` and `finish`.
        """
        if self._in_flight:
            self._in_flight = [t for t in self._in_flight if not t.has_arrived()]

    def count_all_reduce(self, bits: int) -> None:
        """Count an all-reduce of `bits` bits a worker that was performed elsewhere (PyTorch DDP).

        It is counted like `Mean`, at the lower bound of an all-reduce.
        """
        sent, messages = all_reduce_cost(self.n_workers, bits)
        self.counter.add(slice(None), sent, messages)

    def state_dict(self) -> dict[str, Any]:
        """The counters, by worker, and the round."""
        lossy = {} if self._losses is None else {"losses": self._losses.state_dict()}
        return lossy | {"round": self.round, **self.counter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self.round = state["round"]
        self.counter.load_state_dict(state)
        if self._losses is not None:
            self._losses.load_state_dict(state["losses"])

    def bits_to_all(self, elements: int, steps: int = 1) -> np.ndarray:
        """The cost of a message of `elements` elements of x to all neighbors in each of the first
        `steps` rounds: bits, int64 [worker]."""
        periods, more = divmod(steps, len(self.edges))
        degrees = sum(
            edges.out_degrees * (periods + (t < more)) for t, edges in enumerate(self.edges)
        )
        return np.asarray(degrees * (8 * self.dtype.itemsize * elements))

    def edges_of(self, topology_round: Round) -> Edges:
        """The edges of a round that is not the topology's, for `ToEach`."""
        return Edges(topology_round, self.workers, self.copies)

    def run(self, conversation: Conversation) -> None:
        """Run a conversation from its start to its end."""
        self.start(conversation).finish()

    def __deepcopy__(self, memo: object) -> "Network":
        return self  # it stands for connections

    def start(self, conversation: Conversation) -> "Exchange":
        """Send the first messages of a conversation. `finish()` runs the rest.

        The tensors of those messages must not be changed in between.
        """
        if self._losses is not None:
            assert self.processes.size == 1
            edges = self.edges[self.round % len(self.edges)]
            conversation = self._losses(conversation, edges, self.round)
        return Exchange(self, conversation)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of tensor [worker, ...] over all workers: [...]. A measurement: not counted.

        With several copies, the mean of each: [copy, ...].
        """
        return self.start_mean(tensor)()

    def start_mean(self, tensor: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Start `mean(tensor)`, to out [copy, ...] or to new memory.

        All processes call both in the same order. The tensor must not change in between.

        Returns:
            A function that waits for the result and returns it.
        """
        transport = self._reduction(tensor, out)
        transport.post()

        def wait() -> Tensor:
            means = transport.wait()
            return means[0] if self.copies == 1 else means[:: self.hosted]

        return wait

    def average(self, tensor: Tensor) -> None:
        """tensor [worker, ...] ← its mean over all workers. Counted, unlike `mean`."""
        (means,) = self.receive(self.post([Mean(tensor)]))
        tensor.copy_(means)

    def merge(self, tensor: Tensor) -> None:
        """`average`, unless all workers have the same bits."""
        bits = tensor.view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
        if len(self.gather(bits.sum(1)).unique()) > 1:
            self.average(tensor)

    def gather(self, values: Tensor) -> Tensor:
        """values [worker, ...] of all n workers, in all processes. A measurement: not counted.

        With several copies: [copy · n, ...].
        """
        own = values.detach().cpu().numpy()
        own = own.reshape(self.copies, self.hosted, *own.shape[1:])
        parts = np.concatenate(self.processes.gather_arrays(own), axis=1)
        return torch.from_numpy(parts.reshape(self.copies * self.n_workers, *parts.shape[2:]))

    def post(self, messages: Sequence[Message]) -> list[Transport]:
        """Send messages and count them. `receive` returns the messages that arrive in exchange."""
        transports = [self._transport(message) for message in messages]
        with self.measure("communication"):
            for transport in transports:
                transport.post()
                self.counter.add(slice(None), transport.bits, transport.messages)
        self._in_flight = self._in_flight + transports
        return transports

    def receive(self, transports: Sequence[Transport]) -> list[Any]:
        """Wait for the messages that arrive in exchange for those posted, and return them."""
        with self.measure("communication"):
            received = [transport.wait() for transport in transports]
        for transport in transports:
            transport.busy = False
        self._in_flight = [transport for transport in self._in_flight if transport.busy]
        return received

    def _transport(self, message: Message) -> Transport:
        """The transport of a message, marked as busy. The tensor's memory, the kind of message and
        the edges determine it. While it is busy, another one takes its place."""
        if isinstance(message, Gather):  # of another length each time: nothing to reuse
            assert self.copies == 1, "Gather does not support copies > 1"
            if len(message.pieces) != self.hosted:
                raise ValueError(
                    f"Gather of {len(message.pieces)} pieces: use one for each of the "
                    f"{self.hosted} workers of the process"
                )
            transport: Transport = Gathering(self.connection, message.pieces)
        else:
            kind = type(message)
            if kind is Shared and (self._losses is not None or not self.shares):
                kind = ToAll
            own = self.edges[0 if kind is Mean else self.round % len(self.edges)]
            edges = (message.edges or own) if isinstance(message, ToEach) else own
            memory = message.memory if isinstance(message, ToEach) else None
            for spare in itertools.count():
                transport = self._transports.get(
                    message.tensor,
                    lambda tensor: self._make_transport(kind, tensor, edges, memory),
                    kind.__name__,
                    edges,
                    spare,
                )
                if not transport.busy:
                    break
        transport.busy = True
        return transport

    def _make_transport(
        self,
        kind: type[ToEach | ToAll | Mean],
        tensor: Tensor,
        edges: Edges,
        memory: Tensor | None,
    ) -> Transport:
        if kind is Mean:
            return self._reduction(tensor)
        return Delivery(self.connection, tensor, kind is ToEach, edges, memory, kind is Shared)

    def _reduction(self, tensor: Tensor, out: Tensor | None = None) -> Reduction:
        if tensor.shape[:1] != (self.rows,):
            raise ValueError(
                f"Mean of a tensor {tuple(tensor.shape)}: use one of shape ({self.rows}, ...)"
            )
        return Reduction(self.connection, tensor, out, self.copies)


def hosted_workers(n_workers: int, n_processes: int) -> int:
    """The number of workers that each process hosts. ValueError if they cannot be spread evenly."""
    checks.between("n_workers", n_workers, 1, MOST_WORKERS)
    if n_workers % n_processes:
        raise ValueError(
            f"n_workers={n_workers} cannot be spread over {n_processes} processes; "
            f"use a multiple of {n_processes}, or mpirun -np {n_workers}"
        )
    return n_workers // n_processes


class Exchange:
    """A conversation in progress. Its first messages are in flight once this object exists."""

    def __init__(self, network: Network, conversation: Conversation):
        if not isinstance(conversation, Generator):
            raise TypeError(
                f"a step returned {type(conversation).__name__}; use a generator, a function that "
                f"yields messages"
            )
        self._network = network
        self._conversation = conversation
        self._posted: list[Transport] | None = []  # None: the conversation has ended
        self._several = False  # whether the conversation yielded a tuple
        self._advance(None)

    def take_turns(self, turns: int) -> None:
        """Receive and send so many times, or until the conversation ends."""
        for _ in range(turns):
            if self._posted is not None:
                received = self._network.receive(self._posted)
                self._advance(tuple(received) if self._several else received[0])

    def finish(self) -> None:
        """Receive and send in turns until the conversation ends."""
        while self._posted is not None:
            self.take_turns(1)
        self._network.round += 1

    def _advance(self, received: Any) -> None:
        try:
            messages = self._conversation.send(received)
        except StopIteration:
            self._posted = None
            return
        self._several = isinstance(messages, tuple)
        for message in messages if self._several else (messages,):
            if not isinstance(message, Message):
                raise TypeError(
                    f"a step yielded {type(message).__name__}; use ToAll, ToEach, Mean or Gather, "
                    "or a tuple of them"
                )
        self._posted = self._network.post(messages if self._several else (messages,))
