"""Checkpoints, from which a run can resume: after a crash or a time limit, in any layout of
processes.

A state is a tree of dicts and lists. Its tensors with an axis are [worker, ...], a row for each
worker that the process hosts. Its other leaves (numbers, strings, None, tensors without an axis)
are the same in all processes. Each process writes a part with its workers' rows. A process that
loads the state of a worker reads the worker's rows from the part that contains them. All processes
must see the same folder, unless `has_own_files`: then each has an index and its part::

    OUTPUT_DIR/checkpoints/
        index.json                the checkpoints that are kept, and their parts
        step-000490/part-3.pt     the workers of process 3

Two checkpoints are kept: the last one and the best one. If the last one is also the best, the one
before it is kept. If the last one is damaged, a run resumes from the other.

The index is replaced atomically once all parts of a new checkpoint are on the disk. A process that
is killed while it writes does not damage the previous checkpoints. Another one then replaces the
index. A process that was stopped, and is regarded as lost, changes neither index nor checkpoints
when it continues (see atomic_files.Drafts). The next `save` removes folders that are not in the
index.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from powergossip.atomic_files import Drafts, sync_folder
from powergossip.errors import BadInput, Dropped
from powergossip.network import Processes
from powergossip.state_trees import Tree, map_tensors

T = TypeVar("T")

FOLDER, _INDEX = "checkpoints", "index.json"
_VERSION = 1
_KEPT = ("last", "best", "before")  # entries of the index
_ENTRY = {"folder", "step", "score", "parts", "facts"}
_REMEDY = "restore it, or use another --output-dir"


class Checkpoints:
    """The checkpoints of the run in an output folder: "last", "best", and "before", the previous
    one where the best one is the last.

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
                them, which the first surviving process calls when all parts are written.
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
                path = self._folder / name / f"part-{processes.index}.pt"
                with processes.agreed(), _writing(path):
                    part = write_part(path, workers, state)
                parts = processes.gather(part)
                self._last = self._by_first(
                    lambda: self.publish(drafts, name, step, parts, facts, score)
                )
            except ValueError:
                with suppress(OSError, ValueError):
                    if processes.writes and self._folder_of_last() != name:
                        drafts.begin()
                        drafts.remove(name)
                raise

    def _by_first(self, action: Callable[[], T]) -> T:
        """The result of an action of the first process. If that is lost, the next one acts."""
        result = None
        while result is None:
            found = None
            with self._processes.agreed(), _writing(self._folder):
                if self._processes.writes:
                    found = action()
            result = found if self._processes.has_own_files else self._processes.broadcast(found)
        return result

    def describe(self, which: str = "last") -> dict[str, Any] | None:
        """Return step, score and facts of a checkpoint; None without one."""
        own = which if (found := self._name(which)) is None else found
        entry = None
        with self._processes.agreed():
            if self._processes.writes:
                entry = self._entry(own)
        return entry if self._processes.has_own_files else self._processes.broadcast(entry)

    def _name(self, which: str) -> str | None:
        """The name, in the own index, of a checkpoint that all processes have: `which`, and for the
        last one, which some have published and others not, the last that all have.

        Raises BadInput if there is none, although some have checkpoints.
        """
        if not self._processes.has_own_files:
            return which
        with self._processes.agreed():
            steps = {name: e["step"] for name, e in self._index().items() if e is not None}
        everywhere = self._processes.gather(steps)
        common = set.intersection(*(set(of.values()) for of in everywhere))
        wanted = max(common, default=None) if which == "last" else everywhere[0].get(which)
        if wanted in common:
            return min(name for name in steps if steps[name] == wanted)
        if which == "last" and any(everywhere):
            raise BadInput(
                f"{self._folder}: no step has a checkpoint on all machines (steps by process: "
                f"{[sorted({*of.values()}) for of in everywhere]}); {_REMEDY}"
            )
        return None

    def intact(self, which: str, others: bool = False) -> tuple[str, dict[str, Any]]:
        """Return name and description of an intact checkpoint: `which`, or if `others`, one in its
        place, with a sentence that the first process prints.

        Each process reads some of the parts. Raises BadInput if there is no such checkpoint.
        """
        first = None
        for name in (which, *(name for name in _KEPT if others and name != which)):
            entry, own = self.describe(name), self._name(name)
            damage = None if entry is None or own is None else self._damage(own)
            if entry is not None and damage is None:
                if first is not None and self._processes.is_first:
                    print(f"{first}; the run goes on from the checkpoint of step {entry['step']}")
                return own or name, entry
            first = first or damage
        raise BadInput(f"{first}; {_REMEDY}")

    def _damage(self, which: str) -> str | None:
        """A sentence on the first damaged part of a checkpoint. None: all of them are intact."""
        with self._processes.agreed():
            parts = list(self._parts(which))
        damage = None
        rank, size = self._processes.rank, self._processes.size
        for _, read in parts[rank::size] if not self._processes.has_own_files else parts[rank:][:1]:
            damage = damage or _damage_of(*read.args)
        return next(filter(None, self._processes.everywhere(damage)), None)

    def return_to(self, which: str, wanted: str = "last") -> None:
        """Make a checkpoint the last one, in place of the `wanted` one if that is damaged, which is
        then no longer the best one. Called by the first process."""
        index = self._index()
        entry = index[which]
        if entry != index["last"] or which != wanted:
            best = None if entry["score"] is None else entry
            with Drafts(self._folder, self._processes.index) as drafts:
                drafts.begin()
                drafts.replace(_INDEX, _as_json(last=entry, best=best), sync=True)

    def load(self, workers: range, which: str = "last") -> Tree:
        """Return the state of these workers, on the CPU, from an existing checkpoint."""
        pieces = []
        with self._processes.agreed():
            for there, read in self._parts(which):
                wanted = range(max(there.start, workers.start), min(there.stop, workers.stop))
                if wanted:
                    rows = slice(wanted.start - there.start, wanted.stop - there.start)
                    pieces.append(rows_of(read(), rows))
        return join(pieces)

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
            if any(_steps(self._folder)):
                raise ValueError(f"{path} is missing; {_REMEDY}") from None
            return {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}); {_REMEDY}") from error
        if not isinstance(index, dict) or index.get("version") != _VERSION:
            raise ValueError(
                f"{path} was written by an incompatible version; use the version that wrote it"
            )
        entries = {name: index.get(name) for name in _KEPT}
        complete = all(
            e is None or (isinstance(e, dict) and e.keys() >= _ENTRY) for e in entries.values()
        )
        if not complete or index.get("sha256") not in (None, _checksum(entries)):
            raise ValueError(f"{path} is damaged: SHA-256 checksum mismatch; {_REMEDY}")
        return entries

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
        if not self._index():  # also where a user has removed it meanwhile
            drafts.replace(_INDEX, _as_json(), sync=True)
            self._last = None
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
        before, best = self._entry("last"), self._entry("best")
        if score is not None and (best is None or score > best["score"]):
            best = entry
        sync_folder(self._folder / name)
        kept = {"last": entry, "best": best}
        if best in (None, entry) or self._processes.has_own_files:
            kept["before"] = before
        drafts.replace(_INDEX, _as_json(**kept), sync=True)
        named = {one["folder"] for one in kept.values() if one is not None}
        for other in _steps(self._folder):
            if other.name not in named:
                drafts.remove(other.name)
        return name

    def _parts(self, which: str) -> Iterator[tuple[range, partial[Tree]]]:
        """The workers of each part, in their order, and a function that reads it."""
        entry = self._entry(which)
        assert entry is not None, f"no {which} checkpoint"
        for part in sorted(entry["parts"], key=lambda part: part["workers"]):
            path = self._folder / entry["folder"] / part["file"]
            yield range(*part["workers"]), partial(_read_part, path, part)


