"""What MPI can do here, checked and measured:  mpirun -np N python -m powergossip.mpi_check

Process 0 prints each process' host, device and threads, the MPI library and whether it is
CUDA-aware. Then the processes pass tensors around a ring and add tensors up. The exit code is 1
if a content is wrong, 2 if the arguments are.

Then every pair of processes measures, unless --quick says not to:

    latency    half the time that 8 bytes take to the other process and back; the median, in µs
    bandwidth  4 MiB to the other process, over the time until its answer of 8 bytes; the median,
               in MB/s (10^6 bytes a second). A slow link gets a smaller message: the first of
               64 KiB, 256 KiB and 1 MiB that takes longer than 0.05 s.

Up to 16 processes, one pair measures while the others sleep. Beyond, many pairs do at the same time
(rounds in which each process is in one pair), so that it ends: pairs of the same two hosts then
share a link, and the table is left out.

With GPUs it is measured from GPU memory too: directly if MPI is CUDA-aware, else through pinned
host memory, as network does it.

It shows whether MPI found the fast network. Orders of magnitude between hosts: 1 to 5 µs and 10 to
50 GB/s for InfiniBand, 20 to 100 µs for TCP, which carries 0.1 GB/s on 1 Gbit/s and 1.1 on 10; on
one host about 1 µs and several GB/s. environment/gpu_cluster.md says what to do.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import NoReturn

import torch
from mpi4py import MPI

from powergossip.network import cuda_aware_mpi

USAGE = "mpirun -np N python -m powergossip.mpi_check [--quick]"

LENGTH = 100_000  # numbers in a message: beyond what MPI libraries send along with the header

SMALL, LARGE = 8, 4 * 2**20  # bytes of the messages that latency and bandwidth are measured with
SIZES = [2**16, 2**18, 2**20, LARGE]  # bytes: tried in this order, until one takes SLOW
SLOW = 0.05  # seconds
ALONE = 16  # up to so many processes, one pair measures at a time
GO_ON, DONE = 1, 2  # tags: another message follows, or none

THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def local_device(local_rank: int) -> torch.device:
    """The GPU that the process with this number on its host uses, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def device_name(device: torch.device) -> str:
    """`cpu`, or `cuda:0 (what the driver calls it)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def content(rank: int, where: torch.device) -> torch.Tensor:
    """What process `rank` sends: different for every process and at every place."""
    return rank + torch.arange(LENGTH, dtype=torch.float64, device=where)


def finish_kernels(where: torch.device) -> None:
    """MPI knows nothing of CUDA's streams: what it is to read must have been written."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def check_ring(comm: MPI.Intracomm, where: torch.device) -> str | None:
    """Send to the next process, receive from the previous one; what was wrong, or None."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = content(comm.rank, where), torch.full_like(content(0, where), torch.nan)
    finish_kernels(where)
    MPI.Request.Waitall([comm.Irecv(received, source=left), comm.Isend(sent, dest=right)])
    return difference("ring exchange", received, content(left, where), f" from process {left}")


def check_all_reduce(comm: MPI.Intracomm, where: torch.device) -> str | None:
    """Add everyone's tensor up; what was wrong, or None."""
    total = content(comm.rank, where)
    finish_kernels(where)
    comm.Allreduce(MPI.IN_PLACE, total, op=MPI.SUM)
    # Σ_rank (rank + j) = n (n − 1) / 2 + n j, in float64 without rounding
    n = comm.size
    expected = n * (n - 1) / 2 + n * content(0, where)
    return difference("all-reduce", total, expected)


def difference(
    what: str, received: torch.Tensor, expected: torch.Tensor, source: str = ""
) -> str | None:
    """A sentence on the first number that differs, or None."""
    wrong = (received != expected).nonzero()
    if len(wrong) == 0:
        return None
    j = int(wrong[0])
    return (
        f"{what}: {len(wrong)} of {len(expected)} numbers{source} are wrong; "
        f"number {j} is {received[j].item()} instead of {expected[j].item()}"
    )


# --- Latency and bandwidth ------------------------------------------------------------------------

Pair = tuple[int, int]  # numbers of two processes, the smaller one first
Speed = tuple[float, float]  # latency in seconds, bandwidth in bytes a second


