"""Language modeling: prediction of the next word of a text.

Axis names: stream, position (in a sequence), worker.

The data of a worker are a contiguous piece of the training text, split into batch_size parallel
streams. Step s of an epoch takes the s-th sequence of each stream, so that a model can carry its
state from batch to batch. The order is the same in each epoch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from powergossip import checks
from powergossip.state_trees import sha256
from powergossip.tasks import modules, option_checks, texts
from powergossip.tasks.language_models import (
    ARCHITECTURES,
    SMALL_ARCHITECTURES,
    LanguageModel,
)
from powergossip.tasks.shards import bounds, smallest_shard
from powergossip.tasks.task import NAMES, Batch, Split, Task, TaskOptions

MODEL_OPTIONS = {
    "hidden_size": option_checks.COUNT,
    "num_layers": option_checks.COUNT,
    "num_heads": option_checks.COUNT,
    "dropout": option_checks.FRACTION,
}
OPTIONS = {
    "dataset": option_checks.one_of(texts.TEXTS),
    "sequence_length": option_checks.COUNT,
    "min_count": option_checks.COUNT,
    "padding": option_checks.FLAG,
    "tokenizer": option_checks.one_of(texts.TOKENIZERS),
    "lower": option_checks.FLAG,
    "evaluation": option_checks.one_of(("test", "validation")),
    "validation_text": option_checks.FLAG,
    **MODEL_OPTIONS,
}
# For the default text: a perplexity below 90 in a minute, 8 workers in one process.
DEFAULTS: Mapping[str, Any] = {
    "task_architecture": "LSTM",
    "batch_size": 8,
    "num_epochs": 10,
    "learning_rate": 10.0,
    "lr_schedule_milestones": [[8.0, 0.1]],
    "momentum": 0.0,
    "weight_decay": 0.0,
    "gradient_clipping": 0.4,
}
N_STREAMS = 64  # parallel streams of a text in evaluation
NO_WORD = -1  # target without prediction: pads the last stream


def task(options: TaskOptions) -> Task:
    """Language modeling on a text of `texts.TEXTS`.

    task_options::

        dataset          the text, by default "topics": Python's help, which needs no files
        sequence_length  words per sequence, by default 30
        min_count        rarer words of the training text become unknown. By default 3 for topics
                         and 1 for the other texts, which have their rare words replaced already.
        padding          fill the last streams of a worker with the word <pad>. By default its last
                         words, fewer than the streams, are left out.

    Options of wikitext2::

        tokenizer        blanks (default): words as in the files. spacy: the English rules of spaCy
        lower            convert words to lower case. Default: false
        evaluation       text of the test rows: test (default) or validation
        validation_text  log rows split=valid on the validation text. Default: false

    The models have further options. By default an LSTM has three layers of 650 units and dropout
    0.4, on topics one layer of 128 units and dropout 0.2.

    Raises ValueError if the text is not found or damaged, or if the options do not match it.
    """
    option_checks.check(
        options.task, options.task_options, OPTIONS, options.architecture, MODEL_OPTIONS
    )
    given = dict(options.task_options)
    dataset = given.pop("dataset", "topics")
    length = given.pop("sequence_length", 30)
    min_count = given.pop("min_count", 3 if dataset == "topics" else 1)
    padding = given.pop("padding", False)
    _check_partition(options)
    splits = texts.TEXTS[dataset](options, **_text_options(dataset, given))
    splits = texts.with_held_out(splits, options.validation_ratio)
    builders = SMALL_ARCHITECTURES if dataset == "topics" else ARCHITECTURES
    corpus = texts.indexed(splits, min_count, padding)
    return LanguageModeling(corpus, length, options, given, builders)


def _text_options(dataset: str, given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of texts from `given`, and return them.

    Raises ValueError for an option that the text does not have.
    """
    options = {}
    for key in list(given):
        having = [name for name in texts.TEXTS if key in option_checks.defaults(texts.TEXTS[name])]
        if having and dataset not in having:
            raise ValueError(
                f"task_options.{key}: use it with dataset={' or '.join(having)}; {dataset} has no "
                f"{key}"
            )
        if having:
            options[key] = given.pop(key)
    return options


