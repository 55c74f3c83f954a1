"""The other processes of a run that survives the loss of some: who is there, and who is silent."""

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from powergossip.errors import Dropped
from powergossip.network.wire import Envelope, Payload, Wire

# Kinds of messages. The first three are those of the layers above.
DATA, NOTE, GROUP, ALIVE, QUIET, LOST, DROPPED = range(7)

_PATIENCE = 10  # times worker_timeout, with a process in a `quiet` block
_BETWEEN_LOOKS = 1e-3  # seconds, at silence and signs of life
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3  # seconds


@dataclass(frozen=True)
class Identity:
    """A process as its host knows it. The time of its start tells it from a later one."""

    host: str
    pid: int
    start: str

    @classmethod
    def own(cls) -> "Identity":
        return cls(socket.gethostname(), os.getpid(), _start(os.getpid()))

    @property
    def can_be_ended(self) -> bool:
        """Whether it runs, or is stopped, on this host."""
        return self.host == socket.gethostname() and self.start == _start(self.pid) != ""


def _start(pid: int) -> str:
    """The time at which a process of this host started, or "" (Linux only)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Peers:
    """Messages between processes, some of which may end or stop.

    own             # index of this process
    alive           # set of indices, own included
    identities      # index → Identity, for all processes that ever were
    worker_timeout  # seconds of silence after which a process counts as lost

    A process is lost if MPI reports its end (ULFM), if it is silent for `worker_timeout`, or if
    another process regards it as lost for its silence. The time in which this process itself does
    not call `advance` counts as a quarter of the timeout at most, so that a process that was
    stopped does not regard the others as silent. Where nothing else is to be sent, `advance` sends
    signs of life, ten within the timeout; it must therefore be called more often than once in
    `worker_timeout` outside of `quiet`.

    A process that was regarded as lost but lives, such as one that was stopped, receives a notice.
    `advance` then raises Dropped.
    """

    def __init__(
        self,
        wire: Wire,
        identities: Mapping[int, Identity],
        worker_timeout: float,
        alive: Iterable[int],
    ):
        self.wire, self.own = wire, wire.own
        self.identities = dict(identities)
        self.worker_timeout = worker_timeout
        self.alive = set(alive)
        now = time.monotonic()
        self._advanced = now
        self._silence = dict.fromkeys(identities, 0.0)  # seconds, by process
        self._sent = dict.fromkeys(identities, now)  # time of the last message to it
        self._quiet_peers: set[int] = set()
        self._quiet = 0  # depth of quiet blocks
        self._arrived: dict[int, list[Envelope]] = {DATA: [], NOTE: [], GROUP: []}

    def add(self, communicator: Any, ranks: Mapping[int, int], new: Mapping[int, Identity]) -> None:
        """Add processes that have joined, and can be reached by this communicator only."""
        self.wire.add(communicator, ranks)
        now = time.monotonic()
        for process, identity in new.items():
            self.identities[process] = identity
            self.alive.add(process)
            self._silence[process], self._sent[process] = 0.0, now

    def send(
        self, process: int, kind: int, i: int = 0, j: int = 0, k: int = 0, payload: Payload = b""
    ) -> None:
        """Start to send a message. Does not block. Messages to lost processes are discarded."""
        if time.monotonic() - self._advanced > min(1.0, self.worker_timeout / 4):
            self.advance()  # a process that was stopped reads first whether it was dropped
        self._sent[process] = time.monotonic()
        self.wire.send(process, kind, i, j, k, payload)

    def take(self, kind: int) -> list[Envelope]:
        """The messages of a kind, not from lost processes, that came since the last call."""
        taken, self._arrived[kind] = self._arrived[kind], []
        return [message for message in taken if message.source in self.alive]

    def has(self, kind: int) -> bool:
        """Whether `take` would return messages."""
        return bool(self._arrived[kind])

    def advance(self) -> None:
        """Advance all messages and notice lost processes. Does not block.

        Raises Dropped if the other processes regard this one as lost.
        """
        now = time.monotonic()
        elapsed = now - self._advanced
        looks = elapsed >= _BETWEEN_LOOKS
        if looks:
            elapsed, self._advanced = min(elapsed, self.worker_timeout / 4), now
            if not self._quiet:
                for process in self._silence:
                    self._silence[process] += elapsed
        for message in self.wire.receive():
            self._silence[message.source] = 0.0
            self._read(message)
        self.alive -= self.wire.lost
        if not looks:
            return
        for process in sorted(self.alive - {self.own}):
            patience = _PATIENCE if process in self._quiet_peers else 1
            if self._silence[process] > patience * self.worker_timeout:
                self.drop(process)
            elif not self._quiet and now - self._sent[process] > self.worker_timeout / 10:
                self.send(process, ALIVE)

    def _read(self, message: Envelope) -> None:
        if message.kind in self._arrived:
            self._arrived[message.kind].append(message)
        elif message.kind == QUIET:
            change = self._quiet_peers.add if message.i else self._quiet_peers.discard
            change(message.source)
        elif message.kind == LOST:
            if message.i in self.alive and message.i != self.own:
                self._forget(message.i)
        elif message.kind == DROPPED:
            raise Dropped(
                f"the other processes regard process {self.own} as lost, which was silent for more "
                f"than worker_timeout={self.worker_timeout:g} seconds, and go on without it"
            )

    def drop(self, process: int) -> None:
        """Regard a process as lost. The others do so as well, and it ends if it lives."""
        if process not in self.alive or process == self.own:
            return
        self._forget(process)
        for other in self.alive - {self.own}:
            self.send(other, LOST, i=process)

    def _forget(self, process: int) -> None:
        self.wire.send(process, DROPPED)
        self.wire.forget(process)
        self.alive.discard(process)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A block, such as an evaluation, in which this process may not call `advance` for long.

        It regards none as silent meanwhile, and the others wait ten times longer for it.
        """
        self.advance()
        self._announce_quiet(True)
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
            self._announce_quiet(False)
            self._silence = dict.fromkeys(self._silence, 0.0)

    def _announce_quiet(self, begins: bool) -> None:
        if not self._quiet:
            for process in self.alive - {self.own}:
                self.wire.send(process, QUIET, i=int(begins))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block that calls `advance` often, also inside `quiet`: silence of others counts."""
        quiet, self._quiet = self._quiet, 0
        try:
            yield
        finally:
            self._quiet = quiet

    def nap(self, since: float) -> None:
        """Sleep, the longer the more time has passed since a time: others need the core."""
        waited = time.monotonic() - since
        time.sleep(min(max(waited / 8, _SHORTEST_NAP), _LONGEST_NAP))

    def dropped(self) -> set[int]:
        """Lost processes that MPI does not report as ended: they may be stopped, and live."""
        return set(self.identities) - self.alive - self.wire.ended


def exchange_identities(communicator: Any) -> dict[int, Identity]:
    """The identities of all processes of a communicator, by rank. All of them call it."""
    return dict(enumerate(communicator.allgather(Identity.own())))


def encoded(processes: set[int]) -> np.ndarray:
    """A set of processes as a payload."""
    return np.array(sorted(processes), dtype=np.int32)


def decoded(payload: Any) -> set[int]:
    """The set of processes of a payload."""
    return {int(process) for process in payload.numpy().view(np.int32)}
