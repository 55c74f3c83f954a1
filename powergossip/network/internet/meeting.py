"""How machines find each other and begin a run.

The first machine waits for the others. Each of them calls it, receives the definition of the run,
a text that is shown and checked before, says that it is ready, and waits. When all are ready, all
get the keys and addresses of all. Later connections follow from the messages, in any pair.

A machine that starts again calls all machines of the run. If the run goes on without it, they tell
it the definition. It then says to all of them when it is ready.
"""

import asyncio
import json
import os
import time
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
from powergossip.network.internet.node import (
    ANSWER,
    LIMIT,
    MEETING,
    PATIENCE,
    READY,
    RUNNING,
    Link,
    Node,
)
from powergossip.network.internet.tickets import Place, Record, Ticket

NEW = "new"
_LOOK = 0.2  # seconds
_FIRST = 5.0  # seconds for which the first machine looks for a run that goes on
_ALL = 10.0  # seconds from the first answer of a run that goes on to the last one
OPTIONS = "port, addresses and relay"


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
    record: Record

    @property
    def goes_on(self) -> bool:
        """True if the run goes on without this machine."""
        return self.node.is_away

    def enter(self) -> tuple[Node, list[bytes]]:
        """Wait until all machines are ready. Returns the keys of all, by process."""
        try:
            places = self.record.places if self.goes_on else self.node.wait(self._enter())
        except BaseException:
            self.node.close("it has left")
            raise
        self.record.save_places(self.ticket.name, places)
        return self.node, _begin(self.node, places)

    async def _enter(self) -> list[Place]:
        await self.link.send(MEETING, encoded(READY))
        places = decoded(await self.link.receive_any(ANSWER, LIMIT))
        return _checked(places, self.ticket)

    def leave(self, text: str) -> None:
        """Tell the first machine that this one does not take part."""
        self.node.close(text)


_asked: dict[str, Asked] = {}  # by the ticket's text
_idle: dict[str, Node] = {}  # of a first machine that has looked for its run, by its key


def ask(text: str, options: Options) -> Asked | None:
    """Call the machines of a ticket, or of the name of a run. Raises BadInput or PeerLost.

    Returns None on the first machine unless the run goes on without it.
    """
    found = None if text == NEW else call(*_known(text), options)
    if found is not None:
        _asked[text] = found
    return found


def call(ticket: Ticket, record: Record, options: Options) -> Asked | None:
    """`ask` with the record of this machine."""
    is_first = public(bytes.fromhex(record.key)) == ticket.key
    if is_first and not record.members:
        return None
    node = _node(ticket, record, options)
    try:
        for key, addresses in record.places:
            node.knows(key, addresses)
        node.knows(ticket.key, ticket.addresses)
        known = [key for key, _ in record.places if key not in (node.key, ticket.key)]
        work = _ask_all(node, [*known, ticket.key][: len(known) if is_first else None])
        work = asyncio.wait_for(work, _FIRST if is_first else None)
        link, definition = node.wait(work)
    except TimeoutError:
        node.call(node.meet_connected)
        _idle[record.key] = node
        return None
    except BadMessage as error:
        node.close("it has left")
        raise PeerLost(f"the first machine does not speak this protocol ({error})") from error
    except BaseException:
        node.close("it has left")
        raise
    return Asked(ticket, definition, node, link, record)


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
    asked = _asked.pop(text, None) or call(ticket, record, options)
    if asked is None:
        return *Host(ticket, record, options, definition).meet(), ticket
    asked.node.definition = definition
    try:
        check_same(ticket.name, *(json.loads(d or "{}") for d in (asked.definition, definition)))
    except BadInput:
        asked.leave("its settings differ")
        raise
    return *asked.enter(), ticket


