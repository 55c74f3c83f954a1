"""Times of things that take turns, so that what else a machine does hits all of them."""

import time
from collections.abc import Callable, Sequence

import torch

from powergossip.network import Processes


def in_turns(
    functions: Sequence[Callable[[], object]],
    rounds: int,
    seconds: float,
    who: Processes,
    device: torch.device,
    before: Callable[[], object],
) -> list[list[float]]:
    """Seconds a call, [function][round]: the functions take turns, so that noise hits both.

    `before` is called before each round of calls, of which there are at most 200.
    """

    def measure(function: Callable[[], object], count: int) -> float:
        before()
        who.gather(None)  # start together
        start = time.perf_counter()
        for _ in range(count):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        who.gather(None)  # and it takes as long as it takes the slowest
        return (time.perf_counter() - start) / count

    counts = []
    for function in functions:
        once = who.broadcast(measure(function, 3))
        counts.append(min(200, max(1, int(seconds / rounds / len(functions) / once))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, count, record in zip(functions, counts, times, strict=True):
            record.append(measure(function, count))
    return times
