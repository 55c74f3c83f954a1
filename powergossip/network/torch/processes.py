"""Processes of torch.distributed, which torchrun or the program itself has connected."""

import atexit
import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from powergossip.errors import BadInput
from powergossip.network.processes import TOKEN, Processes, bytes_of, host
from powergossip.network.torch.channels import (
    GlooChannel,
    GlooGroup,
    GlooMessages,
    NCCLChannel,
    connected,
    wait_for,
)
from powergossip.network.torch.rendezvous import group_under_mpi

T = TypeVar("T")

# Gloo closes a connection when a wait times out, and processes may compute for hours.
_FOREVER = timedelta(days=365)
_PARTING = timedelta(seconds=2)
_NOTICE = TOKEN + 1  # the tag of notices that a process has come to a barrier
_own_groups: Counter[tuple[int, ...]] = Counter()  # groups of gloo's by their ranks


class _Notice(NamedTuple):
    """A process that has come to a barrier."""

    process: int
    barrier: int  # number of barriers before it
    steps: int  # messages that the process has started
    patience: float  # seconds
    token: tuple[int, ...]


class GroupProcesses(Processes):
    """The processes of a group of torch.distributed. All its members construct it.

    Args:
        backend: gloo, nccl, or auto: NCCL where every process has its own GPU. It applies to
            tensors on GPUs. Tensors on the CPU use gloo.

    Attributes:
        gloo: Group of the messages.
    """

    transport = "gloo"

    def __init__(self, group: dist.ProcessGroup, backend: str = "auto"):
        super().__init__()
        self._ranks = dist.get_process_group_ranks(group)
        self._backend = backend
        self.gloo = GlooGroup(_own_group(group, self._ranks))
        self.rank, self.size = group.rank(), group.size()
        self._find_local()
        self._nccl: NCCLChannel | None = None
        self._torch_groups: dict[str, dist.ProcessGroup] = {}
        self._listener: threading.Thread | None = None
        self._notices: list[_Notice] = []
        self._barriers = 0  # to which this process has come
        atexit.register(self._part)

    def _part(self) -> None:
        """Wait at the end of the program, for a while, until the others have got all messages.

        A connection that this process closes can take its last messages with it.
        """
        # Not in another thread: the interpreter must not end while one waits in a library.
        options = dist.BarrierOptions()
        options.timeout = _PARTING
        with suppress(RuntimeError):
            self.gloo.group.barrier(options).wait()
        # Ends the threads of gloo. They drop the arrays of the last messages only after `wait` has
        # returned, and need the interpreter for that, whose end would abort them.
        self.gloo.group = None

    def torch_group(self, backend: str) -> dist.ProcessGroup:
        """A group of the same processes for PyTorch's own use. All processes call it."""
        if backend not in self._torch_groups:
            group = dist.new_group(
                self._ranks, backend=backend, timeout=_FOREVER, use_local_synchronization=True
            )
            assert isinstance(group, dist.ProcessGroup)
            self._torch_groups[backend] = group
        return self._torch_groups[backend]

    def gather(self, value: T) -> list[T]:
        own = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        lengths = self.gather_arrays(np.array([len(own)]))[:, 0]
        padded = np.zeros(lengths.max(), dtype=np.uint8)
        padded[: len(own)] = own
        gathered = self.gather_arrays(padded)
        rows = zip(gathered, lengths, strict=True)
        return [pickle.loads(row[:length].tobytes()) for row, length in rows]

    def broadcast(self, value: T) -> T:
        octets = np.frombuffer(pickle.dumps(value if self.rank == 0 else None), dtype=np.uint8)
        length = np.array([len(octets)])
        self.broadcast_array(length)
        octets = octets.copy() if self.rank == 0 else np.zeros(length[0], dtype=np.uint8)
        self.broadcast_array(octets)
        received: T = pickle.loads(octets.tobytes())
        return received

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        gathered = np.empty((self.size, *array.shape), dtype=array.dtype)
        if array.size:
            outputs = [bytes_of(row) for row in gathered]
            with connected(), self.gloo.waiting():
                self.gloo.group.allgather([outputs], [bytes_of(array.copy())]).wait()
        return gathered

    def broadcast_array(self, array: np.ndarray) -> None:
        if array.size:
            with connected(), self.gloo.waiting():
                self.gloo.group.broadcast([bytes_of(array)], dist.BroadcastOptions()).wait()

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        maximum, options = torch.from_numpy(values.copy()), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        with connected():
            work = self.gloo.group.allreduce([maximum], options)

        def wait() -> np.ndarray:
            with self.gloo.waiting():
                wait_for([work])
            return maximum.numpy()

        return wait

    def channel(
        self, device: torch.device, direct: bool | None = None
    ) -> "GlooChannel | NCCLChannel":
        if device.type != "cuda" or direct is False or not self._uses_nccl(device):
            return GlooChannel(self.gloo, device.type == "cpu")
        if self._nccl is None:
            self._nccl = NCCLChannel(self.gloo, self.torch_group("nccl"), device)
            self.transport = "nccl"
        return self._nccl

    def _uses_nccl(self, device: torch.device) -> bool:
        """True if messages of this device use NCCL. The same in all processes.

        Raises BadInput if backend=nccl and processes have GPUs in common.
        """
        if self._backend == "gloo":
            return False
        gpu = host(), str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
        gpus = self.gather((gpu, dist.is_nccl_available()))
        own = len({gpu for gpu, _ in gpus}) == self.size and all(there for _, there in gpus)
        if not own and self._backend == "nccl":
            raise BadInput(
                f"distributed_backend=nccl: {self.size} processes have "
                f"{len({gpu for gpu, _ in gpus})} GPUs; NCCL needs one per process, use gloo"
            )
        return own

    def watch(self, ahead: Callable[[int, np.ndarray], None]) -> None:
        """Listen for processes at barriers while this one may be in a further step.

        ahead(process, token) is then called, in another thread.
        """
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, args=(ahead,), daemon=True)
            self._listener.start()

    def _listen(self, ahead: Callable[[int, np.ndarray], None]) -> None:
        """Receive the notices of other processes, until all have come to the end of the program."""
        ends = 0
        with suppress(RuntimeError):  # a process has ended
            while ends < self.size - 1:
                content = torch.zeros(6, dtype=torch.int64)
                self.gloo.group.recv_anysource([content], _NOTICE).wait()
                process, barrier, steps, milliseconds, *token = content.tolist()
                ends += milliseconds > 0  # the end of the program, where patience is above 0
                notice = _Notice(process, barrier, steps, milliseconds / 1000, tuple(token))
                self._notices.append(notice)
                if len(self._notices) == 1:
                    threading.Thread(target=self._compare, args=(ahead,), daemon=True).start()

    def _compare(self, ahead: Callable[[int, np.ndarray], None]) -> None:
        """Compare notices with the steps of this process until it comes to the barrier as well."""
        start = time.monotonic()
        while self._notices:
            # Steps first: those counted before this process comes to the barrier.
            steps, barriers = self.gloo.steps, self._barriers
            for notice in [n for n in self._notices if n.barrier < barriers]:
                with suppress(ValueError):
                    self._notices.remove(notice)
            further = [n for n in self._notices if n.steps < steps]
            if not further:
                start = time.monotonic()
            for notice in further:
                if time.monotonic() - start >= notice.patience:
                    ahead(notice.process, np.array(notice.token))
            time.sleep(0.05)

    def checked_barrier(
        self,
        token: np.ndarray,
        patience: float,
        check: Callable[[int, np.ndarray], None],
        ahead: Callable[[int], None],
    ) -> None:
        others = [process for process in range(self.size) if process != self.rank]
        content = [self._barriers, self.gloo.steps, int(1000 * patience), *token.tolist()]
        notice = torch.tensor([self.rank, *content])
        theirs = {process: np.empty_like(token) for process in others}
        self._barriers += 1
        notices = []
        if self._listener is not None:
            notices = [self.gloo.group.send([notice], process, _NOTICE) for process in others]
        tokens = GlooMessages(
            self.gloo,
            [(process, torch.from_numpy(array)) for process, array in theirs.items()],
            [(process, torch.from_numpy(token)) for process in others],
            TOKEN,
        )
        tokens.start()
        with self.gloo.waiting(others):
            while not tokens.test():
                time.sleep(0.001)
        tokens.wait()
        wait_for(notices)
        for process, array in theirs.items():
            check(process, array)
        if patience and self._listener is not None:  # the end of the program
            self._listener.join(_PARTING.total_seconds())

    def end(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # torchrun ends the others. Without it they lose the connection


class ReplicaProcesses(GroupProcesses):
    """The same shard of all replicas.

    Args:
        group: The processes with this shard.
        shards: The processes of this replica.
    """

    def __init__(self, group: dist.ProcessGroup, shards: Processes):
        self._shards = shards
        super().__init__(group)

    @property
    def is_first(self) -> bool:
        return self.rank == self._shards.rank == 0

    def everywhere(self, value: T) -> list[T]:
        gathered = self._shards.gather(self.gather(value))
        return [found for replica in zip(*gathered, strict=True) for found in replica]


def torch_group(processes: Processes, device: torch.device) -> dist.ProcessGroup:
    """Return a group of these processes for PyTorch's own use; the first call makes it. Collective.

    Under MPI it is the default group.

    Raises:
        ValueError: If torch.distributed already has a default group of other processes.
    """
    alone_on_gpu = device.type == "cuda" and processes.local_size <= torch.cuda.device_count()
    backend = "nccl" if alone_on_gpu and dist.is_nccl_available() else "gloo"
    if isinstance(processes, GroupProcesses):
        return processes.torch_group(backend)
    return group_under_mpi(processes, backend)


def _own_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> Any:
    """A group of gloo's with the members of a group. They find each other in the default store.

    It is not one of torch.distributed's registered groups, whose names depend on all groups that a
    process has made, and which `destroy_process_group` destroys.
    """
    place = tuple(ranks)
    name = "-".join(map(str, ["powergossip", *place, _own_groups[place]]))
    _own_groups[place] += 1
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    with connected():
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), _FOREVER)
