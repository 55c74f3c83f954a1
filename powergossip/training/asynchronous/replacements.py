"""Replacement of lost processes in a running job."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from powergossip.events.wall_clock import WallClock
from powergossip.network.resilient import spawning
from powergossip.network.resilient.links import Links
from powergossip.training.asynchronous.workers import EdgeWorkers

_MOST_ATTEMPTS = 3  # to replace processes, one after the other, none of which joins


class Moment(NamedTuple):
    """The moment at which replacements join.

    Attributes:
        seconds: Seconds of the run.
        joined: Workers that join.
        replaced: Replacements of the run so far: dicts with worker, step, and seconds after the
            loss.
    """

    epoch: int
    step: int
    seconds: float
    joined: list[int]
    replaced: list[dict[str, float]]


class Replacements:
    """Replaces the processes that a run loses. All processes make the same calls.

    `replace` spawns a process for each lost one as soon as a survivor knows of the loss, which
    takes about a second. A later `replace` lets it join, when it is ready.

    Args:
        run: Value for new processes: configuration and folder.
        seconds: Function that returns the seconds since the start of the run.
    """

    def __init__(
        self,
        links: Links,
        workers: EdgeWorkers,
        clock: WallClock,
        run: Any,
        seconds: Callable[[], float],
    ):
        self._links, self._workers, self._clock = links, workers, clock
        self._run, self._seconds = run, seconds
        self._attempts = 0
        self._lost_at: dict[int, float] = {}  # worker → time
        self.replaced: list[dict[str, float]] = []

    @property
    def wanted(self) -> bool:
        """Whether `replace` has something to do, as far as this process knows."""
        lost = set(self._links.homes) - self._links.alive
        for worker in lost - set(self._lost_at):
            self._lost_at[worker] = time.monotonic()
        if self._links.has_spawned:
            return self._links.spawned_are_ready
        return bool(lost) and self._attempts < _MOST_ATTEMPTS

    def replace(self, epoch: int, step: int) -> list[str]:
        """Start processes, or let them join, where some are wanted. Returns sentences about it."""
        links = self._links
        if not any(links.group.gather(self.wanted)):
            return []
        if not links.has_spawned:
            return self._spawn()
        joined = links.accept()
        if not joined:
            return []
        self._attempts = 0
        moment = Moment(epoch, step, self._seconds(), joined, self.replaced)
        self._begin(links.group.broadcast(moment))
        found = self.replaced[-len(joined) :]
        return [
            f"worker {of_worker['worker']} was lost, and replaced after "
            f"{of_worker['seconds']:.1f} s: it goes on at step {of_worker['step']}"
            for of_worker in found
        ]

    def _spawn(self) -> list[str]:
        self._attempts += 1
        started = self._links.spawn(spawning.program(), self._run)
        if started or self._attempts < _MOST_ATTEMPTS:
            return []
        return ["lost workers cannot be replaced: mpirun does not start another process"]

    def join(self) -> Moment:
        """Join the others, as a new process."""
        self._links.enter()
        moment: Moment = self._links.group.broadcast(Moment(0, 0, 0.0, [], []))
        self.replaced = moment.replaced
        self._clock.join(moment.seconds)
        self._begin(moment)
        return moment

    def _begin(self, moment: Moment) -> None:
        since = {worker: self._lost_at.pop(worker, None) for worker in moment.joined}
        steps = self._begin_workers(moment.joined)
        now = time.monotonic()
        times = {worker: now - at for worker, at in since.items() if at is not None}
        longest: dict[int, float] = {}
        for of_process in self._links.group.gather(times):
            for worker, seconds in of_process.items():
                longest[worker] = max(longest.get(worker, 0.0), seconds)
        for worker in moment.joined:
            found = {"worker": worker, "step": steps.get(worker, 0), "seconds": longest[worker]}
            self.replaced = [*self.replaced, found]

    def _begin_workers(self, joined: Sequence[int]) -> dict[int, int]:
        """See WallClock.begin_replacements. Returns worker → steps, of all processes."""
        workers = self._workers
        found = self._clock.begin_replacements(joined, workers.members, workers)
        of_processes = self._links.group.gather((found, workers.means()))
        if found:  # metrics of a replacement that ends an epoch without a step
            workers.begin_with(next((means for _, means in of_processes if means), {}))
        return {w: steps for of_process, _ in of_processes for w, steps in of_process.items()}
