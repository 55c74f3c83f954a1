"""Launchers of runs on this machine::

    mpirun     `mpirun -np N` for N > 1 processes
    process    all workers in one process: n_workers=N instead of N processes, with the same results

A launcher returns when the job has ended, with its exit code, or 128 + the signal's number if a
signal ended it. Every start is a line `$ COMMAND` in the log (jobs.last_output). An error of the
launcher itself is a line `error: …` in the log, with exit code 1, so that no job stops another.
Launchers can be called in several threads concurrently.

No two runs are in a folder at the same time, however a runner ends, and whatever launcher the next
one uses. The processes of a runner get a signal when the runner has ended, even by SIGKILL, or is
interrupted (Ctrl-C). train.py then writes a checkpoint and ends. Other programs just end.
folder/running stays locked until the last process has ended, and the next start waits for that.
"""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from powergossip.errors import BadInput
from powergossip.runner.jobs import (
    RUNNING,
    CannotRun,
    Job,
    Launcher,
    alone,
    environment,
    failed,
    guard,
    mpirun_command,
)

# The signal that ends a job. mpirun forwards SIGTERM as well, but kills its processes half a second
# later.
STOP = signal.SIGUSR1


class _Here:
    """A launcher. `leave`, called in another thread, ends all its jobs."""

    def __init__(self, patience: float = 60.0):
        """patience: seconds to wait for the end of an earlier start of a job"""
        self._patience = patience
        self._running: set[subprocess.Popen[bytes]] = set()
        self._leaving = False
        self._changing = threading.Lock()

    def leave(self) -> None:
        with self._changing:
            self._leaving = True
            for process in self._running:
                process.send_signal(STOP)

    def check(self) -> None:
        """See `Launcher`. A launcher that needs no other program can always be used."""

    def _run(self, job: Job, shown: Sequence[str], actual: Sequence[str]) -> int:
        """shown: the command in the log"""
        try:
            with alone(job.folder, self._patience) as lock, job.log.open("a") as log:
                fcntl.flock(lock, fcntl.LOCK_SH)
                with self._started(shown, actual, log, lock) as process:
                    code = process.wait()
        except CannotRun as error:
            return failed(job, str(error))
        # Ctrl-C may end a process before it is in its own session, and before `leave`. Then no
        # other job may start.
        if code == -signal.SIGINT:
            with self._changing:
                self._leaving = True
        if code and self._leaving:  # mpirun may report another code for the signal
            return 128 + STOP
        return code if code >= 0 else 128 - code

    @contextmanager
    def _started(
        self, shown: Sequence[str], actual: Sequence[str], log: IO[str], lock: IO[str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Raises KeyboardInterrupt after `leave`."""
        with self._changing:
            if self._leaving:
                raise KeyboardInterrupt
            log.write(f"$ {shlex.join(shown)}\n")
            log.flush()
            process = subprocess.Popen(
                [*guard("bound", int(STOP), os.getpid()), *actual],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                pass_fds=[lock.fileno()],
                # Ctrl-C in the same session would end mpirun before checkpoints are written.
                start_new_session=True,
            )
            self._running.add(process)
        try:
            yield process
        except BaseException:  # Ctrl-C, where this is the main thread
            process.send_signal(STOP)
            process.wait()
            raise
        finally:
            with self._changing:
                self._running.remove(process)


class Mpirun(_Here):
    """`mpirun -np N`, or the command alone for one process; each process has one thread."""

    def check(self) -> None:
        if not shutil.which("mpirun"):
            raise BadInput(
                "--launcher mpirun: there is no mpirun on PATH; activate the environment made by "
                "setup.sh, or use --launcher process"
            )

    def __call__(self, job: Job) -> int:
        mpirun = mpirun_command(job.processes)
        # mpirun closes inherited files, so that each process takes the lock itself.
        locked = guard("locked", job.folder.resolve() / RUNNING) if mpirun else []
        return self._run(job, [*mpirun, *job.command], [*mpirun, *locked, *job.command])


class OneProcess(_Here):
    """n_workers=N at the end of the command, unless it has n_workers= itself. No MPI."""

    def __call__(self, job: Job) -> int:
        given = any(argument.startswith("n_workers=") for argument in job.command)
        workers = [] if given or job.processes == 1 else [f"n_workers={job.processes}"]
        command = [*job.command, *workers]
        return self._run(job, command, command)


# Each call of the runner has its own launcher: after `leave`, it starts no other job.
LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "mpirun": Mpirun,
    "process": OneProcess,
}
