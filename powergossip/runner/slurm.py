"""Launcher of Slurm jobs.

sbatch reads further options from the environment: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_GRES, SBATCH_QOS, SBATCH_MEM_PER_CPU, SBATCH_CONSTRAINT, …  (man sbatch,
INPUT ENVIRONMENT VARIABLES). With SBATCH_SIGNAL=B:USR1@120 train.py writes a checkpoint two minutes
before the time limit. Jobs have the environment and the working directory of the runner and must
see its folders. Slurm may requeue a job (--requeue). Its command then starts again. mpirun starts
the processes, not srun, since that requires no MPI plugin of Slurm. Open MPI reads Slurm's
allocation and starts its daemons on further nodes with srun.
"""

import json
import os
import secrets
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from powergossip.atomic_files import write_atomically
from powergossip.errors import BadInput
from powergossip.runner.jobs import (
    SLURM,
    CannotRun,
    Job,
    alone,
    environment,
    failed,
    guard,
    mpirun_command,
    read,
)

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
                    "use another --launcher"
                )
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
        if "is UP" not in ping.stdout:
            answer = _first_line(ping.stdout + ping.stderr)
            raise BadInput(
                f"--launcher slurm: Slurm's controller does not respond, `scontrol ping` prints "
                f'"{answer}"; try again later, or use another --launcher'
            )

    def __call__(self, job: Job) -> int:
        try:
            script, number = self._submitted(job)
        except CannotRun as error:
            return failed(job, str(error))
        state = self._end(script, number)
        code = self._exit_code(script, state)
        if code is None:
            code = failed(
                job, f"Slurm's job {number} has gone without an exit code; its last state: {state}"
            )
        # The record is removed first: without it, the other files are ignored.
        for file in (script.with_name(SLURM), script, _exit_file(script)):
            file.unlink(missing_ok=True)
        return code

    def leave(self) -> None:
        self._leaving.set()

    def _submitted(self, job: Job) -> tuple[Path, str]:
        """Script and number of the job: an earlier runner's job, or a new one."""
        folder = job.folder.resolve()
        with alone(folder, self._patience) as lock:
            record = folder / SLURM
            if record.exists():
                before = read(record)
                script, number = folder / before.get("script", "none"), before.get("job", "")
                # Without a number, the earlier runner ended before sbatch returned. sbatch has
                # ended too, since it also held the lock.
                number = number or self._find(script) or read(_exit_file(script)).get("job", "")
                if number:
                    _write_record(record, script, number)
                    return script, number
                record.unlink()
            for old in folder.glob("slurm-*.sh*"):
                old.unlink()
            script = folder / f"slurm-{secrets.token_hex(4)}.sh"
            reported = [*guard("reported", script), *mpirun_command(job.processes), *job.command]
            write_atomically(script, f"#!/bin/sh\nexec {shlex.join(reported)}\n")
            _write_record(record, script, "")
            number = self._sbatch(job, script, lock)
            _write_record(record, script, number)
            return script, number

    def _sbatch(self, job: Job, script: Path, lock: IO[str]) -> str:
        """Submit a script. Return the number of the job. Raises CannotRun."""
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
            env=environment() | slots,
            pass_fds=[lock.fileno()],
        )
        if done.returncode == 0:
            return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several
        try:
            number = self._find(script)  # sbatch may time out after a successful submission
        except CannotRun:
            number = ""
        if not number:
            script.unlink()
            script.with_name(SLURM).unlink()
            complaint = done.stderr.strip() or f"exit code {done.returncode}"
            raise CannotRun(f"sbatch refuses: {complaint}")
        return number

    def _find(self, script: Path) -> str:
        """The number of the job with this script, or "". Raises CannotRun if Slurm does not
        respond."""
        jobs = self._jobs(time.monotonic())
        if jobs is None:
            raise CannotRun("squeue failed; try again later")
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
            code = read(_exit_file(script)).get("exit_code")
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


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _write_record(file: Path, script: Path, number: str) -> None:
    content = {"script": script.name, "job": number}
    write_atomically(file, json.dumps(content) + "\n")
