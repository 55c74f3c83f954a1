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
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powergossip.atomic_files import scratch

GZIP_MAGIC = b"\x1f\x8b"
PATIENCE = 5.0  # seconds until the hub must have answered


@dataclass(frozen=True)
class DataSource:
    """The files of a task: their names, their places, and a dataset on the Hugging Face hub."""

    task: str
    names: tuple[str, ...]
    hub: str  # name of the dataset
    convert: Callable[[Any], Iterator[tuple[str, bytes]]]  # its splits → (name, content) of files
    arguments: Mapping[str, str] = field(default_factory=dict)  # of datasets.load_dataset
    folder: str = ""  # the folder in the official archive
    suffix: str = ""  # optional suffix of each file, such as .gz
    places: tuple[Path, ...] = ()  # specific to the task
    remedy: str = ""  # advice: how to get the files into these places

    def paths(self, place: Path) -> list[Path]:
        """The paths of the files in a place: in its subfolder `folder`, or directly in it."""
        inside = place / self.folder
        plain = [(inside if inside.is_dir() else place) / name for name in self.names]
        return [path if path.is_file() else Path(f"{path}{self.suffix}") for path in plain]

    def missing(self, place: Path) -> list[str]:
        """The missing files of a place."""
        paths = [path for path in self.paths(place) if not path.is_file()]
        return [str(path.relative_to(place)).removesuffix(self.suffix) for path in paths]

    def listed(self, names: Sequence[str]) -> str:
        """Some of its files, for an error message."""
        if self.folder and len(names) == len(self.names):
            return f"the folder {self.folder}"
        alternative = f" (or the same with {self.suffix})" if self.suffix else ""
        return ", ".join(names) + alternative


@dataclass(frozen=True)
class _Problem:
    """The reason why data were not downloaded, and a remedy."""

    reason: str
    remedy: str = ""


# Finding


def find(source: DataSource, data_dir: Path | None, download: bool) -> list[Path]:
    """Find the files, or download them.

    Raises ValueError, with the places searched and the remedies, if they cannot be found.
    """
    if data_dir is not None:
        places = _with_subfolder(data_dir, source.task)
    else:
        places = _with_subfolder(_environment(), source.task)
        places += [*source.places, cache(source.task)]
    for place in places:
        if not source.missing(place):
            return source.paths(place)
    if data_dir is not None:
        fewest = min((source.missing(place) for place in places), key=len)
        raise ValueError(f"data_dir={data_dir}: use a folder with {source.listed(fewest)}")
    problem = _fetch(source) if download else _Problem("download is off", "set download=true")
    if problem is not None:
        raise ValueError(_not_found(source, places, problem))
    return source.paths(cache(source.task))


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


def _not_found(source: DataSource, places: Sequence[Path], problem: _Problem) -> str:
    searched = [] if _environment() else ["$DATA (not set)"]
    for place in places:
        missing = source.missing(place)
        some = len(missing) < len(source.names)
        searched.append(f"{place} (lacks {source.listed(missing)})" if some else str(place))
    remedies = [source.remedy, f"set data_dir to a folder with {source.listed(source.names)}"]
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
    problem = out_of_reach(source.hub)
    if problem is not None:
        return problem
    # Imported here because it takes seconds and belongs to the extra `data`.
    import datasets

    try:
        splits = datasets.load_dataset(source.hub, **source.arguments)
        write(cache(source.task) / source.folder, source.convert(splits))
    except Exception as error:  # of any type: the library passes on errors of others
        return _Problem(f"{type(error).__name__}: {error}")
    return None


def out_of_reach(name: str) -> _Problem | None:
    """The problem with reaching this dataset on the hub, if there is one.

    One attempt: the library retries for minutes.
    """
    if importlib.util.find_spec("datasets") is None:
        return _Problem("Hugging Face datasets is not installed", "pip install datasets")
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=PATIENCE)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        reason = f"the Hugging Face hub is out of reach ({type(error).__name__}: {first_line})"
        return _Problem(reason, "connect to the internet")
    return None
