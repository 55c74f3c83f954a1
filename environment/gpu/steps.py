"""The time of an averaging step beside its lower bound, and its kernels."""

import gc
import itertools
import time
from typing import Any

import torch

from benchmarks.device_timing import launches, milliseconds
from benchmarks.shapes import MODELS
from environment.gpu.findings import Findings, Setting, out_of_memory
from powergossip import algorithms, topologies
from powergossip.network import Network, Processes
from powergossip.parameters import Layout

WORKERS = (8, 64)  # in this process, on a ring
SECONDS = 110.0  # after which cases are left out
RULES: list[tuple[str, dict[str, Any]]] = [
    ("all-reduce", {}),
    ("dpsgd", {}),
    ("power-gossip", {"rank": 1}),
    ("power-gossip", {"rank": 4}),
    ("choco", {"compressor": "top-k", "keep_ratio": 0.01}),
    ("choco", {"compressor": "random-k", "keep_ratio": 0.01}),
    ("choco", {"compressor": "sign-and-norm"}),
    ("choco", {"compressor": "qsgd"}),
    ("deepsqueeze", {"compressor": "sign-and-norm"}),
    ("moniqua", {}),
]


def run(setting: Setting, findings: Findings) -> None:
    """Measure all rules. A case that does not fit into the memory is left out."""
    models, workers = (
        (list(MODELS), WORKERS) if setting.on_gpu else (["matrix100", "resnet20"], [8])
    )
    rules = RULES
    if setting.quick:
        models, workers, rules = ["matrix100"], [8], RULES[1:4]
    clock = "CUDA events" if setting.on_gpu else "the wall clock"
    findings.text(
        f"One step of all workers of one process on a ring, by {clock}: medians. The lower bound "
        "is one pass over the parameters that reads and writes them, in turns with the steps."
    )
    kernels = "kernels" if setting.on_gpu else "operations of torch"
    columns = ("shapes", "rule", "ms", "lower bound, ms", "ratio", kernels, "copies", "host waits")
    start, counted = time.monotonic(), 0
    for n in workers:
        rows: list[tuple[object, ...]] = []
        for model, (name, options) in itertools.product(models, rules):
            label = " ".join([name, *map(str, options.values())])
            cells: tuple[object, ...] = ("no time was left", *[""] * 5)
            if time.monotonic() - start < SECONDS:
                try:
                    cells = measure(setting, model, n, name, options)
                    counted += int(str(cells[3]))
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    cells = ("out of memory", *[""] * 5)
            rows.append((model, label, *cells))
            gc.collect()
            if setting.on_gpu:
                torch.cuda.empty_cache()
        findings.text(f"{n} workers:")
        findings.table(columns, rows)
    if not counted:
        findings.text("The profiler has recorded no kernel: it lacks permission, or CUPTI.")


def measure(
    setting: Setting, model: str, n: int, name: str, options: dict[str, Any]
) -> tuple[object, ...]:
    """Milliseconds of a step, of its lower bound, their ratio, and the kernels of a step."""
    layout, device = Layout(MODELS[model]()), setting.device
    network = Network(topologies.make("ring", n), Processes(), device)
    rule = algorithms.make(name, network, layout, **options)
    start = torch.randn(n, layout.size, device=device)
    x = start.clone()

    def step() -> None:
        network.run(rule.step(x))

    rounds, seconds = (3, 0.02) if setting.quick else (9, 0.5)
    ms, bound = milliseconds(
        [step, lambda: x.mul_(1.0)], device, rounds, seconds, before=lambda: x.copy_(start)
    )
    return ms, bound, ms / bound, *launches(step, device)
