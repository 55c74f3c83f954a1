"""The links between the machines of a ticket: latency, throughput and path of every edge."""

from collections.abc import Sequence
from itertools import chain
from socket import gethostname

import torch

from powergossip.formatting import counted, plain
from powergossip.network.interfaces import interface_towards
from powergossip.network.internet.link import Link
from powergossip.network.internet.processes import InternetProcesses
from powergossip.network.speeds import LARGE, Pair, measure, three_digits

DEFINITION = '{"check": true}'  # in place of a run's definition
HEADER = ("from, to", "interface", "address", "path", "ms", "Mbit/s", "QUIC")


def check(processes: InternetProcesses, edges: Sequence[Pair]) -> None:
    """Print a line for each direction of each edge, on all machines. All of them call it.

    Args:
        edges: Edges to measure. Only process 0's value counts.
    """
    edges = processes.broadcast([*edges])
    pairs = chain.from_iterable([(i, j), (j, i)] for i, j in edges)
    channel = processes.channel(torch.device("cpu"))
    memory = torch.zeros(LARGE, dtype=torch.uint8)
    speeds = measure(processes, channel, memory, pairs, (10, 2))
    paths = {j: _path(processes, j) for i, j in speeds if i == processes.rank}
    everywhere = processes.gather((gethostname(), paths))
    for process, (host, _) in enumerate(everywhere):
        print(f"machine {process}: {host}{' (this one)' if process == processes.rank else ''}")
    rows: list[tuple[str, ...]] = [HEADER]
    for (i, j), (latency, bandwidth) in speeds.items():
        *where, overhead = everywhere[i][1][j]
        numbers = three_digits(latency / 1000), three_digits(8 * bandwidth)
        rows.append((f"{i}, {j}", *where, *numbers, overhead))
    print(f"\n{plain(rows)}\n")
    print(f"{counted(processes.size, 'machine')}, {counted(len(edges), 'edge')}")
    name = f"powergossip-join {processes.name}"
    print(f"train: {name} --workers {processes.size} on machine 0, {name} on others", flush=True)


def _path(processes: InternetProcesses, process: int) -> tuple[str, ...]:
    """Interface, address and kind of the path to a process, and what QUIC adds to the messages."""
    link: Link = processes.node.wait(processes.link(process))
    overhead = f"+{100 * (link.sent_bytes / link.payload - 1):.1f} %"
    path = next((path for path in link.connection.paths() if path.is_selected), None)
    if path is None or not path.is_ip:
        return "", path.remote_addr if path else "", "relayed", overhead
    host = path.remote_addr.rpartition(":")[0].strip("[]")
    return interface_towards(host), path.remote_addr, "direct", overhead
