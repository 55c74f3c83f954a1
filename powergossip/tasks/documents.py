"""Documents for language modeling: files of text, their topics and their splits.

`DATASETS` maps names to functions that find the files. Any other name is the path of a folder or of
a file, or a glob pattern. The topic of a document is the top-level folder that it is in. Documents
directly in the root have the topic "".
"""

import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from powergossip.checks import BadValue
from powergossip.tasks import data_files
from powergossip.tasks.shards import number_held_out
from powergossip.tasks.task import Split

TEST_RATIO = 0.05  # fraction of the documents that are for testing
LINUX_DOC = Path("/usr/share/doc/linux-doc-6.1/html/_sources")
# Folders of Python's library that are not its sources
NOT_OF_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Documents:
    """Files of text, sorted by path."""

    dataset: str  # the value of the task option
    root: Path
    names: tuple[str, ...]  # paths relative to the root

    def topic(self, name: str) -> str:
        """The top-level folder of a document."""
        first, slash, _ = name.partition("/")
        return first if slash else ""

    def read(self, name: str) -> bytes:
        """The content of a document, decompressed if it is gzipped.

        Raises ValueError if it cannot be read, or is not a text in UTF-8, or contains a byte 0.
        """
        path = self.root / name
        content = data_files.uncompressed(path)
        try:
            if "\0" not in content.decode():
                return content
            reason = "it has a byte 0"
        except UnicodeDecodeError as error:
            reason = str(error)
        raise ValueError(f"{path} is no text in UTF-8: {reason}")

    def splits(self, validation_ratio: float) -> dict[Split, list[str]]:
        """The documents of each split, without empty ones. "valid" only if some are held out.

        Documents that differ in white space only are in the same split. The choice is by the
        SHA-256 of their content, and thus the same for all seeds and numbers of workers.

        Raises ValueError if there are fewer than two different documents, and for a ratio that
        leaves a split without documents.
        """
        by_hash: dict[bytes, list[str]] = {}
        for name in self.names:
            words = self.read(name).split()
            if words:
                by_hash.setdefault(hashlib.sha256(b" ".join(words)).digest(), []).append(name)
        if len(by_hash) < 2:
            raise BadValue(
                "task_options.dataset",
                self.dataset,
                f"2 or more different documents that are not empty; {self.root} has "
                f"{len(by_hash)} in {len(self.names)} files",
            )
        n_test = max(1, round(TEST_RATIO * len(by_hash)))
        n_valid = number_held_out(len(by_hash) - n_test, validation_ratio)
        found: dict[Split, list[str]] = {"train": [], "valid": [], "test": []}
        for i, key in enumerate(sorted(by_hash)):
            held: Split = "test" if i < n_test else "valid"
            found["train" if i >= n_test + n_valid else held] += by_hash[key]
        return {split: sorted(names) for split, names in found.items() if names}


def python(data_dir: Path | None) -> Documents:
    """The sources of Python's standard library, without its tests. They come with Python.

    Version 3.11 has 12 MB.

    Args:
        data_dir: Folder of the documents. None: the running Python's.
    """
    root = data_dir or Path(sysconfig.get_paths()["stdlib"])
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    names = (path.as_posix() for path in found if not NOT_OF_PYTHON & set(path.parts))
    return _documents("python", root, names, "set data_dir to a folder with *.py")


def linux_doc(data_dir: Path | None) -> Documents:
    """The documentation of Linux 6.1: 24 MB, and 2.8 MB of them in languages other than English.

    Args:
        data_dir: Folder of the documents. None: the one of Debian's package linux-doc-6.1.
    """
    root = data_dir or LINUX_DOC
    found = (path.relative_to(root).as_posix() for path in root.rglob("*.rst.txt*"))
    names = (name for name in found if name.endswith((".rst.txt", ".rst.txt.gz")))
    remedy = "install Debian's package linux-doc-6.1, or set data_dir to a folder with *.rst.txt"
    return _documents("linux-doc", root, names, remedy)


def own(dataset: str, data_dir: Path | None) -> Documents:
    """The files below a folder, a single file, or the files that match a glob pattern such as
    ``notes/**/*.md``.

    Hidden files are skipped, unless the pattern names them.

    Args:
        dataset: Path, relative to data_dir, or without that to the current folder.
    """
    place = (data_dir or Path()) / Path(dataset).expanduser()
    pattern = str(place / "**" / "*" if place.is_dir() else place)
    fixed = []  # the parts before the first wildcard
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    root = Path(*fixed)
    found = (Path(path) for path in glob.glob(pattern, recursive=True))
    names = (path.relative_to(root).as_posix() for path in found)
    accepted = f"use {', '.join(DATASETS)}, or a folder, a file or a glob pattern of texts"
    return _documents(dataset, root, names, accepted)


def _documents(dataset: str, root: Path, names: Iterable[str], remedy: str) -> Documents:
    """The documents of these names. Raises ValueError, with the remedy, if there are none."""
    found = tuple(sorted(name for name in names if (root / name).is_file()))
    if not found:
        raise ValueError(f"task_options.dataset={dataset}: no such files in {root}; {remedy}")
    return Documents(dataset, root, found)


DATASETS: Mapping[str, Callable[[Path | None], Documents]] = {
    "python": python,
    "linux-doc": linux_doc,
}


def find(dataset: str, data_dir: Path | None) -> Documents:
    """The documents of a row of `DATASETS`, or of a path. Raises ValueError if there are none."""
    return DATASETS[dataset](data_dir) if dataset in DATASETS else own(dataset, data_dir)
