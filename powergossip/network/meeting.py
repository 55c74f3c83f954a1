"""Meetings of all processes, which notice a process that makes more steps than the others.

A process that arrives sends a token to every other one and waits for theirs. Another message that
arrives before a process' token belongs to a step in which this process does not take part: without
a meeting, the other one would wait for its answer forever. Steps themselves need no meeting.
"""

import atexit
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from powergossip.network.mpi import TOKEN, Processes

PATIENCE = 1.0  # seconds, at exit: a caught exception may have left messages before the token
_END = "the end of the program"
_PLACES = (_END, "mean_model()", "add_param_group()")
_at_exit: weakref.WeakSet[Processes] = weakref.WeakSet()


def meet(processes: Processes, place: str, steps: int | None = None) -> None:
    """Wait until all processes call this with the same place, one of _PLACES.

    Ends all processes with a sentence if one is elsewhere. `steps` made so far are a part of it.
    """
    if processes.size == 1:
        return
    from mpi4py import MPI

    communicator, status = processes.communicator, MPI.Status()
    own = np.array([_PLACES.index(place), -1 if steps is None else steps], dtype=np.int64)
    others = [process for process in range(processes.size) if process != processes.rank]
    sends = [communicator.Isend(own, process, TOKEN) for process in others]
    here = f"process {processes.rank} {_at(place, own[1])}"
    patience = PATIENCE if place == _END else 0.0
    start = time.monotonic()
    seen: dict[int, float] = {}  # process → time at which a message without a token was first seen
    while others:
        for process in list(others):
            if communicator.Iprobe(process, TOKEN, status):
                theirs = np.empty_like(own)
                communicator.Recv(theirs, process, TOKEN)
                others.remove(process)
                if theirs[0] != own[0]:
                    there = f"process {process} {_at(_PLACES[theirs[0]], theirs[1])}"
                    _end(processes, f"{here}, {there}")
            elif communicator.Iprobe(process, MPI.ANY_TAG, status) and status.tag != TOKEN:
                now = time.monotonic()
                if now - seen.setdefault(process, now) >= patience:
                    _end(processes, f"{here}, process {process} is in a further step")
        time.sleep(0.0 if time.monotonic() - start < 0.1 else 0.005)
    MPI.Request.Waitall(sends)


def meet_at_exit(processes: Processes, steps: Callable[[], int | None]) -> None:
    """Make all processes meet when Python ends. All call it, and only the first call counts."""
    if processes.size == 1 or processes in _at_exit:
        return
    _at_exit.add(processes)
    atexit.register(_meet_at_exit, processes, steps)


def _meet_at_exit(processes: Processes, steps: Callable[[], int | None]) -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized() and processes.communicator != MPI.COMM_NULL:
        meet(processes, _END, steps())


def _at(place: str, steps: Any) -> str:
    return f"is at {place}" + ("" if steps < 0 else f" after {steps} steps")


def _end(processes: Processes, situation: str) -> NoReturn:
    """End all processes. If several notice at once, the first one usually prints alone."""
    time.sleep(min(0.1 * processes.rank, 1.0))
    print(
        f"\nerror: {situation}; make the same steps and calls in all processes, for instance with "
        "equally many batches",
        file=sys.stderr,
        flush=True,
    )
    processes.communicator.Abort(1)
    raise SystemExit(1)  # not reached