class Port:
    """What a process sends and receives messages with: up to LARGE bytes of a device's memory.

    staged: they pass through host memory, pinned if the device is a GPU
    """

    def __init__(self, comm: MPI.Intracomm, where: torch.device, staged: bool):
        self._comm, self._staged = comm, staged
        self._content = torch.ones(LARGE, dtype=torch.uint8, device=where)
        self._host = self._content
        if staged:
            self._host = torch.ones(LARGE, dtype=torch.uint8, pin_memory=where.type == "cuda")
        finish_kernels(where)
        # By its address: to look into the tensor for it anew would cost more than a short message.
        self._memory = MPI.buffer.fromaddress(self._host.data_ptr(), LARGE)

    def send(self, size: int, to: int, tag: int) -> None:
        """The first `size` bytes."""
        if self._staged:
            self._host[:size].copy_(self._content[:size])
        self._comm.Send([self._memory, size, MPI.BYTE], dest=to, tag=tag)

    def receive(self, source: int) -> int:
        """A message of any size; its tag."""
        status = MPI.Status()
        self._comm.Recv([self._memory, LARGE, MPI.BYTE], source=source, status=status)
        if self._staged:
            size = status.Get_count(MPI.BYTE)
            self._content[:size].copy_(self._host[:size])
            finish_kernels(self._content.device)
        return status.tag

    def exchange(self, size: int, other: int) -> float:
        """Send `size` bytes, receive SMALL as an answer; the seconds it took."""
        start = time.perf_counter()
        self.send(size, other, GO_ON)
        self.receive(other)
        return time.perf_counter() - start

    def answer(self, other: int) -> None:
        """Answer each message with SMALL bytes, until there will be no more."""
        while self.receive(other) == GO_ON:
            self.send(SMALL, other, GO_ON)

    def measure(self, other: int) -> Speed:
        """Between this process and another one, which answers."""

        def repeated(size: int, times: int, limit: float) -> float:
            """The median of so many exchanges, or of those that fit into a limit of seconds."""
            seconds = [self.exchange(size, other)]
            while len(seconds) < times and sum(seconds) < limit:
                seconds.append(self.exchange(size, other))
            return median(seconds)

        repeated(SMALL, 10, limit=0.1)  # the first ones set the connection up
        latency = repeated(SMALL, 200, limit=0.1) / 2
        # These make memory known to the network, too.
        size = next((size for size in SIZES if self.exchange(size, other) > SLOW), LARGE)
        bandwidth = size / repeated(size, 5, limit=4 * SLOW)
        self.send(SMALL, other, DONE)
        return latency, bandwidth


