"""Machines that meet with a ticket, each a program with its own key and folder, on this one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


class Machine:
    """A program powergossip-join.

    Attributes:
        output: File with its output.
        folder: Folder of its run.
    """

    def __init__(self, home: Path, *arguments: str):
        self.home, self.folder, self.output = home, home / "run", home / "output"
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "powergossip.join", *arguments]
        with self.output.open("a") as output:
            self.program = subprocess.Popen(
                [*command, "--output-dir", str(self.folder)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"XDG_STATE_HOME": str(home)},
            )

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """The first text in the output that has this form. Raises AssertionError without one."""
        since = time.monotonic()
        while time.monotonic() - since < seconds:
            if found := re.search(pattern, self.output.read_text()):
                return found[0]
            ended = self.program.poll() is not None
            if ended and not re.search(pattern, self.output.read_text()):
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {self.output}:\n{self.output.read_text()}")

    def kill(self) -> None:
        self.program.send_signal(signal.SIGKILL)
        self.program.wait()

    def end(self, seconds: float = 60) -> int:
        """The exit code, once the program has ended."""
        try:
            return self.program.wait(seconds)
        except subprocess.TimeoutExpired:
            self.program.kill()
            raise AssertionError(f"no end of {self.home}:\n{self.output.read_text()}") from None


def started(folder: Path, size: int, *arguments: str) -> list[Machine]:
    """Machines that begin a run with these arguments, the first one first."""
    first = Machine(folder / "0", "new", "--workers", str(size), *arguments)
    ticket = first.wait_for(r"powergossip-join (powergossip-\S+)").split()[-1]
    return [first, *(Machine(folder / str(index), ticket) for index in range(1, size))]
