"""A run whose processes fail at given points, under mpirun.

python tests/harness/failing.py PLAN FOLDER key=value …

PLAN is JSON with these keys, all of them optional:

    events  # a list of {process, point, count, signal, after, seconds, launcher}
    pace    # process → seconds that each of its steps takes longer
    files   # process → the largest size of a file that it can write, in bytes
    report  # false: no figure and no table at the end
    process # index of this process, by default its rank under mpirun
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

Processes that reach the end print a row in JSON for each of their workers, with a digest of x.
"""

import faulthandler
import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import train
from powergossip.network.internet.wire import InternetWire
from powergossip.network.resilient.messages import MPIWire
from powergossip.runs import checkpoints, configuration
from powergossip.runs.metrics import MetricsLog
from powergossip.training import construction, recorder
from powergossip.training.asynchronous.workers import EdgeWorkers
from powergossip.training.evaluation import Evaluation
from powergossip.training.stepping import Together
from powergossip.training.trainer import Trainer
from tests.harness.system_calls import moments

plan: dict[str, Any] = json.loads(sys.argv[1])
process = str(plan.get("process", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
log = f"{plan['log']}-{process}" if "log" in plan else os.devnull
own = [event for event in plan.get("events", ()) if str(event["process"]) == process]
found: list[Trainer] = []
system_calls = itertools.count()


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


def before(
    owner: Any, name: str, point: str, first: int = 1, half: Callable[..., Any] = lambda *_: None
) -> None:
    """Put a point before each call of a function. half: what is written before a SIGKILL there."""
    function, indices = getattr(owner, name), itertools.count(first)

    def call(*arguments: Any, **options: Any) -> Any:
        at(point, next(indices), lambda: half(*arguments))
        return function(*arguments, **options)

    setattr(owner, name, call)


def step(steps: int) -> None:
    time.sleep(plan.get("pace", {}).get(process, 0))
    at("step", steps)


def with_steps(compute: Any) -> Any:
    def gradient(self: EdgeWorkers, worker: int, steps: int) -> None:
        if worker == min(self.rows):
            step(steps)
        compute(self, worker, steps)

    return gradient


def with_common_steps(take: Any) -> Any:
    def train_step(self: Together, epoch: int, index: int) -> Any:
        step(self.step)
        return take(self, epoch, index)

    return train_step


def with_calls(save: Any) -> Any:
    def saved(self: checkpoints.Checkpoints, *arguments: Any, **options: Any) -> None:
        with moments(lambda _: at("call", next(system_calls))):
            save(self, *arguments, **options)

    return saved


def with_making(begin: Any) -> Any:
    def init(self: Trainer, *arguments: Any, **options: Any) -> None:
        at("begin", 0)
        begin(self, *arguments, **options)
        found.append(self)
        at("made", 0)

    return init


def half_a_row(self: MetricsLog, *_: Any) -> None:
    self._file.write(b'{"name": "half')


EdgeWorkers.compute = with_steps(EdgeWorkers.compute)  # type: ignore[method-assign]
Together.train_step = with_common_steps(Together.train_step)  # type: ignore[method-assign]
checkpoints.Checkpoints.save = with_calls(  # type: ignore[method-assign]
    checkpoints.Checkpoints.save
)
Trainer.__init__ = with_making(Trainer.__init__)  # type: ignore[method-assign]
if not plan.get("report", True):
    recorder.report = lambda *_: None
for wire in (MPIWire, InternetWire):
    before(wire, "send", "message", first=0)
before(checkpoints, "write_part", "save", half=lambda path, *_: path.write_bytes(b"half"))
before(checkpoints.Checkpoints, "publish", "publish")
before(MetricsLog, "write", "row", half=half_a_row)
before(Trainer, "end", "end")
before(Evaluation, "__call__", "evaluate")
before(construction, "make_task", "load")
before(recorder, "report", "figure")
if "dump" in plan:
    faulthandler.dump_traceback_later(plan["dump"], file=open(log, "a"))  # noqa: SIM115
if process in plan.get("files", {}):
    most = plan["files"][process]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def main(arguments: list[str]) -> None:
    train.main(["log_verbosity=0", *arguments[2:], "--output-dir", arguments[1]])


configuration.run_entry_point(main)
(trainer,) = found
network = trainer.network
for worker, x, bits in zip(network.workers, trainer.parameters.x, network.bits, strict=True):
    digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()
    row = {"process": int(process), "worker": worker, "digest": digest, "bits": int(bits)}
    sys.stdout.write(json.dumps(row) + "\n")
sys.stdout.flush()
