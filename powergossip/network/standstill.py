"""A line on the standard error while a process waits long for another one.

A wait costs two assignments. A thread looks at them now and then.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from powergossip.formatting import listed

INTERVAL = 30.0  # seconds until the first line. Each further one takes twice as long

_Wait = tuple[int, Iterable[int]]
_now: _Wait | None = None
_thread: threading.Thread | None = None


def begin(own: int, others: Iterable[int]) -> None:
    """Let process `own` wait for messages of others from now on."""
    global _now, _thread
    _now = own, others
    if _thread is None:
        _thread = threading.Thread(target=_watch, daemon=True)
        _thread.start()


def end() -> None:
    """The wait is over."""
    global _now
    _now = None


@contextmanager
def waiting(own: int, others: Iterable[int]) -> Iterator[None]:
    """A block in which process `own` waits for messages of others."""
    begin(own, others)
    try:
        yield
    finally:
        end()


def _watch() -> None:
    seen: _Wait | None = None
    since, due = 0.0, INTERVAL
    while True:
        time.sleep(INTERVAL / 10)
        now, seconds = _now, time.monotonic() - since
        if now is None or now is not seen:
            seen, since, due = now, time.monotonic(), INTERVAL
        elif seconds >= due:
            due *= 2
            own, others = now
            words = listed(sorted(set(others) - {own}))
            line = f"process {own}: no message from process {words} for {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
