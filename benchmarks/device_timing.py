"""Times on a device: by CUDA events on a GPU, by the wall clock on a CPU. One process.

The events are on the device's own clock. Where the host is slower than the device, they include the
time in which the device waits for its next kernel.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch


def milliseconds(
    functions: Sequence[Callable[[], object]],
    device: torch.device,
    rounds: int,
    seconds: float,
    before: Callable[[], object] = lambda: None,
    calls: int = 12,
) -> list[float]:
    """Return the median milliseconds of a call of each function. They take turns.

    rounds   # number of measurements of each function, or 3 where a call takes long
    seconds  # approximate time of all measurements together
    before   # called before each measurement
    calls    # of a measurement, at most: with more, workers agree, and may take other code paths
    """
    counts, all_once = [], 0.0
    for function in functions:
        before()
        _measure(function, 2, device)  # libraries choose their kernels
        once = _measure(function, 2, device) / 1000
        counts.append(min(calls, max(1, int(seconds / rounds / len(functions) / max(once, 1e-6)))))
        all_once += once
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds if rounds * all_once < 2 * seconds else 3):
        for function, count, record in zip(functions, counts, times, strict=True):
            before()
            record.append(_measure(function, count, device))
    return [median(record) for record in times]


def _measure(function: Callable[[], object], count: int, device: torch.device) -> float:
    """The mean milliseconds of `count` calls."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            function()
        return 1000 * (time.perf_counter() - start) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(count):
        function()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / count


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
