"""Small things that several test files need."""

import time
from collections.abc import Callable, Sequence
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


DAMAGES = ("truncated", "flipped", "empty", "zeros", "missing")


def damage(file: Path, kind: str) -> None:
    """Damage a file. What is left is a new file: the one before may be mapped into memory."""
    octets = file.read_bytes()
    middle = len(octets) // 2
    flipped = octets[:middle] + bytes([octets[middle] ^ 1]) + octets[middle + 1 :]
    contents = {"truncated": octets[:middle], "flipped": flipped, "empty": b""}
    file.unlink()
    if kind != "missing":
        file.write_bytes({**contents, "zeros": bytes(len(octets))}[kind])


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
