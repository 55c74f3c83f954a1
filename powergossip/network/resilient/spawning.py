"""Replacement of lost processes by new ones of the same job.

Order of the calls::

    survivors                                  new processes
    `spawn`, which takes about a second        bootstrap.py
    training goes on                           the program loads, and makes its models
    `SpawnedProcesses.poll`                    `join`: announcement
    `accept`: some milliseconds                `join`: connection
"""

import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powergossip.network.resilient import bootstrap
from powergossip.network.resilient.heartbeats import Identity
from powergossip.network.resilient.messages import check_loss

_READY, _COME = 2, 3  # tags
_POLL_INTERVAL = 0.01  # seconds


@dataclass(frozen=True)
class Assignment:
    """The message to a new process at its start.

    Attributes:
        own: Index of the new process.
        replaced: Index of the lost process whose workers it hosts.
        homes: Process of each worker, with the lost one.
        survivors: Identity of each survivor at that time, by process.
        threads: Number of torch's threads.
        run: Value of the layers above.
    """

    own: int
    replaced: int
    homes: Mapping[int, int]
    survivors: Mapping[int, Identity]
    worker_timeout: float
    threads: int
    run: Any


@dataclass(frozen=True)
class MembershipView:
    """The state that a new process receives when it joins, equal in all processes.

    Attributes:
        ranks: Rank of each process in the new communicator: survivors, then new processes.
        identities: Identities of all processes that ever were.
        homes: Process of each worker.
        calls: Number of collective operations of the survivors so far.
    """

    ranks: Mapping[int, int]
    identities: Mapping[int, Identity]
    homes: Mapping[int, int]
    calls: int


@dataclass
class SpawnedProcesses:
    """New processes that have been started, as a survivor knows them.

    Attributes:
        communicator: Communicator of the survivors at that time and of the new processes, whose
            ranks are the last.
        replaced: Index of the lost process, by rank.
        own: Index of each process, by rank.
        identities: Identity of each process, by rank.
        ready: Ranks of the processes that wait to be accepted.
        ended: Ranks of the processes that have ended.
    """

    communicator: Any
    replaced: Mapping[int, int]
    own: Mapping[int, int]
    identities: Mapping[int, Identity]
    ready: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def poll(self) -> bool:
        """Whether each of them is ready or has ended. Does not block."""
        from mpi4py import MPI

        for rank in self.own:
            if rank in self.ready or rank in self.ended:
                continue
            try:
                if self.communicator.Iprobe(rank, _READY):
                    self.ready.add(rank)
            except MPI.Exception as error:
                check_loss(error)
                self.ended.add(rank)
        return len(self.ready) + len(self.ended) == len(self.own)

    def call(self) -> None:
        """Let those that are ready continue in `join`."""
        from mpi4py import MPI

        for rank in self.ready:
            try:
                _kept.append(self.communicator.Isend([b"", MPI.BYTE], rank, _COME))
            except MPI.Exception as error:
                check_loss(error)


_kept: list[Any] = []  # requests of messages to processes that may end


