"""Small things that several test files need."""

import time
from collections.abc import Callable
from pathlib import Path


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


def wait_until(condition: Callable[[], object], seconds: float = 90) -> None:
    """Fails if the condition is not true within that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)
