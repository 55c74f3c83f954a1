"""Texts for language modeling, as sequences of word indices.

A text is a sequence of words. The end of a line is the word `EOS`, and words outside the vocabulary
become `UNKNOWN`.

`TEXTS` maps names to functions. The keyword-only parameters of a function are options of the task.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powergossip.checks import BadValue
from powergossip.tasks import data_files
from powergossip.tasks.shards import number_held_out
from powergossip.tasks.task import Split, TaskOptions

EOS, UNKNOWN, PADDING = "<eos>", "<unk>", "<pad>"

Words = list[str]


@dataclass(frozen=True)
class Corpus:
    """The training text, the test text and maybe a validation text, as word indices."""

    vocabulary: tuple[str, ...]  # word of each index, in descending order of frequency
    splits: Mapping[Split, Tensor]  # int64 [word of the text]
    padding: int | None = None  # index of `PADDING`, if streams are padded


def indexed(splits: Mapping[Split, Words], min_count: int, padding: bool = False) -> Corpus:
    """Convert texts to word indices.

    The vocabulary has the words that occur at least `min_count` times in the training text, and
    `UNKNOWN`, and `PADDING` with `padding`.
    """
    special = (UNKNOWN, PADDING) if padding else (UNKNOWN,)
    counts = Counter(splits["train"])
    counts.update(dict.fromkeys(special, 0))
    known = (word for word in counts if counts[word] >= min_count or word in special)
    vocabulary = tuple(sorted(known, key=lambda word: (-counts[word], word)))
    index = {word: i for i, word in enumerate(vocabulary)}

    def encode(words: Words) -> Tensor:
        return torch.tensor([index.get(word, index[UNKNOWN]) for word in words])

    encoded = {split: encode(words) for split, words in splits.items()}
    return Corpus(vocabulary, encoded, index[PADDING] if padding else None)


def with_held_out(splits: Mapping[Split, Words], ratio: float) -> dict[Split, Words]:
    """Move the end of the training text, a fraction `ratio` of its words, to the split "valid".

    Raises BadValue if the ratio is not in [0, 1), if it leaves fewer than two words on one side, or
    if there is a validation text already.
    """
    if ratio and "valid" in splits:
        raise BadValue("validation_ratio", ratio, "0 with task_options.validation_text=true")
    train = splits["train"]
    size = number_held_out(len(train), ratio, least=2)
    if not size:
        return dict(splits)
    return {**splits, "train": train[:-size], "valid": train[-size:]}


# Topics


def topics(options: TaskOptions) -> dict[Split, Words]:
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
    splits: dict[Split, Words] = {"train": [], "test": []}
    for name in sorted(paragraphs):
        split: Split = "test" if is_test_topic(name) else "train"
        splits[split] += tokens("\n".join(paragraphs[name]))
    return splits


def is_test_topic(name: str) -> bool:
    """True if a topic is for testing."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < 2**32 // 10


def tokens(text: str) -> Words:
    """The words of a plain text, in lower case.

    A word is a run of letters and underscores, a run of digits, or a run of one other character.
    `EOS` is at the end of each line that is not blank.
    """
    words: Words = []
    for line in text.splitlines():
        if line.strip():
            words += [match[0] for match in re.finditer(r"[^\W\d]+|\d+|([^\w\s])\1*", line.lower())]
            words.append(EOS)
    return words


# Tokenizers of a line


def blanks() -> Callable[[str], Words]:
    """The words of a line are separated by blanks."""
    return str.split


def spacy_english() -> Callable[[str], Words]:
    """The rules of spaCy for English, with the special words <eos>, <bos> and <unk>.

    A blank at the start of a line is a word too. Raises ValueError if spaCy is not installed.
    """
    # Imported here because it takes a second and belongs to the extra `spacy`.
    try:
        import spacy
        from spacy.symbols import ORTH
    except ImportError as error:
        raise ValueError(
            "task_options.tokenizer=spacy needs spaCy, which is not installed: pip install spacy, "
            "or use blanks"
        ) from error
    tokenizer = spacy.blank("en").tokenizer
    for word in (EOS, "<bos>", UNKNOWN):
        tokenizer.add_special_case(word, [{ORTH: word}])
    return lambda line: [token.text for token in tokenizer(line)]


TOKENIZERS: dict[str, Callable[[], Callable[[str], Words]]] = {
    "blanks": blanks,
    "spacy": spacy_english,
}

# WikiText-2: Merity et al. (2016), "Pointer sentinel mixture models", arXiv 1609.07843.

_FILES: dict[Split, str] = {
    "train": "wiki.train.tokens",
    "valid": "wiki.valid.tokens",
    "test": "wiki.test.tokens",
}
_HUB_SPLITS: dict[Split, str] = {"train": "train", "valid": "validation", "test": "test"}


def wikitext2(
    options: TaskOptions,
    *,
    tokenizer: str = "blanks",
    lower: bool = False,
    evaluation: str = "test",
    validation_text: bool = False,
) -> dict[Split, Words]:
    """The words of each split of WikiText-2, from its files of words separated by blanks.

    Args:
        tokenizer: Name of a row of `TOKENIZERS`.
        lower: If True, words are converted to lower case, after tokenization.
        evaluation: Text of the split "test": test or validation.
        validation_text: True if the validation text is the split "valid".

    Raises:
        ValueError: If a file is not found or cannot be read.
    """
    if validation_text and evaluation == "validation":
        accepted = "false with evaluation=validation, which uses this text already"
        raise BadValue("task_options.validation_text", validation_text, accepted)
    sources: dict[Split, Split] = {"train": "train"}  # split → text
    sources["test"] = "valid" if evaluation == "validation" else "test"
    if validation_text:
        sources["valid"] = "valid"
    source = data_files.DataSource(
        options.task,
        tuple(_FILES.values()),
        "Salesforce/wikitext",
        _convert,
        arguments={"name": "wikitext-2-v1"},
        folder="wikitext-2",
    )
    found = data_files.find(source, options.data_dir, options.download)
    paths = dict(zip(_FILES, found, strict=True))
    tokenize = TOKENIZERS[tokenizer]()
    splits = {split: read(paths[text], tokenize) for split, text in sources.items()}
    if lower:
        splits = {split: [word.lower() for word in splits[split]] for split in splits}
    return splits


def _convert(splits: Any) -> Iterator[tuple[str, bytes]]:
    for split, name in _FILES.items():
        lines = (row["text"].rstrip("\n") + "\n" for row in splits[_HUB_SPLITS[split]])
        yield name, "".join(lines).encode()


def read(path: Path, tokenize: Callable[[str], Words]) -> Words:
    """The words of a file. Raises ValueError if it cannot be read, or has fewer than two words."""
    try:
        words = split_lines(data_files.read(path).decode(), tokenize)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged, or no text in UTF-8: {error}") from error
    if len(words) < 2:
        raise ValueError(f"{path} holds {len(words)} words: use 2 or more")
    return words


def split_lines(text: str, tokenize: Callable[[str], Words] = str.split) -> Words:
    """The words of the lines of a text.

    `EOS` is at the end of every line, blank ones included, as is usual for these texts.
    """
    lines = text.split("\n")
    if not lines[-1].strip():
        lines.pop()
    return [word for line in lines for word in (*tokenize(line), EOS)]


# name → a function of the options of all tasks and its own, that returns the words of each split
TEXTS: dict[str, Callable[..., dict[Split, Words]]] = {
    "topics": topics,
    "wikitext2": wikitext2,
}
