"""The lives of workers, and the start of one that joins: the mean of its neighbors' models."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powergossip.events.members import View
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
        return worker
