"""Processes of torch.distributed, which torchrun starts: messages by gloo, or NCCL between GPUs.

Rules of NCCL, which has no tags and orders messages by stream. They hold for gloo, too, so that
`check_order` can test them without a GPU:

- Point-to-point operations are issued in batches (batch_isend_irecv). A batch holds all messages of
  one step of a conversation. It uses the communicator and the stream of its group.
- All processes issue their batches in one global order: that of the program, which is the same in
  all of them. A process without messages in a step issues an empty batch.
- Later steps of an all-reduce are issued together with the first one, since the stream orders them.
  (On gloo and MPI they are issued when the first one is complete, with a tag of their own.)
- Nothing else uses the group. Agreements of the processes have a group of gloo's, PyTorch's DDP has
  its own.
- The first operation of a group is a collective one, of all its processes.
- The host does not wait for messages: they are ordered with kernels by the current stream.
- Empty messages are left out, and long ones are split.
"""

import atexit
import fcntl
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from powergossip.errors import BadInput, PeerLost
from powergossip.network.processes import TOKEN, Pieces, Processes, Requests, cores

T = TypeVar("T")

# Gloo closes a connection when a wait times out, and processes may compute for hours.
_FOREVER = timedelta(days=365)
_PARTING = timedelta(seconds=2)
_DROPPING = 0.1  # seconds
_LONGEST = 2**30  # bytes of a message
_NOTICE = TOKEN + 1  # the tag of notices that a process has come to a meeting


class _Notice(NamedTuple):
    """A process that has come to a meeting."""

    process: int
    meeting: int  # number of meetings before it
    steps: int  # messages that the process has started
    patience: float  # seconds
    token: tuple[int, ...]


