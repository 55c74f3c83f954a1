"""Signals that end a run."""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from powergossip.errors import Signaled

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Record of the first SIGTERM, SIGINT (Ctrl-C), SIGHUP or SIGUSR1 while the context is open.

    Slurm can send SIGUSR1 before a time limit. A second signal has its usual effect. Signals that
    are ignored stay ignored: SIGINT in background jobs of a shell script, SIGHUP under nohup.

    Args:
        at_once: Text of the errors.Signaled that the first signal raises. None: it raises nothing.
        delay: Seconds until it is raised. A process that waits for this one can react before.
        patience: Seconds after SIGTERM until the process ends unless `agreed` is set, or None. A
            process that waits for a lost one in a library cannot react in another way.

    Attributes:
        received: Number of the signal, or None.
        agreed: True if all processes have agreed to end.
    """

    def __init__(
        self, at_once: str | None = None, delay: float = 0.0, patience: float | None = None
    ) -> None:
        self.received: int | None = None
        self.agreed = False
        self._patience = patience
        self._writer: socket.socket | None = None
        self._wakeup_before = -1
        self._at_once, self._delay = at_once, delay
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
            if self._patience is not None:
                self._watch(self._patience)
        return self

    def _watch(self, patience: float) -> None:
        """End the process `patience` seconds after SIGTERM. The interpreter writes the number of a
        signal to a socket at once, even while the main thread is in a library."""
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

        def watch() -> None:
            with reader:
                while signal.SIGTERM not in (numbers := reader.recv(64)):
                    if not numbers:
                        return  # the context is closed
                reader.settimeout(patience)
                with suppress(TimeoutError):
                    while reader.recv(64):
                        pass
                    return
            if not self.agreed:
                text = f"stopped by SIGTERM, without a checkpoint: after {patience:g} s"
                print(f"error: {text} not all processes have answered", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._restore()
        if self._writer is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._writer.close()
            self._writer = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        if self._at_once is not None and self._delay:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._raise)
            signal.setitimer(signal.ITIMER_REAL, self._delay)
        elif self._at_once is not None:
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        assert self.received is not None
        name = signal.Signals(self.received).name
        raise Signaled(f"stopped by {name}; {self._at_once}", self.received)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
