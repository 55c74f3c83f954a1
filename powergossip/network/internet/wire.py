"""Messages between machines some of which may leave and come back, for network/resilient.

Each pair of machines has a connection, which a new one replaces until the other machine has been
silent for `worker_timeout`. One that is closed shows that the other process has ended. One that is
silent does not.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from powergossip.errors import PeerLost
from powergossip.network.internet.codec import BadMessage, decoded, encoded
from powergossip.network.internet.link import MEETING, Link
from powergossip.network.internet.node import PATIENCE, READY, Node
from powergossip.network.internet.processes import Machines
from powergossip.network.processes import TOKEN
from powergossip.network.resilient.heartbeats import Identity
from powergossip.network.resilient.messages import HEADER, Envelope, Payload, Wire, envelope, framed

_TAG = TOKEN + 5
_LONGEST = 2**32  # bytes of a message
HELD = 2**28  # bytes of messages from a process that are read ahead
_WAITING = 2**32  # bytes of messages to a process that is slow, which is then lost
_END = -1  # the kind of the last message
_PARTING = 3.0  # seconds


class _Line:
    """The messages to and from a process over one connection."""

    def __init__(self, node: Node, link: Link):
        self.link = link
        self.incoming: deque[np.ndarray] = deque()
        self.is_over = False  # nothing more arrives
        self.heard = -1  # packets
        self.queued = self.sent = self.read = self.taken = 0  # bytes, each of one thread
        self._work = node.start(self._receive())

    async def send(self, whole: np.ndarray) -> None:
        with suppress(PeerLost):
            await self.link.send(_TAG, memoryview(whole.data))
        self.sent += len(whole)

    async def _receive(self) -> None:
        with suppress(PeerLost):
            while True:
                octets = await self.link.receive_any(_TAG, _LONGEST)
                whole = np.frombuffer(bytearray(octets), np.uint8)
                if len(whole) < HEADER.size:
                    raise self.link.misbehaved("a message is too short")
                self.incoming.append(whole)
                self.read += len(whole)
                while self.read - self.taken > HELD:  # meanwhile QUIC's window stops the sender
                    await asyncio.sleep(0.01)
        self.is_over = True

    def take(self) -> np.ndarray:
        whole = self.incoming.popleft()
        self.taken += len(whole)
        return whole


class InternetWire(Wire):
    """Messages between the machines of a run. All of them construct it.

    It shows which machines live, too: QUIC of every machine answers packets, whatever Python does.
    A process that is stopped answers none.

    Args:
        worker_timeout: Seconds for which a new connection to a silent machine is looked for.

    Attributes:
        is_away: True if this machine has come back to a run that goes on.
    """

    transport = "internet"
    has_own_files = True

    def __init__(self, machines: Machines, worker_timeout: float):
        super().__init__(machines.rank)
        self._machines, self._node, self._keys = machines, machines.node, machines.keys
        self._node.patience = max(worker_timeout, PATIENCE)
        self.is_away = self._node.is_away
        self._parted: set[int] = set()
        links = machines.links().items()
        self._lines = {process: _Line(self._node, link) for process, link in links}
        self._node.back = {}
        self.lost = set(range(machines.size)) - set(self._lines) - {self.own}

    # --- Messages ---

    @property
    def pending(self) -> int:
        lines = [line for process, line in self._lines.items() if process not in self.lost]
        return sum(line.queued > line.sent for line in lines)

    def send(
        self, process: int, kind: int, i: int = 0, j: int = 0, k: int = 0, payload: Payload = b""
    ) -> None:
        if process in self.lost:
            return
        line = self._lines[process]
        if line.queued - line.sent > _WAITING:
            self.remove(process)
            return
        whole = framed(kind, i, j, k, payload)
        line.queued += len(whole)
        self._node.start(line.send(whole))

    def receive(self) -> list[Envelope]:
        arrived = []
        for process in set(self._lines) - self.lost:
            line = self._lines[process]
            if line.is_over and not line.incoming:
                if not line.link.is_silent:
                    self.ended.add(process)
                    self.remove(process)
                continue
            while line.incoming:
                message = envelope(process, line.take())
                if message.kind == _END:
                    self._parted.add(process)
                else:
                    arrived.append(message)
        return arrived

    def remove(self, process: int) -> None:
        self.lost.add(process)

    def encoded(self, value: Any) -> bytes:
        return encoded(value)

    def decoded(self, payload: Tensor) -> Any:
        try:
            return decoded(payload.numpy().tobytes())
        except BadMessage as error:
            raise PeerLost(f"a process has sent what is no message ({error})") from None

    # --- Processes that come back ---

    def returning(self) -> set[int]:
        links = list((self._node.back or {}).items())
        return {self._keys.index(key) for key, link in links if not link.is_lost}

    def admit(self, process: int) -> None:
        key = self._keys[process]
        link = (self._node.back or {}).pop(key, None) or self._node.known_link(key)
        if link is None:
            return
        self._lines[process] = _Line(self._node, link)
        for of in (self.lost, self.ended, self._parted):
            of.discard(process)

    def ask(self) -> None:
        self._node.is_away = False
        for link in self._machines.links().values():
            with suppress(PeerLost):
                self._node.wait(link.send(MEETING, encoded(READY)))

    # --- Signs of life ---

    def lives(self, process: int) -> bool:
        """True if packets have arrived since the last call. This asks for others."""
        line = self._lines[process]
        before, line.heard = line.heard, line.link.packets
        line.link.ping()
        return line.heard != before

    def sees(self, process: int) -> bool:
        """False: a process on another machine is in no /proc."""
        return False

    # --- The end ---

    def part(self) -> None:
        """A connection that is closed takes its last messages with it."""
        since = time.monotonic()
        others = set(self._lines) - self.lost
        for process in others:
            self.send(process, _END)
        while others - self._parted - self.lost and time.monotonic() - since < _PARTING:
            self.receive()
            time.sleep(0.005)
        self.close()

    def close(self) -> None:
        """End this process' part in the run."""
        self._node.close()


def identities_of(machines: Machines) -> dict[int, Identity]:
    """An identity of each process, on a host of its own."""
    return {process: Identity(f"machine {process}", 0, "") for process in range(machines.size)}