class GroupProcesses(Processes):
    """The processes of a group of torch.distributed. All its members construct it.

    backend: gloo, nccl, or auto: NCCL where every process has a GPU of its own. It applies to
    tensors on GPUs. Those on the CPU use gloo.

    group  # of gloo, for messages of this package only
    steps  # messages started so far by this process, with those that are empty
    """

    transport = "gloo"

    def __init__(self, group: dist.ProcessGroup, backend: str = "auto"):
        super().__init__()
        self._ranks = dist.get_process_group_ranks(group)
        self._backend = backend
        self.group = _own_group(group, self._ranks)
        self.rank, self.size = group.rank(), group.size()
        own = cores()
        everywhere = self.gather((_host(), own))
        on_this_host = [rank for rank, (host, _) in enumerate(everywhere) if host == _host()]
        self.local_rank, self.local_size = on_this_host.index(self.rank), len(on_this_host)
        all_cores = set().union(*(everywhere[rank][1] for rank in on_this_host))
        self.threads = max(1, min(len(own), len(all_cores) // self.local_size))
        self.steps = 0
        self._batches: list[Batch] | None = None
        self._waiters = _Waiters()
        self._nccl: NCCLChannel | None = None
        self._torch_groups: dict[str, dist.ProcessGroup] = {}
        self._listener: threading.Thread | None = None
        self._notices: list[_Notice] = []
        self._meetings = 0  # to which this process has come
        atexit.register(self._part)

    def _part(self) -> None:
        """Wait at the end of the program, for a while, until the others have got all messages.

        A connection that this process closes can take its last messages with it.
        """
        # Not in another thread: the interpreter must not end while one waits in a library.
        with suppress(RuntimeError):
            self.group.barrier().wait(_PARTING)
        # Gloo's threads drop the arrays of the last messages only after `wait` has returned. For
        # that they need the interpreter, whose end would abort them.
        time.sleep(_DROPPING)

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
            outputs = [_bytes_of(row) for row in gathered]
            with _connected():
                self.group.allgather([outputs], [_bytes_of(array.copy())]).wait()
        return gathered

    def broadcast_array(self, array: np.ndarray) -> None:
        if array.size:
            with _connected():
                self.group.broadcast([_bytes_of(array)], dist.BroadcastOptions()).wait()

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        maximum, options = torch.from_numpy(values.copy()), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        with _connected():
            work = self.group.allreduce([maximum], options)

        def wait() -> np.ndarray:
            _wait([work])
            return maximum.numpy()

        return wait

    def channel(
        self, device: torch.device, direct: bool | None = None
    ) -> "GlooChannel | NCCLChannel":
        if device.type != "cuda" or direct is False or not self._uses_nccl(device):
            return GlooChannel(self, self.group, device.type == "cpu")
        if self._nccl is None:
            self._nccl = NCCLChannel(self, self.torch_group("nccl"), device)
            self.transport = "nccl"
        return self._nccl

    def _uses_nccl(self, device: torch.device) -> bool:
        """Whether messages of this device use NCCL. The same in all processes.

        Raises BadInput if backend=nccl and processes have GPUs in common.
        """
        if self._backend == "gloo":
            return False
        gpu = _host(), str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
        gpus = self.gather((gpu, dist.is_nccl_available()))
        own = len({gpu for gpu, _ in gpus}) == self.size and all(there for _, there in gpus)
        if not own and self._backend == "nccl":
            raise BadInput(
                f"distributed_backend=nccl: {self.size} processes have "
                f"{len({gpu for gpu, _ in gpus})} GPUs; NCCL needs one per process, use gloo"
            )
        return own

    def watch(self, ahead: Callable[[int, np.ndarray], None]) -> None:
        """Listen for processes at meetings while this one may be in a further step.

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
                self.group.recv_anysource([content], _NOTICE).wait()
                process, meeting, steps, milliseconds, *token = content.tolist()
                ends += milliseconds > 0  # the end of the program, where patience is above 0
                notice = _Notice(process, meeting, steps, milliseconds / 1000, tuple(token))
                self._notices.append(notice)
                if len(self._notices) == 1:
                    threading.Thread(target=self._compare, args=(ahead,), daemon=True).start()

    def _compare(self, ahead: Callable[[int, np.ndarray], None]) -> None:
        """Compare notices with the steps of this process until it comes to the meeting as well."""
        start = time.monotonic()
        while self._notices:
            # Steps first: those counted before this process comes to the meeting.
            steps, meetings = self.steps, self._meetings
            for notice in [n for n in self._notices if n.meeting < meetings]:
                with suppress(ValueError):
                    self._notices.remove(notice)
            further = [n for n in self._notices if n.steps < steps]
            if not further:
                start = time.monotonic()
            for notice in further:
                if time.monotonic() - start >= notice.patience:
                    ahead(notice.process, np.array(notice.token))
            time.sleep(0.05)

    def meet(
        self,
        token: np.ndarray,
        patience: float,
        check: Callable[[int, np.ndarray], None],
        ahead: Callable[[int], None],
    ) -> None:
        others = [process for process in range(self.size) if process != self.rank]
        content = [self._meetings, self.steps, int(1000 * patience), *token.tolist()]
        notice = torch.tensor([self.rank, *content])
        theirs = {process: np.empty_like(token) for process in others}
        self._meetings += 1
        notices = []
        if self._listener is not None:
            notices = [self.group.send([notice], process, _NOTICE) for process in others]
        tokens = _GlooMessages(
            self,
            self.group,
            [(process, torch.from_numpy(array)) for process, array in theirs.items()],
            [(process, torch.from_numpy(token)) for process in others],
            TOKEN,
        )
        tokens.start()
        while not tokens.test():
            time.sleep(0.001)
        tokens.wait()
        _wait(notices)
        for process, array in theirs.items():
            check(process, array)
        if patience and self._listener is not None:  # the end of the program
            self._listener.join(_PARTING.total_seconds())

    def end(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # torchrun ends the others. Without it they lose the connection

    @property
    def batches(self) -> "list[Batch]":
        """The messages recorded by `record`."""
        return self._batches or []

    def record(self) -> None:
        """Record all messages from now on, for `check_order`."""
        self._batches = []

    def started(self, messages: "_Octets", tag: int) -> None:
        """Count and record messages that are about to start."""
        self.steps += tag == 0
        if self._batches is not None:
            self._batches.append((tag, messages.received_bytes, messages.sent_bytes))

    def submit(self, works: Sequence[dist.Work]) -> "_Outcome":
        """Wait for these in another thread."""
        return self._waiters.submit(works)


# Messages that a process starts at once: tag, and bytes from and to each other process.
Batch = tuple[int, dict[int, int], dict[int, int]]


def check_order(batches: Sequence[Sequence[Batch]]) -> None:
    """Check that all processes have issued their batches in one global order, as NCCL requires.

    batches  # [process][index], see `GroupProcesses.batches`

    The batches of an index belong together: what one process sends is what the other receives.
    Raises ValueError for the first batch that differs.
    """
    lengths = [len(of_process) for of_process in batches]
    if len(set(lengths)) > 1:
        raise ValueError(f"the processes have issued {lengths} batches; all must issue as many")
    for index, of_all in enumerate(zip(*batches, strict=True)):
        for process, (tag, _, sent) in enumerate(of_all):
            for other, size in sent.items():
                if (tag, size) != (of_all[other][0], of_all[other][1].get(process)):
                    raise ValueError(
                        f"batch {index}: process {process} sends {size} bytes to {other} with tag "
                        f"{tag}, which receives {of_all[other][1]} with tag {of_all[other][0]}"
                    )
            for other in of_all[process][1]:
                if process not in of_all[other][2]:
                    raise ValueError(f"batch {index}: process {other} sends nothing to {process}")


class _Octets:
    """The messages of a batch as bytes, without those that are empty.

    received_bytes, sent_bytes  # by process
    """

    def __init__(self, incoming: Pieces, outgoing: Pieces):
        self.incoming, self.outgoing = _split(incoming), _split(outgoing)
        self.received_bytes = _sizes(self.incoming)
        self.sent_bytes = _sizes(self.outgoing)


def _sizes(messages: Sequence[tuple[list[Tensor], int]]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for (octets,), process in messages:
        sizes[process] = sizes.get(process, 0) + octets.numel()
    return sizes


def _split(pieces: Pieces) -> list[tuple[list[Tensor], int]]:
    """([bytes], process) for each message."""
    messages: list[tuple[list[Tensor], int]] = []
    for process, rows in pieces:
        assert rows.is_contiguous(), "a message must be contiguous"
        octets = rows.detach().view(-1).view(torch.uint8)
        messages += [([part], process) for part in octets.split(_LONGEST) if part.numel()]
    return messages


class GlooChannel:
    """Messages by gloo. It transfers them in a thread of its own.

    in_order: start all steps of an all-reduce at once and wait for them, as NCCL's stream does.
    """

    name = "gloo"

    def __init__(
        self,
        processes: GroupProcesses,
        group: Any,
        direct: bool,
        in_order: bool = False,
    ):
        self._processes, self._group = processes, group
        self.direct, self.stream_ordered = direct, in_order

    def requests(
        self, incoming: Pieces, outgoing: Pieces, tag: int = 0, once: bool = False
    ) -> Requests:
        return _GlooMessages(self._processes, self._group, incoming, outgoing, tag)

    def all_reduce(self, tensor: Tensor) -> Requests:
        return _AllReduce(self._processes, lambda: self._group.allreduce([tensor]))


class NCCLChannel:
    """Messages by NCCL, between processes that have a GPU each.

    With a group of gloo's and the CPU it works too, for tests: `wait` then waits for the messages.
    """

    name = "nccl"
    direct = stream_ordered = True

    def __init__(self, processes: GroupProcesses, group: dist.ProcessGroup, device: torch.device):
        self._processes, self._group = processes, group
        # NCCL connects all processes in the first operation, in which all must take part.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def requests(
        self, incoming: Pieces, outgoing: Pieces, tag: int = 0, once: bool = False
    ) -> Requests:
        return _NCCLBatch(self._processes, self._group, incoming, outgoing)

    def all_reduce(self, tensor: Tensor) -> Requests:
        def start() -> Any:
            return dist.all_reduce(tensor, group=self._group, async_op=True)

        return _AllReduce(self._processes, start)


class _GlooMessages:
    """Messages by gloo, which reports the completion of a message only to who waits for it."""

    def __init__(
        self,
        processes: GroupProcesses,
        group: Any,
        incoming: Pieces,
        outgoing: Pieces,
        tag: int,
    ):
        self._processes, self._group, self._tag = processes, group, tag
        self._batch = _Octets(incoming, outgoing)
        self._works: list[dist.Work] = []
        self._outcome: _Outcome | None = None

    def start(self) -> None:
        self._processes.started(self._batch, self._tag)
        tag, receive, send = self._tag, self._group.recv, self._group.send
        self._outcome = None
        with _connected():
            self._works = [
                *(receive(octets, process, tag) for octets, process in self._batch.incoming),
                *(send(octets, process, tag) for octets, process in self._batch.outgoing),
            ]

    def test(self) -> bool:
        if self._outcome is None:
            self._outcome = self._processes.submit(self._works)
        return self._outcome.is_known()

    def wait(self) -> None:
        if self._outcome is None:
            _wait(self._works)
        else:
            self._outcome.wait()


class _NCCLBatch:
    """Messages by NCCL."""

    def __init__(
        self,
        processes: GroupProcesses,
        group: dist.ProcessGroup,
        incoming: Pieces,
        outgoing: Pieces,
    ):
        self._processes, self._batch = processes, _Octets(incoming, outgoing)
        self._operations = [
            dist.P2POp(operation, octets, group=group, group_peer=process)
            for operation, messages in (
                (dist.irecv, self._batch.incoming),
                (dist.isend, self._batch.outgoing),
            )
            for (octets,), process in messages
        ]
        self._works: list[dist.Work] = []

    def start(self) -> None:
        self._processes.started(self._batch, 0)
        self._works = dist.batch_isend_irecv(self._operations) if self._operations else []

    def test(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        _wait(self._works)


class _AllReduce:
    """The library's own all-reduce."""

    def __init__(self, processes: GroupProcesses, start: Callable[[], Any]):
        self._processes, self._start = processes, start
        self._batch = _Octets([], [])

    def start(self) -> None:
        self._processes.started(self._batch, 0)
        self._work = self._start()

    def test(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        _wait([self._work])


def _wait(works: Sequence[dist.Work]) -> None:
    with _connected():
        for work in works:
            work.wait()


@contextmanager
def _connected() -> Iterator[None]:
    """Errors of torch.distributed mean that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerLost(f"the connection to another process is lost ({reason})") from error


class _Outcome:
    """The end of some messages for which a thread waits."""

    def __init__(self, works: Sequence[dist.Work]):
        self._works = works
        self._end = threading.Event()
        self._error: PeerLost | None = None

    def run(self) -> None:
        try:
            _wait(self._works)
        except PeerLost as error:
            self._error = error
        self._end.set()

    def is_known(self) -> bool:
        return self._end.is_set()

    def wait(self) -> None:
        self._end.wait()
        if self._error is not None:
            raise self._error


class _Waiters:
    """Threads that wait for messages, as many as wait at the same time.

    One thread for all would not do: messages may end in another order than they were tested.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, works: Sequence[dist.Work]) -> _Outcome:
        outcome = _Outcome(works)
        self._tasks.put(outcome)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, daemon=True).start()
        return outcome

    def _serve(self) -> None:
        while True:
            self._tasks.get().run()
            self._idle.release()


# --- Groups --------------------------------------------------------------------------------------

_START = timedelta(minutes=10)  # in which all processes must have started
_own_groups: Counter[tuple[int, ...]] = Counter()  # groups of gloo's by their ranks
_made: tuple[int, int, str] | None = None  # rank, size, backend of the default group, if made here


def _own_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> Any:
    """A group of gloo's with the members of a group. They find each other in the default store.

    It is not one of torch.distributed's registered groups, whose names depend on all groups that a
    process has made, and which `destroy_process_group` destroys.
    """
    place = tuple(ranks)
    name = "-".join(map(str, ["powergossip", *place, _own_groups[place]]))
    _own_groups[place] += 1
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    with _connected():
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), _FOREVER)