def clear(output_dir: Path) -> None:
    """Remove the checkpoints of a run in its folder, and nothing else."""
    folder = output_dir / FOLDER
    for step in _steps(folder):
        for part in step.glob("part-*.pt"):
            part.unlink()
        with suppress(OSError):  # other files are in it
            step.rmdir()
    (folder / _INDEX).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _steps(folder: Path) -> list[Path]:
    """The folders of checkpoints, also of those that are not in the index."""
    return [
        path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}(-\d+)?", path.name)
    ]


def _as_json(**entries: Any) -> bytes:
    kept = json.loads(json.dumps(dict.fromkeys(_KEPT) | entries))  # as it will be read
    index = {"version": _VERSION, **kept, "sha256": _checksum(kept)}
    return json.dumps(index, indent=1).encode()


def _checksum(entries: Mapping[str, Any]) -> str:
    """The SHA-256 of the entries of an index."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason += "; make room and start again with resume=true"
        path = error.filename or path
        raise ValueError(f"the checkpoint {path} cannot be written: {reason}") from error


# --- Parts ---------------------------------------------------------------------------------------


def write_part(path: Path, workers: range, state: Tree) -> dict[str, Any]:
    """Write a part. Return its description for the index."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(_to_cpu(state), hashing)  # type: ignore[arg-type]  # only write and flush are used
        except RuntimeError:
            # torch reports a failed write as its own type of error.
            if hashing.failed is None:
                raise
        if hashing.failed is not None:
            raise hashing.failed
        file.flush()
        os.fsync(file.fileno())
    return {
        "file": path.name,
        "workers": [workers.start, workers.stop],
        "bytes": hashing.size,
        "sha256": hashing.digest.hexdigest(),
    }


def _damage_of(path: Path, part: Mapping[str, Any]) -> str | None:
    """A sentence if the size or the checksum of a part is not that in the index."""
    try:
        size = path.stat().st_size
        if size != part["bytes"]:
            return f"the checkpoint {path} is damaged: {size} bytes instead of {part['bytes']}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part["sha256"]:
                return f"the checkpoint {path} is damaged: SHA-256 checksum mismatch"
    except OSError as error:
        return f"the checkpoint {path} cannot be read: {error.strerror}"
    return None


def _read_part(path: Path, part: Mapping[str, Any]) -> Tree:
    """Read a part. Raises ValueError."""
    try:
        with path.open("rb") as file:
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
    """Tensors on the CPU, each with its own storage: torch.save writes the whole storage."""

    def compact(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu().contiguous()
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if whole else tensor.clone()

    return map_tensors(compact, tree)


def rows_of(tree: Tree, rows: slice) -> Tree:
    """Rows of tensors that have an axis. Other leaves stay."""
    return map_tensors(lambda tensor: tensor[rows] if tensor.ndim else tensor, tree)


def join(trees: Sequence[Tree]) -> Tree:
    """Concatenate tensors that have an axis; other leaves come from the first tree."""
    return map_tensors(
        lambda first, *more: torch.cat((first, *more)) if first.ndim else first, *trees
    )
