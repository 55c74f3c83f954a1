"""Jobs of launchers: their command, their folder and its lock, and their log."""

import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GUARD = Path(__file__).resolve().with_name("guard.py")
PACKAGES = GUARD.parents[2]

# In a run's folder:
RUNNING = "running"  # locked by the launcher and by the processes of the run
SLURM = "slurm"  # number of a Slurm job without a known end, once it has begun


@dataclass(frozen=True)
class Job:
    """A command to be run.

    Attributes:
        command: Command without the launcher: python train.py key=value ….
        processes: Number of MPI processes.
        log: File to which its output is appended.
        folder: Folder of the job alone. No two jobs of a folder run at the same time.
        name: Name shown by Slurm.
    """

    command: Sequence[str]
    processes: int
    log: Path
    folder: Path
    name: str


class CannotRun(Exception):
    """A job cannot be run. The text is for its log."""


@contextmanager
def alone(folder: Path, patience: float) -> Iterator[IO[str]]:
    """Lock a folder while the file is open, in this process or one that inherits it.

    Raises CannotRun if another start of a job keeps the lock for `patience` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUNNING).open("a") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CannotRun(
                        f"an earlier start of this run is still there after {patience:g} seconds; "
                        f"`fuser {folder / RUNNING}` lists its processes"
                    ) from None
            time.sleep(0.05)
        yield file


def last_output(log: Path) -> str:
    """Return the output of the latest start so far."""
    text = f"\n{log.read_bytes().decode(errors='replace')}"
    return text[text.rfind("\n$ ") + 1 :].partition("\n")[2]


def mpirun_command(processes: int) -> list[str]:
    return ["mpirun", "-np", str(processes)] if processes > 1 else []


def guard(*arguments: str | int | Path) -> list[str]:
    # Without site-packages, Python starts in half the time.
    return [sys.executable, "-I", "-S", str(GUARD), *map(str, arguments)]


def environment() -> dict[str, str]:
    """The environment of jobs: one thread, and modules of this package's folder are found."""
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def failed(job: Job, complaint: str) -> int:
    with job.log.open("a") as log:
        log.write(f"error: {complaint}\n")
    return 1
