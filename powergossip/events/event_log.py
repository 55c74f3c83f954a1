"""The order of events of a run, as a file.

A line of the file is an event in JSON: seconds, kind, worker, neighbor j and counter k of the
exchange (−1 where there is none). A real run and the virtual clock write the same kinds::

    begin, gradient, finish   of a step: see worker.Worker
    start                     part k is computed and sent to j
    apply                     exchange k with j is applied
    skip                      exchange k with j is skipped: j's part was lost
    learn                     the worker knows that version k of j is the latest: j is lost, or new
    die                       the worker ends
    join                      a replacement begins with the mean of the neighbors' models. k: steps
    epoch                     the end of epoch k, after its evaluation
    views                     messages carry the view of their sender, in k bits (−1: any number)
    workers, steps            the number k of workers, and of steps in an epoch
    edge                      the topology has the edge with j > worker

The events of a worker are in the order in which they happened to it, and a part is sent before it
is applied. That determines every bit of the run.
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from powergossip import reading
from powergossip.checks import BadValue
from powergossip.errors import CannotWrite


class Entry(NamedTuple):
    """An event."""

    time: float
    kind: str
    worker: int
    neighbor: int
    counter: int


OF_RUN = ("views", "workers", "steps", "edge")  # kinds that are no events
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


def of_run(n_workers: int, steps_per_epoch: int, edges: Iterable[Sequence[int]]) -> list[Entry]:
    """The lines by which `check` knows a run."""
    return [
        Entry(0.0, "workers", -1, -1, n_workers),
        Entry(0.0, "steps", -1, -1, steps_per_epoch),
        *(Entry(0.0, "edge", int(i), int(j), -1) for i, j in edges),
    ]


def check(path: Path, entries: Sequence[Entry], run: Sequence[Entry], num_epochs: int) -> None:
    """Raise BadValue unless a run can repeat the events of a file.

    Args:
        run: Lines of the run, by `of_run`. Those that the file does not have are not compared.
    """
    if not any(entry.worker >= 0 and entry.kind not in OF_RUN for entry in entries):
        raise BadValue("replay", path, "a file with events, of record_order=true")
    recorded = {entry.kind: entry.counter for entry in entries if entry.kind in OF_RUN}
    given = {entry.kind: entry.counter for entry in run}
    last = max(entry.worker for entry in entries)  # others may have joined later, without events
    recorded.setdefault("workers", max(given["workers"], last + 1))
    for kind, text in (("workers", "{} workers"), ("steps", "{} steps per epoch")):
        if recorded.get(kind, given[kind]) != given[kind]:
            accepted = f"{text.format(recorded[kind])} in place of {given[kind]}, as recorded"
            raise BadValue("replay", path, accepted)
    edges = {entry for entry in entries if entry.kind == "edge"}
    if edges and edges != {entry for entry in run if entry.kind == "edge"}:
        raise BadValue("replay", path, "the topology of the recorded run, which has other edges")
    steps: dict[int, int] = {}  # of the workers alive
    for entry in entries:
        if entry.kind in ("begin", "finish"):
            steps[entry.worker] = steps.get(entry.worker, 0) + (entry.kind == "finish")
        elif entry.kind == "join":
            steps[entry.worker] = entry.counter
        elif entry.kind == "die":
            steps.pop(entry.worker, None)
    ended = max((entry.counter for entry in entries if entry.kind == "epoch"), default=0)
    # A run that diverged has no end of its last epoch.
    enough = sum(steps.values()) >= num_epochs * given["steps"] * len(steps)
    if num_epochs > ended and not enough:
        raise BadValue("replay", path, f"num_epochs={ended} or less: the file has no more")


def read(path: Path, complete: bool = False) -> list[Entry]:
    """Read a file of events, without an incomplete last line.

    Raises:
        BadValue: For a file that cannot be read, for a line that is no event, and with `complete`
            for an incomplete last line.
    """
    entries = []
    try:
        *lines, last = reading.text(path).split("\n")
    except reading.Unreadable as error:
        raise BadValue("replay", path, f"a file of events ({error})") from error
    if complete and last:
        raise BadValue("replay", path, f"a complete file: line {len(lines) + 1} is cut off")
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

    A part is sent before it is applied, and otherwise earlier times come first: the clocks of
    processes may differ. All processes meet when a replacement joins, and at the end of an epoch:
    earlier events of each come before, later ones after. A lost worker dies after its last event,
    or before all others if it has none.

    Args:
        parts: Events of each process, in the order in which the processes were started.
        lost: Workers that are lost at the end.

    Raises:
        ValueError: For a part that is applied but was never sent.
    """
    sent: Counter[tuple[int, int, int]] = Counter()  # i, j, k → sent, not applied
    joins: Counter[int] = Counter()  # worker → replacements so far
    facts = dict.fromkeys(entry for part in parts for entry in part if entry.kind in OF_RUN)
    parts = [[entry for entry in part if entry.kind not in OF_RUN] for part in parts]
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
    found = [*facts, *(Entry(0.0, "die", worker, -1, -1) for worker in sorted(silent))]

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
