"""The moments before and after each call of the operating system in a block.

Calls are those that Python makes of functions of `posix` and of methods of files. They are counted
as they happen, so that a new one in the code under test is covered without further ado.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Without effect on files.
_HARMLESS = {
    *("fspath", "fsencode", "getpid", "stat", "lstat", "fstat", "urandom", "scandir", "listdir"),
    *("text_encoding", "fileno", "getvalue", "read", "readline", "readlines", "seek"),
}


def is_system_call(function: Any) -> bool:
    """Whether a builtin function is a call of the operating system that may change files."""
    of = type(getattr(function, "__self__", None))
    if of.__module__ != "_io" and getattr(function, "__module__", None) not in (
        "posix",
        "_io",
        "io",
    ):
        return False
    to_buffer = (of.__name__, function.__name__) == ("BufferedWriter", "write")
    return not to_buffer and function.__name__ not in _HARMLESS


@contextmanager
def moments(at: Callable[[int], None]) -> Iterator[None]:
    """A block in which at(moment) is called at each moment, counted from 0."""
    count = 0

    def event(frame: FrameType, kind: str, function: Any) -> None:
        nonlocal count
        if kind in ("c_call", "c_return", "c_exception") and is_system_call(function):
            count += 1
            at(count - 1)

    sys.setprofile(event)
    try:
        yield
    finally:
        sys.setprofile(None)
