"""The package iroh."""

import ctypes
from functools import cache
from typing import Any

from powergossip.errors import BadInput


class Counted(bytes):
    """Bytes that count how often they are read one by one."""

    iterations = 0

    def __iter__(self) -> Any:
        self.iterations += 1
        return super().__iter__()


def copies_one_by_one(kind: Any) -> bool:
    """True if a class that fills memory copies bytes in a loop of Python.

    The classes that uniffi before 0.32 generates do (github.com/n0-computer/iroh-ffi/issues/229).
    """
    value, filled = Counted(b"\0"), kind()
    try:
        filled.write(value)
    finally:
        filled.discard()
    return value.iterations > 0


def write(self: Any, value: bytes) -> None:
    """The method of that class, with one copy."""
    with self._reserve(len(value)):
        end = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
        ctypes.memmove(end, bytes(value), len(value))


@cache
def iroh() -> Any:
    """The module of the binding. Raises BadInput if it is not installed."""
    try:
        from iroh import iroh_ffi
    except ImportError as error:
        raise BadInput("a ticket needs the package iroh; install powergossip[internet]") from error
    memory = builder(iroh_ffi)
    if copies_one_by_one(memory):
        memory.slow_write, memory.write = memory.write, write
    return iroh_ffi


def builder(module: Any) -> Any:
    """The class of the binding that fills memory."""
    return module._UniffiRustBufferBuilder
