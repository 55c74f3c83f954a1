"""A run whose processes fail at given steps, for tests/test_wall_clock.py, under mpirun.

python tests/failing.py PLAN FOLDER key=value …

PLAN is JSON: {"kill": {process: step}, "stop": {process: [step, seconds]}, "save": process}. A
process kills or stops itself in the gradient of that step, or kills itself while it writes its part
of the second checkpoint. Those that are left print a row in JSON with digests of their models, or
with the error.
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
from powergossip.runs import checkpoints
from powergossip.training.event_training import EventTraining
from powergossip.training.trainer import Trainer

plan: dict[str, Any] = json.loads(sys.argv[1])
process = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
found: list[Trainer] = []
longest = 0.0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(compute: Any) -> Any:
    last = [time.monotonic()]

    def gradient(self: EventTraining, worker: int, steps: int) -> None:
        global longest
        if steps > 2:
            longest = max(longest, time.monotonic() - last[0])
        last[0] = time.monotonic()
        if plan.get("kill", {}).get(process) == steps:
            kill()
        step, seconds = plan.get("stop", {}).get(process, (None, 0))
        if step == steps:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            last[0] = time.monotonic()
        compute(self, worker, steps)

    return gradient


def fail_to_save(write: Any) -> Any:
    calls = []

    def part(*arguments: Any) -> Any:
        calls.append(arguments)
        if plan.get("save") == int(process) and len(calls) == 2:
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
row: dict[str, Any] = {"process": int(process)}
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
