"""Silence of processes, with a clock and messages of the test's own. No MPI."""

import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from powergossip.errors import Dropped
from powergossip.network import peers
from powergossip.network.membership import Survivors
from powergossip.network.peers import ALIVE, DATA, DROPPED, LOST, QUIET, Identity, Peers
from powergossip.network.wire import Envelope
from powergossip.runs.checkpoints import Checkpoints
from powergossip.training.measurements import Hooks, Rows

TIMEOUT = 8.0


class Wire:
    """Messages that the test puts in, and those that were sent."""

    def __init__(self) -> None:
        self.own = 0
        self.lost: set[int] = set()
        self.ended: set[int] = set()
        self.sent: list[tuple[int, int, int]] = []  # destination, kind, i
        self.arriving: list[Envelope] = []

    def send(self, process: int, kind: int, i: int = 0, *rest: object, **named: object) -> None:
        self.sent.append((process, kind, i))

    def receive(self) -> list[Envelope]:
        arrived, self.arriving = self.arriving, []
        return [message for message in arrived if message.source not in self.lost]

    def forget(self, process: int) -> None:
        self.lost.add(process)

    def put(self, source: int, kind: int, i: int = 0) -> None:
        self.arriving.append(Envelope(source, kind, i, 0, 0, torch.empty(0, dtype=torch.uint8)))


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def three(wire: Wire) -> Peers:
    identities = {process: Identity("host", process, "0") for process in range(3)}
    return Peers(wire, identities, TIMEOUT, identities)  # type: ignore[arg-type]


def live(clock: Clock, found: Peers, seconds: float, before: Callable[[], object] = int) -> None:
    """Calls of `advance` every half second."""
    for _ in range(round(seconds / 0.5)):
        clock.now += 0.5
        before()
        found.advance()


def test_a_process_is_lost_after_worker_timeout_and_not_before(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    live(clock, found, TIMEOUT, lambda: wire.put(1, DATA))
    assert found.alive == {0, 1, 2}
    wire.sent.clear()
    live(clock, found, 0.5, lambda: wire.put(1, DATA))
    assert found.alive == {0, 1}
    assert (2, DROPPED, 0) in wire.sent, "it learns that it was dropped"
    assert (1, LOST, 2) in wire.sent, "and the others as well"
    assert found.dropped() == {2}


def test_the_time_in_which_a_process_was_stopped_itself_counts_little(clock: Clock) -> None:
    found = three(Wire())
    for _ in range(3):
        clock.now += 1000.0
        found.advance()
    assert found.alive == {0, 1, 2}


def test_signs_of_life_are_sent_only_where_nothing_else_is(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    live(clock, found, TIMEOUT / 2, lambda: found.send(1, DATA))
    assert [kind for process, kind, _ in wire.sent if process == 1].count(ALIVE) == 0
    assert 4 <= [kind for process, kind, _ in wire.sent if process == 2].count(ALIVE) <= 10


def test_a_process_in_a_quiet_block_may_be_silent_ten_times_longer(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    wire.put(1, QUIET, 1)
    live(clock, found, 9 * TIMEOUT, lambda: wire.put(2, DATA))
    assert found.alive == {0, 1, 2}
    live(clock, found, 2 * TIMEOUT, lambda: wire.put(2, DATA))
    assert found.alive == {0, 2}


def test_the_end_of_a_quiet_block_ends_the_patience(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    wire.put(1, QUIET, 1)
    wire.put(1, QUIET, 0)
    live(clock, found, 2 * TIMEOUT, lambda: wire.put(2, DATA))
    assert found.alive == {0, 2}


def test_a_quiet_block_regards_none_as_silent(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    with found.quiet():
        live(clock, found, 20 * TIMEOUT)
    live(clock, found, TIMEOUT)
    assert found.alive == {0, 1, 2}
    quiet = [(process, i) for process, kind, i in wire.sent if kind == QUIET]
    assert quiet == [(1, 1), (2, 1), (1, 0), (2, 0)]


def test_a_process_that_waits_in_a_quiet_block_notices_silence(clock: Clock) -> None:
    found = three(Wire())
    with found.quiet(), found.listening():
        live(clock, found, 2 * TIMEOUT)
    assert found.alive == {0}


def test_a_process_dropped_by_another_is_dropped_once(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    wire.put(1, LOST, 2)
    wire.put(2, DATA)
    found.advance()
    assert found.alive == {0, 1}
    assert not any(kind == LOST for _, kind, _ in wire.sent)
    assert found.take(DATA) == [], "its messages are ignored"


def test_a_dropped_process_raises(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    wire.put(2, DROPPED)
    with pytest.raises(Dropped, match="worker_timeout=8"):
        found.advance()


def test_a_dropped_process_writes_neither_a_checkpoint_nor_a_row(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    wire = Wire()
    survivors = Survivors(three(wire))
    survivors.agreed = nullcontext  # type: ignore[method-assign,assignment]
    survivors.gather = lambda value: [value]  # type: ignore[method-assign]
    checkpoints, state = Checkpoints(tmp_path, survivors), {"rows": torch.zeros(1)}
    checkpoints.save(1, range(1), state, {})
    written: list[str] = []
    hooks = Hooks(log_metric=lambda name, *_: written.append(name))
    counted = torch.zeros(1)
    network = SimpleNamespace(processes=survivors, bits=counted, messages=counted)
    rows = Rows(hooks, network, lambda: 0.0)  # type: ignore[arg-type]
    rows("first", 1.0, 1)
    for write in (
        lambda: checkpoints.save(2, range(1), state, {}),
        lambda: rows("second", 1.0, 1),
    ):
        wire.put(2, DROPPED)
        with pytest.raises(Dropped):
            write()
    assert written == ["first"]
    entry = checkpoints.describe()
    assert entry is not None
    assert entry["step"] == 1


def test_a_process_that_was_stopped_reads_the_notice_before_it_sends(clock: Clock) -> None:
    wire = Wire()
    found = three(wire)
    clock.now += 100.0
    wire.put(2, DROPPED)
    with pytest.raises(Dropped):
        found.send(1, DATA)
    assert wire.sent == []
