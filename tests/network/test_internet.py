"""Machines that meet with a ticket: messages, agreements, strangers and losses."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    check,
    codec,
    handshake,
    meeting,
    node,
    tickets,
)
from powergossip.network.internet.link import SILENT, Link
from powergossip.network.internet.node import Node
from powergossip.network.internet.processes import InternetProcesses
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


def everywhere(machines: list[InternetProcesses], action: Callable[..., Any]) -> list[Any]:
    """action(processes) of all machines, each in a thread of its own."""
    with ThreadPoolExecutor(len(machines)) as pool:
        return [work.result(60) for work in [pool.submit(action, m) for m in machines]]


def test_the_repair_of_the_binding_is_still_needed() -> None:
    """iroh's binding copies byte by byte. If this fails, internet/binding.py needs none."""
    assert binding.builder(binding.iroh()).write is binding.write


def test_agreements_and_messages_are_those_of_other_transports(machines: Any) -> None:
    """Gathered values are equal, messages of several tags arrive in their order, and an all-reduce
    adds by rank."""

    def run(processes: InternetProcesses) -> Any:
        rank, size = processes.rank, processes.size
        values = processes.gather((rank, {"a": None, 2: [1.5, float("inf")]}, np.arange(rank)))
        rows = processes.gather_arrays(np.full((2, 3), rank))
        own = np.full(5, rank)
        processes.broadcast_array(own)
        biggest = processes.start_max(np.array([rank, -rank]))
        channel = processes.channel(torch.device("cpu"))
        right, left = (rank + 1) % size, (rank - 1) % size
        came = []
        for step in range(3):  # the second tag is awaited first
            both = [(tag, torch.full((2**18 + tag,), 10 * step + tag + rank)) for tag in (0, 7)]
            received = [torch.zeros_like(tensor) for _, tensor in both]
            requests = [
                channel.requests([(left, into)], [(right, tensor)], tag)
                for (tag, tensor), into in zip(both, received, strict=True)
            ]
            for request in requests:
                request.start()
            for request in reversed(requests):
                request.wait()
            came += [int(tensor.unique()) - 10 * step - left for tensor in received]
        total = torch.full((3,), float(rank))
        reduce = channel.all_reduce(total)
        reduce.start()
        reduce.wait()
        return values, rows.tolist(), own.tolist(), biggest().tolist(), came, total.tolist()

    found = everywhere(machines(3), run)
    for values, rows, own, biggest, came, total in found:
        assert [rank for rank, *_ in values] == [0, 1, 2]
        assert values[2][1] == {"a": None, 2: [1.5, float("inf")]}
        assert values[2][2].tolist() == [0, 1]
        assert rows == [[[r] * 3] * 2 for r in range(3)]
        assert (own, biggest, came, total) == ([0] * 5, [2, 0], [0, 7] * 3, [3.0] * 3)