def rounds(n: int) -> list[list[Pair]]:
    """All pairs of n processes, in rounds: what stands in the same one measures at the same time.

    One pair a round up to ALONE processes. Beyond, the circle method of tournaments: at most n
    rounds, in each of which every process is in one pair (or in none, if n is odd).
    """
    if n <= ALONE:
        return [[pair] for pair in combinations(range(n), 2)]
    turning = n - 1 + n % 2  # that many stand in a circle, and one more in its middle
    middle = turning  # if n is odd: nobody
    found = []
    for t in range(turning):
        pairs = [((t + k) % turning, (t - k) % turning) for k in range(1, turning // 2 + 1)]
        pairs += [(t, middle)] if middle < n else []
        found.append([(min(pair), max(pair)) for pair in pairs])
    return found


def wait_asleep(comm: MPI.Intracomm) -> None:
    """A barrier. MPI's own would keep the core busy, which the pair that measures may need."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def measure_pairs(comm: MPI.Intracomm, where: torch.device, staged: bool) -> dict[Pair, Speed]:
    """Every pair's speed, on process 0; empty on the others."""
    port = Port(comm, where, staged)
    mine = {}
    for pairs in rounds(comm.size):
        wait_asleep(comm)
        for a, b in pairs:
            if comm.rank == a:
                mine[a, b] = port.measure(b)
            elif comm.rank == b:
                port.answer(a)
    wait_asleep(comm)
    gathered = comm.gather(mine) or []
    return {pair: speed for part in gathered for pair, speed in part.items()}


def speeds(found: dict[Pair, Speed], hosts: Sequence[str]) -> str:
    """A table of processes, for as many as measure one pair at a time; the medians and extremes on
    a host and between hosts; the slowest pairs. hosts: by number of the process."""
    lines = [speed_table(found, len(hosts))] if len(hosts) <= ALONE else []
    within = {pair: speed for pair, speed in found.items() if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: speed for pair, speed in found.items() if pair not in within}
    for name, some in (("on a host", within), ("between hosts", between)):
        if some:
            latencies, bandwidths = (sorted(values) for values in zip(*some.values(), strict=True))
            lines.append(
                f"{name} ({count(len(some), 'pair')}): {spread(latencies, microseconds)} µs, "
                f"{spread(bandwidths, megabytes)} MB/s"
            )

    def named(pair: Pair) -> str:
        return " and ".join(f"{process} ({hosts[process]})" for process in pair)

    late = max(found, key=lambda pair: found[pair][0])
    narrow = min(found, key=lambda pair: found[pair][1])
    lines.append(
        f"slowest: {microseconds(found[late][0])} µs between {named(late)}, "
        f"{megabytes(found[narrow][1])} MB/s between {named(narrow)}"
    )
    return "\n".join(lines)


def speed_table(found: dict[Pair, Speed], n: int) -> str:
    """Microseconds above the diagonal, MB/s below it."""

    def cell(row: int, column: int) -> str:
        if row == column:
            return "-"
        latency, bandwidth = found[min(row, column), max(row, column)]
        return microseconds(latency) if row < column else megabytes(bandwidth)

    numbers = [str(process) for process in range(n)]
    rows = [
        (number, *(cell(row, column) for column in range(n))) for row, number in enumerate(numbers)
    ]
    return table([("", *numbers), *rows], str.rjust)


def spread(ordered: Sequence[float], shown: Callable[[float], str]) -> str:
    """`1.3 (1.1 to 2.0)`: the median, and from the least to the largest."""
    return f"{shown(median(ordered))} ({shown(ordered[0])} to {shown(ordered[-1])})"


def microseconds(seconds: float) -> str:
    return three_digits(seconds * 1e6)


def megabytes(a_second: float) -> str:
    return three_digits(a_second / 1e6)


def three_digits(value: float) -> str:
    """Three digits at least, two of them behind the point at most."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


# --- The report -----------------------------------------------------------------------------------


def table(rows: list[tuple[str, ...]], align: Callable[[str, int], str] = str.ljust) -> str:
    """Rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(align, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def count(n: int, one: str, many: str = "") -> str:
    """`1 host`, `2 hosts`."""
    return f"{n} {one if n == 1 else many or one + 's'}"


class Refused(ValueError):
    """The arguments make no sense; the text is one sentence."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; use: {USAGE}")


def parse(arguments: Sequence[str]) -> tuple[bool, str | None]:
    """Whether to be quick, and the help if that is asked for. Raises Refused."""
    parser = Parser(
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,  # every process would print it
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    parser.add_argument("--quick", action="store_true", help="check, but measure nothing")
    options = parser.parse_args(list(arguments))
    return options.quick, parser.format_help() if options.help else None


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report on process 0 and return the exit code, the same on all processes."""
    comm = MPI.COMM_WORLD
    try:
        quick, asked_help = parse(arguments)
    except Refused as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    if asked_help is not None:
        if comm.rank == 0:
            print(asked_help)
        return 0

    on_this_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device = local_device(on_this_host.rank)
    cores = len(os.sched_getaffinity(0))

    row = (
        str(comm.rank),
        socket.gethostname(),
        device_name(device),
        str(max(1, cores // on_this_host.size)),
        THREAD_LEVELS[MPI.Query_thread()],
    )
    rows = comm.allgather(row)
    hosts = [row[1] for row in rows]
    aware = cuda_aware_mpi()
    if comm.rank == 0:
        print(table([("process", "host", "device", "torch threads", "MPI threads"), *rows]))
        # first lines are like "Open MPI v5.0.11, package: …" and "MPICH Version:\t4.0.2"
        library = MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0")
        library = " ".join(library.replace("Version:", "").split())
        print(f"MPI library: {library} (MPI standard {'.'.join(map(str, MPI.Get_version()))})")
        print(f"CUDA-aware: {({True: 'yes', False: 'no', None: 'unknown'})[aware]}")

    # Memory of the GPU only goes to an MPI that says it can read it.
    where = device if aware else torch.device("cpu")
    failed = not check(comm, where)
    if not failed and not quick and comm.size > 1:
        report_speeds(comm, device, aware is True, hosts)
    if comm.rank == 0 and not failed:
        everyone = count(comm.size, "process", "processes")
        print(f"MPI works: {everyone} on {count(len(set(hosts)), 'host')}")
    return int(failed)


def check(comm: MPI.Intracomm, where: torch.device) -> bool:
    """Whether all contents arrive, the same on all processes; process 0 says what did not."""
    checks = {"ring exchange": check_ring, "all-reduce": check_all_reduce}
    everyone = count(comm.size, "process", "processes")
    failed = False
    for name, carry_out in checks.items():
        problems = comm.allgather(carry_out(comm, where))
        wrong = {rank: problem for rank, problem in enumerate(problems) if problem}
        failed |= bool(wrong)
        if comm.rank == 0:
            for rank, problem in wrong.items():
                print(f"process {rank}: {problem}", file=sys.stderr)
            if not wrong:
                print(f"{name}: correct in {everyone} ({where.type} memory)")
    return not failed


def report_speeds(
    comm: MPI.Intracomm, device: torch.device, aware: bool, hosts: Sequence[str]
) -> None:
    """Measure all pairs, in CPU memory and where there are GPUs in theirs; process 0 prints."""
    above_below = "above the diagonal µs for 8 bytes, below it MB/s for 4 MiB"
    if comm.size > ALONE:
        above_below = "µs for 8 bytes, MB/s for 4 MiB, many pairs at the same time"

    def report(what: str, where: torch.device, staged: bool) -> None:
        found = measure_pairs(comm, where, staged)
        if comm.rank == 0:
            print(f"\n{what}: {above_below}\n{speeds(found, hosts)}", flush=True)

    report("CPU memory", torch.device("cpu"), staged=False)
    without = [rank for rank, kind in enumerate(comm.allgather(device.type)) if kind != "cuda"]
    if not without:
        way = "directly" if aware else "through pinned host memory, as MPI is not CUDA-aware"
        report(f"GPU memory, {way}", device, staged=not aware)
    elif comm.rank == 0 and len(without) < comm.size:
        print(f"\nGPU memory: not measured, process {without[0]} has no GPU")
    if comm.rank == 0:
        print()


def command() -> None:
    """Run as a program."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command()
