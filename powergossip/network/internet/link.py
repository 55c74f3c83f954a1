"""The messages to and from one other machine, over a connection that another one may replace.

A connection of QUIC has a stream for each tag and direction. A message is its length and its bytes.
The receiver knows the length before, or a limit. Bytes for which it does not ask stay with the
sender: QUIC's windows bound the memory. With a new connection, both ends send all bytes again that
the other one has not read.
"""

import asyncio
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from powergossip.errors import PeerLost
from powergossip.network.internet.binding import iroh
from powergossip.network.processes import TOKEN

_TAGS = 2**15 + 2**8
_STREAMS = 100  # of tags that this machine does not use yet, at most
_PART = 2**20  # bytes of a long message that are copied at once
_KEPT = 2**24  # bytes of a tag: more than QUIC and the other machine may have without a reader
SILENT_AFTER = 5.0  # seconds without an answer, after which another connection is tried
_LOOK = 0.02  # seconds
SIZE = struct.Struct("<Q")
_TAG = struct.Struct("<I")
MEETING, ANSWER = TOKEN + 4, TOKEN + 6  # tags of machines that join or come back, and of answers
PLACES = TOKEN + 7  # tag of places of machines that look for the receiver
LIMIT = 2**20  # bytes of one of them
ENDED, MISBEHAVED, STRANGER, SILENT = range(1, 5)  # codes of closed connections
SILENCE = "no sign of life"


