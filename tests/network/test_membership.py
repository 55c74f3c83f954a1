"""Laws of the gathering on which all survivors agree, with deaths at any time. No MPI."""

import random
from collections import deque

import numpy as np
import pytest
import torch

from powergossip.network import Processes
from powergossip.network.resilient.collectives import HAVE, IMPOSE, VALUE, Consensus, Outgoing
from powergossip.network.resilient.messages import encoded, octets


class Crowd:
    """Processes with a queue of messages for each ordered pair. A death empties some queues."""

    def __init__(self, size: int, seed: int):
        self.random = random.Random(seed)
        self.living = set(range(size))
        self.detected = {p: set(range(size)) for p in range(size)}  # who p believes to be alive
        self.gatherings = {p: Consensus(p, bytes([p, seed % 256])) for p in range(size)}
        self.queues: dict[tuple[int, int], deque[tuple[int, torch.Tensor]]] = {
            (p, q): deque() for p in range(size) for q in range(size) if p != q
        }
        for process in range(size):
            if self.random.random() < 0.9:  # the others arrive later
                self.advance(process)

    def advance(self, process: int) -> None:
        out: Outgoing = self.gatherings[process].advance(self.detected[process])
        for destination, phase, payload in out:
            self.queues[process, destination].append((phase, octets(payload)))

    def die(self, process: int) -> None:
        """The receivers get any number of the messages that have not arrived yet."""
        self.living.discard(process)
        for (source, _), queue in self.queues.items():
            if source == process:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()

    def move(self) -> None:
        """A message arrives, or a process advances or notices a death, in random order."""
        process = self.random.choice(sorted(self.living))
        what = self.random.random()
        dead = self.detected[process] - self.living
        if what < 0.2 and dead:
            lost = self.random.choice(sorted(dead))
            self.detected[process].discard(lost)
            self.queues[lost, process].clear()
        elif what < 0.8:
            full = [q for (q, p), queue in self.queues.items() if p == process and queue]
            if full:
                source = self.random.choice(full)
                self.gatherings[process].receive(source, *self.queues[source, process].popleft())
        else:
            self.advance(process)

    def done(self) -> bool:
        return all(self.gatherings[p].members is not None for p in self.living)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("deaths", [0, 1, 2, 4])
def test_all_survivors_agree_whoever_dies_and_whenever(size: int, deaths: int) -> None:
    for seed in range(60):
        crowd = Crowd(size, seed)
        for _ in range(min(deaths, size - 1)):
            for _ in range(crowd.random.randint(0, 30 * size)):
                crowd.move()
            crowd.die(crowd.random.choice(sorted(crowd.living)))
        moves = 0
        while not crowd.done():
            crowd.move()
            moves += 1
            assert moves < 100_000, f"hangs: size={size} deaths={deaths} seed={seed}"
        results = [crowd.gatherings[p].result() for p in sorted(crowd.living)]
        assert all(set(result) == set(results[0]) for result in results)
        assert crowd.living <= set(results[0]) <= set(range(size))
        for result in results:
            assert list(result) == sorted(result)
            for process, value in result.items():
                assert np.array_equal(value.numpy(), [process, seed % 256])


def test_without_a_death_nobody_waits_for_more_than_the_values() -> None:
    first, second = Consensus(0, b"a"), Consensus(1, b"b")
    assert [phase for _, phase, _ in first.advance({0, 1})] == [0]
    (message,) = second.advance({0, 1})
    assert first.members is None
    first.receive(1, 0, octets(message[2]))
    assert [phase for _, phase, _ in first.advance({0, 1})] == [1]
    assert first.advance({0}) == []  # process 1 ends here
    assert first.members == {0, 1}, "its value has arrived: it counts"


def test_without_a_death_nobody_waits_for_an_estimate() -> None:
    gatherings = [Consensus(process, b"") for process in range(3)]
    alive = {0, 1, 2}
    for _ in range(2):  # the values, then the sets
        for source, gathering in enumerate(gatherings):
            for destination, phase, payload in gathering.advance(alive):
                gatherings[destination].receive(source, phase, octets(payload))
    gatherings[2].advance(alive)
    assert gatherings[2].members == alive


def test_the_lowest_survivor_determines_the_members() -> None:
    """Process 3 ends before its value reaches 2, and 2 ends before its set reaches 1."""
    lowest, other = Consensus(0, b""), Consensus(1, b"")
    for own, gathering in enumerate((lowest, other)):
        gathering.advance({0, 1, 2, 3})
        for source in {0, 1, 2, 3} - {own}:
            gathering.receive(source, 0, octets(b""))
        gathering.advance({0, 1, 2})
        gathering.receive(1 - own, 1, octets(encoded({0, 1, 2, 3})))
    lowest.receive(2, 1, octets(encoded({0, 1, 2})))
    ((destination, phase, payload),) = lowest.advance({0, 1})
    assert lowest.members == {0, 1, 2}, "values that all survivors have"
    other.advance({0, 1})
    assert other.members is None, "it waits for process 0"
    assert destination == 1
    other.receive(0, phase, octets(payload))
    other.advance({0, 1})
    assert other.members == {0, 1, 2}


def test_of_several_estimates_that_of_the_highest_lower_process_counts() -> None:
    """Process 0 ends before its estimate reaches 1, which then determines the members."""
    gathering, everyone = Consensus(3, b""), {0, 1, 2, 3}
    gathering.advance(everyone)
    for source in (0, 1, 2):
        gathering.receive(source, VALUE, octets(b""))
    gathering.advance(everyone)
    for source, estimate in ((0, everyone), (1, {0, 1, 3})):
        gathering.receive(source, HAVE, octets(encoded(everyone)))
        gathering.receive(source, IMPOSE, octets(encoded(estimate)))
    gathering.advance({1, 3})
    assert gathering.members == {0, 1, 3}


def test_each_acts_once_if_the_first_process_is_lost_between_the_turns() -> None:
    class Second(Processes):
        def gather(self, value: object) -> list[object]:  # type: ignore[override]
            self.local_rank = 0  # that before is lost
            return [value]

    processes, calls = Second(), []
    processes.local_rank = 1
    assert processes.one_by_one(lambda: calls.append(1) or 7) == 7  # type: ignore[func-returns-value]
    assert calls == [1]
