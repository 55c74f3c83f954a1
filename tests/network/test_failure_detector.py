"""Silence of processes, with a clock and messages of the test's own. No MPI."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from powergossip.errors import Dropped, Stopped
from powergossip.network.resilient import failure_detector
from powergossip.network.resilient.collectives import LiveProcesses
from powergossip.network.resilient.failure_detector import DATA, DROPPED, LOST, Peers
from powergossip.network.resilient.heartbeats import Identity, Liveness, exchange_identities
from powergossip.network.resilient.messages import Envelope, Payload, decoded, octets
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.metrics import Hooks
from powergossip.training.asynchronous.rows import SharedRows
from tests.harness.helpers import wait_until

TIMEOUT = 8.0


class Wire:
    """Messages that the test puts in, and those that were sent."""

    transport, has_own_files = "mpi", False

    def __init__(self, own: int = 0) -> None:
        self.own = own
        self.lost: set[int] = set()
        self.ended: set[int] = set()
        self.sent: list[tuple[int, int, int]] = []  # destination, kind, i
        self.arriving: list[Envelope] = []

    def send(self, process: int, kind: int, i: int = 0, *rest: object, **named: object) -> None:
        self.sent.append((process, kind, i))

    def receive(self) -> list[Envelope]:
        arrived, self.arriving = self.arriving, []
        return [message for message in arrived if message.source not in self.lost]

    def remove(self, process: int) -> None:
        self.lost.add(process)

    def put(self, source: int, kind: int, i: int = 0) -> None:
        self.arriving.append(Envelope(source, kind, i, 0, 0, torch.empty(0, dtype=torch.uint8)))


class Living:
    """The processes that live, for the test to change."""

    def __init__(self, *processes: int, seen: bool = True) -> None:
        self.processes, self.seen = set(processes), seen

    def sees(self, process: int) -> bool:
        return self.seen

    def lives(self, process: int) -> bool:
        return process in self.processes

    def remove(self, process: int) -> None:
        self.processes.discard(process)


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def three(wire: Wire, *living: int) -> Peers:
    identities = {process: Identity("host", process, "0") for process in range(3)}
    return Peers(wire, Living(*living), identities, TIMEOUT)  # type: ignore[arg-type]


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


def test_a_process_that_lives_may_be_silent_for_any_time(clock: Clock) -> None:
    """One that is silent meanwhile is lost on time."""
    found = three(Wire(), 1)
    live(clock, found, 1.5 * TIMEOUT)
    assert found.alive == {0, 1}
    live(clock, found, 100 * TIMEOUT)
    assert found.alive == {0, 1}


@pytest.mark.parametrize("size", [2, 5, 6])
def test_one_side_of_a_network_that_splits_goes_on(clock: Clock, size: int) -> None:
    """The one with more processes, or with as many the one with process 0."""
    identities = {process: Identity("host", process, "0") for process in range(size)}
    for number in range(1, 2**size - 1):
        side = {process for process in identities if number >> process & 1}
        goes_on = 2 * len(side) > size or (2 * len(side) == size and 0 in side)
        for own in side:
            living = Living(*side, seen=False)
            found = Peers(Wire(own), living, identities, TIMEOUT)  # type: ignore[arg-type]
            if goes_on:
                live(clock, found, 2 * TIMEOUT)
                continue
            with pytest.raises(Stopped) as caught:
                live(clock, found, 2 * TIMEOUT)
            assert isinstance(caught.value, Dropped) == (own != min(side)), "one exit code"


def test_processes_that_are_seen_to_be_stopped_or_have_ended_are_no_side(clock: Clock) -> None:
    """Process 0 and one that is silent are equal sides. It goes on."""
    for first in ("stopped", "lost by another", "ended"):
        wire, living = Wire(), Living(1, seen=first != "ended")
        found = three(wire)
        found.liveness = living  # type: ignore[assignment]
        if first == "lost by another":
            wire.put(1, LOST, 2)  # which it does not see
        live(clock, found, 2 * TIMEOUT)
        assert found.alive == {0, 1}
        if first == "ended":
            wire.ended.add(2)
        living.processes, living.seen = set(), False
        live(clock, found, 2 * TIMEOUT)
        assert found.alive == {0}, first


def test_a_process_that_lives_again_in_time_is_kept(clock: Clock) -> None:
    wire, living = Wire(), Living(1)
    found = three(wire)
    found.liveness = living  # type: ignore[assignment]
    for _ in range(5):
        live(clock, found, 0.9 * TIMEOUT)
        living.processes ^= {2}
        live(clock, found, 1.0)
        living.processes ^= {2}
    assert found.alive == {0, 1, 2}


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
    survivors = LiveProcesses(three(wire))
    survivors.agreed = nullcontext  # type: ignore[method-assign,assignment]
    survivors.gather = lambda value: [value]  # type: ignore[method-assign]
    checkpoints, state = Checkpoints(tmp_path, survivors), {"rows": torch.zeros(1)}
    checkpoints.save(1, range(1), state, {})
    written: list[str] = []
    hooks = Hooks(log_metric=lambda name, *_: written.append(name))
    counted = torch.zeros(1)
    network = SimpleNamespace(processes=survivors, bits=counted, messages=counted)
    rows = SharedRows(hooks, network, lambda: 0.0)  # type: ignore[arg-type]
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


def test_a_stopped_process_does_not_live_and_a_busy_one_does() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        own = Identity.own()
        start = stat.read_text().rpartition(")")[2].split()[19]
        identities = {0: own, 1: replace(own, pid=child.pid, start=start)}
        liveness = Liveness(None, 0, identities, 1.0)

        assert liveness.lives(1)
        child.send_signal(signal.SIGSTOP)
        wait_until(partial(_is, liveness, 1, False))
        child.send_signal(signal.SIGCONT)
        wait_until(partial(_is, liveness, 1, True))
        child.kill()
        wait_until(partial(_is, liveness, 1, False))
    assert not identities[1].can_be_ended
    assert not replace(own, start="another").runs, "a later process of the same index"


def _is(liveness: Liveness, process: int, lives: bool) -> bool:
    return liveness.lives(process) == lives


class Heartbeats(Wire):
    """Those that a thread sends, without MPI."""

    named: set[int] = set()  # noqa: RUF012 by the last one

    def send(self, *_: object, payload: Payload, **__: object) -> None:  # type: ignore[override]
        self.named = decoded(octets(payload))


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> Heartbeats:
    found = Heartbeats()
    monkeypatch.setattr("powergossip.network.resilient.heartbeats.MPIWire", lambda *_: found)
    return found


def test_heartbeats_do_not_name_stopped_processes(heartbeats: Heartbeats) -> None:
    """Process 1 is on this host, process 2 on another one."""
    own = Identity.own()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        of_host = replace(own, pid=child.pid, start=start)
        identities = {0: own, 1: of_host, 2: replace(own, host="another")}
        liveness = Liveness(None, 0, identities, 0.2)
        try:
            assert liveness.lives(2), "before its first heartbeat"
            wait_until(lambda: heartbeats.named == {0, 1}, 20)
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: heartbeats.named == {0}, 20)
        finally:
            child.kill()
            liveness.close()


@pytest.mark.parallel(4)
def test_heartbeats_name_the_processes_of_their_host() -> None:
    """Two believe to be on one host, two on another. Process 1 sends no heartbeats, 0 does."""
    communicator = MPI.COMM_WORLD
    own, known = communicator.rank, exchange_identities(communicator)
    given = {p: replace(of, host=f"host {p // 2}") for p, of in known.items()}
    liveness = Liveness(communicator, own, given, 0.2)
    if own == 1:
        liveness.close()
    for process in (0, 1, 2, 3):
        assert liveness.sees(process) == (process // 2 == own // 2)
        if own >= 2 > process:
            for lives in (False, True):  # heard of it once, and again
                wait_until(partial(_is, liveness, process, lives))
    communicator.Barrier()
    liveness.close()
