"""Language modeling of documents: prediction of the next token.

Axis names: sample, position (in a sequence), worker.

A sample is a sequence of tokens of one topic, which may begin and end within a document. Samples
are partitioned over the workers like samples of other tasks, with the topic as their label.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from powergossip.checks import BadValue
from powergossip.randomness import torch_seed
from powergossip.tasks import documents, modules, option_checks, token_files
from powergossip.tasks.language import MODEL_OPTIONS, LanguageTask
from powergossip.tasks.language_models import SMALL_ARCHITECTURES, LanguageModel
from powergossip.tasks.loading import on_device
from powergossip.tasks.shards import NOBODY, Partition
from powergossip.tasks.task import Batch, MainMetric, Split, Task, TaskOptions
from powergossip.tasks.token_files import TokenFile
from powergossip.tasks.tokenizers import END

TOPIC = "topic"  # the column of a partition
SAMPLE_TOKENS, TEMPERATURE = 400, 0.8  # of the text at the end of a run
OPTIONS = {
    "dataset": option_checks.TEXT,
    "tokenizer": option_checks.TEXT,
    "sequence_length": option_checks.COUNT,
    "evaluation_tokens": option_checks.COUNT,
    "sample": option_checks.TEXT,
    **MODEL_OPTIONS,
}
DEFAULTS: Mapping[str, Any] = {
    "task_architecture": "GPT",
    "batch_size": 8,
    "num_epochs": 1,
    "learning_rate": 0.1,
    "lr_schedule_milestones": [],
    "momentum": 0.9,
    "weight_decay": 0.0,
    "gradient_clipping": 1.0,
}


def task(options: TaskOptions) -> Task:
    """Language modeling on documents.

    task_options::

        dataset            python (default): the sources of Python's standard library. linux-doc:
                           Debian's package linux-doc-6.1. Or a folder, a file or a glob pattern
        tokenizer          bytes (default), or bpe-SIZE: byte pairs, trained on the training text
        sequence_length    tokens per sequence, by default 128
        evaluation_tokens  most tokens of a split in an evaluation, by default 65536
        sample             beginning of a text that the mean model continues at the end of a run

    The models have further options.

    Raises ValueError if there are no documents, or if the options do not match them.
    """
    option_checks.check(
        options.task, options.task_options, OPTIONS, options.architecture, MODEL_OPTIONS
    )
    given = dict(options.task_options)
    dataset, tokenizer = given.pop("dataset", "python"), given.pop("tokenizer", "bytes")
    length, most = given.pop("sequence_length", 128), given.pop("evaluation_tokens", 2**16)
    prompt = given.pop("sample", None)
    found = documents.find(dataset, options.data_dir)
    return Text(token_files.load(found, tokenizer, options), length, options, given, most, prompt)


class Text(LanguageTask):
    """A `Task` with batches (tokens, next tokens, true), int64 [sample, position] twice.

    Evaluation is on sequences at equal distances in a split. Its metric bits_per_byte is the code
    length of their tokens, divided by the bytes of text that these stand for::

        bits_per_byte = Σ_t −log₂ p(token t) / Σ_t bytes of token t

    It can be compared between tokenizers, unlike the perplexity of a token.
    """

    redistributes: ClassVar[bool] = True
    main_metric: ClassVar[MainMetric] = MainMetric("bits_per_byte", larger_is_better=False)

    def __init__(
        self,
        file: TokenFile,
        length: int,
        options: TaskOptions,
        model_options: Mapping[str, Any],
        evaluation_tokens: int,
        prompt: str | None = None,
    ) -> None:
        """Partition the training text.

        Args:
            length: Number of tokens per sequence.
            evaluation_tokens: Most tokens of a split in an evaluation.
            prompt: Beginning of the text that `sample` continues.

        Raises:
            ValueError: If the options do not match the text.
        """
        super().__init__(
            length=length,
            options=options,
            vocabulary_size=len(file.tokenizer.byte_counts),
            model_options=model_options,
            builders=SMALL_ARCHITECTURES,
            n_streams=options.batch_size,
        )
        if length > file.longest:
            accepted = f"{file.longest} or less, the tokens of the longest document"
            raise BadValue("task_options.sequence_length", length, accepted)
        self._file, self._prompt, self._evaluation_tokens = file, prompt, evaluation_tokens
        self._byte_counts = torch.from_numpy(file.tokenizer.byte_counts).to(options.device)
        self._starts: dict[Split, np.ndarray] = {}  # position of the first token [sample]
        topics: list[np.ndarray] = []  # of training samples, by piece
        for split, pieces in file.pieces.items():
            counts = [(piece.last - piece.first) // length for piece in pieces]
            if sum(counts) == 0:
                most = max(piece.last - piece.first for piece in pieces)
                accepted = f"{most} or less; no topic of the split {split} has more tokens"
                raise BadValue("task_options.sequence_length", length, accepted)
            self._starts[split] = np.concatenate(
                [
                    piece.first + length * np.arange(count)
                    for piece, count in zip(pieces, counts, strict=True)
                ]
            )
            if split == "train":
                topics = [np.full(count, i) for i, count in enumerate(counts)]
        self._topics = torch.from_numpy(np.concatenate(topics))
        column = self._topics.tolist()
        if options.column not in (None, TOPIC):
            raise BadValue("decentralized_data_column", options.column, TOPIC)
        on_cpu = dataclasses.replace(options, device=torch.device("cpu"))
        self._shards = Partition(self._topics, on_cpu, column)
        self.steps_per_epoch = self._shards.steps_per_epoch
        self.samples = {split: len(starts) for split, starts in self._starts.items()}

    def sample(self, model: nn.Module) -> str | None:
        """A text that continues the prompt, of 400 tokens sampled from a model's p^(1/0.8).

        None without a prompt. It depends on seed and model only. Control characters, which may
        change the state of a terminal, are replaced.
        """
        if self._prompt is None:
            return None
        assert isinstance(model, LanguageModel)
        tokenizer, device = self._file.tokenizer, self._options.device
        found = [END, *tokenizer.encode(self._prompt.encode()).tolist()]
        random = torch.Generator().manual_seed(torch_seed(self._options.seed, "sample"))
        with torch.no_grad(), modules.evaluation_mode(model):
            for _ in range(SAMPLE_TOKENS):
                words = torch.tensor(found[-self._length :], device=device)
                scores = model(words[None], {})[0][0, -1].float().cpu()
                p = (scores / TEMPERATURE).softmax(0)
                found.append(int(torch.multinomial(p, 1, generator=random)))
        text = tokenizer.decode(found[1:])
        return "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the data, for info.json."""
        topics = [piece.topic for piece in self._file.pieces["train"]]
        return {"tokens_sha256": self._file.sha256, "topics": topics}

    def batch(self, worker: int, epoch: int, step: int, lost: frozenset[int] = NOBODY) -> Batch:
        """The tokens of a worker, their next tokens, and true: each has the initial state.

        0 ≤ step < steps_per_epoch. The last entry is on the CPU.

        Args:
            lost: Workers whose samples the others have, see Partition.
        """
        samples = self._shards.batch(worker, epoch, step, lost)
        words, targets = self._sequences(self._starts["train"][samples.numpy()])
        return words, targets, torch.tensor(True)

    def _sequences(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens and next tokens from these positions: int64 [sample, position]."""
        found = self._file.tokens[starts[:, None] + np.arange(self._length + 1)]
        sequences = on_device(torch.from_numpy(found.astype(np.int64)), self._options.device)
        return sequences[:, :-1], sequences[:, 1:]

    def streams(self, split: Split) -> tuple[Tensor, Tensor]:
        """Sequences at equal distances in a split."""
        starts = self._starts[split]
        n = min(len(starts), max(1, self._evaluation_tokens // self._length))
        return self._sequences(starts[np.arange(n) * len(starts) // n])

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """The sums of the base, and bits_per_byte, whose mean over the tokens is the mean over the
        text.

        Code lengths are in bits per byte of the whole split: the sum over all parts divided by the
        count is exact.
        """
        sums = super().evaluate(model, split, part)
        _, targets = self.streams(split)
        tokens_per_byte = targets.numel() / int(self._byte_counts[targets].sum())
        return sums | {"bits_per_byte": sums["cross_entropy"] / math.log(2) * tokens_per_byte}

    def label_counts(self, epoch: int = 0) -> Tensor | None:
        """Number of sequences per worker and topic in an epoch: int64 [worker, topic]."""
        n_topics = len(self._file.pieces["train"])
        return self._shards.label_counts(self._topics, n_topics, epoch)