def program(setting: str = "a replacement") -> list[str]:
    """The arguments of Python that start this program again.

    Raises ValueError, with the key and value that need it, unless it is a file or a module.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return ["-m", name, *sys.argv[1:]]
    path = Path(sys.argv[0] or "-")
    if not path.is_file():
        raise ValueError(f"{setting}: start the run from a file, which a new process can run, too")
    return [str(path.absolute()), *sys.argv[1:]]


def spawn(
    communicator: Any, command: Sequence[str], own: int, replaced: Sequence[int], assign: Any
) -> SpawnedProcesses:
    """Start a process for each lost one. The survivors of the communicator call it.

    The slot of a lost process is not free for mpirun, which therefore may start more processes than
    it has slots.

    Args:
        command: A Python program and its arguments.
        own: Index of the first new process.
        assign: Function of (own, replaced) that returns an Assignment.

    Raises:
        MPI.Exception: If MPI cannot start the processes.
    """
    from mpi4py import MPI

    shrunk = communicator.Shrink()
    shrunk.Set_errhandler(MPI.ERRORS_RETURN)
    arguments = [bootstrap.__file__, *command]
    info = MPI.Info.Create({"PMIX_MAPBY": "SLOT:OVERSUBSCRIBE"})
    between = shrunk.Spawn(sys.executable, arguments, maxprocs=len(replaced), info=info)
    merged = between.Merge(high=False)
    merged.Set_errhandler(MPI.ERRORS_RETURN)
    assignments = [pickle.dumps(assign(own + k, lost)) for k, lost in enumerate(replaced)]
    merged.bcast(assignments, root=0)
    first = merged.size - len(replaced)
    identities = bootstrap.handshake(merged, first)
    return SpawnedProcesses(
        merged,
        {first + k: lost for k, lost in enumerate(replaced)},
        {first + k: own + k for k in range(len(replaced))},
        {rank: Identity(*of_rank) for rank, of_rank in identities.items()},
    )


def accept(
    spawned: SpawnedProcesses, communicator: Any, ranks: Mapping[int, int]
) -> tuple[Any, dict[int, int], dict[int, Identity]]:
    """Connect with the spawned processes that are ready. All survivors call it.

    Args:
        ranks: Rank of each process in the communicator.

    Returns:
        A communicator of them and the survivors, process → rank in it, and the identities of the
        new processes.

    Raises:
        MPI.Exception: If MPI cannot connect the processes.
    """
    from mpi4py import MPI

    spawned.call()
    together = spawned.communicator.Shrink()
    together.Set_errhandler(MPI.ERRORS_RETURN)

    def found(of: Any, places: Mapping[int, int]) -> dict[int, int]:
        there = MPI.Group.Translate_ranks(of.Get_group(), None, together.Get_group())
        present = {process: there[rank] for process, rank in places.items()}
        return {process: rank for process, rank in present.items() if rank != MPI.UNDEFINED}

    new = found(spawned.communicator, {spawned.own[rank]: rank for rank in spawned.ready})
    of_rank = {spawned.own[rank]: spawned.identities[rank] for rank in spawned.ready}
    everybody = {**found(communicator, ranks), **new}
    return together, everybody, {process: of_rank[process] for process in new}


def is_spawned() -> bool:
    """Whether `spawn` has started this process, which has not taken its assignment yet."""
    return bootstrap.ASSIGNMENT in os.environ


def assignment() -> Assignment | None:
    """The assignment of a process that `spawn` has started. None: it is one of the start."""
    text = os.environ.pop(bootstrap.ASSIGNMENT, None)
    return None if text is None else pickle.loads(bytes.fromhex(text))


def join(survivors: Iterable[Identity], patience: float) -> tuple[Any, MembershipView]:
    """Announce that this new process is ready, and wait to be accepted.

    Returns the communicator of `accept` and the membership view. The process ends if the run is
    over: MPI does not report survivors that ended without an error.
    """
    from mpi4py import MPI

    merged = MPI.Comm.f2py(int(os.environ[bootstrap.COMMUNICATOR]))
    here = [identity for identity in survivors if identity.host == socket.gethostname()]
    ranks = set(range(merged.size - MPI.COMM_WORLD.size))
    for rank in ranks:
        try:
            _kept.append(merged.Isend([b"", MPI.BYTE], rank, _READY))
        except MPI.Exception as error:
            check_loss(error)
    called = False
    while not called:
        time.sleep(_POLL_INTERVAL)
        for rank in list(ranks):
            try:
                called = called or merged.Iprobe(rank, _COME)
            except MPI.Exception as error:
                check_loss(error)
                ranks.remove(rank)
        if not ranks or (here and not any(identity.can_be_ended for identity in here)):
            os._exit(0)
    with limited(patience):
        together = merged.Shrink()
        together.Set_errhandler(MPI.ERRORS_RETURN)
        return together, together.bcast(None, root=0)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End all processes if the block takes longer: an operation of MPI cannot be interrupted."""

    def end() -> None:
        from mpi4py import MPI

        print(
            f"error: a process could not join within {seconds:g} seconds, and MPI cannot be "
            "interrupted",
            file=sys.stderr,
            flush=True,
        )
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)  # not reached

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
