"""The state of a run on disk, so that it can go on from there: after a crash, a time limit, or in
another layout of processes.

A state is a tree of dicts and lists. Its tensors with an axis are [worker, ...], a row for each
worker that the process hosts; its other leaves (numbers, words, None, tensors without an axis) are
the same in all processes. Each process writes the part of its own workers, and whoever hosts a
worker later reads its rows from the part they are in; all processes must see the same folder.

    OUTPUT_DIR/checkpoints/
        index.json                which folders are the last and the best, what they were made of
        step-000490/part-3.pt     the workers of process 3

The index is replaced, in one piece, when all parts of a new checkpoint are on the disk: a process
that is killed while it writes leaves the previous checkpoints as they were. Folders that the index
does not name are removed by the next `save`.
"""

import errno
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from powergossip.network import Processes

FOLDER = "checkpoints"
_INDEX = "index.json"
_VERSION = 1

Tree = Any  # dict[str, Tree] | list[Tree] | Tensor | int | float | str | None


class Checkpoints:
    """The last and the best state of the run in an output folder.

    Every method is called by all processes at the same time, and raises errors.BadInput in all of
    them if a file cannot be written, read, or is not what the index says.
    """

    def __init__(self, output_dir: Path, who: Processes):
        self._folder = Path(output_dir) / FOLDER
        self._who = who

    def save(
        self,
        step: int,
        workers: range,
        state: Tree,
        facts: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Write the state of the hosted `workers` after so many steps.

        facts   what process 0 wants to know again, anything JSON knows: `describe` returns it
        score   the larger, the better; the checkpoint with the largest so far is kept as the best
        """
        who = self._who
        name = who.broadcast(self._new_name(step) if who.rank == 0 else "")
        folder = self._folder / name

        def write() -> dict[str, Any]:
            folder.mkdir(parents=True, exist_ok=True)
            return _write_part(folder / f"part-{who.rank}.pt", workers, state)

        try:
            parts = who.gather(who.agree(write))
            who.agree(lambda: self._publish(name, step, parts, facts, score) if not who.rank else 0)
        except ValueError:
            if who.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def describe(self, which: str = "last") -> dict[str, Any] | None:
        """step, score and facts of the "last" or "best" checkpoint; None if there is none."""
        who = self._who
        found = who.agree(lambda: self._entry(which) if who.rank == 0 else None)
        return who.broadcast(found)

    def load(self, workers: range, which: str = "last") -> Tree:
        """The state of these workers, tensors on the CPU; there must be such a checkpoint."""
        return self._who.agree(lambda: self._load(workers, which))

    # --- The index ---

    def _index(self) -> dict[str, Any]:
        path = self._folder / _INDEX
        try:
            index = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); restore it or remove it") from error
        if not isinstance(index, dict) or index.get("version") != _VERSION:
            raise ValueError(f"{path} is of another version of this program; use the one it is of")
        return index

    def _entry(self, which: str) -> dict[str, Any] | None:
        entry: dict[str, Any] | None = self._index().get(which)
        return entry

    def _new_name(self, step: int) -> str:
        """Not that of an earlier checkpoint of the same step, which is kept until this is there."""
        name, number = f"step-{step:06d}", 1
        while (self._folder / name).exists():
            number += 1
            name = f"step-{step:06d}-{number}"
        return name

    def _publish(
        self,
        name: str,
        step: int,
        parts: Sequence[dict[str, Any]],
        facts: Mapping[str, Any],
        score: float | None,
    ) -> None:
        entry = {
            "folder": name,
            "step": step,
            "score": score,
            "parts": list(parts),
            "facts": dict(facts),
        }
        best = self._entry("best")
        if score is not None and (best is None or score > best["score"]):
            best = entry
        _sync(self._folder / name)
        index = {"version": _VERSION, "last": entry, "best": best}
        path, new = self._folder / _INDEX, self._folder / f"{_INDEX}.new"
        with new.open("wb") as file:
            file.write(json.dumps(index, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(self._folder)
        named = {entry["folder"], best["folder"] if best else name}
        for other in self._folder.iterdir():
            if other.is_dir() and other.name not in named:
                shutil.rmtree(other, ignore_errors=True)

    def _load(self, workers: range, which: str) -> Tree:
        entry = self._entry(which)
        assert entry is not None, f"no {which} checkpoint"
        pieces = []
        for part in entry["parts"]:
            first, stop = part["workers"]
            wanted = range(max(first, workers.start), min(stop, workers.stop))
            if wanted:
                state = _read_part(self._folder / entry["folder"] / part["file"], part)
                pieces.append(_rows(state, slice(wanted.start - first, wanted.stop - first)))
        return _join(pieces)


# --- Parts ---------------------------------------------------------------------------------------


def _write_part(path: Path, workers: range, state: Tree) -> dict[str, Any]:
    """Write a file; returns what the index says of it."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(_to_cpu(state), hashing)  # type: ignore[arg-type]  # it only writes
        except RuntimeError:
            # torch reports a failed write as an error of its own.
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
    """Read a file and hold it against the index. Raises ValueError."""
    remedy = "restore it, or remove the folder checkpoints to start from the beginning"
    try:
        size = path.stat().st_size
        if size != part["bytes"]:
            raise ValueError(
                f"the checkpoint {path} is damaged: it has {size} bytes, not {part['bytes']}; "
                f"{remedy}"
            )
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part["sha256"]:
                raise ValueError(
                    f"the checkpoint {path} is damaged: its SHA-256 is another; {remedy}"
                )
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read: {error.strerror}; {remedy}"
        ) from error
    except (RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"the checkpoint {path} is damaged: {error}; {remedy}") from error


class _Hashing:
    """A file to write to that remembers how much was written, its hash, and a failure.

    A failure is remembered, not raised: torch's writer does not survive an exception.
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


def _sync(folder: Path) -> None:
    """Make sure that the names in a folder outlive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Trees ---------------------------------------------------------------------------------------


def _map(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The tree with each tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _map(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_map(value, change) for value in tree]
    return tree


def _to_cpu(tree: Tree) -> Tree:
    """Tensors on the CPU that own no more memory than they show: torch.save writes all of it."""

    def alone(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu().contiguous()
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if whole else tensor.clone()

    return _map(tree, alone)


def _rows(tree: Tree, rows: slice) -> Tree:
    return _map(tree, lambda tensor: tensor[rows] if tensor.ndim else tensor)


def _join(trees: Sequence[Tree]) -> Tree:
    """Tensors with an axis one below the other; the rest as in the first tree."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(list(trees)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: _join([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list):
        return [_join(values) for values in zip(*trees, strict=True)]
    return first