def test_the_links_of_all_edges_are_measured_and_shown_on_all_machines(
    machines: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive numbers and an interface of this host in each direction. QUIC adds bytes."""
    monkeypatch.setattr(speeds, "SIZES", (2**16,))
    everywhere(machines(3), lambda own: check.check(own, [(0, 1), (1, 2)] if own.rank == 0 else []))
    printed = capsys.readouterr().out
    row = r"(\d), (\d) +(\S+) +[\d.]+:\d+ +direct +(\S+) +(\S+) +\+(\S+) %"
    rows = re.findall(row, printed)
    found = sorted((row[0] + row[1], row[2]) for row in rows)
    names = {name for name, _ in interfaces.interfaces()}
    assert [pair for pair, _ in found] == sorted(3 * ["01", "10", "12", "21"])
    assert {name for _, name in found} <= names
    assert all(float(number) > 0 for row in rows for number in row[3:])
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
    """They arrive once and in order, whichever end closes a connection, at whatever time."""
    first, second = machines(2)
    lengths = [(7919 * k) % 2**17 for k in range(60)] + [3 * 2**20, 0]
    messages = {tag: [bytes([k % 251, tag]) * n for k, n in enumerate(lengths)] for tag in (0, 5)}

    async def run(processes: InternetProcesses) -> list[list[bytes]]:
        link = await processes.link(1 - processes.rank)
        found: list[list[bytes]] = [[], []]

        async def send(tag: int) -> None:
            for message in messages[tag]:
                await link.send(tag, message)

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


def test_another_length_than_is_due_ends_the_connection(machines: Any) -> None:
    """An announced message of 2⁶³ bytes is a sentence, not memory. So is one byte too many."""
    first, second = machines(2)
    link: Link = second.node.wait(second.link(0))

    async def announce() -> None:
        stream = await link.connection.open_uni()
        await stream.write_all((3).to_bytes(4, "little") + (2**63).to_bytes(8, "little"))

    second.node.wait(announce())
    memory = memoryview(bytearray(8))
    own: Link = first.node.wait(first.link(1))
    with pytest.raises(PeerLost, match=f"process 1.*{2**63} bytes have come instead of 8"):
        first.node.wait(own.receive(3, memory))
    with pytest.raises(PeerLost, match="process 0"):
        second.gather(None)


def test_strangers_are_rejected_and_the_run_goes_on(
    machines: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without the secret, with a recorded handshake, with garbage, or who come late."""
    monkeypatch.setattr(node, "QUIET", 0.0)
    all_machines = machines(2)
    first = all_machines[0].node
    secret = bytes(32)
    strangers = [Node(other, os.urandom(32), 0) for other in (os.urandom(32), secret)]
    for stranger in strangers:
        stranger.knows(first.key, first.addresses)
    wrong, late = strangers
    members, first.members = first.members, None  # as before the run has its machines
    with pytest.raises(PeerLost, match="another secret"):
        wrong.wait(wrong.link(first.key))

    async def call(stranger: Node, *messages: bytes) -> str:
        api = binding.iroh()
        place = api.EndpointAddr(api.EndpointId.from_bytes(first.key), None, [*first.addresses])
        connection = await stranger.endpoint.connect(place, first.protocol)
        stream = await connection.open_bi()
        for message in messages:
            await stream.send().write_all(message)
        return str(await connection.closed())

    # A handshake that was right in another connection: the numbers are new, and so are the keys.
    numbers = bytes(64)
    recorded = handshake.proof(secret, b"dialer", all_machines[1].node.key, first.key, numbers)
    version = handshake.WIRE.to_bytes(4, "little")
    assert "another secret" in wrong.wait(call(wrong, version, bytes(32), recorded))
    assert "another secret" in wrong.wait(call(wrong, version, os.urandom(2**14)))
    assert "another version of this package" in wrong.wait(call(wrong, b"0001", bytes(32)))
    first.members = members
    with pytest.raises(PeerLost, match="the run has all its machines"):
        late.wait(late.link(first.key))
    for stranger in strangers:
        stranger.close("")
    assert everywhere(all_machines, lambda p: p.gather(p.rank)) == [[0, 1]] * 2
    lines = capsys.readouterr().err.splitlines()
    assert all("callers rejected, the last one: " in line for line in lines)
    assert "the run has all its machines" in lines[-1]


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


def test_arrays_survive_and_shapes_are_bounded() -> None:
    found = codec.decoded(codec.encoded([torch.ones(2, 3).bfloat16(), np.arange(4, dtype="u1")]))
    assert found[0].dtype == torch.bfloat16
    assert found[0].tolist() == [[1.0] * 3] * 2
    assert found[1].tolist() == [0, 1, 2, 3]
    for shape in ([2**62, 2**62], [-1], ["1"], [1.0], [5]):
        text = json.dumps({"array": ["uint8", *shape]}).encode()
        with pytest.raises(codec.BadMessage):
            codec.decoded(len(text).to_bytes(8, "little") + text)


def test_tickets_and_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket is its text. A damaged one is rejected. The file of a key is for its owner alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ticket = tickets.Ticket("mine", bytes(32), os.urandom(32), 3, ("192.0.2.1:7", "[::1]:8"))
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


@pytest.mark.parametrize(
    "definition",
    [
        '{"task": "os:system"}',
        '{"task_options": {"file": "../secret"}}',
        '{"task_options": {"a": ["${oc.env:HOME}"]}}',
        '{"topology": "edges.txt"}',
        '{"overwrite": true}',
        '{"data_dir": "x"}',
        '{"num_epochs": "many"}',
        '{"unknown": 1}',
        "[1]",
        "[" * 10**5,
    ],
)
def test_a_definition_has_neither_code_nor_files(definition: str) -> None:
    with pytest.raises(BadInput, match="definition of the run"):
        settings(definition)


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

    settings = "task_architecture=MLP", "num_epochs=1", "log_verbosity=0"
    run("new", "--workers", "2", *settings, others=lambda: str(record()["ticket"]))
    name = next(tmp_path.glob("state0/*/*.json")).stem
    run(name, "resume=true", "num_epochs=2", others=lambda: name)
    rows = [metrics.load(tmp_path / f"run{number}") for number in (0, 1)]
    expected = trained(n_workers=2, num_epochs=2)[1]
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
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tickets.hold("run-a")
    tickets.hold("run-a")
    other = "from powergossip.network.internet import tickets; tickets.hold({!r})"
    assert "another process" in python("-c", other.format("run-a")).stderr
    assert python("-c", other.format("run-b")).returncode == 0


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
