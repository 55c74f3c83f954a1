"""Texts for language modeling, as numbers: one for each word of a vocabulary.

A text is a sequence of words, the end of a line being one of them, `EOS`. Words that the vocabulary
lacks are `UNKNOWN`.
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
    """A text to train with and one to test with."""

    vocabulary: tuple[str, ...]  # word of each number: the most frequent first
    train: Tensor  # int64 [word of the text]
    test: Tensor  # int64 [word of the text]


def numbered(train: list[str], test: list[str], min_count: int) -> Corpus:
    """Texts by the vocabulary of the words that the training text has `min_count` times or more.

    It always has `UNKNOWN`.
    """
    counts = Counter(train)
    counts[UNKNOWN] += 0
    known = (word for word in counts if counts[word] >= min_count or word == UNKNOWN)
    vocabulary = tuple(sorted(known, key=lambda word: (-counts[word], word)))
    numbers = {word: number for number, word in enumerate(vocabulary)}

    def encode(words: list[str]) -> Tensor:
        return torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in words])

    return Corpus(vocabulary, encode(train), encode(test))


# Topics


def topics(options: Options) -> tuple[list[str], list[str]]:
    """The texts on Python's grammar and types that its help() shows, which come with Python: of
    version 3.11, 80,000 words to train, 6,500 to test. Other versions' differ a little.

    About one topic in ten is for testing, chosen by the SHA-256 of its name, so that it stays there
    in other versions. Some topics contain others: a paragraph is left to the shortest topic
    that has it, lest test paragraphs are trained on.
    """
    # Half a megabyte, for which only those who use it should wait.
    from pydoc_data.topics import topics as texts

    paragraphs: dict[str, list[str]] = {}  # topic → its own
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
    """Words of a plain text: runs of letters and underscores, in lower case; runs of digits; runs
    of the same other sign; `EOS` at the end of each line that is not blank."""
    words: list[str] = []
    for line in text.splitlines():
        if line.strip():
            words += [match[0] for match in re.finditer(r"[^\W\d]+|\d+|([^\w\s])\1*", line.lower())]
            words.append(EOS)
    return words


# Files of words


@dataclass(frozen=True)
class _Files:
    """A text in two files (others there are not read) of words with blanks between them."""

    names: tuple[str, str]  # to train, to test
    folder: str  # that the archive unpacks them into
    hub: str
    hub_arguments: Mapping[str, str]
    column: str  # of the hub: a line

    def __call__(self, options: Options) -> tuple[list[str], list[str]]:
        """Both texts. Raises ValueError if they are nowhere or cannot be read."""
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
                raise ValueError(f"{path} holds less than two words, so there is none to predict")
        return texts[0], texts[1]

    def _convert(self, splits: Any) -> Iterator[tuple[str, bytes]]:
        for name, split in zip(self.names, ("train", "test"), strict=True):
            lines = (row[self.column].rstrip("\n") + "\n" for row in splits[split])
            yield name, "".join(lines).encode()


def split_lines(text: str) -> list[str]:
    """Words of a text that has blanks between them; `EOS` at the end of every line, also blank
    ones, as is usual for these texts."""
    lines = text.split("\n")
    if not lines[-1].strip():
        lines.pop()
    return [word for line in lines for word in (*line.split(), EOS)]


# Merity et al. (2016), "Pointer sentinel mixture models", arXiv 1609.07843. Words as the files have
# them. The PowerGossip paper's 28,869 are another program's (spaCy's), in lower case; and what its
# code measures on is the validation text.
wikitext2 = _Files(
    names=("wiki.train.tokens", "wiki.test.tokens"),
    folder="wikitext-2",
    hub="Salesforce/wikitext",
    hub_arguments={"name": "wikitext-2-v1"},
    column="text",
)
# Mikolov et al. (2010), "Recurrent neural network based language model", of Marcus et al. (1993).
# The hub's own files are a program, which datasets no longer runs; this is what it made of them.
ptb = _Files(
    names=("ptb.train.txt", "ptb.test.txt"),
    folder="ptb",
    hub="ptb-text-only/ptb_text_only",
    hub_arguments={"revision": "refs/convert/parquet"},
    column="sentence",
)

# name → a function of the options that gives the words to train and to test with
TEXTS: dict[str, Callable[[Options], tuple[list[str], list[str]]]] = {
    "topics": topics,
    "wikitext2": wikitext2,
    "ptb": ptb,
}
