"""The progress of a run: a bar on a terminal, in a log file a line now and then."""

import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

INTERVAL = 30.0  # seconds between the lines in a log file
_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")


class Progress:
    """The number of steps done, on the standard error, while the context is open.

    Args:
        total: Number of steps.
        initial: Number of steps done before.
        shown: Whether progress is shown.
        tokens: Tokens of all workers in a step. Above 0, their number per second is shown.
    """

    def __init__(self, total: int, initial: int = 0, shown: bool = True, tokens: int = 0):
        self._total, self._done = total, initial
        self._initial, self._tokens = initial, tokens
        self._note = ""
        self._lines = shown and not on_terminal()
        self._bar = tqdm(
            total=total,
            initial=initial,
            disable=not shown or self._lines,
            unit="step",
            mininterval=0.5,
            smoothing=0,
        )
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

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

    @staticmethod
    def write(line: str) -> None:
        """Print a line to the standard output, above the bar."""
        tqdm.write(line)


def on_terminal() -> bool:
    """Return whether the standard error is a terminal, or that of mpirun, which forwards it."""
    if sys.stderr.isatty():
        return True
    parent = Path("/proc") / str(os.getppid())
    try:
        if (parent / "comm").read_text().strip() not in _LAUNCHERS:
            return False
        return str((parent / "fd" / "2").readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # not Linux
        return False
