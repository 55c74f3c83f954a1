"""Launchers of runs: on this machine, or as Slurm jobs.

    mpirun     on this machine, with `mpirun -np N` for N > 1 processes
    torchrun   on this machine, with `torchrun --nproc-per-node N` for N > 1 processes
    process    on this machine, all workers in one process: n_workers=N instead of N processes,
               with the same results
    slurm      with `sbatch`; in the job, `mpirun -np N` for N > 1 processes

A launcher returns when the job has ended, with its exit code, or 128 + the signal's number if a
signal ended it. Every start is a line `$ COMMAND` in the log, see `last_output`. An error of the
launcher itself is a line `error: …` in the log, with exit code 1, so that no job stops another.
Launchers can be called in several threads concurrently.

No two runs are in a folder at the same time, however a runner ends, and whatever launcher the next
one uses. On this machine, the processes of a runner get a signal when the runner has ended, even by
SIGKILL, or is interrupted (Ctrl-C). train.py then writes a checkpoint and ends. Other programs just
end. folder/running stays locked until the last process has ended, and the next start waits for
that. Slurm jobs continue without the runner (`scancel` ends them). The next runner waits for the
same jobs, which are recorded in folder/slurm.json.

Slurm. sbatch reads further options from the environment: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_GRES, SBATCH_QOS, SBATCH_MEM_PER_CPU, SBATCH_CONSTRAINT, …  (man sbatch,
INPUT ENVIRONMENT VARIABLES). With SBATCH_SIGNAL=B:USR1@120 train.py writes a checkpoint two minutes
before the time limit. Jobs have the environment and the working directory of the runner and must
see its folders. Slurm may requeue a job (--requeue). Its command then starts again. mpirun starts
the processes, not srun, since that requires no MPI plugin of Slurm. Open MPI reads Slurm's
allocation and starts its daemons on further nodes with srun.
"""

import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from powergossip.errors import BadInput
from powergossip.runs.files import write_atomically

GUARD = Path(__file__).resolve().with_name("guard.py")

# The signal that ends a job on this machine, except under torchrun. mpirun forwards SIGTERM as
# well, but kills its processes half a second later.
STOP = signal.SIGUSR1

# In a run's folder:
RUNNING = "running"  # locked by the launcher and by the processes of the run
SLURM = "slurm.json"  # number and script of a Slurm job without a recorded end

# States of a job that has ended, unless Slurm requeues it.
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}


@dataclass(frozen=True)
class Job:
    """A command to be run.

    command    # without launcher: python train.py key=value …
    processes  # MPI processes
    log        # file to which its output is appended
    folder     # its own folder. No two jobs of a folder run at the same time
    name       # shown by Slurm
    """

    command: Sequence[str]
    processes: int
    log: Path
    folder: Path
    name: str


class Launcher(Protocol):
    def check(self) -> None:
        """Raise BadInput if this launcher cannot be used on this machine."""

    def __call__(self, job: Job) -> int:
        """Run a job, wait for its end, and return its exit code."""

    def leave(self) -> None:
        """End the runner (Ctrl-C). Jobs on this machine are ended as well; the calls that wait for
        them return with their exit codes. Slurm jobs continue. The calls that wait for them raise
        KeyboardInterrupt. So does the start of another job."""


class _CannotRun(Exception):
    """A job cannot be run. The text is for its log."""


# --- On this machine ------------------------------------------------------------------------------


class _Here:
    """A launcher for this machine. `leave`, called in another thread, ends all its jobs."""

    stop = STOP  # the signal that ends a job

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
                process.send_signal(self.stop)

    def _run(self, job: Job, shown: Sequence[str], actual: Sequence[str]) -> int:
        """shown: the command in the log"""
        try:
            with _alone(job.folder, self._patience) as lock, job.log.open("a") as log:
                _check_not_in_slurm(job.folder)
                fcntl.flock(lock, fcntl.LOCK_SH)
                with self._started(shown, actual, log, lock) as process:
                    code = process.wait()
        except _CannotRun as error:
            return _failed(job, str(error))
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
                [*_guard("bound", int(self.stop), os.getpid()), *actual],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
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


class Mpirun(_Here):
    """`mpirun -np N`, or the command alone for one process; each process has one thread."""

    def check(self) -> None:
        if not shutil.which("mpirun"):
            raise BadInput(
                "--launcher mpirun: there is no mpirun on PATH; activate the environment made by "
                "setup.sh, or use --launcher process"
            )

    def __call__(self, job: Job) -> int:
        mpirun = _mpirun(job.processes)
        # mpirun closes inherited files, so each process takes the lock itself.
        locked = _guard("locked", job.folder.resolve() / RUNNING) if mpirun else []
        return self._run(job, [*mpirun, *job.command], [*mpirun, *locked, *job.command])


