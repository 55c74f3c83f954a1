"""The workers of this process among all, and conversations under way."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import checks
from powergossip.network.messages import Conversation, Gather, Mean, Message, ToEach
from powergossip.network.mpi import Processes, cuda_aware_mpi, processes
from powergossip.network.transports import (
    Delivery,
    Edges,
    Gathering,
    Reduction,
    Transport,
    all_reduce_cost,
)
from powergossip.topologies import Topology


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
    edges      # for each round, how its messages travel

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

        self.edges = [Edges(r, self.workers, copies) for r in topology.rounds]
        self.rounds = [
            Slots(
                torch.from_numpy(edges.neighbors).to(self.device),
                torch.from_numpy(edges.weights).float().to(self.device),
            )
            for edges in self.edges
        ]
        self._under_way: list[Transport] = []  # those not known to have arrived
        self._bits = np.zeros(self.rows, dtype=np.int64)
        self._messages = np.zeros(self.rows, dtype=np.int64)
        self._transports: weakref.WeakKeyDictionary[Message, dict[int, Transport]]
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
        sent, messages = all_reduce_cost(self.n_workers, bits)
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
        periods, more = divmod(steps, len(self.edges))
        degrees = sum(
            edges.out_degrees * (periods + (t < more)) for t, edges in enumerate(self.edges)
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
        transport = Reduction(self, tensor)
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

    def _transport(self, message: Message) -> Transport:
        if isinstance(message, Gather):  # of other lengths each time: there is nothing to keep
            return Gathering(self, message.pieces)
        of_rounds = self._transports.setdefault(message, {})
        index = 0 if isinstance(message, Mean) else self.round % len(self.rounds)
        if index not in of_rounds:
            kind = Reduction if isinstance(message, Mean) else Delivery
            of_rounds[index] = kind(self, message.tensor, isinstance(message, ToEach), index)
        return of_rounds[index]


def hosted_workers(n_workers: int, n_processes: int) -> int:
    """How many workers each process hosts. ValueError if they cannot be spread evenly."""
    checks.at_least_one("n_workers", n_workers)
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
        self._under_way: list[Transport] | None = []
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
