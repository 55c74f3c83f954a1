"""Collective operations of the processes that survive."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from torch import Tensor

from powergossip.errors import Dropped
from powergossip.network import standstill
from powergossip.network.processes import Processes
from powergossip.network.resilient.failure_detector import GROUP, Peers
from powergossip.network.resilient.messages import Payload, decoded, encoded, octets

T = TypeVar("T")

VALUE, HAVE, IMPOSE = range(3)  # phases of a gathering
Outgoing = list[tuple[int, int, Payload]]  # destination, phase, payload


class Consensus:
    """An all-gather with the same result in all processes that survive it.

    1. Each process sends its value to all and waits for the values of all.
    2. Each sends the set of processes whose value it has, and waits for the sets of these. Its
       estimate is their intersection: values that all survivors have.
    3. In the order of their indices, each waits for the estimates of all lower ones, takes over the
       estimate of the highest of them, and sends it to all higher ones. It does not wait if all
       members of its set have sent the same set: every estimate is then this set.

    Nobody waits for a process that has ended. The lowest process that does not end thus determines
    the estimate of all: hierarchical consensus with a perfect failure detector.

    The object sends nothing itself: `advance` returns messages.

    References:
        Cachin, Guerraoui & Rodrigues (2011), Introduction to Reliable and Secure Distributed
        Programming, algorithm 5.2.
    """

    def __init__(self, own: int, value: Payload):
        self._own = own
        self._phase = VALUE
        self._started = False
        self._values: dict[int, Tensor] = {own: octets(value)}
        self._have: dict[int, set[int]] = {}
        self._imposed: dict[int, set[int]] = {}
        self.members: set[int] | None = None  # the processes of the result

    def receive(self, source: int, phase: int, payload: Tensor) -> None:
        """Take in a message of another process."""
        if phase == VALUE:
            self._values[source] = payload
        else:
            (self._have if phase == HAVE else self._imposed)[source] = decoded(payload)

    def advance(self, alive: Iterable[int]) -> Outgoing:
        """Messages to be sent, given the processes that live, this one included."""
        alive = set(alive)
        others = alive - {self._own}
        out: Outgoing = []
        if not self._started:
            self._started = True
            out += [(other, VALUE, self._values[self._own]) for other in sorted(others)]
        if self._phase == VALUE and alive <= set(self._values):
            self._phase = HAVE
            self._have[self._own] = set(self._values)
            out += [(other, HAVE, encoded(self._have[self._own])) for other in sorted(others)]
        if self._phase == HAVE and alive <= set(self._have):
            self._phase = IMPOSE
        if self._phase == IMPOSE and self.members is None:
            own = self._have[self._own]
            sets = [self._have[process] for process in own if process in self._have]
            lower = {other for other in others if other < self._own}
            if len(sets) == len(own) and all(have == own for have in sets):
                self.members = own
            elif lower <= set(self._imposed):
                given = [p for p in self._imposed if p < self._own and p in own]
                estimate = set.intersection(*sets)
                self.members = self._imposed[max(given)] if given else estimate
            if self.members is not None:
                out += [(p, IMPOSE, encoded(self.members)) for p in sorted(others) if p > self._own]
        return out

    def result(self) -> dict[int, Tensor]:
        """The values by process, in ascending order."""
        assert self.members is not None
        return {process: self._values[process] for process in sorted(self.members)}


class LiveProcesses(Processes):
    """The surviving processes, with the collective operations of `Processes`.

    All survivors make the same calls in the same order. A process that is lost during a call is
    left out of the result, the same in all survivors. rank, size and members are as after the last
    call. `broadcast` returns the value of the lowest survivor: all of them pass one.

    Attributes:
        members: Indices of the processes, ascending. `rank` is the position of this process in it.
        calls: Number of gatherings so far, equal in all processes.
    """

    can_be_lost = True

    def __init__(self, peers: Peers, name: str = ""):
        super().__init__()
        self._peers, self.name = peers, name
        self.transport, self.has_own_files = peers.wire.transport, peers.wire.has_own_files
        self.calls = 0
        self._early: dict[int, list[tuple[int, int, Tensor]]] = {}  # by gathering
        self._set_members(set(peers.identities))

    @property
    def index(self) -> int:
        return self._peers.own

    @property
    def is_first(self) -> bool:
        return self.writes  # each reports to the owner of its machine

    def _set_members(self, members: set[int]) -> None:
        own = self._peers.own
        self.members = sorted(members)
        self.rank, self.size = self.members.index(own), len(self.members)
        identities = self._peers.identities
        host = identities[own].host
        here = [process for process in self.members if identities[process].host == host]
        self.local_rank, self.local_size = here.index(own), len(here)

    def collect(self, value: Payload) -> dict[int, Tensor]:
        """The bytes of all survivors by process, ascending. Waits for all that live.

        A process that has come back has its own alone, until the others admit it.
        """
        peers, call = self._peers, self.calls
        if peers.is_away:
            return {peers.own: octets(value)}
        self.calls += 1
        gathering = Consensus(peers.own, value)
        since = time.monotonic()
        with standstill.waiting(peers.own, peers.alive):
            while gathering.members is None:
                peers.advance()
                for message in peers.take(GROUP):
                    if message.k >= call:
                        self._early.setdefault(message.k, []).append(
                            (message.source, message.i, message.payload)
                        )
                for early in self._early.pop(call, ()):
                    gathering.receive(*early)
                for destination, phase, payload in gathering.advance(peers.alive):
                    peers.send(destination, GROUP, i=phase, k=call, payload=payload)
                if gathering.members is None:
                    peers.backoff(since)
        if peers.own not in gathering.members:
            raise Dropped(f"the other processes regard process {peers.own} as lost")
        self._set_members(gathering.members)
        return gathering.result()

    def check_present(self) -> None:
        self._peers.advance()

    def finalize(self) -> None:
        self._peers.liveness.close()

    def barrier(self) -> None:
        """Wait for all survivors."""
        self.collect(b"")

    def gather(self, value: T) -> list[T]:
        wire = self._peers.wire
        return [wire.decoded(found) for found in self.collect(wire.encoded(value)).values()]

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        found = self.collect(np.ascontiguousarray(array)).values()
        return np.stack([part.numpy().view(array.dtype).reshape(array.shape) for part in found])

    def broadcast_array(self, array: np.ndarray) -> None:
        array[...] = self.gather_arrays(array)[0]

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(self.gather_arrays(values).max(0))
