"""Times of functions that take turns, so that other load on the machine affects all of them."""

import json
import time
from collections.abc import Callable, Mapping

import torch

from powergossip.network import Processes

# Steps after which x is set to its start again. Learning workers do not agree, and workers that
# agree may take other code paths. Two of them agree on a matrix of rank 16 after 16 steps.
BEFORE_THEY_AGREE = 12
ALONE = 0.2  # seconds of a measurement of one process, approximately


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    processes: Processes,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
    calls: int = 200,
) -> dict[str, list[float]]:
    """Return the milliseconds of a call, {function: [round]}. The functions take turns.

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


def alone(function: Callable[[], object], processes: Processes, device: torch.device) -> float:
    """Return the milliseconds of a call in process 0, while the other processes sleep."""
    processes.gather(None)
    if processes.rank > 0:
        time.sleep(ALONE)
    else:
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < 0.8 * ALONE:
            function()
            count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = 1e3 * (time.perf_counter() - start) / count
    return float(processes.broadcast(elapsed if processes.rank == 0 else 0.0))


def report(comm: Processes, /, **values: object) -> None:
    """Print a JSON line in process 0."""
    if comm.rank == 0:
        print(json.dumps(values))
