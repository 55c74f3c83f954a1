"""Where a task's files lie, whether they are what they were, and how they get there.

They are looked for in `data_dir`; if that is not set, in $DATA, then in places of the task's own
(such as a package of the distribution's), then in the user's cache. In `data_dir` and $DATA a
subfolder with the task's name will do as well. What is in none of these places is fetched from the
Hugging Face hub into the cache.
"""

import gzip
import hashlib
import importlib.util
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"
GZIP_MAGIC = b"\x1f\x8b"
PATIENCE = 5.0  # seconds until the hub counts as out of reach


@dataclass(frozen=True)
class Form:
    """A way in which data come: files with these names."""

    names: tuple[str, ...]
    folder: str = ""  # that the official archive unpacks them into
    suffix: str = ""  # that any of the files may have besides

    def paths(self, place: Path) -> list[Path]:
        """The files in a place: in its folder `folder`, or in itself if that is its name."""
        inside = place if place.name == self.folder else place / self.folder
        plain = [inside / name for name in self.names]
        return [path if path.is_file() else Path(f"{path}{self.suffix}") for path in plain]

    def __str__(self) -> str:
        return f"the folder {self.folder}" if self.folder else self.listed(self.names)

    def listed(self, names: Iterable[str]) -> str:
        """The names of some of its files, for a message."""
        besides = f" (or the same with {self.suffix})" if self.suffix else ""
        return ", ".join(names) + besides


@dataclass(frozen=True)
class Hub:
    """A dataset on the Hugging Face hub, and which files to make of it."""

    name: str
    form: Form
    convert: Callable[[Any], Iterator[tuple[str, bytes]]]  # splits → (name, content) of each file
    arguments: Mapping[str, str] = field(default_factory=dict)  # of datasets.load_dataset


@dataclass(frozen=True)
class Source:
    """What a task needs to have, and where it can come from."""

    task: str
    forms: tuple[Form, ...]  # any of them will do; the first found is taken
    hub: Hub
    places: tuple[Path, ...] = ()  # of the task's own
    remedy: str = ""  # what puts the files there


@dataclass(frozen=True)
class _Problem:
    """Why data were not fetched, and what helps."""

    what: str
    remedy: str = ""


# Finding


def find(source: Source, data_dir: Path | None, download: bool) -> tuple[Form, list[Path]]:
    """The form in which the data were found, and its files. May fetch them first.

    Raises ValueError, saying where it looked and what would do, if they are not to be had.
    """
    if data_dir is not None:
        places = _with_subfolder(data_dir, source.task)
    else:
        places = _with_subfolder(_environment(), source.task)
        places += [*source.places, cache(source.task)]
    found = _first(source.forms, places)
    if found is None and data_dir is not None:
        lacking = [lack for place in places if (lack := _lack(source.forms, place))]
        wanted = lacking[0] if lacking else _any_of(source.forms)
        raise ValueError(f"data_dir={data_dir} lacks {wanted}")
    if found is None:
        problem = _fetch(source) if download else _Problem("download is off", "set download=true")
        found = _first([source.hub.form], [cache(source.task)])
        if found is None:
            assert problem is not None, "what was written is there"
            raise ValueError(_nowhere(source, places, problem))
    return found


def cache(task: str) -> Path:
    """The user's folder for what a task has fetched."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "decentralized-deep-learning" / task


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


def _lack(forms: Sequence[Form], place: Path) -> str:
    """What a place lacks that has some of the files; "" if it has none."""
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
    return f"{'; '.join(others)}; or {last}" if others else last


def _nowhere(source: Source, places: Sequence[Path], problem: _Problem) -> str:
    looked = [] if _environment() else ["$DATA (not set)"]
    for place in places:
        lack = _lack(source.forms, place)
        looked.append(f"{place} (lacks {lack})" if lack else str(place))
    remedies = [source.remedy, f"set data_dir to a folder with {_any_of(source.forms)}"]
    *first, last = [remedy for remedy in (*remedies, problem.remedy) if remedy]
    advice = f"{', '.join(first)}, or {last}" if first else last
    return (
        f"{source.task}'s data are in none of {', '.join(looked)}, and were not fetched: "
        f"{problem.what}. {advice[0].upper()}{advice[1:]}"
    )


# Reading


def read(path: Path) -> bytes:
    """A file's content, verified if its folder or the one above holds a SHA256SUMS that lists it.

    Raises ValueError, naming the file, if it cannot be read or is not the one that is listed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    for folder in (path.parent, path.parent.parent):
        for listed in _sums(folder, path.relative_to(folder)):
            if listed != hashlib.sha256(content).hexdigest():
                raise ValueError(
                    f"{path} does not match {SUMS}; fetch it again, or remove that line"
                )
    return content


def uncompressed(path: Path) -> bytes:
    """As `read`, and decompressed if the file was compressed by gzip; what that cannot undo is a
    ValueError too."""
    content = read(path)
    try:
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three for damaged files
        raise ValueError(f"{path} is damaged or truncated: {error}") from error


def _sums(folder: Path, name: Path) -> Iterator[str]:
    """The sums that a folder lists for a file. ValueError for a line that is none of sha256sum's.

    That format is the sum, a blank, a blank or an asterisk, and the name; a backslash before it
    all says that the name is escaped, which ours never are.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{folder / SUMS} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"\\?([0-9a-fA-F]{64}) [ *](.+)", line)
        if match is None and line.strip():
            raise ValueError(f"{folder / SUMS}: line {number} is not a sum and a name: {line!r}")
        if match is not None and Path(match[2]) == name:
            yield match[1].lower()


# Fetching


def write(folder: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    """Files, (name, content) each, and a SHA256SUMS of them into a folder, made if need be.

    Nothing appears before all is written beside it. Then each file appears complete, whoever does
    the same at the time; SHA256SUMS is first, so that a process that is killed leaves no folder
    that has all files but not their sums.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".incomplete-") as scratch:
        sums = {}
        for name, content in contents:
            (Path(scratch) / name).write_bytes(content)
            sums[name] = hashlib.sha256(content).hexdigest()
        lines = [f"{value}  {name}\n" for name, value in sums.items()]
        (Path(scratch) / SUMS).write_text("".join(lines))
        for name in (SUMS, *sums):
            (Path(scratch) / name).replace(folder / name)


def _fetch(source: Source) -> _Problem | None:
    """Fetch the data from the hub into the cache; what went wrong, if so."""
    hub = source.hub
    problem = _out_of_reach(hub.name)
    if problem is not None:
        return problem
    # Takes seconds, and comes with the extra `data` only.
    import datasets

    try:
        splits = datasets.load_dataset(hub.name, **hub.arguments)
        write(cache(source.task) / hub.form.folder, hub.convert(splits))
    except Exception as error:  # the library lets errors of many others through
        return _Problem(f"{type(error).__name__}: {error}")
    return None


def _out_of_reach(name: str) -> _Problem | None:
    """Why the hub cannot be asked for this dataset, if so; known within `PATIENCE`.

    The library itself repeats its attempts for minutes, and a name lookup cannot be interrupted:
    hence one attempt, in a thread that nobody waits for.
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