class _Inbox:
    """The messages of a tag from another machine, in their order."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.stream: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.read = 0  # bytes
        self.length: asyncio.Future[int]  # of the next message
        self.is_used = False  # by this machine


class _Outgoing:
    """The messages of a tag to another machine.

    Attributes:
        stream: Stream of the present connection.
        sent: Number of bytes.
    """

    def __init__(self, stream: "asyncio.Future[Any]"):
        self.turn, self.stream, self.sent = asyncio.Lock(), stream, 0
        self._kept: deque[bytes] = deque()  # the last ones
        self._held = 0  # bytes

    def keep(self, octets: bytes) -> None:
        self._kept.append(octets)
        self.sent, self._held = self.sent + len(octets), self._held + len(octets)
        while self._held - len(self._kept[0]) > _KEPT:
            self._held -= len(self._kept.popleft())

    def since(self, read: Any) -> bytes:
        """The bytes that the other machine has not read. Raises ValueError."""
        if type(read) is not int or not self.sent - self._held <= read <= self.sent:
            raise ValueError("it has read a wrong number of bytes")
        return b"".join(self._kept)[self._held + read - self.sent :]


class Link:
    """Messages to and from another machine that knows the secret.

    It survives the loss of its connection: a new one goes on after the last byte that was read.

    Attributes:
        key: Public key of the machine.
        name: Its name in errors.
        connection: The connection of iroh.
        is_down: True while a new connection is looked for.
        payload: Bytes of the messages that this machine has sent.
    """

    def __init__(self, key: bytes, connection: Any, again: Callable[["Link"], Awaitable[None]]):
        self.key, self.name = key, f"machine {key.hex()[:8]}"
        self._outgoing: dict[int, _Outgoing] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._end, self._sent_before, self.payload = "", 0, 0
        self._use(connection)
        self._holding = asyncio.ensure_future(self._hold(again))

    @property
    def is_lost(self) -> bool:
        return self._end != ""

    @property
    def is_silent(self) -> bool:
        """True if it is lost because nothing has arrived: the other machine may live."""
        return self._end.startswith(SILENCE)

    @property
    def address(self) -> str:
        """The address of the other machine as this one sees it, or ""."""
        paths = (path for path in self.connection.paths() if path.is_ip)
        return next((path.remote_addr for path in paths), "")

    @property
    def packets(self) -> int:
        """The number of packets that have arrived."""
        return int(self.connection.stats().udp_rx_datagrams)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the UDP datagrams that this machine has sent, with all headers of QUIC."""
        return self._sent_before + int(self.connection.stats().udp_tx_bytes)

    def ping(self) -> None:
        """Send a packet that the other machine acknowledges."""
        with suppress(iroh().IrohError):
            self.connection.send_datagram(b"")

    def close(self, code: int, text: str) -> None:
        self._end = self._end or text or "closed"
        self.connection.close(code, text.encode()[:200])
        for inbox in self._inboxes.values():
            if not inbox.stream.done():  # nor will it be opened
                inbox.stream.set_exception(self.lost())
                inbox.stream.exception()

    def lost(self) -> PeerLost:
        """The error of a lost connection."""
        text = "".join(filter(str.isprintable, self._end.splitlines()[0]))
        return PeerLost(f"the connection to {self.name} is lost ({text})")

    def misbehaved(self, text: str) -> PeerLost:
        """Close the connection with a line. Returns the error."""
        print(f"{self.name} is rejected: {text}", file=sys.stderr, flush=True)
        self.close(MISBEHAVED, text)
        return self.lost()

    # --- Connections ---

    async def _hold(self, again: Callable[["Link"], Awaitable[None]]) -> None:
        """Look for a new connection whenever the other machine is silent, and has not ended."""
        while not self.is_lost:
            connection = self.connection
            closed = asyncio.ensure_future(connection.closed())
            heard = -1
            while not closed.done() and heard != self.packets:
                heard = self.packets
                self.ping()
                await asyncio.wait([closed], timeout=SILENT_AFTER)
            closed.cancel()
            reason = connection.close_reason() or ""
            if any(f"(code {code})" in reason for code in (ENDED, MISBEHAVED)):
                self.close(ENDED, reason)
            elif self.connection is connection and not self.is_lost:
                self.suspend()
                await again(self)

    def suspend(self) -> dict[int, int]:
        """End the connection. Returns the bytes that were read, by tag."""
        self.is_down = True
        self.connection.close(SILENT, SILENCE.encode())
        for inbox in self._inboxes.values():
            if inbox.stream.done():
                inbox.stream = asyncio.get_running_loop().create_future()
        return {tag: inbox.read for tag, inbox in self._inboxes.items()}

    def restore(self, connection: Any, read: Any) -> None:
        """Go on with another connection, behind the bytes that the other machine has read."""
        self._sent_before = self.sent_bytes
        self._use(connection)
        try:
            for tag, outgoing in self._outgoing.items():
                outgoing.stream = self._opened(tag, outgoing.since(read.get(tag, 0)))
        except (ValueError, AttributeError) as error:
            self.misbehaved(str(error))

    def _use(self, connection: Any) -> None:
        self.connection, self.is_down = connection, False
        self._accepting = asyncio.ensure_future(self._accept(connection))
        self._limit_streams()

    async def _replaced(self, connection: Any) -> None:
        """Wait until there is another connection. Raises PeerLost."""
        while self.connection is connection and not self.is_lost:
            await asyncio.sleep(_LOOK)
        if self.is_lost:
            raise self.lost()

    async def _accept(self, connection: Any) -> None:
        """Assign the streams that the other machine opens to their tags."""
        with suppress(iroh().IrohError):
            while True:
                stream = await connection.accept_uni()
                (tag,) = _TAG.unpack(await stream.read_exact(_TAG.size))
                if tag >= _TAGS:
                    self.misbehaved(f"a message of tag {tag} has come")
                elif not (inbox := self._inbox(tag)).stream.done():
                    inbox.stream.set_result(stream)

    def _limit_streams(self) -> None:
        """Let the other machine open streams for the tags in use, and some more."""
        used = sum(inbox.is_used for inbox in self._inboxes.values())
        self.connection.set_max_concurrent_uni_streams(_STREAMS + 2 * used)

    # --- Messages ---

    def _inbox(self, tag: int) -> _Inbox:
        if tag not in self._inboxes:
            inbox = self._inboxes[tag] = _Inbox()
            self._read_length(inbox)
        return self._inboxes[tag]

    def _read_length(self, inbox: _Inbox) -> None:
        """Read the length of the next message ahead: it shows that one has come."""

        async def length() -> int:
            return int(*SIZE.unpack(await self._read(inbox, SIZE.size)))

        inbox.length = asyncio.ensure_future(length())
        inbox.length.add_done_callback(_observe)

    async def _read(self, inbox: _Inbox, length: int) -> bytes:
        while True:
            if self.is_lost:
                raise self.lost()
            connection, opened = self.connection, inbox.stream
            try:
                octets = bytes(await (await asyncio.shield(opened)).read_exact(length))
                if opened is inbox.stream:  # otherwise they will come again
                    inbox.read += length
                    return octets
            except iroh().IrohError:
                if connection.close_reason() is None:
                    raise self.misbehaved("a stream has ended") from None
            await self._replaced(connection)

    def is_ahead(self, tag: int) -> bool:
        """True if a message of this tag has come for which nobody waits."""
        inbox = self._inboxes.get(tag)
        return inbox is not None and inbox.length.done() and not inbox.turn.locked()

    def _opened(self, tag: int, missing: bytes = b"") -> "asyncio.Future[Any]":
        """A new stream of a tag, behind these bytes."""

        async def opened() -> Any:
            stream = await connection.open_uni()
            await stream.write_all(_TAG.pack(tag) + missing)
            return stream

        connection = self.connection
        opening = asyncio.ensure_future(opened())
        opening.add_done_callback(_observe)
        return opening

    async def send(self, tag: int, octets: bytes | memoryview) -> None:
        """Send a message. Messages of a tag arrive in the order of these calls."""
        if tag not in self._outgoing:
            self._outgoing[tag] = _Outgoing(self._opened(tag))
        outgoing = self._outgoing[tag]
        async with outgoing.turn:
            self.payload += len(octets)
            start = SIZE.pack(len(octets))
            for first in range(0, max(len(octets), 1), _PART):
                part = start + bytes(octets[first : first + _PART])
                start = b""
                connection, opening = self.connection, outgoing.stream
                outgoing.keep(part)
                try:
                    await (await asyncio.shield(opening)).write_all(part)
                except iroh().IrohError:
                    await self._replaced(connection)  # which has sent the part again

    async def _parts(self, tag: int, limit: int, exactly: bool) -> AsyncIterator[bytes]:
        """The parts of the next message of a tag that this machine uses."""
        inbox = self._inbox(tag)
        if not inbox.is_used:
            inbox.is_used = True
            self._limit_streams()
        async with inbox.turn:
            try:
                missing = await asyncio.shield(inbox.length)
            except PeerLost:
                raise self.lost() from None
            if exactly and missing != limit:
                raise self.misbehaved(f"{missing} bytes have come instead of {limit}")
            if missing > limit:
                raise self.misbehaved(f"a message of {missing} bytes has come, above {limit}")
            while missing:
                part = await self._read(inbox, min(missing, _PART))
                missing -= len(part)
                yield part
            self._read_length(inbox)

    async def receive(self, tag: int, memory: memoryview) -> None:
        """Receive a message of exactly this length."""
        async for part in self._parts(tag, len(memory), exactly=True):
            memory[: len(part)] = part
            memory = memory[len(part) :]

    async def receive_any(self, tag: int, limit: int) -> bytes:
        """Receive a message of at most `limit` bytes."""
        return b"".join([part async for part in self._parts(tag, limit, exactly=False)])


def _observe(future: "asyncio.Future[Any]") -> None:
    """Its error, if there is one, is known."""
    if not future.cancelled():
        future.exception()
