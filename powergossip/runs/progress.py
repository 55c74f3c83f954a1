"""The progress of a run: a bar on a terminal, in a log file a line now and then."""

import sys
import time

from tqdm import tqdm

INTERVAL = 30.0  # seconds between the lines in a log file


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
        on_terminal = shown and sys.stderr.isatty()
        self._lines = shown and not on_terminal
        self._bar = tqdm(
            total=total,
            initial=initial,
            disable=not on_terminal,
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

    def write(self, line: str) -> None:
        """Print a line to the standard output, above the bar, which the next step shows again."""
        self._bar.clear()
        print(line, flush=True)
