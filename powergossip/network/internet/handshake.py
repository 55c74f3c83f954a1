"""The proof of both ends of a connection that they know the ticket's secret.

    dialer → acceptor   the version of the wire, and a random number
    acceptor → dialer   the same
    dialer → acceptor   HMAC-SHA-256 of the secret over "dialer", both keys and both numbers
    acceptor → dialer   the same over "acceptor"

The keys are the ed25519 keys by which QUIC has authenticated both ends. A proof is therefore
worthless in any other connection. The acceptor, whom strangers may call, proves last.
"""

import hmac
import os
from typing import Any

WIRE = 1  # the version of all that machines send to each other: a release that changes it counts up
LENGTH = 32  # bytes of a key, a random number, a secret and a proof
_VERSION = WIRE.to_bytes(4, "little")  # this, and its place, stays in all versions


class WrongSecret(ValueError):
    """The other end has another secret."""


class OtherVersion(ValueError):
    """The other end has a release with another version of the wire."""


def proof(secret: bytes, role: bytes, dialer: bytes, acceptor: bytes, numbers: bytes) -> bytes:
    """The proof of one end. All arguments but the role have fixed lengths."""
    return hmac.digest(secret, role + dialer + acceptor + numbers, "sha256")


async def dial(stream: Any, secret: bytes, own: bytes, other: bytes) -> None:
    """Prove and check, at the end that has called. Raises WrongSecret or OtherVersion."""
    number = os.urandom(LENGTH)
    await stream.send().write_all(_VERSION + number)
    numbers = number + await _number(stream)
    await stream.send().write_all(proof(secret, b"dialer", own, other, numbers))
    await _check(stream, proof(secret, b"acceptor", own, other, numbers))


async def accept(stream: Any, secret: bytes, own: bytes, other: bytes) -> None:
    """Check and prove, at the end that was called. Raises WrongSecret or OtherVersion."""
    number = os.urandom(LENGTH)
    numbers = await _number(stream) + number
    await stream.send().write_all(_VERSION + number)
    await _check(stream, proof(secret, b"dialer", other, own, numbers))
    await stream.send().write_all(proof(secret, b"acceptor", other, own, numbers))


async def _number(stream: Any) -> bytes:
    if await stream.recv().read_exact(len(_VERSION)) != _VERSION:
        raise OtherVersion
    return bytes(await stream.recv().read_exact(LENGTH))


async def _check(stream: Any, expected: bytes) -> None:
    if not hmac.compare_digest(bytes(await stream.recv().read_exact(LENGTH)), expected):
        raise WrongSecret
