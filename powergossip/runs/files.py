"""Files that are written in one piece."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str, sync: bool = False) -> None:
    """Write or replace a file. Readers see the old or the new contents, never a part.

    With `sync` the contents are on the disk before the old ones are given up, and survive a power
    failure.
    """
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(text.encode())
        if sync:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
