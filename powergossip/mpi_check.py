"""A check and a benchmark of MPI on this machine:  mpirun -np N python -m powergossip.mpi_check

Process 0 prints the host, device and threads of each process, the MPI library and whether it is
CUDA-aware. Then the processes pass tensors around a ring and all-reduce tensors. The exit code is 1
if a result is wrong, and 2 for bad arguments.

Then one pair of processes after the other measures its link, while the others sleep: all pairs, or,
with more than 16 processes, the pairs of process 0. Option --quick skips this.

    latency    half the round-trip time of 8 bytes: the median, in µs
    bandwidth  4 MiB (less on a slow link) divided by the time until the receiver's answer of 8
               bytes: the median, in MB/s (10^6 bytes per second)

With GPUs and a CUDA-aware MPI, transfers from GPU memory are measured, too.

The results show whether MPI uses the fast network. Orders of magnitude between hosts: 1 to 5 µs and
10 to 50 GB/s for InfiniBand, 20 to 100 µs for TCP, with 0.1 GB/s on 1 Gbit/s and 1.1 GB/s on
10 Gbit/s. On one host: about 1 µs and several GB/s. See docs/gpu-cluster.md for remedies.
"""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from itertools import combinations

import torch

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as missing:
    reason = str(missing).partition("\n")[0]
    print(f"error: this checks an MPI library, and found none: {reason}", file=sys.stderr)
    sys.exit(2)

from powergossip import command_line
from powergossip.errors import BadInput
from powergossip.formatting import counted, plain
from powergossip.network import cuda_aware_mpi
from powergossip.network.mpi import MPIChannel, MPIProcesses
from powergossip.network.processes import cores
from powergossip.network.speeds import LARGE, MOST, Pair, Speed, measure, speeds

LENGTH = 100_000  # elements of a message: more than MPI libraries send along with the header

THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")  # 0 to 3 in Open MPI and MPICH


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
    return difference(received, content(left, where), f" from process {left}")


def check_all_reduce(comm: MPI.Intracomm, where: torch.device) -> str | None:
    """All-reduce the tensors of all processes: the error, or None."""
    total = content(comm.rank, where)
    finish_kernels(where)
    comm.Allreduce(MPI.IN_PLACE, total, op=MPI.SUM)
    # Σ_rank (rank + j) = n (n − 1) / 2 + n j, in float64 without rounding
    n = comm.size
    return difference(total, n * (n - 1) / 2 + n * content(0, where))


def difference(received: torch.Tensor, expected: torch.Tensor, source: str = "") -> str | None:
    """A sentence about the first element that differs, or None."""
    wrong = (received != expected).nonzero()
    if len(wrong) == 0:
        return None
    j = int(wrong[0])
    return (
        f"{len(wrong)} of {len(expected)} numbers{source} are wrong; "
        f"number {j} is {received[j].item()} instead of {expected[j].item()}"
    )


# --- Latency and bandwidth ------------------------------------------------------------------------


def measure_pairs(comm: MPI.Intracomm, where: torch.device) -> dict[Pair, Speed]:
    """The speed of each pair, or of those with process 0, from the memory of a device."""
    pairs = [p for p in combinations(range(comm.size), 2) if comm.size <= MOST or p[0] == 0]
    memory = torch.full((LARGE,), comm.rank, dtype=torch.uint8, device=where)
    finish_kernels(where)
    channel = MPIChannel(comm, True, lambda requests, _: MPI.Request.Waitall(requests))
    return measure(MPIProcesses(comm), channel, memory, pairs, (100, 4))


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

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device, name = torch.device("cpu"), "cpu"
    if torch.cuda.is_available():
        device = torch.device("cuda", local.rank % torch.cuda.device_count())
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    threads = str(max(1, len(cores()) // local.size))
    level = THREAD_LEVELS[MPI.Query_thread()]
    rows = comm.allgather((str(comm.rank), socket.gethostname(), name, threads, level))
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
    check(comm, device if aware else torch.device("cpu"))
    with_gpus = aware and all(row[2] != "cpu" for row in rows)
    memories = [torch.device("cpu"), *([device] if with_gpus else [])]
    for where in memories if comm.size > 1 and not quick else []:
        found = measure_pairs(comm, where)
        if comm.rank == 0:
            title = f"{where.type.upper()} memory: µs for 8 bytes, MB/s for 4 MiB"
            print(f"\n{title}\n{speeds(found, hosts)}\n", flush=True)
    if comm.rank == 0:
        everyone = counted(comm.size, "process", "processes")
        print(f"MPI works: {everyone} on {counted(len(set(hosts)), 'host')}")


def check(comm: MPI.Intracomm, where: torch.device) -> None:
    """Exit with code 1 in all processes if a check fails. Process 0 prints the errors."""
    everyone = counted(comm.size, "process", "processes")
    failed = False
    for name, run in (("ring exchange", check_ring), ("all-reduce", check_all_reduce)):
        problems = comm.allgather(run(comm, where))
        failed |= any(problems)
        if comm.rank == 0:
            for rank, problem in enumerate(problems):
                if problem:
                    print(f"process {rank}: {name}: {problem}", file=sys.stderr)
            if not any(problems):
                print(f"{name}: correct in {everyone} ({where.type} memory)")
    if failed:
        sys.exit(1)


def command() -> None:
    """Run as a program. Bad input is one sentence of the first process, exit code 2."""
    first = MPI.COMM_WORLD.rank == 0 and os.environ.get("RANK", "0") == "0"  # of mpirun or torchrun
    command_line.run(main, prints=first)


if __name__ == "__main__":
    command()
