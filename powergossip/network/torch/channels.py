"""Messages by torch.distributed: gloo, or NCCL between GPUs.

Rules of NCCL, which has no tags and orders messages by stream. They hold for gloo, too, so that
tests need no GPU:

- Point-to-point operations are issued in batches (batch_isend_irecv). A batch holds all messages of
  one step of a conversation. It uses the communicator and the stream of its group.
- All processes issue their batches in one global order: the order of the program, which is the same
  in all of them. A process without messages in a step issues an empty batch.
- Later steps of an all-reduce are issued together with the first one, since the stream orders them.
  (On gloo and MPI they are issued when the first one is complete, with their own tag.)
- Nothing else uses the group. Agreements of the processes have a group of gloo's, PyTorch's DDP has
  its own.
- The first operation of a group is a collective one, of all its processes.
- The host does not wait for messages: they are ordered with kernels by the current stream.
- Empty messages are skipped, and long ones are split.
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powergossip.errors import PeerLost
from powergossip.network import standstill
from powergossip.network.processes import Pieces, Requests, in_parts

Octets = list[tuple[list[Tensor], int]]  # ([bytes], process) for each message


def _octets(pieces: Pieces) -> Octets:
    """The messages as bytes, without those that are empty."""
    return [([part], process) for process, rows in pieces for part in in_parts(rows)]


class GlooChannel:
    """Messages by gloo. It transfers them in its own thread.

    Args:
        in_order: True if all steps of an all-reduce are started at once and waited for, as NCCL's
            stream does.
    """

    name = "gloo"

    def __init__(self, gloo: "GlooGroup", direct: bool, in_order: bool = False):
        self._gloo = gloo
        self.direct, self.stream_ordered = direct, in_order

    def requests(self, incoming: Pieces, outgoing: Pieces, tag: int = 0) -> Requests:
        return GlooMessages(self._gloo, incoming, outgoing, tag)


class NCCLChannel:
    """Messages by NCCL, between processes that have a GPU each.

    With a group of gloo's and the CPU it works too, for tests: `wait` then waits for the messages.
    """

    name = "nccl"
    direct = stream_ordered = True

    def __init__(self, gloo: "GlooGroup", group: dist.ProcessGroup, device: torch.device):
        self._gloo, self._group = gloo, group
        # NCCL connects all processes in the first operation, so that all must take part.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def requests(self, incoming: Pieces, outgoing: Pieces, tag: int = 0) -> Requests:
        return _NCCLBatch(self._gloo, self._group, incoming, outgoing)


class GlooMessages:
    """Messages by gloo, which reports the completion of a message only in `wait`."""

    def __init__(self, gloo: "GlooGroup", incoming: Pieces, outgoing: Pieces, tag: int):
        self._gloo, self._tag = gloo, tag
        self._incoming, self._outgoing = _octets(incoming), _octets(outgoing)
        self._works: list[dist.Work] = []
        self._outcome: Future[None] | None = None

    def start(self) -> None:
        self._gloo.started(self._incoming, self._outgoing, self._tag)
        tag, group = self._tag, self._gloo.group
        self._outcome = None
        with connected():
            self._works = [
                *(group.recv(octets, process, tag) for octets, process in self._incoming),
                *(group.send(octets, process, tag) for octets, process in self._outgoing),
            ]

    def test(self) -> bool:
        if self._outcome is None:
            self._outcome = self._gloo.waiters.submit(self._works)
        return self._outcome.done()

    def wait(self) -> None:
        with self._gloo.waiting({process for _, process in self._incoming + self._outgoing}):
            if self._outcome is None:
                wait_for(self._works)
            else:
                self._outcome.result()


class _NCCLBatch:
    """Messages by NCCL."""

    def __init__(
        self, gloo: "GlooGroup", group: dist.ProcessGroup, incoming: Pieces, outgoing: Pieces
    ):
        self._gloo = gloo
        self._incoming, self._outgoing = _octets(incoming), _octets(outgoing)
        self._operations = [
            dist.P2POp(operation, octets, group=group, group_peer=process)
            for operation, messages in (
                (dist.irecv, self._incoming),
                (dist.isend, self._outgoing),
            )
            for (octets,), process in messages
        ]
        self._works: list[dist.Work] = []

    def start(self) -> None:
        self._gloo.started(self._incoming, self._outgoing, 0)
        self._works = dist.batch_isend_irecv(self._operations) if self._operations else []

    def test(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        wait_for(self._works)


def wait_for(works: Sequence[dist.Work]) -> None:
    with connected():
        for work in works:
            work.wait()


@contextmanager
def connected() -> Iterator[None]:
    """Errors of torch.distributed mean that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerLost(f"the connection to another process is lost ({reason})") from error


class Waiters:
    """Threads that wait for messages, as many as wait at the same time.

    One thread for all would not do: messages may end in another order than they were tested. Those
    of concurrent.futures would hold up the end of Python.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[None], Sequence[dist.Work]]] = (
            queue.SimpleQueue()
        )
        self._idle = threading.Semaphore(0)

    def submit(self, works: Sequence[dist.Work]) -> "Future[None]":
        """Wait for these in another thread."""
        outcome: Future[None] = Future()
        self._tasks.put((outcome, works))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, daemon=True).start()
        return outcome

    def _serve(self) -> None:
        while True:
            _settle(*self._tasks.get())
            self._idle.release()


def _settle(outcome: "Future[None]", works: Sequence[dist.Work]) -> None:
    try:
        wait_for(works)
        outcome.set_result(None)
    except PeerLost as error:
        outcome.set_exception(error)


class GlooGroup:
    """A group of gloo's, for messages of this package only.

    Args:
        group: The group, None at the end of the program.

    Attributes:
        steps: Number of messages started so far by this process, empty ones included.
        waiters: Threads that wait for its messages.
    """

    def __init__(self, group: Any):
        self.group = group
        self.steps = 0
        self.waiters = Waiters()

    def started(self, incoming: Octets, outgoing: Octets, tag: int) -> None:
        """Count messages that are about to start."""
        self.steps += tag == 0

    def waiting(self, others: Iterable[int] | None = None) -> AbstractContextManager[None]:
        """A block that waits for messages of other processes, by default of all."""
        everybody = range(self.group.size()) if others is None else others
        return standstill.waiting(self.group.rank(), everybody)
