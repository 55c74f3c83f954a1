"""The start of a worker that joins: the mean of the models of its neighbors."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from powergossip.events.members import View, union
from powergossip.events.worker import Worker
from powergossip.network.counter import Counter

Compute = Callable[[int, int], None]  # (worker, its step): the gradient of that step
Make = Callable[[int, View, int], Worker]  # (worker, its view, its steps) → a new Worker


def begin_late(
    index: int,
    steps: int,
    versions: View,
    workers: Mapping[int, Worker],
    models: Sequence[Tensor],
    make: Make,
    counter: Counter,
) -> tuple[Worker, list[int]]:
    """A worker that joins the others, and its sources: it begins with the mean of their models.
    They are its neighbors, or all workers where no neighbor is alive. Their messages are counted.

    Args:
        steps: Number of steps of the worker. −1 for the mean of theirs.
        models: Memory of the models, tensors [worker, ...].
    """
    view = versions
    for worker in workers.values():
        view = union(view, worker.view)
    sources = [j for j in make(index, view, 0).edges if j in workers] or sorted(workers)
    for rows in models:
        rows[index] = torch.stack([rows[j] for j in sources]).mean(0)
    for j in sources:
        counter.add(j, 8 * sum(rows[j].nbytes for rows in models))
    if steps < 0:
        steps = sum(workers[j].steps for j in sources) // len(sources)
    return make(index, view, steps), sources
