"""The proof of both ends of a connection that they know the ticket's secret.

    dialer → acceptor   a random number
    acceptor → dialer   a random number
    dialer → acceptor   HMAC-SHA-256 of the secret over "dialer", both keys and both numbers
    acceptor → dialer   the same over "acceptor"

The keys are the ed25519 keys by which QUIC has authenticated both ends. A proof is therefore
worthless in any other connection. The acceptor, whom strangers may call, proves last.
"""

import hmac
import os
from typing import Any

LENGTH = 32  # bytes of a key, a random number, a secret and a proof


class WrongSecret(ValueError):
    """The other end has another secret."""


def proof(secret: bytes, role: bytes, dialer: bytes, acceptor: bytes, numbers: bytes) -> bytes:
    """The proof of one end. All arguments but the role have fixed lengths."""
    return hmac.digest(secret, role + dialer + acceptor + numbers, "sha256")


async def dial(stream: Any, secret: bytes, own: bytes, other: bytes) -> None:
    """Prove and check, at the end that has called. Raises WrongSecret."""
    receive, send = stream.recv(), stream.send()
    number = os.urandom(LENGTH)
    await send.write_all(number)
    numbers = number + await receive.read_exact(LENGTH)
    await send.write_all(proof(secret, b"dialer", own, other, numbers))
    theirs = await receive.read_exact(LENGTH)
    if not hmac.compare_digest(theirs, proof(secret, b"acceptor", own, other, numbers)):
        raise WrongSecret


async def accept(stream: Any, secret: bytes, own: bytes, other: bytes) -> None:
    """Check and prove, at the end that was called. Raises WrongSecret."""
    receive, send = stream.recv(), stream.send()
    numbers = await receive.read_exact(LENGTH)
    number = os.urandom(LENGTH)
    await send.write_all(number)
    numbers += number
    theirs = await receive.read_exact(LENGTH)
    if not hmac.compare_digest(theirs, proof(secret, b"dialer", other, own, numbers)):
        raise WrongSecret
    await send.write_all(proof(secret, b"acceptor", other, own, numbers))
