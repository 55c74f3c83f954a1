"""Messages arrive where W requires it, in any layout of processes, and are counted once."""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from powergossip import algorithms, topologies
from powergossip.errors import BadInput
from powergossip.network import (
    Conversation,
    Exchange,
    Gather,
    Mean,
    Network,
    Processes,
    ToAll,
    ToEach,
    choose_device,
    processes,
    standstill,
    together,
)
from powergossip.network.counter import Counter
from powergossip.network.neighbor_transport import Delivery
from powergossip.network.processes import in_parts
from powergossip.network.staging import Connection
from powergossip.optimizers import GossipOptimizer
from powergossip.parameters import Layout
from tests.harness.averaging import EVERY, SHAPES, start, steps

TOPOLOGIES = ["ring", "star", "chain", "unidirectional-ring", "exponential", "fully-connected"]
TIME_VARYING = ["one-peer-exponential", "base-graph", "random-matching", "epidemic", "round-robin"]
ALONE = Processes()


# Workers of a process, and whether messages are staged.
HOSTED_AND_STAGED = [
    (1, False),
    (2, True),
    (3, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, True), (2, False), (3, True)]),
]


def stamp(sender: Tensor, receiver: Tensor) -> Tensor:
    """A value that identifies sender and receiver."""
    return 100.0 * sender + receiver


def started(network: Network, *messages: Any) -> tuple[Exchange, list[Any]]:
    """A conversation that has begun, and a list for all that it receives, as it lies in memory."""
    received: list[Any] = []

    def conversation() -> Conversation:
        received.extend((yield messages))

    return network.start(conversation()), received


def exchange(network: Network, *messages: Any) -> list[Any]:
    """All that a conversation receives."""
    running, received = started(network, *messages)
    running.finish()
    return received


def exchanged(network: Network) -> dict[str, Tensor]:
    """One conversation with all kinds of messages. Returns everything received, each [worker]."""
    workers = torch.tensor(network.workers, dtype=torch.float32)
    now = network.topology.round(network.round)
    targets = [[worker for worker, _ in now.targets(i)] for i in network.workers]
    degree = max(len(now.targets(i)) for i in range(network.n_workers))
    each = torch.zeros(len(workers), degree, 3)
    for row, (worker, receivers) in enumerate(zip(workers, targets, strict=True)):
        for slot, receiver in enumerate(receivers):
            each[row, slot] = stamp(worker, torch.tensor(float(receiver)))
    to_all = (workers[:, None] * torch.ones(2)).to(torch.uint8)
    received: dict[str, Tensor] = {}

    def conversation() -> Conversation:
        received["each"], received["all"] = yield ToEach(each), ToAll(to_all)
        received["each"], received["all"] = received["each"].clone(), received["all"].clone()
        received["mean"] = (yield Mean(workers[:, None].clone())).clone()

    network.run(conversation())
    received["mean"] = received["mean"].expand(len(workers), -1)
    return received


def check_arrivals(make: Callable[[topologies.Topology], Network], n: int, name: Any) -> Network:
    topology = topologies.make(name, n)
    network = make(topology)
    for t in range(2 * topology.period if topology.period > 1 else 1):
        got = exchanged(network)
        for row, i in enumerate(network.workers):
            for slot, (j, _) in enumerate(topology.round(t).sources(i)):
                expected = stamp(torch.tensor(float(j)), torch.tensor(float(i)))
                assert (got["each"][row, slot] == expected).all()
                assert (got["all"][row, slot] == j).all()
        assert (got["mean"] == (n - 1) / 2).all()
        assert torch.isfinite(got["each"]).all()
    bits = network.bits_to_all(10, steps=network.round)
    degrees = [
        sum(len(topology.round(t).targets(i)) for t in range(network.round))
        for i in network.workers
    ]
    assert bits.tolist() == [320 * degree for degree in degrees]
    return network