class LanguageTask(modules.ModelTask, ABC):
    """Models, loss and evaluation of all language tasks. Batches: (words, next words, first step).

    Words are int64 [stream, position], and the last entry is bool []: whether the model begins with
    its initial state.

    Args:
        length: Number of words per sequence.
        options: Options of all tasks.
        vocabulary_size: Number of different words.
        model_options: Options of the models.
        builders: Builders of the models, by architecture.
        n_streams: Number of streams that an evaluation computes in one call.
    """

    def __init__(
        self,
        *,
        length: int,
        options: TaskOptions,
        vocabulary_size: int,
        model_options: Mapping[str, Any],
        builders: Mapping[str, Callable[..., LanguageModel]],
        n_streams: int,
    ) -> None:
        self._length, self._options, self._n_streams = length, options, n_streams
        shape = vocabulary_size, length
        built_in = modules.architectures(builders, (shape,), model_options)
        own = modules.with_own(built_in, options, {"shape": shape})
        super().__init__(own, options.device)

    @property
    def tokens_in_batch(self) -> int:
        """Number of words in a full batch of a worker."""
        return self._options.batch_size * self._length

    def model(self, architecture: str, seed: int) -> nn.Module:
        """The model of the base. Raises ValueError if it is no LanguageModel, too."""
        model = super().model(architecture, seed)
        if not isinstance(model, LanguageModel):
            raise ValueError(
                f"task_architecture={architecture}: use a LanguageModel of "
                f"powergossip.tasks.language_models, which carries its state through a text"
            )
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean cross-entropy [nats] of a batch. Metrics: it and the accuracy, detached.

        Changes the carried state of the model in place.
        """
        assert isinstance(model, LanguageModel)
        words, targets, epoch_begins = batch
        scores, state = model(words, {} if epoch_begins else model.state)
        model.state = {name: value.detach() for name, value in state.items()}
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        accuracy = (scores.detach().argmax(2) == targets).float().mean()
        return loss, {"cross_entropy": loss.detach(), "accuracy": accuracy}

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """The state after the last batch. Empty before the first, and for models without state."""
        assert isinstance(model, LanguageModel)
        return dict(model.state)

    def carry(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Restore, in place, the state returned by `carried`."""
        assert isinstance(model, LanguageModel)
        model.state = {name: value.to(self._options.device) for name, value in state.items()}

    @abstractmethod
    def streams(self, split: Split) -> tuple[Tensor, Tensor]:
        """Words and next words of a split for its evaluation: int64 [stream, position].

        A model begins each stream with its initial state. Targets `NO_WORD` are not counted.
        """

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums over the i-th of n parts of a split, part = (i, n).

        The sums are cross-entropy [nats], accuracy (number of words predicted correctly) and count.
        A part consists of whole streams, so that the total over all parts does not depend on n. The
        state is carried through a stream.
        """
        assert isinstance(model, LanguageModel)
        i, n = part
        assert 0 <= i < n
        words, targets = self.streams(split)
        chosen = slice(*(len(words) * bound // n for bound in (i, i + 1)))
        count = int((targets[chosen] != NO_WORD).sum())
        cross_entropy = torch.zeros((), dtype=torch.float64, device=words.device)
        correct = torch.zeros((), dtype=torch.int64, device=words.device)
        with torch.no_grad(), modules.evaluation_mode(model):
            for rows in range(chosen.start, chosen.stop if count else 0, self._n_streams):
                state: dict[str, Tensor] = {}
                last_row = min(rows + self._n_streams, chosen.stop)
                for start in range(0, words.shape[1], self._length):
                    here = slice(rows, last_row), slice(start, start + self._length)
                    scores, state = model(words[here], state)
                    losses = functional.cross_entropy(
                        scores.flatten(0, 1),
                        targets[here].flatten(),
                        ignore_index=NO_WORD,
                        reduction="none",
                    )
                    cross_entropy += losses.double().sum()
                    correct += (scores.argmax(2) == targets[here]).sum()
        return {
            "cross_entropy": cross_entropy.item(),
            "accuracy": float(correct.item()),
            "count": float(count),
        }


class LanguageModeling(LanguageTask):
    """A `Task` with batches (words, next words, first step of the epoch).

    Words are int64 [stream, position], and the last entry is bool []. The state of a model is
    carried through an epoch and detached between batches, so that gradients end at the start of a
    sequence. Samples are words, in counts and metrics.

    Attributes:
        steps_per_epoch: Number of sequences per stream in the smallest piece, for all workers. The
            last sequence may be shorter. `drop_last` omits it.
        vocabulary: The word of each index.
        splits: The words of each split: int64 [word of the text].
    """

    def __init__(
        self,
        corpus: texts.Corpus,
        length: int,
        options: TaskOptions,
        model_options: Mapping[str, Any],
        builders: Mapping[str, Callable[..., LanguageModel]] = ARCHITECTURES,
    ) -> None:
        """Partition the training text.

        Args:
            length: Number of words per sequence.
            builders: Builders of the models, by architecture.

        Raises:
            ValueError: If the options do not match the corpus.
        """
        n_words = len(corpus.splits["train"])
        # A sequence needs one word more: the target of its last position.
        smallest = smallest_shard(n_words // (length + 1), options, f"sequences of {length} words")
        assert smallest >= options.batch_size
        super().__init__(
            length=length,
            options=options,
            vocabulary_size=len(corpus.vocabulary),
            model_options=model_options,
            builders=builders,
            n_streams=N_STREAMS,
        )
        self._bounds = bounds(n_words, options.n_workers).tolist()
        self._padding, self.vocabulary = corpus.padding, corpus.vocabulary
        n_targets = self._words_in_stream(n_words // options.n_workers) - 1
        self.steps_per_epoch = n_targets // length if options.drop_last else -(-n_targets // length)
        self.splits = {name: text.to(options.device) for name, text in corpus.splits.items()}
        self.samples = {name: len(text) for name, text in self.splits.items()}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the texts."""
        return {f"the {NAMES[name]} texts": sha256(text) for name, text in self.splits.items()}

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        """The words of a worker, their next words, and whether this is the first step of an epoch.

        0 ≤ step < steps_per_epoch. The last entry is on the CPU.
        """
        assert 0 <= step < self.steps_per_epoch
        piece = self.splits["train"][self._bounds[worker] : self._bounds[worker + 1]]
        n_streams = self._options.batch_size
        words_in_stream = self._words_in_stream(len(piece))
        piece = piece[: n_streams * words_in_stream]
        if len(piece) < n_streams * words_in_stream:
            n_missing = n_streams * words_in_stream - len(piece)
            piece = functional.pad(piece, (0, n_missing), value=self._padding)
        streams = piece.view(n_streams, words_in_stream)
        first, last = step * self._length, min((step + 1) * self._length, words_in_stream - 1)
        return streams[:, first:last], streams[:, first + 1 : last + 1], torch.tensor(step == 0)

    def _words_in_stream(self, n_words: int) -> int:
        """Words in each of batch_size streams: rounded up with the word `PADDING`, else down."""
        n_streams = self._options.batch_size
        return -(-n_words // n_streams) if self._padding is not None else n_words // n_streams

    def streams(self, split: Split) -> tuple[Tensor, Tensor]:
        """The words of a split and their next words: int64 [N_STREAMS, position].

        The end of the last stream is padded with words 0 and targets `NO_WORD`.
        """
        text = self.splits[split]
        size = -(-(len(text) - 1) // N_STREAMS)
        words = text.new_zeros(N_STREAMS * size)
        targets = torch.full_like(words, NO_WORD)
        words[: len(text) - 1], targets[: len(text) - 1] = text[:-1], text[1:]
        return words.view(N_STREAMS, size), targets.view(N_STREAMS, size)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """The perplexity, exp of the mean cross-entropy; infinite if it overflows."""
        try:
            return {"perplexity": math.exp(means["cross_entropy"])}
        except OverflowError:
            return {"perplexity": math.inf}

    def label_counts(self, epoch: int = 0) -> Tensor | None:
        """None: words have no labels."""
        return None


def _check_partition(options: TaskOptions) -> None:
    """Raise ValueError for partitions that need labels or another order of the samples."""

    def require(key: str, value: Any, ok: bool, accepted: str) -> None:
        checks.check(f"decentralized_data_{key}", value, ok, accepted)

    column, alpha, ratio = options.column, options.dirichlet_alpha, options.shuffled_ratio
    require("column", column, column is None, "null; text keeps its order")
    require("dirichlet_alpha", alpha, alpha is None, "null; text has no labels")
    ok = ratio == 0 or not options.decentralized
    require("shuffled_ratio", ratio, ok, "0; text keeps its order")
