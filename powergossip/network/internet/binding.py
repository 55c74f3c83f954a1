"""The package iroh."""

import ctypes
import inspect
from functools import cache
from typing import Any

from powergossip.errors import BadInput

LOOP = "in enumerate(value)"  # in the method of uniffi before 0.32 that copies byte by byte


def write(self: Any, value: bytes) -> None:
    """That method, with one copy (github.com/n0-computer/iroh-ffi/issues/229)."""
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
    if LOOP in inspect.getsource(memory.write):
        memory.write = write
    return iroh_ffi


def builder(module: Any) -> Any:
    """The class of the binding that fills memory."""
    return module._UniffiRustBufferBuilder
