"""The output folder of a run.

Contents::

    config.yaml      all keys and their values
    metrics.jsonl    a row for each measurement, see metrics.py
    info.json        metadata and progress
    figure.png
    sample.txt       a text, of tasks that have one
    checkpoints/     see checkpoints.py
    .drafts-…/       while the run lasts, see atomic_files.py
    events.out.…     for TensorBoard, if configured
    wandb/           for Weights & Biases, if configured
"""

import datetime
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from powergossip.atomic_files import Drafts, clear_drafts
from powergossip.checks import BadValue
from powergossip.errors import BadInput, CannotWrite
from powergossip.runs import assignments, checkpoints, metrics
from powergossip.runs.files import CONFIG_FILE, DATE, DATED, FIGURE, INFO_FILE, SAMPLE
from powergossip.runs.trackers import Resumed, Trackers

ENDING = "state.ending"  # in info.json: COMPLETE, or the name of an exception
COMPLETE = "complete"
TRACKERS = "trackers"  # in info.json: the identity of the run in each tracker
# Keys of a command, not of the run: config.yaml has their defaults, so that it repeats the run.
_OF_COMMAND = {"allow_lost_rows": False, "checkpoint": "last", "overwrite": False, "resume": False}
_FILES = (metrics.FILE, INFO_FILE, FIGURE, SAMPLE, CONFIG_FILE)
_KEYS = {"log_verbosity", "n_workers", "overwrite"}  # in each config.yaml of this program


class Output:
    """The folder of a run, with its configuration and open logs.

    Methods, too, raise Dropped if another process has taken over. A process that was stopped then
    changes nothing when it continues, see atomic_files.Drafts.

    Args:
        name: Name of the folder, where {date} stands for the date of a new one. None: DATED.
        config: The configuration by key, with `overwrite`, `tensorboard` and, optionally,
            `trackers`.
        offset: Size in bytes of the rows of a run to resume. None: begin a run.
        allow_lost_rows: True if a run resumes although some of these rows are missing.
        process: Index of this process.
        takes_over: True if this process replaces one that was lost during the run.

    Attributes:
        folder: Path of the folder.
        lost_rows: True if rows were missing.

    Raises:
        ValueError: If the folder cannot be written, contains a run although neither overwrite nor
            `offset` is set, lacks rows of a run to resume, or if a tracker cannot begin or continue
            its run. Nothing is changed then.
    """

    def __init__(
        self,
        name: str | None,
        config: Mapping[str, Any],
        offset: int | None = None,
        allow_lost_rows: bool = False,
        process: int = 0,
        takes_over: bool = False,
    ):
        dated = not name or DATE in name
        self.folder = new_dated_folder(name or DATED) if dated else Path(name or "")
        self._drafts = Drafts(self.folder, process)
        self.lost_rows = False
        self._info: dict[str, Any] = {}
        try:
            if offset is None:
                self._start(config)
            else:
                self._resume(config, offset, allow_lost_rows, takes_over)
        except BaseException as error:
            self._drafts.close()
            if not isinstance(error, OSError):
                raise
            raise ValueError(f"output folder {self.folder}: {error.strerror or error}") from error

    def _start(self, config: Mapping[str, Any]) -> None:
        folder = self.folder
        if folder.is_file():
            raise ValueError(f"--output-dir {folder} is a file; use a folder")
        held = [folder / name for name in _FILES if os.path.lexists(folder / name)]
        held.extend(list(folder.glob(f"{checkpoints.FOLDER}/*"))[:1])
        is_run = _is_run(folder)
        if held and not is_run:
            raise ValueError(f"{held[0]} is of no run of this program; use another --output-dir")
        if held and not config["overwrite"]:
            raise ValueError(
                f"{folder} already holds a run ({held[0].name}); "
                f"use another --output-dir, or overwrite=true"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._trackers = Trackers(folder, config)
        if is_run:
            checkpoints.clear(folder)
            for file in (*map(folder.joinpath, _FILES), *folder.glob("events.out.tfevents.*")):
                file.unlink(missing_ok=True)
        clear_drafts(folder)
        self._begin(config, b"")

    def _resume(
        self, config: Mapping[str, Any], offset: int, allow_lost_rows: bool, takes_over: bool
    ) -> None:
        folder = self.folder
        if takes_over:
            self._drafts.take_over()
        kept = metrics.kept_rows(folder / metrics.FILE, offset, allow_lost_rows)
        self.lost_rows = len(kept) < offset
        self._info = _read_info(folder / INFO_FILE)
        resumed = Resumed(metrics.last_epoch(kept), self._info.get(TRACKERS, {}))
        self._trackers = Trackers(folder, config, resumed)
        self._info.pop(ENDING, None)
        if not takes_over:
            clear_drafts(folder)
            clear_drafts(folder / checkpoints.FOLDER)
        self._begin(config, kept)

    def _begin(self, config: Mapping[str, Any], rows: bytes) -> None:
        """Write the configuration and the first rows, to a new file: a process that was lost may
        have that before open, and append to it."""
        self._drafts.begin()
        if self._trackers.facts:
            self._info[TRACKERS] = {**self._info.get(TRACKERS, {}), **self._trackers.facts}
        of_run = {key: _OF_COMMAND.get(str(key), value) for key, value in config.items()}
        text = OmegaConf.to_yaml(OmegaConf.create(of_run))
        self._drafts.replace(CONFIG_FILE, text.encode(), sync=True)
        self._drafts.replace(metrics.FILE, rows, sync=True)
        self.rows = metrics.MetricsLog(self.folder / metrics.FILE)

    def write(self, name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
        """Write a row to metrics.jsonl and to the trackers. Raises CannotWrite."""
        with self._writing():
            self.rows.write(name, values, tags)
        self._trackers.write(name, values, tags)

    def add_info(self, info: Mapping[str, Any], sync: bool = True) -> None:
        """Add to info.json, and pass pending rows on to the trackers. Raises CannotWrite.

        With `sync`, the file survives a power failure.
        """
        self._trackers.flush()
        self._info.update(info)
        text = json.dumps(self._info, indent=1) + "\n"
        with self._writing():
            self._drafts.replace(INFO_FILE, text.encode(), sync)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drafts.check()
            raise CannotWrite(
                f"output folder {self.folder}: {error.strerror or error}; existing files are kept"
            ) from error

    def close(self, ending: str | None = None) -> None:
        """Close the files and end the run in the trackers.

        Args:
            ending: Ending for info.json: COMPLETE, or the name of the exception that ended the run.
        """
        complete = ending in (None, COMPLETE)
        if ending is not None:
            with suppress(CannotWrite):  # another exception may be on its way
                self.add_info({ENDING: ending})
        try:
            with nullcontext() if complete else suppress(CannotWrite), self._writing():
                self.rows.close()
        finally:
            self._drafts.close()
            self._trackers.close(complete)


def take_over(
    folder: Path,
    config: Mapping[str, Any],
    rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, Any]]],
    process: int,
) -> Output:
    """The output of a run whose writer was lost, with the latest rows that the file lacks.

    Args:
        process: Index of this process.

    Raises:
        CannotWrite: If the folder cannot be written.
        Dropped: If a higher process has taken over.
    """
    offset = metrics.complete_bytes(folder / metrics.FILE)
    try:
        output = Output(str(folder), config, offset, takes_over=True, process=process)
    except ValueError as error:
        raise CannotWrite(str(error)) from error
    with (folder / metrics.FILE).open() as lines:
        found = [json.loads(line) for line in lines]
    written, last = {_identity(row) for row in found}, found[-1]["epoch"] if found else 0
    for name, values, tags in rows:
        row = {"name": name, **values, **tags}
        if values["epoch"] >= last and _identity(row) not in written:
            output.write(name, values, tags)
    return output


