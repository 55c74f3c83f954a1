"""Times of functions that take turns, so that other load on the machine affects all of them."""

import time
from collections.abc import Callable, Mapping

import torch

from powergossip.network import Processes

# Steps after which x is set to its start again. Learning workers do not agree, and workers that
# agree may take other code paths. Two of them agree on a matrix of rank 16 after 16 steps.
BEFORE_THEY_AGREE = 12


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    processes: Processes,
    device: torch.device,
    before: Callable[[], object],
) -> dict[str, list[float]]:
    """Return the milliseconds of a call, {function: [round]}. The functions take turns.

    rounds   # number of measurements of each function
    seconds  # approximate time of all measurements together
    before   # called before each measurement, and again after BEFORE_THEY_AGREE calls, outside of
             # the time. A measurement has at most 200 calls
    """

    def measure(function: Callable[[], object], count: int) -> float:
        elapsed = 0.0
        for first in range(0, count, BEFORE_THEY_AGREE):
            before()
            processes.gather(None)  # start at the same time
            start = time.perf_counter()
            for _ in range(first, min(first + BEFORE_THEY_AGREE, count)):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            processes.gather(None)  # the slowest process counts
            elapsed += time.perf_counter() - start
        return 1e3 * elapsed / count

    counts = []
    for function in functions.values():
        once = processes.broadcast(measure(function, 3)) / 1e3
        counts.append(min(200, max(1, int(seconds / rounds / len(functions) / once))))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for (name, function), count in zip(functions.items(), counts, strict=True):
            times[name].append(measure(function, count))
    return times
