"""Documents as tokens: tokenizers, and memory-mapped files of tokens in the user's cache.

Each document is followed by the token `END`, which is also before the first one. Axis name: token.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from powergossip.atomic_files import scratch
from powergossip.checks import BadValue
from powergossip.tasks import data_files
from powergossip.tasks.documents import Documents
from powergossip.tasks.task import Split, TaskOptions

END = 0  # token between documents, of 0 bytes
TOKENIZERS = re.compile(r"bytes|bpe-([1-9]\d{0,8})")
ACCEPTED = "bytes, or bpe-SIZE, such as bpe-1024"
SMALLEST = 257  # tokens of bpe-SIZE: the bytes and END
_FORMAT = 3  # of the files in the cache
_DAMAGED = (OSError, ValueError, LookupError, TypeError)  # raised for files of the cache


class Bytes:
    """The bytes of a text. `END` is the byte 0, which no text has.

    Attributes:
        byte_counts: Number of bytes of each token: int64 [token].
    """

    byte_counts = np.array([0] + 255 * [1])

    def encode(self, content: bytes) -> np.ndarray:
        """The tokens of a text in UTF-8, without `END`."""
        return np.frombuffer(content, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. `END` is a blank line."""
        return bytes(tokens).replace(b"\0", b"\n\n").decode(errors="replace")


class BytePairs:
    """Byte pair encoding of words, by Hugging Face tokenizers, with the methods of `Bytes`.

    References:
        - Sennrich, Haddow & Birch (2016), arXiv:1508.07909.
        - Radford et al. (2019), "Language models are unsupervised multitask learners", for bytes
          in place of characters, and for the words.
    """

    def __init__(self, source: str):
        """`source`: the tokenizer as JSON, as `trained` returns it."""
        self._tokenizer = _library().Tokenizer.from_str(source)
        vocabulary = self._tokenizer.get_vocab()
        self.byte_counts = np.zeros(len(vocabulary) + 1, np.int64)
        for token, index in vocabulary.items():  # one character stands for a byte
            self.byte_counts[index + 1] = len(token)

    @staticmethod
    def trained(texts: Iterable[str], size: int) -> str:
        """A tokenizer with `size` tokens, `END` included, or fewer if the texts have no more."""
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size - 1, initial_alphabet=byte_level.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return str(tokenizer.to_str())

    def encode(self, content: bytes) -> np.ndarray:
        return np.array(self._tokenizer.encode(content.decode()).ids, np.int64) + 1

    def decode(self, tokens: Sequence[int]) -> str:
        texts = [
            "\n\n" * len(list(run)) if ends else self._tokenizer.decode([i - 1 for i in run])
            for ends, run in groupby(tokens, lambda token: token == END)
        ]
        return "".join(texts)


Tokenizer = Bytes | BytePairs  # lossless conversions of texts to tokens


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
        tokenizer: A name as in `ACCEPTED`.

    Raises:
        ValueError: For an unknown tokenizer or one that is not installed, documents that cannot be
            used, and a cache that cannot be written.
    """
    _check(tokenizer)
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


def _check(tokenizer: str) -> None:
    """Raise ValueError for a tokenizer that is unknown, too small or not installed."""
    match = TOKENIZERS.fullmatch(tokenizer)
    size = match and match[1]
    known = match is not None and (size is None or int(size) >= SMALLEST)
    if not known:
        accepted = f"{ACCEPTED}, with {SMALLEST} tokens or more"
        raise BadValue("task_options.tokenizer", tokenizer, accepted)
    if size is not None:
        try:
            _library()
        except ImportError as error:
            raise ValueError(
                f"task_options.tokenizer={tokenizer} needs Hugging Face tokenizers, which is not "
                "installed: pip install tokenizers, or use bytes"
            ) from error


def _library() -> Any:
    # Imported here because it belongs to the extra `tokenizers`.
    import tokenizers

    return tokenizers


def _write(place: Path, documents: Documents, splits: Mapping[Split, list[str]], name: str) -> None:
    """Write the tokens and their index, with the tokenizer of this name, to a folder.

    Raises BadValue if the training text has too few byte pairs.
    """
    size, source = int(name.partition("-")[2] or 0), None
    if size:
        texts = (documents.read(document).decode() for document in splits["train"])
        source = BytePairs.trained(texts, size)
    tokenizer = _tokenizer(source)
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


def _tokenizer(source: str | None) -> Tokenizer:
    return Bytes() if source is None else BytePairs(source)


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
        tokenizer=_tokenizer(found["tokenizer"]),
    )
