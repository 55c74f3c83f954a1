"""The speed of links between processes, whatever carries their messages.

One pair of processes after the other measures its link, while the others sleep.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from time import perf_counter

import torch

from powergossip.formatting import counted, decimals, plain
from powergossip.network.processes import Channel, Processes

SMALL = 8  # bytes of a message for latency, and of answers
SIZES = (2**16, 2**19, 2**22)  # bytes of messages for bandwidth, until one is slow
LARGE = SIZES[-1]
SLOW = 0.5  # seconds
MOST = 16  # the largest number of processes with a line for each pair

Pair = tuple[int, int]  # ranks of two processes, of which the first one sends
Speed = tuple[float, float]  # latency in µs, bandwidth in MB/s


def measure(
    processes: Processes,
    channel: Channel,
    memory: torch.Tensor,
    pairs: Iterable[Pair],
    times: tuple[int, int],
) -> dict[Pair, Speed]:
    """The speed of each pair, by messages from and to a memory of LARGE bytes. All processes call
    it.

    Args:
        times: Number of measured messages for latency, and for bandwidth.
    """

    def seconds(pair: Pair, size: int, times: int) -> float:
        """Median time from a message of `size` bytes to its answer of SMALL bytes."""
        spent = []
        if processes.rank in pair:
            other = [(sum(pair) - processes.rank, memory[:length]) for length in (size, SMALL)]
            there, back = channel.requests([], other[:1]), channel.requests(other[1:], [])
            if processes.rank == pair[1]:
                there, back = channel.requests(other[:1], []), channel.requests([], other[1:])
            for _ in range(1 + times):  # the first exchange sets up the connection
                start = perf_counter()
                for requests in (there, back):
                    requests.start()
                    requests.wait()
                spent.append(perf_counter() - start)
        return median(processes.gather(spent[1:])[pair[0]])

    found: dict[Pair, Speed] = {}
    for pair in pairs:
        latency = seconds(pair, SMALL, times[0]) / 2
        for size in SIZES:
            spent = seconds(pair, size, times[1])
            if spent > SLOW:
                break
        found[pair] = 1e6 * latency, size / spent / 1e6
    return found


def speeds(found: dict[Pair, Speed], hosts: Sequence[str]) -> str:
    """A report: a line for each pair up to MOST processes, medians and extremes on a host and
    between hosts, and the slowest pairs.

    Args:
        hosts: Name of the host of each rank.
    """

    def named(pair: Pair) -> str:
        return " and ".join(f"{process} ({hosts[process]})" for process in pair)

    lines = []
    if len(hosts) <= MOST:
        rows = [(f"{a}, {b}", *map(three_digits, speed)) for (a, b), speed in found.items()]
        lines.append(plain([("processes", "µs", "MB/s"), *rows]))
    for name, together in (("on a host", True), ("between hosts", False)):
        some = [found[a, b] for a, b in found if (hosts[a] == hosts[b]) == together]
        if some:
            latencies, bandwidths = map(median_and_range, zip(*some, strict=True))
            pairs = counted(len(some), "pair")
            lines.append(f"{name} ({pairs}): {latencies} µs, {bandwidths} MB/s")
    late = max(found, key=lambda pair: found[pair][0])
    narrow = min(found, key=lambda pair: found[pair][1])
    lines.append(
        f"slowest: {three_digits(found[late][0])} µs between {named(late)}, "
        f"{three_digits(found[narrow][1])} MB/s between {named(narrow)}"
    )
    return "\n".join(lines)


def median_and_range(values: Sequence[float]) -> str:
    """`1.30 (1.10 to 2.00)`: the median, the minimum and the maximum."""
    middle, low, high = map(three_digits, (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def three_digits(value: float) -> str:
    """At least three digits, at most two of them after the decimal point."""
    return f"{value:.{min(2, decimals(value, 3))}f}"
