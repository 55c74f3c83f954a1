"""Training steps of 8 workers on one device, with batched gradients and without."""

import time
from typing import Any

import torch

import train
from environment.gpu.findings import Difference, Findings, Setting, difference
from powergossip.network import Processes
from powergossip.runs import configuration
from powergossip.training.settings import checked
from powergossip.training.trainer import Trainer

MODELS = {
    "ResNet-20": ["task=environment.gpu.tasks:images", "task_architecture=ResNet20"],
    "transformer": ["task=environment.gpu.tasks:text"],
}
BATCH = 32  # samples of a worker
QUICK = {
    # With two samples, batch normalization makes differences of rounding large within three steps.
    "ResNet-20": ["task_options.samples=64", "task_options.size=8", "n_workers=2", "batch_size=8"],
    "transformer": [
        *("task_options.samples=64", "task_options.words=20", "task_options.length=8"),
        *("task_options.width=16", "task_options.layers=1", "n_workers=2", "batch_size=2"),
    ],
}
SECONDS = 5.0  # of a measurement
COMPARED = 3  # steps after which both kinds of gradients are compared
LARGEST = 0.05  # their difference. cuDNN's convolutions use TF32, with errors of 1e-3


def run(setting: Setting, findings: Findings) -> None:
    """Train both models with each kind of gradients."""
    has_key = hasattr(train.Config, "batched_gradients")
    rows = []
    for model, arguments in MODELS.items():
        more = [f"n_workers=8 batch_size={BATCH}"] if not setting.quick else QUICK[model]
        given = [*arguments, *" ".join(more).split(), f"device={setting.device}"]
        x: dict[str, torch.Tensor] = {}
        for batched in ("off", "on") if has_key else ("",):
            key = [f"batched_gradients={batched}"] if batched else []
            x[batched], per_second, parameters = measure(setting, [*given, *key])
            apart: Difference | str = ""
            if batched == "on":
                apart = difference(x["on"], x["off"])
                findings.require(
                    apart.largest <= LARGEST, f"{model}: batched gradients differ: {apart}"
                )
            rows.append((model, parameters, batched or "no key", per_second, apart))
    findings.text(
        f"Training on random data with PowerGossip, 8 workers in one process, {BATCH} samples a "
        f"worker. *difference*: of the parameters after {COMPARED} steps with batched gradients."
    )
    columns = ("model", "parameters", "batched_gradients", "steps per second", "difference")
    findings.table(columns, rows)


def measure(setting: Setting, arguments: list[str]) -> tuple[torch.Tensor, float, int]:
    """x [worker, D] after COMPARED steps, steps per second, and D."""
    config: Any = configuration.structured(train.Config)
    configuration.read_command_line(config, ["log_verbosity=0", *arguments], "")
    processes = Processes()
    trainer = Trainer(checked(config, processes), processes)
    step = 0

    def advance(count: int) -> None:
        nonlocal step
        for _ in range(count):
            trainer.execution.train_step(0, step % trainer.steps_per_epoch)
            step += 1

    advance(COMPARED)
    x = trainer.parameters.x.clone()
    assert x.isfinite().all(), "parameters are not finite"
    setting.synchronize()
    start, first = time.perf_counter(), step
    while time.perf_counter() - start < (0.1 if setting.quick else SECONDS):
        advance(10 if setting.on_gpu else 1)
        setting.synchronize()
    per_second = (step - first) / (time.perf_counter() - start)
    trainer.close()
    return x, per_second, x.shape[1]