def check_same(name: str, theirs: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise BadInput unless this machine's settings are those of the first machine."""
    resumes = "resume" in own  # then own ones may have resolved values of a folder, too
    for key in theirs if resumes else sorted({*theirs, *own}):
        if key != "resume" and own.get(key) != theirs.get(key):
            accepted = f"use {theirs[key]}" if key in theirs else "leave it out"
            raise BadInput(
                f"{key}={own.get(key)}: {accepted}, as the first machine of {name} does; "
                "powergossip-join without the key takes the settings of the run"
            )


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
    if record.key in _idle:
        return _idle.pop(record.key)
    tickets.hold(ticket.name)
    port = options.port or record.port
    return Node(ticket.secret, bytes.fromhex(record.key), port, ticket.relay, options.addresses)


async def _ask_all(node: Node, keys: Sequence[bytes]) -> tuple[Link, str]:
    """The first answer of one of these machines. The last one may be the first of a new run."""
    again = len(keys) > 1
    asks = [asyncio.ensure_future(_ask(node, key, again)) for key in keys]
    missing = set(asks)
    try:
        while True:
            done, missing = await asyncio.wait(missing, return_when=asyncio.FIRST_COMPLETED)
            for answered in done:
                if not answered.exception():
                    link, state, definition = answered.result()
                    node.is_away = state == RUNNING
                    if node.is_away and missing:
                        await asyncio.wait(missing, timeout=_ALL)
                    return link, definition
            if not missing:
                asks[-1].result()  # raises
    finally:
        for ask in asks:
            ask.cancel()


async def _ask(node: Node, key: bytes, again: bool) -> tuple[Link, str, str]:
    """The answer of a machine: its link, the state of the run, and the definition.

    Args:
        again: True if the machine may be about to start, too.
    """
    until = time.monotonic() + PATIENCE
    while True:
        link = await node.link(key, "the first machine")
        try:
            await link.send(MEETING, encoded(list(node.addresses)))
            state, definition = decoded(await link.receive_any(ANSWER, LIMIT))
            if not isinstance(definition, str):
                raise BadMessage("no definition")
            if state in (NEW, RUNNING):
                return link, state, definition
        except PeerLost:
            if not again or time.monotonic() > until:
                raise
        except (ValueError, TypeError) as error:
            raise BadMessage("no definition") from error
        await asyncio.sleep(_LOOK)


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

    def _save(self) -> None:
        self._record.ticket, self._record.port = str(self.ticket), self._node.port
        self._record.save(self.ticket.name)

    def meet(self) -> tuple[Node, list[bytes]]:
        """Wait for the other machines. Returns the keys of all, by process."""
        known = [bytes.fromhex(key) for key in self._record.members]
        words = str(self.ticket)
        if known:
            self._node.members = set(known)
            words = f"{self.ticket.name} --output-dir DIR resume=true"
        print(
            f"{self.ticket.name}: start this command on "
            f"{counted(self.ticket.size - 1, 'other machine')}\n\n"
            f"  powergossip-join {words}\n",
            flush=True,
        )
        try:
            places = self._node.wait(_meet(self._node, self.ticket, self._definition, known))
            self._record.save_places(self.ticket.name, places)
        except BaseException:
            self._node.close("the first machine has ended")
            raise
        self._node.definition = self._definition
        return self._node, _begin(self._node, places)


async def _meet(node: Node, ticket: Ticket, definition: str, known: Sequence[bytes]) -> list[Place]:
    """Let the others in, and send them the places of all when all are ready."""
    ready: dict[bytes, tuple[str, ...]] = {}
    links: dict[bytes, Link] = {}

    async def admit(link: Link) -> None:
        with suppress(PeerLost):
            try:
                addresses = tickets.addresses_of(decoded(await link.receive_any(MEETING, LIMIT)))
            except (ValueError, TypeError) as error:
                raise link.misbehaved("it does not speak this protocol") from error
            await link.send(ANSWER, encoded([NEW, definition]))
            await link.receive_any(MEETING, LIMIT)
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
        await links[key].send(ANSWER, encoded([[key, *where] for key, where in _text(places)]))
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
