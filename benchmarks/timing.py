"""Times of functions that take turns, so that other load on the machine affects all of them."""

import time
from collections.abc import Callable, Sequence

import torch

from powergossip.network import Processes


def in_turns(
    functions: Sequence[Callable[[], object]],
    rounds: int,
    seconds: float,
    processes: Processes,
    device: torch.device,
    before: Callable[[], object],
    calls: int = 200,
) -> list[list[float]]:
    """Return the seconds of a call, [function][round]. The functions take turns.

    rounds   # number of measurements of each function
    seconds  # approximate time of all measurements together
    before   # called before each measurement, and again after some calls, outside of the time
    calls    # their number. A measurement has at most 200
    """

    def measure(function: Callable[[], object], count: int) -> float:
        elapsed = 0.0
        for first in range(0, count, calls):
            before()
            processes.gather(None)  # start at the same time
            start = time.perf_counter()
            for _ in range(first, min(first + calls, count)):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            processes.gather(None)  # the slowest process counts
            elapsed += time.perf_counter() - start
        return elapsed / count

    counts = []
    for function in functions:
        once = processes.broadcast(measure(function, 3))
        counts.append(min(200, max(1, int(seconds / rounds / len(functions) / once))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, count, record in zip(functions, counts, times, strict=True):
            record.append(measure(function, count))
    return times


def alone(
    function: Callable[[], object],
    processes: Processes,
    device: torch.device,
    seconds: float = 0.2,
) -> float:
    """Return the seconds of a call in process 0, while the other processes sleep.

    seconds  # approximate time of the measurement
    """
    processes.gather(None)
    if processes.rank > 0:
        time.sleep(seconds)
    else:
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < 0.8 * seconds:
            function()
            count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = (time.perf_counter() - start) / count
    return float(processes.broadcast(elapsed if processes.rank == 0 else 0.0))
