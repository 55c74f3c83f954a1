"""A check and a benchmark of MPI on this machine:  mpirun -np N python -m powergossip.mpi_check

Process 0 prints the host, device and threads of each process, the MPI library and whether it is
CUDA-aware. Then the processes pass tensors around a ring and all-reduce tensors. The exit code is 1
if a result is wrong, and 2 for bad arguments.

Then the link between each pair of processes is measured. Option --quick skips this.

    latency    half the round-trip time of 8 bytes: the median, in µs
    bandwidth  4 MiB divided by the time until the receiver's answer of 8 bytes: the median, in
               MB/s (10^6 bytes per second). Slow links are measured with a smaller message: the
               first of 64 KiB, 256 KiB and 1 MiB that takes longer than 0.05 s.

With up to 16 processes, one pair measures while the others sleep. With more, many pairs measure
concurrently to save time, in rounds in which each process is in one pair. Pairs of the same two
hosts then share a link, and the table is not printed.

With GPUs, transfers from GPU memory are measured, too: directly if MPI is CUDA-aware, and otherwise
staged through pinned host memory, as in training.

The results show whether MPI uses the fast network. Orders of magnitude between hosts: 1 to 5 µs and
10 to 50 GB/s for InfiniBand, 20 to 100 µs for TCP, with 0.1 GB/s on 1 Gbit/s and 1.1 GB/s on
10 Gbit/s. On one host: about 1 µs and several GB/s. See environment/gpu_cluster.md for remedies.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from itertools import combinations
from statistics import median

import torch

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as missing:
    reason = str(missing).partition("\n")[0]
    print(f"error: this checks an MPI library, and found none: {reason}", file=sys.stderr)
    sys.exit(2)

from powergossip import command_line
from powergossip.errors import BadInput
from powergossip.formatting import counted, decimals, plain
from powergossip.network import cuda_aware_mpi

LENGTH = 100_000  # elements of a message: more than MPI libraries send along with the header

SMALL, LARGE = 8, 4 * 2**20  # bytes: messages for latency and for bandwidth
SIZES = [2**16, 2**18, 2**20, LARGE]  # bytes: tried in this order, until one takes SLOW
SLOW = 0.05  # seconds
ALONE = 16  # the largest number of processes for which one pair measures at a time
CONTINUE, DONE = 1, 2  # tags: another message follows, or none

THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def local_device(local_rank: int) -> torch.device:
    """The GPU of the process with this rank on its host, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def device_name(device: torch.device) -> str:
    """`cpu`, or `cuda:0 (name from the driver)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def content(rank: int, where: torch.device) -> torch.Tensor:
    """The message of process `rank`: its elements differ between processes and indices."""
    return rank + torch.arange(LENGTH, dtype=torch.float64, device=where)


def finish_kernels(where: torch.device) -> None:
    """Wait for kernels that write a message: MPI does not know CUDA's streams."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def check_ring(comm: MPI.Intracomm, where: torch.device) -> str | None:
    """Send to the next process and receive from the previous one: the error, or None."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = content(comm.rank, where), torch.full_like(content(0, where), torch.nan)
    finish_kernels(where)
    MPI.Request.Waitall([comm.Irecv(received, source=left), comm.Isend(sent, dest=right)])
    return difference("ring exchange", received, content(left, where), f" from process {left}")


def check_all_reduce(comm: MPI.Intracomm, where: torch.device) -> str | None:
    """All-reduce the tensors of all processes: the error, or None."""
    total = content(comm.rank, where)
    finish_kernels(where)
    comm.Allreduce(MPI.IN_PLACE, total, op=MPI.SUM)
    # Σ_rank (rank + j) = n (n − 1) / 2 + n j, in float64 without rounding
    n = comm.size
    expected = n * (n - 1) / 2 + n * content(0, where)
    return difference("all-reduce", total, expected)


def difference(
    check_name: str, received: torch.Tensor, expected: torch.Tensor, source: str = ""
) -> str | None:
    """A sentence about the first element that differs, or None."""
    wrong = (received != expected).nonzero()
    if len(wrong) == 0:
        return None
    j = int(wrong[0])
    return (
        f"{check_name}: {len(wrong)} of {len(expected)} numbers{source} are wrong; "
        f"number {j} is {received[j].item()} instead of {expected[j].item()}"
    )


# --- Latency and bandwidth ------------------------------------------------------------------------

Pair = tuple[int, int]  # ranks of two processes, ascending
Speed = tuple[float, float]  # latency in seconds, bandwidth in bytes per second


class Port:
    """A process' buffer for messages of up to LARGE bytes, in a device's memory.

    Args:
        staged: Whether messages are staged through host memory, pinned if the device is a GPU.
    """

    def __init__(self, comm: MPI.Intracomm, where: torch.device, staged: bool):
        self._comm, self._staged = comm, staged
        self._content = torch.ones(LARGE, dtype=torch.uint8, device=where)
        self._host = self._content
        if staged:
            self._host = torch.ones(LARGE, dtype=torch.uint8, pin_memory=where.type == "cuda")
        finish_kernels(where)
        # By address, since converting a tensor for each call costs more than a short message.
        self._memory = MPI.buffer.fromaddress(self._host.data_ptr(), LARGE)

    def send(self, size: int, to: int, tag: int) -> None:
        """Send the first `size` bytes."""
        if self._staged:
            self._host[:size].copy_(self._content[:size])
        self._comm.Send([self._memory, size, MPI.BYTE], dest=to, tag=tag)

    def receive(self, source: int) -> int:
        """Receive a message of any size, and return its tag."""
        status = MPI.Status()
        self._comm.Recv([self._memory, LARGE, MPI.BYTE], source=source, status=status)
        if self._staged:
            size = status.Get_count(MPI.BYTE)
            self._content[:size].copy_(self._host[:size])
            finish_kernels(self._content.device)
        return status.tag

    def exchange(self, size: int, other: int) -> float:
        """Send `size` bytes and receive an answer of SMALL bytes: the elapsed time in seconds."""
        start = time.perf_counter()
        self.send(size, other, CONTINUE)
        self.receive(other)
        return time.perf_counter() - start

    def answer(self, other: int) -> None:
        """Answer each message with SMALL bytes, until a message with the tag DONE."""
        while self.receive(other) == CONTINUE:
            self.send(SMALL, other, CONTINUE)

    def measure(self, other: int) -> Speed:
        """Latency and bandwidth between this process and another one, which calls `answer`."""

        def repeated(size: int, times: int, limit: float) -> float:
            """Median time of `times` exchanges, or of those within a limit in seconds."""
            seconds = [self.exchange(size, other)]
            while len(seconds) < times and sum(seconds) < limit:
                seconds.append(self.exchange(size, other))
            return median(seconds)

        repeated(SMALL, 10, limit=0.1)  # sets up the connection
        latency = repeated(SMALL, 200, limit=0.1) / 2
        # These exchanges also register the memory with the network card.
        size = next((size for size in SIZES if self.exchange(size, other) > SLOW), LARGE)
        bandwidth = size / repeated(size, 5, limit=4 * SLOW)
        self.send(SMALL, other, DONE)
        return latency, bandwidth


def rounds(n: int) -> list[list[Pair]]:
    """All pairs of n processes, in rounds. The pairs of a round measure concurrently.

    Up to ALONE processes, a round is a single pair. Beyond, the circle method for tournaments gives
    at most n rounds, in which every process is in one pair (one process is in none if n is odd).
    """
    if n <= ALONE:
        return [[pair] for pair in combinations(range(n), 2)]
    circle = n - 1 + n % 2  # processes in the circle; one more is in the middle, if n is even
    middle = circle
    found = []
    for t in range(circle):
        pairs = [((t + k) % circle, (t - k) % circle) for k in range(1, circle // 2 + 1)]
        pairs += [(t, middle)] if middle < n else []
        found.append([(min(pair), max(pair)) for pair in pairs])
    return found


def wait_asleep(comm: MPI.Intracomm) -> None:
    """A barrier that sleeps: MPI's barrier keeps cores busy, which the measuring pair may need."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def measure_pairs(comm: MPI.Intracomm, where: torch.device, staged: bool) -> dict[Pair, Speed]:
    """The speed of every pair, on process 0. Empty on the others."""
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
    """A report: the table of all pairs, medians and extremes, and the slowest pairs.

    The table is for up to ALONE processes. Medians and extremes are given for pairs on one host and
    for pairs on two hosts.

    Args:
        hosts: Name of the host of each rank.
    """
    found = {pair: (1e6 * latency, bandwidth / 1e6) for pair, (latency, bandwidth) in found.items()}
    lines = [speed_table(found, len(hosts))] if len(hosts) <= ALONE else []
    within = {pair: speed for pair, speed in found.items() if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: speed for pair, speed in found.items() if pair not in within}
    for name, some in (("on a host", within), ("between hosts", between)):
        if some:
            latencies, bandwidths = zip(*some.values(), strict=True)
            lines.append(
                f"{name} ({counted(len(some), 'pair')}): {median_and_range(latencies)} µs, "
                f"{median_and_range(bandwidths)} MB/s"
            )

    def named(pair: Pair) -> str:
        return " and ".join(f"{process} ({hosts[process]})" for process in pair)

    late = max(found, key=lambda pair: found[pair][0])
    narrow = min(found, key=lambda pair: found[pair][1])
    lines.append(
        f"slowest: {three_digits(found[late][0])} µs between {named(late)}, "
        f"{three_digits(found[narrow][1])} MB/s between {named(narrow)}"
    )
    return "\n".join(lines)


