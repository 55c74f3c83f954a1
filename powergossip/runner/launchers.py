"""Launchers of runs: on this machine, or as Slurm jobs::

    mpirun     on this machine, with `mpirun -np N` for N > 1 processes
    torchrun   on this machine, with `torchrun --nproc-per-node N` for N > 1 processes
    process    on this machine, all workers in one process: n_workers=N instead of N processes,
               with the same results
    slurm      with `sbatch`; in the job, `mpirun -np N` for N > 1 processes

A launcher returns when the job has ended, with its exit code, or 128 + the signal's number if a
signal ended it. Every start is a line `$ COMMAND` in the log (jobs.last_output). An error of the
launcher itself is a line `error: …` in the log, with exit code 1, so that no job stops another.
Launchers can be called in several threads concurrently.

No two runs are in a folder at the same time, however a runner ends, and whatever launcher the next
one uses. On this machine, the processes of a runner get a signal when the runner has ended, even by
SIGKILL, or is interrupted (Ctrl-C). train.py then writes a checkpoint and ends. Other programs just
end. folder/running stays locked until the last process has ended, and the next start waits for
that. Slurm jobs continue without the runner (`scancel` ends them). The next runner's jobs begin
when they have ended.

sbatch reads further options from the environment: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_GRES, SBATCH_QOS, SBATCH_MEM_PER_CPU, SBATCH_CONSTRAINT, …  (man sbatch,
INPUT ENVIRONMENT VARIABLES). With SBATCH_SIGNAL=B:USR1@120 train.py writes a checkpoint two minutes
before the time limit. Jobs have the environment and the working directory of the runner and must
see its folders. Slurm may requeue a job (--requeue). Its command then starts again. mpirun starts
the processes, not srun, since that requires no MPI plugin of Slurm. Open MPI reads Slurm's
allocation and starts its daemons on further nodes with srun.
"""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from powergossip.errors import BadInput
from powergossip.runner.jobs import (
    RUNNING,
    SLURM,
    CannotRun,
    Job,
    alone,
    environment,
    failed,
    guard,
    mpirun_command,
)

# The signal that ends a job on this machine, except under torchrun. mpirun forwards SIGTERM as
# well, but kills its processes half a second later.
STOP = signal.SIGUSR1


class Launcher(ABC):
    """A launcher for this machine."""

    stop = STOP  # the signal that ends a job
    needs, otherwise = "", ""  # a program, and what to do without it

    def __init__(self, patience: float = 60.0):
        """patience: seconds to wait for the end of an earlier start of a job"""
        self._patience = patience
        self._running: set[subprocess.Popen[bytes]] = set()
        self._leaving = False
        self._changing = threading.Lock()

    def leave(self) -> None:
        """End the runner (Ctrl-C), in another thread. Jobs on this machine are ended as well, and
        Slurm jobs continue. The calls that wait for jobs return. The start of another job raises
        KeyboardInterrupt."""
        with self._changing:
            self._leaving = True
            for process in self._running:
                process.send_signal(self.stop)

    def check(self) -> None:
        """Raise BadInput if this launcher cannot be used on this machine."""
        if self.needs and not shutil.which(self.needs):
            name = type(self).__name__.lower()
            raise BadInput(f"--launcher {name}: there is no {self.needs} on PATH; {self.otherwise}")

    @abstractmethod
    def __call__(self, job: Job) -> int:
        """Run a job, wait for its end, and return its exit code."""

    def _run_by(self, starter: Sequence[str], job: Job) -> int:
        """Run a job by mpirun or torchrun, or the command alone. They close inherited files, so
        that each process takes the lock itself."""
        locked = guard("locked", job.folder.resolve() / RUNNING) if starter else []
        return self._run(job, [*starter, *job.command], [*starter, *locked, *job.command])

    def _run(self, job: Job, shown: Sequence[str], actual: Sequence[str]) -> int:
        """shown: the command in the log"""
        try:
            with alone(job.folder, self._patience) as lock, job.log.open("a") as log:
                self._check_folder(job.folder)
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

    def _check_folder(self, folder: Path) -> None:
        """Raise CannotRun if the run is a Slurm job."""
        file = folder / SLURM
        if file.exists():
            number = file.read_text().strip() or "without a number yet"
            raise CannotRun(
                f"Slurm's job {number} does this run; use --launcher slurm, or end the job and "
                f"remove {file}"
            )

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
                [*guard("bound", int(self.stop), os.getpid()), *actual],
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
            process.send_signal(self.stop)
            process.wait()
            raise
        finally:
            with self._changing:
                self._running.remove(process)


