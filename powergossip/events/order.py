"""The order of events of a run, as a file, and its replay.

A line of the file is an event in JSON: seconds, kind, worker, neighbor j and counter k of the
exchange (−1 where there is none). A real run and the virtual clock write the same kinds:

    begin, gradient, finish   of a step: see worker.Worker
    start                     part k is computed and sent to j
    apply                     exchange k with j is applied
    skip                      exchange k with j is skipped: j's part was lost
    forget                    the edge with j is forgotten: k is the new version of j

The events of a worker are in the order in which they happened to it, and a part is sent before it
is applied. That determines every bit of the run.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from powergossip.checks import BadValue
from powergossip.events.worker import Message, Worker


class Entry(NamedTuple):
    """An event."""

    time: float
    kind: str
    worker: int
    neighbor: int
    counter: int


_KEYS = ("time", "kind", "worker", "neighbor", "counter")


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Append events to a file."""
    with path.open("a") as file:
        for entry in entries:
            file.write(json.dumps(dict(zip(_KEYS, entry, strict=True))) + "\n")


def read(path: Path) -> list[Entry]:
    """Read a file of events. Raises BadValue for a line that is none."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            values = json.loads(line)
            entries.append(Entry(*(values[key] for key in _KEYS)))
        except (ValueError, KeyError, TypeError) as error:
            raise BadValue("order", f"{path}:{number}", f"a line with {', '.join(_KEYS)}") from error
    return entries


def replay(
    entries: Iterable[Entry], workers: Mapping[int, Worker], compute: Callable[[int, int], None]
) -> None:
    """Let the events of a file happen to workers in their state at the start.

    compute  # (worker, its step): the gradient of that step, see VirtualClock
    """
    parts: dict[tuple[int, int, int, int], Message] = {}  # i, j, incarnation, k
    for entry in entries:
        worker, j = workers[entry.worker], entry.neighbor
        if entry.kind == "begin":
            worker.rule.begin()
        elif entry.kind == "gradient":
            compute(worker.index, worker.steps)
            worker.rule.correct()
            if not worker.rule.overlapping:
                worker.rule.update()
        elif entry.kind == "finish":
            worker.finish()
        elif entry.kind == "start":
            worker.start(j)
            ((_, message),) = worker.take_outbox()
            parts[worker.index, j, message.incarnation, message.k] = message
        elif entry.kind in ("apply", "skip"):
            message = parts.pop((j, worker.index, worker.edges[j].incarnation, entry.counter))
            lost = Message(message.k, message.incarnation, message.view, None)
            worker.receive(j, lost if entry.kind == "skip" else message)
            worker.apply(j)
        else:
            assert entry.kind == "forget", entry
            view = list(worker.view)
            view[j] = entry.counter
            worker.learn(tuple(view))
        worker.log.clear()
