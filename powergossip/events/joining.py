"""Common parts of the clocks: virtual, real, or a replay."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powergossip.events.members import View, union
from powergossip.events.worker import Worker

Compute = Callable[[int, int], None]  # (worker, its step): the gradient of that step
Make = Callable[[int, View, int], Worker]  # (worker, its view, its steps) → a new Worker


def begin_late(
    index: int,
    steps: int,
    versions: View,
    workers: Mapping[int, Worker],
    x: Tensor,
    make: Make,
) -> tuple[Worker, list[int]]:
    """A worker that joins the others, and those of whose x [worker, D] it has the mean.

    They are its neighbors, or all workers where no neighbor is alive.

    Args:
        steps: Number of steps of the worker. −1 for the mean of theirs.
    """
    view = versions
    for worker in workers.values():
        view = union(view, worker.view)
    sources = [j for j in make(index, view, 0).edges if j in workers] or sorted(workers)
    x[index] = torch.stack([x[j] for j in sources]).mean(0)
    if steps < 0:
        steps = sum(workers[j].steps for j in sources) // len(sources)
    return make(index, view, steps), sources
