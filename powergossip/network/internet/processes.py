"""The processes of a run on machines anywhere."""

import asyncio
import atexit
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from powergossip.errors import PeerLost
from powergossip.network import standstill
from powergossip.network.internet.codec import BadMessage, decoded, encoded
from powergossip.network.internet.node import MEETING, READY, Link, Node
from powergossip.network.processes import (
    TOKEN,
    Pieces,
    Processes,
    Requests,
    bytes_of,
    in_parts,
)

T = TypeVar("T")

_VALUES, _MAXIMUM, _BARRIER = TOKEN + 1, TOKEN + 2, TOKEN + 3  # tags
_LONGEST = 2**26  # bytes of a value
_PARTING = 10.0  # seconds, at the end of the program
_AHEAD = 2.0  # seconds after which a message of a further step is no overtaking


class Machines(Processes):
    """The processes of a run, one on each machine.

    This class is for a machine that comes back to a run that goes on: until the others admit it, it
    agrees with itself alone.

    Args:
        keys: Public keys by process.

    Attributes:
        node: Connections to the other machines.
        name: Name of the run.
    """

    transport = "internet"
    has_own_files = True
    is_first = True  # each reports to the owner of its machine

    def __init__(self, node: Node, keys: Sequence[bytes], name: str):
        super().__init__()
        self.node, self.name, self._keys = node, name, keys
        self.rank, self.size = keys.index(node.key), len(keys)

    def connect_all(self, come_back: Callable[[int, Link, bool], None]) -> dict[int, Link]:
        """The connections to all processes that can be reached. All processes call it.

        Args:
            come_back: Function that receives, in the node's thread, the new connection of a process
                that has left, and whether it asks to be admitted.
        """
        found = self._connected()

        def returned(key: bytes, link: Link, asks: bool) -> None:
            come_back(self._keys.index(key), link, asks)

        self.node.returned = returned
        return found

    def _connected(self) -> dict[int, Link]:
        links = {process: self.known_link(process) for process in range(self.size)}
        return {process: link for process, link in links.items() if link and not link.is_lost}

    def known_link(self, process: int) -> Link | None:
        """The connection to a process, if there is one."""
        return self.node.known_link(self._keys[process])

    @property
    def traffic(self) -> tuple[int, int]:
        links = [link for key in self._keys if (link := self.node.known_link(key)) is not None]
        return sum(link.payload for link in links), sum(link.sent_bytes for link in links)

    def ask_all(self) -> None:
        """Ask the others to admit this process."""
        self.node.is_away = False
        for link in self._connected().values():
            with suppress(PeerLost):
                self.node.wait(link.send(MEETING, encoded(READY)))

    def leave(self) -> None:
        """Close all connections."""
        self.node.close("it has ended")


