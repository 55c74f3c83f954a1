"""Messages between workers that may be late, stop, or be lost."""

import atexit
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from powergossip import exits
from powergossip.errors import PeerLost
from powergossip.network.resilient.collectives import LiveProcesses
from powergossip.network.resilient.failure_detector import DATA, NOTE, WELCOME, Peers
from powergossip.network.resilient.heartbeats import Liveness, SignsOfLife, exchange_identities
from powergossip.network.resilient.messages import MPIWire, Payload, Wire, octets

LOST = 3  # exit code of a run that is complete without workers that were lost
_GRACE = 1.0  # seconds that a process has to end after the notice that it was dropped
_PARTING = 10.0  # seconds for which the first process waits for the others to end

Delivered = tuple[int, int, int, Tensor]  # i, j, k, payload: uint8


class Links:
    """Point-to-point messages between workers, each with the counter of its sender.

    No method blocks but `wait` and `finish`. Messages between two workers arrive in the order they
    were sent, and never twice. A process is lost with all of its workers, see
    powergossip.network.resilient.failure_detector. Without ULFM (powergossip.ulfm), the end of a
    process ends the job.

    Every method but `lost` raises Dropped if the others regard this process as lost.

    Attributes:
        process: Index of this process.
        homes: Index of the process that hosts each worker, lost workers included.
        workers: Indices of the workers that this process hosts, ascending.
        alive: Indices of the workers that are not lost.
        group: The surviving processes, for collective operations. These stay usable if further ones
            are lost. Messages between workers arrive meanwhile and wait for `poll`.
    """

    def __init__(
        self,
        communicator: Any,
        homes: Sequence[int],
        worker_timeout: float = 30.0,
    ):
        """All processes of the communicator call it.

        Args:
            communicator: Communicator of mpi4py, or InternetProcesses.
            homes: Rank of the process of each worker.
            worker_timeout: Seconds of silence after which a process counts as lost.
        """
        wire: Wire
        liveness: SignsOfLife
        if getattr(communicator, "transport", None) == "internet":
            from powergossip.network.internet.wire import InternetWire, identities_of

            identities = identities_of(communicator)
            wire = liveness = InternetWire(communicator, worker_timeout)
            away, name = wire.is_away, communicator.name
        else:
            identities, away, name = exchange_identities(communicator), False, ""
            wire = MPIWire(communicator)
            liveness = Liveness(communicator, wire.own, identities, worker_timeout)
        self._peers = Peers(wire, liveness, identities, worker_timeout, away)
        self.group = LiveProcesses(self._peers, name)
        self.process, self.homes = wire.own, dict(enumerate(homes))
        self.workers = sorted(w for w, home in self.homes.items() if home == self.process)
        self._reported: set[int] = set()
        self._local: list[Delivered] = []

    @property
    def alive(self) -> frozenset[int]:
        """Indices of the workers that are not lost."""
        return frozenset(w for w, home in self.homes.items() if home in self._peers.alive)

    @property
    def processes(self) -> frozenset[int]:
        """Indices of the processes that are not lost."""
        return frozenset(self._peers.alive)

    def send(self, i: int, j: int, k: int, payload: Payload) -> None:
        """Start to send message k of the hosted worker i to worker j. The payload is copied.

        Messages to lost workers are discarded.
        """
        home = self.homes[j]
        if home == self.process:
            self._local.append((i, j, k, octets(payload).clone()))
        else:
            self._peers.send(home, DATA, i, j, k, payload)

    def poll(self) -> list[Delivered]:
        """The messages to hosted workers that have arrived since the last call: (i, j, k, payload),
        in order of arrival. payload is uint8, and the caller's to keep and to change."""
        self._peers.advance()
        arrived, self._local = self._local, []
        for m in self._peers.take(DATA):
            if self.homes.get(m.i) == m.source and m.j in self.workers:
                arrived.append((m.i, m.j, m.k, m.payload))
            else:
                self.reject(m.source, f"a message from worker {m.i} to worker {m.j}")
        return arrived

    def reject(self, process: int, text: str) -> None:
        """Go on without a process that has sent a message which is wrong."""
        self._peers.reject(process, text)

    def wait(self, seconds: float) -> None:
        """Return when `poll` or `notes` has something, or workers were lost, or after that time."""
        since = time.monotonic()
        while True:
            self._peers.advance()
            if self._local or self._peers.has(DATA) or self._peers.has(NOTE) or self._unreported():
                return
            if time.monotonic() - since >= seconds:
                return
            self._peers.backoff(since)

    def _unreported(self) -> set[int]:
        return set(self.homes) - self.alive - self._reported

    def lost(self) -> set[int]:
        """Workers that were lost since the last call."""
        new = self._unreported()
        self._reported |= new
        return new

    def note(self, payload: Payload) -> None:
        """Start to send a note to all other processes, such as the progress of this one."""
        for process in self._peers.alive - {self.process}:
            self._peers.send(process, NOTE, payload=payload)

    def notes(self) -> list[tuple[int, Tensor]]:
        """The notes that had arrived at the last `poll`, `wait` or collective operation, since the
        last call: index of the process, payload."""
        return [(message.source, message.payload) for message in self._peers.take(NOTE)]

    # --- Processes that come back ---

    @property
    def is_away(self) -> bool:
        """True in a process that has come back, until it has entered the run."""
        return self._peers.is_away

    def returning(self) -> list[int]:
        """Processes that ask to be admitted."""
        return sorted(self._peers.wire.returning())

    def admit(self, processes: Sequence[int], welcome: Callable[[int], Any]) -> None:
        """These processes enter the run. All survivors call it after the same collective operation.

        Args:
            welcome: Function that returns the value that a process receives from this one.
        """
        peers, wire = self._peers, self._peers.wire
        for process in processes:
            peers.admit(process)
        self._reported &= set(self.homes) - self.alive
        survivors = sorted(peers.alive - set(processes))
        for process in processes:
            value = [self.group.calls, survivors, sorted(peers.alive), welcome(process)]
            peers.send(process, WELCOME, payload=wire.encoded(value))

    def enter(self) -> dict[int, Any]:
        """Wait until the others admit this process. Returns the `welcome` of each of them."""
        peers, wire, since = self._peers, self._peers.wire, time.monotonic()
        wire.ask()
        found: dict[int, Any] = {}
        calls, survivors, members = 0, {peers.own}, list[int]()
        while survivors - wire.lost - set(found):
            peers.advance()
            for message in peers.take(WELCOME):
                calls, others, members, value = wire.decoded(message.payload)
                survivors, found[message.source] = set(others), value
            if len(wire.lost) == len(peers.identities) - 1:
                raise PeerLost("the other machines have ended or are out of reach")
            peers.backoff(since)
        peers.begin(set(members))
        self.group.calls = calls
        return dict(sorted(found.items()))

    def flush(self, seconds: float) -> None:
        """Wait until all messages are sent, or so long."""
        since = time.monotonic()
        while self._peers.wire.pending and time.monotonic() - since < seconds:
            self._peers.wire.receive()  # which is discarded. Others may have ended: none is lost
            self._peers.backoff(since)

    def end_others(self) -> None:
        """End the processes of this host that were dropped and may be stopped.

        The launcher would wait for them. They have a second to read a notice and to end.
        """
        since = time.monotonic()
        others = [self._peers.identities[process] for process in self._peers.dropped()]
        while left := [identity for identity in others if identity.can_be_ended]:
            if time.monotonic() - since > _GRACE:
                for identity in left:
                    os.kill(identity.pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    @property
    def missing(self) -> list[int]:
        """The workers without a process at the last collective operation, in all processes."""
        members = set(self.group.members)
        return sorted(worker for worker, home in self.homes.items() if home not in members)

    def finish(self) -> None:
        """The last call: wait for the survivors. After a loss, Python then ends without
        MPI_Finalize, and with exit code LOST in the first process if workers are missing.

        After the loss of a process, Open MPI 5.0 may wait in MPI_Finalize forever. Exit handlers of
        Python that were registered before this call do not run.
        """
        self.group.barrier()
        self.flush(1.0)
        self._peers.wire.part()
        self.end_others()
        self.close()
        if len(self._peers.alive) < len(self._peers.identities):
            atexit.register(self._end, LOST if self.missing else 0)

    def close(self) -> None:
        """End the heartbeats of this process."""
        self._peers.liveness.close()

    def _end(self, code: int) -> NoReturn:
        """End this process, the first one as the last: mpirun may then discard others' output."""
        code = exits.exit_code(code, self.group.rank == 0)
        if code:
            since, own = time.monotonic(), self.process
            others = [self._peers.identities[process] for process in self._peers.alive - {own}]
            while any(of.can_be_ended for of in others) and time.monotonic() - since < _PARTING:
                time.sleep(0.01)
            time.sleep(0.5)
        exits.exit_at_once(code)

    def end_alone(self) -> None:
        """End only this process on an uncaught exception, see exits.end_alone."""
        exits.end_alone(self.process, self.group, self.end_others, self._others_live)

    def _others_live(self) -> bool:
        """True if others go on. The first process waits a while: all may end for one reason."""
        since, peers = time.monotonic(), self._peers
        while others := peers.alive - peers.wire.lost - {self.process}:
            if self.process > min(others) or time.monotonic() - since > _GRACE:
                break
            peers.wire.receive()
            time.sleep(0.01)
        return bool(others)
