"""How machines find each other and begin a run.

The first machine waits for the others. Each of them calls it, receives the definition of the run,
a text that is shown and checked before, says that it is ready, and waits. When all are ready, all
get the keys and addresses of all. Later connections follow from the messages, in any pair.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from powergossip.errors import BadInput, PeerLost
from powergossip.formatting import counted
from powergossip.network.internet import tickets
from powergossip.network.internet.binding import iroh
from powergossip.network.internet.codec import BadMessage, decoded, encoded
from powergossip.network.internet.handshake import LENGTH
from powergossip.network.internet.node import Link, Node
from powergossip.network.internet.tickets import Record, Ticket
from powergossip.network.processes import TOKEN

NEW = "new"
MEETING = TOKEN + 4  # the tag of these messages
_LIMIT = 2**20  # bytes of one of them
_LOOK = 0.2  # seconds
OPTIONS = "port, addresses and relay"

Place = tuple[bytes, tuple[str, ...]]  # public key and addresses of a machine


@dataclass
class Options:
    """What the owner of a machine knows about its network.

    Attributes:
        port: UDP port, by default any free one, which stays the same in a run.
        addresses: Further addresses IP:PORT of the first machine, for its ticket.
        relay: URL of a relay of one's own, for the first machine. n0: relays and discovery of n0,
            Inc., which then see addresses and keys of all machines, and the encrypted messages of
            those that do not reach each other directly.
    """

    port: int = 0
    addresses: tuple[str, ...] = ()
    relay: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Options":
        """The options of a mapping. Raises BadInput."""
        try:
            found = cls(**values)
            if type(found.port) is not int or not 0 <= found.port < 65536:
                raise ValueError
            given = found.addresses
            found.addresses = tickets.addresses_of([given] if isinstance(given, str) else given)
            if found.relay not in ("", tickets.N0) and not found.relay.startswith("https://"):
                raise ValueError
            return found
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"ticket_options={dict(values)}: use {{port: PORT}}, {{addresses: [IP:PORT]}} and "
                "{relay: https://…} or {relay: n0}"
            ) from error


@dataclass
class Asked:
    """A run that this machine may enter.

    Attributes:
        definition: Text of the first machine, which this one has to check.
    """

    ticket: Ticket
    definition: str
    node: Node
    link: Link

    def enter(self) -> tuple[Node, list[bytes]]:
        """Wait until all machines are ready. Returns the keys of all, by process."""
        try:
            places = self.node.wait(self._enter())
        except BaseException:
            self.node.close("it has left")
            raise
        return self.node, _begin(self.node, places)

    async def _enter(self) -> list[Place]:
        await self.link.send(MEETING, encoded("ready"))
        places = decoded(await self.link.receive_any(MEETING, _LIMIT))
        return _checked(places, self.ticket)

    def leave(self, text: str) -> None:
        """Tell the first machine that this one does not take part."""
        self.node.close(text)


_asked: dict[str, Asked] = {}  # by the ticket's text


def ask(text: str, options: Options) -> Asked:
    """Call the first machine of a ticket, or of the name of a run. Raises BadInput or PeerLost."""
    _asked[text] = call(*_known(text), options)
    return _asked[text]


def call(ticket: Ticket, record: Record, options: Options) -> Asked:
    """Call the first machine with the record of this one. Raises PeerLost."""
    node = _node(ticket, record, options)
    try:
        node.knows(ticket.key, ticket.addresses)
        link, definition = node.wait(_ask(node, ticket))
    except BadMessage as error:
        node.close("it has left")
        raise PeerLost(f"the first machine does not speak this protocol ({error})") from error
    except BaseException:
        node.close("it has left")
        raise
    return Asked(ticket, definition, node, link)


def connect(
    text: str, size: int, options: Options, definition: str
) -> tuple[Node, list[bytes], Ticket]:
    """Meet the other machines of a run. Returns the keys of all, by process.

    Args:
        text: "new", a ticket, or the name of a run.
        size: Number of machines of a new run.
        definition: The first machine's text for the others.
    """
    ticket, record = _new(size, options) if text == NEW else _known(text)
    if public(bytes.fromhex(record.key)) == ticket.key:
        return *Host(ticket, record, options, definition).meet(), ticket
    asked = _asked.pop(text, None) or call(ticket, record, options)
    return *asked.enter(), ticket


def is_first(text: str) -> bool:
    """True if this machine is the first one of the run."""
    if text == NEW:
        return True
    ticket, record = _known(text)
    return public(bytes.fromhex(record.key)) == ticket.key


def _new(size: int, options: Options) -> tuple[Ticket, Record]:
    if size < 2:
        raise BadInput(f"n_workers={size}: use at least 2 with a ticket, one for each machine")
    secret, key = os.urandom(LENGTH), os.urandom(LENGTH)
    record = Record("", key.hex())
    name = f"run-{os.urandom(4).hex()}"
    return Ticket(name, public(key), secret, size, (), options.relay), record


def _known(text: str) -> tuple[Ticket, Record]:
    """The ticket of a text, and the record of this machine, which is new for a new ticket."""
    if tickets.is_ticket(text):
        ticket = tickets.read(text)
        record = tickets.saved(ticket.name)
        if record is not None and tickets.read(record.ticket).key != ticket.key:
            raise BadInput(f"this machine has another ticket of the name {ticket.name}; remove it")
        if record is None:
            record = Record(text, os.urandom(LENGTH).hex())
            record.save(ticket.name)
        return ticket, record
    record = tickets.saved(text)
    if record is None:
        raise BadInput(f"ticket={text}: use new, a ticket, or a run that this machine has joined")
    return tickets.read(record.ticket), record


def public(key: bytes) -> bytes:
    """The public key of a secret one."""
    return bytes(iroh().SecretKey.from_bytes(key).public().to_bytes())


def _node(ticket: Ticket, record: Record, options: Options) -> Node:
    port = options.port or record.port
    return Node(ticket.secret, bytes.fromhex(record.key), port, ticket.relay, options.addresses)


async def _ask(node: Node, ticket: Ticket) -> tuple[Link, str]:
    link = await node.link(ticket.key, "the first machine")
    await link.send(MEETING, encoded(list(node.addresses)))
    definition = decoded(await link.receive_any(MEETING, _LIMIT))
    if not isinstance(definition, str):
        raise BadMessage("no definition")
    return link, definition


class Host:
    """The first machine, which waits for the others.

    Attributes:
        ticket: The ticket with the addresses of this machine.
    """

    def __init__(self, ticket: Ticket, record: Record, options: Options, definition: str):
        self._record, self._definition = record, definition
        self._node = _node(ticket, record, options)
        given = *options.addresses, *self._node.addresses
        addresses = tuple(dict.fromkeys(given))[: tickets.MOST]
        self.ticket = replace(ticket, addresses=addresses)
        self._save()

    def _save(self, members: Sequence[bytes] = ()) -> None:
        self._record.ticket, self._record.port = str(self.ticket), self._node.port
        if members:
            self._record.members = [key.hex() for key in members]
        self._record.save(self.ticket.name)

    def meet(self) -> tuple[Node, list[bytes]]:
        """Wait for the other machines. Returns the keys of all, by process."""
        known = [bytes.fromhex(key) for key in self._record.members]
        if known:
            self._node.members = set(known)
        print(
            f"{self.ticket.name}: start this command on "
            f"{counted(self.ticket.size - 1, 'other machine')}\n\n"
            f"  powergossip-join {self.ticket}\n",
            flush=True,
        )
        try:
            places = self._node.wait(_meet(self._node, self.ticket, self._definition, known))
            self._save([key for key, _ in places])
        except BaseException:
            self._node.close("the first machine has ended")
            raise
        return self._node, _begin(self._node, places)


async def _meet(node: Node, ticket: Ticket, definition: str, known: Sequence[bytes]) -> list[Place]:
    """Let the others in, and send them the places of all when all are ready."""
    ready: dict[bytes, tuple[str, ...]] = {}
    links: dict[bytes, Link] = {}

    async def admit(link: Link) -> None:
        with suppress(PeerLost):
            try:
                addresses = tickets.addresses_of(decoded(await link.receive_any(MEETING, _LIMIT)))
            except (ValueError, TypeError) as error:
                raise link.misbehaved("it does not speak this protocol") from error
            await link.send(MEETING, encoded(definition))
            await link.receive_any(MEETING, _LIMIT)
            seen = [link.address] if link.address else []
            ready[link.key] = tuple(dict.fromkeys([*seen, *addresses]))[: tickets.MOST]
            links[link.key] = link

    admitted: set[asyncio.Task[None]] = set()
    told = -1
    while True:
        with suppress(TimeoutError):
            link = await asyncio.wait_for(node.arrived.get(), _LOOK)
            admitted.add(asyncio.ensure_future(admit(link)))
        for key in [key for key, link in links.items() if link.is_lost]:
            del links[key], ready[key]
        if told != len(links):
            told = len(links)
            print(f"{1 + told} of {ticket.size} machines are here", flush=True)
        if len(links) >= ticket.size - 1:
            break
    for task in admitted:
        task.cancel()
    others = [key for key in [*known, *ready] if key in links and key != node.key]
    others = list(dict.fromkeys(others))[: ticket.size - 1]
    places = [(node.key, node.addresses), *((key, ready[key]) for key in others)]
    for key in others:
        await links[key].send(MEETING, encoded([[key, *where] for key, where in _text(places)]))
    return places


def _text(places: Sequence[Place]) -> list[tuple[str, tuple[str, ...]]]:
    return [(key.hex(), where) for key, where in places]


def _checked(places: Any, ticket: Ticket) -> list[Place]:
    """The places in a message. Raises PeerLost."""
    try:
        found = [(bytes.fromhex(key), tickets.addresses_of(where)) for key, *where in places]
        keys = {key for key, _ in found}
        if len(keys) != ticket.size or found[0][0] != ticket.key or {*map(len, keys)} != {LENGTH}:
            raise ValueError
        return found
    except (TypeError, ValueError, LookupError) as error:
        raise PeerLost("the first machine has sent a list of machines that is wrong") from error


def _begin(node: Node, places: Sequence[Place]) -> list[bytes]:
    """From now on, no other machine is let in."""
    keys = [key for key, _ in places]

    def begin() -> None:
        node.members, node.meets = set(keys), False
        for key, where in places:
            node.knows(key, where)

    node.call(begin)
    return keys