@pytest.mark.parallel([1, 2, 3, 4, 8])
@pytest.mark.parametrize(("hosted", "stage"), HOSTED_AND_STAGED)
def test_messages_arrive_in_one_process_and_between_processes(hosted: int, stage: bool) -> None:
    """Bits and messages do not depend on the layout."""
    n = hosted * processes().size
    halves: Any = nx.complete_bipartite_graph(n // 2, n - n // 2)  # all neighbors may be elsewhere
    for name in [*TOPOLOGIES, *TIME_VARYING, *([halves] if n > 1 else [])]:
        apart = check_arrivals(lambda topology: Network(topology, stage=stage), n, name)
        alone = check_arrivals(lambda topology: Network(topology, ALONE), n, name)
        if name in TOPOLOGIES:
            assert apart.gather(torch.tensor(apart.bits)).tolist() == alone.bits.tolist()
            assert apart.gather(torch.tensor(apart.messages)).tolist() == alone.messages.tolist()


@pytest.mark.parallel([2, 3, 4, 8])
@pytest.mark.parametrize(("hosted", "stage"), HOSTED_AND_STAGED)
def test_means_are_those_of_one_process(hosted: int, stage: bool) -> None:
    """To the bit where a process hosts 1, 2, 4, … workers: the same pairs are added. Each process
    calls `progress` at different times."""
    comm = processes()
    topology = topologies.make("ring", hosted * comm.size)
    apart, alone = Network(topology, stage=stage), Network(topology, ALONE)
    mine = slice(apart.workers.start, apart.workers.stop)
    for size in (1, 2, 7, 1000, 30_001):
        generator = torch.Generator().manual_seed(size)
        a = torch.randn(topology.n_workers, size, generator=generator)
        b = torch.randn(topology.n_workers, 2, size, dtype=torch.float64, generator=generator)
        single, double = a[mine].clone(), b[mine].clone()
        sent = Mean(single), ToAll(single), Mean(double)
        for step in range(3):
            exact, _, doubled = exchange(alone, Mean(a), ToAll(a), Mean(b))
            means = exact.clone(), doubled.clone()
            running, received = started(apart, *sent)
            for _ in range((7 * comm.rank + 5 * step) % 11):
                apart.progress()
            running.finish()
            for mean, expected, x in zip(received[::2], means, (a, b), strict=True):
                torch.testing.assert_close(expected, x.mean(0, keepdim=True))
                if hosted == 3:
                    torch.testing.assert_close(mean, expected)
                else:
                    assert torch.equal(mean, expected)
            a += 1
            single += 1


def pieces_of(workers: range, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Worker i's piece has (3 i + step) mod 7 elements, which identify it and their order."""
    return [
        (torch.arange((3 * i + step) % 7) + 16 * (i % 7) + step).to(dtype).clone() for i in workers
    ]


def check_gathers(network: Network, dtype: torch.dtype) -> None:
    n = network.n_workers
    message = Gather([])
    for step in range(8):
        bits, messages = network.bits.copy(), network.messages.copy()
        message.pieces = pieces_of(network.workers, step, dtype)
        mean, received = exchange(network, Mean(torch.ones(network.hosted, 1)), message)
        assert mean.item() == 1
        expected = pieces_of(range(n), step, dtype)
        assert len(received) == n
        for got, want in zip(received, expected, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, want)
        size = 8 * expected[0].element_size()
        for row, i in enumerate(network.workers):
            reduction = round(2 * (n - 1) * 32 / n)
            gathering = (n - 1) * (len(expected[i]) * size + 32)
            assert network.bits[row] - bits[row] == reduction + gathering
            assert network.messages[row] - messages[row] == (2 + 2) * (n - 1)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(("hosted", "stage"), [(1, False), (3, True)])
def test_all_pieces_are_gathered(hosted: int, stage: bool) -> None:
    topology = topologies.make("ring", hosted * processes().size)
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int32, torch.int64):
        check_gathers(Network(topology, stage=stage), dtype)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("kind", [ToAll, Mean, Gather])
def test_long_messages_arrive_by_progress_alone(kind: type[ToAll | Mean | Gather]) -> None:
    comm = processes()
    network = Network(topologies.make("ring", comm.size))
    x = torch.full((1, 3_000_000), float(comm.rank))  # 12 MB: too long for MPI's eager protocol
    piece = torch.full((1_000_000 * (1 + comm.rank),), float(comm.rank))
    network.progress()  # nothing is in flight
    running, received = started(network, Gather([piece]) if kind is Gather else kind(x))  # type: ignore[arg-type]
    begun = time.monotonic()
    while network.in_flight and time.monotonic() < begun + 30:
        network.progress()
    assert not network.in_flight
    running.finish()
    if kind is Gather:
        for i, got in enumerate(received[0]):
            assert torch.equal(got, torch.full((1_000_000 * (1 + i),), float(i)))
        return
    mean = (comm.size - 1) / 2
    expected = {(comm.rank + step) % comm.size for step in (1, -1)} if kind is ToAll else {mean}
    assert set(received[0].flatten()[::1000].tolist()) == expected


def test_bits_are_those_of_the_bytes_sent() -> None:
    n, name = 6, "star"
    network = Network(topologies.make(name, n), ALONE)
    exchanged(network)
    degrees = np.array([5] + [1] * 5)
    all_reduce = round(2 * (n - 1) / n * 32)
    assert network.bits.tolist() == (degrees * (3 * 32 + 2 * 8) + all_reduce).tolist()
    assert network.messages.tolist() == (degrees * 2 + 2 * (n - 1)).tolist()
    assert network.bits_to_all(10).tolist() == (degrees * 320).tolist()
    assert network.bits_to_all(10, steps=3).tolist() == (degrees * 960).tolist()


def test_measuring_is_not_counted() -> None:
    network = Network(topologies.make("ring", 4), ALONE)
    x = torch.arange(8.0).view(4, 2)
    assert network.mean(x).tolist() == [3.0, 4.0]
    assert torch.equal(network.gather(x), x)
    assert network.bits.sum() == network.messages.sum() == 0


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x[:, :4],
    lambda x: x[:, 4:],
    lambda x: x[:, 4:].view(3, 2, 3),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_keeps_its_receive_buffer(view: Callable[[Tensor], Tensor]) -> None:
    """Whatever the message object, and also for views that are created in every step."""
    network = Network(topologies.make("ring", 3), ALONE)
    x = torch.zeros(3, 10)
    first = exchange(network, ToAll(view(x)))[0]
    x += 1
    again = exchange(network, ToAll(view(x)))[0]
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (3, 2, *view(x).shape[1:])
    assert (again == 1).all()


def test_messages_may_have_other_edges_than_those_of_the_round() -> None:
    """Each tree of a topology has its own, and its own receive buffer."""
    network = Network(topologies.make("ring", 4), ALONE)
    chain = network.edges_of(topologies.make("chain", 4).round(0))
    x = torch.arange(4.0)[:, None, None].repeat(1, 2, 1)
    around, along = exchange(network, ToEach(x))[0], exchange(network, ToEach(x, chain))[0]
    assert around[..., 0].tolist() == [[1, 3], [0, 2], [1, 3], [0, 2]]
    assert [along[i, slot, 0] for i, slot in [(0, 0), (1, 0), (1, 1), (3, 0)]] == [1, 0, 2, 2]
    assert network.messages.tolist() == [3, 4, 4, 3]


def test_messages_that_differ_do_not_share_a_receive_buffer() -> None:
    """Spans, shapes, types, kinds of message and rounds of one memory."""
    network = Network(topologies.make("one-peer-exponential", 4), ALONE)
    x = torch.zeros(4, 1, 8)
    integers = x.view(torch.int32)
    messages: list[Callable[[], ToAll | ToEach]] = [
        lambda: ToAll(x),
        lambda: ToEach(x),
        lambda: ToAll(x[..., :4]),
        lambda: ToAll(x[..., 4:]),
        lambda: ToAll(x.view(4, 8)),
        lambda: ToAll(integers),
    ]
    buffers = set()
    for t in (0, 1, 2, 3):
        for message in messages:
            network.round = t
            buffers.add(exchange(network, message())[0].data_ptr())
    assert len(network.rounds) == 2
    assert len(buffers) == 2 * len(messages)


def test_one_tensor_in_several_messages_at_once() -> None:
    """Each message in flight has a buffer of its own, in one conversation and in several."""
    network = Network(topologies.make("ring", 3), ALONE)
    x = torch.arange(3.0)[:, None]
    messages = ToAll(x), ToAll(x), Mean(x), Mean(x)
    (first, received), (second, others) = started(network, *messages), started(network, *messages)
    x += 10  # after posting: nothing changes
    for running in (second, first):
        running.finish()
    received += others
    assert len({tensor.data_ptr() for tensor in received}) == 8
    for tensor in received:
        assert tensor[0].flatten().tolist() == ([1, 2] if tensor.ndim == 3 else [1])
    assert network.in_flight == 0


def test_new_memory_of_a_tensor_is_sent() -> None:
    network = Network(topologies.make("ring", 3), ALONE)
    x = torch.zeros(3, 4)
    exchange(network, ToAll(x))
    x.data = torch.ones(3, 4)
    assert (exchange(network, ToAll(x))[0] == 1).all()
    message = ToAll(torch.zeros(3, 4))
    exchange(network, message)
    message.tensor = torch.ones(3, 5)
    assert (exchange(network, message)[0] == 1).all()


def test_buffers_are_freed_with_their_tensor_and_with_the_network() -> None:
    def alive() -> int:
        return sum(type(thing) is Delivery for thing in gc.get_objects())

    gc.collect()
    network, before = Network(topologies.make("ring", 3), ALONE), alive()
    x = torch.zeros(3, 4)
    gc.disable()
    try:
        for _ in range(5):
            exchange(network, ToAll(torch.zeros(3, 4)))
            exchange(network, ToAll(x[:, :2]))
            exchange(network, ToAll(x.detach()[:, :2]))[0]  # an owner of its own, gone at once
        assert alive() == before + 1
        assert (exchange(network, ToAll(torch.ones(3, 4)))[0] == 1).all()
        del x
        assert alive() == before
        x = torch.zeros(3, 4)
        exchange(network, ToAll(x))
        assert alive() == before + 1
        del network
        assert alive() == before
    finally:
        gc.enable()


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("hosted", [1, 2])
def test_garbage_in_one_process_does_not_disturb_the_messages(hosted: int) -> None:
    """Temporaries of the same memory, that one process keeps longer in a cycle."""
    comm = processes()
    network = Network(topologies.make("ring", hosted * comm.size))
    workers = torch.tensor(network.workers, dtype=torch.float32)[:, None]
    gc.disable()
    try:
        for step in range(20):
            values = (workers + step).repeat(1, 50)
            if comm.rank == step % comm.size:
                cycle: list[Any] = [values]
                cycle.append(cycle)
                del cycle
            for kind in (Mean, ToAll, Mean):
                received = exchange(network, kind(values.detach()))[0]
                if kind is Mean:
                    assert (received == (network.n_workers - 1) / 2 + step).all()
                else:
                    expected = network.neighbors.float()[..., None] + step
                    assert torch.equal(received, expected.expand(-1, -1, 50))
            del values
    finally:
        gc.enable()


def test_together_is_each_by_itself_at_the_same_time() -> None:
    log: list[tuple[str, list[float]]] = []
    posted: list[int] = []

    def talk(name: str, rounds: int, n: int) -> Conversation:
        for t in range(rounds):
            received = yield ToAll(torch.full((n, 1), 10.0 * t))
            log.append((name, received[0, :, 0].tolist()))

    conversation = together(talk("a", 1, 3), talk("b", 3, 3), talk("c", 2, 3))
    messages = next(conversation)
    while True:
        posted.append(len(messages))
        try:
            messages = conversation.send(
                tuple(m.tensor.expand(3, 2).unsqueeze(-1) for m in messages)
            )
        except StopIteration:
            break
    assert posted == [3, 2, 1]
    assert log == [
        ("a", [0, 0]),
        ("b", [0, 0]),
        ("c", [0, 0]),
        ("b", [10, 10]),
        ("c", [10, 10]),
        ("b", [20, 20]),
    ]


@pytest.mark.parallel([3])
def test_bad_input_of_one_process_is_rejected_in_all() -> None:
    comm = processes()
    with pytest.raises(BadInput, match=r"^one sentence$"), comm.agreed():
        _fail_if(comm.rank == 1, ValueError("one sentence"))
    with comm.agreed():
        rank = comm.rank
    assert comm.gather(comm.one_by_one(lambda: comm.local_rank)) == [0, 1, 2]
    assert comm.sum(np.array([1.0, rank])).tolist() == [3.0, 3.0]
    with pytest.raises(BadInput, match=r"^another$"):
        comm.one_by_one(lambda: _fail_if(comm.rank == 0, OSError("another")))


def _fail_if(condition: bool, error: Exception) -> None:
    if condition:
        raise error


@pytest.mark.parallel([2, 4, 8])
def test_processes_share_the_cores() -> None:
    import os

    comm = processes()
    cores = set().union(*comm.gather(os.sched_getaffinity(0)))
    assert 1 <= comm.threads <= max(1, len(cores) // comm.size)


def test_devices() -> None:
    assert choose_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(ValueError, match="device=gpu: use"):
        choose_device("gpu", 0)
    if not torch.cuda.is_available():
        assert choose_device("auto", 0) == torch.device("cpu")
        with pytest.raises(ValueError, match="device=cuda:0: use"):
            choose_device("cuda:0", 0)


@pytest.mark.parallel([2, 4])
def test_long_messages_are_split_and_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every averaging rule, in all collective operations, and at the start of an optimizer."""
    comm, layout = processes(), Layout(SHAPES)

    def results() -> list[Tensor]:
        found = []
        for name, options in EVERY:
            network = Network(topologies.make("ring", comm.size))
            x = start(comm.size, layout)[comm.rank :][:1].clone()
            rule = algorithms.make(name, network, layout, **options)
            found += [steps(network, rule, x, 3), network.gather(x), network.mean(x)]
            found.append(torch.tensor(network.bits))
        for piece in (torch.arange(50.0 * comm.rank), torch.arange(0.0)):
            found += exchange(network, Gather([piece]))[0]
        found.append(network.mean(torch.arange(60.0)[None] + comm.rank))
        weight = nn.Parameter(torch.full((9, 7), float(comm.rank)))
        GossipOptimizer(SGD([weight], lr=0.1), "power-gossip")
        array = np.arange(99, dtype=np.int16).reshape(3, 33) + comm.rank
        gathered = comm.gather_arrays(array.T)
        assert gathered.shape == (comm.size, 33, 3)
        comm.broadcast_array(array)
        return [*found, weight.detach(), torch.from_numpy(gathered), torch.from_numpy(array)]

    whole = results()
    monkeypatch.setitem(in_parts.__globals__, "LONGEST", 56)
    parts = results()
    assert all(map(torch.equal, whole, parts))
    assert torch.equal(whole[-3], torch.zeros(9, 7))


@pytest.mark.parallel([2])
def test_one_process_of_a_host_finishes_before_the_others_begin() -> None:
    """One download serves all."""
    comm = processes()
    folder = Path(comm.broadcast(tempfile.mkdtemp() if comm.rank == 0 else ""))

    def action() -> bool:
        if comm.local_rank == 0:
            time.sleep(0.3)
            (folder / "data").touch()
        return (folder / "data").exists()

    assert comm.one_by_one(action)


class Survivors(Processes):
    """Processes without a channel: they copy messages to the host themselves."""

    can_be_lost = True
    size = 2


@pytest.mark.parametrize(
    ("who", "device", "channel", "staged"),
    [
        (Survivors(), "cuda", None, True),
        (Survivors(), "cpu", None, False),
        (ALONE, "cuda", SimpleNamespace(direct=True), False),  # it accepts the memory of a GPU
        (ALONE, "cuda", SimpleNamespace(direct=False), True),
    ],
)
def test_messages_on_a_gpu_are_staged_where_they_have_to(
    who: Processes, device: str, channel: Any, staged: bool
) -> None:
    assert Connection(who, torch.device(device), channel=channel).stage == staged


def test_counts_are_loaded_from_any_device() -> None:
    """A state may be loaded to a GPU as a whole."""
    counter = Counter(3)
    counter.add(1, 8)

    class OnDevice:
        def __init__(self, values: Tensor):
            self._values = values

        def cpu(self) -> Tensor:
            return self._values

    other = Counter(3)
    other.load_state_dict({name: OnDevice(v) for name, v in counter.state_dict().items()})
    assert (other.bits == [0, 8, 0]).all()
    assert (other.messages == [0, 1, 0]).all()


@pytest.mark.parallel(2)
@pytest.mark.timeout(60)
def test_a_process_that_waits_long_names_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In messages and in collective operations. Process 1 waits for the line of process 0."""
    comm, network = processes(), Network(topologies.make("ring", 2))
    folder = Path(comm.broadcast(tempfile.mkdtemp() if comm.rank == 0 else ""))
    monkeypatch.setattr(standstill, "INTERVAL", 0.05)
    monkeypatch.setattr(standstill, "watcher", None)

    def said(line: str, **_: object) -> None:
        (folder / f"{place}-{line.partition(' for ')[0]}").touch()

    monkeypatch.setattr(standstill, "print", said, raising=False)
    actions: list[Callable[[], object]] = [
        lambda: network.mean(torch.ones(1, 3)),
        lambda: comm.gather_arrays(np.ones(3)),
        lambda: comm.start_max(np.ones(3))(),
    ]
    for place, action in enumerate(actions):
        while comm.rank == 1 and not list(folder.glob(f"{place}-process 0: no * from process 1")):
            time.sleep(0.01)
        action()


def test_a_long_wait_has_lines_that_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short waits have none."""
    lines: list[str] = []
    clock, threads = [0.0], list[Callable[[], None]]()

    def sleep(seconds: float) -> None:
        clock.append(clock[-1] + seconds)
        if clock[-1] > 300:
            standstill.waiting(0, [1]).__enter__()
        if clock[-1] > 900:
            raise InterruptedError

    def thread(target: Callable[[], None], daemon: bool) -> SimpleNamespace:
        threads.append(target)
        return SimpleNamespace(start=lambda: None)

    of_time = SimpleNamespace(sleep=sleep, monotonic=lambda: clock[-1])
    for name, value in {
        **{"time": of_time, "threading": SimpleNamespace(Thread=thread), "watcher": None},
        "print": lambda line, **_: lines.append(line),
    }.items():
        monkeypatch.setattr(standstill, name, value, raising=False)
    with standstill.waiting(0, [0, 1, 2]), pytest.raises(InterruptedError):
        threads[0]()
    waits = (30, 60, 120, 240)
    assert lines == [f"process 0: no message from process 1-2 for {s} s" for s in waits]
