"""Messages arrive where W says, in any layout of processes, and are counted once."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powergossip import topologies
from powergossip.errors import BadInput
from powergossip.network import (
    Conversation,
    Gather,
    Mean,
    Network,
    Processes,
    ToAll,
    ToEach,
    choose_device,
    hosted_workers,
    processes,
    together,
)

TOPOLOGIES = ["ring", "star", "chain", "unidirectional-ring", "exponential", "fully-connected"]
TIME_VARYING = ["one-peer-exponential", "base-graph", "random-matching", "epidemic", "round-robin"]
ALONE = Processes()


def stamp(sender: Tensor, receiver: Tensor) -> Tensor:
    """A number that tells who sent to whom."""
    return 100.0 * sender + receiver


def exchanged(network: Network) -> dict[str, Tensor]:
    """One conversation with all kinds of messages; everything received, of all workers."""
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
    return {name: network.gather(values) for name, values in received.items()}


def check_arrivals(make: Callable[[topologies.Topology], Network], n: int, name: str) -> None:
    topology = topologies.make(name, n)
    network = make(topology)
    for t in range(2 * topology.period if topology.period > 1 else 1):
        got = exchanged(network)
        for i in range(n):
            for slot, (j, _) in enumerate(topology.round(t).sources(i)):
                expected = stamp(torch.tensor(float(j)), torch.tensor(float(i)))
                assert (got["each"][i, slot] == expected).all()
                assert (got["all"][i, slot] == j).all()
        assert (got["mean"] == (n - 1) / 2).all()
        assert torch.isfinite(got["each"]).all()
    bits = network.bits_to_all(10, steps=network.round)
    degrees = [
        sum(len(topology.round(t).targets(i)) for t in range(network.round))
        for i in network.workers
    ]
    assert bits.tolist() == [320 * degree for degree in degrees]


@pytest.mark.parametrize("name", [*TOPOLOGIES, *TIME_VARYING])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_messages_arrive_in_one_process(name: str, n: int) -> None:
    check_arrivals(lambda topology: Network(topology, ALONE), n, name)


@pytest.mark.parallel([2, 3, 4, 8])
@pytest.mark.parametrize("hosted", [1, 2, 3])
@pytest.mark.parametrize("stage", [False, True])
def test_messages_arrive_between_processes(hosted: int, stage: bool) -> None:
    n = hosted * processes().size
    for name in [*TOPOLOGIES, *TIME_VARYING]:
        check_arrivals(lambda topology: Network(topology, stage=stage), n, name)


@pytest.mark.parallel([2, 3, 4, 8])
@pytest.mark.parametrize("hosted", [1, 2])
def test_bits_and_messages_do_not_depend_on_the_layout(hosted: int) -> None:
    for name in TOPOLOGIES:
        topology = topologies.make(name, hosted * processes().size)
        apart, alone = Network(topology), Network(topology, ALONE)
        exchanged(apart)
        exchanged(alone)
        assert apart.gather(torch.tensor(apart.bits)).tolist() == alone.bits.tolist()
        assert apart.gather(torch.tensor(apart.messages)).tolist() == alone.messages.tolist()


@pytest.mark.parallel([2, 3, 4, 8])
@pytest.mark.parametrize("hosted", [1, 2, 3])
@pytest.mark.parametrize("stage", [False, True])
def test_means_are_those_of_one_process(hosted: int, stage: bool) -> None:
    """To the bit where a process hosts 1, 2, 4, … workers: the same pairs are added. Each process
    lets messages travel on at times of its own."""
    who = processes()
    topology = topologies.make("ring", hosted * who.size)
    apart, alone = Network(topology, stage=stage), Network(topology, ALONE)
    mine = slice(apart.workers.start, apart.workers.stop)
    for size in (1, 2, 7, 1000, 30_001):
        generator = torch.Generator().manual_seed(size)
        a = torch.randn(topology.n_workers, size, generator=generator)
        b = torch.randn(topology.n_workers, 2, size, dtype=torch.float64, generator=generator)
        single, double = a[mine].clone(), b[mine].clone()
        sent = Mean(single), ToAll(single), Mean(double)
        for step in range(3):
            means: list[Tensor] = []

            def conversation(
                messages: tuple[Mean | ToAll, ...], means: list[Tensor] = means
            ) -> Conversation:
                first, _, second = yield messages
                means.extend([first.clone(), second.clone()])

            alone.run(conversation((Mean(a), ToAll(a), Mean(b))))
            exchange = apart.start(conversation(sent))
            for _ in range((7 * who.rank + 5 * step) % 11):
                apart.progress()
            exchange.finish()
            for mean, expected, x in zip(means[2:], means[:2], (a, b), strict=True):
                torch.testing.assert_close(expected, x.mean(0, keepdim=True))
                if hosted == 3:
                    torch.testing.assert_close(mean, expected)
                else:
                    assert torch.equal(mean, expected)
            a += 1
            single += 1


def pieces_of(workers: range, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Worker i's piece has (3 i + step) mod 7 numbers, which say whose it is and where."""
    return [
        (torch.arange((3 * i + step) % 7) + 16 * (i % 7) + step).to(dtype).clone() for i in workers
    ]


