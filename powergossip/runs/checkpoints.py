"""Checkpoints, from which a run can resume: after a crash or a time limit, in any layout of
processes.

A state is a tree of dicts and lists. Its tensors with an axis are [worker, ...], a row for each
worker that the process hosts. Its other leaves (numbers, strings, None, tensors without an axis)
are the same in all processes. Each process writes a part with the rows of its own workers. A
process that loads the state of a worker reads the worker's rows from the part that contains them.
All processes must see the same folder::

    OUTPUT_DIR/checkpoints/
        index.json                the last and the best checkpoint, and the parts of both
        step-000490/part-3.pt     the workers of process 3

The index is replaced atomically once all parts of a new checkpoint are on the disk. A process that
is killed while it writes does not damage the previous checkpoints. Another one then replaces the
index. A process that was stopped, and is regarded as lost, changes neither index nor checkpoints
when it continues (see files.Drafts). The next `save` removes folders that are not in the index.
"""

import errno
import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from powergossip.errors import Dropped
from powergossip.network import Processes
from powergossip.runs.atomic_files import Drafts, sync_folder
from powergossip.trees import Tree, map_tensors

T = TypeVar("T")

FOLDER = "checkpoints"
_INDEX = "index.json"
_VERSION = 1
_REMEDY = "restore it, or remove the folder checkpoints to start from the beginning"


class Checkpoints:
    """The last and the best checkpoint of the run in an output folder.

    All processes call each method at the same time. Methods raise errors.BadInput in all of them if
    a file cannot be written or read, or differs from its description in the index.
    """

    def __init__(self, output_dir: Path, processes: Processes):
        self._folder = Path(output_dir) / FOLDER
        self._processes = processes
        self._last: str | None = None  # folder of the last checkpoint
        with suppress(ValueError, OSError):  # other methods raise them
            self._last = self._folder_of_last()

    def save(
        self,
        step: int,
        workers: range,
        state: Tree,
        facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        score: float | None = None,
    ) -> None:
        """Write the state of the hosted `workers` after `step` steps.

        Args:
            facts: JSON values of process 0 that `describe` returns, or a function that returns
                them, which the first process that is left calls when all parts are written.
            score: Quality of the model. The first checkpoint with the largest score is kept as the
                best.

        Raises:
            Dropped: If another process of the run has written a checkpoint in place of this one. No
                checkpoint is changed then.
        """
        processes = self._processes
        with Drafts(self._folder, processes.index) as drafts:
            name = self._by_first(lambda: self._new_folder(drafts, step))
            try:
                with processes.agreed():
                    path = self._folder / name / f"part-{processes.index}.pt"
                    part = write_part(path, workers, state)
                parts = processes.gather(part)
                self._last = self._by_first(
                    lambda: self.publish(drafts, name, step, parts, facts, score)
                )
            except ValueError:
                with suppress(OSError, ValueError):
                    if processes.rank == 0 and self._folder_of_last() != name:
                        drafts.begin()
                        drafts.remove(name)
                raise

    def _by_first(self, action: Callable[[], T]) -> T:
        """The result of an action of the first process. If that is lost, the next one acts."""
        result = None
        while result is None:
            found = None
            with self._processes.agreed():
                if self._processes.rank == 0:
                    found = action()
            result = self._processes.broadcast(found)
        return result

    def describe(self, which: str = "last") -> dict[str, Any] | None:
        """Return step, score and facts of the "last" or "best" checkpoint; None without one."""
        entry = None
        with self._processes.agreed():
            if self._processes.rank == 0:
                entry = self._entry(which)
        return self._processes.broadcast(entry)

    def load(self, workers: range, which: str = "last") -> Tree:
        """Return the state of these workers, on the CPU, from an existing checkpoint."""
        with self._processes.agreed():
            state = self._load(workers, which)
        return state

    def visit(self, take: Callable[[range, Tree], None], which: str = "last") -> None:
        """Call take(workers, state) for each part of an existing checkpoint, on the CPU.

        Every process reads all parts, one after the other, in the order of their workers.
        """
        with self._processes.agreed():
            for workers, read in self._parts(which):
                take(workers, read())

    # --- The index ---

    def _index(self) -> dict[str, Any]:
        path = self._folder / _INDEX
        try:
            index = json.loads(path.read_text())
        except FileNotFoundError:
            if any(self._folder.glob("step-*")):
                raise ValueError(f"{path} is missing; {_REMEDY}") from None
            return {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); {_REMEDY}") from error
        if not isinstance(index, dict) or index.get("version") != _VERSION:
            raise ValueError(
                f"{path} was written by an incompatible version; use the version that wrote it"
            )
        return index

    def _entry(self, which: str) -> dict[str, Any] | None:
        entry: dict[str, Any] | None = self._index().get(which)
        return entry

    def _folder_of_last(self) -> str | None:
        last = self._entry("last")
        return None if last is None else str(last["folder"])

    def _check_last(self, new: str) -> None:
        """Raise Dropped unless the last checkpoint is the one before, or the new one, which a
        process that was lost has published."""
        last = self._folder_of_last()
        if last not in (self._last, new):
            raise Dropped(f"process {self._processes.index} ends: the run has gone on with {last}")

    def _new_folder(self, drafts: Drafts, step: int) -> str:
        """Make a folder. Returns its name, another one for a second checkpoint of a step."""
        drafts.begin()
        if not self._index():  # which is missing later only if it was removed
            drafts.replace(_INDEX, _as_json({"version": _VERSION, "last": None, "best": None}))
        name, number = f"step-{step:06d}", 1
        while (self._folder / name).exists():
            number += 1
            name = f"step-{step:06d}-{number}"
        drafts.make_folder(name)
        return name

    def publish(
        self,
        drafts: Drafts,
        name: str,
        step: int,
        parts: Sequence[dict[str, Any]],
        facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        score: float | None,
    ) -> str:
        """Replace the index, and remove folders that it does not name. Returns the name."""
        self._processes.check_present()
        self._check_last(name)  # a run that has gone on is not disturbed
        drafts.take_over()
        self._check_last(name)  # from now on, no lower process replaces the index
        entry = {
            "folder": name,
            "step": step,
            "score": score,
            "parts": list(parts),
            "facts": dict(facts() if callable(facts) else facts),
        }
        best = self._entry("best")
        if score is not None and (best is None or score > best["score"]):
            best = entry
        sync_folder(self._folder / name)
        index = {"version": _VERSION, "last": entry, "best": best}
        drafts.replace(_INDEX, _as_json(index), sync=True)
        named = {name, best["folder"] if best else name}
        for other in self._folder.glob("step-*"):
            if other.name not in named:
                drafts.remove(other.name)
        return name

    def _load(self, workers: range, which: str) -> Tree:
        pieces = []
        for there, read in self._parts(which):
            wanted = range(max(there.start, workers.start), min(there.stop, workers.stop))
            if wanted:
                rows = slice(wanted.start - there.start, wanted.stop - there.start)
                pieces.append(rows_of(read(), rows))
        return join(pieces)

    def _parts(self, which: str) -> Iterator[tuple[range, Callable[[], Tree]]]:
        """The workers of each part, in their order, and a function that reads it."""
        entry = self._entry(which)
        assert entry is not None, f"no {which} checkpoint"
        for part in sorted(entry["parts"], key=lambda part: part["workers"]):
            path = self._folder / entry["folder"] / part["file"]
            yield range(*part["workers"]), partial(_read_part, path, part)


