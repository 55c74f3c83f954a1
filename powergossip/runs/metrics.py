"""A run writes rows; tables and figures are functions of a DataFrame of them.

A row is what was measured at one moment: `name` ("accuracy"), `value`, `epoch` (fractions count
within one), `bits` and `messages` (sent by worker 0 since the start), `seconds` (since the start),
and tags that tell it from rows of the same name, e.g. split="test_avg". Rows lie in
OUTPUT_DIR/metrics.jsonl, one JSON object a line. What the functions here look for:

| name                     | tags                 | value                                          |
| ------------------------ | -------------------- | ---------------------------------------------- |
| accuracy, cross_entropy  | split=test_avg       | of the mean model, on test data; a share, nats |
| accuracy                 | split=test, worker=i | of worker i's model                            |
| consensus_distance       | type=params_only     | how far the workers are from their mean        |
| uncompressed_gossip_bits |                      | what plain gossip would have sent by now       |
| phase_seconds            | phase=...            | spent in that phase since the start            |
| error                    | algorithm=..., also  | mean squared distance of the workers to the    |
|                          | diffusion_rate=...,  | mean of their starts; epoch is the step        |
|                          | theta=...            |                                                |
| diverged                 | as error             | the step at which a setting was given up       |

pandas, matplotlib and TensorBoard are imported where they are used: a training process that only
writes rows starts without them.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "metrics.jsonl"
COLUMNS = ("name", "value", "epoch", "bits", "messages", "seconds")


class MetricsLog:
    """The file a run writes its rows to, one JSON object a line.

    A row is handed to the operating system before `write` returns, so that a killed process loses
    at most the row it was writing. `fresh` empties the file; otherwise rows are added, after a last
    line that was cut off has been removed.
    """

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path = Path(path)
        if fresh:
            self.path.write_bytes(b"")
        elif self.path.exists():
            _cut_half_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, name: str, values: Mapping[str, float | int], tags: Mapping[str, Any]) -> None:
        """Add a row. `values`: value, epoch, bits, messages, seconds; `tags`: anything JSON knows.

        NaN and infinity are written as Python's json does. ValueError if a tag is named like a
        value.
        """
        taken = sorted(set(tags) & {"name", *values})
        if taken:
            raise ValueError(f'metric "{name}": a tag cannot be named "{taken[0]}"')
        row = json.dumps({"name": name, **values, **tags}, default=_plain, ensure_ascii=False)
        left = row.encode() + b"\n"
        while left:  # a disk that is almost full takes a part, and then says why not more
            left = left[self._file.write(left) :]

    @property
    def offset(self) -> int:
        """Bytes in the file, for a checkpoint to return to."""
        return os.fstat(self._file.fileno()).st_size

    def synced_offset(self) -> int:
        """`offset`, once all rows are on the disk."""
        os.fsync(self._file.fileno())
        return self.offset

    def truncate(self, offset: int) -> None:
        """Forget the rows written since `offset` was read. ValueError if the file is shorter."""
        if offset > self.offset:
            raise ValueError(
                f"{self.path} has {self.offset} bytes, but the checkpoint was made when it had "
                f"{offset}: it is not the file of this run"
            )
        self._file.truncate(offset)

    def close(self) -> None:
        self._file.close()


class TensorBoardLog:
    """The same rows as TensorBoard scalars, in `output_dir`.

    A scalar is named by the row's name and tags, accuracy/split-test/worker-0; TensorBoard's steps
    are whole numbers, so step is 1000 · epoch. ValueError if TensorBoard is not installed.
    """

    def __init__(self, output_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard=true needs TensorBoard, which is not installed: pip install "
                "tensorboard, or set tensorboard=false"
            ) from error
        self._writer = SummaryWriter(str(output_dir))

    def write(self, name: str, values: Mapping[str, float | int], tags: Mapping[str, Any]) -> None:
        """Add a row's `value` at its `epoch`."""
        scalar = "/".join([name, *(f"{key}-{value}" for key, value in tags.items())])
        step = round(1000 * values.get("epoch", 0))
        self._writer.add_scalar(scalar, values["value"], step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def load(output_dir: Path | str) -> "DataFrame":
    """The rows of a run, in the order written; name, value, epoch, bits, messages, seconds first.

    A tag that a row does not have is NaN. A last line that was cut off is left out; any other line
    that is not a row is left out with a warning that names it. ValueError without such a file.
    """
    import pandas as pd

    path = Path(output_dir) / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"{output_dir} holds no run: {path} cannot be read ({error.strerror})"
        ) from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was cut off
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            warnings.warn(f"{path}, line {number} is not a row; left out", stacklevel=2)
    frame = pd.DataFrame(rows)
    missing = [column for column in COLUMNS if column not in frame]
    frame[missing] = float("nan")
    return frame[[*COLUMNS, *(column for column in frame if column not in COLUMNS)]]


def select_rows(rows: "DataFrame", name: str, **tags: str) -> "DataFrame":
    """The rows of that name and these tags, by epoch."""
    chosen = rows["name"] == name
    for key, value in tags.items():
        chosen = chosen & (rows[key] == value if key in rows else False)
    return rows[chosen].sort_values("epoch", kind="stable")


def last_rows(rows: "DataFrame", name: str, **tags: str) -> "DataFrame":
    """The rows of that name and these tags, of the last epoch that has any."""
    selected = select_rows(rows, name, **tags)
    return selected[selected["epoch"] == selected["epoch"].max()]


def _plain(value: Any) -> Any:
    """What JSON writes for a tensor's or numpy's number, a path, …"""
    return value.item() if hasattr(value, "item") else str(value)


def _cut_half_line(path: Path) -> None:
    """Remove what follows the last newline: a row whose writing was interrupted."""
    with path.open("rb+") as file:
        contents = file.read()
        file.truncate(contents.rfind(b"\n") + 1)
