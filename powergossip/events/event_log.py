"""The order of events of a run, as a file.

A line of the file is an event in JSON: seconds, kind, worker, neighbor j and counter k of the
exchange (−1 without an exchange). A real run and the virtual clock write the same kinds::

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

Each worker's events are in the order of time, and a part is sent before it is applied. That
determines every bit of the run.
"""

import json
from collections import Counter, deque
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


RUN_KINDS = ("views", "workers", "steps", "edge")  # kinds beside events
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


def run_entries(
    n_workers: int, steps_per_epoch: int, edges: Iterable[Sequence[int]]
) -> list[Entry]:
    """The lines by which `check` knows a run."""
    return [
        Entry(0.0, "workers", -1, -1, n_workers),
        Entry(0.0, "steps", -1, -1, steps_per_epoch),
        *(Entry(0.0, "edge", int(i), int(j), -1) for i, j in edges),
    ]


def check(path: Path, entries: Sequence[Entry], run: Sequence[Entry], num_epochs: int) -> None:
    """Raise BadValue unless a run can repeat the events of a file.

    Args:
        run: Lines of the run, by `run_entries`. Those that the file does not have are not compared.
    """
    if not any(entry.worker >= 0 and entry.kind not in RUN_KINDS for entry in entries):
        raise BadValue("replay", path, "a file with events, of record_order=true")
    recorded = {entry.kind: entry.counter for entry in entries if entry.kind in RUN_KINDS}
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
        BadValue: For a file that cannot be read, for a line without an event, and with `complete`
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
    """The events of all workers in one order, from each process's events in its order.

    A part is sent before it is applied, and otherwise earlier times come first: the clocks of
    processes may differ. All processes meet at the end of an epoch: earlier events of each come
    before, later ones after. A lost worker dies after its last event, or before all others if it
    has none.

    Args:
        parts: Events of each process.
        lost: Workers that are lost at the end.

    Raises:
        ValueError: For a part that is applied but was never sent.
    """
    sent: Counter[tuple[int, int, int]] = Counter()  # i, j, k → sent, not applied
    facts = dict.fromkeys(entry for part in parts for entry in part if entry.kind in RUN_KINDS)
    queues = [deque(entry for entry in part if entry.kind not in RUN_KINDS) for part in parts]
    last = {entry.worker: entry for queue in queues for entry in queue}
    lost = set(lost)
    found = [*facts, *(Entry(0.0, "die", worker, -1, -1) for worker in sorted(lost - set(last)))]

    def is_next(entry: Entry) -> bool:
        if entry.kind == "epoch":
            return all(queue[0].kind == "epoch" for queue in queues if queue)
        key = entry.neighbor, entry.worker, entry.counter
        return entry.kind not in ("apply", "skip") or sent[key] > 0

    def take(queue: deque[Entry]) -> Entry:
        entry = queue.popleft()
        found.append(entry)
        if entry.worker in lost and entry is last[entry.worker]:
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
        elif entry.kind == "epoch":
            for queue in queues:
                while queue and (queue[0].kind, queue[0].counter) == ("epoch", entry.counter):
                    take(queue)
    return found
