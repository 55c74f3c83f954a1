"""Language modeling: predict the next word of a text.

Axis names: stream, position (in a sequence), worker.

A worker's data are a contiguous piece of the training text. It is cut into batch_size streams, side
by side; step s of an epoch takes the s-th sequence of each, so that a model can carry its state
from batch to batch. The order is the same in each epoch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from powergossip.tasks import modules, task_options, texts
from powergossip.tasks.language_models import ARCHITECTURES, LanguageModel
from powergossip.tasks.shards import bounds, smallest_shard
from powergossip.tasks.task import Batch, Options, Split, Task

OPTIONS = {
    "dataset": task_options.one_of(texts.TEXTS),
    "sequence_length": task_options.COUNT,
    "min_count": task_options.COUNT,
    "hidden_size": task_options.COUNT,
    "num_layers": task_options.COUNT,
    "num_heads": task_options.COUNT,
    "dropout": task_options.SHARE,
}
N_STREAMS = 64  # that a text to evaluate is cut into
NO_WORD = -1  # nothing to predict: fills the last of them


def task(options: Options) -> Task:
    """Language modeling on a text of `texts.TEXTS`, by default Python's help, which needs no files.

    task_options: dataset: the text; sequence_length: words in a sequence, 30; min_count: rarer
    words of the training text are taken for unknown, 3 for topics and 1 for the others, which have
    that done. The others are the models'.

    Raises ValueError if the text is nowhere or damaged, or if the options do not fit it.
    """
    task_options.check(options.task, options.task_options, OPTIONS)
    given = dict(options.task_options)
    dataset = given.pop("dataset", "topics")
    length = given.pop("sequence_length", 30)
    min_count = given.pop("min_count", 3 if dataset == "topics" else 1)
    _refuse_labels(options)
    train, test = texts.TEXTS[dataset](options)
    return LanguageModeling(texts.numbered(train, test, min_count), length, options, given)


class LanguageModeling:
    """A `Task`: batches are (words, next words, whether the epoch begins): int64 [stream, position]
    twice and bool [].

    A model's state is carried through an epoch, detached from the batches before, so that gradients
    reach back to the start of a sequence. "Samples" are words: they are what is counted.
    """

    def __init__(
        self, corpus: texts.Corpus, length: int, options: Options, model_options: Mapping[str, Any]
    ) -> None:
        """length: words in a sequence. Raises ValueError if the options do not fit the corpus."""
        n_words = len(corpus.train)
        # A sequence and the word after it, that its last one is to predict.
        smallest = smallest_shard(n_words // (length + 1), options, f"sequences of {length} words")
        assert smallest >= options.batch_size
        self._length = length
        self._options = options
        self._bounds = bounds(n_words, options.n_workers).tolist()
        words_in_stream = n_words // options.n_workers // options.batch_size
        self._steps_per_epoch = (words_in_stream - 1) // length
        self._texts = {
            "train": corpus.train.to(options.device),
            "test": corpus.test.to(options.device),
        }
        self._architectures = modules.architectures(
            ARCHITECTURES, ((len(corpus.vocabulary), length),), model_options
        )

    @property
    def architectures(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Name → a function that builds the model on the CPU with fresh random weights."""
        return self._architectures

    @property
    def steps_per_epoch(self) -> int:
        """The same for all workers: the full sequences in each of the streams of the smallest
        piece. Words that fill no sequence are left out."""
        return self._steps_per_epoch

    def model(self, architecture: str, seed: int) -> nn.Module:
        """A new model on the task's device; its weights depend on architecture and seed only.

        Raises ValueError if the architecture is unknown or does not take a task option.
        """
        return modules.fresh(self._architectures, architecture, seed, self._options.device)

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        """A worker's words, the ones after them, and whether this is the first step of an epoch
        (on the CPU), 0 ≤ step < steps_per_epoch."""
        assert 0 <= step < self.steps_per_epoch
        piece = self._texts["train"][self._bounds[worker] : self._bounds[worker + 1]]
        n_streams = self._options.batch_size
        words_in_stream = len(piece) // n_streams
        streams = piece[: n_streams * words_in_stream].view(n_streams, words_in_stream)
        first, last = step * self._length, (step + 1) * self._length
        return streams[:, first:last], streams[:, first + 1 : last + 1], torch.tensor(step == 0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy [nats] of a batch; it and the accuracy, detached, as metrics.

        Changes the state that the model carries, in place.
        """
        assert isinstance(model, LanguageModel)
        words, targets, epoch_begins = batch
        scores, state = model(words, {} if epoch_begins else model.state)
        model.state = {name: value.detach() for name, value in state.items()}
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        accuracy = (scores.detach().argmax(2) == targets).float().mean()
        return loss, {"cross_entropy": loss.detach(), "accuracy": accuracy}

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """The state after the last batch; empty before the first, and for models that have none."""
        assert isinstance(model, LanguageModel)
        return dict(model.state)

    def carry(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Let the model, in place, continue from what `carried` gave."""
        assert isinstance(model, LanguageModel)
        model.state = {name: value.to(self._options.device) for name, value in state.items()}

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums over the i-th of n parts of a split, part = (i, n): cross-entropy [nats], accuracy
        (how many words are predicted right), count.

        A text is cut into 64 streams, and a part is some of them: so the sums of all parts do not
        depend on their number. The state is carried through a stream.
        """
        assert isinstance(model, LanguageModel)
        i, n = part
        assert 0 <= i < n
        words, targets = _streams(self._texts[split])
        chosen = slice(*(N_STREAMS * bound // n for bound in (i, i + 1)))
        words, targets = words[chosen], targets[chosen]
        count = float((targets != NO_WORD).sum().item())
        cross_entropy = torch.zeros((), dtype=torch.float64, device=words.device)
        correct = torch.zeros((), dtype=torch.int64, device=words.device)
        state: dict[str, Tensor] = {}
        with torch.no_grad(), modules.evaluation_mode(model):
            for start in range(0, words.shape[1] if count else 0, self._length):
                here = slice(start, start + self._length)
                scores, state = model(words[:, here], state)
                losses = functional.cross_entropy(
                    scores.flatten(0, 1),
                    targets[:, here].flatten(),
                    ignore_index=NO_WORD,
                    reduction="none",
                )
                cross_entropy += losses.double().sum()
                correct += (scores.argmax(2) == targets[:, here]).sum()
        return {
            "cross_entropy": cross_entropy.item(),
            "accuracy": float(correct.item()),
            "count": count,
        }

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """The perplexity, exp of the mean cross-entropy; infinite if that is too large a number."""
        try:
            return {"perplexity": math.exp(means["cross_entropy"])}
        except OverflowError:
            return {"perplexity": math.inf}

    def label_counts(self, epoch: int = 0) -> Tensor | None:
        """None: words have no labels."""
        return None


def _streams(text: Tensor) -> tuple[Tensor, Tensor]:
    """Words of a text and the ones after them, cut into streams: int64 [N_STREAMS, position].

    After the end of the text come words 0, with `NO_WORD` to predict.
    """
    size = -(-(len(text) - 1) // N_STREAMS)
    words = text.new_zeros(N_STREAMS * size)
    targets = torch.full_like(words, NO_WORD)
    words[: len(text) - 1], targets[: len(text) - 1] = text[:-1], text[1:]
    return words.view(N_STREAMS, size), targets.view(N_STREAMS, size)


def _refuse_labels(options: Options) -> None:
    """Raises ValueError for ways to deal out samples that text does not allow."""
    if options.dirichlet_alpha is not None:
        raise ValueError(
            f"decentralized_data_dirichlet_alpha={options.dirichlet_alpha}: text has no labels; "
            "leave it out"
        )
    if options.decentralized and options.shuffled_ratio != 0:
        raise ValueError(
            f"decentralized_data_shuffled_ratio={options.shuffled_ratio}: text keeps its order; "
            "use 0"
        )
