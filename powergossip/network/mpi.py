"""The processes of a run, and their communication outside of conversations."""

import ctypes
import os
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from powergossip.errors import BadInput, Signaled, Stopped

T = TypeVar("T")

TOKEN = 32767  # the tag of meetings. MPI guarantees tags up to this one


class Processes:
    """The processes of a communicator, or this process alone. See `processes()` for a run's."""

    def __init__(self, communicator: Any = None):
        self.communicator = communicator
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        cores = _cores()
        self.threads = len(cores)  # cores of the host for this process
        if self.communicator is not None:
            from mpi4py import MPI

            self.rank, self.size = self.communicator.rank, self.communicator.size
            host = self.communicator.Split_type(MPI.COMM_TYPE_SHARED)
            self.local_rank, self.local_size = host.rank, host.size
            all_cores = set().union(*host.allgather(cores))
            host.Free()
            self.threads = max(1, min(len(cores), len(all_cores) // self.local_size))
        self._tags = 0

    def set_threads(self) -> None:
        """Give torch `threads` threads, unless OMP_NUM_THREADS is set."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(self.threads)

    def new_tag(self) -> int:
        """The next tag for messages, cyclic from 1. Equal in all processes if all of them call."""
        self._tags = self._tags % (TOKEN - 1) + 1
        return self._tags

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run the block in every process. Input that fails in one is rejected in all.

        The block must not communicate. Raises BadInput, the same in all processes, if it raises
        ValueError or OSError in any. On process 0 alone: `if processes.rank == 0:` inside.
        """
        complaint = None
        try:
            yield
        except (ValueError, OSError) as error:
            complaint = str(error)
        for text in self.gather(complaint):
            if text is not None:
                raise BadInput(text)

    def one_by_one(self, action: Callable[[], T]) -> T:
        """Return `action()`, run first in one process of each host, then in the others (downloads).

        Bad input is handled as in `agreed`.
        """
        for turn in (True, False):
            with self.agreed():
                if turn == (self.local_rank == 0):
                    result = action()
        return result

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in all processes. Pickled: for small and rare values."""
        return [value] if self.communicator is None else self.communicator.allgather(value)

    def broadcast(self, value: T) -> T:
        """Process 0's value, in all processes."""
        return value if self.communicator is None else self.communicator.bcast(value)

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Start the elementwise maximum of an array over the processes. All of them call it.

        Returns a function that waits for the result and returns it.
        """
        if self.communicator is None:
            return lambda: values
        from mpi4py import MPI

        buffers = values.copy(), np.empty_like(values)  # which MPI uses until the end of Wait
        request = self.communicator.Iallreduce(*buffers, MPI.MAX)

        def wait() -> np.ndarray:
            request.Wait()
            return buffers[1]

        return wait

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Sum of an array over the processes, in all processes."""
        if self.communicator is None:
            return array
        total = np.empty_like(array)
        self.communicator.Allreduce(np.ascontiguousarray(array), total)
        return total


@contextmanager
def torch_kept() -> Iterator[None]:
    """Restore torch's global random generators and its number of threads at the end of the block.

    Those of GPUs are restored if they are in use at its start.
    """
    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@cache
def processes() -> Processes:
    """The processes of this run. Starts MPI if there is a launcher. An uncaught exception in one
    process then ends them all."""
    found = Processes(_world_communicator())
    found.set_threads()
    if found.size > 1:
        _end_together(found)
    return found


def _world_communicator() -> Any:
    """A communicator of all processes, or None without a launcher, where MPI is not needed."""
    launchers = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in launchers):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup() if MPI.COMM_WORLD.size > 1 else None


def _cores() -> set[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _end_together(found: Processes) -> None:
    """End all processes on an uncaught exception: the others would wait for messages forever."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, BadInput) or (isinstance(error, Stopped) and error.in_all_processes):
            if found.rank == 0:
                report(error)
            from mpi4py import MPI

            MPI.Finalize()
            # When the first process ends, mpirun kills the others and discards unread output.
            time.sleep(0.2 if found.rank == 0 else 0.3)
            os._exit(2 if isinstance(error, BadInput) else error.exit_code)
        # If several processes fail at once for the same reason, the first one reports it and ends
        # the others, which takes a while where processes share cores.
        time.sleep(0.0 if found.rank == 0 else min(0.5 + 0.1 * found.rank, 3.0))
        if isinstance(error, Stopped):
            report(error)
        elif isinstance(error, KeyboardInterrupt):
            print("error: interrupted", file=sys.stderr, flush=True)
        else:
            text = f"\nprocess {found.rank} of {found.size} on {socket.gethostname()} failed:\n"
            text += "".join(traceback.format_exception(kind, error, trace))
            print(text, file=sys.stderr, flush=True)
        if isinstance(error, Signaled):
            time.sleep(0.2)
            os._exit(error.exit_code)  # mpirun ends the others. Abort would print its own message
        code = error.exit_code if isinstance(error, Stopped) else 1
        found.communicator.Abort(130 if isinstance(error, KeyboardInterrupt) else code)

    sys.excepthook = hook


def report(error: Exception) -> None:
    """Print the text of an error to the standard error.

    After SIGTERM, to that of mpirun: Open MPI's sends SIGTERM to processes that it is about to kill
    and discards their output. If it writes to a file, its next output could take the place of the
    text, which is therefore printed in the usual way as well.
    """
    if isinstance(error, Signaled) and error.signal == signal.SIGTERM:
        try:
            parent = Path("/proc") / str(os.getppid())
            if (parent / "comm").read_text().strip() in ("mpirun", "mpiexec", "prterun"):
                with (parent / "fd" / "2").open("a") as stderr:
                    print(f"error: {error}", file=stderr, flush=True)
                    in_file = stat.S_ISREG(os.fstat(stderr.fileno()).st_mode)
                if not in_file:
                    return
        except OSError:  # not Linux, or a socket
            pass
    print(f"error: {error}", file=sys.stderr, flush=True)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a name. "auto" is GPU number local rank modulo the number of GPUs, or the CPU.

    Raises ValueError for a device that is unknown to torch or not present.
    """
    choices = "use auto, cpu, cuda or cuda:INDEX"
    gpus = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if gpus else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    kind, _, number = wanted.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"device={wanted}: {choices}")
    if gpus == 0:
        raise ValueError(f"device={wanted}: use cpu; no GPU is visible to torch")
    index = int(number) if number else local_rank % gpus
    if index >= gpus:
        raise ValueError(f"device={wanted}: use cuda:0 to cuda:{gpus - 1}, the GPUs present")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def cuda_aware_mpi() -> bool | None:
    """Whether the MPI library reports support of GPU memory, or None if it has no such query.

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
