"""Files that are written in one piece."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from powergossip.errors import Dropped

_PREFIX = ".drafts-"


class Drafts:
    """Changes of a folder by one process of a run, until another one takes over.

    New contents are written to a folder `.drafts-PROCESS-…` and moved to their place. Folders are
    moved there to be removed. `take_over` removes these folders of all lower processes, and with
    them everything that those were about to move. Moves are atomic, also on NFS. A process that was
    stopped at any instruction and regarded as lost thus changes nothing when it continues: its
    methods raise Dropped.

    A context, which removes its own drafts at the end.

    Args:
        folder: Folder that is changed.
        process: Index of this process. Of two that write, the lower one was lost.
    """

    def __init__(self, folder: Path, process: int):
        self._folder, self._process = folder, process
        self._own: Path | None = None

    def begin(self) -> None:
        """Make the folders, if they do not exist. To be called before all other methods."""
        if self._own is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own = Path(
                tempfile.mkdtemp(prefix=f"{_PREFIX}{self._process}-", dir=self._folder)
            )

    def take_over(self) -> None:
        """Begin, and prevent all further changes by lower processes.

        Raises Dropped if a higher one has begun.
        """
        self.begin()
        others = [other for other in _drafts(self._folder) if other != self._own]
        if any(int(other.name.split("-")[1]) > self._process for other in others):
            raise self._dropped()
        for other in others:
            self.remove(other.name)

    def replace(self, name: str, contents: bytes, sync: bool = False) -> None:
        """Write or replace a file. With `sync`, it survives a power failure. Errors name it."""
        with naming(self._folder / name):
            with self._moving(name) as draft:
                _write(draft, contents, sync)
                draft.replace(self._folder / name)
            if sync:
                sync_folder(self._folder)

    def make_folder(self, name: str) -> None:
        """Make a folder within the folder."""
        with self._moving(name) as draft:
            draft.mkdir()
            draft.rename(self._folder / name)

    def remove(self, name: str) -> None:
        """Remove a folder within the folder, if it exists."""
        with self._moving(name, missing_ok=True) as draft:
            (self._folder / name).rename(draft)
            shutil.rmtree(draft, ignore_errors=True)

    @contextmanager
    def _moving(self, name: str, missing_ok: bool = False) -> Iterator[Path]:
        assert self._own is not None
        try:
            yield self._own / name
        except FileNotFoundError:
            self.check()
            if not missing_ok:
                raise

    def check(self) -> None:
        """Raise Dropped if another process has taken over."""
        exists = os.path.exists  # Path.exists raises an exception if the disk fails
        if exists(self._folder) and not (self._own is not None and exists(self._own)):
            raise self._dropped()

    def _dropped(self) -> Dropped:
        return Dropped(f"process {self._process} ends: another one writes to {self._folder}")

    def close(self) -> None:
        """Remove the drafts."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def __enter__(self) -> "Drafts":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A block whose failures name this path: failures of flush and fsync name no path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _drafts(folder: Path) -> list[Path]:
    return list(folder.glob(f"{_PREFIX}*"))


def clear_drafts(folder: Path) -> None:
    """Remove the drafts of an earlier run of the program."""
    for drafts in _drafts(folder):
        shutil.rmtree(drafts, ignore_errors=True)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder in a folder, for files that are to appear there complete.

    Removes those that killed processes have left: without a change for a day.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.glob(".incomplete-*"):
        with suppress(OSError):  # another process removes it, too
            times = [path.stat().st_mtime for path in (other, *other.rglob("*"))]
            if max(times) < time.time() - 86_400:
                shutil.rmtree(other)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".incomplete-") as place:
        yield Path(place)


def write_atomically(path: Path, text: str) -> None:
    """Write or replace a file. Readers see the old or the new contents, never a part."""
    new = path.with_name(f"{path.name}.new")
    with naming(path):
        _write(new, text.encode())
        new.replace(path)


def _write(path: Path, contents: bytes, sync: bool = False) -> None:
    """Write a file. With `sync`, it is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(contents)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
