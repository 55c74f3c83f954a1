"""Runs of train.py that resume on another device."""

from pathlib import Path

import torch
from torch import Tensor

import train
from environment.gpu.findings import Findings, Setting, difference
from powergossip.network import Processes
from powergossip.runs.checkpoints import Checkpoints

METHODS = ("power-gossip", "choco", "dgc")
WORKERS = 4
EPOCHS = 2  # the second one on the other device
OFF = 0.05  # fraction of parameters that may differ: an element that is rounded or selected
# otherwise changes all gradients after it. A state that is lost changes nearly all parameters
ARGUMENTS = (
    *("task=environment.gpu.tasks:images", "task_architecture=CNN"),
    *("task_options.samples=64", "task_options.size=8", "batch_size=4"),
    *(f"n_workers={WORKERS}", f"num_epochs={EPOCHS}", "log_verbosity=0", "seed=1"),
)


def run(setting: Setting, findings: Findings) -> None:
    """Train on the device and on the CPU, and change the device after the first epoch."""
    torch.backends.cudnn.allow_tf32 = False
    train.log_metric = lambda name, values, tags: None  # no figures
    there, here = str(setting.device), "cpu"
    rows = []
    for method in METHODS[:1] if setting.quick else METHODS:
        folder = setting.folder / method
        expected = trained(folder / "cpu", method, here, here)
        devices = [
            ("device, then CPU", there, here),
            ("CPU, then device", here, there),
            ("device", there, there),
        ]
        for name, first, second in devices[: 1 if setting.quick else 3]:
            apart = difference(trained(folder / name, method, first, second), expected)
            sentence = f"{method}, {name}: {apart}"
            rows.append((method, name, apart, findings.require(apart.off <= OFF, sentence)))
    findings.text(
        f"Parameters of {WORKERS} workers after {EPOCHS} epochs of `train.py`, compared with a "
        "run on the CPU. The second epoch resumes from the checkpoint of the first one."
    )
    findings.table(("method", "devices", "difference", "result"), rows)


def trained(folder: Path, method: str, *devices: str) -> Tensor:
    """x [worker, D] after one epoch on each device."""
    for epoch, device in enumerate(devices, start=1):
        resume = "true" if epoch > 1 else "false"
        given = [f"num_epochs={epoch}", f"optimizer={method}", f"device={device}"]
        train.main(["--output-dir", str(folder), *ARGUMENTS, *given, f"resume={resume}"])
    return parameters(folder)


def parameters(folder: Path) -> Tensor:
    """x [worker, D] in the last checkpoint of a run."""
    x: Tensor = Checkpoints(folder, Processes()).load(range(WORKERS))["x"]
    return x