class Mpirun(Launcher):
    """`mpirun -np N`, or the command alone for one process; each process has one thread."""

    needs = "mpirun"
    otherwise = "activate the environment made by setup.sh, or use --launcher process"

    def __call__(self, job: Job) -> int:
        return self._run_by(mpirun_command(job.processes), job)


class Torchrun(Launcher):
    """`torchrun --nproc-per-node N`, or the command alone for one process; each process has one
    thread. It forwards SIGTERM, but not SIGUSR1, and waits for 30 seconds."""

    stop = signal.SIGTERM

    def __call__(self, job: Job) -> int:
        torchrun = []
        if job.processes > 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc-per-node", str(job.processes), "--no-python"]
        return self._run_by(torchrun, job)


class OneProcess(Launcher):
    """n_workers=N at the end of the command, unless it has n_workers= itself. No MPI."""

    def __call__(self, job: Job) -> int:
        given = any(argument.startswith("n_workers=") for argument in job.command)
        workers = [] if given or job.processes == 1 else [f"n_workers={job.processes}"]
        command = [*job.command, *workers]
        return self._run(job, command, command)


class Slurm(Launcher):
    """`sbatch --wait` with N tasks. Slurm chooses the nodes, and runs jobs of one name, that of the
    run, one after the other.

    A job writes its number to folder/slurm when it begins. For one that is cancelled before, sbatch
    reports success.
    """

    stop = signal.SIGTERM  # the waiting sbatch ends, and the job continues
    needs, otherwise = "sbatch", "run this on a cluster, or use another --launcher"

    def _check_folder(self, folder: Path) -> None:
        (folder / SLURM).write_text("")

    def __call__(self, job: Job) -> int:
        record = job.folder.resolve() / SLURM
        command = [*mpirun_command(job.processes), *job.command]
        # Slurm sets the number of tasks of each node. The policy of .venv, which allows more
        # processes than cores, would make Open MPI start all of them on the first node.
        script = (
            "export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe\n"
            f"echo $SLURM_JOB_ID > {shlex.quote(str(record))}\nexec {shlex.join(command)}"
        )
        log = str(job.log.resolve()).replace("%", "%%")
        sbatch = [
            *("sbatch", "--wait", "--dependency=singleton", "--requeue", "--open-mode=append"),
            *(f"--output={log}", f"--ntasks={job.processes}", f"--job-name={job.name}"),
            *(f"--chdir={os.getcwd()}", f"--wrap={script}"),
        ]
        code = self._run(job, command, sbatch)
        if code and self._leaving:
            return code
        if code == 0 and not self._has_begun(record):
            code = failed(job, "Slurm's job has ended before it began")
        record.unlink(missing_ok=True)
        return code

    def _has_begun(self, record: Path) -> bool:
        """True if the job has written its number, which a shared file system may show late."""
        end = time.monotonic() + self._patience
        while not record.read_text() and time.monotonic() < end:
            os.listdir(record.parent)  # refreshes the cache of NFS
            time.sleep(0.2)
        return bool(record.read_text())


# Each call of the runner has its own launcher: after `leave`, it starts no other job.
LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "mpirun": Mpirun,
    "torchrun": Torchrun,
    "process": OneProcess,
    "slurm": Slurm,
}
