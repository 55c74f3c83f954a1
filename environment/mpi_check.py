"""What MPI can do here, checked:  mpirun -np N python environment/mpi_check.py

Process 0 prints each process' host, device and threads, the MPI library and whether it is
CUDA-aware. Then the processes pass tensors around a ring and add tensors up. The exit code is 1
if a content is wrong.
"""

import os
import socket
import sys

import torch
from mpi4py import MPI

from network import cuda_aware_mpi

LENGTH = 100_000  # numbers in a message: beyond what MPI libraries send along with the header

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


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def count(n: int, one: str, many: str = "") -> str:
    """`1 host`, `2 hosts`."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def main() -> int:
    """Print the report on process 0 and return the exit code, the same on all processes."""
    comm = MPI.COMM_WORLD
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
    rows = comm.gather(row, root=0)
    aware = cuda_aware_mpi()
    if rows is not None:
        print(table([("process", "host", "device", "torch threads", "MPI threads"), *rows]))
        # first lines are like "Open MPI v5.0.11, package: …" and "MPICH Version:\t4.0.2"
        library = MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0")
        library = " ".join(library.replace("Version:", "").split())
        print(f"MPI library: {library} (MPI standard {'.'.join(map(str, MPI.Get_version()))})")
        print(f"CUDA-aware: {({True: 'yes', False: 'no', None: 'unknown'})[aware]}")

    # Memory of the GPU only goes to an MPI that says it can read it.
    where = device if aware else torch.device("cpu")
    checks = {"ring exchange": check_ring, "all-reduce": check_all_reduce}
    everyone = count(comm.size, "process", "processes")
    failed = False
    for name, check in checks.items():
        problems = comm.allgather(check(comm, where))
        wrong = {rank: problem for rank, problem in enumerate(problems) if problem}
        failed |= bool(wrong)
        if comm.rank == 0:
            for rank, problem in wrong.items():
                print(f"process {rank}: {problem}", file=sys.stderr)
            if not wrong:
                print(f"{name}: correct in {everyone} ({where.type} memory)")
    if comm.rank == 0 and not failed:
        hosts = len({row[1] for row in rows or []})
        print(f"MPI works: {everyone} on {count(hosts, 'host')}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
