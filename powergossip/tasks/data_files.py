"""Data files: search and download.

The files of a task are searched for in `data_dir`. Without it, they are searched for in $DATA, in
places specific to the task (such as a package of the distribution) and in the user's cache.
`data_dir` and $DATA may also have them in a subfolder with the name of the task. Files found in
none of these places are downloaded from the Hugging Face hub to the cache.
"""

import gzip
import importlib.util
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powergossip.atomic_files import scratch

GZIP_MAGIC = b"\x1f\x8b"
PATIENCE = 5.0  # seconds: timeout of the hub


@dataclass(frozen=True)
class Form:
    """A form of a data set: files with these names."""

    names: tuple[str, ...]
    folder: str = ""  # the folder in the official archive
    suffix: str = ""  # optional suffix of each file, such as .gz

    def paths(self, place: Path) -> list[Path]:
        """The paths of the files in a place: in its subfolder `folder`, or directly in `folder`."""
        inside = place if place.name == self.folder else place / self.folder
        plain = [inside / name for name in self.names]
        return [path if path.is_file() else Path(f"{path}{self.suffix}") for path in plain]

    def __str__(self) -> str:
        return f"the folder {self.folder}" if self.folder else self.listed(self.names)

    def listed(self, names: Iterable[str]) -> str:
        """Some of its file names, for an error message."""
        alternative = f" (or the same with {self.suffix})" if self.suffix else ""
        return ", ".join(names) + alternative


@dataclass(frozen=True)
class Hub:
    """A dataset on the Hugging Face hub, and its conversion to files of a form."""

    name: str
    form: Form
    convert: Callable[[Any], Iterator[tuple[str, bytes]]]  # splits → (name, content) of each file
    arguments: Mapping[str, str] = field(default_factory=dict)  # of datasets.load_dataset


@dataclass(frozen=True)
class DataSource:
    """The data of a task: accepted forms and places."""

    task: str
    forms: tuple[Form, ...]  # alternatives, in order of preference
    hub: Hub
    places: tuple[Path, ...] = ()  # specific to the task
    remedy: str = ""  # advice: how to get the files into these places


@dataclass(frozen=True)
class _Problem:
    """The reason why data were not downloaded, and a remedy."""

    reason: str
    remedy: str = ""


# Finding


def find(source: DataSource, data_dir: Path | None, download: bool) -> tuple[Form, list[Path]]:
    """Find the data, or download them: their form and its files.

    Raises ValueError, with the places searched and the remedies, if the data cannot be found.
    """
    if data_dir is not None:
        places = _with_subfolder(data_dir, source.task)
    else:
        places = _with_subfolder(_environment(), source.task)
        places += [*source.places, cache(source.task)]
    found = _first(source.forms, places)
    if found is None and data_dir is not None:
        missing = [files for place in places if (files := _missing(source.forms, place))]
        accepted = missing[0] if missing else _any_of(source.forms)
        raise ValueError(f"data_dir={data_dir}: use a folder with {accepted}")
    if found is None:
        problem = _fetch(source) if download else _Problem("download is off", "set download=true")
        found = _first([source.hub.form], [cache(source.task)])
        if found is None:
            assert problem is not None, "a successful download is in the cache"
            raise ValueError(_not_found(source, places, problem))
    return found


def cache(task: str) -> Path:
    """The user's folder for downloads of a task. Without a home folder, a temporary one."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        place = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        place = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return place / "decentralized-deep-learning" / task


def _environment() -> Path | None:
    value = os.environ.get("DATA")
    return Path(value).expanduser() if value else None


def _with_subfolder(folder: Path | None, task: str) -> list[Path]:
    return [] if folder is None else [folder, folder / task]


def _first(forms: Iterable[Form], places: Sequence[Path]) -> tuple[Form, list[Path]] | None:
    for place in places:
        for form in forms:
            paths = form.paths(place)
            if all(path.is_file() for path in paths):
                return form, paths
    return None


def _missing(forms: Sequence[Form], place: Path) -> str:
    """The missing files of a place that has some of the files; "" for any other place."""
    for form in forms:
        there = [path.is_file() for path in form.paths(place)]
        if any(there):
            pairs = zip(form.names, there, strict=True)
            return form.listed(
                str(Path(form.folder, name)) for name, is_there in pairs if not is_there
            )
    return ""


def _any_of(forms: Sequence[Form]) -> str:
    *others, last = map(str, forms)
    return f"one of: {'; '.join(others)}; {last}" if others else last


def _not_found(source: DataSource, places: Sequence[Path], problem: _Problem) -> str:
    searched = [] if _environment() else ["$DATA (not set)"]
    for place in places:
        missing = _missing(source.forms, place)
        searched.append(f"{place} (lacks {missing})" if missing else str(place))
    remedies = [source.remedy, f"set data_dir to a folder with {_any_of(source.forms)}"]
    *first, last = [remedy for remedy in (*remedies, problem.remedy) if remedy]
    advice = f"{', '.join(first)}, or {last}" if first else last
    return (
        f"the data of task {source.task} are in none of {', '.join(searched)}, and were not "
        f"downloaded: {problem.reason}; {advice}"
    )


# Reading


def read(path: Path) -> bytes:
    """The content of a file. Raises ValueError, with the path, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def uncompressed(path: Path) -> bytes:
    """Read a file as `read` does, and decompress it if it is gzipped.

    Raises ValueError for a damaged gzip file, too.
    """
    content = read(path)
    try:
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three for damaged files
        raise ValueError(f"{path} is damaged or truncated: {error}") from error


# Downloading


def write(folder: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    """Write files, (name, content) each, to a folder, which is created.

    All files are first written to a temporary folder and then renamed: each appears complete, even
    if several processes write concurrently.
    """
    with scratch(folder) as place:
        names = []
        for name, content in contents:
            (place / name).write_bytes(content)
            names.append(name)
        for name in names:
            (place / name).replace(folder / name)


def _fetch(source: DataSource) -> _Problem | None:
    """Download the data from the hub to the cache; the problem, if there was one."""
    hub = source.hub
    problem = out_of_reach(hub.name)
    if problem is not None:
        return problem
    # Imported here because it takes seconds and belongs to the extra `data`.
    import datasets

    try:
        splits = datasets.load_dataset(hub.name, **hub.arguments)
        write(cache(source.task) / hub.form.folder, hub.convert(splits))
    except Exception as error:  # of any type: the library passes on errors of others
        return _Problem(f"{type(error).__name__}: {error}")
    return None


def out_of_reach(name: str) -> _Problem | None:
    """The problem with reaching this dataset on the hub, if there is one, within `PATIENCE`.

    The library retries for minutes, and a name lookup cannot be interrupted. Hence one attempt, in
    a daemon thread that may outlive the call.
    """
    if importlib.util.find_spec("datasets") is None:
        return _Problem("Hugging Face datasets is not installed", "pip install datasets")
    from huggingface_hub import HfApi

    found = [f"the Hugging Face hub did not answer within {PATIENCE:g} s"]

    def ask() -> None:
        try:
            HfApi().dataset_info(name, timeout=PATIENCE)
            found.clear()
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            found[0] = (
                f"the Hugging Face hub is out of reach ({type(error).__name__}: {first_line})"
            )

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return _Problem(found[0], "connect to the internet") if found else None
