"""The time of an averaging step beside its lower bound, and its kernels."""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.shapes import MODELS
from benchmarks.timing import BEFORE_THEY_AGREE, in_turns
from environment.gpu import section
from environment.gpu.section import Setting
from powergossip import algorithms, topologies
from powergossip.network import Network, Processes
from powergossip.parameters import Layout

WORKERS = (8, 64)  # in this process, on a ring
SECONDS = 110.0  # later cases are skipped
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


def main(setting: Setting) -> None:
    """Measure all rules. A case that does not fit into the memory is skipped."""
    models, workers = (
        (list(MODELS), WORKERS) if setting.on_gpu else (["matrix100", "resnet20"], [8])
    )
    rules = RULES
    if setting.quick:
        models, workers, rules = ["matrix100"], [8], RULES[1:4]
    section.text(
        "One step of all workers of one process on a ring: medians, until the device has ended. "
        "The lower bound is one pass over the parameters that reads and writes them, in turns with "
        "the steps."
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
                except RuntimeError as error:  # of torch's allocators
                    if "out of memory" not in str(error) and "can't allocate" not in str(error):
                        raise
                    cells = ("out of memory", *[""] * 5)
            rows.append((model, label, *cells))
            gc.collect()
            if setting.on_gpu:
                torch.cuda.empty_cache()
        section.text(f"{n} workers:")
        section.table(columns, rows)
    if not counted:
        section.text("The profiler has recorded no kernel: it lacks permission, or CUPTI.")


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

    rounds, seconds = (3, 0.02) if setting.quick else (5, 0.5)
    ms, bound = map(
        median,
        in_turns(
            {"step": step, "bound": lambda: x.mul_(1.0)},
            rounds,
            seconds,
            network.processes,
            device,
            before=lambda: x.copy_(start),
            calls=BEFORE_THEY_AGREE,
        ).values(),
    )
    return ms, bound, ms / bound, *launches(step, device)


class Launches(NamedTuple):
    """Operations of a call.

    kernels  # launches on a GPU, on a CPU operations of torch (aten)
    copies   # between host and GPU, and within the GPU, and memory set to a value
    waits    # of the host for the GPU
    """

    kernels: int
    copies: int
    waits: int


def launches(function: Callable[[], object], device: torch.device) -> Launches:
    """Count the kernels of a call, by PyTorch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        function()
    events = profile.events()
    if device.type != "cuda":
        outer = [event for event in events if event.cpu_parent is None]
        return Launches(sum(event.name.startswith("aten::") for event in outer), 0, 0)
    names = Counter(event.name for event in events)

    def total(*starts: str) -> int:
        return sum(count for name, count in names.items() if name.startswith(starts))

    return Launches(
        total("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
        total("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset"),
        total("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"),
    )


if __name__ == "__main__":
    main(section.setting())
