"""How a run is started, and where: on this machine, or as a job of Slurm.

    mpirun     here, by `mpirun -np N` for N > 1 processes
    process    here, all workers in one process: n_workers=N instead of N processes, same numbers
    slurm      by `sbatch`; in the job, `mpirun -np N` for N > 1 processes

A launcher returns when the job has ended, with its exit code, 128 + the signal's number if a signal
has ended it. Every start is a line `$ COMMAND` in the log, see `last_output`. What a launcher
itself has to complain about is a line `error: …` there, with exit code 1, so that one job stops no
other. Launchers can be called in several threads at a time.

Nothing runs twice at a time in a folder, however a runner ends, and whatever launcher the next one
uses. On this machine, what a runner has started gets SIGUSR1 when the runner is gone, even by
SIGKILL, or leaves (Ctrl-C): train.py then writes a checkpoint and ends, and other programs just
end. folder/running stays locked until the last of the processes has ended, and the next start waits
for that. Jobs of Slurm go on without the runner (`scancel` ends them), and the next one waits for
the same jobs; folder/slurm.json tells which these are.

Slurm. sbatch itself reads further options from the environment: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_GRES, SBATCH_QOS, SBATCH_MEM_PER_CPU, SBATCH_CONSTRAINT, …  (man sbatch,
INPUT ENVIRONMENT VARIABLES). SBATCH_SIGNAL=B:USR1@120 lets train.py write a checkpoint two minutes
before the time limit. Jobs have the environment and the working directory of the runner, whose
folders they must see. Slurm may put a job back into its queue (--requeue): its command starts
again. mpirun, and not srun, starts the processes: that takes no MPI plugin of Slurm. Open MPI reads
Slurm's allocation, and starts its daemons on further nodes by srun.
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

GUARD = Path(__file__).resolve().with_name("guard.py")

# What a job here gets when it shall end. Not SIGTERM: mpirun hands that on as well, but kills its
# processes half a second later.
STOP = signal.SIGUSR1

# In a run's folder:
RUNNING = "running"  # locked, by those who start the run and by its processes
SLURM = "slurm.json"  # a job of Slurm that nobody has seen the end of: its number and script

# Of a job that does nothing any more, unless Slurm says something else later.
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

    command    without launcher: python train.py key=value …
    processes  MPI processes
    log        what it writes is appended here
    folder     its own; no two jobs of a folder run at a time
    name       for humans
    """

    command: Sequence[str]
    processes: int
    log: Path
    folder: Path
    name: str


class Launcher(Protocol):
    def check(self) -> None:
        """Raises BadInput if this launcher cannot be used here."""

    def __call__(self, job: Job) -> int:
        """Run it and wait for its end; the exit code."""

    def leave(self) -> None:
        """The runner was asked to end (Ctrl-C). Jobs here are told to, and what waits for one
        returns with its exit code. Jobs of Slurm go on; what waits for one raises
        KeyboardInterrupt, as does whoever starts another job."""


class _Refused(Exception):
    """A job cannot be run; the text is for its log."""


# --- On this machine ------------------------------------------------------------------------------


class _Here:
    """Who calls `leave` from another thread has all its jobs told to end."""

    def __init__(self, patience: float = 60.0):
        """patience: seconds that an earlier start of a job has to end"""
        self._patience = patience
        self._running: set[subprocess.Popen[bytes]] = set()
        self._leaving = False
        self._changing = threading.Lock()

    def leave(self) -> None:
        with self._changing:
            self._leaving = True
            for process in self._running:
                process.send_signal(STOP)

    def _run(self, job: Job, shown: Sequence[str], actual: Sequence[str]) -> int:
        """shown: the command that stands in the log"""
        try:
            with _alone(job.folder, self._patience) as lock, job.log.open("a") as log:
                _refuse_while_in_slurm(job.folder)
                fcntl.flock(lock, fcntl.LOCK_SH)
                with self._started(shown, actual, log, lock) as process:
                    code = process.wait()
        except _Refused as refusal:
            return _failed(job, str(refusal))
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
                [*_guard("bound", int(STOP), os.getpid()), *actual],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                pass_fds=[lock.fileno()],
                # Ctrl-C would end mpirun before anybody has written a checkpoint.
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
                "--launcher mpirun: there is no mpirun on PATH; activate the environment that "
                "setup.sh made, or use --launcher process"
            )

    def __call__(self, job: Job) -> int:
        mpirun = _mpirun(job.processes)
        # mpirun closes what it has inherited, so every process takes the lock for itself.
        locked = _guard("locked", job.folder.resolve() / RUNNING) if mpirun else []
        return self._run(job, [*mpirun, *job.command], [*mpirun, *locked, *job.command])


