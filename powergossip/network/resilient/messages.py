"""Messages of any length between processes that never block: by MPI, or another wire.

A message has a header, a kind, three counters and a payload. With ULFM (mpirun --with-ft ulfm), a
process that has ended is noticed; without it, MPI ends the job. The wire of machines that meet with
a ticket is in network/internet/wire.py.
"""

import pickle
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import ulfm
from powergossip.network.processes import LONGEST

_TAG = 1
HEADER = struct.Struct("<iii4xqq")  # kind, i, j, k, bytes of the payload
WRONG = -2  # the kind of a message with another number of bytes

Payload = bytes | bytearray | memoryview | np.ndarray | Tensor


@dataclass(frozen=True)
class Envelope:
    """A message as it has arrived. `payload` is uint8 and belongs to the receiver."""

    source: int  # index of the process
    kind: int
    i: int
    j: int
    k: int
    payload: Tensor


def octets(payload: Payload) -> Tensor:
    """The bytes of a payload, as a tensor without a copy where possible."""
    if isinstance(payload, np.ndarray):
        payload = torch.from_numpy(np.ascontiguousarray(payload).reshape(-1).view(np.uint8))
    if isinstance(payload, Tensor):
        return payload.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if len(payload) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def framed(kind: int, i: int, j: int, k: int, payload: Payload) -> np.ndarray:
    """A message with its header, a copy."""
    body = octets(payload)
    memory = np.empty(HEADER.size + body.numel(), dtype=np.uint8)
    HEADER.pack_into(memory.data, 0, kind, i, j, k, body.numel())
    memory[HEADER.size :] = body.numpy()
    return memory


def envelope(source: int, whole: np.ndarray) -> Envelope:
    """The message of `framed`, in the same memory."""
    kind, i, j, k, length = HEADER.unpack_from(whole.data)
    payload = torch.from_numpy(whole[HEADER.size :])
    return Envelope(source, kind if length == len(payload) else WRONG, i, j, k, payload)


def encoded(processes: set[int]) -> np.ndarray:
    """A set of processes as a payload."""
    return np.array(sorted(processes), dtype=np.int32)


def decoded(payload: Any) -> set[int]:
    """The set of processes of a payload."""
    return {int(process) for process in payload.numpy().view(np.int32)}


class Wire:
    """Messages to and from other processes.

    Attributes:
        transport, has_own_files: See Processes.
        own: Index of this process.
        ended: Processes that have ended for certain.
        lost: The ended processes, and those that were given to `remove`.
    """

    transport: str
    has_own_files = False

    def __init__(self, own: int):
        self.own = own
        self.lost: set[int] = set()
        self.ended: set[int] = set()

    @property
    def pending(self) -> int:
        """The number of messages that are not sent yet."""
        raise NotImplementedError

    def send(
        self, process: int, kind: int, i: int = 0, j: int = 0, k: int = 0, payload: Payload = b""
    ) -> None:
        """Start to send. The payload is copied. Messages to a lost process are discarded."""
        raise NotImplementedError

    def receive(self) -> list[Envelope]:
        """Advance all messages. Returns those that have arrived, by process in order of sending."""
        raise NotImplementedError

    def remove(self, process: int) -> None:
        """Discard the messages from and to a process, now and later."""
        raise NotImplementedError

    def returning(self) -> set[int]:
        """Lost processes that have come back and wait for `admit`."""
        return set()

    def admit(self, process: int) -> None:
        """Exchange messages with a process that has come back."""
        raise NotImplementedError

    def ask(self) -> None:
        """Ask the others to admit this process."""
        raise NotImplementedError

    def part(self) -> None:
        """After the last message: wait a while until the others have it."""

    def encoded(self, value: Any) -> bytes:
        """A value as a payload."""
        return pickle.dumps(value)

    def decoded(self, payload: Tensor) -> Any:
        """The value of a payload."""
        return pickle.loads(payload.numpy().tobytes())


