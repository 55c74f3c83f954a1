"""Connections of this machine to other machines, and messages over them.

A connection of QUIC has a stream for each tag and direction. A message is its length and its bytes.
The receiver knows the length before, or a limit. Bytes for which it does not ask stay with the
sender: QUIC's windows bound the memory. After a silence, both call again. They then send all bytes
again that the other one has not read.

Of two machines, either may call the other, or both at the same time, which opens the way through
most NATs. The machine with the lower key then chooses the connection.

All of this runs in one thread, in coroutines. `Node.wait` runs one for another thread.
"""

import asyncio
import atexit
import ipaddress
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from powergossip.errors import BadInput, PeerLost
from powergossip.network.internet import handshake
from powergossip.network.internet.binding import iroh
from powergossip.network.internet.codec import BadMessage, decoded, encoded
from powergossip.network.internet.tickets import MOST, N0, addresses_of
from powergossip.network.processes import TOKEN

T = TypeVar("T")

PROTOCOL = b"powergossip/1"
PATIENCE = 30.0  # seconds, for a connection
_HANDSHAKE = 10.0  # seconds
_AT_ONCE, _OF_ONE = 32, 4  # handshakes, and those with callers at one address
_MOST = 2**16  # bytes of a caller before its proof
_TAGS = 2**15 + 2**8
_STREAMS = 100  # of tags that this machine does not use yet, at most
_PART = 2**20  # bytes of a long message that are copied at once
_KEPT = 2**24  # bytes of a tag: more than QUIC and the other machine may have without a reader
_SILENT = 5.0  # seconds without an answer, after which another connection is tried
_TRY = 3.0  # seconds, for one of several attempts
QUIET = 10.0  # seconds between two lines about strangers
_SIZE = struct.Struct("<Q")
_TAG = struct.Struct("<I")
_CHOSEN = b"\1"
_NEW, _AGAIN, _WHERE = b"n", b"a", b"w"  # why a machine calls
MEETING, ANSWER = TOKEN + 4, TOKEN + 6  # tags of machines that join or come back, and of answers
_PLACES = TOKEN + 7  # tag of places of machines that look for the receiver
LIMIT = 2**20  # bytes of one of them
RUNNING, AWAY, READY = "running", "away", "ready"
ENDED, MISBEHAVED, STRANGER, SILENT = range(1, 5)  # codes of closed connections
SILENCE = "no sign of life"
_REFUSALS: dict[type[BaseException], str] = {
    handshake.WrongSecret: "another secret",
    PermissionError: "the run has all its machines",
    LookupError: SILENCE + " for too long",
}


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
        self.key, self.name, self.connection = key, f"machine {key.hex()[:8]}", connection
        self.is_down = False
        self._outgoing: dict[int, _Outgoing] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._end, self._sent_before, self.payload = "", 0, 0
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepting = asyncio.ensure_future(self._accept(connection))
        self._holding = asyncio.ensure_future(self._hold(again))

    @property
    def is_lost(self) -> bool:
        reason = self.connection.close_reason() or ""
        return self._end != "" or any(f"(code {code})" in reason for code in (ENDED, MISBEHAVED))

    @property
    def address(self) -> str:
        """The address of the other machine as this one sees it, or ""."""
        paths = (path for path in self.connection.paths() if path.is_ip)
        return next((path.remote_addr for path in paths), "")

    @property
    def is_silent(self) -> bool:
        """True if it is lost because nothing has arrived: the other machine may live."""
        return self._end.startswith(SILENCE)

    @property
    def packets(self) -> int:
        """The number of packets that have arrived."""
        return int(self.connection.stats().udp_rx_datagrams)

    def ping(self) -> None:
        """Send a packet that the other machine acknowledges."""
        with suppress(iroh().IrohError):
            self.connection.send_datagram(b"")

    @property
    def sent_bytes(self) -> int:
        """Bytes of the UDP datagrams that this machine has sent, with all headers of QUIC."""
        return self._sent_before + int(self.connection.stats().udp_tx_bytes)

    def close(self, code: int, text: str) -> None:
        self._end = self._end or text
        self.connection.close(code, text.encode()[:200])
        self._change()

    def lost(self) -> PeerLost:
        """The error of a lost connection."""
        text = self._end or self.connection.close_reason()
        text = "".join(filter(str.isprintable, text.splitlines()[0]))
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
                await asyncio.wait([closed], timeout=_SILENT)
            closed.cancel()
            if self.connection is connection and not self.is_lost:
                self.suspend()
                await again(self)
        self.close(ENDED, self.connection.close_reason() or "closed")

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
        self.connection, self.is_down = connection, False
        self._accepting = asyncio.ensure_future(self._accept(connection))
        try:
            for tag, outgoing in self._outgoing.items():
                missing = outgoing.since(read.get(tag, 0))
                outgoing.stream = self._opened(tag, missing)
        except (ValueError, AttributeError) as error:
            self.misbehaved(str(error))
        self._limit_streams()
        self._change()

    def _change(self) -> None:
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    async def _replaced(self, connection: Any) -> None:
        """Wait until there is another connection. Raises PeerLost."""
        while self.connection is connection and not self.is_lost:
            await asyncio.shield(self._changed)
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
            return int(*_SIZE.unpack(await self._read(inbox, _SIZE.size)))

        inbox.length = asyncio.ensure_future(length())
        inbox.length.add_done_callback(_observe)

    async def _read(self, inbox: _Inbox, length: int) -> bytes:
        while True:
            connection, opened = self.connection, inbox.stream
            while not opened.done():  # a lost connection opens none
                if self.is_lost:
                    raise self.lost()
                either = opened, self._changed
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            try:
                octets = bytes(await opened.result().read_exact(length))
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
            start = _SIZE.pack(len(octets))
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