class OneProcess(_Here):
    """n_workers=N at the end of the command, unless it says n_workers= itself. No MPI."""

    def check(self) -> None:
        pass

    def __call__(self, job: Job) -> int:
        told = any(argument.startswith("n_workers=") for argument in job.command)
        workers = [] if told or job.processes == 1 else [f"n_workers={job.processes}"]
        command = [*job.command, *workers]
        return self._run(job, command, command)


def _refuse_while_in_slurm(folder: Path) -> None:
    file = folder / SLURM
    if file.exists():
        number = _read(file).get("job") or "without a number yet"
        raise _Refused(
            f"Slurm's job {number} does this run; use --launcher slurm, or end the job and "
            f"remove {file}"
        )


@contextmanager
def _alone(folder: Path, patience: float) -> Iterator[IO[str]]:
    """As long as the file is open, here or in a process that inherits it, no other start of a job
    in this folder gets here. Raises _Refused if patience ends first."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUNNING).open("a") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _Refused(
                        f"an earlier start of this run is still there after {patience:g} seconds; "
                        f"`fuser {folder / RUNNING}` tells its processes"
                    ) from None
            time.sleep(0.05)
        yield file


# --- Slurm ----------------------------------------------------------------------------------------


class Slurm:
    """A job of Slurm with N tasks on as many nodes as Slurm likes.

    A job is known by its script, folder/slurm-TOKEN.sh, even before sbatch has told a number. With
    the script's removal a job that has not started is given up: it ends at once when it starts. As
    its last act a job writes its exit code into slurm-TOKEN.sh.exit, since Slurm forgets jobs after
    a while (MinJobAge). A job that has gone without that has failed.

    All threads together ask Slurm for all jobs at once, and the less often the longer they wait.
    """

    def __init__(self, patience: float = 60.0, longest_interval: float = 10.0):
        self._patience = patience  # seconds for a lock to be free, or a file to show up
        self._longest_interval = longest_interval  # seconds
        self._leaving = threading.Event()
        self._asking = threading.Lock()
        self._asked = -float("inf")  # when the answer was asked for
        self._answer: Mapping[str, _State] | None = None

    def check(self) -> None:
        for tool in ("sbatch", "squeue", "scontrol"):
            if not shutil.which(tool):
                raise BadInput(
                    f"--launcher slurm: there is no {tool} on PATH; run this where Slurm is, or "
                    "use --launcher mpirun"
                )
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
        if "is UP" not in ping.stdout:
            said = _first_line(ping.stdout + ping.stderr)
            raise BadInput(
                f"--launcher slurm: Slurm's controller does not answer, `scontrol ping` says "
                f'"{said}"; try again later, or use --launcher mpirun'
            )

    def __call__(self, job: Job) -> int:
        try:
            script, number = self._submitted(job)
        except _Refused as refusal:
            return _failed(job, str(refusal))
        state = self._end(script, number)
        code = self._exit_code(script, state)
        if code is None:
            code = _failed(
                job, f"Slurm's job {number} has gone without an exit code; its last state: {state}"
            )
        # The record goes first: without it, the other files mean nothing.
        for file in (script.with_name(SLURM), script, _exit_file(script)):
            file.unlink(missing_ok=True)
        return code

    def leave(self) -> None:
        self._leaving.set()

    def _submitted(self, job: Job) -> tuple[Path, str]:
        """Script and number of the job that does this: an earlier runner's, else a new one."""
        folder = job.folder.resolve()
        with _alone(folder, self._patience) as lock:
            record = folder / SLURM
            if record.exists():
                before = _read(record)
                script, number = folder / before.get("script", "none"), before.get("job", "")
                # Without a number, the runner ended before sbatch; sbatch has ended, too, as the
                # lock was its own as well.
                number = number or self._find(script) or _read(_exit_file(script)).get("job", "")
                if number:
                    _write(record, json.dumps({"script": script.name, "job": number}))
                    return script, number
                record.unlink()
            for old in folder.glob("slurm-*.sh*"):
                old.unlink()
            script = folder / f"slurm-{secrets.token_hex(4)}.sh"
            reported = [*_guard("reported", script), *_mpirun(job.processes), *job.command]
            _write(script, f"#!/bin/sh\nexec {shlex.join(reported)}")
            _write(record, json.dumps({"script": script.name, "job": ""}))
            number = self._sbatch(job, script, lock)
            _write(record, json.dumps({"script": script.name, "job": number}))
            return script, number

    def _sbatch(self, job: Job, script: Path, lock: IO[str]) -> str:
        """The number of the job. Raises _Refused."""
        log = str(job.log.resolve()).replace("%", "%%")
        command = [
            *("sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={log}"),
            *(f"--ntasks={job.processes}", f"--job-name={job.name}", f"--chdir={os.getcwd()}"),
            str(script),
        ]
        # Slurm gives each node so many tasks. The policy that .venv sets, for more processes than
        # cores, would have Open MPI put all of them on the first node.
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
            number = self._find(script)  # sbatch may lose patience when it has been heard
        except _Refused:
            number = ""
        if not number:
            script.unlink()
            script.with_name(SLURM).unlink()
            complaint = done.stderr.strip() or f"exit code {done.returncode}"
            raise _Refused(f"sbatch refuses: {complaint}")
        return number

    def _find(self, script: Path) -> str:
        """The number of the job with this script, "" if there is none. Raises _Refused if Slurm
        does not tell."""
        jobs = self._jobs(time.monotonic())
        if jobs is None:
            raise _Refused("squeue does not tell what jobs there are; try again later")
        return jobs[str(script)].number if str(script) in jobs else ""

    def _end(self, script: Path, number: str) -> str:
        """Wait for it; the last state that Slurm tells. While the controller does not answer, the
        jobs go on, and this waits for both."""
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
                return "unknown, Slurm has forgotten it"
            if found.name in ENDED:
                return found.name

    def _exit_code(self, script: Path, state: str) -> int | None:
        """None if the job has not written any."""
        # After a state like CANCELLED there may be none. Otherwise there is one, and at most a
        # shared file system takes its time to show it.
        own_end = state not in ENDED or state in ("COMPLETED", "FAILED")
        end = time.monotonic() + (self._patience if own_end else 0)
        while True:
            os.listdir(script.parent)  # makes NFS look again
            code = _read(_exit_file(script)).get("exit_code")
            if isinstance(code, int):
                return code
            if time.monotonic() > end:
                return None
            if self._leaving.wait(0.2):
                raise KeyboardInterrupt

    def _jobs(self, after: float) -> "Mapping[str, _State] | None":
        """The user's jobs, those that have ended lately among them, by number and by script; asked
        for after that time, perhaps by another thread. None if Slurm does not answer."""
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
    # The variables are filters and formats that a user likes to see.
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


# --- For all --------------------------------------------------------------------------------------


LAUNCHERS: dict[str, Launcher] = {
    "mpirun": Mpirun(),
    "process": OneProcess(),
    "slurm": Slurm(),
}


def last_output(log: Path) -> str:
    """What the latest start has written, as far as it has come."""
    text = f"\n{log.read_bytes().decode(errors='replace')}"
    return text[text.rfind("\n$ ") + 1 :].partition("\n")[2]


def _mpirun(processes: int) -> list[str]:
    return ["mpirun", "-np", str(processes)] if processes > 1 else []


def _guard(*arguments: str | int | Path) -> list[str]:
    # Without what is installed in site-packages, Python starts in half the time.
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
    """{} if there is none, or it is not whole."""
    try:
        content = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    assert isinstance(content, dict)
    return content


def _write(file: Path, content: str) -> None:
    """In one piece."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(f"{content}\n")
    new.replace(file)
