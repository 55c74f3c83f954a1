"""The progress of a run: a bar on a terminal, in a log file a line now and then."""

import os
import sys
import time
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

INTERVAL = 30.0  # seconds between the lines in a log file
_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")


class Progress:
    """The number of steps done, on the standard error, while the context is open.

    Args:
        total: Number of steps.
        initial: Number of steps done before.
        shown: True if progress is shown.
        tokens: Tokens of all workers in a step. Above 0, their number per second is shown.
    """

    def __init__(self, total: int, initial: int = 0, shown: bool = True, tokens: int = 0):
        self._total, self._done = total, initial
        self._initial, self._tokens = initial, tokens
        self._note = ""
        self._terminal = terminal() if shown else None
        self._lines = shown and self._terminal is None
        self._bar = tqdm(
            total=total,
            initial=initial,
            file=self._terminal,
            disable=self._terminal is None,
            unit="step",
            mininterval=0.5,
            smoothing=0,
        )
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._terminal is not None and self._terminal is not sys.stderr:
            self._terminal.close()

    def advance_to(self, steps: int) -> None:
        """Show that this number of steps is done."""
        self.update(steps - self._done)

    def update(self, steps: int = 1) -> None:
        """Count further steps."""
        self._done += steps
        self._bar.set_postfix_str(self._notes(), refresh=False)
        self._bar.update(steps)
        if self._lines and time.monotonic() - self._last_line >= INTERVAL:
            self._last_line = time.monotonic()
            elapsed = tqdm.format_interval(self._last_line - self._start)
            line = ", ".join(filter(None, [f"after {elapsed}", self._notes()]))
            line = f"{self._done} of {self._total} steps {line}"
            print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Show this text beside the number of steps from now on."""
        self._note = text

    def _notes(self) -> str:
        """The rate of tokens, and the text."""
        elapsed = time.monotonic() - self._start
        rate = self._tokens * (self._done - self._initial) / elapsed if elapsed > 0 else 0.0
        tokens = f"{rate:,.0f} tokens/s" if rate > 0 else ""
        return ", ".join(filter(None, [tokens, self._note]))

    def write(self, line: str) -> None:
        """Print a line to the standard output, above the bar, which the next step shows again."""
        self._bar.clear()
        print(line, flush=True)


def terminal() -> TextIO | None:
    """The terminal of the standard error: its own, or mpirun's, which forwards it line by line."""
    if sys.stderr.isatty():
        return sys.stderr
    parent = Path("/proc") / str(os.getppid())
    try:
        if (parent / "comm").read_text().strip() in _LAUNCHERS:
            path = (parent / "fd" / "2").readlink()
            if str(path).startswith(("/dev/pts/", "/dev/tty")):
                return path.open("w")
    except OSError:  # not Linux, or no right to write
        pass
    return None
