"""Image classification: images in memory, partitioned over the workers.

Axis names: sample, channel, row, column, worker, label.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from powergossip.randomness import generator
from powergossip.tasks import modules, task_options
from powergossip.tasks.augmentation import Augmentation
from powergossip.tasks.models import ARCHITECTURES, NORMALIZATIONS
from powergossip.tasks.shards import Shards, held_out
from powergossip.tasks.task import Batch, Options, Split

OPTIONS = {"normalization": task_options.one_of(NORMALIZATIONS)}
EVALUATION_CHUNK = 500  # images per forward pass: fast, and small in memory


@dataclass(frozen=True)
class LabeledImages:
    images: Tensor  # uint8 [sample, channel, row, column]
    labels: Tensor  # int64 [sample]

    def where(self, chosen: Tensor) -> "LabeledImages":
        """The samples for which `chosen`, bool [sample], is true."""
        return LabeledImages(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True)
class _Split:
    """The stored images of a split, with the channels of a pixel adjacent."""

    pixels: Tensor  # uint8 [sample, row, column, channel], contiguous
    labels: Tensor  # int64 [sample]

    @classmethod
    def of(cls, data: LabeledImages, device: torch.device) -> "_Split":
        pixels = data.images.permute(0, 2, 3, 1).contiguous()
        return cls(pixels.to(device), data.labels.to(device))


class ImageClassification:
    """A `Task` with batches of images and labels.

    images: float32 [sample, channel, row, column]. labels: int64 [sample].

    Images are normalized to mean 0 and variance 1 in each channel of the training set. Models have
    no state beyond parameters and buffers. Images are stored as bytes, a quarter of their
    normalized size, since every process has all of them.
    """

    def __init__(
        self,
        train: LabeledImages,
        test: LabeledImages,
        n_labels: int,
        options: Options,
        augment: Augmentation | None = None,
    ) -> None:
        """augment: applied to the bytes of training batches [sample, row, column, channel], with a
        generator derived from (seed, epoch, worker, step).

        Raises ValueError if the options do not match the data.
        """
        task_options.check(options.task, options.task_options, OPTIONS)
        self.augment = augment
        splits: dict[Split, LabeledImages] = {"train": train, "test": test}
        if options.validation_ratio:
            held = torch.from_numpy(held_out(train.labels, options.validation_ratio))
            splits |= {"train": train.where(~held), "valid": train.where(held)}
            train = splits["train"]
        self._shards = Shards(train.labels, options)
        self._options = options
        self._n_labels = n_labels
        shape = tuple(train.images.shape[1:])  # channel, row, column
        self._architectures = modules.architectures(
            ARCHITECTURES, (shape, n_labels), options.task_options
        )
        self._shift, self._scale = _normalization(train.images, options.device)
        self._splits = {name: _Split.of(data, options.device) for name, data in splits.items()}

    @property
    def architectures(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Name → a function that builds the model on the CPU with fresh random weights."""
        return self._architectures

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in the smallest shard, for all workers."""
        return self._shards.steps_per_epoch

    @property
    def samples(self) -> Mapping[Split, int]:
        """Number of images of each split. "valid" is left out if no images are held out."""
        return {name: len(data.labels) for name, data in self._splits.items()}

    def model(self, architecture: str, seed: int) -> nn.Module:
        """Build a model on the task's device. Its weights depend on architecture and seed only.

        Raises ValueError if the architecture is unknown, too deep for images of this size, or lacks
        one of the task options.
        """
        return modules.fresh(self._architectures, architecture, seed, self._options.device)

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        """The images and labels of a worker at a step of an epoch, 0 ≤ step < steps_per_epoch."""
        assert 0 <= step < self.steps_per_epoch
        size = self._options.batch_size
        indices = self._shards.indices(worker, epoch)[step * size : (step + 1) * size]
        train = self._splits["train"]
        images = train.pixels.index_select(0, indices)
        if self.augment is not None:
            random = generator(self._options.seed, "augment", epoch, worker, step)
            images = self.augment(images, random)
        return self._normalize(images), train.labels.index_select(0, indices)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean cross-entropy [nats] of a batch. Metrics: it and the accuracy, detached."""
        images, labels = batch
        scores = model(images)  # [sample, label]
        loss = functional.cross_entropy(scores, labels)
        accuracy = (scores.detach().argmax(1) == labels).float().mean()
        return loss, {"cross_entropy": loss.detach(), "accuracy": accuracy}

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """Empty: no state is carried from batch to batch."""
        return {}

    def carry(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Do nothing: no state is carried from batch to batch."""
        assert not state

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums over the i-th of n parts of a split, part = (i, n), without augmentation.

        The sums are cross-entropy [nats], accuracy (number of correct predictions) and count.
        """
        i, n = part
        assert 0 <= i < n
        data = self._splits[split]
        first, last = (len(data.labels) * bound // n for bound in (i, i + 1))
        cross_entropy = torch.zeros((), dtype=torch.float64, device=self._options.device)
        correct = torch.zeros((), dtype=torch.int64, device=self._options.device)
        with torch.no_grad(), modules.evaluation_mode(model):
            for start in range(first, last, EVALUATION_CHUNK):
                chunk = slice(start, min(start + EVALUATION_CHUNK, last))
                scores, labels = model(self._normalize(data.pixels[chunk])), data.labels[chunk]
                losses = functional.cross_entropy(scores, labels, reduction="none")
                cross_entropy += losses.double().sum()
                correct += (scores.argmax(1) == labels).sum()
        return {
            "cross_entropy": cross_entropy.item(),
            "accuracy": float(correct.item()),
            "count": float(last - first),
        }

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Empty: there are no derived metrics."""
        return {}

    def label_counts(self, epoch: int = 0) -> Tensor:
        """Number of samples per worker and label in an epoch: int64 [worker, label]."""
        labels = self._splits["train"].labels
        return torch.stack(
            [
                torch.bincount(
                    labels[self._shards.indices(worker, epoch)], minlength=self._n_labels
                )
                for worker in range(self._options.n_workers)
            ]
        ).cpu()

    def _normalize(self, pixels: Tensor) -> Tensor:
        """uint8 [sample, row, column, channel] → float32 [sample, channel, row, column].

        The order in memory remains: channels_last. Convolutions and pooling keep it, and take down
        to half the time on a CPU.
        """
        rows = pixels.flatten(2).float()  # whole rows, for vector instructions
        return rows.sub_(self._shift).mul_(self._scale).view(pixels.shape).permute(0, 3, 1, 2)


def _normalization(images: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation for each element of a row: float32 [column · channel]."""
    # From the histogram of the bytes: exact, and without a floating-point copy of the images.
    counts = torch.stack(
        [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
    ).double()  # [channel, byte]
    frequencies = counts / counts.sum(1, keepdim=True)
    byte = torch.arange(256, dtype=torch.float64, device=images.device)
    mean = frequencies @ byte
    variance = (frequencies * (byte - mean[:, None]) ** 2).sum(1)
    scale = torch.where(variance > 0, variance, 1).rsqrt()  # a constant channel becomes 0
    n_columns = images.shape[3]
    return mean.repeat(n_columns).float().to(device), scale.repeat(n_columns).float().to(device)
