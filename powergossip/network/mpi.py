"""Processes that are started by mpirun or another launcher of MPI."""

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from powergossip.network import standstill
from powergossip.network.processes import (
    TOKEN,
    Pieces,
    Processes,
    Requests,
    bytes_of,
    cores,
    in_parts,
)

T = TypeVar("T")


class MPIProcesses(Processes):
    """The processes of an MPI communicator with at least two of them."""

    transport = "mpi"

    def __init__(self, communicator: Any):
        from mpi4py import MPI

        super().__init__()
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        host = communicator.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = host.rank, host.size
        own = cores()
        all_cores = set().union(*host.allgather(own))
        host.Free()
        self.threads = max(1, min(len(own), len(all_cores) // self.local_size))
        self._wait_all = _wait_all(self.local_size > len(all_cores), self.rank)

    def _gather_all(self) -> None:
        """Wait until all processes are here, before an operation that would let MPI spin."""
        self._wait_all([self.communicator.Ibarrier()], range(self.size))

    def gather(self, value: T) -> list[T]:
        self._gather_all()
        return self.communicator.allgather(value)

    def broadcast(self, value: T) -> T:
        self._gather_all()
        return self.communicator.bcast(value)

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        self._gather_all()
        gathered = np.empty((self.size, array.nbytes), dtype=np.uint8)
        done = 0
        for part in in_parts(bytes_of(np.ascontiguousarray(array)), self.size):
            found = np.empty((self.size, part.numel()), dtype=np.uint8)
            self.communicator.Allgather(part.numpy(), found)
            gathered[:, done : done + part.numel()] = found
            done += part.numel()
        return gathered.view(array.dtype).reshape(self.size, *array.shape)

    def broadcast_array(self, array: np.ndarray) -> None:
        self._gather_all()
        for part in in_parts(bytes_of(array)):
            self.communicator.Bcast(part.numpy())

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        from mpi4py import MPI

        buffers = values.copy(), np.empty_like(values)  # which MPI uses until the end of Wait
        request = self.communicator.Iallreduce(*buffers, MPI.MAX)

        def wait() -> np.ndarray:
            self._wait_all([request], range(self.size))
            return buffers[1]

        return wait

    def channel(self, device: torch.device, direct: bool | None = None) -> "MPIChannel":
        if direct is None:
            direct = device.type != "cuda" or cuda_aware_mpi() is True
        return MPIChannel(self.communicator, direct, self._wait_all)

    def checked_barrier(
        self,
        token: np.ndarray,
        patience: float,
        check: Callable[[int, np.ndarray], None],
        ahead: Callable[[int], None],
    ) -> None:
        from mpi4py import MPI

        communicator, status = self.communicator, MPI.Status()
        if MPI.Is_finalized() or communicator == MPI.COMM_NULL:
            return
        others = [process for process in range(self.size) if process != self.rank]
        sends = [communicator.Isend(token, process, TOKEN) for process in others]
        start = time.monotonic()
        seen: dict[
            int, float
        ] = {}  # process → time at which a message without token was first seen
        with standstill.waiting(self.rank, others):
            while others:
                for process in list(others):
                    if communicator.Iprobe(process, TOKEN, status):
                        theirs = np.empty_like(token)
                        communicator.Recv(theirs, process, TOKEN)
                        others.remove(process)
                        check(process, theirs)
                    elif communicator.Iprobe(process, MPI.ANY_TAG, status) and status.tag != TOKEN:
                        now = time.monotonic()
                        if now - seen.setdefault(process, now) >= patience:
                            ahead(process)
                time.sleep(0.0 if time.monotonic() - start < 0.1 else 0.005)
        MPI.Request.Waitall(sends)

    def finalize(self) -> None:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()

    def end(self, code: int) -> NoReturn:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            self.communicator.Abort(code)
        os._exit(code)  # not reached before the program's own MPI_Finalize


def world() -> MPIProcesses | None:
    """All processes of the launcher, or None if there is only one."""
    from mpi4py import MPI

    return MPIProcesses(MPI.COMM_WORLD.Dup()) if MPI.COMM_WORLD.size > 1 else None


class MPIChannel:
    """Messages by MPI's point-to-point operations."""

    name = "mpi"
    stream_ordered = False

    def __init__(self, communicator: Any, direct: bool, wait_all: "_WaitAll"):
        self._communicator, self.direct, self._wait_all = communicator, direct, wait_all

    def requests(self, incoming: Pieces, outgoing: Pieces, tag: int = 0) -> Requests:
        return _Messages(self._communicator, incoming, outgoing, tag, self._wait_all)


_WaitAll = Callable[[list[Any], Iterable[int]], object]  # requests, and processes that have them

_POLL_INTERVAL = 20e-6  # seconds


def _wait_all(oversubscribed: bool, own: int) -> _WaitAll:
    """MPI's Waitall. Where processes outnumber cores, one that sleeps.

    MPI polls, and a process that polls takes the core from one that computes. That MPI yields
    between polls does not help: the kernel soon returns to it.
    """
    from mpi4py import MPI

    test_all, wait_all = MPI.Request.Testall, MPI.Request.Waitall
    test_one, wait_one = MPI.Request.Test, MPI.Request.Wait  # their errors say what has happened

    def wait(requests: list[Any], others: Iterable[int]) -> None:
        one = len(requests) == 1
        which: Any = requests[0] if one else requests
        test: Any = test_one if one else test_all
        if test(which):
            return
        with standstill.waiting(own, others):
            if not oversubscribed:
                (wait_one if one else wait_all)(which)
                return
            os.sched_yield()
            while not test(which):
                time.sleep(_POLL_INTERVAL)

    return wait


class _Messages:
    """Messages by MPI's non-blocking operations.

    Persistent requests would save .4 µs a message, and fail if a program has finalized MPI.
    """

    def __init__(
        self, communicator: Any, incoming: Pieces, outgoing: Pieces, tag: int, wait_all: _WaitAll
    ):
        from mpi4py import MPI

        self._wait_all, self._test_all = wait_all, MPI.Request.Testall
        self._communicator, self._byte, self._tag = communicator, MPI.BYTE, tag
        self._incoming, self._outgoing = (
            [(process, part) for process, rows in pieces for part in _memory(rows)]
            for pieces in (incoming, outgoing)
        )
        self._others = {process for process, _ in (*self._incoming, *self._outgoing)}

    def start(self) -> None:
        comm, byte, tag = self._communicator, self._byte, self._tag
        self._requests = [
            *(comm.Irecv([memory, byte], process, tag) for process, memory in self._incoming),
            *(comm.Isend([memory, byte], process, tag) for process, memory in self._outgoing),
        ]

    def test(self) -> bool:
        return bool(self._test_all(self._requests))

    def wait(self) -> None:
        self._wait_all(self._requests, self._others)


def _memory(rows: Tensor) -> list[Any]:
    """The memory of rows as bytes for messages of MPI, without a copy, whatever their dtype."""
    return [part if part.is_cuda else part.numpy() for part in in_parts(rows)]


def cuda_aware_mpi() -> bool | None:
    """True if the MPI library reports support of GPU memory, None if it has no such query.

    Open MPI and its relatives provide MPIX_Query_cuda_support, MPICH MPIX_GPU_query_support.
    """
    from mpi4py import MPI

    del MPI  # the import has loaded the library and its symbols
    for library in [None, *_loaded_mpi_libraries()]:
        try:
            symbols = ctypes.CDLL(library)
        except OSError:
            continue
        if hasattr(symbols, "MPIX_Query_cuda_support"):
            return bool(symbols.MPIX_Query_cuda_support())
        if hasattr(symbols, "MPIX_GPU_query_support"):
            answer = ctypes.c_int(0)
            cuda = 0  # MPIX_GPU_SUPPORT_CUDA
            return symbols.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0 and bool(answer)
    return None


def _loaded_mpi_libraries() -> list[str]:
    """Files of this process' memory map that look like an MPI library (Linux)."""
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(file for file in files if os.path.basename(file).startswith("libmpi"))