def check_gathers(network: Network, dtype: torch.dtype) -> None:
    n = network.n_workers
    message = Gather([])
    for step in range(8):
        network._bits[:] = network._messages[:] = 0
        received: list[Tensor] = []

        def conversation(message: Gather = message, received: list[Tensor] = received) -> Any:
            mean, pieces = yield Mean(torch.ones(network.hosted, 1)), message
            assert mean.item() == 1
            received.extend(pieces)

        message.pieces = pieces_of(network.workers, step, dtype)
        network.run(conversation())
        expected = pieces_of(range(n), step, dtype)
        assert len(received) == n
        for got, want in zip(received, expected, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, want)
        size = 8 * expected[0].element_size()
        for row, i in enumerate(network.workers):
            reduction = round(2 * (n - 1) * 32 / n)
            assert network.bits[row] == reduction + (n - 1) * (len(expected[i]) * size + 32)
            assert network.messages[row] == (2 + 2) * (n - 1)
    assert not any(isinstance(kept, Gather) for kept in network._transports)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int32, torch.int64])
def test_all_pieces_are_gathered_in_one_process(n: int, dtype: torch.dtype) -> None:
    check_gathers(Network(topologies.make("ring", n), ALONE), dtype)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("hosted", [1, 3])
@pytest.mark.parametrize("stage", [False, True])
def test_all_pieces_are_gathered_between_processes(hosted: int, stage: bool) -> None:
    topology = topologies.make("ring", hosted * processes().size)
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
        check_gathers(Network(topology, stage=stage), dtype)


@pytest.mark.parallel([2, 4])
def test_long_pieces_travel_on_while_something_else_is_done() -> None:
    who = processes()
    network = Network(topologies.make("ring", who.size))
    piece = torch.full((1_000_000 * (1 + who.rank),), float(who.rank))
    received: list[Tensor] = []

    def conversation() -> Conversation:
        received.extend((yield Gather([piece])))

    exchange = network.start(conversation())
    begun = time.monotonic()
    while network._under_way and time.monotonic() < begun + 30:
        network.progress()
    assert not network._under_way
    exchange.finish()
    for i, got in enumerate(received):
        assert len(got) == 1_000_000 * (1 + i)
        assert (got == i).all()


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("kind", [ToAll, Mean])
def test_long_messages_travel_on_while_something_else_is_done(kind: type[ToAll | Mean]) -> None:
    """They have arrived before anyone waits for them."""
    who = processes()
    network = Network(topologies.make("ring", who.size))
    x = torch.full((1, 3_000_000), float(who.rank))  # 12 MB: too long to be sent unasked
    received: list[Tensor] = []

    def conversation() -> Conversation:
        received.append((yield kind(x)))

    network.progress()  # nothing is under way
    exchange = network.start(conversation())
    begun = time.monotonic()
    while network._under_way and time.monotonic() < begun + 30:
        network.progress()
    assert not network._under_way
    exchange.finish()
    mean = (who.size - 1) / 2
    expected = {(who.rank + step) % who.size for step in (1, -1)} if kind is ToAll else {mean}
    assert set(received[0].flatten()[::1000].tolist()) == expected


def test_bits_are_those_of_the_bytes_that_leave() -> None:
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


def test_a_message_that_is_sent_again_brings_what_it_then_holds() -> None:
    network = Network(topologies.make("ring", 3), ALONE)
    message = ToAll(torch.zeros(3, 1))
    seen = []

    def conversation() -> Conversation:
        received = yield message
        seen.append(received[0, :, 0].tolist())

    for step in range(3):
        message.tensor[:, 0] = 10.0 * step + torch.arange(3)
        network.run(conversation())
    assert seen == [[1, 2], [11, 12], [21, 22]]
    assert network.round == 3


def test_what_leaves_is_read_at_the_start() -> None:
    """The gradient is computed between start and finish, at the x that was sent."""
    network = Network(topologies.make("ring", 3), ALONE)
    x = torch.arange(3.0)[:, None]
    seen = []

    def conversation() -> Conversation:
        seen.append((yield ToAll(x)).clone())

    exchange = network.start(conversation())
    assert not seen
    exchange.finish()
    assert seen[0][0, :, 0].tolist() == [1, 2]


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
def test_agreement_refuses_in_all_processes() -> None:
    who = processes()

    def action() -> str:
        if who.rank == 1:
            raise ValueError("one sentence")
        return "fine"

    with pytest.raises(BadInput, match=r"^one sentence$"):
        who.agree(action)
    assert who.agree(lambda: who.rank) == who.rank
    order = who.gather(who.one_by_one(lambda: who.local_rank))
    assert order == [0, 1, 2]
    assert who.sum(np.array([1.0, who.rank])).tolist() == [3.0, 3.0]


@pytest.mark.parallel([2, 4, 8])
def test_processes_share_the_cores() -> None:
    import os

    who = processes()
    cores = set().union(*who.gather(os.sched_getaffinity(0)))
    assert 1 <= who.threads <= max(1, len(cores) // who.size)


def test_workers_are_spread_evenly_or_not_at_all() -> None:
    assert hosted_workers(8, 4) == 2
    with pytest.raises(
        ValueError, match="n_workers=6 cannot be spread over 4 processes; use a mul"
    ):
        hosted_workers(6, 4)


def test_devices() -> None:
    assert choose_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(ValueError, match='device "gpu" is unknown; use auto, cpu'):
        choose_device("gpu", 0)
    if not torch.cuda.is_available():
        assert choose_device("auto", 0) == torch.device("cpu")
        with pytest.raises(ValueError, match="no GPU is visible"):
            choose_device("cuda:0", 0)


@pytest.mark.parallel(2)
def test_a_message_too_long_for_mpi_is_refused_everywhere() -> None:
    """Memory that nothing is written to takes none."""
    network = Network(topologies.make("ring", 2))
    numbers = torch.empty(1, 2**31, dtype=torch.uint8)

    def conversation() -> Conversation:
        yield ToAll(numbers)

    with pytest.raises(ValueError, match="a message of 2147483648 bytes, of which MPI can count"):
        network.run(conversation())
