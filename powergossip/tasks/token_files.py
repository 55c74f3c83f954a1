"""Documents as tokens in memory-mapped files, in the user's cache.

Each document is followed by the token `END`, which is also before the first one. Axis name: token.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from powergossip.atomic_files import scratch
from powergossip.checks import BadValue
from powergossip.tasks import data_files, tokenizers
from powergossip.tasks.documents import Documents
from powergossip.tasks.task import Split, TaskOptions
from powergossip.tasks.tokenizers import END, BytePairs, Tokenizer

_FORMAT = 3  # of the files in the cache
_DAMAGED = (OSError, ValueError, LookupError, TypeError)  # raised for files of the cache


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
    """The tokens of documents, from the cache. They are written to it at the first time, and if a
    checksum shows that a file is damaged.

    The cache knows documents by their paths, sizes and times of modification. Several processes may
    write the same files concurrently, since each appears complete.

    Args:
        tokenizer: A name as in `tokenizers.ACCEPTED`.

    Raises:
        ValueError: For an unknown tokenizer or one that is not installed, documents that cannot be
            used, and a cache that cannot be written.
    """
    tokenizers.check(tokenizer)
    cache = data_files.cache(options.task)
    found = [(documents.root / name).stat() for name in documents.names]
    stamps = [(facts.st_size, facts.st_mtime_ns) for facts in found]
    known: list[Any] = [_FORMAT, tokenizer, options.validation_ratio, str(documents.root.resolve())]
    key = hashlib.sha256(json.dumps([*known, documents.names, stamps]).encode()).hexdigest()
    tokens, index = (cache / f"{key[:16]}.{suffix}" for suffix in ("bin", "index"))
    with suppress(*_DAMAGED):
        return _read(tokens, index)
    splits = documents.splits(options.validation_ratio)
    try:
        with scratch(cache) as place:
            _write(place, documents, splits, tokenizer)
            (place / "bin").replace(tokens)
            (place / "index").replace(index)
        return _read(tokens, index)
    except OSError as error:
        raise ValueError(
            f"{cache} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to "
            "another folder"
        ) from error


def _write(place: Path, documents: Documents, splits: Mapping[Split, list[str]], name: str) -> None:
    """Write the tokens and their index, with the tokenizer of this name, to a folder.

    Raises BadValue if the training text has too few byte pairs.
    """
    size, source = int(name.partition("-")[2] or 0), None
    if size:
        texts = (documents.read(document).decode() for document in splits["train"])
        source = BytePairs.trained(texts, size)
    tokenizer = tokenizers.of(source)
    most = len(tokenizer.byte_counts)
    if most < size:
        accepted = f"bpe-{most} or less; the training text has no more byte pairs"
        raise BadValue("task_options.tokenizer", name, accepted)
    dtype = np.min_scalar_type(most - 1)
    sha256, position, longest = hashlib.sha256(), 0, 0
    pieces: dict[Split, list[Piece]] = {split: [] for split in splits}
    with (place / "bin").open("wb") as file:

        def append(tokens: np.ndarray) -> None:
            data = tokens.astype(dtype).tobytes()
            file.write(data)
            sha256.update(data)

        append(np.array([END]))
        for split, names in splits.items():
            for topic, members in groupby(sorted(names, key=documents.topic), documents.topic):
                first = position
                for document in members:
                    tokens = np.append(tokenizer.encode(documents.read(document)), END)
                    append(tokens)
                    longest = max(longest, len(tokens))
                    position += len(tokens)
                pieces[split].append(Piece(topic, first, position))
    index = {
        "dtype": dtype.name,
        "length": position + 1,
        "pieces": {split: [vars(p) for p in parts] for split, parts in pieces.items()},
        "longest": longest,
        "sha256": sha256.hexdigest(),
        "tokenizer": source,
    }
    text = json.dumps(index)
    (place / "index").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def _read(tokens: Path, index: Path) -> TokenFile:
    """The tokens in a file, by their index. Raises an error of `_DAMAGED` for damaged files."""
    checksum, _, text = index.read_text().partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != checksum:
        raise ValueError(f"{index} is damaged")
    found = json.loads(text)
    with tokens.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != found["sha256"]:
            raise ValueError(f"{tokens} is damaged")
    return TokenFile(
        tokens=np.memmap(tokens, found["dtype"], "r", shape=(found["length"],)),
        pieces={
            split: [Piece(**values) for values in parts] for split, parts in found["pieces"].items()
        },
        longest=found["longest"],
        sha256=found["sha256"],
        tokenizer=tokenizers.of(found["tokenizer"]),
    )