class Torchrun(_Here):
    """`torchrun --nproc-per-node N`, or the command alone for one process; each process has one
    thread. It forwards SIGTERM, but not SIGUSR1, and waits for 30 seconds."""

    stop = signal.SIGTERM

    def check(self) -> None:
        pass

    def __call__(self, job: Job) -> int:
        torchrun = []
        if job.processes > 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc-per-node", str(job.processes), "--no-python"]
        # torchrun closes inherited files, so each process takes the lock itself.
        locked = _guard("locked", job.folder.resolve() / RUNNING) if torchrun else []
        return self._run(job, [*torchrun, *job.command], [*torchrun, *locked, *job.command])


class OneProcess(_Here):
    """n_workers=N at the end of the command, unless it has n_workers= itself. No MPI."""

    def check(self) -> None:
        pass

    def __call__(self, job: Job) -> int:
        given = any(argument.startswith("n_workers=") for argument in job.command)
        workers = [] if given or job.processes == 1 else [f"n_workers={job.processes}"]
        command = [*job.command, *workers]
        return self._run(job, command, command)


def _check_not_in_slurm(folder: Path) -> None:
    """Raise _CannotRun if the run is a Slurm job."""
    file = folder / SLURM
    if file.exists():
        number = _read(file).get("job") or "without a number yet"
        raise _CannotRun(
            f"Slurm's job {number} does this run; use --launcher slurm, or end the job and "
            f"remove {file}"
        )