class _Incoming:
    """The messages from one process, in the order of sending."""

    def __init__(self) -> None:
        self.parts: deque[tuple[Any, np.ndarray]] = deque()  # request, memory
        self.received: list[np.ndarray] = []  # of the present message
        self.missing = 0  # bytes of it

    def add(self, part: np.ndarray) -> np.ndarray | None:
        """The present message with its header, if this is its last part."""
        if not self.received:
            self.missing = HEADER.size + HEADER.unpack_from(part.data)[-1]
        self.received.append(part)
        self.missing -= part.nbytes
        assert self.missing >= 0
        if self.missing:
            return None
        whole = part if len(self.received) == 1 else np.concatenate(self.received)
        self.received = []
        return whole


class MPIWire(Wire):
    """Messages by MPI, between the processes of a communicator. All of them construct it.

    A long message is sent in parts.
    """

    transport = "mpi"

    def __init__(self, communicator: Any):
        from mpi4py import MPI

        self._mpi = MPI
        super().__init__(communicator.rank)
        self._communicator = communicator.Dup()
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        others = [process for process in range(communicator.size) if process != self.own]
        self._sends: dict[int, deque[tuple[Any, np.ndarray]]] = {p: deque() for p in others}
        self._incoming = {process: _Incoming() for process in others}

    @property
    def pending(self) -> int:
        return sum(map(len, self._sends.values()))

    def send(
        self, process: int, kind: int, i: int = 0, j: int = 0, k: int = 0, payload: Payload = b""
    ) -> None:
        if process in self.lost:
            return
        memory = framed(kind, i, j, k, payload)
        with self._ending(process):
            for start in range(0, memory.nbytes, LONGEST):
                part = memory[start : start + LONGEST]
                request = self._communicator.Isend([part, self._mpi.BYTE], process, _TAG)
                self._sends[process].append((request, part))

    def receive(self) -> list[Envelope]:
        self._probe()
        self._finish_sends()
        arrived: list[Envelope] = []
        for process, incoming in self._incoming.items():
            with self._ending(process):
                while incoming.parts and incoming.parts[0][0].Test():
                    whole = incoming.add(incoming.parts.popleft()[1])
                    if whole is not None:
                        arrived.append(envelope(process, whole))
        return [message for message in arrived if message.source not in self.lost]

    def _probe(self) -> None:
        """Start to receive all messages that wait."""
        status = self._mpi.Status()
        while True:
            try:
                message = self._communicator.Improbe(self._mpi.ANY_SOURCE, _TAG, status)
            except self._mpi.Exception as error:
                check_loss(error)
                self._find_lost()
                continue
            if message is None:
                return
            memory = np.empty(status.Get_count(self._mpi.BYTE), dtype=np.uint8)
            process = status.Get_source()
            with self._ending(process):
                request = message.Irecv([memory, self._mpi.BYTE])
                self._incoming[process].parts.append((request, memory))

    def _find_lost(self) -> None:
        """Ask MPI for the ended processes. Operations for any source then succeed again."""
        self._communicator.Ack_failed()
        failed, everyone = self._communicator.Get_failed(), self._communicator.Get_group()
        for process in self._mpi.Group.Translate_ranks(failed, None, everyone):
            self._end(process)
        failed.Free()
        everyone.Free()

    def _finish_sends(self) -> None:
        for process, sends in self._sends.items():
            with self._ending(process):
                while sends and sends[0][0].Test():
                    sends.popleft()

    @contextmanager
    def _ending(self, process: int) -> Iterator[None]:
        """A block of messages with a process, which may have ended."""
        try:
            yield
        except self._mpi.Exception as error:
            check_loss(error)
            self._end(process)

    def _end(self, process: int) -> None:
        self.ended.add(process)
        self.remove(process)

    def remove(self, process: int) -> None:
        """Discard the messages from and to a process, now and later.

        MPI may still use the memory of messages that were started: it is kept.
        """
        if process not in self.lost and process != self.own:
            self.lost.add(process)
            _kept.append(self._sends[process])
            self._sends[process] = deque()
        if process in self.ended:
            _kept.append(self._incoming[process])
            self._incoming[process] = _Incoming()


_kept: list[Any] = []


def check_loss(error: Any) -> None:
    """Raise an error of MPI again unless it is the end of a process."""
    if not ulfm.is_loss(error):
        raise error
