"""Programs for tests/network/test_links.py, under mpirun --with-ft ulfm: processes end and stop.

python tests/harness/surviving.py kills SEED       one or two of them end at random times
python tests/harness/surviving.py stop SECONDS     process 1 is stopped for that time; 0: for ever
python tests/harness/surviving.py busy SECONDS     process 1 sleeps, and 3 holds Python's lock
python tests/harness/surviving.py split TIMEOUT    the network between even and odd processes fails

With HOSTS as a last argument, the processes believe to be on so many hosts, in turn. With 0, they
are machines that meet with a ticket. The survivors print rows in JSON.
"""

import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from powergossip.network.resilient.messages import MPIWire
from powergossip.network.resilient.worker_messages import Links
from tests.harness import internet

SIZE = MPI.COMM_WORLD.size
LIMIT = 60  # seconds after which a program that hangs ends


def row(**values: Any) -> None:
    # one write: the lines of several processes do not mix
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def linked(worker_timeout: float) -> Links:
    medium = MPI.COMM_WORLD if hosts > 0 else internet.under_mpi()
    links = Links(medium, range(SIZE), worker_timeout)
    links.end_alone()
    return links


class Chatter:
    """Worker i of process i answers each message of the others with the next one."""

    def __init__(self, links: Links, elements: int):
        self.links, self.elements = links, elements
        (self.own,) = links.workers
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.lost: dict[int, float] = {}
        for worker in sorted(links.alive - {self.own}):
            self.sent[worker] = self.received[worker] = 0
            self._send(worker)

    def _send(self, worker: int) -> None:
        payload = np.full(self.elements, self.sent[worker] % 256, dtype=np.uint8)
        self.links.send(self.own, worker, self.sent[worker], payload)
        payload[:] = 255  # links have a copy
        self.sent[worker] += 1

    def turn(self, seconds: float) -> None:
        self.links.wait(seconds)
        for i, j, k, payload in self.links.poll():
            assert j == self.own
            assert k == self.received[i], "once, and in order"
            assert payload.numel() == self.elements
            assert bool((payload == k % 256).all())
            self.received[i] += 1
            self._send(i)
        for worker in self.links.lost():
            self.lost[worker] = time.time()

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn(0.02)


def kills(seed: int) -> None:
    draw = random.Random(seed)
    victims = draw.sample(range(SIZE), draw.choice([1, 2]))
    times = {victim: draw.uniform(0.0, 0.6) for victim in victims}
    elements = draw.choice([10, 30_000, 3_000_000])
    links = linked(20 if hosts > 0 else 4)
    if links.process in times:
        die_after(times[links.process])
    chatter = Chatter(links, elements)
    died = {victim: time.time() + seconds for victim, seconds in times.items()}
    sizes, survivors = [], links.group
    for _ in range(20):  # deaths come in the conversations or in the collectives
        chatter.run(0.02)
        found = survivors.gather(links.process)
        assert found == survivors.members, (found, survivors.members)
        sizes.append(survivors.gather_arrays(np.full(1000, links.process)).shape[0])
        assert survivors.broadcast(links.process) == survivors.members[0]
    while set(chatter.lost) < set(victims):  # within LIMIT
        chatter.turn(0.1)
    survivors.barrier()
    row(
        process=links.process,
        members=survivors.members,
        rank=survivors.rank,
        expected=sorted(set(range(SIZE)) - set(victims)),
        sizes=survivors.gather(sizes),
        detected={v: chatter.lost[v] - died[v] for v in victims},
    )
    links.finish()


def stop(seconds: float) -> None:
    links = linked(0.6)
    pids = links.group.gather(os.getpid())
    chatter = Chatter(links, 1000)
    chatter.run(0.2)
    if links.process == 0:
        os.kill(pids[1], signal.SIGSTOP)
        if seconds:
            wake = threading.Timer(seconds, lambda: os.kill(pids[1], signal.SIGCONT))
            wake.start()
    chatter.run(2.5)
    links.group.barrier()
    row(process=links.process, members=links.group.members)
    links.finish()


def busy(seconds: float) -> None:
    links = linked(0.3)
    chatter = Chatter(links, 1000)
    chatter.run(0.2)
    since = time.monotonic()
    if links.process == 1:
        time.sleep(seconds)
    elif links.process == 3:
        while time.monotonic() - since < seconds:
            re.match("(a+)+b", 22 * "a")  # one call takes a while, in which no other thread runs
    links.group.barrier()
    row(process=links.process, members=links.group.members)
    links.finish()


def split(timeout: float) -> None:
    links = linked(timeout)
    chatter = Chatter(links, 1000)
    chatter.run(0.5)
    send = MPIWire.send

    def send_near(self: MPIWire, process: int, *message: Any, **named: Any) -> None:
        if (process - self.own) % 2 == 0:
            send(self, process, *message, **named)

    MPIWire.send = send_near  # type: ignore[method-assign]
    chatter.run(5 * timeout)
    links.group.barrier()
    row(process=links.process, members=links.group.members)
    links.finish()


if __name__ == "__main__":
    die_after(LIMIT)
    kind, argument, *more = sys.argv[1:]
    hosts = int(more[0]) if more else 1
    if hosts > 1:
        own = f"host-{MPI.COMM_WORLD.rank % hosts}"
        socket.gethostname = lambda: own
    if kind == "kills":
        kills(int(argument))
    else:
        {"stop": stop, "busy": busy, "split": split}[kind](float(argument))
