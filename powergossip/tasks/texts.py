"""Texts for language modeling, as sequences of word indices.

A text is a sequence of words. The end of a line is the word `EOS`, and words outside the vocabulary
become `UNKNOWN`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip.tasks import files
from powergossip.tasks.task import Options

EOS, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Corpus:
    """A training text and a test text, as word indices."""

    vocabulary: tuple[str, ...]  # word of each index, in descending order of frequency
    train: Tensor  # int64 [word of the text]
    test: Tensor  # int64 [word of the text]


def indexed(train: list[str], test: list[str], min_count: int) -> Corpus:
    """Convert texts to word indices.

    The vocabulary has the words that occur at least `min_count` times in the training text, and
    `UNKNOWN`.
    """
    counts = Counter(train)
    counts[UNKNOWN] += 0
    known = (word for word in counts if counts[word] >= min_count or word == UNKNOWN)
    vocabulary = tuple(sorted(known, key=lambda word: (-counts[word], word)))
    index = {word: i for i, word in enumerate(vocabulary)}

    def encode(words: list[str]) -> Tensor:
        return torch.tensor([index.get(word, index[UNKNOWN]) for word in words])

    return Corpus(vocabulary, encode(train), encode(test))


# Topics


def topics(options: Options) -> tuple[list[str], list[str]]:
    """The topics of Python's help(), on its grammar and types, which come with Python.

    Version 3.11 has 80,000 training words and 6,500 test words. Other versions differ slightly.
    About one topic in ten is for testing, chosen by the SHA-256 of its name, so that the choice is
    the same in other versions. Some topics contain others. A paragraph belongs only to the shortest
    topic that has it, so that no test paragraph is in the training text.
    """
    # Imported here because it is half a megabyte.
    from pydoc_data.topics import topics as texts

    paragraphs: dict[str, list[str]] = {}  # topic → paragraphs
    seen: set[str] = set()
    for name in sorted(texts, key=lambda name: (len(texts[name]), name)):
        own = paragraphs[name] = []
        for paragraph in re.split(r"\n\s*\n", texts[name]):
            if " ".join(paragraph.split()) not in seen:
                seen.add(" ".join(paragraph.split()))
                own.append(paragraph)
    train: list[str] = []
    test: list[str] = []
    for name in sorted(paragraphs):
        (test if is_test_topic(name) else train).extend(tokens("\n".join(paragraphs[name])))
    return train, test


def is_test_topic(name: str) -> bool:
    """Whether a topic is for testing."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < 2**32 // 10


def tokens(text: str) -> list[str]:
    """The words of a plain text, in lower case.

    A word is a run of letters and underscores, a run of digits, or a run of one other character.
    `EOS` is at the end of each line that is not blank.
    """
    words: list[str] = []
    for line in text.splitlines():
        if line.strip():
            words += [match[0] for match in re.finditer(r"[^\W\d]+|\d+|([^\w\s])\1*", line.lower())]
            words.append(EOS)
    return words


# Files of words


@dataclass(frozen=True)
class _Files:
    """A text in two files of words separated by blanks. Validation texts are not read."""

    names: tuple[str, str]  # training, test
    folder: str  # the folder in the archive
    hub: str
    hub_arguments: Mapping[str, str]
    column: str  # of the lines, on the hub

    def __call__(self, options: Options) -> tuple[list[str], list[str]]:
        """Training and test words. Raises ValueError if they are not found or cannot be read."""
        in_folder = files.Form(self.names, self.folder)
        source = files.Source(
            options.task,
            (files.Form(self.names), in_folder),
            files.Hub(self.hub, in_folder, self._convert, self.hub_arguments),
        )
        _, (train, test) = files.find(source, options.data_dir, options.download)
        texts = []
        for path in (train, test):
            try:
                texts.append(split_lines(files.read(path).decode()))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is damaged, or no text in UTF-8: {error}") from error
            if len(texts[-1]) < 2:
                raise ValueError(f"{path} holds {len(texts[-1])} words: use 2 or more")
        return texts[0], texts[1]

    def _convert(self, splits: Any) -> Iterator[tuple[str, bytes]]:
        for name, split in zip(self.names, ("train", "test"), strict=True):
            lines = (row[self.column].rstrip("\n") + "\n" for row in splits[split])
            yield name, "".join(lines).encode()


def split_lines(text: str) -> list[str]:
    """The words of a text, separated by blanks.

    `EOS` is at the end of every line, blank ones included, as is usual for these texts.
    """
    lines = text.split("\n")
    if not lines[-1].strip():
        lines.pop()
    return [word for line in lines for word in (*line.split(), EOS)]


# Merity et al. (2016), "Pointer sentinel mixture models", arXiv 1609.07843. The words are those of
# the files. The 28,869 words of the PowerGossip paper are in lower case and from another tokenizer
# (spaCy), and its code evaluates on the validation text.
wikitext2 = _Files(
    names=("wiki.train.tokens", "wiki.test.tokens"),
    folder="wikitext-2",
    hub="Salesforce/wikitext",
    hub_arguments={"name": "wikitext-2-v1"},
    column="text",
)
# Mikolov et al. (2010), "Recurrent neural network based language model", of Marcus et al. (1993).
# The hub's own files are a program, which datasets no longer runs. This is its output.
ptb = _Files(
    names=("ptb.train.txt", "ptb.test.txt"),
    folder="ptb",
    hub="ptb-text-only/ptb_text_only",
    hub_arguments={"revision": "refs/convert/parquet"},
    column="sentence",
)

# name → a function of the options that returns training words and test words
TEXTS: dict[str, Callable[[Options], tuple[list[str], list[str]]]] = {
    "topics": topics,
    "wikitext2": wikitext2,
    "ptb": ptb,
}
