"""Connections of this machine with other machines.

Of two machines, either may call the other, or both at the same time, which opens the way through
most NATs. The machine with the lower key then chooses the connection. After a silence, both call
again.

All of this runs in one thread, in coroutines. `Node.wait` runs one for another thread.
"""

import asyncio
import atexit
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from powergossip.errors import BadInput, PeerLost
from powergossip.network.internet import handshake
from powergossip.network.internet.binding import iroh
from powergossip.network.internet.codec import BadMessage, decoded, encoded
from powergossip.network.internet.link import (
    ANSWER,
    ENDED,
    LIMIT,
    MEETING,
    MISBEHAVED,
    PLACES,
    SILENCE,
    SILENT,
    SILENT_AFTER,
    SIZE,
    STRANGER,
    Link,
)
from powergossip.network.internet.tickets import MOST, N0, addresses_of

T = TypeVar("T")

PROTOCOL = b"powergossip"
PATIENCE = 30.0  # seconds, for a connection
HANDSHAKE = 10.0  # seconds
CLOSING = 2.0  # seconds, until the others have the end of a connection
_AT_ONCE, _OF_ONE = 32, 4  # handshakes, and those with callers at one address
_MOST = 2**16  # bytes of a caller before its proof
_TRY = 3.0  # seconds, for one of several attempts
_LOOK = 0.02  # seconds
QUIET = 10.0  # seconds between two lines about strangers
_CHOSEN = b"\1"
_NEW, _AGAIN, _WHERE = b"n", b"a", b"w"  # why a machine calls
RUNNING, AWAY, READY = "running", "away", "ready"
_REFUSALS: dict[type[BaseException], str] = {
    handshake.WrongSecret: "another secret",
    handshake.OtherVersion: "another version of this package; install the same on all machines",
    PermissionError: "the run has all its machines",
    LookupError: SILENCE + " for too long",
}


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
        links: Connections by public key.
        definition: Definition of a run that goes on, for machines that come back to it.
        places: Known addresses of machines, by public key.
        back: Connections of machines that have come back and ask to be admitted. None before the
            machines of the run are connected, and where nobody may come back.
        is_away: True if the run goes on without this machine, which is not ready yet.
        patience: Seconds of silence after which a machine is lost.
        endpoint: The endpoint of iroh.
    """

    def __init__(
        self, secret: bytes, key: bytes, port: int, relay: str = "", others: Iterable[str] = ()
    ):
        self._iroh, self._secret, self._relay = iroh(), secret, relay
        self.protocol = PROTOCOL + handshake.proof(secret, b"protocol", b"", b"", b"")
        self.members: set[bytes] | None = None
        self.meets = True
        self.definition, self.is_away, self.patience = "", False, PATIENCE
        self.key: bytes = self._iroh.SecretKey.from_bytes(key).public().to_bytes()
        self.links: dict[bytes, Link] = {}
        self.back: dict[bytes, Link] | None = None
        self.places: dict[bytes, tuple[str, ...]] = {}
        self._seen: dict[bytes, str] = {}  # the addresses of the last calls
        self._choosing: set[bytes] = set()
        self._callers: list[str] = []  # networks of those in a handshake
        self._strangers, self._told = 0, -QUIET
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.endpoint = self.wait(self._bind(key, port))
        for address in others:
            self.wait(self.endpoint.add_external_addr(address))
        self.start(self._welcome_all())
        atexit.register(self.close)

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
        why = failed.message().splitlines()[-1].strip()
        raise BadInput(f"UDP port {port} is not free ({why})") from failed

    # --- For other threads ---

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the background."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """The result of a coroutine."""
        return self.start(work).result(seconds)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses IP:PORT of this machine, as it knows them. Without a network, the host's."""
        found = self.endpoint.addr().direct_addresses()[:MOST]
        return addresses_of(found or [f"127.0.0.1:{self.port}"])

    @property
    def port(self) -> int:
        return int(self.endpoint.bound_sockets()[0].rpartition(":")[2])

    @property
    def is_closed(self) -> bool:
        return not self._thread.is_alive()

    def close(self, text: str = "it has ended") -> None:
        """Close all connections, and tell the others why. The thread ends."""

        async def close() -> None:
            for link in self.links.values():
                link.close(ENDED, text)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.endpoint.close(), CLOSING)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:  # the library must not call Python when that has ended
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self.is_closed:
            return
        with suppress(Exception):
            self.wait(close(), CLOSING + HANDSHAKE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING)
        self.links.clear()  # what iroh has made must go before its module, at the end of Python
        self.endpoint = None
        atexit.unregister(self.close)

    # --- Calls ---

    def knows(self, key: bytes, addresses: Iterable[str]) -> None:
        """Keep addresses at which a machine may be, before those that are known."""
        with suppress(ValueError):
            found = list(dict.fromkeys([*addresses, *self.places.get(key, ())]))
            self.places[key] = addresses_of(found[:MOST])

    def known_link(self, key: bytes) -> Link | None:
        """The connection to a machine, if there is one. Machines that meet may replace it."""
        link = self.links.get(key)
        return None if link is not None and link.is_lost and self.meets else link

    async def link(self, key: bytes, name: str = "") -> Link:
        """The connection to a machine whose addresses are known. The first call makes it.

        Raises PeerLost after 30 s without one.
        """
        dialing, since = asyncio.ensure_future(self._dial(key)), time.monotonic()
        try:
            while (link := self.known_link(key)) is None and not dialing.done():
                if time.monotonic() - since > PATIENCE:
                    break
                await asyncio.sleep(_LOOK)
            why = dialing.exception() if dialing.done() else f"no answer within {PATIENCE:.0f} s"
        finally:
            dialing.cancel()
        if link is None:
            tried = ", ".join(self.places.get(key, ())) or "none"
            name = name or f"machine {key.hex()[:8]}"
            tried += "" if self._relay else "; without a relay"
            raise PeerLost(f"no connection to {name}: {why}; addresses tried: {tried}")
        link.name = name or link.name
        return link

    def _misses(self, key: bytes) -> bool:
        link = self.known_link(key)
        return link is None or link.is_down

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, key: bytes) -> None:
        """Call a machine until there is a connection. Raises PermissionError if it refuses."""
        asks = key in self.links
        while self._misses(key):
            links = [of for of in self.links.values() if asks and not of.is_down and not of.is_lost]
            asking = (asyncio.wait_for(self._ask_for(key, of.key), _TRY) for of in links)
            await asyncio.gather(*asking, return_exceptions=True)
            why, asks = _AGAIN if self.known_link(key) else _NEW, True
            try:
                async with asyncio.timeout(_TRY), self._calling(key, why) as (connection, stream):
                    await self._choose(key, connection, stream)
            except (TimeoutError, self._iroh.IrohError):
                await asyncio.sleep(0.5)

    async def _connect(self, key: bytes) -> Any:
        """A connection with a machine, at all of its addresses that are known."""
        relay = self._relay if self._relay not in ("", N0) else None
        endpoint = self._iroh.EndpointId.from_bytes(key)
        place = self._iroh.EndpointAddr(endpoint, relay, list(self.places.get(key, ())))
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

    async def _ask_for(self, key: bytes, other: bytes) -> None:
        """Ask another machine where it sees one, and to tell that where it sees this one.

        A new connection shows the present address of this machine, after a change of its router.
        """
        async with self._calling(other, _WHERE + key) as (connection, stream):
            self.knows(key, [(await stream.recv().read_to_end(_MOST)).decode()])
            connection.close(STRANGER, b"")

    async def _answer(self, caller: bytes, connection: Any, stream: Any) -> None:
        """Tell a caller where this machine sees another one, and vice versa."""
        sought = await stream.recv().read_exact(handshake.LENGTH)
        link = self.known_link(sought)
        if link is not None and not (link.is_down or link.is_lost):
            await link.send(PLACES, caller + self._seen.get(caller, "").encode())
            await stream.send().write_all(self._seen.get(sought, link.address).encode())
        await stream.send().finish()
        await connection.closed()

    async def _meet_seekers(self, link: Link) -> None:
        """Call machines that look for this one, at once: that opens the way through a NAT."""
        with suppress(PeerLost):
            while True:
                octets = await link.receive_any(PLACES, _MOST)
                key = octets[: handshake.LENGTH]
                self.knows(key, [octets[handshake.LENGTH :].decode(errors="replace")])
                with suppress(TimeoutError, self._iroh.IrohError):
                    await asyncio.wait_for(self._connect(key), _TRY)

    async def _again(self, link: Link) -> None:
        """Look for a machine that is silent."""
        text = f"{SILENCE} for {self.patience:.0f} s"
        try:
            await asyncio.wait_for(self._dial(link.key), self.patience - SILENT_AFTER)
        except (PermissionError, ValueError) as error:
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
            former = self.known_link(key)
            link = None if returns else former
            own = encoded(link.suspend() if link else {})
            await stream.send().write_all(SIZE.pack(len(own)) + own)
            (length,) = SIZE.unpack(await stream.recv().read_exact(SIZE.size))
            read = decoded(await stream.recv().read_exact(min(length, LIMIT)))
            if link is not None:
                link.restore(connection, read)
                return link
            link = self.links[key] = Link(key, connection, self._again)
            self._keep(self._meet_seekers(link))
            if former is not None:
                former.close(ENDED, "the machine has come back")
            return link
        finally:
            self._choosing.discard(key)

    # --- Callers ---

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
            async with asyncio.timeout(HANDSHAKE):
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
                link = self.known_link(key)
                if why == _WHERE:
                    await self._answer(key, connection, stream)
                elif why == _AGAIN and (link is None or link.is_lost):
                    raise LookupError
                elif why == _NEW and self.back is not None:
                    self._keep(self._take_back(key, connection, stream))
                elif why == _NEW and link is not None:
                    connection.close(STRANGER, b"there is another connection")
                else:
                    await self._choose(key, connection, stream)
        except (OSError, ValueError, LookupError, self._iroh.IrohError, PeerLost) as error:
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
            await asyncio.sleep(_LOOK)
        connection.close(STRANGER, b"too many bytes")
        self._tell("too many bytes")

    async def _take_back(self, key: bytes, connection: Any, stream: Any) -> None:
        """Answer a member that calls after it has left, and wait until it is ready."""
        assert self.back is not None
        try:
            async with asyncio.timeout(HANDSHAKE):
                link = await self._choose(key, connection, stream, returns=True)
            if link is not None and await self.admitted(link, AWAY if self.is_away else RUNNING):
                self.back[key] = link
        except (TimeoutError, self._iroh.IrohError, PeerLost, ValueError):
            connection.close(MISBEHAVED, b"it has not come back")

    async def admitted(self, link: Link, state: str) -> bool:
        """Tell a machine the state and the definition of the run. Wait for its answer: is it ready?

        Raises PeerLost.
        """
        try:
            self.knows(link.key, addresses_of(decoded(await link.receive_any(MEETING, LIMIT))))
            await link.send(ANSWER, encoded([state, self.definition]))
            return bool(decoded(await link.receive_any(MEETING, LIMIT)) == READY)
        except (ValueError, TypeError) as error:
            raise link.misbehaved("it does not speak this protocol") from error

    def _tell(self, text: str) -> None:
        """A line about a stranger, now and then."""
        self._strangers += 1
        if time.monotonic() - self._told >= QUIET:
            self._told = time.monotonic()
            print(f"callers rejected: {self._strangers}, the last one: {text}", file=sys.stderr)


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
