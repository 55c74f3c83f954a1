"""Documents as tokens: tokenizers, and memory-mapped files of tokens in the user's cache.

Each document is followed by the token `END`, which is also before the first one. Axis name: token.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from powergossip.tasks import files
from powergossip.tasks.documents import Documents
from powergossip.tasks.task import Split, TaskOptions

END = 0  # token between documents, of 0 bytes
TOKENIZERS = re.compile(r"bytes|bpe-[1-9]\d{0,8}")
ACCEPTED = "bytes, or bpe-SIZE, such as bpe-1024"
FORMAT = 1  # of the files in the cache


class Tokenizer(Protocol):
    """A lossless conversion of texts to tokens."""

    @property
    def byte_counts(self) -> np.ndarray:
        """Number of bytes of each token: int64 [token]."""
        ...

    def encode(self, content: bytes) -> np.ndarray:
        """The tokens of a text, without `END`."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens. `END` is a blank line."""
        ...


class Bytes:
    """The bytes of a text. `END` is the byte 0, which no text has."""

    byte_counts = np.array([0] + 255 * [1])

    def encode(self, content: bytes) -> np.ndarray:
        return np.frombuffer(content, np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).replace(b"\0", b"\n\n").decode(errors="replace")


@dataclass(frozen=True)
class Piece:
    """Documents of a topic, next to each other in the file.

    Attributes:
        first, last: Positions of the tokens `END` before the first one and after the last one.
    """

    topic: str
    first: int
    last: int


@dataclass(frozen=True)
class TokenFile:
    """The tokens of all splits, in the order of splits, topics and paths.

    Attributes:
        tokens: Memory-mapped array [token].
        longest: Number of tokens of the longest document, with its `END`.
        sha256: SHA-256 of the file.
    """

    tokens: np.ndarray
    pieces: Mapping[Split, list[Piece]]
    longest: int
    sha256: str
    tokenizer: Tokenizer


def load(documents: Documents, tokenizer: str, options: TaskOptions) -> TokenFile:
    """The tokens of documents, from the cache. They are written to it at the first time.

    The cache knows files by their names, sizes and times of modification. Several processes may
    write the same tokens concurrently: each file appears complete.

    Args:
        tokenizer: A name as in `ACCEPTED`.

    Raises:
        ValueError: For documents that cannot be used, and a cache that cannot be written.
    """
    cache = files.cache(options.task)
    facts = [(documents.root / name).stat() for name in documents.names]
    of_files = [(s.st_size, s.st_mtime_ns) for s in facts]
    known: list[Any] = [FORMAT, tokenizer, options.validation_ratio, str(documents.root.resolve())]
    key = hashlib.sha256(json.dumps([*known, documents.names, of_files]).encode()).hexdigest()
    folder = cache / key[:16]
    if not folder.is_dir():
        splits = documents.splits(options.validation_ratio)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".incomplete-") as scratch:
                _write(Path(scratch) / "new", documents, splits, make(tokenizer))
                _publish(Path(scratch) / "new", folder)
        except OSError as error:
            raise ValueError(
                f"{cache} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to "
                "another folder"
            ) from error
    return _read(folder, make(tokenizer))


def make(name: str) -> Tokenizer:
    """The tokenizer of this name."""
    return Bytes()


def _write(
    folder: Path, documents: Documents, splits: Mapping[Split, list[str]], tokenizer: Tokenizer
) -> None:
    """Write the tokens and their index to a new folder."""
    folder.mkdir()
    dtype = np.min_scalar_type(len(tokenizer.byte_counts) - 1)
    sha256, position, longest = hashlib.sha256(), 0, 0
    pieces: dict[Split, list[Piece]] = {split: [] for split in splits}
    with (folder / "tokens.bin").open("wb") as file:

        def append(tokens: np.ndarray) -> None:
            data = tokens.astype(dtype).tobytes()
            file.write(data)
            sha256.update(data)

        append(np.array([END]))
        for split, names in splits.items():
            for topic, name in sorted((documents.topic(name), name) for name in names):
                tokens = np.append(tokenizer.encode(documents.read(name)), END)
                append(tokens)
                longest = max(longest, len(tokens))
                last = pieces[split].pop() if pieces[split] else None
                if last is not None and last.topic != topic:
                    pieces[split].append(last)
                    last = None
                first = last.first if last else position
                position += len(tokens)
                pieces[split].append(Piece(topic, first, position))
    index = {
        "dtype": dtype.name,
        "pieces": {split: [vars(p) for p in of_split] for split, of_split in pieces.items()},
        "longest": longest,
        "sha256": sha256.hexdigest(),
    }
    (folder / "index.json").write_text(json.dumps(index))


def _publish(new: Path, folder: Path) -> None:
    """Rename a folder, unless another process was faster."""
    try:
        new.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _read(folder: Path, tokenizer: Tokenizer) -> TokenFile:
    index = json.loads((folder / "index.json").read_text())
    return TokenFile(
        tokens=np.memmap(folder / "tokens.bin", index["dtype"], "r"),
        pieces={
            split: [Piece(**values) for values in of_split]
            for split, of_split in index["pieces"].items()
        },
        longest=index["longest"],
        sha256=index["sha256"],
        tokenizer=tokenizer,
    )
