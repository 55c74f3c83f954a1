"""Connections of this machine to other machines, and messages over them.

A connection of QUIC has a stream for each tag and direction. A message is its length and its bytes.
The receiver knows the length before, or a limit. Bytes for which it does not ask stay with the
sender: QUIC's windows bound the memory.

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
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
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
QUIET = 10.0  # seconds between two lines about strangers
_SIZE = struct.Struct("<Q")
_TAG = struct.Struct("<I")
_CHOSEN = b"\1"
MEETING, ANSWER = TOKEN + 4, TOKEN + 6  # tags of machines that join or come back, and of answers
LIMIT = 2**20  # bytes of one of them
RUNNING, AWAY, READY = "running", "away", "ready"
ENDED, STRANGER, MISBEHAVED = range(3)  # codes of closed connections
_REFUSALS: dict[type[BaseException], str] = {
    handshake.WrongSecret: "another secret",
    PermissionError: "the run has all its machines",
}


class _Inbox:
    """The messages of a tag from another machine, in their order."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.stream: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.length: asyncio.Future[int] | None = None  # of the next message
        self.is_used = False  # by this machine

    def opened(self, stream: Any) -> None:
        if not self.stream.done():
            self.stream.set_result(stream)
            self.read_length()

    def read_length(self) -> None:
        """Read the length of the next message ahead: it shows that one has come."""

        async def length() -> int:
            return int(*_SIZE.unpack(await self.stream.result().read_exact(_SIZE.size)))

        self.length = asyncio.ensure_future(length())
        self.length.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def is_ahead(self) -> bool:
        """True if a message has come for which nobody waits."""
        return self.length is not None and self.length.done() and not self.turn.locked()