def start_group(backend: str = "gloo", **options: Any) -> dist.ProcessGroup:
    """Make the default group, see torch.distributed.init_process_group, and destroy it at exit."""
    global _made
    ours = sys.excepthook
    dist.init_process_group(backend, timeout=_START, **options)
    # PyTorch's excepthook would capture the output of ours until ours returns. It never returns: it
    # ends all processes, and the reason would be lost.
    sys.excepthook = ours
    group = dist.group.WORLD
    assert group is not None
    _made = group.rank(), group.size(), backend
    return group


def group_of_launcher() -> dist.ProcessGroup:
    """The default group, which the first call makes from the variables of torchrun."""
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        return group
    use_interface_to(os.environ.get("MASTER_ADDR", ""))
    return start_group()


def torch_group(processes: Processes, device: torch.device) -> dist.ProcessGroup:
    """Return a group of these processes for PyTorch's own use; the first call makes it. Collective.

    Under MPI it is the default group. Raises ValueError if torch.distributed already has a default
    group of other processes.
    """
    alone_on_gpu = device.type == "cuda" and processes.local_size <= torch.cuda.device_count()
    backend = "nccl" if alone_on_gpu and dist.is_nccl_available() else "gloo"
    if isinstance(processes, GroupProcesses):
        return processes.torch_group(backend)
    return group_under_mpi(processes, backend)


