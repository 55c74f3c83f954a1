"""A run whose processes fail at given steps, for tests/test_wall_clock.py, under mpirun.

python tests/failing.py PLAN FOLDER key=value …

PLAN is JSON: {"kill": {process: step}, "stop": {process: [step, seconds]}, "save": process,
"wait": [step, …], "again": gradients, "early": true}. A process kills or stops itself in the
gradient of that step, or kills itself while it writes its part of the second checkpoint. The others
wait for replacements in the gradients of the steps of "wait". The first replacement kills itself in
the gradient of that count, and with "early" all do before they join. Those that are left print a
row in JSON with digests of their models, or with the error.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import train
from powergossip.errors import BadInput, Stopped
from powergossip.network import newcomer
from powergossip.runs import checkpoints
from powergossip.training.event_training import EventTraining
from powergossip.training.trainer import Trainer

plan: dict[str, Any] = json.loads(sys.argv[1])
is_new = newcomer.INVITATION in os.environ
process = "new" if is_new else os.environ.get("OMPI_COMM_WORLD_RANK", "0")
found: list[Trainer] = []
longest = 0.0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


waited: dict[int, bool] = {}
taken: list[int] = []  # steps of gradients


def wait_for_replacements(run: Trainer) -> None:
    """Wait until those that were started are ready. Other processes need the cores meanwhile."""
    links, end = run.links, time.monotonic() + 60
    assert links is not None
    while links.has_summoned and not links.settled and time.monotonic() < end:
        time.sleep(0.05)


def fail(compute: Any) -> Any:
    last = [time.monotonic()]

    def gradient(self: EventTraining, worker: int, steps: int) -> None:
        global longest
        if steps > 2:
            longest = max(longest, time.monotonic() - last[0])
        last[0] = time.monotonic()
        if plan.get("kill", {}).get(process) == steps:
            kill()
        taken.append(steps)
        first_new = is_new and found[0].links is not None and found[0].links.process == 4
        if first_new and len(taken) == plan.get("again"):
            kill()
        step, seconds = plan.get("stop", {}).get(process, (None, 0))
        if step == steps:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            last[0] = time.monotonic()
        if steps in plan.get("wait", ()) and not waited.get(steps):
            wait_for_replacements(found[0])
            waited[steps] = True
            last[0] = time.monotonic()
        compute(self, worker, steps)

    return gradient


def fail_to_save(write: Any) -> Any:
    calls = []

    def part(*arguments: Any) -> Any:
        calls.append(arguments)
        if str(plan.get("save")) == process and len(calls) == 2:
            arguments[0].write_bytes(b"half")
            kill()
        return write(*arguments)

    return part


def keep(begin: Any) -> Any:
    def init(self: Trainer, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        found.append(self)

    return init


EventTraining._compute = fail(EventTraining._compute)  # type: ignore[method-assign]
checkpoints._write_part = fail_to_save(checkpoints._write_part)
Trainer.__init__ = keep(Trainer.__init__)  # type: ignore[method-assign]
if is_new and plan.get("early"):
    kill()
row: dict[str, Any] = {"process": 4 if is_new else int(process)}
try:
    train.main(["log_verbosity=0", *sys.argv[3:], "--output-dir", sys.argv[2]])
except (BadInput, Stopped) as error:
    print(json.dumps(row | {"error": str(error)}), flush=True)
    raise
(trainer,) = found
for worker, x in zip(trainer.network.workers, trainer.parameters.x, strict=True):
    row |= {"worker": worker, "digest": hashlib.sha256(x.numpy().tobytes()).hexdigest()}
    row |= {"longest": longest, "seconds": time.perf_counter() - trainer._started}
    sys.stdout.write(json.dumps(row) + "\n")
sys.stdout.flush()
