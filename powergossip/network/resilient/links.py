"""Messages between workers that may be late, stop, or be lost."""

import atexit
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from powergossip import exits
from powergossip.network.processes import LONGEST
from powergossip.network.resilient import spawning
from powergossip.network.resilient.collectives import LiveProcesses
from powergossip.network.resilient.failure_detector import DATA, NOTE, Peers
from powergossip.network.resilient.heartbeats import Liveness, exchange_identities
from powergossip.network.resilient.messages import Payload, Wire, octets

LOST = 3  # exit code of a run that is complete without workers that were lost
_GRACE = 1.0  # seconds that a process has to end after the notice that it was dropped
_PARTING = 10.0  # seconds for which the first process waits for the others to end

Delivered = tuple[int, int, int, Tensor]  # i, j, k, payload: uint8


class Links:
    """Point-to-point messages between workers, each with the counter of its sender.

    No method blocks but `wait`, `survivors` and `finish`. Messages between two workers arrive in
    the order in which they were sent, and never twice. A process is lost with all of its workers,
    see powergossip.network.resilient.failure_detector. Without ULFM
    (powergossip.network.resilient.ulfm), the end of a process ends the job.

    Every method but `lost` raises Dropped if the others regard this process as lost.

    Attributes:
        process: Index of this process.
        homes: Index of the process that hosts each worker, lost workers included.
        workers: Indices of the workers that this process hosts, ascending.
        alive: Indices of the workers that are not lost.
    """

    _assignment: spawning.Assignment | None = None

    def __init__(
        self,
        communicator: Any,
        homes: Sequence[int],
        worker_timeout: float = 30.0,
        longest: int = LONGEST,
    ):
        """All processes of the communicator (mpi4py) call it.

        Args:
            homes: Rank of the process of each worker.
            longest: Largest number of bytes of one MPI message. Longer messages are sent in
                several.
            worker_timeout: Seconds of silence after which a process counts as lost.
        """
        identities = exchange_identities(communicator)
        ranks = {rank: rank for rank in identities}
        own = communicator.rank
        wire = Wire(communicator, own, ranks, longest)
        liveness = Liveness(communicator, own, ranks, identities, worker_timeout)
        peers = Peers(wire, liveness, identities, worker_timeout, identities)
        self._survivors = LiveProcesses(peers)
        self._set(peers, dict(enumerate(homes)), communicator, ranks)

    def _set(
        self,
        peers: Peers,
        homes: Mapping[int, int],
        communicator: Any,
        ranks: Mapping[int, int],
    ) -> None:
        self._peers, self.homes = peers, dict(homes)
        self._communicator, self._ranks = communicator, ranks
        self.process = peers.own
        self.workers = sorted(w for w, home in self.homes.items() if home == self.process)
        self._spawned: spawning.SpawnedProcesses | None = None
        self._reported = set(self.homes) - self.alive
        self._local: list[Delivered] = []

    @property
    def alive(self) -> frozenset[int]:
        """Indices of the workers that are not lost."""
        return frozenset(w for w, home in self.homes.items() if home in self._peers.alive)

    @property
    def n_ever(self) -> int:
        """One more than the largest index of a process that ever was."""
        return max(self._peers.identities) + 1

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
        return arrived + [(m.i, m.j, m.k, m.payload) for m in self._peers.take(DATA)]

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

    @property
    def group(self) -> LiveProcesses:
        """The surviving processes, for collective operations. Does not wait for them."""
        return self._survivors

    def survivors(self) -> LiveProcesses:
        """The surviving processes, agreed by all of them, which call it at the same point.

        Waits for all of them. Their collective operations stay usable if further ones are lost.
        Messages between workers arrive meanwhile and wait for `poll`.
        """
        self._survivors.barrier()
        return self._survivors

    def spawn(self, command: Sequence[str], run: Any, patience: float = 60) -> list[int]:
        """Start a process for each lost one, to host its workers. All survivors call it.

        The survivors wait for about a second, and go on while the program loads. Once
        `spawned_are_ready`, `accept` lets them join. If another process ends meanwhile, MPI may end
        or hang. A hang ends the run after `patience`. `move` has no such risk.

        Args:
            command: A Python program and its arguments, which calls `Links.join`.
            run: Value that the program receives.
            patience: Seconds that the start may take.

        Returns:
            Indices of the lost processes. None where none is lost, or the processes could not be
            started.
        """
        from mpi4py import MPI

        assert self._spawned is None
        peers = self._peers
        self._survivors.barrier()
        self.end_others()
        lost = sorted(set(self.homes.values()) - set(self._survivors.members))
        if not lost or any(self._survivors.gather(self._beyond_reach())):
            return []

        def assign(own: int, replaced: int) -> spawning.Assignment:
            alive = {process: peers.identities[process] for process in self._survivors.members}
            timeout, threads = peers.worker_timeout, torch.get_num_threads()
            return spawning.Assignment(own, replaced, self.homes, alive, timeout, threads, run)

        own, spawned = max(peers.identities) + 1, None
        with spawning.limited(patience):
            with suppress(MPI.Exception):
                spawned = spawning.spawn(self._communicator, command, own, lost, assign)
            if all(self._survivors.gather(spawned is not None)):
                self._spawned = spawned
        return [] if self._spawned is None else lost

    @property
    def spawned_are_ready(self) -> bool:
        """Whether each of the spawned processes is ready to join, or has ended."""
        return self._spawned is not None and self._spawned.poll()

    @property
    def has_spawned(self) -> bool:
        """Whether processes were spawned that have not joined yet."""
        return self._spawned is not None

    def accept(self, patience: float = 60) -> list[int]:
        """Let the spawned processes join, if they are ready. All survivors call it.

        Their workers are alive again, and all processes can send to them. Takes some milliseconds.
        The risk is that of `spawn`.

        Returns:
            The workers that the new processes host.
        """
        assert self._spawned is not None
        spawned, peers = self._spawned, self._peers
        spawned.poll()
        found = self._survivors.gather((spawned.ready, spawned.ended))
        ended = set.union(*(of_process for _, of_process in found))
        ready = set.intersection(*(of_process for of_process, _ in found)) - ended
        if len(ready | ended) < len(spawned.own):
            return []
        spawned.ready = ready
        self._spawned = None
        if not ready:
            return []
        with spawning.limited(patience):
            together, ranks, new = spawning.accept(spawned, self._communicator, self._ranks)
            replacing = {spawned.replaced[rank]: spawned.own[rank] for rank in ready}
            homes = {
                worker: replacing[home] if replacing.get(home) in new else home
                for worker, home in self.homes.items()
            }
            identities = {**peers.identities, **new}
            calls = self._survivors.calls
            together.bcast(spawning.MembershipView(ranks, identities, homes, calls), root=0)
            peers.add(together, ranks, new)
        self._communicator, self._ranks, self.homes = together, ranks, homes
        joined = [worker for worker, home in homes.items() if home in new]
        self._reported -= set(joined)
        self._survivors.barrier()
        return joined

    def move(self, workers: Iterable[int], process: int) -> None:
        """Let a process that lives host these workers: a spare one, or one that hosts others.

        All processes call it at the same point. Workers that were lost are alive again.
        """
        self._survivors.barrier()
        self.homes |= dict.fromkeys(workers, process)
        self.workers = sorted(w for w, home in self.homes.items() if home == self.process)
        self._reported -= set(workers)

    @classmethod
    def join(cls, assignment: spawning.Assignment) -> "Links":
        """The links of a spawned process. Nothing can be sent before `enter`."""
        links, homes = cls.__new__(cls), assignment.homes
        links.process, links.homes = assignment.own, dict(homes)
        links.workers = sorted(w for w, home in homes.items() if home == assignment.replaced)
        links._assignment = assignment
        survivors = links._survivors = LiveProcesses()
        hosted = len(links.workers)
        survivors.rank, survivors.size = links.workers[0] // hosted, len(homes) // hosted
        host = socket.gethostname()
        lower = {homes[worker] for worker in range(links.workers[0])}
        alive = [p for p, identity in assignment.survivors.items() if identity.host == host]
        survivors.local_rank = len(lower & set(alive))
        return links

    def enter(self, patience: float = 60) -> None:
        """Wait until the survivors accept this process, and join them.

        The process ends if the run is over.
        """
        assert self._assignment is not None
        timeout, survivors = self._assignment.worker_timeout, self._assignment.survivors
        together, view = spawning.join(survivors.values(), patience)
        wire = Wire(together, self.process, view.ranks)
        liveness = Liveness(together, self.process, view.ranks, view.identities, timeout)
        peers = Peers(wire, liveness, view.identities, timeout, view.ranks)
        self._survivors.join(peers, view.calls)
        self._set(peers, view.homes, together, view.ranks)
        self._survivors.barrier()

    def flush(self, seconds: float) -> None:
        """Wait until all messages are sent, or so long."""
        since = time.monotonic()
        while self._peers.wire.pending and time.monotonic() - since < seconds:
            self._peers.wire.receive()  # which is discarded. Others may have ended: none is lost
            self._peers.backoff(since)

    def end_others(self) -> None:
        """End the processes of this host that are no part of the run: those that were dropped and
        may be stopped, and those that were spawned and did not join.

        The launcher would wait for them. They have a second to read a notice and to end.
        """
        if self._survivors.waits:
            return
        since = time.monotonic()
        others = [self._peers.identities[process] for process in self._peers.dropped()]
        if self._spawned is not None:
            others += self._spawned.identities.values()
        while left := [identity for identity in others if identity.can_be_ended]:
            if time.monotonic() - since > _GRACE:
                for identity in left:
                    os.kill(identity.pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    def _beyond_reach(self) -> bool:
        """Whether a dropped process may live on a host without a survivor. MPI would wait for it
        where all processes of a communicator take part."""
        identities, peers = self._peers.identities, self._peers
        hosts = {identities[process].host for process in peers.alive}
        return any(identities[process].host not in hosts for process in peers.dropped())

    @property
    def missing(self) -> list[int]:
        """The workers without a process at the last collective operation, in all processes."""
        members = set(self._survivors.members)
        return sorted(worker for worker, home in self.homes.items() if home not in members)

    def finish(self) -> None:
        """The last call: wait for the survivors. After a loss, Python then ends without
        MPI_Finalize, and with exit code LOST in the first process if workers are missing.

        After the loss of a process, Open MPI 5.0 may wait in MPI_Finalize forever. Exit handlers of
        Python that were registered before this call are left out.
        """
        self._survivors.barrier()
        self.flush(1.0)
        self.end_others()
        self.close()
        if len(self._peers.alive) < len(self._peers.identities):
            atexit.register(self._end, LOST if self.missing else 0)

    def close(self) -> None:
        """End the heartbeats of this process."""
        if not self._survivors.waits:
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
        """Whether others go on. The first process waits a while: all may end for one reason."""
        if self._survivors.waits:
            return True
        since, peers = time.monotonic(), self._peers
        while others := peers.alive - peers.wire.lost - {self.process}:
            if self.process > min(others) or time.monotonic() - since > _GRACE:
                break
            peers.wire.receive()
            time.sleep(0.01)
        return bool(others)
