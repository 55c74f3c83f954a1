"""Replay of the order of events of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from powergossip.errors import BadInput
from powergossip.events.event_log import RUN_KINDS, Entry
from powergossip.events.joining import Compute, Make, VirtualTime
from powergossip.events.members import raised
from powergossip.events.packing import bits_of_view
from powergossip.events.worker import Message, Worker, packed, unpacked
from powergossip.network.counter import Counter


class Replay(VirtualTime):
    """Repeats the events of a file, for workers in their state at the start.

    It has the attributes and methods of VirtualClock, and counts the same as the run. `order` has
    nothing new.

    Args:
        steps_per_epoch: Number of steps of each worker in an epoch.

    Raises:
        BadInput: If the file ends before the steps of `run`, or has events of another method.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        steps_per_epoch: int,
        models: Sequence[Tensor],
        make: Make,
        compute: Compute,
        counter: Counter | None = None,
    ):
        first = {e.worker: e.kind for e in reversed(entries) if e.kind not in RUN_KINDS}
        n = len(models[0])
        # A worker that joins after the last event has none.
        absent = [i for i in range(n) if entries and first.get(i, "join") == "join"]
        super().__init__(absent, models, make, compute, counter)
        # Bits of the view in each message of the run: none, a number, or below 0 by its contents.
        self._bits_of_view = next((e.counter for e in entries if e.kind == "views"), 0)
        self._entries, self._next, self._steps_per_epoch = entries, 0, steps_per_epoch
        self._workers = {i: make(i, self._versions, 0) for i in range(n) if i not in absent}
        # i, j, incarnation, k → a part that is sent and not applied
        self._parts: dict[tuple[int, int, int, int], Message] = {}

    @property
    def workers(self) -> Mapping[int, Worker]:
        return self._workers

    def run(self, steps: float) -> None:
        """Process events until `progress` is that number of steps or more.

        An epoch ends where it ended in the recorded run, whatever the progress. A run that diverged
        has no end of its last epoch: then all events happen.
        """
        epoch, rest = divmod(steps, self._steps_per_epoch)
        while not self._has_ended(epoch + (rest > 0)) and (rest == 0 or self.progress < steps):
            if self._next == len(self._entries):
                if self.progress >= steps:
                    break
                raise BadInput(f"replay: use fewer epochs: the file ends at {self.now:g} s")
            self.advance()

    def end_epoch(self, epoch: int) -> None:
        """Do nothing: the file has the ends of epochs."""

    def _has_ended(self, epoch: float) -> bool:
        """True if the next event is the end of this epoch."""
        following = self._entries[self._next : self._next + 1]
        return any(entry.kind == "epoch" and entry.counter >= epoch for entry in following)

    def advance(self) -> None:
        """Process the next event."""
        entry = self._entries[self._next]
        self._next += 1
        self.now = max(self.now, entry.time)
        if entry.kind in ("epoch", *RUN_KINDS):
            return
        if entry.kind == "die":
            self._versions = raised(self._versions, entry.worker)
            del self._workers[entry.worker]
            return
        if entry.kind == "join":
            self._workers[entry.worker], _ = self._joined(entry.worker, entry.counter)
            return
        if not self._fits(entry):
            event = f"{entry.kind} of worker {entry.worker}, neighbor {entry.neighbor}"
            raise BadInput(f"replay: use the file of such a run: {event} does not fit this one")
        worker = self._workers[entry.worker]
        self._happen(worker, entry)
        worker.log.clear()

    def _fits(self, entry: Entry) -> bool:
        """True if the event can happen to its worker."""
        worker = self._workers.get(entry.worker)
        if worker is None or entry.neighbor < 0 or entry.kind == "learn":
            return worker is not None
        edge = worker.edges.get(entry.neighbor)
        if edge is None or entry.kind == "start":
            return edge is not None and edge.own is None
        return (entry.neighbor, worker.index, edge.incarnation, entry.counter) in self._parts

    def _happen(self, worker: Worker, entry: Entry) -> None:
        i, j = worker.index, entry.neighbor
        if entry.kind == "begin":
            worker.rule.begin()
        elif entry.kind == "gradient":
            self._compute(i, worker.steps)
            worker.rule.clip()
            if not worker.rule.overlapping:
                worker.rule.move()
        elif entry.kind == "finish":
            worker.finish()
        elif entry.kind == "start":
            worker.start(j)
            ((_, message),) = worker.take_outbox()
            assert message.part is not None
            of_view = self._bits_of_view
            of_view = of_view if of_view >= 0 else bits_of_view(message.view)
            self.counter.add(i, 8 * message.part.nbytes + of_view)
            self._parts[i, j, message.incarnation, message.k] = message
        elif entry.kind in ("apply", "skip"):
            message = self._parts.pop((j, i, worker.edges[j].incarnation, entry.counter))
            lost = Message(message.k, message.incarnation, message.view, None)
            worker.receive(j, lost if entry.kind == "skip" else message)
            worker.apply(j)
        else:
            assert entry.kind == "learn", entry
            worker.learn(tuple(max(v, entry.counter * (w == j)) for w, v in enumerate(worker.view)))

    def state_dict(self) -> dict[str, Any]:
        """Everything but x, the file and the counter. For load_state_dict."""
        return {
            "now": self.now,
            "next": self._next,
            "versions": list(self._versions),
            "parts": [[list(key), packed(message)] for key, message in self._parts.items()],
            "workers": {index: worker.state_dict() for index, worker in self._workers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, after x."""
        self.now, self._next = state["now"], state["next"]
        self._versions = tuple(state["versions"])
        self._parts = {(i, j, e, k): unpacked(m) for (i, j, e, k), m in state["parts"]}
        self._workers = {}
        for index, saved in state["workers"].items():
            worker = self._make(index, tuple(saved["view"]), saved["steps"])
            worker.load_state_dict(saved)
            self._workers[index] = worker
