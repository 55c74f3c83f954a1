"""The rows of a run. Tables and figures are functions of a DataFrame of rows.

A row is a measurement: `name` ("accuracy"), `value`, `epoch` (with a fraction within an epoch),
`bits` and `messages` (sent by worker 0 since the start), `seconds` (since the start), and tags that
distinguish rows of the same name, such as split="test_avg". The file OUTPUT_DIR/metrics.jsonl has
one JSON object per line. The tables and figures use these rows::

    name                     | tags                 | value
    ------------------------ | -------------------- | ----------------------------------------------
    accuracy, cross_entropy  | split=test_avg       | of the mean model, test data (fraction, nats)
    accuracy                 | split=test, worker=i | of worker i's model
    consensus_distance       | type=params_only     | distance of the workers from their mean
    uncompressed_gossip_bits |                      | bits of plain gossip for the same steps
    merge_bits               |                      | bits of an all-reduce of models that differ
    phase_seconds            | phase=...            | time in that phase since the start
    skipped_blocks           | instances=...        | parts of messages of few bits left out, of all
    error                    | algorithm=..., and   | mean squared distance of the workers from the
                             | diffusion_rate=...,  | mean of the starting matrices (epoch: the
                             | theta=... of a grid  | step)
    diverged                 | as error             | the step at which a setting diverged

pandas and matplotlib are imported where they are used, so that a training process that only writes
rows starts without them.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powergossip.atomic_files import naming

if TYPE_CHECKING:
    from pandas import DataFrame, Series

FILE = "metrics.jsonl"
COLUMNS = ("name", "value", "epoch", "bits", "messages", "seconds")


# name, values, tags
Row = tuple[str, Mapping[str, float], Mapping[str, Any]]


def _ignore(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Hooks:
    """The functions that receive a run's measurements.

    They are called on process 0 only, or if that is lost, on the first surviving one.

    Attributes:
        log_metric: Function of (name, values, tags).
        log_info: Function of (facts).
        log_runtime: Function of (label, mean, std, instances), in seconds.
        take_over: Function of (the latest rows, index of this process), called before the others
            where process 0 was lost.
        progress: Function of (algorithm of gossip_run.py, completed steps of all its settings).
    """

    log_metric: Callable[[str, Mapping[str, float], Mapping[str, Any]], None] = _ignore
    log_info: Callable[[Mapping[str, Any]], None] = _ignore
    log_runtime: Callable[[str, float, float, int], None] = _ignore
    take_over: Callable[[Sequence[Row], int], None] = _ignore
    progress: Callable[[str, int], None] = _ignore


class MetricsLog:
    """The file of a run's rows, one JSON object per line.

    A row is passed to the operating system before `write` returns. A killed process loses at most
    the row that it was writing. Rows are appended to those in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("a+b", buffering=0)

    def write(self, name: str, values: Mapping[str, float | int], tags: Mapping[str, Any]) -> None:
        """Append a row.

        NaN and infinity are written as in Python's json.

        Args:
            values: Keys value, epoch, bits, messages and seconds.
            tags: JSON values.

        Raises:
            ValueError: If a tag has the name of a value.
        """
        taken = sorted(set(tags) & {"name", *values})
        if taken:
            raise ValueError(f'metric "{name}": a tag cannot be named "{taken[0]}"')
        row = json.dumps({"name": name, **values, **tags}, default=_plain, ensure_ascii=False)
        left = row.encode() + b"\n"
        while left:  # on an almost full disk, the first write is short and the next one fails
            left = left[self._file.write(left) :]

    def offset(self) -> int:
        """Size of the file in bytes, which a checkpoint stores. All rows are on the disk then."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def kept_rows(path: Path, offset: int, allow_lost_rows: bool = False) -> bytes:
    """Return the complete rows among the first `offset` bytes.

    `offset` is the size at the time of a checkpoint.

    Raises:
        ValueError: If the file no longer has rows of that size, unless `allow_lost_rows`.
    """
    contents = path.read_bytes()[:offset] if offset and path.exists() else b""
    kept = contents[: contents.rfind(b"\n") + 1]
    if len(kept) < offset and not allow_lost_rows:
        raise ValueError(
            f"{path} has {len(kept)} bytes of rows of the {offset} at the time of the checkpoint; "
            "restore it, or resume with the rows that are left: resume=true allow_lost_rows=true"
        )
    return kept


def complete_bytes(path: Path) -> int:
    """Return the size of all complete rows."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def last_epoch(rows: bytes) -> float:
    """Return the epoch of the last of some rows of a file, or 0 without rows."""
    for line in reversed(rows.splitlines()):
        try:
            return float(json.loads(line)["epoch"])
        except (ValueError, KeyError, TypeError):  # not a row
            continue
    return 0.0


def load(output_dir: Path | str) -> "DataFrame":
    """Return the rows of a run in the order of the file. Its first columns are COLUMNS.

    A tag that a row does not have is NaN. An incomplete last line is ignored. Any other line that
    is not a row is skipped with a warning that names it.

    Raises:
        ValueError: If there is no such file.
    """
    path = Path(output_dir) / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"{output_dir} contains no run: {path} cannot be read ({error.strerror})"
        ) from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # the part after the last newline is incomplete
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            warnings.warn(f"{path}, line {number} is not a row; left out", stacklevel=2)
    return frame(rows)


def frame(rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    """Return rows, mappings of name, values and tags, as `load` does."""
    import pandas as pd

    found = pd.DataFrame(rows)
    missing = [column for column in COLUMNS if column not in found]
    found[missing] = float("nan")
    return found[[*COLUMNS, *(column for column in found if column not in COLUMNS)]]


def select_rows(rows: "DataFrame", name: str, **tags: str) -> "DataFrame":
    """Return the rows of that name and these tags, ordered by epoch."""
    chosen = rows["name"] == name
    for key, value in tags.items():
        chosen = chosen & (rows[key] == value if key in rows else False)
    return rows[chosen].sort_values("epoch", kind="stable")


def last_rows(rows: "DataFrame", name: str, **tags: str) -> "DataFrame":
    """Return the rows of that name and these tags at the last epoch that has such rows."""
    selected = select_rows(rows, name, **tags)
    return selected[selected["epoch"] == selected["epoch"].max()]


def last_values(rows: "DataFrame", name: str, **tags: str) -> "Series":
    """Return the values of `last_rows`. Empty if there are no such rows."""
    return last_rows(rows, name, **tags)["value"]


def _plain(value: Any) -> Any:
    """A JSON value for a scalar tensor, a numpy scalar, a path, …"""
    return value.item() if hasattr(value, "item") else str(value)
