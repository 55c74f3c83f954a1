"""Replacement of a lost process by a new one of the same job."""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from powergossip.network.peers import Identity


@dataclass(frozen=True)
class Roll:
    """The state that a new process receives, equal in all processes.

    ranks       # process → rank in the new communicator: survivors, then the new process
    identities  # of all processes that ever were, the new one included
    homes       # worker → process
    calls       # collective operations of the survivors so far
    own         # index of the new process
    """

    ranks: Mapping[int, int]
    identities: Mapping[int, Identity]
    homes: Mapping[int, int]
    worker_timeout: float
    calls: int
    own: int


def spawn(
    communicator: Any, ranks: Mapping[int, int], command: Sequence[str]
) -> tuple[Any, dict[int, int], Identity]:
    """Start a process. The survivors of the communicator call it, and the process calls `enter`.

    ranks    # process → rank in the communicator
    command  # a Python program and its arguments

    Returns a communicator of the survivors and the new process, the ranks of the survivors in it,
    and the identity of the new process, whose rank is the last. Raises MPI.Exception.
    """
    from mpi4py import MPI

    shrunk = communicator.Shrink()
    shrunk.Set_errhandler(MPI.ERRORS_RETURN)
    between = shrunk.Spawn(sys.executable, list(command), maxprocs=1)
    merged = between.Merge(high=False)
    merged.Set_errhandler(MPI.ERRORS_RETURN)
    old, new = communicator.Get_group(), merged.Get_group()
    found = MPI.Group.Translate_ranks(old, None, new)
    survivors = {p: found[rank] for p, rank in ranks.items() if found[rank] != MPI.UNDEFINED}
    return merged, survivors, merged.bcast(None, root=merged.size - 1)


def enter(patience: float) -> tuple[Any, Roll]:
    """The counterpart of `spawn` in the new process: the communicator and the roll."""
    from mpi4py import MPI

    with limited(patience):
        merged = MPI.Comm.Get_parent().Merge(high=True)
        merged.Set_errhandler(MPI.ERRORS_RETURN)
        merged.bcast(Identity.own(), root=merged.size - 1)
        return merged, merged.bcast(None, root=0)


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
