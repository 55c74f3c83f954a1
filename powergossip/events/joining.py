"""The lives of workers, and the start of one that joins: the mean of its neighbors' models."""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip.events.event_log import Entry
from powergossip.events.members import View, raised, union
from powergossip.events.worker import Action, Worker
from powergossip.network.counter import Counter

Compute = Callable[[int, int], None]  # (worker, its step): the gradient of that step
Make = Callable[[int, View, int], Worker]  # (worker, its view, its steps) → a new Worker


@dataclass
class Life:
    """A worker's generator, and the action that it waits for."""

    worker: Worker
    actions: Generator[Action, None, None]
    action: Action


def sources(neighbors: Iterable[int], present: Sequence[int]) -> list[int]:
    """The workers from whose models one begins: its neighbors that are there, or else all."""
    return [j for j in neighbors if j in present] or list(present)


class Clock:
    """The lives of workers: the common part of the virtual clock and real time.

    Args:
        make: Function that makes the workers.
        compute: Function that computes the gradient of a worker's step.
        counter: Counter of the bits and messages of each worker.
    """

    def __init__(self, make: Make, compute: Compute, counter: Counter):
        self._make, self._compute, self.counter = make, compute, counter
        self._lives: dict[int, Life] = {}

    @property
    def workers(self) -> Mapping[int, Worker]:
        """The workers alive, by index."""
        return {index: life.worker for index, life in sorted(self._lives.items())}

    @property
    def alive(self) -> list[int]:
        """Their indices, ascending."""
        return sorted(self.workers)

    def _begin(self, worker: Worker) -> None:
        """A worker begins its first step."""
        actions = worker.life()
        self._lives[worker.index] = Life(worker, actions, next(actions))

    def _saved(self) -> dict[int, dict[str, Any]]:
        """The state of the lives without x."""
        return {
            index: life.worker.state_dict() | {"action": life.action.value}
            for index, life in self._lives.items()
        }

    def _restore(self, index: int, saved: Mapping[str, Any]) -> Worker:
        """Restore a life from the state of `_saved`, after x."""
        worker = self._make(index, tuple(saved["view"]), saved["steps"])
        worker.load_state_dict(saved)
        self._begin(worker)  # at the same place as when it was saved
        self._lives[index].action = Action(saved["action"])
        worker.log.clear()
        return worker


class VirtualTime(Clock):
    """The common part of the virtual clock and of replays: one process hosts all workers.

    Args:
        absent: Workers that are not there at the start.
        models: Memory of the workers' models, tensors [worker, ...]: x, buffers.

    Attributes:
        now: Virtual seconds since the start.
        order: Entries for event_log.write.
    """

    def __init__(
        self,
        absent: Collection[int],
        models: Sequence[Tensor],
        make: Make,
        compute: Compute,
        counter: Counter | None,
    ):
        n = len(models[0])
        super().__init__(make, compute, counter or Counter(n))
        self._models = models
        self._versions: View = tuple(int(i in absent) for i in range(n))
        self.now = 0.0
        self.order: list[Entry] = []

    @property
    def progress(self) -> float:
        """The mean number of steps of the workers alive."""
        workers = self.workers.values()
        return sum(worker.steps for worker in workers) / len(workers)

    def _joined(self, index: int, steps: int | None = None) -> tuple[Worker, list[int]]:
        """A worker that joins the others, and its sources: it begins with the mean of their models.
        They are its neighbors, or all workers where no neighbor is alive. Their messages are
        counted.

        Args:
            steps: Number of steps of the worker. None for the mean of theirs.
        """
        view = self._versions = raised(self._versions, index)
        workers = self.workers
        for worker in workers.values():
            view = union(view, worker.view)
        edges = self._make(index, view, 0).edges
        of = sources(edges, sorted(workers))
        for rows in self._models:
            rows[index] = torch.stack([rows[j] for j in of]).mean(0)
        for j in of:
            self.counter.add(j, 8 * sum(rows[j].nbytes for rows in self._models))
        if steps is None:
            steps = sum(workers[j].steps for j in of) // len(of)
        return self._make(index, view, steps), of