def speed_table(found: dict[Pair, Speed], n: int) -> str:
    """Microseconds above the diagonal, MB/s below it."""

    def cell(row: int, column: int) -> str:
        if row == column:
            return "-"
        return three_digits(found[min(row, column), max(row, column)][int(row > column)])

    ranks = [str(process) for process in range(n)]
    rows = [[rank, *(cell(row, column) for column in range(n))] for row, rank in enumerate(ranks)]
    return plain([["", *ranks], *rows])


def median_and_range(values: Sequence[float]) -> str:
    """`1.30 (1.10 to 2.00)`: the median, the minimum and the maximum."""
    middle, low, high = map(three_digits, (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def three_digits(value: float) -> str:
    """At least three digits, at most two of them after the decimal point."""
    return f"{value:.{min(2, decimals(value, 3))}f}"


# --- The report -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] = ()) -> None:
    """Print the report in process 0. Raises BadInput, or SystemExit with code 1 for a wrong result,
    in all processes."""
    comm = MPI.COMM_WORLD
    parser = command_line.parser("powergossip-mpi-check", __doc__ or "")
    parser.add_argument("--quick", action="store_true", help="check only, without measurements")
    with nullcontext() if comm.rank == 0 else redirect_stdout(StringIO()):  # of --help
        quick = command_line.parsed(parser, arguments).quick
    if comm.size == 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise BadInput("this checks MPI, which torchrun does not start; start it with mpirun")

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
        print(plain([("process", "host", "device", "torch threads", "MPI threads"), *rows]))
        # The first line is like "Open MPI v5.0.11, package: …" or "MPICH Version:\t4.0.2".
        library = MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0")
        library = " ".join(library.replace("Version:", "").split())
        print(f"MPI library: {library} (MPI standard {'.'.join(map(str, MPI.Get_version()))})")
        print(f"CUDA-aware: {({True: 'yes', False: 'no', None: 'unknown'})[aware]}")

    # GPU memory is passed only to an MPI that reports to be CUDA-aware.
    where = device if aware else torch.device("cpu")
    failed = not check(comm, where)
    if not failed and not quick and comm.size > 1:
        report_speeds(comm, device, aware is True, hosts)
    if comm.rank == 0 and not failed:
        everyone = counted(comm.size, "process", "processes")
        print(f"MPI works: {everyone} on {counted(len(set(hosts)), 'host')}")
    if failed:
        sys.exit(1)


def check(comm: MPI.Intracomm, where: torch.device) -> bool:
    """Whether all checks pass, the same on all processes. Process 0 prints the errors."""
    checks = {"ring exchange": check_ring, "all-reduce": check_all_reduce}
    everyone = counted(comm.size, "process", "processes")
    failed = False
    for name, run in checks.items():
        problems = comm.allgather(run(comm, where))
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
    """Measure all pairs, in CPU memory and in the memory of GPUs. Process 0 prints the report."""
    legend = "above the diagonal µs for 8 bytes, below it MB/s for 4 MiB"
    if comm.size > ALONE:
        legend = "µs for 8 bytes, MB/s for 4 MiB, many pairs at the same time"

    def report(title: str, where: torch.device, staged: bool) -> None:
        found = measure_pairs(comm, where, staged)
        if comm.rank == 0:
            print(f"\n{title}: {legend}\n{speeds(found, hosts)}", flush=True)

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
    """Run as a program. Bad input is one sentence of the first process, exit code 2."""
    first = MPI.COMM_WORLD.rank == 0 and os.environ.get("RANK", "0") == "0"  # of mpirun or torchrun
    command_line.run(main, prints=first)


if __name__ == "__main__":
    command()