@contextmanager
def _alone(folder: Path, patience: float) -> Iterator[IO[str]]:
    """Lock a folder while the file is open, in this process or one that inherits it.

    Raises _CannotRun if another start of a job keeps the lock for `patience` seconds.
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
                    raise _CannotRun(
                        f"an earlier start of this run is still there after {patience:g} seconds; "
                        f"`fuser {folder / RUNNING}` lists its processes"
                    ) from None
            time.sleep(0.05)
        yield file


# --- Slurm ----------------------------------------------------------------------------------------


class Slurm:
    """A launcher of Slurm jobs with N tasks. Slurm chooses the nodes.

    A job is identified by its script, folder/slurm-TOKEN.sh, even before sbatch has returned its
    number. Removing the script cancels a job that has not started: it ends at once when it starts.
    At its end a job writes its exit code to slurm-TOKEN.sh.exit, since Slurm forgets jobs after a
    while (MinJobAge). A job that disappears without an exit code has failed.

    A query to Slurm is for all jobs and shared by all threads. Queries become rarer with time.
    """

    def __init__(self, patience: float = 60.0, longest_interval: float = 10.0):
        self._patience = patience  # seconds to wait for a lock or a file
        self._longest_interval = longest_interval  # seconds
        self._leaving = threading.Event()
        self._asking = threading.Lock()
        self._asked = -float("inf")  # time of the latest query
        self._answer: Mapping[str, _State] | None = None

    def check(self) -> None:
        for tool in ("sbatch", "squeue", "scontrol"):
            if not shutil.which(tool):
                raise BadInput(
                    f"--launcher slurm: there is no {tool} on PATH; run this on a cluster, or "
                    "use --launcher mpirun"
                )
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
        if "is UP" not in ping.stdout:
            answer = _first_line(ping.stdout + ping.stderr)
            raise BadInput(
                f"--launcher slurm: Slurm's controller does not respond, `scontrol ping` prints "
                f'"{answer}"; try again later, or use --launcher mpirun'
            )

    def __call__(self, job: Job) -> int:
        try:
            script, number = self._submitted(job)
        except _CannotRun as error:
            return _failed(job, str(error))
        state = self._end(script, number)
        code = self._exit_code(script, state)
        if code is None:
            code = _failed(
                job, f"Slurm's job {number} has gone without an exit code; its last state: {state}"
            )
        # The record is removed first: without it, the other files are ignored.
        for file in (script.with_name(SLURM), script, _exit_file(script)):
            file.unlink(missing_ok=True)
        return code

    def leave(self) -> None:
        self._leaving.set()

    def _submitted(self, job: Job) -> tuple[Path, str]:
        """Script and number of the job: that of an earlier runner, or a new one."""
        folder = job.folder.resolve()
        with _alone(folder, self._patience) as lock:
            record = folder / SLURM
            if record.exists():
                before = _read(record)
                script, number = folder / before.get("script", "none"), before.get("job", "")
                # Without a number, the earlier runner ended before sbatch returned. sbatch has
                # ended too, since it also held the lock.
                number = number or self._find(script) or _read(_exit_file(script)).get("job", "")
                if number:
                    _write_record(record, script, number)
                    return script, number
                record.unlink()
            for old in folder.glob("slurm-*.sh*"):
                old.unlink()
            script = folder / f"slurm-{secrets.token_hex(4)}.sh"
            reported = [*_guard("reported", script), *_mpirun(job.processes), *job.command]
            write_atomically(script, f"#!/bin/sh\nexec {shlex.join(reported)}\n")
            _write_record(record, script, "")
            number = self._sbatch(job, script, lock)
            _write_record(record, script, number)
            return script, number

    def _sbatch(self, job: Job, script: Path, lock: IO[str]) -> str:
        """Submit a script. Return the number of the job. Raises _CannotRun."""
        log = str(job.log.resolve()).replace("%", "%%")
        command = [
            *("sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={log}"),
            *(f"--ntasks={job.processes}", f"--job-name={job.name}", f"--chdir={os.getcwd()}"),
            str(script),
        ]
        # Slurm sets the number of tasks of each node. The policy of .venv, which allows more
        # processes than cores, would make Open MPI start all of them on the first node.
        slots = {"PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe"}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=_environment() | slots,
            pass_fds=[lock.fileno()],
        )
        if done.returncode == 0:
            return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several
        try:
            number = self._find(script)  # sbatch may time out after a successful submission
        except _CannotRun:
            number = ""
        if not number:
            script.unlink()
            script.with_name(SLURM).unlink()
            complaint = done.stderr.strip() or f"exit code {done.returncode}"
            raise _CannotRun(f"sbatch refuses: {complaint}")
        return number

    def _find(self, script: Path) -> str:
        """The number of the job with this script, or "". Raises _CannotRun if Slurm does not
        respond."""
        jobs = self._jobs(time.monotonic())
        if jobs is None:
            raise _CannotRun("squeue failed; try again later")
        return jobs[str(script)].number if str(script) in jobs else ""

    def _end(self, script: Path, number: str) -> str:
        """Wait for the end of a job and return its last known state. While the controller does not
        respond, jobs continue, and so does the waiting."""
        interval = 0.2  # seconds
        while True:
            began = time.monotonic()
            if self._leaving.wait(interval):
                raise KeyboardInterrupt
            interval = min(1.3 * interval, self._longest_interval)
            jobs = self._jobs(began)
            if jobs is None:
                continue
            found = jobs.get(number) or jobs.get(str(script))
            if found is None:
                return "unknown to Slurm"
            if found.name in ENDED:
                return found.name

    def _exit_code(self, script: Path, state: str) -> int | None:
        """The exit code that the job has written, or None."""
        # After a state like CANCELLED there may be none. Otherwise there is one, but a shared file
        # system may show it with a delay.
        own_end = state not in ENDED or state in ("COMPLETED", "FAILED")
        end = time.monotonic() + (self._patience if own_end else 0)
        while True:
            os.listdir(script.parent)  # refreshes the cache of NFS
            code = _read(_exit_file(script)).get("exit_code")
            if isinstance(code, int):
                return code
            if time.monotonic() > end:
                return None
            if self._leaving.wait(0.2):
                raise KeyboardInterrupt

    def _jobs(self, after: float) -> "Mapping[str, _State] | None":
        """The user's jobs by number and by script, with those that have ended recently. The query
        was made later than `after`, possibly in another thread. None if Slurm does not respond."""
        with self._asking:
            if self._asked < after:
                self._asked = time.monotonic()
                self._answer = _squeue()
            return self._answer


@dataclass(frozen=True)
class _State:
    number: str
    name: str  # PENDING, RUNNING, …


def _squeue() -> Mapping[str, _State] | None:
    # These variables are a user's filters and formats.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SQUEUE_")}
    done = subprocess.run(
        [
            *("squeue", "--user", str(os.getuid()), "--all", "--states=all"),
            *("--noheader", "--format=%A|%T|%o"),
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        return None
    jobs = {}
    for line in done.stdout.splitlines():
        number, name, script = line.split("|", 2)
        jobs[number] = jobs[script.strip()] = _State(number, name)
    return jobs


def _exit_file(script: Path) -> Path:
    return script.with_name(f"{script.name}.exit")


# --- Common ---------------------------------------------------------------------------------------


LAUNCHERS: dict[str, Launcher] = {
    "mpirun": Mpirun(),
    "torchrun": Torchrun(),
    "process": OneProcess(),
    "slurm": Slurm(),
}


def last_output(log: Path) -> str:
    """Return the output of the latest start so far."""
    text = f"\n{log.read_bytes().decode(errors='replace')}"
    return text[text.rfind("\n$ ") + 1 :].partition("\n")[2]


def _mpirun(processes: int) -> list[str]:
    return ["mpirun", "-np", str(processes)] if processes > 1 else []


def _guard(*arguments: str | int | Path) -> list[str]:
    # Without site-packages, Python starts in half the time.
    return [sys.executable, "-I", "-S", str(GUARD), *map(str, arguments)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _failed(job: Job, complaint: str) -> int:
    with job.log.open("a") as log:
        log.write(f"error: {complaint}\n")
    return 1


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _read(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; {} if it is missing or incomplete."""
    try:
        content = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    assert isinstance(content, dict)
    return content


def _write_record(file: Path, script: Path, number: str) -> None:
    content = {"script": script.name, "job": number}
    write_atomically(file, json.dumps(content) + "\n")
