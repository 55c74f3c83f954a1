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

from powergossip.errors import BadInput, PeerLost, Unconnected
from powergossip.formatting import counted
from powergossip.network.internet import tickets
from powergossip.network.internet.binding import iroh
from powergossip.network.internet.codec import decoded, encoded
from powergossip.network.internet.handshake import LENGTH
from powergossip.network.internet.link import ANSWER, LIMIT, MEETING, Link
from powergossip.network.internet.node import PATIENCE, READY, RUNNING, Node
from powergossip.network.internet.tickets import Place, Record, Ticket

NEW = "new"
_LOOK = 0.05  # seconds
_FIRST = 5.0  # seconds for which the first machine looks for a run that goes on
_ALL = 10.0  # seconds from the first answer of a run that goes on to the last one


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


class Meeting:
    """This machine, on its way into a run.

    Attributes:
        ticket: That of the run, on the first machine with its present addresses.
        definition: Text of the first machine, which this one has to check. None on that itself,
            unless the run goes on without it.
    """

    def __init__(self, ticket: Ticket, record: Record, options: Options):
        tickets.hold(ticket.name)
        key, port = bytes.fromhex(record.key), options.port or record.port
        self.node = Node(ticket.secret, key, port, ticket.relay, options.addresses)
        self.ticket, self._record = ticket, record
        self.definition: str | None = None
        self._link: Link | None = None
        self._known = tickets.places_of(record.places)
        self._is_first = self.node.key == ticket.key
        if self._is_first:
            addresses = dict.fromkeys([*options.addresses, *self.node.addresses])
            self.ticket = replace(ticket, addresses=tuple(addresses)[: tickets.MOST])
            record.ticket, record.port = str(self.ticket), self.node.port
            record.save(ticket.name)

    def call(self, patience: float = 0.0) -> None:
        """Ask the other machines for the definition. Raises Unconnected.

        Args:
            patience: Seconds for which machines that do not answer are asked again.
        """
        others = [key for key, _ in self._known if key not in (self.node.key, self.ticket.key)]
        if self._is_first and not others:
            return
        self.node.knows(self.ticket.key, self.ticket.addresses)
        for place in self._known:
            self.node.knows(*place)
        others += [] if self._is_first else [self.ticket.key]
        since = time.monotonic()
        while self.definition is None:
            work = asyncio.wait_for(self._ask_all(others), _FIRST if self._is_first else None)
            try:
                self._link, self.definition = self.node.wait(work)
            except (PeerLost, TimeoutError) as error:
                if time.monotonic() - since < patience:
                    continue
                if isinstance(error, TimeoutError) and not patience:
                    return  # the run begins, or begins again
                self.leave()
                raise Unconnected(str(error) or "no machine of the run answers") from error
            except BaseException:
                self.leave()
                raise

    async def _ask_all(self, keys: Sequence[bytes]) -> tuple[Link, str]:
        """The first answer of one of these machines. The last one may be the first of a new run."""
        asks = [asyncio.ensure_future(self._ask(key)) for key in keys]
        try:
            for answer in asyncio.as_completed(asks):
                with suppress(PeerLost):
                    link, state, definition = await answer
                    self.node.is_away = state == RUNNING
                    await asyncio.wait(asks, timeout=_ALL if self.node.is_away else 0)
                    return link, definition
            raise asks[-1].exception() or PeerLost("no answer")
        finally:
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

    async def _ask(self, key: bytes) -> tuple[Link, str, str]:
        """The answer of a machine: its link, the state of the run, and the definition."""
        until = time.monotonic() + PATIENCE
        while True:
            link = await self.node.link(key, "the first machine")
            try:
                await link.send(MEETING, encoded(list(self.node.addresses)))
                state, definition = decoded(await link.receive_any(ANSWER, LIMIT))
                if isinstance(definition, str) and state in (NEW, RUNNING):
                    return link, state, definition
            except PeerLost:  # it may begin, too
                if time.monotonic() > until:
                    raise
            except (ValueError, TypeError) as error:
                raise PeerLost(f"{link.name} does not speak this protocol ({error})") from error
            await asyncio.sleep(_LOOK)

    def enter(self, definition: str = "") -> tuple[Node, list[bytes]]:
        """Wait until all machines are ready. Returns the keys of all, by process.

        Args:
            definition: Text of this machine, on the first one for the others.
        """
        self.node.definition = definition
        try:
            places = self._known
            if self._link is None:
                places = self.node.wait(self._meet(definition))
            elif not self.node.is_away:
                places = self.node.wait(self._join(self._link))
        except BaseException:
            self.leave()
            raise
        self._record.places = tickets.words_of(places)
        self._record.save(self.ticket.name)
        for place in places:
            self.node.knows(*place)
        keys = [key for key, _ in places]
        self.node.members, self.node.meets = set(keys), False  # from now on, no other is let in
        return self.node, keys

    def leave(self) -> None:
        """Take no part."""
        self.node.close("it has left")

    async def _join(self, link: Link) -> list[Place]:
        await link.send(MEETING, encoded(READY))
        octets = await link.receive_any(ANSWER, LIMIT)
        with suppress(TypeError, ValueError, LookupError):
            places = tickets.places_of(decoded(octets))
            keys = {key for key, _ in places}
            if len(keys) == self.ticket.size and places[0][0] == self.ticket.key:
                return places
        raise PeerLost("the first machine has sent a list of machines that is wrong")

    async def _meet(self, definition: str) -> list[Place]:
        """Let the others in, and send them the places of all when all are ready."""
        node, size = self.node, self.ticket.size
        name = self.ticket.name if self._known else self.ticket
        again = " --output-dir DIR resume=true" if '"resume"' in definition else ""
        start = f"powergossip-join {name}{again}" if definition else f'processes(ticket="{name}")'
        if self._known:
            node.members = {key for key, _ in self._known}
        print(
            f"{self.ticket.name}: {'start' if definition else 'call'} this on "
            f"{counted(size - 1, 'other machine')}\n\n  {start}\n",
            flush=True,
        )
        ready: list[Link] = []
        admitted: dict[Link, asyncio.Task[None]] = {}

        async def admit(link: Link) -> None:
            with suppress(PeerLost):
                if await node.admitted(link, NEW):
                    node.knows(link.key, [link.address] if link.address else [])
                    ready.append(link)

        told = -1
        while told < size - 1:
            for link in set(node.links.values()) - set(admitted):
                admitted[link] = asyncio.ensure_future(admit(link))
            ready[:] = [link for link in ready if not link.is_lost]
            if told != len(ready):
                told = len(ready)
                print(f"{1 + told} of {size} machines are here", flush=True)
            await asyncio.sleep(_LOOK)
        for task in admitted.values():
            task.cancel()
        order = {key: process for process, (key, _) in enumerate(self._known)}
        others = sorted(ready, key=lambda link: order.get(link.key, size))[: size - 1]
        places = [(node.key, node.addresses), *((of.key, node.places[of.key]) for of in others)]
        for link in others:
            await link.send(ANSWER, encoded(tickets.words_of(places)))
        return places


