"""The values of keys on a command line, in files and in the configuration of a saved run."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from powergossip import presets, reading
from powergossip.errors import BadInput
from powergossip.runs import metrics
from powergossip.runs.files import CONFIG_FILE
from powergossip.runs.key_help import defaults_of, schema

OPTION = "optimizer_"  # of keys of options of methods


class Assignment(NamedTuple):
    """One key=value. `key` may be dotted. `place` begins an error: "FILE.yaml, line 3: ", or ""."""

    key: str
    value: Any
    place: str
    explicit: bool

    @property
    def name(self) -> str:
        return self.key.partition(".")[0]


def of_argument(text: str) -> Assignment:
    """Parse key=value. Raises BadInput."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f'"{text}" is not an assignment; use key=value')
    try:
        return Assignment(key, reading.value(value), "", explicit=True)
    except reading.Unreadable as error:
        shown = value if len(value) < 80 else f"{value[:80]}…"
        raise BadInput(f"{key}={shown}: the value is not YAML ({error})") from error


def of_file(config: DictConfig, file: str) -> list[Assignment]:
    """The assignments of a --config file. Raises BadInput.

    A file with nearly all keys of every run is a saved configuration, not written by hand. So is
    config.yaml in a folder with the rows of a run. A saved one has options of its method alone.
    """
    path = Path(file)
    content = _read_yaml(f"--config {file}", path)
    beside_rows = path.name == CONFIG_FILE and (path.parent / metrics.FILE).exists()
    run_keys = {key for key in config if not str(key).startswith(OPTION)}
    saved = beside_rows or len(run_keys & content.keys()) > 0.9 * len(run_keys)
    return _assignments(content, file, saved)


def _assignments(
    content: Mapping[Any, tuple[Any, int]], file: object, saved: bool
) -> list[Assignment]:
    """The assignments of a file, key → (value, line)."""
    return [
        Assignment(str(key), value, f"{file}, line {line}: ", not saved)
        for key, (value, line) in content.items()
    ]


def saved_values(folder: Path) -> dict[Any, tuple[Any, int]]:
    """Key → (value, line) of a run's config.yaml. Raises BadInput."""
    file = folder / CONFIG_FILE
    return _read_yaml(str(file), file)


def of_saved_run(config: DictConfig, folder: Path) -> list[Assignment]:
    """The values of a run's config.yaml, for keys that have their defaults in `config`."""
    now: Any = OmegaConf.to_container(config)
    defaults = defaults_of(schema(config))
    values = {
        k: v for k, v in saved_values(folder).items() if k not in now or now[k] == defaults.get(k)
    }
    return _assignments(values, folder / CONFIG_FILE, saved=True)


def config_files(given: Sequence[str]) -> list[str]:
    """The files of `--config`: paths, and the files of the presets that are named, each once."""
    found: list[str] = []
    for name in given:
        if Path(name).is_file():
            found.append(name)
        else:
            paths = [str(path) for path in presets.files(name)]
            found.extend([path for path in paths if path not in found] or [name])
    return found


def _read_yaml(label: str, file: Path) -> dict[Any, tuple[Any, int]]:
    """Key → (value, line from 1) of a file, which errors call by its label. Raises BadInput."""
    try:
        text = reading.text(file)
    except reading.Unreadable as error:
        close = difflib.get_close_matches(str(file), presets.names(), n=3)
        hint = f"; did you mean the preset {' or '.join(close)}?" if close else ""
        raise BadInput(f"{label} cannot be read: {error}{hint}") from error
    try:
        content, lines = reading.document(text)
    except reading.Unreadable as error:
        raise BadInput(f"{label} is not YAML: {error}") from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"contains a {type(content).__name__}"
        raise BadInput(f"{label} {found}; use lines of the form key: value")
    return {key: (value, lines.get(str(key), 1)) for key, value in content.items()}
