"""Tickets, and the files in which a machine keeps them and its keys.

    ~/.local/state/decentralized-deep-learning/NAME.json    $XDG_STATE_HOME replaces ~/.local/state

A file has the ticket of a run, the key of this machine in it, and its port. Only its owner may read
it. A machine that starts again has the same key, hence the same workers.
"""

import base64
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from powergossip.errors import BadInput, reason
from powergossip.network.internet.handshake import LENGTH

_PREFIX = "powergossip-"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_LONGEST = 4096  # characters
MOST = 16  # addresses of a machine
N0 = "n0"

Place = tuple[bytes, tuple[str, ...]]  # public key and addresses of a machine
_held: dict[Path, IO[str]] = {}  # locks of this process, by their files


@dataclass(frozen=True)
class Ticket:
    """All that a machine needs to join a run, and a secret: who has it can take part.

    Attributes:
        name: Name of the run.
        key: Public key of the first machine.
        secret: Random bytes.
        size: Number of machines.
        addresses: IP:PORT of the first machine.
        relay: URL of a relay, N0, or "".
    """

    name: str
    key: bytes
    secret: bytes
    size: int
    addresses: tuple[str, ...]
    relay: str = ""

    def __str__(self) -> str:
        words = "\n".join([self.name, str(self.size), self.relay, *self.addresses])
        octets = self.key + self.secret + words.encode()
        octets += hashlib.sha256(octets).digest()[:4]
        return _PREFIX + base64.urlsafe_b64encode(octets).decode().rstrip("=")


def is_ticket(text: str) -> bool:
    """True for a ticket, false for a name."""
    return text.startswith(_PREFIX)


def read(text: str) -> Ticket:
    """The ticket of a text. Raises BadInput."""
    try:
        if len(text) > _LONGEST:
            raise ValueError
        code = text.removeprefix(_PREFIX)
        octets = base64.urlsafe_b64decode(code + "=" * (-len(code) % 4))
        body, checksum = octets[:-4], octets[-4:]
        if hashlib.sha256(body).digest()[:4] != checksum:
            raise ValueError
        name, size, relay, *addresses = body[2 * LENGTH :].decode().split("\n")
        key, secret = body[:LENGTH], body[LENGTH : 2 * LENGTH]
        found = Ticket(name, key, secret, int(size), addresses_of(addresses), relay)
        if not _NAME.fullmatch(name) or not 2 <= found.size <= 10**4:
            raise ValueError
        return found
    except (ValueError, TypeError) as error:
        shown = text if len(text) < 40 else f"{text[:20]}…{text[-8:]}"
        raise BadInput(
            f"ticket={shown}: use the whole ticket that the first machine prints, new, or the name "
            "of a run that this machine has joined"
        ) from error


def addresses_of(values: Iterable[Any]) -> tuple[str, ...]:
    """Addresses IP:PORT. Raises ValueError for others, and for too many."""
    found: list[str] = []
    for value in values:
        host, _, port = str(value).rpartition(":")
        ipaddress.ip_address(host.strip("[]"))
        if not 0 < int(port) < 65536 or len(found) == MOST:
            raise ValueError(value)
        found.append(str(value))
    return tuple(found)


def places_of(values: Any) -> list[Place]:
    """Keys and addresses of machines from lists of words. Raises ValueError or TypeError."""
    return [(bytes.fromhex(key), addresses_of(where)) for key, *where in values]


def words_of(places: Iterable[Place]) -> list[list[str]]:
    return [[key.hex(), *addresses] for key, addresses in places]


@dataclass
class Record:
    """A run that this machine takes part in.

    Attributes:
        ticket: The text of the ticket.
        key: Secret key of this machine, in hexadecimal digits.
        port: UDP port of this machine.
        places: Key and addresses of each machine by process, once the run has its machines.
    """

    ticket: str
    key: str
    port: int = 0
    places: list[list[str]] = field(default_factory=list)

    def save(self, name: str) -> None:
        """Write the file, readable by its owner only. Raises BadInput."""
        with _folder(name) as path:
            draft, own = tempfile.mkstemp(prefix=f"{path.stem}.", dir=path.parent)  # mode 0600
            with open(draft, "w") as file:
                json.dump(asdict(self), file)
            os.replace(own, path)


def saved(name: str) -> Record | None:
    """The record of a run, or None. Raises BadInput for a damaged file."""
    path = _file(name)
    try:
        found = Record(**json.loads(path.read_text()))
        read(found.ticket)
        bytes.fromhex(found.key), places_of(found.places)
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is damaged; remove it, and ask for a new ticket") from error


def hold(name: str) -> None:
    """Take part in a run until this process ends. Raises BadInput if another one does."""
    with _folder(name) as path:
        if path not in _held:
            _held[path] = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 closed with the process
        try:
            fcntl.lockf(_held[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(
                f"{name}: another process of this machine takes part in it; end that one first, or "
                "set XDG_STATE_HOME to a folder of its own for this one"
            ) from error


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    """The file of a run in a folder that exists. Raises BadInput if nothing can be written."""
    path = _file(name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise BadInput(f"the ticket cannot be saved: {reason(error)}") from error


def _file(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise BadInput(f"ticket={name}: use new, a ticket, or the name of a run: a-z, 0-9 and -")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "decentralized-deep-learning" / f"{name}.json"