_asked: dict[str, Meeting] = {}  # by the ticket's text


def ask(text: str, options: Options, size: int = 0, patience: float = 0.0) -> Meeting:
    """Call the machines of a ticket, or of the name of a run. Raises BadInput.

    Args:
        text: "new", a ticket, or the name of a run.
        size: Number of machines of a new run.
        patience: See Meeting.call.
    """
    found = Meeting(*(_new(size, options) if text == NEW else _known(text)), options)
    found.call(patience)
    _asked[text] = found
    return found


def connect(
    text: str, size: int, options: Options, definition: str
) -> tuple[Node, list[bytes], Ticket]:
    """Meet the other machines of a run. Returns the keys of all, by process.

    Args:
        definition: The first machine's text for the others.
    """
    asked = _asked.get(text) or ask(text, options, size)
    del _asked[text]
    if asked.definition is not None:
        try:
            theirs, own = (json.loads(d or "{}") for d in (asked.definition, definition))
            check_same(asked.ticket.name, theirs, own)
        except BadInput:
            asked.leave()
            raise
    return *asked.enter(definition), asked.ticket


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
    name = f"run-{os.urandom(4).hex()}"
    ticket = Ticket(name, public(key), secret, size, (), options.relay)
    return ticket, Record(str(ticket), key.hex())


def _known(text: str) -> tuple[Ticket, Record]:
    """The ticket of a text, and the record of this machine, which is new for a new ticket."""
    is_ticket = tickets.is_ticket(text)
    name = tickets.read(text).name if is_ticket else text
    record = tickets.saved(name)
    if record is None and not is_ticket:
        raise BadInput(f"ticket={text}: use new, a ticket, or a run that this machine has joined")
    if record is None:
        record = Record(text, os.urandom(LENGTH).hex())
        record.save(name)
    ticket = tickets.read(text if is_ticket else record.ticket)
    if tickets.read(record.ticket).key != ticket.key:
        raise BadInput(f"this machine has another ticket of the name {name}; remove it")
    return ticket, record


def public(key: bytes) -> bytes:
    """The public key of a secret one."""
    return bytes(iroh().SecretKey.from_bytes(key).public().to_bytes())
