"""Small things that several test files need."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def executable(path: Path, script: str) -> Path:
    """A shell script in the place of a program. Its interpreter needs no PATH."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def files_below(folder: Path) -> dict[str, bytes | None]:
    """The contents of the files below a folder, without bytecode, and None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def damages(file: Path) -> Iterator[str]:
    """Damage a file, in each way after it was restored: kinds of damage.

    Each is a new file: the one before may be mapped into memory.
    """
    octets = file.read_bytes()
    middle = len(octets) // 2
    flipped = octets[:middle] + bytes([octets[middle] ^ 1]) + octets[middle + 1 :]
    zeros = bytes(len(octets))
    contents = {"truncated": octets[:middle], "flipped": flipped, "empty": b"", "zeros": zeros}
    for kind, content in contents.items():
        file.unlink()
        file.write_bytes(content)
        yield kind
    file.unlink()
    yield "missing"


def wait_until(condition: Callable[[], object], seconds: float = 90) -> None:
    """Fails if the condition is not true within that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)


def with_one_each(
    rows: Sequence[Any], values: Sequence[Any], kind: Callable[[Any], object]
) -> list[tuple[Any, Any]]:
    """The first row of each kind with all values, and each other row with one of them."""
    first = {kind(row): i for i, row in reversed([*enumerate(rows)])}
    return [
        (row, value)
        for i, row in enumerate(rows)
        for j, value in enumerate(values)
        if first[kind(row)] == i or i % len(values) == j
    ]