def _as_json(index: Mapping[str, Any]) -> bytes:
    return json.dumps(index, indent=1).encode()


# --- Parts ---------------------------------------------------------------------------------------


def write_part(path: Path, workers: range, state: Tree) -> dict[str, Any]:
    """Write a part. Return its description for the index."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(_to_cpu(state), hashing)  # type: ignore[arg-type]  # only write and flush are used
        except RuntimeError:
            # torch reports a failed write as an error of its own type.
            if hashing.failed is None:
                raise
        if hashing.failed is not None:
            reason = hashing.failed.strerror or str(hashing.failed)
            if hashing.failed.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                reason += "; make room and start again with resume=true"
            raise ValueError(f"the checkpoint {path} cannot be written: {reason}")
        file.flush()
        os.fsync(file.fileno())
    return {
        "file": path.name,
        "workers": [workers.start, workers.stop],
        "bytes": hashing.size,
        "sha256": hashing.digest.hexdigest(),
    }


def _read_part(path: Path, part: Mapping[str, Any]) -> Tree:
    """Read a part. Raises ValueError unless its size and checksum are those in the index."""
    try:
        size = path.stat().st_size
        if size != part["bytes"]:
            raise ValueError(
                f"the checkpoint {path} is damaged: {size} bytes instead of {part['bytes']}; "
                f"{_REMEDY}"
            )
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part["sha256"]:
                raise ValueError(
                    f"the checkpoint {path} is damaged: SHA-256 checksum mismatch; {_REMEDY}"
                )
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read: {error.strerror}; {_REMEDY}"
        ) from error
    except (RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"the checkpoint {path} is damaged: {error}; {_REMEDY}") from error
    except pickle.UnpicklingError:  # torch advises to load anything
        raise ValueError(
            f"the checkpoint {path} contains more than tensors, numbers and texts, which is not "
            f"loaded; {_REMEDY}"
        ) from None


class _Hashing:
    """A writable file that records size, SHA-256 and the first failure.

    A failure is recorded, not raised: torch's writer does not survive an exception.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        octets = memoryview(data).cast("B")
        if self.failed is None:
            try:
                self._file.write(octets)
            except OSError as error:
                self.failed = error
        self.digest.update(octets)
        self.size += len(octets)
        return len(octets)

    def flush(self) -> None:
        if self.failed is None:
            try:
                self._file.flush()
            except OSError as error:
                self.failed = error


# --- Trees ---------------------------------------------------------------------------------------


def _to_cpu(tree: Tree) -> Tree:
    """Tensors on the CPU, each with a storage of its own: torch.save writes the whole storage."""

    def compact(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu().contiguous()
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if whole else tensor.clone()

    return map_tensors(compact, tree)


def rows_of(tree: Tree, rows: slice) -> Tree:
    """Rows of tensors that have an axis. Other leaves stay."""
    return map_tensors(lambda tensor: tensor[rows] if tensor.ndim else tensor, tree)


def join(trees: Sequence[Tree]) -> Tree:
    """Concatenate tensors that have an axis; other leaves are those of the first tree."""
    return map_tensors(
        lambda first, *more: torch.cat((first, *more)) if first.ndim else first, *trees
    )
