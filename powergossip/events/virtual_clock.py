"""The virtual clock: all workers in one process, and their events in the order of virtual time.

Time is virtual seconds. Equal scenarios and seeds give equal bits. At the same time, messages
arrive before workers go on, and otherwise events happen in the order of planning.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.events.clock import Clock, Compute, Make, sources
from powergossip.events.members import View, raised, union
from powergossip.events.scenario import Scenario
from powergossip.events.worker import Action, Message, Worker, packed, unpacked
from powergossip.network.counter import Counter

# At the same time, in this order.
_KINDS = ("die", "join", "notice", "arrive", "resume")


class VirtualClock(Clock):
    """Runs the lives of workers through a scenario.

    Args:
        models: Memory of the workers' models, tensors [worker, ...]: x, buffers.
        make: Function that makes the workers at the start, and replacements.
        compute: Function called when the time of a gradient is over, with x as it was when it
            began.
        counter: Counter of the bits and messages of each worker.

    Attributes:
        now: Virtual seconds since the start.
        workers: The workers alive, by index.
    """

    def __init__(
        self,
        scenario: Scenario,
        models: Sequence[Tensor],
        make: Make,
        compute: Compute,
        counter: Counter | None = None,
    ):
        n = len(models[0])
        super().__init__(make, compute, counter or Counter(n))
        self.scenario, self._models = scenario, models
        self._versions: View = tuple(int(i in scenario.absent) for i in range(n))
        self.now = 0.0
        self._heap: list[tuple[float, int, int, list[Any]]] = []
        self._planned = 0
        self._resuming: set[int] = set()  # workers that wait and have a resumption planned
        for deaths in scenario.deaths:
            self._plan(deaths.at, "die", deaths.worker)
        for join in scenario.joins:
            self._plan(join.at, "join", join.worker)
        for index in range(scenario.n_workers):
            if index not in scenario.absent:
                self._start(make(index, self._versions, 0))

    @property
    def progress(self) -> float:
        """The mean number of steps of the workers alive."""
        workers = self.workers.values()
        return sum(worker.steps for worker in workers) / len(workers)

    def run(self, steps: float) -> None:
        """Process events until `progress` is that number of steps or more."""
        while self.progress < steps:
            self.advance()

    def run_until(self, seconds: float) -> None:
        """Process all events up to this time."""
        while self._heap and self._heap[0][0] <= seconds:
            self.advance()
        self.now = max(self.now, seconds)

    def advance(self) -> None:
        """Process the next event."""
        self.now, kind, _, values = heapq.heappop(self._heap)
        getattr(self, f"_{_KINDS[kind]}")(*values)

    def in_flight(self, j: int, i: int) -> list[Message]:
        """The messages from j to i that are in flight."""
        arrivals = [values for _, kind, _, values in self._heap if _KINDS[kind] == "arrive"]
        return [message for a, b, message in arrivals if (a, b) == (j, i)]

    # --- Events ---

    def _plan(self, time: float, kind: str, *values: Any) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (time, _KINDS.index(kind), self._planned, list(values)))

    def _start(self, worker: Worker) -> None:
        self._begin(worker)
        self._after(worker.index)

    def _after(self, index: int) -> None:
        """Send the worker's messages, and plan its next resumption."""
        lives = self._lives[index]
        self._send(lives.worker)
        version = self._versions[index]
        if lives.action is Action.GRADIENT:
            seconds = self.scenario.seconds(index, lives.worker.steps)
            self._plan(self.now + seconds, "resume", index, version)
        elif lives.action is Action.POLL:
            self._plan(self.now, "resume", index, version)

    def _resume(self, index: int, version: int) -> None:
        """A worker goes on."""
        if self._versions[index] != version:
            return  # it died
        self._resuming.discard(index)
        lives = self._lives[index]
        if lives.action is Action.GRADIENT:
            self._compute(index, lives.worker.steps)
        lives.action = next(lives.actions)
        self._after(index)

    def _send(self, worker: Worker) -> None:
        i, scenario = worker.index, self.scenario
        for j, message in worker.take_outbox():
            assert message.part is not None
            of_view = self._bits_of_view() if scenario.elastic else 0
            bits = 8 * message.part.nbytes + of_view
            self.counter.add(i, bits)
            arrival = self.now + scenario.delay(i, j, message.k, bits)
            if scenario.lost(i, j, message.k):
                message = Message(message.k, message.incarnation, message.view, None)
            self._plan(arrival, "arrive", i, j, message)

    def _bits_of_view(self) -> int:
        """One bit for each worker, or a byte where workers can be replaced."""
        return self.scenario.n_workers * (8 if self.scenario.joins else 1)

    def _arrive(self, i: int, j: int, message: Message) -> None:
        if j in self._lives:
            self._lives[j].worker.receive(i, message)
            self._wake(j)
        elif self._versions[j] % 2:
            self._plan_notice(i, j)

    def _wake(self, index: int) -> None:
        """Resume a worker that waits, if that is not planned yet."""
        if self._lives[index].action is Action.WAIT and index not in self._resuming:
            self._resuming.add(index)
            self._plan(self.now, "resume", index, self._versions[index])

    def _die(self, index: int) -> None:
        neighbors = list(self._lives[index].worker.edges)
        del self._lives[index]
        self._resuming.discard(index)
        self._versions = raised(self._versions, index)
        for j in neighbors:
            self._plan_notice(j, index)

    def _plan_notice(self, index: int, lost: int) -> None:
        """A worker will know that its neighbor is lost."""
        view = [version * (w == lost) for w, version in enumerate(self._versions)]
        self._plan(self.now + self.scenario.detection, "notice", index, view)

    def _notice(self, index: int, view: list[int]) -> None:
        if index in self._lives:
            self._lives[index].worker.learn(tuple(view))
            self._wake(index)

    def _join(self, index: int) -> None:
        """A worker begins with the mean of its neighbors' models, and of their steps.

        Where no neighbor is alive, all workers are in the mean. Their messages are counted.
        """
        view = self._versions = raised(self._versions, index)
        workers = self.workers
        for worker in workers.values():
            view = union(view, worker.view)
        of = sources(self._make(index, view, 0).edges, sorted(workers))
        for rows in self._models:
            rows[index] = torch.stack([rows[j] for j in of]).mean(0)
        for j in of:
            self.counter.add(j, 8 * sum(rows[j].nbytes for rows in self._models))
        joined = self._make(index, view, sum(workers[j].steps for j in of) // len(of))
        for j in of:
            self._notice(j, list(view))
        self._start(joined)

    # --- State ---

    def state_dict(self) -> dict[str, Any]:
        """Everything but x and the counter: the events planned, the workers."""
        events = []
        for time, kind, planned, values in sorted(self._heap, key=lambda event: event[:3]):
            plain = [packed(v) if isinstance(v, Message) else v for v in values]
            events.append([time, kind, planned, plain])
        return {
            "now": self.now,
            "planned": self._planned,
            "versions": list(self._versions),
            "events": events,
            "resuming": sorted(self._resuming),
            "workers": self._saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, after x."""
        self.now, self._planned = state["now"], state["planned"]
        self._versions = tuple(state["versions"])
        self._resuming = set(state["resuming"])
        arrive = _KINDS.index("arrive")
        self._heap = [
            (time, kind, planned, [*values[:2], unpacked(values[2])] if kind == arrive else values)
            for time, kind, planned, values in state["events"]
        ]
        heapq.heapify(self._heap)
        self._lives = {}
        for index, saved in state["workers"].items():
            self._restore(index, saved)
