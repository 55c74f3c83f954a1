"""Machines that meet with a ticket: messages, agreements, strangers and losses."""

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powergossip import join
from powergossip.errors import BadInput, PeerLost
from powergossip.runs import metrics
from powergossip.training.definition import settings

pytest.importorskip("iroh")

from powergossip.network import interfaces, speeds
from powergossip.network.internet import (
    binding,
    codec,
    handshake,
    link_check,
    meeting,
    node,
    tickets,
    wire,
)
from powergossip.network.internet.link import SILENCE, SILENT, Link
from powergossip.network.internet.meeting import Meeting
from powergossip.network.internet.node import Node
from powergossip.network.internet.processes import InternetProcesses
from powergossip.network.resilient.failure_detector import DATA
from tests.harness import internet
from tests.harness.helpers import wait_until
from tests.harness.launch import ROOT, python
from tests.harness.training import reproducible, trained


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], list[InternetProcesses]]]:
    """A function that lets as many machines meet, in threads of this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made: list[InternetProcesses] = []

    def meet(size: int) -> list[InternetProcesses]:
        made.extend(internet.in_threads(size))
        return made

    yield meet
    for processes in made:
        processes.node.close("the test is over")


def everywhere(machines: list[Any], action: Callable[..., Any]) -> list[Any]:
    """action(processes) of all machines, each in a thread of its own."""
    with ThreadPoolExecutor(len(machines)) as pool:
        return [work.result(60) for work in [pool.submit(action, m) for m in machines]]


def test_the_repair_of_the_binding_is_still_needed() -> None:
    """iroh's binding copies byte by byte. If this fails, internet/binding.py needs none."""
    assert binding.builder(binding.iroh()).write is binding.write


def test_agreements_and_messages_are_those_of_other_transports(machines: Any) -> None:
    """Gathered values are equal, and messages of several tags arrive in their order."""

    def run(processes: InternetProcesses) -> Any:
        rank, size = processes.rank, processes.size
        values = processes.gather((rank, {"a": None, 2: [1.5, float("inf")]}, np.arange(rank)))
        rows = processes.gather_arrays(np.full((2, 3), rank))
        time.sleep(0.2 * (rank > 0))  # process 0 waits for the first of two operations
        own, gathering = np.full(5, rank), processes.start_gathering(np.array([rank]))
        processes.broadcast_array(own)
        assert gathering.result().tolist() == [[0], [1], [2]]
        both_signs = np.array([rank, -rank])
        biggest = processes.start_max(both_signs)
        both_signs += 9  # too late
        channel = processes.channel(torch.device("cpu"))
        right, left = (rank + 1) % size, (rank - 1) % size
        came, started = [], []
        for step in range(3):
            both = [(tag, torch.full((2**18 + tag,), 10 * step + tag + rank)) for tag in (0, 7)]
            received = [torch.zeros_like(tensor) for _, tensor in both]
            requests = [
                channel.requests([(left, into)], [(right, tensor)], tag)
                for (tag, tensor), into in zip(both, received, strict=True)
            ]
            for request in requests:
                request.start()
            started.append((requests, received))
        for step, (requests, received) in enumerate(started):  # the second tag is awaited first
            for request in reversed(requests):
                request.wait()
            came += [int(tensor.unique()) - 10 * step - left for tensor in received]
        return values, rows.tolist(), own.tolist(), biggest().tolist(), came

    found = everywhere(machines(3), run)
    for values, rows, own, biggest, came in found:
        assert [rank for rank, *_ in values] == [0, 1, 2]
        assert values[2][1] == {"a": None, 2: [1.5, float("inf")]}
        assert values[2][2].tolist() == [0, 1]
        assert rows == [[[r] * 3] * 2 for r in range(3)]
        assert (own, biggest, came) == ([0] * 5, [2, 0], [0, 7] * 3)


