"""A case of the fuzz harness in real processes, and the invariants of its run.

Processes are killed, stopped or interrupted at points of the run, or cannot write large files
(tests/harness/failing.py). Then:

- mpirun ends, with an exit code that docs/checkpoints.md and docs/when-workers-fail.md name.
- There is no traceback but of exceptions that were raised, and a sentence where the exit code is
  not 0. An exception before the processes are connected ends all of them: its traceback and the
  process' index are the sentence.
- Processes that did not fail are there at the end. None of their workers is among the lost ones.
- Rows of every evaluated epoch are there once, and the number of workers does not grow.
- The last checkpoint is whole, and the run resumes from it to its end.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import train
from powergossip.network import Processes
from powergossip.network.resilient.worker_messages import LOST
from powergossip.runs import files, metrics, output
from powergossip.runs.checkpoints import FOLDER, Checkpoints
from tests.harness import launch
from tests.harness.asynchronous import ULFM
from tests.harness.fuzz_cases import ERRORS, Case, Fault, require

LONGEST = 40.0  # seconds of a run on an idle machine
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}  # exit codes


def run(case: Case) -> str:
    """Run a case. Returns its outcome: complete, stopped, or rejected. Raises Fault."""
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        folder = base / "run"
        ended = _Ended(case, case.plan, folder, base / "log")
        try:
            outcome = ended.check()
            if outcome == "rejected":
                return outcome
            if outcome == "complete":
                _check_rows(case, ended)
                _check_last_step(case, folder)
            check_checkpoint(folder)
            _check_resume(case, ended, outcome, base)
        except Exception:
            print(f"exit code {ended.code}, {ended.ending}, after {ended.happened}\n{ended.text}")
            raise
    return f"{outcome}, then resumed"


# --- A run ---


def longest(seconds: float) -> float:
    """Seconds that a run may take on this machine, of one that takes as long on an idle one."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class _Ended:
    """A run under mpirun that has ended, and what has failed in it.

    happened  # events, as far as they happened
    rows      # of the processes that reached the end
    """

    def __init__(
        self, case: Case, plan: Mapping[str, Any], folder: Path, log: Path, **changes: Any
    ):
        self._case, self.folder = case, folder
        values = {**case.train, **changes}
        words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        survives = values.get("on_worker_loss", "end") != "end"
        stopped = sum(event.get("seconds", 0) for event in plan.get("events", ()))
        limit = longest(LONGEST) + stopped
        plan = {**plan, "log": str(log), "dump": limit - 10}
        try:
            ended = launch.python(
                "tests/harness/failing.py",
                json.dumps(plan),
                folder,
                *words,
                processes=case.processes,
                options=ULFM if survives else (),
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            stacks = [f"{file.name}:\n{file.read_text()}" for file in log.parent.glob("log-*")]
            raise Fault("\n".join([f"no end after {limit:.0f} s", *stacks])) from error
        self.code, self.text = ended.returncode, ended.stdout + ended.stderr
        self.survives = survives
        self.happened: list[dict[str, Any]] = []
        for file in log.parent.glob(f"{log.name}-*"):
            self.happened += [
                json.loads(line) for line in file.read_text().splitlines() if line[:1] == "{"
            ]
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        found = [json.loads(line) for line in lines]
        self.rows = [row for row in found if "digest" in row]
        info = folder / files.INFO_FILE
        facts = json.loads(info.read_text()) if info.exists() else {}
        self.ending, self._lost = facts.get(output.ENDING), facts.get("lost_workers", [])

    def check(self) -> str:
        """Check exit code, sentences and survivors. Returns the outcome."""
        lost = ("SIGKILL", *ERRORS)
        killed = {e["process"] for e in self.happened if e["signal"] in lost}
        errors = sum(e["signal"] == "ERROR" for e in self.happened)
        signals = [e for e in self.happened if e["signal"] in SIGNALS]
        may_be_full = self._case.plan.get("files")
        own = killed if not self.survives else set()
        require(self.text.count("Traceback") <= errors, "no other traceback")
        if self.code == 2 and self._is_rejection():
            return "rejected"
        stops = [e for e in self.happened if e["signal"] == "SIGSTOP"]
        timeout = self._case.train.get("worker_timeout", 1e9)
        dropped = {e["process"] for e in stops if e["seconds"] > timeout - 0.5}
        codes = {0, LOST} if self.survives and killed | dropped else {0}
        for event in signals:
            ends_all = event.get("launcher") and event["signal"] != "SIGUSR1"
            codes.add(1 if ends_all else SIGNALS[event["signal"]])
        codes |= {2, LOST} if may_be_full else set()
        rows = self.folder / metrics.FILE
        at_start = 0 in killed or any(e["point"] in ("begin", "load") for e in self.happened)
        if at_start and not (rows.exists() and rows.stat().st_size):
            codes.add(1)  # before the processes were connected, or the output folder was ready
        if own:
            require(self.code != 0 or self.ending == output.COMPLETE, "a kill ends the job")
        else:
            require(self.code in codes, f"exit code {self.code} is one of {codes}")
        by_launcher = any(e.get("launcher") and e["signal"] != "SIGUSR1" for e in signals)
        if self.code and not own and not by_launcher:
            words = "complete with" if self.code == LOST else "error: "
            raised = self.code == 1 and errors and " failed:\nTraceback" in self.text
            require(words in self.text or raised, "a sentence")
        if self.code not in (0, LOST):
            return f"code {self.code}"
        require(self.ending == output.COMPLETE, f"the ending is complete, not {self.ending}")
        interrupted = {e["process"] for e in signals if not e.get("launcher")}
        there = {row["process"] for row in self.rows}
        needed = set(range(self._case.processes)) - killed - dropped - interrupted
        if not may_be_full:
            require(needed <= there, f"processes {needed} reach the end, not {there}")
        hosted = self._case.train["n_workers"] // self._case.processes
        failed = killed | dropped | interrupted
        if not may_be_full:
            of_failed = {w // hosted for w in self._lost} <= failed
            require(of_failed, f"the workers {self._lost} were those of failed processes")
        require(self.code == LOST or not self._lost, f"code {LOST} without {self._lost}")
        return "complete"

    def _is_rejection(self) -> bool:
        sentence = next((x for x in self.text.splitlines() if x.startswith("error: ")), "")
        key = sentence.removeprefix("error: ").partition("=")[0].partition(".")[0]
        return key in OmegaConf.structured(train.Config)


# --- Rows ---


def _check_rows(case: Case, ended: _Ended) -> None:
    """Rows of each evaluation once. Those of single workers as many as were there."""
    rows = metrics.load(ended.folder)
    tested = rows[rows["name"] == "accuracy"]
    due = case.due
    means = tested[tested["split"] == "test_avg"]["epoch"].tolist()
    require(means == due, f"rows test_avg of the epochs {due}, not {means}")
    n = case.train["n_workers"]
    if case.train["gossip"] != "synchronous" or ended.survives:
        counts = rows[rows["name"] == "workers"]
        require(counts["epoch"].tolist() == due, f"rows workers of {due}, not\n{counts}")
        alive = [int(value) for value in counts["value"]]
        require(alive == sorted(alive, reverse=True), f"workers {alive} do not grow")
        require(alive[0] <= n, f"{alive} of {n} workers")
    else:
        alive = [n] * len(due)
    single = tested[tested["split"] == "test"]
    least = len(ended.rows)
    for epoch, before in zip(due, alive, strict=True):
        workers = single[single["epoch"] == epoch]["worker"].tolist()
        twice = [worker for worker, times in Counter(workers).items() if times > 1]
        require(not twice, f"rows of worker {twice} once in epoch {epoch}")
        ok = least <= len(workers) <= before
        require(ok, f"{len(workers)} rows of workers in epoch {epoch}, of {before}")
    last = set(single[single["epoch"] == due[-1]]["worker"])
    there = {row["worker"] for row in ended.rows}
    require(there <= last, f"rows of the workers {there} at the end, not {last}")


# --- Checkpoints ---


def check_checkpoint(folder: Path, has_own_parts: bool = False) -> None:
    """The last and the best checkpoint are whole, with their rows.

    Args:
        has_own_parts: True if the parts of other processes are elsewhere.
    """
    index = folder / FOLDER / "index.json"
    if not index.exists():
        return
    found = json.loads(index.read_text())
    for entry in (found["last"], found["best"]):
        for part in entry["parts"] if entry else ():
            file = index.parent / entry["folder"] / part["file"]
            if has_own_parts and not file.exists():
                continue
            whole = hashlib.sha256(file.read_bytes()).hexdigest() == part["sha256"]
            require(whole, f"{file} is whole")
    if found["last"]:
        offset = found["last"]["facts"]["metrics_bytes"]
        rows = metrics.kept_rows(folder / metrics.FILE, offset, allow_lost_rows=True)
        require(len(rows) == offset, "its rows are there")


def _check_last_step(case: Case, folder: Path) -> None:
    entry = Checkpoints(folder, Processes()).describe()
    steps = case.train["num_epochs"] * case.train["max_steps_per_epoch"]
    require(entry is not None and entry["step"] == steps, f"a checkpoint of step {steps}")


def _check_resume(case: Case, ended: _Ended, outcome: str, base: Path) -> None:
    """The same command completes the run, or prolongs one that is complete."""
    epochs = case.train["num_epochs"] + (outcome == "complete")
    changes = {"resume": "auto", "num_epochs": epochs}
    again = _Ended(case, {"report": False}, ended.folder, base / "again", **changes)
    try:
        if outcome != "complete" and again.code == 2 and again.check() == "rejected":
            return  # the first run had failed before the method was checked
        require(again.code == 0, f"the run resumes, exit code {again.code}")
        require(again.check() == "complete", "the resumed run is complete")
        there = {row["process"] for row in again.rows}
        require(there == set(range(case.processes)), "all processes are there again")
        due = case.due if epochs in case.due else sorted({*case.due, epochs})
        rows = metrics.load(ended.folder)
        tested = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]
        require(tested["epoch"].tolist() == due, f"resumed: rows of {due}, not\n{tested}")
        check_checkpoint(ended.folder)
    except Fault:
        print(f"resumed: exit code {again.code}\n{again.text}")
        raise
