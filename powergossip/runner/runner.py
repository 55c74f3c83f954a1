"""Runs of an experiment. Each is carried out once.

A run is an entry point with values for its keys and a number of processes. Its folder,
output/experiments/EXPERIMENT/HASH, is named by a hash of these.
It contains the output of the entry point, log.txt, run.json (the run itself) and done.json
(seconds, versions, commit). done.json is written last, atomically, after a successful end, so that
an incomplete run never counts. A run that was killed resumes from its last checkpoint.
"""

import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from powergossip.atomic_files import write_atomically
from powergossip.errors import BadInput
from powergossip.runner.jobs import Job, last_output, mpirun_command
from powergossip.runner.launchers import LAUNCHERS, STOP, Launcher
from powergossip.runs import metrics

if TYPE_CHECKING:
    from pandas import DataFrame

ROOT = Path(__file__).resolve().parents[2]  # the folder of train.py
OUTPUT = Path("output/experiments")
JOBS = 64  # default limit of concurrent Slurm jobs

Values = dict[str, Any]  # of the keys of an entry point


@dataclass(frozen=True)
class Run:
    """An entry point with values for its keys.

    Attributes:
        entry: Module with the program: train, gossip_run, or one of the package.
        labels: Names of this run in reports, not part of its identity.
        processes: Number of MPI processes. 1: no launcher.
    """

    entry: str
    values: Mapping[str, Any]
    labels: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1

    @property
    def links(self) -> Mapping[str, str]:
        """Inputs that determine the result, beside entry, values and processes."""
        return {}

    @property
    def identity(self) -> str:
        """Hash of everything that determines the result."""
        content = [self.entry, self.processes, dict(self.values), *self.links.values()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def program(self) -> list[str]:
        """The command without launcher and output folder."""
        values = [f"{key}={yaml_text(value)}" for key, value in self.values.items()]
        if "." in self.entry:  # not found in the present folder, which may have modules of its name
            return [sys.executable, "-P", "-m", self.entry, *values]
        return [sys.executable, str(ROOT / f"{self.entry}.py"), *values]

    @property
    def launched(self) -> int:
        """Number of processes that the launcher starts."""
        return self.processes

    @property
    def command(self) -> list[str]:
        """The command on this machine, without the output folder."""
        return [*mpirun_command(self.launched), *self.program]

    def cores(self, available: int) -> int:
        """Return the cores reserved for the run."""
        return min(self.processes, available)

    def check(self, launcher: str) -> None:
        """Raise BadInput if this run cannot be carried out on this machine."""
        if self.entry == "train" and launcher != "slurm":
            names = ("task", "task_options", "data_dir", "download")
            given = {name: self.values[name] for name in names if name in self.values}
            _check_data(json.dumps(given, sort_keys=True))


@cache
def _check_data(given: str) -> None:
    """Raise BadInput if the data of a task, keys of train.py as JSON, are missing or damaged."""
    from powergossip import tasks
    from powergossip.training.config import Config

    values = json.loads(given)
    try:
        tasks.make(values.pop("task", Config.task), n_workers=1, batch_size=1, seed=1, **values)
    except ValueError as error:
        raise BadInput(str(error)) from error


Results = Callable[[Run], "DataFrame"]  # the rows of a completed run


@dataclass(frozen=True)
class Experiment:
    """A question, the runs that answer it, and a report of their rows.

    Attributes:
        title: The question, in one line.
        stages: Functions that return runs, given the results of earlier stages (tuning, final
            runs).
        report: Function that writes figures into a folder and returns Markdown, which refers to
            them by name.
        independent: True if a stage has runs although others of the previous stage have failed.
    """

    title: str
    stages: Sequence[Callable[[Results], list[Run]]]
    report: Callable[[Results, Path], str]
    independent: bool = False


def sentence_case(text: str) -> str:
    """Return the text with its first letter capitalized."""
    return text[:1].upper() + text[1:]


class Terminated(KeyboardInterrupt):
    """SIGTERM to the runner, which ends it as Ctrl-C does."""


class Folder:
    """The folder of an experiment, with a folder for each run."""

    def __init__(self, name: str, output: Path = OUTPUT):
        self.path = Path(output) / name

    def of(self, run: Run) -> Path:
        return self.path / run.identity

    def state(self, run: Run) -> str:
        """Return "done", "failed", "begun" or "new"."""
        folder = self.of(run)
        if (folder / "done.json").exists():
            return "done"
        if (folder / "failed.json").exists():
            return "failed"
        return "begun" if folder.exists() else "new"

    def results(self, run: Run) -> "DataFrame":
        """Return the rows of a run. Raises ValueError if it is not done."""
        if self.state(run) != "done":
            raise ValueError(f"{_name(run)} is {self.state(run)}, see {self.of(run)}")
        return metrics.load(self.of(run))

    def provenance(self, experiment: Experiment) -> str:
        """Return a sentence with the number of runs, time, versions and machine."""
        runs = {run.identity: run for stage in self.runs(experiment) for run in stage}
        done = [_read(self.of(run) / "done.json") for run in runs.values()] or [circumstances()]
        seconds = sum(facts.get("seconds", 0) for facts in done)

        def all_of(key: str) -> str:
            return ", ".join(sorted({str(facts.get(key, "unknown")) for facts in done}))

        took = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
        return (
            f"{len(runs)} runs, {took} in total, Python {all_of('python')}, "
            f"torch {all_of('torch')}, {all_of('cores')} cores, {all_of('processor')}, "
            f"{all_of('date')}, commit {all_of('commit')}."
        )

    def runs(self, experiment: Experiment) -> Iterator[list[Run]]:
        """Yield the runs of each stage, up to the first that depends on missing results."""
        for stage in experiment.stages:
            try:
                runs = stage(self.results)
            except ValueError:  # an earlier stage is not done
                return
            yield runs

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the experiment. Raises BadInput if another runner has the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BadInput(f"{self.path} is in use by another runner; wait for it") from error
            yield


def carry_out(
    experiment: Experiment, folder: Folder, cores: int | None, launcher: str = "mpirun"
) -> list[Run]:
    """Carry out the runs that are not done. Return those that failed.

    Concurrent runs have at most `cores` cores in total. With Slurm there are at most `cores` jobs.
    None: all cores of this machine, or 64 jobs.
    A failed run does not stop the others, and is repeated by the next call. Raises BadInput if the
    launcher, one of `LAUNCHERS`, cannot be used here.
    """
    start = LAUNCHERS[launcher]()
    cores = cores or (JOBS if launcher == "slurm" else os.cpu_count() or 1)
    failed: list[Run] = []
    for number, stage in enumerate(experiment.stages, 1):
        runs = list({run.identity: run for run in stage(folder.results)}.values())
        left = [run for run in runs if folder.state(run) != "done"]
        if not left:
            continue
        for run in left:
            run.check(launcher)
        print(f"stage {number} of {len(experiment.stages)}: {len(left)} of {len(runs)} runs")
        if launcher != "mpirun" or any(run.processes > 1 for run in left):
            start.check()
        ended = _Ended(len(left))
        wanted = [1 if launcher == "slurm" else run.cores(cores) for run in left]
        with _terminable(), ThreadPoolExecutor(cores) as pool:

            def one(run: Run, ended: "_Ended" = ended) -> bool:
                ok = carry_out_one(run, folder.of(run), start)
                ended.print(run, folder)
                return ok

            try:
                calls = [partial(one, run) for run in left]
                outcome = in_turn(pool, calls, wanted, cores)
            except KeyboardInterrupt:
                print("stopping; run again to resume", file=sys.stderr, flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                start.leave()
                raise
        failed += [run for run, ok in zip(left, outcome, strict=True) if not ok]
        if failed and not experiment.independent:
            break  # the next stage depends on all of them
    return failed


def in_turn(
    pool: Executor, calls: Sequence[Callable[[], bool]], wanted: Sequence[int], cores: int
) -> list[bool]:
    """The results of calls that hold `wanted` cores each. Raises the first exception.

    This thread begins all of them, so that none begins after a signal. It wakes up all the time: a
    signal that arrives immediately before it starts to wait would be noticed only when the wait is
    over.
    """
    futures: list[Future[bool]] = []
    held: dict[Future[bool], int] = {}  # running → its cores
    while held or len(futures) < len(calls):
        while (n := len(futures)) < len(calls) and sum(held.values()) + wanted[n] <= cores:
            futures.append(pool.submit(calls[n]))
            held[futures[-1]] = wanted[n]
        for future in wait(held, timeout=0.5, return_when=FIRST_COMPLETED).done:
            future.result()
            del held[future]
    return [future.result() for future in futures]


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise Terminated on SIGTERM. A second one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, before)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def carry_out_one(run: Run, folder: Path, launcher: Launcher) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failed.json").unlink(missing_ok=True)
    facts = {"entry": run.entry, "processes": run.processes, "values": dict(run.values)}
    _write_json(folder / "run.json", {**facts, **run.links})
    again = "overwrite=true" if run.entry == "gossip_run" else "resume=auto"
    how = [again, "log_verbosity=0", "--output-dir", str(folder)]
    start, log = time.perf_counter(), folder / "log.txt"
    name = f"{folder.parent.name}-{folder.name}"
    code = launcher(Job([*run.program, *how], run.launched, log, folder, name))
    seconds = time.perf_counter() - start
    # Divergence of a setting is a result.
    lines = last_output(log).splitlines()
    diverged = code != 0 and any(line.startswith("error: diverged") for line in lines)
    end = {"seconds": round(seconds, 2), "exit_code": code, "diverged": diverged}
    ok = code == 0 or diverged
    if code != 128 + STOP:
        _write_json(folder / ("done.json" if ok else "failed.json"), end | circumstances())
    return ok


@cache
def circumstances() -> dict[str, Any]:
    """Versions, commit, machine and date."""

    def git(*arguments: str) -> str:
        try:
            found = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True
            )
        except OSError:
            return ""
        return found.stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "commit": (git("rev-parse", "--short", "HEAD") + changed) or "unknown",
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class _Ended:
    """A line for each run that has ended, with an estimate of the remaining time."""

    def __init__(self, number: int):
        self._number, self._ended = number, 0
        self._start = time.perf_counter()
        self._lock = threading.Lock()

    def print(self, run: Run, folder: Folder) -> None:
        with self._lock:
            self._ended += 1
            elapsed = time.perf_counter() - self._start
            left = elapsed / self._ended * (self._number - self._ended) / 60
            state, log = folder.state(run), folder.of(run) / "log.txt"
            failed = f"FAILED, see {log}{_last_line(log)}"
            outcome = {"done": "done", "failed": failed, "begun": "stopped"}[state]
            remain = self._ended < self._number and state != "begun"
            more = f"; about {left:.0f} min left for the others" if remain else ""
            print(f"  {self._ended}/{self._number}  {_name(run)}: {outcome}{more}", flush=True)


def _last_line(log: Path) -> str:
    """The last sentence of a program, or the last line without mpirun's lines of dashes."""
    lines = last_output(log).split("\n") if log.exists() else []
    errors = [line for line in lines if line.startswith("error: ")]
    return next((f": {line.strip()}" for line in reversed(errors or lines) if line.strip(" -")), "")


def _name(run: Run) -> str:
    labels = ", ".join(f"{key}={value}" for key, value in run.labels.items())
    return labels or run.identity


def yaml_text(value: Any) -> str:
    """The value in an argument key=value."""
    if isinstance(value, str):
        return value
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).split("\n...")[0].strip()
    )


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; {} if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")
