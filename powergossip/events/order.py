"""The order of events of a run, as a file, and its replay.

A line of the file is an event in JSON: seconds, kind, worker, neighbor j and counter k of the
exchange (−1 where there is none). A real run and the virtual clock write the same kinds:

    begin, gradient, finish   of a step: see worker.Worker
    start                     part k is computed and sent to j
    apply                     exchange k with j is applied
    skip                      exchange k with j is skipped: j's part was lost
    learn                     the worker knows that version k of j is the latest: j is lost, or new
    die                       the worker ends
    join                      a replacement begins with the mean of its neighbors' x. k: its steps
    epoch                     the end of epoch k, after its evaluation

The events of a worker are in the order in which they happened to it, and a part is sent before it
is applied. That determines every bit of the run.
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergossip import reading
from powergossip.checks import BadValue
from powergossip.errors import CannotWrite
from powergossip.events.members import View, union
from powergossip.events.worker import Message, Worker, packed, unpacked

Compute = Callable[[int, int], None]  # (worker, its step): the gradient of that step
Make = Callable[[int, View, int], Worker]  # (worker, its view, its steps) → a new Worker


class Entry(NamedTuple):
    """An event."""

    time: float
    kind: str
    worker: int
    neighbor: int
    counter: int


_KEYS = ("time", "kind", "worker", "neighbor", "counter")


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Append events to a file. Raises CannotWrite."""
    try:
        with path.open("a") as file:
            for entry in entries:
                file.write(json.dumps(dict(zip(_KEYS, entry, strict=True))) + "\n")
    except OSError as error:
        raise CannotWrite(f"the order of events {path}: {error.strerror or error}") from error