def group_under_mpi(processes: Processes, backend: str = "gloo") -> dist.ProcessGroup:
    """The default group for processes of MPI, or for this process alone. Collective."""
    wanted = processes.rank, processes.size, backend
    if dist.is_initialized() and _made not in (None, wanted):
        _end()
    if not dist.is_initialized():
        return start_group(backend, store=_store(processes), rank=wanted[0], world_size=wanted[1])
    if _made is None:
        there = dist.get_rank(), dist.get_world_size()
        if there != wanted[:2]:
            raise ValueError(
                f"torch.distributed is in use as process {there[0]} of {there[1]}, where MPI has "
                f"{processes.rank} of {processes.size}; "
                f"call torch.distributed.destroy_process_group() first"
            )
    group = dist.group.WORLD
    assert group is not None
    return group


@atexit.register
def _end() -> None:
    """Destroy the default group if it was made here."""
    global _made
    if _made is not None and dist.is_initialized():
        dist.destroy_process_group()
    _made = None


def _store(processes: Processes) -> dist.TCPStore:
    """The store in which processes find each other's addresses; process 0 serves it."""
    store = None
    address = "", 0
    if processes.rank == 0:
        alone = processes.local_size == processes.size
        host = "127.0.0.1" if alone else address_towards("192.0.2.1")
        store = dist.TCPStore(host, 0, processes.size, is_master=True, wait_for_workers=False)
        address = host, store.port
    host, port = processes.broadcast(address)
    return store or dist.TCPStore(host, port, processes.size, is_master=False)


def address_towards(host: str) -> str:
    """This host's address as another host sees it. 192.0.2.1, an address for documentation, finds
    that of the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def use_interface_to(host: str) -> None:
    """Make gloo use the network interface that leads to a host, unless GLOO_SOCKET_IFNAME is set.

    By itself it uses the address of this host's name, which is often that of no network.
    """
    if not host or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    own = address_towards(host)
    for name, address in _interfaces():
        if address == own or (own.startswith("127.") and address == "127.0.0.1"):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _interfaces() -> Iterator[tuple[str, str]]:
    """Network interfaces with an IPv4 address (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            yield name, socket.inet_ntoa(answer[20:24])


def _host() -> tuple[str, str]:
    """A name of this machine, the same for its containers that share the host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


def _bytes_of(array: np.ndarray) -> Tensor:
    """The memory of an array."""
    assert array.flags.c_contiguous
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