class Node:
    """This machine in a run.

    Args:
        secret: The ticket's secret.
        key: Secret key of this machine.
        port: UDP port, or 0 for any.
        relay: URL of a relay, N0 for n0's relays and discovery, or "" for direct addresses alone.
        others: Further addresses IP:PORT of this machine, such as a forwarded port of a router.

    Attributes:
        key: Public key of this machine.
        protocol: The name that QUIC asks of callers. It follows from the secret.
        members: Public keys that are let in. None: every one that knows the secret.
        meets: True until the run has its machines: they may come, leave and come again.
        definition: Definition of a run that goes on, for machines that come back to it.
        returned: Function that receives their keys and links, and whether they ask to be admitted.
            None before the machines of the run are connected, and where nobody may come back.
        is_away: True if this machine has come back and is not ready yet.
        patience: Seconds of silence after which a machine is lost.
        endpoint: The endpoint of iroh.
        arrived: Links of machines that have called this one, while it meets others.
    """

    def __init__(
        self, secret: bytes, key: bytes, port: int, relay: str = "", others: Iterable[str] = ()
    ):
        self._iroh = iroh()
        self._secret = secret
        self.protocol = PROTOCOL + handshake.proof(secret, b"protocol", b"", b"", b"")
        self.members: set[bytes] | None = None
        self.meets = True
        self.definition, self.is_away, self.patience = "", False, PATIENCE
        self.returned: Callable[[bytes, Link, bool], None] | None = None
        self.key = self._iroh.SecretKey.from_bytes(key).public().to_bytes()
        self._links: dict[bytes, asyncio.Future[Link]] = {}
        self._places: dict[bytes, tuple[str, ...]] = {}
        self._seen: dict[bytes, str] = {}  # the addresses of the last calls
        self._choosing: set[bytes] = set()
        self._callers: list[str] = []  # networks of those in a handshake
        self._strangers, self._told = 0, -QUIET
        self._tasks: set[asyncio.Task[Any]] = set()
        self._relay = relay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.arrived: asyncio.Queue[Link] = self.wait(self._queue())
        self.endpoint = self.wait(self._bind(key, port))
        for address in others:
            self.wait(self.endpoint.add_external_addr(address))
        self.start(self._welcome_all())
        atexit.register(self.close, "it has ended")

    async def _queue(self) -> asyncio.Queue[Link]:
        return asyncio.Queue(_AT_ONCE)

    async def _bind(self, key: bytes, port: int) -> Any:
        port = port or _free_port()
        for sockets in ([f"0.0.0.0:{port}", f"[::]:{port}"], [f"0.0.0.0:{port}"]):
            builder, mode = self._iroh.EndpointBuilder(), self._iroh.RelayMode
            if self._relay == N0:
                builder.apply_n0()
            else:
                builder.apply_minimal()
                try:
                    own = mode.custom_from_urls([self._relay]) if self._relay else mode.disabled()
                except self._iroh.IrohError as error:
                    raise BadInput(f"relay={self._relay}: use n0, or the URL of a relay") from error
                builder.relay_mode(own)
            builder.secret_key(key)
            builder.alpns([self.protocol])
            for address in sockets:
                builder.bind_addr(address)
            try:
                return await builder.bind()
            except self._iroh.IrohError as error:  # such as no IPv6
                failed = error
        raise BadInput(f"UDP port {port} is not free ({_first_line(failed)})") from failed

    # --- For other threads ---

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the background."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """The result of a coroutine."""
        return self.start(work).result(seconds)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of this node, before what is started later."""
        self._loop.call_soon_threadsafe(function)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses IP:PORT of this machine, as it knows them. Without a network, the host's."""
        found = self.endpoint.addr().direct_addresses()[:MOST]
        return addresses_of(found or [f"127.0.0.1:{self.port}"])

    @property
    def relay(self) -> str:
        return str(self.endpoint.addr().relay_url() or "")

    @property
    def port(self) -> int:
        return int(self.endpoint.bound_sockets()[0].rpartition(":")[2])

    @property
    def is_closed(self) -> bool:
        return not self._thread.is_alive()

    def close(self, text: str, seconds: float = 2.0) -> None:
        """Close all connections, and tell the others why. The thread ends."""

        async def close() -> None:
            for link in self._links.values():
                if link.done() and not link.cancelled() and not link.exception():
                    link.result().close(ENDED, text)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.endpoint.close(), seconds)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:  # the library must not call Python when that has ended
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self.is_closed:
            return
        with suppress(Exception):
            self.wait(close(), seconds + _HANDSHAKE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        self._links.clear()  # what iroh has made must go before its module, at the end of Python
        self.endpoint = None
        atexit.unregister(self.close)

    # --- Connections ---

    def knows(self, key: bytes, addresses: Iterable[str]) -> None:
        """Keep the addresses of a machine."""
        self._places[key] = tuple(addresses)

    async def link(self, key: bytes, name: str = "") -> Link:
        """The connection to a machine whose addresses are known. The first call makes it.

        Raises PeerLost after 30 s without one.
        """
        link = self._future(key)
        if not link.done():
            dialing = asyncio.ensure_future(self._dial(key))
            either: set[asyncio.Future[Any]] = {link, dialing}
            await asyncio.wait(either, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            failed = dialing.done() and dialing.exception()
            dialing.cancel()
            if not link.done():
                tried = ", ".join(self._places.get(key, ())) or "none"
                why = failed or f"no answer within {PATIENCE:.0f} s"
                name = name or f"machine {key.hex()[:8]}"
                tried += "" if self._relay else "; without a relay"
                raise PeerLost(f"no connection to {name}: {why}; addresses tried: {tried}")
        link.result().name = name or link.result().name
        return link.result()

    def meet_connected(self) -> None:
        """Regard all machines that are connected as ones that have called this one."""
        while not self.arrived.empty():
            self.arrived.get_nowait()
        for key in self._links:
            link = self.known_link(key)
            if link is not None and not self.arrived.full():
                self.arrived.put_nowait(link)

    def known_link(self, key: bytes) -> Link | None:
        """The connection to a machine, if there is one."""
        found = self._links.get(key)
        return found.result() if found is not None and found.done() else None

    def _misses(self, key: bytes) -> bool:
        link = self.known_link(key)
        return link is None or link.is_down

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _future(self, key: bytes) -> "asyncio.Future[Link]":
        found = self._links.get(key)
        if found is None or (found.done() and found.result().is_lost and self.meets):
            found = self._links[key] = asyncio.get_running_loop().create_future()
        return found

    async def _dial(self, key: bytes) -> None:
        """Call a machine until there is a connection."""
        asks = self.known_link(key) is not None
        while self._misses(key):
            links = [link for of in self._links if (link := self.known_link(of)) is not None]
            others = [of.key for of in links if asks and not of.is_down and not of.is_lost]
            asking = (asyncio.wait_for(self._ask_for(key, other), _TRY) for other in others)
            await asyncio.gather(*asking, return_exceptions=True)
            try:
                await asyncio.wait_for(self._call(key), _TRY)
            except (TimeoutError, self._iroh.IrohError):
                await asyncio.sleep(0.5)
            asks = True

    async def _connect(self, key: bytes) -> Any:
        """A connection with a machine, at all of its addresses that are known."""
        relay = self._relay if self._relay not in ("", N0) else None
        endpoint = self._iroh.EndpointId.from_bytes(key)
        place = self._iroh.EndpointAddr(endpoint, relay, list(self._places.get(key, ())))
        return await self.endpoint.connect(place, self.protocol)

    @asynccontextmanager
    async def _calling(self, key: bytes, why: bytes) -> AsyncIterator[tuple[Any, Any]]:
        """A connection with a machine that knows the secret, and its first stream.

        Raises PermissionError if it refuses.
        """
        connection: Any = None
        try:
            connection = await self._connect(key)
            stream = await connection.open_bi()
            await handshake.dial(stream, self._secret, self.key, key)
            await stream.send().write_all(why)
            yield connection, stream
        except self._iroh.IrohError as error:
            reason = connection.close_reason() if connection else None
            if _other_protocol(error):
                reason = _REFUSALS[handshake.WrongSecret]
            for text in _REFUSALS.values():
                if reason and text in reason:
                    raise PermissionError(text) from error
            raise

    async def _call(self, key: bytes) -> None:
        why = _AGAIN if self.known_link(key) else _NEW
        async with self._calling(key, why) as (connection, stream):
            await self._choose(key, connection, stream)

    async def _ask_for(self, key: bytes, other: bytes) -> None:
        """Ask another machine where it sees one, and to tell that where it sees this one.

        A new connection shows the present address of this machine, after a change of its router.
        """
        async with self._calling(other, _WHERE + key) as (connection, stream):
            self._find(key, (await stream.recv().read_to_end(_MOST)).decode())
            connection.close(STRANGER, b"")

    def _find(self, key: bytes, address: str) -> None:
        """A machine has been seen at an address."""
        with suppress(ValueError):
            found = [address, *self._places.get(key, ())]
            self.knows(key, addresses_of(dict.fromkeys(found))[:MOST])

    async def _answer(self, caller: bytes, connection: Any, stream: Any) -> None:
        """Tell a caller where this machine sees another one, and vice versa."""
        sought = await stream.recv().read_exact(handshake.LENGTH)
        link = self.known_link(sought)
        if link is not None and not (link.is_down or link.is_lost):
            await link.send(_PLACES, caller + self._seen.get(caller, "").encode())
            await stream.send().write_all(self._seen.get(sought, link.address).encode())
        await stream.send().finish()
        await connection.closed()

    async def _meet_seekers(self, link: Link) -> None:
        """Call machines that look for this one, at once: that opens the way through a NAT."""
        with suppress(PeerLost):
            while True:
                octets = await link.receive_any(_PLACES, _MOST)
                key = octets[: handshake.LENGTH]
                self._find(key, octets[handshake.LENGTH :].decode(errors="replace"))
                with suppress(TimeoutError, self._iroh.IrohError):
                    await asyncio.wait_for(self._connect(key), _TRY)

    async def _again(self, link: Link) -> None:
        """Look for a machine that is silent."""
        text = f"{SILENCE} for {self.patience:.0f} s"
        try:
            await asyncio.wait_for(self._dial(link.key), self.patience - _SILENT)
        except PermissionError as error:
            text = str(error)
        except TimeoutError:
            pass
        if link.is_down:
            link.close(SILENT, text)

    async def _choose(
        self, key: bytes, connection: Any, stream: Any, returns: bool = False
    ) -> Link | None:
        """Keep a connection if the machine with the lower key does, which has none."""
        if self.key < key:
            if key in self._choosing or not (returns or self._misses(key)):
                connection.close(STRANGER, b"there is another connection")
                return None
            self._choosing.add(key)
        try:
            if self.key < key:
                await stream.send().write_all(_CHOSEN)
            elif await stream.recv().read_exact(1) != _CHOSEN:
                raise BadMessage("another end of the handshake")
            link = None if returns else self.known_link(key)
            own = encoded(link.suspend() if link else {})
            await stream.send().write_all(_SIZE.pack(len(own)) + own)
            (length,) = _SIZE.unpack(await stream.recv().read_exact(_SIZE.size))
            read = decoded(await stream.recv().read_exact(min(length, LIMIT)))
            if link is not None:
                link.restore(connection, read)
                return link
            link = Link(key, connection, self._again)
            self._keep(self._meet_seekers(link))
            if not returns:
                self._future(key).set_result(link)
            return link
        finally:
            self._choosing.discard(key)

    async def _welcome_all(self) -> None:
        """Answer the calls of other machines."""
        while (incoming := await self.endpoint.accept_next()) is not None:
            with suppress(self._iroh.IrohError):
                network = _network(await incoming.remote_addr())
                if len(self._callers) >= _AT_ONCE or self._callers.count(network) >= _OF_ONE:
                    await incoming.refuse()
                    continue
                self._keep(self._welcome(incoming, network))

    async def _welcome(self, incoming: Any, network: str) -> None:
        """Check one caller. One without the secret, or that is no member, is sent away."""
        connection = watch = None
        self._callers.append(network)
        try:
            async with asyncio.timeout(_HANDSHAKE):
                if not await incoming.remote_addr_validated():
                    await incoming.retry()
                    return
                caller = await incoming.remote_addr()
                connection = await (await incoming.accept()).connect()
                key = connection.remote_id().to_bytes()
                watch = asyncio.ensure_future(self._limit(connection))
                if self.members is not None and key not in self.members:
                    raise PermissionError
                stream = await connection.accept_bi()
                await handshake.accept(stream, self._secret, self.key, key)
                watch.cancel()
                if caller.is_ip():
                    self._seen[key] = caller.addr
                why = await stream.recv().read_exact(1)
                is_known = self._future(key).done()
                link = self.known_link(key)
                if why == _WHERE:
                    await self._answer(key, connection, stream)
                    return
                if why == _AGAIN and (link is None or link.is_lost):
                    raise LookupError
                if why == _NEW and self.returned is not None:
                    self._keep(self._take_back(key, connection, stream))
                    return
                if why == _NEW and is_known:
                    connection.close(STRANGER, b"there is another connection")
                    return
                link = await self._choose(key, connection, stream)
            if self.meets and link is not None and not self.arrived.full():
                self.arrived.put_nowait(link)
        except (
            TimeoutError,
            self._iroh.IrohError,
            handshake.WrongSecret,
            PermissionError,
            LookupError,
            BadMessage,
            PeerLost,
        ) as error:
            text = _REFUSALS.get(type(error), "no handshake")
            if connection is not None and connection.close_reason() is None:
                connection.close(STRANGER, text.encode())
                self._tell(text)
            elif connection is None and _other_protocol(error):
                self._tell(_REFUSALS[handshake.WrongSecret])
        finally:
            self._callers.remove(network)
            if watch is not None:
                watch.cancel()

    async def _limit(self, connection: Any) -> None:
        """Close a connection if many bytes come before a proof: QUIC would keep megabytes."""
        while connection.stats().udp_rx_bytes < _MOST:
            await asyncio.sleep(0.02)
        connection.close(STRANGER, b"too many bytes")
        self._tell("too many bytes")

    async def _take_back(self, key: bytes, connection: Any, stream: Any) -> None:
        """Answer a member that calls after it has left, and wait until it is ready."""
        assert self.returned is not None
        try:
            async with asyncio.timeout(_HANDSHAKE):
                link = await self._choose(key, connection, stream, returns=True)
                if link is None:
                    return
                places = addresses_of(decoded(await link.receive_any(MEETING, LIMIT)))
            answer = [AWAY if self.is_away else RUNNING, self.definition]
            self.knows(key, places)
            former = self.known_link(key)
            self._links[key] = asyncio.get_running_loop().create_future()
            self._links[key].set_result(link)
            if former is not None:
                former.close(ENDED, "the machine has come back")
            self.returned(key, link, False)
            await link.send(ANSWER, encoded(answer))
            if decoded(await link.receive_any(MEETING, LIMIT)) == READY:
                self.returned(key, link, True)
        except (TimeoutError, self._iroh.IrohError, PeerLost, BadMessage, ValueError, TypeError):
            connection.close(MISBEHAVED, b"it has not come back")

    def _tell(self, text: str) -> None:
        """A line about a stranger, now and then."""
        self._strangers += 1
        if time.monotonic() - self._told >= QUIET:
            self._told = time.monotonic()
            print(f"{self._strangers} callers rejected, the last one: {text}", file=sys.stderr)


def _network(caller: Any) -> str:
    """The network of a caller's address, of one machine or of those behind a router, or a relay."""
    if not caller.is_ip():
        return str(getattr(caller, "url", ""))
    address = ipaddress.ip_address(caller.addr.rpartition(":")[0].strip("[]").partition("%")[0])
    return str(ipaddress.ip_network((address, 32 if address.version == 4 else 64), strict=False))


def _other_protocol(error: Any) -> bool:
    """True if the ends of a connection have different secrets, so that QUIC has refused it."""
    return isinstance(error, iroh().IrohError) and "known protocol" in error.message()


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _first_line(error: Any) -> str:
    return str(error.message()).splitlines()[-1].strip()