def write_whole(path: Path, entries: Iterable[Entry]) -> None:
    """Write a file of events, which is there with all of them or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    write(part, entries)
    part.replace(path)


def read(path: Path) -> list[Entry]:
    """Read a file of events, without an incomplete last line.

    Raises BadValue for a file that cannot be read or another line.
    """
    entries = []
    try:
        lines = reading.text(path).split("\n")[:-1]
    except reading.Unreadable as error:
        raise BadValue("replay", path, f"a file of events ({error})") from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            entries.append(Entry(*(values[key] for key in _KEYS)))
        except (ValueError, KeyError, TypeError) as error:
            place = f"{path}:{number}"
            raise BadValue("replay", place, f"a line with {', '.join(_KEYS)}") from error
    return entries


def merged(parts: Sequence[Sequence[Entry]], lost: Iterable[int]) -> list[Entry]:
    """The events of all workers in one order, from those of each process in its own.

    parts  # in the order in which the processes were started
    lost   # workers at the end

    A part is sent before it is applied, and otherwise earlier times come first: the clocks of
    processes may differ. All processes meet when a replacement joins, and at the end of an epoch:
    earlier events of each come before, later ones after. A lost worker dies after its last event,
    or before all others if it has none. Raises ValueError where a part is applied that none has
    sent.
    """
    sent: Counter[tuple[int, int, int]] = Counter()  # i, j, k → sent, not applied
    joins: Counter[int] = Counter()  # worker → replacements so far
    queues = [deque(part) for part in parts]
    hosts: dict[int, list[int]] = defaultdict(list)  # worker → its parts
    learning: dict[tuple[int, int], list[int]] = defaultdict(list)  # worker, version → parts
    for index, part in enumerate(parts):
        for worker in {entry.worker for entry in part}:
            hosts[worker].append(index)
        for known in {(e.neighbor, e.counter) for e in part if e.kind == "learn"}:
            learning[known].append(index)

    def is_next(entry: Entry) -> bool:
        if entry.kind == "learn" and entry.counter % 2 == 0:
            return joins[entry.neighbor] >= entry.counter // 2
        if entry.kind == "join":
            worker, version = entry.worker, 2 * joins[entry.worker] + 2
            fronts = [queues[index][0] for index in learning[worker, version]]
            own = next(i for i, queue in enumerate(queues) if queue and queue[0] is entry)
            ended = [index for index in hosts[worker] if index < own]
            return not any(queues[index] for index in ended) and all(
                (front.kind, front.neighbor, front.counter) == ("learn", worker, version)
                for front in fronts
            )
        if entry.kind == "epoch":  # a process whose next event is its join is not there yet
            return all(queue[0].kind in ("epoch", "join") for queue in queues if queue)
        key = entry.neighbor, entry.worker, entry.counter
        return entry.kind not in ("apply", "skip") or sent[key] > 0

    lost = set(lost)
    deaths = _deaths(parts, lost)
    opening: dict[int, str] = {}  # worker → kind of its first event
    for part in parts:
        for entry in part:
            opening.setdefault(entry.worker, entry.kind)
    silent = (lost - set(opening)) | {w for w, kind in opening.items() if kind == "join"}
    found = [Entry(0.0, "die", worker, -1, -1) for worker in sorted(silent)]

    def take(queue: deque[Entry]) -> Entry:
        entry = queue.popleft()
        found.append(entry)
        if id(entry) in deaths:
            found.append(Entry(entry.time, "die", entry.worker, -1, -1))
        return entry

    while any(queues):
        ready = [queue for queue in queues if queue and is_next(queue[0])]
        if not ready:
            first = next(queue[0] for queue in queues if queue)
            raise ValueError(f"the order of events has no part for {first}")
        entry = take(min(ready, key=lambda queue: queue[0].time))
        if entry.kind == "start":
            sent[entry.worker, entry.neighbor, entry.counter] += 1
        elif entry.kind in ("apply", "skip"):
            sent[entry.neighbor, entry.worker, entry.counter] -= 1
        elif entry.kind == "join":
            joins[entry.worker] += 1
            for key in [key for key in sent if entry.worker in key[:2]]:
                del sent[key]  # of edges that are no more
        elif entry.kind == "epoch":
            for queue in queues:
                while queue and (queue[0].kind, queue[0].counter) == ("epoch", entry.counter):
                    take(queue)
    return found


def _deaths(parts: Sequence[Sequence[Entry]], lost: set[int]) -> set[int]:
    """The identities of the last events of workers that died, and may have been replaced."""
    of_worker: dict[int, list[Entry]] = defaultdict(list)  # the last event in each part
    for part in parts:
        for worker, entry in {entry.worker: entry for entry in part}.items():
            of_worker[worker].append(entry)
    return {
        id(entry)
        for worker, last in of_worker.items()
        for entry in (last if worker in lost else last[:-1])
    }


class Replay:
    """Lets the events of a file happen again, to workers in their state at the start.

    The attributes and methods are those of VirtualClock. Bits are those of the parts. Raises
    BadValue where the file ends before the steps of `run`.

    steps_per_epoch  # of each worker
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        steps_per_epoch: int,
        x: Tensor,
        make: Make,
        compute: Compute,
    ):
        n = len(x)
        first = {entry.worker: entry.kind for entry in reversed(entries)}
        # A worker that joins after the last event has none.
        absent = [i for i in range(n) if entries and first.get(i, "join") == "join"]
        self.now = 0.0
        self.bits, self.messages = [0] * n, [0] * n
        self._entries, self._next, self._steps_per_epoch = entries, 0, steps_per_epoch
        self._x, self._make, self._compute = x, make, compute
        self._versions: View = tuple(int(i in absent) for i in range(n))
        self._workers = {i: make(i, self._versions, 0) for i in range(n) if i not in absent}
        # i, j, incarnation, k → a part that is sent and not applied
        self._parts: dict[tuple[int, int, int, int], Message] = {}

    @property
    def workers(self) -> Mapping[int, Worker]:
        return self._workers

    @property
    def alive(self) -> list[int]:
        """The workers alive, ascending."""
        return sorted(self._workers)

    @property
    def progress(self) -> float:
        """The mean number of steps of the workers alive."""
        return sum(worker.steps for worker in self._workers.values()) / len(self._workers)

    def run(self, steps: float) -> None:
        """Let events happen until `progress` is that number of steps or more.

        An epoch ends where it ended in the recorded run, whatever the progress. A run that diverged
        has no end of its last epoch: then all events happen.
        """
        epoch, rest = divmod(steps, self._steps_per_epoch)
        while not self._has_ended(epoch + (rest > 0)) and (rest == 0 or self.progress < steps):
            if self._next == len(self._entries):
                if self.progress >= steps:
                    break
                raise BadValue("replay", "the file", f"fewer epochs: it ends at {self.now:g} s")
            self.advance()

    def end_epoch(self, epoch: int) -> None:
        """Do nothing: the file has the ends of epochs."""

    def _has_ended(self, epoch: float) -> bool:
        """Whether the next event is the end of this epoch."""
        following = self._entries[self._next : self._next + 1]
        return any(entry.kind == "epoch" and entry.counter >= epoch for entry in following)

    def advance(self) -> None:
        """Let the next event happen."""
        entry = self._entries[self._next]
        self._next += 1
        self.now = max(self.now, entry.time)
        if entry.kind == "epoch":
            return
        if entry.kind in ("die", "join"):
            self._versions = raised(self._versions, entry.worker)
            if entry.kind == "die":
                del self._workers[entry.worker]
                return
            newcomer, sources = begin_late(
                entry.worker, entry.counter, self._versions, self._workers, self._x, self._make
            )
            self._workers[entry.worker] = newcomer
            for j in sources:
                self.bits[j] += 8 * self._x[j].numel() * self._x.element_size()
                self.messages[j] += 1
            return
        worker = self._workers[entry.worker]
        self._happen(worker, entry)
        worker.log.clear()

    def _happen(self, worker: Worker, entry: Entry) -> None:
        i, j = worker.index, entry.neighbor
        if entry.kind == "begin":
            worker.rule.begin()
        elif entry.kind == "gradient":
            self._compute(i, worker.steps)
            worker.rule.correct()
            if not worker.rule.overlapping:
                worker.rule.update()
        elif entry.kind == "finish":
            worker.finish()
        elif entry.kind == "start":
            worker.start(j)
            ((_, message),) = worker.take_outbox()
            assert message.part is not None
            self.bits[i] += 8 * message.part.numel() * message.part.element_size()
            self.messages[i] += 1
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
        """Everything but x and the file. For load_state_dict."""
        return {
            "now": self.now,
            "next": self._next,
            "versions": list(self._versions),
            "bits": list(self.bits),
            "messages": list(self.messages),
            "parts": [[list(key), packed(message)] for key, message in self._parts.items()],
            "workers": {index: worker.state_dict() for index, worker in self._workers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, after x."""
        self.now, self._next = state["now"], state["next"]
        self._versions = tuple(state["versions"])
        self.bits[:], self.messages[:] = state["bits"], state["messages"]
        self._parts = {(i, j, e, k): unpacked(m) for (i, j, e, k), m in state["parts"]}
        self._workers = {}
        for index, saved in state["workers"].items():
            worker = self._make(index, tuple(saved["view"]), saved["steps"])
            worker.load_state_dict(saved)
            self._workers[index] = worker


def raised(versions: View, index: int) -> View:
    """The versions with the next one of a worker."""
    return tuple(v + (i == index) for i, v in enumerate(versions))


def begin_late(
    index: int,
    steps: int,
    versions: View,
    workers: Mapping[int, Worker],
    x: Tensor,
    make: Make,
) -> tuple[Worker, list[int]]:
    """A worker that joins the others, and those of whose x [worker, D] it has the mean.

    They are its neighbors, or all workers where no neighbor is alive. steps: −1 for their mean.
    """
    view = versions
    for worker in workers.values():
        view = union(view, worker.view)
    sources = [j for j in make(index, view, 0).edges if j in workers] or sorted(workers)
    x[index] = torch.stack([x[j] for j in sources]).mean(0)
    if steps < 0:
        steps = sum(workers[j].steps for j in sources) // len(sources)
    return make(index, view, steps), sources
