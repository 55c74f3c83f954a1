"""Evidence that other processes of a run live, whatever their main threads do.

A process that computes, loads data, or waits for a core lives. One that is stopped does not.
Processes of the same host see this in /proc. Processes of other hosts receive heartbeats, which a
thread sends.
"""

import atexit
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from typing import Any, Protocol

from powergossip.network.resilient.messages import MPIWire, decoded, encoded

_BEATS = 10  # heartbeats within worker_timeout


@dataclass(frozen=True)
class Identity:
    """A process as its host knows it. The time of its start tells it from a later one.

    Attributes:
        namespace: Namespace of the pid, and the start of its host, for containers of a host and
            hosts of one name. "" where there is no /proc.
    """

    host: str
    pid: int
    start: str
    namespace: str = ""

    @classmethod
    def own(cls) -> "Identity":
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            namespace = ""
        return cls(socket.gethostname(), os.getpid(), _stat(os.getpid())[1], namespace)

    def sees(self, other: "Identity") -> bool:
        """True if this process has the other one in its /proc, as long as that exists."""
        return (self.host, self.namespace) == (other.host, other.namespace) and self.namespace != ""

    @property
    def state(self) -> str:
        """The state of a process of this host, such as R, S or T, and "" if it has ended."""
        state, start = _stat(self.pid)
        return state if start == self.start else ""

    @property
    def can_be_ended(self) -> bool:
        """True if it runs, or is stopped, on the host of this process."""
        return Identity.own().sees(self) and self.state not in _ENDED

    @property
    def runs(self) -> bool:
        """True if a process of this host neither has ended nor is stopped."""
        return self.state not in _ENDED | _STOPPED


_ENDED, _STOPPED = frozenset({"", "Z", "X"}), frozenset({"T", "t"})


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process of this host and the time of its start, or "" (Linux only)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]


class SignsOfLife(Protocol):
    """Signs that the other processes live."""

    def lives(self, process: int) -> bool:
        """True if a process has shown since the last call that it runs."""

    def sees(self, process: int) -> bool:
        """True if this process sees the other one in /proc."""

    def remove(self, process: int) -> None:
        """A process is lost."""

    def close(self) -> None:
        """End the work in the background."""


class Liveness:
    """Signs of life of the other processes of a communicator. All of them construct it.

    If some do not see each other in /proc, each tells those that it does not see which processes it
    knows to run: itself and those that it sees. A thread does so ten times within `worker_timeout`.
    It needs MPI_THREAD_MULTIPLE, mpi4py's default. Without it, and before the first heartbeat that
    names it, a process that is not seen counts as one that lives.

    Args:
        identities: Identity of each process, by rank.
    """

    def __init__(
        self,
        communicator: Any,
        own: int,
        identities: Mapping[int, Identity],
        worker_timeout: float,
    ):
        from mpi4py import MPI

        self._own, self._identities = own, dict(identities)
        seen = {p: of for p, of in self._identities.items() if identities[own].sees(of)}
        self._seen = {process for process, of in seen.items() if of.state}
        self._heard: dict[int, int] = {}  # process → heartbeats that named it
        self._counted: dict[int, int] = {}  # the same, at the last call of `lives`
        self._lost: set[int] = set()
        self._interval = worker_timeout / _BEATS
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        first = next(iter(self._identities.values()))
        everywhere = all(first.sees(of) for of in self._identities.values())
        if everywhere or isinf(worker_timeout) or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return
        self._wire = MPIWire(communicator)
        self._thread.start()
        atexit.register(self.close)  # before MPI_Finalize

    def _beat(self) -> None:
        unseen = set(self._identities) - self._seen - {self._own}
        while not self._end.wait(self._interval):
            running = {p for p in self._seen if self._identities[p].runs} | {self._own}
            for process in unseen - self._lost:
                self._wire.send(process, 0, payload=encoded(running))
            for message in self._wire.receive():
                for process in decoded(message.payload):
                    self._heard[process] = self._heard.get(process, 0) + 1

    def lives(self, process: int) -> bool:
        """True if a process runs, or if a heartbeat has named it since the last call."""
        if self.sees(process):
            return self._identities[process].runs
        heard, before = self._heard.get(process, 0), self._counted.get(process, 0)
        self._counted[process] = heard
        return heard == 0 or heard != before

    def sees(self, process: int) -> bool:
        """True if this process sees the other one in /proc."""
        return process in self._seen

    def remove(self, process: int) -> None:
        """Send no further heartbeats to a process."""
        self._lost.add(process)

    def close(self) -> None:
        """End the heartbeats."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
            atexit.unregister(self.close)


def exchange_identities(communicator: Any) -> dict[int, Identity]:
    """The identities of all processes of a communicator, by rank. All of them call it."""
    return dict(enumerate(communicator.allgather(Identity.own())))
