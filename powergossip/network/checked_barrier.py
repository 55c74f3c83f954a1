"""Barriers of all processes that notice a process that makes more steps than the others.

A process that arrives sends a token to every other one and waits for theirs. A message that
another process has started before its token belongs to a step without this process: without a
barrier, the other one would wait for its answer forever. Steps themselves need no barrier.
"""

import atexit
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from powergossip.errors import PeerLost
from powergossip.network.processes import Processes

PATIENCE = 1.0  # seconds, at exit: a caught exception may have left messages before the token
_END = "the end of the program"
_PLACES = (
    *(_END, "mean_model()", "merge()"),
    "the first step with a loaded state",
)
_at_exit: weakref.WeakSet[Processes] = weakref.WeakSet()


def checked_barrier(processes: Processes, place: str, steps: int | None = None) -> None:
    """Wait until all processes call this with the same place, one of _PLACES.

    Ends all processes with an error if one is at another place, or has made another number of
    steps so far.
    """
    if processes.size == 1:
        return
    own = np.array([_PLACES.index(place), -1 if steps is None else steps], dtype=np.int64)
    here = f"process {processes.rank} {_at(own)}"

    def check(process: int, token: np.ndarray) -> None:
        both_count = token[1] >= 0 and own[1] >= 0
        if token[0] != own[0] or (both_count and token[1] != own[1]):
            _end(processes, f"{here}, process {process} {_at(token)}")

    def ahead(process: int) -> None:
        _end(processes, f"{here}, {_further(process)}")

    processes.checked_barrier(own, PATIENCE if place == _END else 0.0, check, ahead)


def checked_barrier_at_exit(processes: Processes, steps: Callable[[], int | None]) -> None:
    """Add a checked barrier at the end of Python. All call it, and only the first call counts."""
    if processes.size == 1 or processes in _at_exit:
        return
    _at_exit.add(processes)

    def ahead(process: int, token: np.ndarray) -> None:
        _end(processes, f"process {process} {_at(token)}, {_further(processes.rank)}")

    def at_exit() -> None:
        try:
            checked_barrier(processes, _END, steps())
        except PeerLost as error:  # which Python would print and ignore
            sys.excepthook(PeerLost, error, error.__traceback__)

    processes.watch(ahead)
    atexit.register(at_exit)


def _at(token: Any) -> str:
    place, steps = token
    return f"is at {_PLACES[place]}" + ("" if steps < 0 else f" after {steps} steps")


def _further(process: int) -> str:
    return f"process {process} is in a further step"


def _end(processes: Processes, situation: str) -> NoReturn:
    """End all processes. If several notice at once, the first one usually prints alone."""
    time.sleep(min(0.1 * processes.rank, 1.0))
    print(
        f"\nerror: {situation}; make the same steps and calls in all processes, for instance with "
        "equally many batches",
        file=sys.stderr,
        flush=True,
    )
    processes.end(1)
