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
from powergossip.network.internet.link import Link
from powergossip.network.internet.node import Node
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
        self.node, self.name, self.keys = node, name, keys
        self.rank, self.size = keys.index(node.key), len(keys)

    def links(self) -> dict[int, Link]:
        """The connections to all processes that can be reached. All processes call it."""
        links = {p: self.node.known_link(key) for p, key in enumerate(self.keys)}
        return {process: link for process, link in links.items() if link and not link.is_lost}

    @property
    def traffic(self) -> tuple[int, int]:
        links = [*self.node.links.values()]
        return sum(link.payload for link in links), sum(link.sent_bytes for link in links)


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

    def links(self) -> dict[int, Link]:
        async def connected() -> None:
            await asyncio.gather(*map(self.link, set(range(self.size)) - {self.rank}))

        self.node.wait(connected())
        self.gather(None)  # all have all of them
        return super().links()

    async def link(self, process: int) -> Link:
        """The connection to a process."""
        return await self.node.link(self.keys[process], f"process {process}")

    # --- Agreements, over process 0 ---

    def _start(self, tag: int, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a collective operation. Those of a tag follow each other."""

        async def in_turn() -> T:
            async with self._turns.setdefault(tag, asyncio.Lock()):
                return await work

        return self.node.start(in_turn())

    def start_gathering(self, array: np.ndarray) -> "Future[np.ndarray]":
        """Start `gather_arrays`."""
        return self._start(_VALUES, self._gather_arrays(_VALUES, array))

    def wait(self, work: "Future[T]", others: Iterable[int] | None = None) -> T:
        """The result of work with other processes, by default with all."""
        if work.done():
            return work.result()
        with standstill.waiting(self.rank, range(self.size) if others is None else others):
            return work.result()

    async def _links(self) -> list[Link]:
        """The connections of process 0 to all others."""
        return [await self.link(process) for process in range(1, self.size)]

    async def _gather(self, own: Any) -> list[Any]:
        """Values of any length."""
        if self.rank:
            first = await self.link(0)
            await first.send(_VALUES, encoded(own))
            return _values(await first.receive_any(_VALUES, _LONGEST * self.size), 0, self.size)
        links = await self._links()
        received = await asyncio.gather(*(link.receive_any(_VALUES, _LONGEST) for link in links))
        others = (_values(octets, process) for process, octets in enumerate(received, 1))
        answer = encoded([own, *others])
        await asyncio.gather(*(link.send(_VALUES, answer) for link in links))
        return decoded(answer)

    async def _gather_arrays(self, tag: int, array: np.ndarray) -> np.ndarray:
        gathered = np.empty((self.size, *array.shape), dtype=array.dtype)
        gathered[self.rank] = array
        rows = [_view(row) for row in gathered]
        if self.rank:
            await (await self.link(0)).send(tag, rows[self.rank])
        else:
            links = zip(await self._links(), rows[1:], strict=True)
            await asyncio.gather(*(link.receive(tag, row) for link, row in links))
        await self._broadcast(tag, gathered)
        return gathered

    async def _broadcast(self, tag: int, array: np.ndarray) -> None:
        memory = _view(array)
        if self.rank:
            await (await self.link(0)).receive(tag, memory)
        else:
            await asyncio.gather(*(link.send(tag, memory) for link in await self._links()))

    def gather(self, value: T) -> list[T]:
        return self.wait(self._start(_VALUES, self._gather(value)))

    def broadcast(self, value: T) -> T:
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        return self.wait(self.start_gathering(array))

    def broadcast_array(self, array: np.ndarray) -> None:
        self.wait(self._start(_VALUES, self._broadcast(_VALUES, array)))

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        work = self._start(_MAXIMUM, self._gather_arrays(_MAXIMUM, values.copy()))
        return lambda: np.asarray(self.wait(work).max(0))

    # --- Messages ---

    def channel(self, device: torch.device, direct: bool | None = None) -> "InternetChannel":
        return InternetChannel(self, device.type == "cpu")

    async def exchange(self, tag: int, incoming: "_Parts", outgoing: "_Parts") -> None:
        """All messages concurrently, those with a process in their order."""
        others = {process for process, _ in (*incoming, *outgoing)}
        await asyncio.gather(*(self._exchange(tag, incoming, outgoing, of) for of in others))

    async def _exchange(self, tag: int, incoming: "_Parts", outgoing: "_Parts", of: int) -> None:
        async with self._turns.setdefault(-of, asyncio.Lock()):  # also until there is a connection
            link = await self.link(of)
            messages = [
                asyncio.ensure_future(transfer(tag, memory))
                for transfer, parts in ((link.receive, incoming), (link.send, outgoing))
                for process, memory in parts
                if process == of
            ]
        await asyncio.gather(*messages)

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
                for process, link in Machines.links(self).items():
                    # a message of a step for which this process does not wait
                    if link.is_ahead(0) and now - since.setdefault(process, now) >= max(
                        patience, _AHEAD
                    ):
                        ahead(process)
        for process, theirs in enumerate(work.result()):
            check(process, theirs)

    # --- The end ---

    def finalize(self) -> None:
        """Wait for the others, for a while: a connection that is closed takes its last messages
        with it."""
        if not self.node.is_closed:
            with suppress(PeerLost, TimeoutError):
                own = np.zeros(1, dtype=np.uint8)
                self._start(_BARRIER, self._gather_arrays(_BARRIER, own)).result(_PARTING)
            self.node.close()

    def end(self, code: int) -> NoReturn:
        self.node.close(f"it has ended with exit code {code}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_Parts = list[tuple[int, memoryview]]  # messages, each with another process


def _view(array: np.ndarray) -> memoryview:
    return _memory(bytes_of(array))


def _memory(octets: Tensor) -> memoryview:
    return memoryview(octets.numpy())  # type: ignore[arg-type]  # NumPy's stubs know no Buffer


def _values(octets: bytes, process: int, number: int | None = None) -> Any:
    """What a process has sent: a value, or a list of as many."""
    with suppress(BadMessage):
        found = decoded(octets)
        if number is None or (type(found) is list and len(found) == number):
            return found
    raise PeerLost(f"process {process} has sent what is no message")


class InternetChannel:
    """Messages over the connections of a node."""

    name = "internet"
    stream_ordered = False

    def __init__(self, processes: InternetProcesses, direct: bool):
        self._processes, self.direct = processes, direct

    def requests(self, incoming: Pieces, outgoing: Pieces, tag: int = 0) -> Requests:
        both = [
            [(process, _memory(part)) for process, rows in pieces for part in in_parts(rows)]
            for pieces in (incoming, outgoing)
        ]
        return _Work(self._processes, tag, *both)


class _Work:
    """Messages with other processes, which are begun again for each step."""

    def __init__(self, processes: InternetProcesses, tag: int, incoming: _Parts, outgoing: _Parts):
        self._processes, self._messages = processes, (tag, incoming, outgoing)
        self._others = {process for process, _ in (*incoming, *outgoing)}

    def start(self) -> None:
        self._work = self._processes.node.start(self._processes.exchange(*self._messages))

    def test(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._processes.wait(self._work, self._others)
