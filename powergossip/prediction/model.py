"""Seconds of a training step on a cluster.

The step of a method is a sequence of phases: messages that are posted together and waited for. If a
host sends S_k bytes to other hosts in phase k, in m_k messages of a worker, the phase takes::

    T_k = o m_k + L_k + max(8 S_k / (η R), b s_k)

L_k is the latency L, or 3 L with messages above the eager limit, which announce themselves and wait
for the answer. R is the rate of the host's link in each direction, and η its payload fraction. o is
the CPU time of a message, and b the CPU time of a byte, at both ends together. An all-reduce is two
phases, reduce-scatter and all-gather. In both, all workers send to all. A step takes::

    T = max(T_gradient, T_1) + T_averaging + T_2 + T_3 + …     messages of the first phase in flight
    T = T_gradient + T_averaging + T_1 + T_2 + …               during the gradient, or not

and, with messages after every H-th gradient only, in the mean::

    T = T_gradient + (T_averaging + T_1 + T_2 + …) / H         or, in flight during the H gradients:
    T = (max(H T_gradient, T_1 + T_2 + …) + T_averaging) / H

This is the α–β model of Hockney (1994, doi:10.1016/S0167-8191(06)80021-9) with the CPU time per
message of LogGP (Alexandrov et al. 1997, doi:10.1006/jpdc.1997.1346), and one full-duplex link per
host. Each worker has a core. All workers take the same time, and wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from powergossip import checks
from powergossip.prediction.traffic import LENGTH, Phase, Traffic
from powergossip.topologies import Topology

PAYLOAD = 1448 / 1514  # of an Ethernet frame of 1500 bytes with headers of IP and TCP
EAGER = 65_536  # bytes, Open MPI's btl_tcp_eager_limit. Larger messages wait for an answer


@dataclass(frozen=True)
class Cluster:
    """Hosts with one link each to a switch without limit, full-duplex.

    Attributes:
        hosts: Number of hosts. They have equal numbers of workers, in blocks of consecutive
            indices.
        rate: Rate of a link in each direction, in bits per second. May be infinite.
        latency: Seconds from one host to another.
        per_message: CPU seconds of a message, sending and receiving.
        per_byte: CPU seconds of a byte, sending and receiving.
        payload: Payload fraction of the rate.

    Raises:
        ValueError: For values that are negative, and for those that are not positive where 0 makes
            no sense.
    """

    hosts: int
    rate: float
    latency: float = 0.0
    per_message: float = 0.0
    per_byte: float = 0.0
    payload: float = PAYLOAD

    def __post_init__(self) -> None:
        checks.at_least_one("hosts", self.hosts)
        checks.check("rate", self.rate, self.rate > 0, "a rate above 0")
        for name in ("latency", "per_message", "per_byte"):
            checks.not_negative(name, getattr(self, name))


@dataclass(frozen=True)
class Compute:
    """CPU seconds of a worker in a step.

    Attributes:
        gradient: CPU seconds of batch, gradient and local update.
        averaging: CPU seconds of compression and mixing, without neighbors.
        per_neighbor: CPU seconds of compression and mixing for each neighbor.
    """

    gradient: float = 0.0
    averaging: float = 0.0
    per_neighbor: float = 0.0


@dataclass(frozen=True)
class Step:
    """A predicted step. Times are seconds. Bytes and messages are the busiest worker's.

    Attributes:
        seconds: Time of the whole step.
        compute: Time of gradient and averaging.
        sent: Number of bytes sent.
    """

    seconds: float
    compute: float
    sent: float
    messages: float


@dataclass(frozen=True)
class _Load:
    """The largest numbers of messages of any worker or host in a round of a topology."""

    degree: int  # of messages to or from a worker
    receivers: int  # of messages that a worker sends
    link: int  # of messages to, or from, other hosts on the link of a host
    remote: int  # of messages of a worker to, or from, other hosts


@lru_cache(maxsize=256)
def _loads(topology: Topology, hosts: int) -> tuple[_Load, ...]:
    n = topology.n_workers
    loads = []
    for of_round in topology.rounds:
        receiver, sender = of_round.weights.nonzero()
        between = receiver * hosts // n != sender * hosts // n

        def most(index: np.ndarray) -> int:
            return int(np.bincount(index, minlength=1).max())

        loads.append(
            _Load(
                max(most(receiver), most(sender)),
                most(sender),
                max(most(end[between] * hosts // n) for end in (receiver, sender)),
                max(most(end[between]) for end in (receiver, sender)),
            )
        )
    return tuple(loads)


def step(
    traffic: Traffic,
    topology: Topology,
    cluster: Cluster,
    compute: Compute,
    overlapping: bool = False,
    interval: int = 1,
) -> Step:
    """Predict a step, the mean over the period of the topology.

    Args:
        overlapping: True if the first phase is in flight while the gradient is computed, or with a
            longer interval all phases during its gradients.
        interval: Number of gradients for each exchange of messages.

    Raises:
        ValueError: If the workers cannot be spread evenly over the hosts.
    """
    n, hosts = topology.n_workers, cluster.hosts
    checks.check("hosts", hosts, n % hosts == 0, f"a divisor of the {n} workers")
    gradient = interval * compute.gradient
    rounds = []
    for load in _loads(topology, hosts):
        averaging = compute.averaging + compute.per_neighbor * load.degree
        times = [
            _transfer_time(transfer, cluster)
            for phase in traffic.phases
            for transfer in _transfers(phase, load, n, hosts)
        ]
        seconds = gradient + averaging + sum(cpu + link for cpu, link in times)
        if overlapping:
            links = [link for _, link in times]
            seconds -= min(gradient, sum(links if interval > 1 else links[:1]))
        bits, messages = (of(n, load.receivers) for of in (traffic.bits, traffic.messages))
        of_exchange = (seconds, gradient + averaging, bits / 8, messages)
        rounds.append([value / interval for value in of_exchange])
    return Step(*(sum(column) / len(rounds) for column in zip(*rounds, strict=True)))


@dataclass(frozen=True)
class _Transfer:
    """Bytes on the link of the busiest host, and bytes and messages of a worker to all others."""

    link: float
    bytes: float
    messages: float
    largest: float  # bytes of a message between hosts, or 0


def _transfers(phase: Phase, load: _Load, n: int, hosts: int) -> Sequence[_Transfer]:
    """The parts of a phase that follow each other. An all-reduce has two, and an all-gather, too:
    lengths in 4 bytes, and then the messages.

    Neighbors' messages are concurrent with the first part.
    """
    local = n // hosts  # workers of a host
    elsewhere = n - local
    parts = []
    if phase.neighbor_messages:
        size = phase.neighbor / phase.neighbor_messages
        parts.append(
            _Transfer(
                phase.neighbor * load.link,
                phase.neighbor * load.degree,
                phase.neighbor_messages * load.degree,
                size if load.link else 0.0,
            )
        )
    half, lengths = (phase.reduced / n, phase.all_reduces), LENGTH * phase.gathers
    gathers = ((lengths, phase.gathers), (phase.gathered - lengths, phase.gathers))
    for size, times in (half, half, *gathers):
        if times:
            parts.append(
                _Transfer(
                    local * elsewhere * size,
                    (n - 1) * size,
                    (n - 1) * times,
                    size / times if elsewhere else 0.0,
                )
            )
    return parts


def _transfer_time(part: _Transfer, cluster: Cluster) -> tuple[float, float]:
    """CPU time, and the time while the link is busy or the message in flight."""
    cpu = cluster.per_message * part.messages
    latencies = 0 if not part.largest else 3 if part.largest > EAGER else 1
    copying = cluster.per_byte * part.bytes
    link = 8 * part.link / (cluster.payload * cluster.rate)
    return cpu, latencies * cluster.latency + max(link, copying)
