"""Runs in processes that may be lost, and the same runs on the virtual clock."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from powergossip.network import Processes
from powergossip.training.trainer import Trainer
from tests.harness import launch
from tests.harness.training import trained

ULFM = ("--with-ft", "ulfm")
SURVIVING: dict[str, Any] = {"on_worker_loss": "continue", "worker_timeout": 20.0}
OF_EDGES: dict[str, Any] = {
    "n_workers": 4,
    "batch_size": 64,
    "batched_gradients": "off",
    "learning_rate": 0.05,
}
TINY: dict[str, Any] = OF_EDGES | {
    "task_architecture": "MLP",
    "max_steps_per_epoch": 4,
    "num_epochs": 2,
    "log_verbosity": 0,
}
METHODS: dict[str, dict[str, Any]] = {
    "power": {"optimizer": "power-gossip", "optimizer_num_iterations": 3},
    "plain": {"optimizer": "dpsgd", "local_optimizer": "adamw", "overlapping": False},
    "sign": {"optimizer": "choco", "weight_decay": 0.1, "gradient_clipping": 1.0},
    "momentum": {"optimizer": "dpsgd", "learning": "quasi-global-momentum"},
    "duals": {"optimizer": "dpsgd", "learning": "exact-diffusion"},
    "tracking": {"optimizer": "power-gossip", "learning": "gradient-tracking"},
}


def on_virtual_clock(**changes: Any) -> tuple[Trainer, pd.DataFrame]:
    """The same run in one process, whatever the number of those of the test, and its rows."""
    return trained(Processes(), **{**TINY, **changes})


def at_step(process: int, count: int, signal: str = "SIGKILL", **more: Any) -> dict[str, Any]:
    """An event for `failing`."""
    return {"process": process, "point": "step", "count": count, "signal": signal, **more}


def failing(
    events: list[dict[str, Any]], folder: Path, *, size: int = 4, code: int = 0, **changes: Any
) -> list[dict[str, Any]]:
    """The rows of tests/harness/failing.py, which is started under mpirun."""
    values = {**TINY, **SURVIVING, **changes}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    ended = launch.python(
        "tests/harness/failing.py",
        json.dumps({"events": events}),
        folder,
        *words,
        processes=size,
        options=ULFM,
        timeout=100,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