class Link:
    """A connection to another machine that knows the secret.

    Attributes:
        key: Public key of the machine.
        name: Its name in errors.
        connection: The connection of iroh.
        payload: Bytes of the messages that this machine has sent.
    """

    def __init__(self, key: bytes, connection: Any):
        self.key, self.name, self.connection = key, f"machine {key.hex()[:8]}", connection
        self._outgoing: dict[int, tuple[asyncio.Lock, asyncio.Future[Any]]] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._offence, self.payload = "", 0
        self._accepting = asyncio.ensure_future(self._accept())

    @property
    def is_lost(self) -> bool:
        return self.connection.close_reason() is not None

    @property
    def address(self) -> str:
        """The address of the other machine as this one sees it, or ""."""
        paths = (path for path in self.connection.paths() if path.is_ip)
        return next((path.remote_addr for path in paths), "")

    @property
    def is_silent(self) -> bool:
        """True if it is lost because nothing has arrived: the other machine may live."""
        return "timed out" in (self.connection.close_reason() or "")

    @property
    def packets(self) -> int:
        """The number of packets that have arrived."""
        return int(self.connection.stats().udp_rx_datagrams)

    def ping(self) -> None:
        """Send a packet that the other machine acknowledges."""
        self.connection.send_datagram(b"")

    @property
    def sent_bytes(self) -> int:
        """Bytes of the UDP datagrams that this machine has sent, with all headers of QUIC."""
        return int(self.connection.stats().udp_tx_bytes)

    def close(self, code: int, text: str) -> None:
        self.connection.close(code, text.encode()[:200])

    def lost(self, error: Exception | None = None) -> PeerLost:
        """The error of a lost connection."""
        text = self._offence or self.connection.close_reason() or str(error)
        if "timed out" in text:
            text = "no sign of life for 30 s"
        text = "".join(filter(str.isprintable, text.splitlines()[0]))
        return PeerLost(f"the connection to {self.name} is lost ({text})")

    async def _accept(self) -> None:
        """Assign the streams that the other machine opens to their tags."""
        with suppress(iroh().IrohError, PeerLost):
            while True:
                stream = await self.connection.accept_uni()
                (tag,) = _TAG.unpack(await stream.read_exact(_TAG.size))
                if tag >= _TAGS:
                    raise self.misbehaved(f"a message of tag {tag} has come")
                self._inboxes.setdefault(tag, _Inbox()).opened(stream)

    def _inbox(self, tag: int) -> _Inbox:
        """The messages of a tag that this machine uses. QUIC limits the other tags."""
        inbox = self._inboxes.setdefault(tag, _Inbox())
        if not inbox.is_used:
            inbox.is_used = True
            used = sum(inbox.is_used for inbox in self._inboxes.values())
            self.connection.set_max_concurrent_uni_streams(_STREAMS + 2 * used)
        return inbox

    def misbehaved(self, text: str) -> PeerLost:
        """Close the connection with a line. Returns the error."""
        self._offence = text
        self.close(MISBEHAVED, text)
        print(f"{self.name} is rejected: {text}", file=sys.stderr, flush=True)
        return self.lost()

    def is_ahead(self, tag: int) -> bool:
        """True if a message of this tag has come for which nobody waits."""
        return tag in self._inboxes and self._inboxes[tag].is_ahead

    async def send(self, tag: int, octets: bytes | memoryview) -> None:
        """Send a message. Messages of a tag arrive in the order of these calls."""
        if tag not in self._outgoing:
            self._outgoing[tag] = asyncio.Lock(), asyncio.ensure_future(self._open(tag))
        turn, opening = self._outgoing[tag]
        try:
            async with turn:
                stream = await asyncio.shield(opening)
                self.payload += len(octets)
                start = _SIZE.pack(len(octets))
                await stream.write_all(start + bytes(octets[:_PART]))
                for first in range(_PART, len(octets), _PART):
                    await stream.write_all(bytes(octets[first : first + _PART]))
        except iroh().IrohError as error:
            raise self.lost(error) from None

    async def _open(self, tag: int) -> Any:
        stream = await self.connection.open_uni()
        await stream.write_all(_TAG.pack(tag))
        return stream

    async def receive(self, tag: int, memory: memoryview) -> None:
        """Receive a message of exactly this length."""
        inbox = self._inbox(tag)
        async with inbox.turn:
            length, stream = await self._next(inbox)
            if length != len(memory):
                raise self.misbehaved(f"{length} bytes have come instead of {len(memory)}")
            try:
                for first in range(0, length, _PART):
                    part = memory[first : first + _PART]
                    part[:] = await stream.read_exact(len(part))
            except iroh().IrohError as error:
                raise self.lost(error) from None
            inbox.read_length()

    async def receive_any(self, tag: int, limit: int) -> bytes:
        """Receive a message of at most `limit` bytes."""
        inbox = self._inbox(tag)
        async with inbox.turn:
            length, stream = await self._next(inbox)
            if length > limit:
                raise self.misbehaved(f"a message of {length} bytes has come, above {limit}")
            parts, missing = [], length
            try:
                while missing:
                    parts.append(await stream.read_exact(min(missing, _PART)))
                    missing -= len(parts[-1])
            except iroh().IrohError as error:
                raise self.lost(error) from None
            inbox.read_length()
            return b"".join(parts)

    async def _next(self, inbox: _Inbox) -> tuple[int, Any]:
        """The length of the next message of a tag, and its stream."""
        closed = asyncio.ensure_future(self.connection.closed())
        try:
            if not inbox.stream.done():  # a lost connection opens none
                await asyncio.wait([inbox.stream, closed], return_when=asyncio.FIRST_COMPLETED)
            if not inbox.stream.done():
                raise self.lost()
            assert inbox.length is not None
            return await asyncio.shield(inbox.length), inbox.stream.result()
        except iroh().IrohError as error:
            raise self.lost(error) from None
        finally:
            closed.cancel()


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
        self.definition, self.is_away = "", False
        self.returned: Callable[[bytes, Link, bool], None] | None = None
        self.key = self._iroh.SecretKey.from_bytes(key).public().to_bytes()
        self._links: dict[bytes, asyncio.Future[Link]] = {}
        self._places: dict[bytes, tuple[str, ...]] = {}
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

    def _future(self, key: bytes) -> "asyncio.Future[Link]":
        found = self._links.get(key)
        if found is None or (found.done() and found.result().is_lost and self.meets):
            found = self._links[key] = asyncio.get_running_loop().create_future()
        return found

    async def _dial(self, key: bytes) -> None:
        """Call a machine until there is a connection."""
        api, place = self._iroh, self._places.get(key, ())
        relay = self._relay if self._relay not in ("", N0) else None
        address = api.EndpointAddr(api.EndpointId.from_bytes(key), relay, list(place))
        while not self._future(key).done():
            connection: Any = None
            try:
                connection = await self.endpoint.connect(address, self.protocol)
                stream = await connection.open_bi()
                await handshake.dial(stream, self._secret, self.key, key)
                await self._choose(key, connection, stream)
            except api.IrohError as error:
                reason = connection.close_reason() if connection else None
                if _other_protocol(error):
                    reason = _REFUSALS[handshake.WrongSecret]
                for text in _REFUSALS.values():
                    if reason and text in reason:
                        raise PermissionError(text) from error
                await asyncio.sleep(0.5)

    async def _choose(self, key: bytes, connection: Any, stream: Any) -> None:
        """Keep a connection if it is the first that the machine with the lower key has."""
        future = self._future(key)
        if self.key < key:
            if future.done():
                connection.close(ENDED, b"there is another connection")
                return
            await stream.send().write_all(_CHOSEN)
        elif await stream.recv().read_exact(1) != _CHOSEN:
            connection.close(MISBEHAVED, b"")
            return
        if future.done():
            connection.close(ENDED, b"there is another connection")
            return
        future.set_result(Link(key, connection))

    async def _welcome_all(self) -> None:
        """Answer the calls of other machines."""
        while (incoming := await self.endpoint.accept_next()) is not None:
            with suppress(self._iroh.IrohError):
                network = _network(await incoming.remote_addr())
                if len(self._callers) >= _AT_ONCE or self._callers.count(network) >= _OF_ONE:
                    await incoming.refuse()
                    continue
                task = asyncio.ensure_future(self._welcome(incoming, network))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _welcome(self, incoming: Any, network: str) -> None:
        """Check one caller. One without the secret, or that is no member, is sent away."""
        connection = watch = None
        self._callers.append(network)
        try:
            async with asyncio.timeout(_HANDSHAKE):
                if not await incoming.remote_addr_validated():
                    await incoming.retry()
                    return
                connection = await (await incoming.accept()).connect()
                key = connection.remote_id().to_bytes()
                watch = asyncio.ensure_future(self._limit(connection))
                if self.members is not None and key not in self.members:
                    raise PermissionError
                stream = await connection.accept_bi()
                await handshake.accept(stream, self._secret, self.key, key)
                watch.cancel()
                if self.returned is not None:
                    task = asyncio.ensure_future(self._take_back(key, connection, stream))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    return
                await self._choose(key, connection, stream)
            link = self._future(key)
            if self.meets and link.done() and not self.arrived.full():
                self.arrived.put_nowait(link.result())
        except (
            TimeoutError,
            self._iroh.IrohError,
            handshake.WrongSecret,
            PermissionError,
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
                if self.key < key:
                    await stream.send().write_all(_CHOSEN)
                elif await stream.recv().read_exact(1) != _CHOSEN:
                    raise BadMessage("another end of the handshake")
                link = Link(key, connection)
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
