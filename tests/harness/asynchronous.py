"""Runs in processes that may be lost, and the same runs on the virtual clock."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import train
from powergossip.network import Processes
from powergossip.training.config_checks import checked
from powergossip.training.measurements import Hooks
from powergossip.training.trainer import Trainer
from tests.harness import launch

ULFM = ("--with-ft", "ulfm")


TINY: dict[str, Any] = {
    "task_architecture": "MLP",
    "n_workers": 4,
    "batch_size": 64,
    "batched_gradients": "off",
    "learning_rate": 0.05,
    "max_steps_per_epoch": 4,
    "num_epochs": 2,
    "log_verbosity": 0,
}


METHODS: dict[str, dict[str, Any]] = {
    "power": {"optimizer": "power-gossip", "optimizer_num_iterations": 3},
    "plain": {"optimizer": "dpsgd", "local_optimizer": "adamw", "overlapping": False},
    "sign": {"optimizer": "choco"},
    "momentum": {"optimizer": "dpsgd", "learning": "quasi-global-momentum"},
    "duals": {"optimizer": "dpsgd", "learning": "exact-diffusion"},
    "tracking": {"optimizer": "power-gossip", "learning": "gradient-tracking"},
}


SURVIVING = {"on_worker_loss": "continue", "worker_timeout": 20.0}


def on_virtual_clock(**changes: Any) -> Trainer:
    """The same run in one process, whatever the number of those of the test."""
    return with_rows(**changes)[0]


def with_rows(**changes: Any) -> tuple[Trainer, list[Any]]:
    """The same, and its rows."""
    rows: list[Any] = []
    config = OmegaConf.merge(OmegaConf.structured(train.Config), TINY, changes)
    alone = Processes()
    hooks = Hooks(log_metric=lambda *row: rows.append(row))
    run = Trainer(checked(config, alone), alone, hooks)  # type: ignore[arg-type]
    run.train()
    return run, rows


def failing(
    plan: dict[str, Any],
    folder: Path,
    *,
    size: int = 4,
    code: int = 0,
    **changes: Any,
) -> list[dict[str, Any]]:
    """The rows of tests/harness/failing.py, which is started under mpirun."""
    values = {**TINY, **SURVIVING, **changes}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    ended = launch.python(
        "tests/harness/failing.py",
        json.dumps(plan),
        folder,
        *words,
        processes=size,
        options=ULFM,
        timeout=100,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]
