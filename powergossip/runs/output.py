"""What a run leaves behind, and how long its phases take: for the entry points.

An output folder holds config.yaml, metrics.jsonl (a row a measurement), info.json, figure.png,
TensorBoard's events if wanted, and checkpoints/ (see checkpoints.py).
"""

import datetime
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from powergossip.errors import Stopped
from powergossip.runs import checkpoints, metrics

FIGURE = "figure.png"
_DATE = "{date}"
DATED = f"output/{_DATE}"  # a new folder; the date comes when it is made
CONFIG_FILE = "config.yaml"
INFO_FILE = "info.json"
_FILES = (metrics.FILE, CONFIG_FILE, INFO_FILE, FIGURE)


def plain_copy(config: DictConfig) -> Any:
    """A copy without types and interpolations. ValueError for a value that cannot be worked out."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # of a value such as ${seed}, where no seed is
        raise ValueError(str(error).replace("\n    full_key", ", key").splitlines()[0]) from error
    return OmegaConf.create(values)


class CannotWrite(Stopped):
    """The output folder takes no more."""

    exit_code = 2


class Output:
    """The folder of a run, with its configuration and the logs opened.

    `wanted`: the folder; None makes a new dated one under output/, and so does a name with {date},
    there and so called. ValueError if it holds a run and neither config.overwrite nor `go_on` is
    set, or cannot be written.

    With `go_on`, what the run has written is kept: its rows up to `offset` bytes (all later ones
    are forgotten).
    """

    def __init__(self, wanted: str | None, config: Any, go_on: bool = False, offset: int = 0):
        dated = not wanted or _DATE in wanted
        self.folder = new_dated_folder(wanted or DATED) if dated else Path(wanted or "")
        self._go_on, self._offset = go_on, offset
        self._logs: list[Any] = []
        self._info: dict[str, Any] = {}
        try:
            self._claim(config)
        except OSError as error:
            raise ValueError(f"output folder {self.folder}: {error.strerror or error}") from error

    def _claim(self, config: Any) -> None:
        folder = self.folder
        held = [folder / name for name in _FILES if (folder / name).exists()]
        held.extend(folder.glob("events.out.tfevents.*"))
        if (folder / checkpoints.FOLDER).exists():
            held.append(folder / checkpoints.FOLDER)
        if self._go_on:
            self._claim_again(config)
            return
        if held and not config.overwrite:
            raise ValueError(
                f"{folder} already holds a run ({held[0].name}); "
                f"use another --output-dir, or overwrite=true"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if config.tensorboard:
            self._logs.append(metrics.TensorBoardLog(folder))
        for file in held:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
        self.rows = metrics.MetricsLog(folder / metrics.FILE, fresh=True)
        self._logs.append(self.rows)

    def _claim_again(self, config: Any) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = metrics.MetricsLog(folder / metrics.FILE, fresh=self._offset == 0)
        self._logs.append(self.rows)
        self.rows.truncate(self._offset)
        if config.tensorboard:
            self._logs.append(metrics.TensorBoardLog(folder))
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
        if (folder / "info.json").exists():
            self._info = json.loads((folder / "info.json").read_text())

    def write(self, name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
        """A row, to all logs. Raises CannotWrite."""
        with self._writing():
            for log in self._logs:
                log.write(name, values, tags)

    def add_info(self, info: Mapping[str, Any]) -> None:
        """Facts, to what info.json has already. Raises CannotWrite."""
        self._info.update(info)
        with self._writing():
            new = self.folder / "info.json.new"
            new.write_text(json.dumps(self._info, indent=1) + "\n")
            new.replace(self.folder / "info.json")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWrite(
                f"output folder {self.folder}: {error.strerror or error}; what is there is kept"
            ) from error

    def close(self) -> None:
        for log in self._logs:
            log.close()


def new_dated_folder(name: str = DATED) -> Path:
    """The folder of this name with DATE-TIME for {date}, made; runs that start in the same second
    get a number behind it."""
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = Path(name.replace(_DATE, now))
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder = Path(name.replace(_DATE, f"{now}-{number}"))
    return folder
