"""A run whose processes fail at given points, under mpirun.

python tests/harness/failing.py PLAN FOLDER key=value …

PLAN is JSON with these keys, all of them optional:

    events  # a list of {process, point, count, signal, after, seconds, launcher}
    pace    # process → seconds that each of its steps takes longer
    files   # process → the largest size of a file that it can write, in bytes
    report  # false: no figure and no table at the end
    log     # path: each process appends its events to PATH-PROCESS, as they happen
    dump    # seconds after which a process writes its stacks to PATH-PROCESS

At a point, a process sends itself a signal, or with `launcher` mpirun, `after` seconds later. With
SIGSTOP it continues after `seconds`. In place of a signal, SLOW lets it sleep for that time, ERROR
raises an exception and EXIT calls sys.exit(3), both at once.
Points, of which `count` is the one with that index:

    begin     the Trainer is made. made: it has been made
    load      the data are loaded
    step      a step of training, from 0
    message   a message to another process, from 0
    evaluate  an evaluation, from 1
    save      a part of a checkpoint, from 1. With SIGKILL half of it is written
    publish   an index of checkpoints, from 1
    call      before or after a system call while a checkpoint is saved, from 0
    row       a row of measurements, from 1. With SIGKILL half of it is written
    end       the last block of a run. figure: its figure

For short: {"kill": {process: step}, "error": {process: step}, "exit": {process: step},
"stop": {process: [step, seconds]}, "save": process}, where the last one is killed in the second
checkpoint. Processes that are left print a row in JSON with
digests of their models, or with the error.
"""

import faulthandler
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train
from powergossip.errors import BadInput, Stopped
from powergossip.events.wall_clock import WallClock
from powergossip.network.resilient.messages import Wire
from powergossip.runs import checkpoints, configuration
from powergossip.runs.metrics import MetricsLog
from powergossip.training import construction, recorder
from powergossip.training.asynchronous.workers import EdgeWorkers
from powergossip.training.evaluation import Evaluation
from powergossip.training.execution import Together
from powergossip.training.trainer import Trainer
from tests.harness.system_calls import moments

plan: dict[str, Any] = json.loads(sys.argv[1])
process = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
log = f"{plan['log']}-{process}" if "log" in plan else os.devnull
found: list[Trainer] = []
counts: Counter[str] = Counter()
gaps = {"longest": 0.0, "overshoot": 0.0}  # seconds between steps, and after deadlines
late = 0  # exchanges


def events() -> list[dict[str, Any]]:
    listed = list(plan.get("events", ()))
    for kind, signal_name in (("kill", "SIGKILL"), ("error", "ERROR"), ("exit", "EXIT")):
        for key, step in plan.get(kind, {}).items():
            event = {"process": int(key), "point": "step", "count": step}
            listed.append(event | {"signal": signal_name})
    for key, (step, seconds) in plan.get("stop", {}).items():
        event = {"process": int(key), "point": "step", "count": step, "signal": "SIGSTOP"}
        listed.append(event | {"seconds": seconds})
    if "save" in plan:
        listed.append({"process": plan["save"], "point": "save", "count": 2, "signal": "SIGKILL"})
    return [event for event in listed if str(event["process"]) == process]


own = events()


def at(point: str, count: int, before_kill: Callable[[], Any] = lambda: None) -> None:
    """Let the events of a point happen."""
    for event in own:
        if (event["point"], event.get("count", count)) == (point, count):
            if event.get("after"):
                threading.Timer(event["after"], happen, [event]).start()
                continue
            if event["signal"] == "SIGKILL":
                before_kill()
            happen(event)


def happen(event: dict[str, Any]) -> None:
    pid = launcher() if event.get("launcher") else os.getpid()
    with open(log, "a") as file:
        file.write(json.dumps(event | {"time": time.time()}) + "\n")
    if event["signal"] == "SLOW":
        time.sleep(event["seconds"])
        return
    if event["signal"] == "ERROR":
        raise RuntimeError("an error of one process")
    if event["signal"] == "EXIT":
        sys.exit(3)
    number = signal.Signals[event["signal"]]
    if number == signal.SIGSTOP:
        subprocess.Popen(["sh", "-c", f"sleep {event['seconds']}; kill -CONT {pid}"])
    os.kill(pid, number)


def launcher() -> int:
    """The process of mpirun, from a name such as prterun-host-PID@1."""
    return int(os.environ["PMIX_NAMESPACE"].rpartition("@")[0].rpartition("-")[2])


def counted(point: str) -> int:
    counts[point] += 1
    return counts[point]


