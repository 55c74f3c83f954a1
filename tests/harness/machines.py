"""Machines that meet with a ticket, each a program with its own key and folder, on this one."""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from powergossip.runs import metrics
from tests.harness.forks import Fork
from tests.harness.launch import ROOT, fork_server

JOIN = ROOT / "powergossip" / "join.py"


class Machine:
    """A program powergossip-join, or another one.

    Args:
        home: Folder of the machine, with its keys, its output and the folder of its run.
    """

    def __init__(self, home: Path, *arguments: str, program: Path = JOIN):
        self.home, self.folder, self._output = home, home / "run", home / "output"
        home.mkdir(exist_ok=True)
        words = [str(program), *arguments]
        environment = os.environ | {"XDG_STATE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        with self._output.open("a") as output:
            files = output.fileno(), output.fileno()
            words += ["--output-dir", str(self.folder)] if program == JOIN else []
            environment["PYTHONPATH"] = str(ROOT)
            self._fork = Fork(fork_server(), words, str(ROOT), environment, files)

    @property
    def name(self) -> str:
        """The name of the run."""
        (record,) = self.home.rglob("run-*.json")
        return record.stem

    @property
    def output(self) -> str:
        return self._output.read_text()

    def ticket(self) -> str:
        """The ticket that a first machine prints."""
        since = time.monotonic()
        while not (found := re.findall(r"powergossip-join (powergossip-\S+)", self.output)):
            assert time.monotonic() - since < 60, self.output
            time.sleep(0.02)
        return str(found[-1])

    def workers(self) -> list[tuple[int, int]]:
        """The epochs so far, and the number of workers in each."""
        if not (self.folder / metrics.FILE).exists():
            return []
        rows = metrics.load(self.folder)
        found = rows[rows["name"] == "workers"] if len(rows) else rows
        return [(int(row["epoch"]), int(row["value"])) for _, row in found.iterrows()]

    def wait_for_workers(self, number: int, seconds: float = 60) -> None:
        """Wait until the last epoch has so many workers."""
        since = time.monotonic()
        while not (rows := self.workers()) or rows[-1][1] != number:
            assert time.monotonic() - since < seconds, (rows, self.output)
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        os.kill(self._fork.pid, number)

    def end(self, seconds: float = 60) -> int:
        """The exit code, once the program has ended."""
        try:
            return self._fork.wait(seconds)
        except TimeoutError:
            raise AssertionError(f"{self.home} does not end:\n{self.output}") from None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.end()

    def close(self) -> None:
        self._fork.close()


@contextmanager
def run(folder: Path, first: Sequence[str], others: Sequence[str] = ()) -> Iterator[list[Machine]]:
    """Three machines of a run, the first one first. They end after the block.

    Args:
        first: Arguments of the first machine.
        others: Arguments of the others, by default the ticket.
    """
    machines = [Machine(folder / "0", *first)]
    try:
        ticket = machines[0].ticket()
        machines += [Machine(folder / n, *(others or [ticket])) for n in ("1", "2")]
        yield machines
    finally:
        for machine in machines:
            machine.close()
