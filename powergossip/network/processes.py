"""The processes of a run, and their communication outside of conversations."""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from powergossip.errors import BadInput, reason

T = TypeVar("T")

OF_COMMAND = (
    "{key}={first} in process 0 and {key}={other} in process {process}: start all processes with "
    "the same command and version"
)
OF_FILES = (
    "{key} differ between processes: {first:.40} in process 0 and {other:.40} in process "
    "{process}; use the same files and functions in all, and sorted() where a function reads a set"
)
TOKEN = 32767  # the tag of checked barriers. MPI guarantees tags up to this one
LONGEST = 2**30  # bytes of a message. Longer ones are split: MPI counts to 2**31 − 1


class Requests(Protocol):
    """Messages from and to other processes. They are started again for each step of a program."""

    def start(self) -> None:
        """Start to send and to receive. The memory must not be used before `wait` returns."""

    def test(self) -> bool:
        """True if all messages have been sent and received. Does not block."""

    def wait(self) -> None:
        """Wait for all messages. Raises PeerLost if another process has ended."""


# Rows of tensors for, or from, other processes: (rank, tensor).
Pieces = Sequence[tuple[int, Tensor]]


def in_parts(rows: Tensor, together: int = 1) -> Sequence[Tensor]:
    """The bytes of contiguous rows in messages of at most LONGEST bytes, none for empty rows.

    Args:
        together: Number of messages of the same length in an operation.
    """
    assert rows.is_contiguous(), "a message must be contiguous"
    octets = rows.detach().view(-1).view(torch.uint8)
    return octets.split(max(1, LONGEST // together)) if octets.numel() else ()


def bytes_of(array: np.ndarray) -> Tensor:
    """The memory of an array."""
    assert array.flags.c_contiguous
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


class Channel(Protocol):
    """Messages between the processes, for tensors on one device.

    Between two processes, messages of one tag arrive in the order of their start.
    Every process starts its messages in the same order, also a process without messages.

    Attributes:
        name: mpi, gloo, nccl or internet.
        direct: True if tensors may lie on the GPU. Otherwise they are copied to the host.
        stream_ordered: True if the current stream orders messages with kernels: `start` and `wait`
            return at once, and all steps of a program are started in order.
    """

    name: str
    direct: bool
    stream_ordered: bool

    def requests(self, incoming: Pieces, outgoing: Pieces, tag: int = 0) -> Requests:
        """Requests for these tensors, which are contiguous."""


class Processes:
    """The processes of a run: here, this process alone. See `processes()` for processes of a
    launcher.

    Attributes:
        rank, size: Index of this process among all processes, and their number.
        local_rank, local_size: The same among the processes of this host.
        threads: Number of cores of the host for this process.
        transport: none, mpi, gloo, nccl or internet.
        name: Name of a run that has a ticket.
        has_own_files: True if each process has a folder of its own. They have no common one.
        can_be_lost: True if a run goes on when a process ends. `rank` and `size` then change.
    """

    transport = "none"
    can_be_lost = False
    has_own_files = False
    name = ""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        self.threads = len(cores())
        self._tags = 0

    @classmethod
    def on_machines(cls, size: int) -> "Processes":
        """The last process of a run of machines that have not met yet. It agrees with itself."""
        planned = cls()
        planned.transport, planned.has_own_files = "internet", True
        planned.rank, planned.size = size - 1, size
        return planned

    @property
    def index(self) -> int:
        """The index of this process, which stays the same."""
        return self.rank

    @property
    def is_first(self) -> bool:
        """True if this process reports for all."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """True if this process writes the files of a run."""
        return self.rank == 0 or self.has_own_files

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of all messages that this process has sent, and of the packets that carry them,
        where the transport knows them: over the present connections."""
        return 0, 0

    @property
    def is_mpi(self) -> bool:
        return self.transport == "mpi"

    @property
    def are_linked(self) -> bool:
        """True if their workers can exchange by edges."""
        return self.transport in ("mpi", "internet")

    def _find_local(self) -> None:
        """Set `local_rank`, `local_size` and `threads`. All processes call it."""
        own, here = cores(), hashlib.sha256(repr(host()).encode()).hexdigest()
        everywhere = self.gather((here, own))
        on_this_host = [rank for rank, (there, _) in enumerate(everywhere) if there == here]
        self.local_rank, self.local_size = on_this_host.index(self.rank), len(on_this_host)
        all_cores = set().union(*(everywhere[rank][1] for rank in on_this_host))
        self.threads = max(1, min(len(own), len(all_cores) // self.local_size))

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

        The block must not communicate. On process 0 alone: `if processes.rank == 0:` inside.

        Raises:
            BadInput: In all processes, if the block raises ValueError or OSError in any of them, or
                needs more memory than there is.
        """
        complaint = None
        try:
            yield
        except ValueError as error:
            complaint = str(error)
        except OSError as error:
            complaint = reason(error)
        except (MemoryError, RuntimeError) as error:  # torch's allocator for CPUs has no own type
            if "allocate" not in str(error):
                raise
            complaint = (
                f"the memory is too small for the workers of a process "
                f"({str(error).splitlines()[0]}); use fewer workers or smaller options"
            )
        for text in self.everywhere(complaint):
            if text is not None:
                raise BadInput(text) from None

    def everywhere(self, value: T) -> list[T]:
        """`gather`, with the values of the other shards, if each worker is divided over several."""
        return self.gather(value)

    def check_same(self, values: Mapping[str, Any], sentence: str = OF_COMMAND) -> None:
        """Raise BadInput, in all processes, unless those that have a key have one value of it.

        Args:
            sentence: Format of the error.
        """
        known = self.everywhere(values)
        for process, found in enumerate(known):
            for key in () if found == known[0] else known[0]:
                first, other = known[0][key], found.get(key, known[0][key])
                if first != other:
                    both = {"first": str(first), "other": str(other)}
                    raise BadInput(sentence.format(key=key, process=process, **both))

    def one_by_one(self, action: Callable[[], T]) -> T:
        """Return `action()`, run first in one process of each host, then in the others (downloads).

        Bad input is handled as in `agreed`.
        """
        first = self.local_rank == 0  # may change between the turns, if processes are lost
        for turn in (True, False):
            with self.agreed():
                if turn == first:
                    result = action()
        return result

    def check_present(self) -> None:
        """Raise Dropped if the others regard this process as lost and go on without it.

        Call this before a write that another process may make in place of this one.
        """

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in all processes. Pickled: for small and rare values."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Process 0's value, in all processes. Pickled."""
        return value

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all processes, of equal shape and dtype: [process, ...]."""
        return array[None]

    def broadcast_array(self, array: np.ndarray) -> None:
        """Overwrite a contiguous array with process 0's."""

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these tensors with process 0's, in one message. Not counted."""
        if self.size == 1:
            return
        octets = [tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in tensors]
        flat = torch.cat(octets)
        self.broadcast_array(flat.numpy())
        values = flat.split([len(o) for o in octets])
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value.clone().view(tensor.dtype).view_as(tensor))

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Start the elementwise maximum of an array over the processes. All of them call it.

        Returns:
            A function that waits for the result and returns it.
        """
        return lambda: values

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Sum of an array over the processes, by rank: the same to the bit with any transport."""
        return self.gather_arrays(np.asarray(array)).sum(0) if self.size > 1 else array

    def channel(self, device: torch.device, direct: bool | None = None) -> Channel:
        """The channel for tensors on a device. All processes call it. size > 1 only.

        Args:
            direct: True if the channel accepts GPU memory. None: if the transport does.
        """
        raise NotImplementedError

    def watch(self, ahead: Callable[[int, np.ndarray], None]) -> None:
        """Notice from now on if another process comes to a barrier while this one is in a further
        step: ahead(process, token) is then called. For transports whose `checked_barrier` cannot
        notice it."""

    def checked_barrier(
        self,
        token: np.ndarray,
        patience: float,
        check: Callable[[int, np.ndarray], None],
        ahead: Callable[[int], None],
    ) -> None:
        """Exchange tokens with all other processes, see powergossip.network.checked_barrier.

        check(process, token) is called for each token received, ahead(process) if a process has
        sent a message in place of its token and no token follows within `patience` seconds.
        """

    def finalize(self) -> None:
        """Prepare for the end of all processes, which all of them are about to reach."""

    def end(self, code: int) -> NoReturn:
        """End this process at once, and with it the others. `code` is the exit code."""
        os._exit(code)


class ChildProcess(Processes):
    """A child of one of several processes, with its rank and size, and without a connection."""

    def __init__(self, *place: int):
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size = place

    def _reject(self, *_: Any, **__: Any) -> NoReturn:
        raise BadInput(
            f"a child of process {self.rank}, such as a worker of a data loader, has communicated: "
            "use rank and size only, or start the child without the launcher's variables"
        )

    gather = broadcast = gather_arrays = broadcast_array = _reject
    start_max = channel = checked_barrier = _reject


def host() -> tuple[str, str]:
    """A name of this machine, the same for its containers that share the host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


def cores() -> set[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


@contextmanager
def torch_kept() -> Iterator[None]:
    """Restore torch's global random generators and its number of threads at the end of the block.

    The generators of GPUs are restored if they are in use at its start.
    """
    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a name. "auto" is GPU number local rank modulo the number of GPUs, or the CPU.

    Raises:
        ValueError: For a device that is unknown to torch or not present.
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