class InternetProcesses(Machines):
    """Processes that have met with a ticket.

    They agree over connections to process 0. Other connections follow from the messages: a pair of
    processes that exchanges none has none.
    """

    def __init__(self, node: Node, keys: Sequence[bytes], name: str):
        super().__init__(node, keys, name)
        self._turns: dict[int, asyncio.Lock] = {}
        atexit.register(self.finalize)
        self._find_local()

    def _connected(self) -> dict[int, Link]:
        async def links() -> list[Link]:
            return await asyncio.gather(*(self.link(process) for process in others))

        others = [process for process in range(self.size) if process != self.rank]
        found = dict(zip(others, self.node.wait(links()), strict=True))
        self.gather(None)  # all have all of them
        return found

    async def link(self, process: int) -> Link:
        """The connection to a process."""
        return await self.node.link(self._keys[process], f"process {process}")

    def turn(self, process: int) -> asyncio.Lock:
        """A lock for those who start messages with a process: they keep their order."""
        return self._turns.setdefault(-process, asyncio.Lock())

    def _wait(self, work: "Future[T]", others: Iterable[int] | None = None) -> T:
        with standstill.waiting(self.rank, range(self.size) if others is None else others):
            return work.result()

    # --- Agreements, over process 0 ---

    async def _in_turn(self, tag: int, work: Coroutine[Any, Any, T]) -> T:
        async with self._turns.setdefault(tag, asyncio.Lock()):
            return await work

    def _start(self, tag: int, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a collective operation. Those of a tag follow each other."""
        return self.node.start(self._in_turn(tag, work))

    def start_gathering(self, array: np.ndarray) -> "Future[np.ndarray]":
        """Start `gather_arrays`."""
        return self._start(_VALUES, self._gather_arrays(_VALUES, array))

    async def _links(self) -> list[Link]:
        """The connections of process 0 to all others."""
        return [await self.link(process) for process in range(1, self.size)]

    async def _gather(self, tag: int, own: bytes) -> list[bytes]:
        """Values of any length of all processes."""
        if self.rank:
            first = await self.link(0)
            await first.send(tag, own)
            values = _decoded(first.name, await first.receive_any(tag, _LONGEST * self.size))
            if type(values) is not list or [*map(type, values)] != [np.ndarray] * self.size:
                raise PeerLost(f"{first.name} has sent values of another type or number")
            return [value.tobytes() for value in values]
        links = await self._links()
        received = await asyncio.gather(*(link.receive_any(tag, _LONGEST) for link in links))
        values = [own, *received]
        answer = encoded([np.frombuffer(value, np.uint8) for value in values])
        await asyncio.gather(*(link.send(tag, answer) for link in links))
        return values

    async def _gather_arrays(self, tag: int, array: np.ndarray) -> np.ndarray:
        gathered = np.empty((self.size, *array.shape), dtype=array.dtype)
        gathered[self.rank] = array
        rows = [_view(row) for row in gathered]
        whole = _view(gathered)
        if self.rank:
            first = await self.link(0)
            await first.send(tag, rows[self.rank])
            await first.receive(tag, whole)
            return gathered
        links = await self._links()
        await asyncio.gather(
            *(link.receive(tag, row) for link, row in zip(links, rows[1:], strict=True))
        )
        await asyncio.gather(*(link.send(tag, whole) for link in links))
        return gathered

    async def _broadcast(self, memory: memoryview) -> None:
        if self.rank:
            await (await self.link(0)).receive(_VALUES, memory)
        else:
            await asyncio.gather(*(link.send(_VALUES, memory) for link in await self._links()))

    def gather(self, value: T) -> list[T]:
        found = self._wait(self._start(_VALUES, self._gather(_VALUES, encoded(value))))
        return [_decoded(f"process {rank}", octets) for rank, octets in enumerate(found)]

    def broadcast(self, value: T) -> T:
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        return self._wait(self.start_gathering(array))

    def broadcast_array(self, array: np.ndarray) -> None:
        self._wait(self._start(_VALUES, self._broadcast(_view(array))))

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        work = self._start(_MAXIMUM, self._gather_arrays(_MAXIMUM, values.copy()))
        return lambda: np.asarray(self._wait(work).max(0))

    # --- Messages ---

    def channel(self, device: torch.device, direct: bool | None = None) -> "InternetChannel":
        return InternetChannel(self, device.type == "cpu")

    def checked_barrier(
        self,
        token: np.ndarray,
        patience: float,
        check: Callable[[int, np.ndarray], None],
        ahead: Callable[[int], None],
    ) -> None:
        if self.node.is_closed:
            return
        work = self._start(_BARRIER, self._gather_arrays(_BARRIER, token))
        since: dict[int, float] = {}
        with standstill.waiting(self.rank, range(self.size)):
            while not work.done():
                time.sleep(0.01)
                now = time.monotonic()
                for process in self.node.wait(self._ahead()):
                    if now - since.setdefault(process, now) >= max(patience, _AHEAD):
                        ahead(process)
        for process, theirs in enumerate(work.result()):
            check(process, theirs)

    async def _ahead(self) -> list[int]:
        """Processes with a message of a step for which this process does not wait."""
        return [
            process
            for process, key in enumerate(self._keys)
            if (link := self.node.known_link(key)) is not None and link.is_ahead(0)
        ]

    # --- The end ---

    def finalize(self) -> None:
        """Wait for the others, for a while: a connection that is closed takes its last messages
        with it."""
        if not self.node.is_closed:
            with suppress(PeerLost, TimeoutError):
                own = np.zeros(1, dtype=np.uint8)
                self._start(_BARRIER, self._gather_arrays(_BARRIER, own)).result(_PARTING)
            self.leave()

    def end(self, code: int) -> NoReturn:
        self.node.close(f"it has ended with exit code {code}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _view(array: np.ndarray) -> memoryview:
    return _memory(bytes_of(array))


def _memory(octets: Tensor) -> memoryview:
    return memoryview(octets.numpy())  # type: ignore[arg-type]  # NumPy's stubs know no Buffer


def _decoded(name: str, octets: bytes) -> Any:
    try:
        return decoded(octets)
    except BadMessage as error:
        raise PeerLost(f"{name} has sent what is no message ({error})") from None


class InternetChannel:
    """Messages over the connections of a node."""

    name = "internet"
    stream_ordered = False

    def __init__(self, processes: InternetProcesses, direct: bool):
        self._processes, self.direct = processes, direct

    def requests(
        self, incoming: Pieces, outgoing: Pieces, tag: int = 0, once: bool = False
    ) -> Requests:
        return _Messages(self._processes, incoming, outgoing, tag)

    def all_reduce(self, tensor: Tensor) -> Requests:
        return _AllReduce(self._processes, tensor)


class _Messages:
    """Messages from and to other processes."""

    def __init__(self, processes: InternetProcesses, incoming: Pieces, outgoing: Pieces, tag: int):
        self._processes, self._tag = processes, tag
        self._incoming, self._outgoing = (
            [(process, _memory(part)) for process, rows in pieces for part in in_parts(rows)]
            for pieces in (incoming, outgoing)
        )
        self._others = {process for process, _ in (*self._incoming, *self._outgoing)}

    def start(self) -> None:
        self._work = self._processes.node.start(self._exchange())

    async def _exchange(self) -> None:
        """All messages concurrently, those with a process in their order."""
        await asyncio.gather(*(self._exchange_with(process) for process in self._others))

    async def _exchange_with(self, process: int) -> None:
        async with self._processes.turn(process):  # also while the connection is made
            link = await self._processes.link(process)
            messages = [
                asyncio.ensure_future(transfer(self._tag, memory))
                for transfer, pieces in (
                    (link.receive, self._incoming),
                    (link.send, self._outgoing),
                )
                for other, memory in pieces
                if other == process
            ]
        await asyncio.gather(*messages)

    def test(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        if self._work.done():
            self._work.result()
            return
        with standstill.waiting(self._processes.rank, self._others):
            self._work.result()


class _AllReduce:
    """The sum over the processes, by process 0."""

    def __init__(self, processes: InternetProcesses, tensor: Tensor):
        self._processes, self._tensor = processes, tensor

    def start(self) -> None:
        octets = self._tensor.detach().view(-1).view(torch.uint8).numpy()
        self._work = self._processes.start_gathering(octets)

    def test(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        terms = torch.from_numpy(self._work.result()).view(self._tensor.dtype)
        torch.sum(terms.view(-1, *self._tensor.shape), 0, out=self._tensor)
