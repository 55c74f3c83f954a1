"""Tokenizers: lossless conversions of documents to tokens. Axis name: token."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from powergossip.checks import BadValue

END = 0  # token between documents, of 0 bytes
TOKENIZERS = re.compile(r"bytes|bpe-([1-9]\d{0,8})")
ACCEPTED = "bytes, or bpe-SIZE, such as bpe-1024"
SMALLEST = 257  # tokens of bpe-SIZE: the bytes and END


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


Tokenizer = Bytes | BytePairs


def check(tokenizer: str) -> None:
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


def of(source: str | None) -> Tokenizer:
    """The tokenizer of byte pairs with this JSON, or else the bytes."""
    return Bytes() if source is None else BytePairs(source)
