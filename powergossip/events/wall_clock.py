"""Real time: the workers of one process among several, with messages through links.

The counterpart of the virtual clock. A process lets its own workers live, and learns from the links
which messages have arrived and which workers are lost. No process decides for the others: processes
announce the end of a run of steps, and all survivors agree on it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip.events.clock import Clock, Compute, Make, sources
from powergossip.events.deadline import Deadline
from powergossip.events.members import View, raised, union
from powergossip.events.packing import bits_of_view, packed, unpacked
from powergossip.events.worker import Action, Worker
from powergossip.network.counter import Counter
from powergossip.network.resilient.worker_messages import Links

# Notes of a process to all others.
_PROGRESS, _END, _STOP = range(3)
_BETWEEN_NOTES = 0.005  # seconds
_OF_REST = 1 / 8  # of the time to the end of a run of steps, between notes on progress
_LONGEST_WAIT = 0.1  # seconds without a look at signals
_FIRST_DEADLINE = 1.0  # seconds, of an edge that begins later: its other end may be elsewhere


@dataclass
class _Pending:
    """The present exchange of an edge: when it was started, and how long others took."""

    since: float = math.inf
    deadline: Deadline = field(default_factory=Deadline)


class WallClock(Clock):
    """Runs the lives of the workers of this process.

    Args:
        links: Links to the other processes.
        make: Function that makes the workers at the start.
        compute: Function that computes the gradient of a worker's step.
        together: True if all workers take the same number of steps. Otherwise a run of steps is
            over when the mean over workers has reached it.
        survives: True if the run goes on without lost workers. Then messages carry views, and no
            step waits for an exchange longer than its deadline.
        measure: measure("communication") is the context of waiting for messages.
        counter: Counter of the bits and messages of each worker of this process.
        models: Memory of its workers' models, tensors [worker, ...]: x, buffers.

    Attributes:
        now: Seconds since the start.
        workers: Workers of this process, by index.
        of_run: Function that returns what a process that comes back must know of the run.
    """

    def __init__(
        self,
        links: Links,
        make: Make,
        compute: Compute,
        together: bool,
        survives: bool,
        measure: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        counter: Counter | None = None,
        models: Sequence[Tensor] = (),
    ):
        super().__init__(make, compute, counter or Counter(len(links.workers)))
        self.links = links
        self._together, self.survives, self._measure = together, survives, measure
        self._models = models
        self.of_run: Callable[[], Any] = lambda: None
        self._rows = {worker: row for row, worker in enumerate(links.workers)}
        self._started = time.monotonic()
        self._versions: View = (0,) * len(links.homes)
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._progress: dict[int, int] = {}  # process → steps of its workers
        self._noted = (0.0, -1)  # time of the last note, and its steps
        self._began = (0.0, 0.0, 0.0)  # of `run`: time, progress, and this process's progress
        self._ended, self._stopped = -1, False
        self._entered: bool | None = None  # the result of `run` where this process has come back
        self._seen_returning: list[int] = []
        # Workers that have not begun: nothing is sent before `run`.
        self._new = [make(index, self._versions, 0) for index in links.workers]

    def begin_at(self, steps: int) -> None:
        """Begin the workers after a number of steps, with edges that begin later."""
        self._versions = (2,) * len(self._versions)
        self._new = [self._make(index, self._versions, steps) for index in self.links.workers]

    @property
    def now(self) -> float:
        return time.monotonic() - self._started

    @property
    def everybody(self) -> list[int]:
        """The workers of all processes that took part in the last collective operation."""
        members = set(self.links.group.members)
        return sorted(worker for worker, home in self.links.homes.items() if home in members)

    @property
    def steps(self) -> int:
        """The sum of the steps of this process' workers."""
        return sum(lives.worker.steps for lives in self._lives.values())

    @property
    def progress(self) -> float:
        """The mean number of steps of the workers alive, as far as this process knows."""
        self._progress[self.links.process] = self.steps
        alive = self.links.processes
        known = sum(steps for process, steps in self._progress.items() if process in alive)
        return known / len(self.links.alive)

    @property
    def _own_progress(self) -> float:
        """The mean number of steps of this process' workers."""
        return self.steps / max(1, len(self._lives))

    def run(self, steps: int, asked: Callable[[], bool] = lambda: False) -> bool:
        """Run the workers until they have taken that number of steps.

        All processes call it. It also ends in all of them if `asked()` is true in one. Returns
        whether the steps are taken, the same in all processes. All messages that were sent have
        then arrived.
        """
        if self._entered is not None:
            complete, self._entered = self._entered, None
            return complete
        self._begin_new()
        self._began = time.monotonic(), self.progress, self._own_progress
        self._note_progress(steps)
        while not self._over(steps):
            if (asked() or self._somebody_returns()) and not self._stopped:
                self._announce(_STOP)
                self._stopped = True
            elif not self._turn(steps):
                self._idle()
        own = self._done(steps), self.links.returning(), self._versions
        votes, returning, versions = zip(*self.links.group.gather(own), strict=True)
        self._receive()
        self._stopped = False
        complete = all(votes) if self._together else any(votes)
        if entering := sorted(set.intersection(*map(set, returning))):
            self._admit(entering, reduce(union, versions), complete)
        return complete

    def _begin_new(self) -> None:
        while self._new:
            worker = self._new.pop(0)
            self._begin(worker)
            self._send(worker)

    # --- Processes that come back ---

    def _somebody_returns(self) -> bool:
        """True once for each process that asks this one to be admitted."""
        before, self._seen_returning = self._seen_returning, self.links.returning()
        return bool(set(self._seen_returning) - set(before))

    def _admit(self, processes: list[int], versions: View, complete: bool) -> None:
        """Admit processes, in all survivors, with workers that begin anew."""
        back = [worker for worker, home in self.links.homes.items() if home in processes]
        versions = tuple(v + (1 + (v % 2 == 0)) * (w in back) for w, v in enumerate(versions))
        steps = {index: lives.worker.steps for index, lives in self._lives.items()}
        self._versions = union(self._versions, versions)
        for lives in self._lives.values():
            lives.worker.learn(self._versions)
        self._pending = {edge: of for edge, of in self._pending.items() if edge[1] not in back}
        for process in processes:
            self._progress.pop(process, None)

        def welcome(process: int) -> Any:
            present = [worker for worker in self.everybody if worker not in back]
            wanted = {
                j
                for worker, home in self.links.homes.items()
                if home == process
                for j in sources(known.neighbors(worker), present)
            }
            models = {j: self._model(j) for j in wanted & set(self._lives)}
            return complete, list(self._versions), steps, models, self.of_run()

        known = next(iter(self._lives.values())).worker
        self.links.admit(processes, welcome)

    def _model(self, index: int) -> list[Tensor]:
        row = self._rows[index]
        self.counter.add(row, 8 * sum(rows[row].nbytes for rows in self._models))
        return [rows[row].clone() for rows in self._models]

    def enter(self) -> Any:
        """Enter a run that goes on, when the others admit this process. Returns their `of_run`."""
        models: dict[int, list[Tensor]] = {}
        steps: dict[int, int] = {}
        for complete, versions, of_workers, of_models, _ in (found := self.links.enter()).values():
            self._entered, self._versions = complete, union(self._versions, tuple(versions))
            steps |= of_workers
            models |= of_models
        self._new = []
        for index in self.links.workers:
            begin = sources(self._make(index, self._versions, 0).edges, sorted(models))
            for number, rows in enumerate(self._models):
                rows[self._rows[index]] = torch.stack([models[j][number] for j in begin]).mean(0)
            taken = sum(steps[j] for j in begin) // len(begin)
            self._new.append(self._make(index, self._versions, taken))
        self._begin_new()
        return next(iter(found.values()))[-1]

    # --- Turns ---

    def _over(self, steps: int) -> bool:
        if self._stopped or self._ended >= steps:
            return True
        if not self._done(steps):
            return False
        if not self._together:
            self._ended = steps
            self._announce(_END, steps)
        return True

    def _done(self, steps: int) -> bool:
        if self._together:
            return all(lives.worker.steps >= steps for lives in self._lives.values())
        return self._ended >= steps or self.progress >= steps

    def _turn(self, steps: int) -> bool:
        """Resume the workers that can go on. Returns whether there was one."""
        self._receive()
        resumed = False
        for index, lives in sorted(self._lives.items()):
            worker = lives.worker
            if lives.action is Action.GRADIENT:
                if self._together and worker.steps >= steps:
                    continue
                self._compute(index, worker.steps)
            elif lives.action is Action.WAIT:
                self.find_late(worker)
                if worker.waiting_for():
                    continue
            lives.action = next(lives.actions)
            self._send(worker)
            resumed = True
            if self._stopped or self._ended >= steps:
                break
        self._note_progress(steps)
        return resumed

    def _idle(self) -> None:
        """Wait for a message, or for the next deadline."""
        now, until = time.monotonic(), _LONGEST_WAIT
        if self.survives:
            for index, lives in self._lives.items():
                for j in lives.worker.waiting_for():
                    until = min(until, self._due(index, j) - now)
        with self._measure("communication"):
            self.links.wait(max(0.0, until))

    # --- Messages ---

    def _send(self, worker: Worker) -> None:
        """Send the worker's messages."""
        i, now = worker.index, time.monotonic()
        for j, message in worker.take_outbox():
            assert message.part is not None
            pending = self._pending_of(i, j)
            pending.since = now
            if message.k in worker.edges[j].inbox:
                pending.deadline.record(0.0)
            payload = packed(message, self.survives)
            of_view = bits_of_view(message.view) if self.survives else 0
            self.counter.add(self._rows[i], 8 * message.part.nbytes + of_view)
            self.links.send(i, j, message.k, payload)

    def _receive(self) -> None:
        """Take in all messages that have arrived, and news of the others."""
        for i, j, k, payload in self.links.poll():
            worker = self._lives[j].worker
            like = worker.rule.variables()[0]
            try:
                message = unpacked(k, payload, like, self._versions, self.survives)
            except (IndexError, RuntimeError, ValueError):
                self.links.reject(self.links.homes[i], f"a message of {len(payload)} bytes")
                continue
            worker.receive(i, message)
            edge = worker.edges.get(i)
            if edge is not None and edge.own is not None and edge.k == k:
                pending = self._pending_of(j, i)
                pending.deadline.record(time.monotonic() - pending.since)
        for worker_index in sorted(self.links.lost()):
            if self._versions[worker_index] % 2 == 0:
                self._versions = raised(self._versions, worker_index)
        for lives in self._lives.values():
            lives.worker.learn(self._versions)
        for process, note in self.links.notes():
            if len(note) != 16:
                self.links.reject(process, f"a note of {len(note)} bytes")
                continue
            kind, value = note.numpy().view(np.int64).tolist()
            if kind == _PROGRESS:
                self._progress[process] = value
            elif kind == _END:
                self._ended = max(self._ended, value)
            else:
                self._stopped = True

    def _announce(self, kind: int, value: int = 0) -> None:
        self.links.note(np.array([kind, value], dtype=np.int64))

    def _note_progress(self, end: int) -> None:
        """Announce new steps, the more often the nearer the end of this run of steps is."""
        if self._together or self._noted[1] == self.steps:
            return
        now, (began, all_before, own_before) = time.monotonic(), self._began
        # The progress of the others is known with a delay. Workers mostly have one speed.
        rest = min(
            (end - done) * (now - began) / max(done - before, 1e-9)
            for done, before in ((self.progress, all_before), (self._own_progress, own_before))
        )
        if now - self._noted[0] >= max(_BETWEEN_NOTES, _OF_REST * rest):
            self._noted = now, self.steps
            self._announce(_PROGRESS, self.steps)

    # --- Deadlines ---

    def _pending_of(self, i: int, j: int) -> _Pending:
        found = self._pending.get((i, j))
        if found is None:
            found = self._pending[i, j] = _Pending()
        return found

    def _due(self, i: int, j: int) -> float:
        """The time after which worker i does not wait for the present exchange with j."""
        pending = self._pending_of(i, j)
        seconds = pending.deadline.seconds
        if math.isinf(seconds) and self._lives[i].worker.edges[j].begins_later:
            seconds = _FIRST_DEADLINE
        return pending.since + seconds

    def find_late(self, worker: Worker) -> None:
        """Regard exchanges as late if their deadline has passed."""
        if self.survives:
            now = time.monotonic()
            for j in worker.waiting_for():
                if now > self._due(worker.index, j):
                    worker.late.add(j)

    # --- State ---

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Everything but x and the counter, by worker of this process. To be called after `run`."""
        return {index: {"worker": saved} for index, saved in self._saved().items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the state returned by `state_dict()`, after x. To be called before `run`."""
        self._new = []
        for index, found in state.items():
            worker = self._restore(index, found["worker"])
            self._versions = union(self._versions, worker.view)
            for j in worker.edges:
                self._pending_of(index, j).since = time.monotonic()