def before(point: str, function: Any, first: int = 1) -> Any:
    """The function, with a point before each call."""

    def call(*arguments: Any, **options: Any) -> Any:
        at(point, counted(point) - 1 + first)
        return function(*arguments, **options)

    return call


def with_steps(compute: Any) -> Any:
    last = [time.monotonic()]

    def gradient(self: EdgeWorkers, worker: int, steps: int) -> None:
        if steps > 2:
            gaps["longest"] = max(gaps["longest"], time.monotonic() - last[0])
        last[0] = time.monotonic()
        if worker == min(self.rows):
            step(steps)
        if own:
            last[0] = time.monotonic()
        compute(self, worker, steps)

    return gradient


def with_common_steps(take: Any) -> Any:
    def train_step(self: Together, epoch: int, index: int) -> Any:
        step(self.step)
        return take(self, epoch, index)

    return train_step


def step(steps: int) -> None:
    time.sleep(plan.get("pace", {}).get(process, 0))
    at("step", steps)


def with_lateness(find_late: Any) -> Any:
    def find(self: WallClock, worker: Any) -> None:
        global late
        now = time.monotonic()
        for j in worker.waiting_for() if self.survives else ():
            if now > (due := self._due(worker.index, j)):
                late += 1
                gaps["overshoot"] = max(gaps["overshoot"], now - due)
        find_late(self, worker)

    return find


def with_parts(write: Any) -> Any:
    def part(path: Path, *arguments: Any) -> Any:
        at("save", counted("save"), lambda: path.write_bytes(b"half"))
        return write(path, *arguments)

    return part


def with_calls(save: Any) -> Any:
    def saved(self: checkpoints.Checkpoints, *arguments: Any, **options: Any) -> None:
        with moments(lambda _: at("call", counted("call") - 1)):
            save(self, *arguments, **options)

    return saved


def with_rows(write: Any) -> Any:
    def row(self: MetricsLog, *arguments: Any) -> Any:
        at("row", counted("row"), lambda: self._file.write(b'{"name": "half'))
        return write(self, *arguments)

    return row


def with_making(begin: Any) -> Any:
    def init(self: Trainer, *arguments: Any, **options: Any) -> None:
        at("begin", 0)
        begin(self, *arguments, **options)
        found.append(self)
        at("made", 0)

    return init


EdgeWorkers.compute = with_steps(EdgeWorkers.compute)  # type: ignore[method-assign]
Together.train_step = with_common_steps(Together.train_step)  # type: ignore[method-assign]
WallClock.find_late = with_lateness(WallClock.find_late)  # type: ignore[method-assign]
Wire.send = before("message", Wire.send, first=0)  # type: ignore[method-assign]
checkpoints.write_part = with_parts(checkpoints.write_part)
checkpoints.Checkpoints.publish = before(  # type: ignore[method-assign]
    "publish", checkpoints.Checkpoints.publish
)
checkpoints.Checkpoints.save = with_calls(  # type: ignore[method-assign]
    checkpoints.Checkpoints.save
)
MetricsLog.write = with_rows(MetricsLog.write)  # type: ignore[method-assign]
Trainer.__init__ = with_making(Trainer.__init__)  # type: ignore[method-assign]
Trainer.end = before("end", Trainer.end)  # type: ignore[method-assign]
Evaluation.__call__ = before("evaluate", Evaluation.__call__)  # type: ignore[method-assign]
construction.make_task = before("load", construction.make_task)
if not plan.get("report", True):
    recorder.report = lambda *_: None
recorder.report = before("figure", recorder.report)
if "dump" in plan:
    faulthandler.dump_traceback_later(plan["dump"], file=open(log, "a"))  # noqa: SIM115
if process in plan.get("files", {}):
    most = plan["files"][process]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
row: dict[str, Any] = {"process": int(process)}


def main(arguments: list[str]) -> None:
    try:
        train.main(["log_verbosity=0", *arguments[2:], "--output-dir", arguments[1]])
    except (BadInput, Stopped) as error:
        print(json.dumps(row | {"error": str(error)}), flush=True)
        raise


configuration.run_entry_point(main)
(trainer,) = found
network = trainer.network
for worker, x, bits in zip(network.workers, trainer.parameters.x, network.bits, strict=True):
    digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()
    row |= {"worker": worker, "digest": digest, "bits": int(bits)}
    row |= {**gaps, "late": late, "seconds": trainer.execution.watch.seconds}
    sys.stdout.write(json.dumps(row) + "\n")
sys.stdout.flush()