def _identity(row: Mapping[str, Any]) -> str:
    """The name, the epoch and the tags of a row, as text. Another process has measured others."""
    measured = {*metrics.COLUMNS, "instances"} - {"name", "epoch"}
    return json.dumps({key: value for key, value in row.items() if key not in measured})


def run_to_resume(name: str | None, resume: bool | str, key: str = "resume") -> Path | None:
    """Return the folder of the run to resume. None: begin one.

    Args:
        resume: False, True, or "auto": begin a run if the folder has none.
        key: Name of the key in errors.

    Raises:
        ValueError: For another value of `resume`, without a name, and for True if the folder has no
            run.
    """
    if resume is False:
        return None
    if resume is not True and resume != "auto":
        raise BadValue(key, resume, "true, false or auto")
    given = f"{key}={str(resume).lower()}"
    if name is None:
        raise ValueError(f"{given}: give the run's folder with --output-dir")
    folder = Path(name)
    if (folder / CONFIG_FILE).exists():
        return folder
    if (folder / checkpoints.FOLDER).exists():
        raise ValueError(
            f"{given}: {folder / CONFIG_FILE} is missing; restore it, or begin a run with "
            "another --output-dir"
        )
    if resume is True:
        raise ValueError(
            f"{given}: {folder} has no run; give the folder of a run with --output-dir"
            + (", or begin one with resume=auto" if key == "resume" else "")
        )
    return None


def _is_run(folder: Path) -> bool:
    """True if a folder has a run of this program."""
    try:
        return assignments.saved_values(folder).keys() >= _KEYS
    except BadInput:
        return False


def _read_info(path: Path) -> dict[str, Any]:
    """The contents of info.json. Nothing, with a warning, if a power failure has damaged it."""
    try:
        info = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        info = None
    if not isinstance(info, dict):
        warnings.warn(f"{path} is damaged; it is written again", stacklevel=2)
    return info if isinstance(info, dict) else {}


def new_dated_folder(name: str = DATED) -> Path:
    """Make the folder of this name, with DATE-TIME for {date}, and -2, -3, … if it exists."""
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = Path(name.replace(DATE, now))
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder = Path(name.replace(DATE, f"{now}-{number}"))
    return folder