def test_the_links_of_all_edges_are_measured_and_shown_on_all_machines(
    machines: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers as measured and an interface of this host in each direction. QUIC adds bytes."""
    measured: dict[tuple[int, int], tuple[float, float]] = {}

    def measure(*given: Any) -> Any:
        measured.update(found := speeds.measure(*given))
        return found

    monkeypatch.setattr(speeds, "SIZES", (2**16,))
    monkeypatch.setattr(link_check, "measure", measure)
    everywhere(
        machines(3), lambda own: link_check.check(own, [(0, 1), (1, 2)] if own.rank == 0 else [])
    )
    printed = capsys.readouterr().out
    row = r"(\d), (\d) +(\S+) +[\d.]+:\d+ +direct +(\S+) +(\S+) +\+(\S+) %"
    rows = re.findall(row, printed)
    found = sorted((row[0] + row[1], row[2]) for row in rows)
    names = {name for name, _ in interfaces.interfaces()}
    assert [pair for pair, _ in found] == sorted(3 * ["01", "10", "12", "21"])
    assert {name for _, name in found} <= names
    for i, j, _, *numbers in rows:
        latency, bandwidth = measured[int(i), int(j)]
        ms, megabits, percent = map(float, numbers)
        assert (ms, megabits) == pytest.approx((latency / 1e3, 8 * bandwidth), rel=0.02, abs=0.006)
        assert percent > 0
    assert printed.count("3 machines, 2 edges\n") == 3


def test_packets_have_all_messages_and_little_more(machines: Any) -> None:
    """The law of the line at a run's end, for messages of 100 kB: at least their bytes, at most 5 %
    and a handshake more."""
    first, second = machines(2)
    sent = torch.zeros(20, 100_000, dtype=torch.uint8)
    before = [m.traffic for m in (first, second)]

    def exchange(own: InternetProcesses, incoming: Any, outgoing: Any) -> None:
        request = own.channel(torch.device("cpu")).requests(incoming, outgoing)
        request.start()
        request.wait()

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(exchange, second, [(0, torch.empty_like(sent))], [])
        exchange(first, [], [(1, sent)])
        receiving.result(60)
    payload, packets = (now - was for now, was in zip(first.traffic, before[0], strict=True))
    assert payload == sent.numel()
    assert payload < packets < 1.05 * payload + 2**14
    assert second.traffic[0] == before[1][0]


def test_a_machine_that_leaves_is_lost_for_the_others_with_its_reason(machines: Any) -> None:
    first, second = machines(2)
    second.node.close("it has ended with exit code 1")
    with pytest.raises(PeerLost, match=r"process 1 is lost .*exit code 1"):
        first.gather(None)
    request = first.channel(torch.device("cpu")).requests([(1, torch.zeros(1))], [])
    request.start()
    with pytest.raises(PeerLost, match="process 1"):
        request.wait()


def test_messages_survive_the_loss_of_connections(machines: Any) -> None:
    """They arrive once, whole and in order, also if all are sent at once, whichever end closes a
    connection, at whatever time."""
    first, second = machines(2)
    lengths = [(7919 * k) % 2**17 for k in range(60)] + [3 * 2**20, 0]
    messages = {tag: [bytes([k % 251, tag]) * n for k, n in enumerate(lengths)] for tag in (0, 5)}

    async def run(processes: InternetProcesses) -> list[list[bytes]]:
        link = await processes.link(1 - processes.rank)
        found: list[list[bytes]] = [[], []]

        async def send(tag: int) -> None:
            await asyncio.gather(*(link.send(tag, message) for message in messages[tag]))

        async def receive(tag: int, into: list[bytes]) -> None:
            for _ in messages[tag]:
                into.append(await link.receive_any(tag, 2**23))

        async def interrupt() -> None:
            for k in range(6):
                await asyncio.sleep(0.01 + 0.07 * k)
                if k % 2 == processes.rank:
                    link.connection.close(SILENT, b"")

        ways = zip(messages, found, strict=True)
        works = [of for tag, into in ways for of in (send(tag), receive(tag, into))]
        await asyncio.gather(interrupt(), *works)
        return found

    assert everywhere([first, second], lambda p: p.node.wait(run(p))) == [[*messages.values()]] * 2


def test_a_machine_is_found_where_another_one_sees_it() -> None:
    """Two machines that know the address of a third one alone: each is told that of the other."""
    first, *others = nodes = [Node(bytes(32), os.urandom(32), 0) for _ in range(3)]
    for other in others:
        other.knows(first.key, first.addresses)
        other.wait(other.link(first.key))
    link = others[0].wait(others[0].link(others[1].key))
    assert link.address.endswith(f":{others[1].port}")
    for of in nodes:
        of.close("")


@pytest.mark.parametrize("length", [7, 9, 2**63])
def test_another_length_than_is_due_ends_the_connection(machines: Any, length: int) -> None:
    """An announced message of 2⁶³ bytes is a sentence, not memory. So is a byte more or less."""
    first, second = machines(2)
    link: Link = second.node.wait(second.link(0))

    async def announce() -> None:
        stream = await link.connection.open_uni()
        await stream.write_all((3).to_bytes(4, "little") + length.to_bytes(8, "little") + bytes(9))

    second.node.wait(announce())
    memory = memoryview(bytearray(8))
    own: Link = first.node.wait(first.link(1))
    with pytest.raises(PeerLost, match=f"process 1.*{length} bytes have come instead of 8"):
        first.node.wait(own.receive(3, memory))
    with pytest.raises(PeerLost, match="process 0"):
        second.gather(None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES, st.binary(max_size=64))
def test_values_survive_and_garbage_is_an_error(value: Any, garbage: bytes) -> None:
    octets = codec.encoded(value)
    assert codec.decoded(octets) == value
    for wrong in (garbage, octets[:-1], octets + b"\0", octets[:8] + garbage):
        try:
            codec.decoded(wrong)
        except codec.BadMessage:
            continue


def test_arrays_survive() -> None:
    found = codec.decoded(codec.encoded([torch.ones(2, 3).bfloat16(), np.arange(4, dtype="u1")]))
    assert found[0].dtype == torch.bfloat16
    assert found[0].tolist() == [[1.0] * 3] * 2
    assert found[1].tolist() == [0, 1, 2, 3]


def test_tickets_and_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket is its text. A damaged one is rejected. The file of a key is for its owner alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ticket = tickets.Ticket("mine", bytes(32), bytes(range(32)), 3, ("192.0.2.1:7", "[::1]:8"))
    text = str(ticket)
    assert tickets.read(text) == ticket
    for wrong in (text[:-3], text.upper(), "powergossip-", text[:90] + "-" + text[91:]):
        with pytest.raises(BadInput, match="use the whole ticket"):
            tickets.read(wrong)
    tickets.Record(text, bytes(32).hex(), 7).save("mine")
    (file,) = tmp_path.rglob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert tickets.saved("mine") == tickets.Record(text, bytes(32).hex(), 7)
    with pytest.raises(BadInput, match=r"use new, a ticket, or the name"):
        tickets.saved("../mine")
    with pytest.raises(ValueError, match=r"192\.0\.2\.1:7"):
        tickets.addresses_of(["192.0.2.1:7"] * (tickets.MOST + 1))


def test_an_owner_may_allow_a_value() -> None:
    definition = '{"task": "my_tasks:make", "num_epochs": 2}'
    assert settings(definition, ["my_tasks:make"]) == {"task": "my_tasks:make", "num_epochs": 2}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("changes", [{}, {"optimizer": "all-reduce", "optimizer_compressor": None}])
def test_a_ticket_trains_as_mpi_does_to_the_bit(changes: dict[str, Any]) -> None:
    """Rows and parameters, on a graph in which not all processes are neighbors."""
    expected, rows = trained(**changes)
    connected = internet.under_mpi()
    found, same = trained(who=connected, **changes)
    if connected.rank == 0:
        assert reproducible(same) == reproducible(rows)
    assert torch.equal(found.parameters.x, expected.parameters.x)
    connected.finalize()


@pytest.mark.long
def test_two_machines_train_stop_and_resume(tmp_path: Path) -> None:
    """The program on two machines, each with its own files. The second command goes on where the
    first has ended, and the rows are those of one process to rounding."""
    program = ROOT / "powergossip" / "join.py"

    def machine(number: int, *arguments: str) -> Any:
        state = {"XDG_STATE_HOME": str(tmp_path / f"state{number}")}
        return python(program, *arguments, cwd=tmp_path, variables=state)

    def run(*first: str, others: Callable[[], str]) -> None:
        with ThreadPoolExecutor(2) as pool:
            host = pool.submit(machine, 0, *first, "--output-dir", "run0")
            joined = machine(1, others(), "--output-dir", "run1")
            for ended in (host.result(), joined):
                assert ended.returncode == 0, ended.stderr

    def record() -> Any:
        files = tmp_path.glob("state0/*/*.json")
        wait_until(lambda: any(tmp_path.glob("state0/*/*.json")))
        return json.loads(next(iter(files)).read_text())

    settings = "task_architecture=MLP", "num_epochs=1", "max_steps_per_epoch=4", "log_verbosity=0"
    run("new", "--workers", "2", *settings, others=lambda: str(record()["ticket"]))
    name = next(tmp_path.glob("state0/*/*.json")).stem
    run(name, "resume=true", "num_epochs=2", others=lambda: name)
    rows = [metrics.load(tmp_path / f"run{number}") for number in (0, 1)]
    expected = trained(n_workers=2, num_epochs=2, max_steps_per_epoch=4)[1]
    wanted = "name", "value", "epoch"
    kept = expected[expected["name"] == "accuracy"].reset_index(drop=True)
    for found in rows:
        of_run = found[found["name"] == "accuracy"].reset_index(drop=True)
        pd.testing.assert_frame_equal(of_run[[*wanted]], kept[[*wanted]], rtol=1e-6)
    assert all(
        json.loads((tmp_path / f"run{n}/info.json").read_text())["run"] == name for n in (0, 1)
    )
    text = record()["ticket"]
    files = (file for file in tmp_path.glob("run*/**/*") if file.is_file())
    assert not any(text.encode() in file.read_bytes() for file in files)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--workers 3 topology=hypercube", "power of two"),
        ("--workers 2 optimizer=choco learning=k-gt", "biased compressor"),
        ("--workers 2 n_workers=4", "n_workers: leave it out"),
        ("--workers 1", "use at least 2"),
    ],
)
def test_settings_are_checked_before_a_ticket_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, sentence: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(BadInput, match=sentence):
        join.main(["new", *given.split(), "task=Digits"])
    assert not list(tmp_path.rglob("*.json"))


def test_a_ticket_without_an_answer_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, with the addresses that were tried."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(node, "PATIENCE", 0.5)
    key = meeting.public(os.urandom(32))
    ticket = tickets.Ticket("of-tests", key, bytes(32), 2, ("127.0.0.1:9",))
    with pytest.raises(BadInput, match=r"the first machine: no answer .* tried: 127\.0\.0\.1:9"):
        join.main([str(ticket)])


def test_one_process_of_a_machine_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one of the run is turned away before it calls anybody."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ticket = tickets.Ticket("run-a", meeting.public(bytes(32)), bytes(32), 2, ("127.0.0.1:1",))
    tickets.Record(str(ticket), os.urandom(32).hex()).save("run-a")
    tickets.hold("run-a")
    tickets.hold("run-a")
    joining = "from powergossip.network.internet import meeting as m; m.ask('run-a', m.Options())"
    other = "from powergossip.network.internet import tickets; tickets.hold('run-b')"
    program = tmp_path / "program.py"
    program.write_text(joining)
    assert "another process" in python(program).stderr
    program.write_text(other)
    assert python(program).returncode == 0


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"n_workers": 2, "num_epochs": 5}, r"num_epochs=5: use 1"),
        ({"n_workers": 2}, r"num_epochs=None: use 1"),
        ({"n_workers": 2, "num_epochs": 1, "seed": 3}, r"seed=3: leave it out"),
        ({"n_workers": 2, "num_epochs": 1, "seed": 3, "resume": True}, None),
    ],
)
def test_a_machine_with_other_settings_is_turned_away(
    own: dict[str, Any], sentence: str | None
) -> None:
    theirs = {"n_workers": 2, "num_epochs": 1}
    with pytest.raises(BadInput, match=sentence) if sentence else nullcontext():
        meeting.check_same("run-a", theirs, own)


def test_a_new_connection_has_all_tags_and_the_bytes_of_the_former_one_count(machines: Any) -> None:
    """More tags than QUIC's streams at first."""
    first, second = machines(2)
    tags = range(8, 138)

    async def send() -> None:
        link = await first.link(1)
        for tag in tags:
            await link.send(tag, bytes(1000))

    async def receive() -> set[bytes]:
        link = await second.link(0)
        return {await link.receive_any(tag, 1000) for tag in tags}

    sent = first.traffic[1]
    for _ in range(3):
        first.node.start(send())
        assert second.node.wait(receive(), 60) == {bytes(1000)}
        sent += 1000 * len(tags)
        assert first.traffic[1] > sent
        first.node.wait(first.link(1)).connection.close(SILENT, b"")


async def silenced(link: Link) -> None:
    link.close(SILENT, SILENCE)


def test_a_machine_that_was_silent_for_too_long_is_told_so(machines: Any) -> None:
    """The others have gone on without it: its connection does not."""
    first, second = machines(2)
    link = first.node.wait(first.link(1))
    first.node.wait(silenced(link))
    with pytest.raises(PeerLost, match=r"process 0 is lost .*for too long"):
        second.gather(None)


def test_a_program_that_ends_waits_for_those_who_still_read(machines: Any) -> None:
    """More bytes than QUIC holds."""
    first, second = machines(2)
    memory = torch.arange(10**6)
    first.channel(torch.device("cpu")).requests([], [(1, memory)]).start()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(first.finalize)
        time.sleep(0.2)
        into = torch.empty_like(memory)
        request = second.channel(torch.device("cpu")).requests([(0, into)], [])
        request.start()
        request.wait()
        second.finalize()
        ending.result(60)
    assert torch.equal(into, memory)


def test_exchanges_by_edges_end_when_all_have_read(machines: Any) -> None:
    first, second = everywhere(machines(2), lambda own: wire.InternetWire(own, 20))
    first.send(1, DATA, payload=np.ones(2**23, np.uint8))
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(first.part)
        time.sleep(0.2)
        arrived: list[Any] = []

        def has_arrived() -> bool:
            arrived.extend(second.receive())
            return len(arrived) > 0

        wait_until(has_arrived, 20)
        second.part()
        ending.result(60)
    assert [message.payload.sum() for message in arrived] == [2**23]


class Echo:
    """A stream that sends back what it gets, after some bytes."""

    def __init__(self, octets: bytes = b""):
        self._octets = octets

    def send(self) -> "Echo":
        return self

    recv = send

    async def write_all(self, octets: bytes) -> None:
        self._octets += octets

    async def read_exact(self, length: int) -> bytes:
        taken, self._octets = self._octets[:length], self._octets[length:]
        return taken


@pytest.mark.parametrize(("end", "before"), [(handshake.dial, 0), (handshake.accept, 1)])
def test_a_proof_that_comes_back_is_none(end: Any, before: int) -> None:
    version = handshake.WIRE.to_bytes(4, "little")
    with pytest.raises(handshake.WrongSecret):
        asyncio.run(end(Echo((version + bytes(32)) * before), b"s" * 32, b"a" * 32, b"a" * 32))


def test_a_proof_is_of_its_secret_end_keys_and_numbers() -> None:
    right = [b"s" * 32, b"dialer", b"a" * 32, b"b" * 32, b"n" * 64]
    for place, wrong in enumerate((b"t" * 32, b"acceptor", b"c" * 32, b"c" * 32, b"m" * 64)):
        other = [*right[:place], wrong, *right[place + 1 :]]
        assert handshake.proof(*other) != handshake.proof(*right)


def in_background(work: Callable[[], Any]) -> "Future[Any]":
    """The result of a function in a thread that does not hold up a test that fails."""

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    found = Future[Any]()
    threading.Thread(target=run, daemon=True).start()
    return found


def test_the_first_machine_waits_for_those_that_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with other settings, one that does not accept the definition and one that only looks
    take no place. When the run starts again, the ticket does not admit another machine."""
    options, definition = meeting.Options(), '{"n_workers": 2, "task": "my_tasks:make"}'
    key, secret = os.urandom(32), os.urandom(32)
    record = tickets.Record("", key.hex())
    ticket = tickets.Ticket("run-c", meeting.public(key), secret, 2, ())

    def start(ticket: tickets.Ticket) -> tuple[Meeting, "Future[Any]"]:
        first = Meeting(ticket, record, options)
        return first, in_background(lambda: first.enter(definition))

    def call() -> Meeting:
        asked = Meeting(host.ticket, own, options)
        asked.call()
        return asked

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "first"))
    host, met = start(ticket)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    text = str(host.ticket)
    with pytest.raises(BadInput, match="num_epochs=3: leave it out"):
        meeting.connect(text, 2, options, definition.replace("}", ', "num_epochs": 3}'))
    with pytest.raises(BadInput, match="allow it with --allow VALUE"):
        join.main([text])
    saved = tickets.saved("run-c")
    assert saved is not None
    own = saved
    call().leave()
    asked = call()
    keys = [ticket.key, asked.node.key]
    for node_of, found in (asked.enter(), met.result(60)):
        assert found == keys
        node_of.close("")
    record.port = 0
    host, met = start(host.ticket)
    stranger = Node(secret, os.urandom(32), 0)
    stranger.knows(ticket.key, host.ticket.addresses)
    with pytest.raises(PeerLost, match="the run has all its machines"):
        stranger.wait(stranger.link(ticket.key))
    for node_of, found in (call().enter(), met.result(60)):
        assert found == keys
        node_of.close("")
    stranger.close("")


def test_a_speed_is_that_of_messages_from_the_first_to_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a link with 3 ms and 4 MB/s one way, 1 ms back, on a clock of its own. A first exchange
    takes a second more."""
    now = [0.0]

    class Request:
        def __init__(self, link: Any, there: Any):
            self._link, self._there = link, there

        def start(self) -> None:
            if self._there:
                setup, self._link.is_new = float(self._link.is_new), False
                now[0] += setup + 0.003 + len(self._there[0][1]) / 4e6
            else:
                now[0] += 0.001

        def wait(self) -> None:
            pass

    class Between:
        rank, is_new = 0, True

        def requests(self, incoming: Any, outgoing: Any) -> Request:
            return Request(self, outgoing)

        def gather(self, spent: list[float]) -> list[list[float]]:
            self.is_new = True
            return [spent, [9.0] * len(spent)]

    link: Any = Between()
    monkeypatch.setattr(speeds, "perf_counter", lambda: now[0])
    memory = torch.zeros(speeds.LARGE, dtype=torch.uint8)
    found = speeds.measure(link, link, memory, [(0, 1)], (3, 1))
    assert found == {(0, 1): pytest.approx((2002, 3.98), rel=1e-2)}


def test_an_interface_is_the_one_that_has_the_address_of_a_connection() -> None:
    assert interfaces.interface_towards("127.0.0.2") == "lo"
    for name, own in interfaces.interfaces():
        assert interfaces.interface_towards(own) == name or ":" in own


def test_a_silent_machine_may_live_and_one_that_says_its_end_does_not(machines: Any) -> None:
    """Else both sides of a network that fails would go on."""
    met = machines(3)
    first, *_ = everywhere(met, lambda own: wire.InternetWire(own, 20))
    link = met[0].node.known_link(met[0].keys[1])
    assert link is not None
    met[0].node.wait(silenced(link))
    met[2].node.close("it has ended")

    def has_ended() -> bool:
        return first.receive() != [] or 2 in first.ended

    wait_until(has_ended)
    assert first.ended == {2}


def test_messages_that_nobody_takes_stay_with_the_sender(
    machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HELD", 2**18)
    first, second = everywhere(machines(2), lambda own: wire.InternetWire(own, 20))
    for k in range(40):
        first.send(1, DATA, k=k, payload=np.zeros(2**20, np.uint8))
    time.sleep(0.5)
    assert first.pending > 0
    arrived: list[int] = []

    def all_arrive() -> bool:
        arrived.extend(message.k for message in second.receive())
        return len(arrived) == 40

    wait_until(all_arrive)
    assert arrived == [*range(40)]


def test_a_place_is_free_again_and_workers_stay_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine leaves while the first one waits. In the next start, the last one comes first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keys, options, said = [os.urandom(32) for _ in range(4)], meeting.Options(), [""]
    ticket, record = internet.prepare(0, keys[:3], bytes(32))
    record.places = []

    def here(number: int) -> bool:
        said[0] += capsys.readouterr().out
        return f"{number} of 3 machines are here" in said[0]

    def call(rank: int) -> Meeting:
        asked = Meeting(host.ticket, internet.prepare(rank, keys, bytes(32))[1], options)
        asked.call()
        return asked

    for order in ((3, 1, 2), (2, 1)):
        host = Meeting(ticket, record, options)
        working = [in_background(host.enter)]
        for rank in order:
            asked = call(rank)
            work = in_background(asked.enter)
            if rank != order[-1]:
                wait_until(lambda: here(2), 20)
                said[0] = ""
            if rank == 3:
                asked.leave()
                wait_until(lambda: here(1), 20)
            else:
                working.append(work)
        found = [work.result(60) for work in working]
        for _, members in found:
            assert members == [meeting.public(key) for key in keys[:3]]
        everywhere(found, lambda own: own[0].close(""))
        record.port = 0
