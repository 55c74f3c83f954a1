"""Training steps of 8 workers on one device, with batched gradients and without."""

import time
from typing import Any

import torch

import train
from environment.gpu import section
from environment.gpu.section import Setting
from powergossip.network import Processes
from powergossip.runs import configuration
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.on_device import Difference, difference

MODELS = {
    "ResNet-20": ["task=environment.gpu.tasks:images", "task_architecture=ResNet20"],
    "transformer": ["task=environment.gpu.tasks:text"],
}
BATCH = 32  # samples of a worker
QUICK = {
    "ResNet-20": ["task_options.samples=64", "task_options.size=8", "n_workers=2", "batch_size=8"],
    "transformer": [
        *("task_options.samples=64", "task_options.words=20", "task_options.length=8"),
        *("task_options.width=16", "task_options.layers=1", "n_workers=2", "batch_size=2"),
    ],
}
SECONDS = 5.0  # of a measurement
# Difference of the parameters after a step. With batch normalization, each further step multiplies
# differences of rounding by more than 10.
LARGEST = 0.05
WARM = 2  # steps before a measurement


def main(setting: Setting) -> None:
    """Train both models with each kind of gradients."""
    rows = []
    for model, arguments in MODELS.items():
        small = setting.quick or not setting.on_gpu
        more = QUICK[model] if small else ["n_workers=8", f"batch_size={BATCH}"]
        given = [*arguments, *more, f"device={setting.device}"]
        x: dict[str, torch.Tensor] = {}
        for batched in ("off", "on"):
            key = f"batched_gradients={batched}"
            x[batched], per_second, parameters = measure(setting, [*given, key])
            apart: Difference | str = ""
            if batched == "on":
                apart = difference(x["on"], x["off"])
                section.require(
                    apart.largest <= LARGEST, f"{model}: batched gradients differ: {apart}"
                )
            rows.append((model, parameters, batched, per_second, apart))
    section.text(
        f"Training on random data with PowerGossip, 8 workers in one process, {BATCH} samples a "
        "worker. Less on a CPU and with --quick. *difference*: of the parameters after one step "
        "with batched gradients."
    )
    columns = ("model", "parameters", "batched_gradients", "steps per second", "difference")
    section.table(columns, rows)


def measure(setting: Setting, arguments: list[str]) -> tuple[torch.Tensor, float, int]:
    """x [worker, D] after one step without TF32, steps per second, and D."""
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

    torch.backends.cudnn.allow_tf32 = False
    advance(1)
    x = trainer.parameters.x.clone()
    torch.backends.cudnn.allow_tf32 = True
    advance(WARM)
    assert trainer.parameters.x.isfinite().all(), "parameters are not finite"
    setting.synchronize()
    start, first = time.perf_counter(), step
    while time.perf_counter() - start < (0.1 if setting.quick else SECONDS):
        advance(10 if setting.on_gpu else 1)
        setting.synchronize()
    per_second = (step - first) / (time.perf_counter() - start)
    trainer.close()
    return x, per_second, x.shape[1]


if __name__ == "__main__":
    main(section.setting())
