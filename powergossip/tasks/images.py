"""Image classification: images, partitioned over the workers.

Axis names: sample, channel, row, column, worker, label.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from powergossip.randomness import generator
from powergossip.state_trees import sha256
from powergossip.tasks import modules, option_checks
from powergossip.tasks.augmentation import Augmentation
from powergossip.tasks.models import ARCHITECTURES, INITIALIZATIONS, NORMALIZATIONS, SHORTCUTS
from powergossip.tasks.shards import NOBODY, Partition, held_out
from powergossip.tasks.task import FIRST, NAMES, Batch, Split, TaskOptions

MODEL_OPTIONS = {
    "normalization": option_checks.one_of(NORMALIZATIONS),
    "initialization": option_checks.one_of(INITIALIZATIONS),
    "shortcut": option_checks.one_of(SHORTCUTS),
    "zero_init_residual": option_checks.FLAG,
    "plain": option_checks.FLAG,
}
CONSTANTS = ("pixel_mean", "pixel_deviation")  # in 0 … 1, for each channel
OPTIONS = {
    **MODEL_OPTIONS,
    "pixel_mean": option_checks.NUMBERS,
    "pixel_deviation": option_checks.POSITIVE_NUMBERS,
}
# Of a forward pass in evaluation: fast, and small in memory.
EVALUATION_CHUNK = 500  # images
EVALUATION_PIXELS = 1_600_000
TOP = 5  # highest scores of top5_accuracy

Pending = Callable[[], Tensor]  # waits for the pixels of some samples and returns them


class Reader(Protocol):
    """The pixels of a split, on the device of a task."""

    @property
    def augments(self) -> bool:
        """True if `request` augments images, and prepares them in the background."""
        ...

    def request(
        self, samples: Tensor | slice, random: np.random.Generator | None = None
    ) -> Pending:
        """The pixels of these samples: uint8 [sample, row, column, channel].

        Args:
            random: Generator for augmentation. None: no augmentation.
        """
        ...


class Images(Protocol):
    """The images of a split and their labels."""

    @property
    def labels(self) -> Tensor:
        """int64 [sample]"""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        ...

    def where(self, chosen: Tensor) -> Self:
        """The samples for which `chosen`, bool [sample], is true."""
        ...

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the pixels for normalization, in 0 … 1: [channel]."""
        ...

    def reader(self, device: torch.device) -> Reader:
        """The pixels, on a device."""
        ...


@dataclass(frozen=True)
class LabeledImages:
    """Images in memory."""

    images: Tensor  # uint8 [sample, channel, row, column]
    labels: Tensor  # int64 [sample]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        _, channels, rows, columns = self.images.shape
        return channels, rows, columns

    def where(self, chosen: Tensor) -> "LabeledImages":
        """The samples for which `chosen`, bool [sample], is true."""
        return LabeledImages(self.images[chosen], self.labels[chosen])

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the pixels, in 0 … 1: float64 [channel]."""
        # From the histogram of the bytes: exact, and without a floating-point copy of the images.
        counts = torch.stack(
            [torch.bincount(channel.flatten(), minlength=256) for channel in self.images.unbind(1)]
        ).double()  # [channel, byte]
        frequencies = counts / counts.sum(1, keepdim=True)
        byte = torch.arange(256, dtype=torch.float64, device=self.images.device)
        mean = frequencies @ byte
        variance = (frequencies * (byte - mean[:, None]) ** 2).sum(1)
        return mean / 255, variance.sqrt() / 255

    def reader(self, device: torch.device) -> "InMemory":
        """The pixels, on a device, with the channels of a pixel adjacent."""
        return InMemory(self.images.permute(0, 2, 3, 1).contiguous().to(device))


@dataclass(frozen=True)
class InMemory:
    """A `Reader` of images in memory."""

    pixels: Tensor  # uint8 [sample, row, column, channel], contiguous
    augments: ClassVar[bool] = False

    def request(
        self, samples: Tensor | slice, random: np.random.Generator | None = None
    ) -> Pending:
        """The pixels of these samples: uint8 [sample, row, column, channel]. Not augmented."""
        if isinstance(samples, slice):
            return lambda: self.pixels[samples]
        return lambda: self.pixels.index_select(0, samples)


class ImageClassification(modules.ModelTask):
    """A `Task` with batches of images and labels.

    images: float32 [sample, channel, row, column]. labels: int64 [sample].

    Images are normalized with the task options pixel_mean and pixel_deviation, in 0 … 1 for each
    channel: by default the training set's, for mean 0 and variance 1. Models have no state beyond
    parameters and buffers. Images are stored as bytes, a quarter of their normalized size, since
    every process has all of them.
    """

    redistributes: ClassVar[bool] = True

    def __init__(
        self,
        train: Images,
        test: Images,
        n_labels: int,
        options: TaskOptions,
        augment: Augmentation | None = None,
        *,
        architectures: Mapping[str, Callable[..., nn.Module]] = ARCHITECTURES,
        known_options: Mapping[str, option_checks.Accepted] = OPTIONS,
    ) -> None:
        """Load the data onto the device.

        Args:
            augment: Function applied to the bytes of training batches [sample, row, column,
                channel], with a generator derived from (seed, epoch, worker, step).
            architectures: Builders of the models.
            known_options: Task options and accepted values. The builder receives the ones in
                `MODEL_OPTIONS`.

        Raises:
            ValueError: If the options do not match the data.
        """
        given = options.task_options
        option_checks.check(options.task, given, known_options, options.architecture, MODEL_OPTIONS)
        self.augment = augment
        splits: dict[Split, Images] = {"train": train, "test": test}
        if options.validation_ratio:
            held = torch.from_numpy(held_out(train.labels, options.validation_ratio))
            splits |= {"train": train.where(~held), "valid": train.where(held)}
            train = splits["train"]
        self._shards = Partition(train.labels, options)
        self.steps_per_epoch = self._shards.steps_per_epoch
        self.samples = {name: len(data.labels) for name, data in splits.items()}
        self._options = options
        self._n_labels = n_labels
        built_in = modules.architectures(
            architectures,
            (train.shape, n_labels),
            {key: given[key] for key in given if key in MODEL_OPTIONS},
        )
        offered = {"shape": train.shape, "n_labels": n_labels}
        super().__init__(modules.with_own(built_in, options, offered), options.device)
        self._shift, self._scale = _normalization(train, given, options.device)
        self._chunk = max(
            1, min(EVALUATION_CHUNK, EVALUATION_PIXELS // (train.shape[1] * train.shape[2]))
        )
        self._labels = {name: data.labels.to(options.device) for name, data in splits.items()}
        self._readers = {name: data.reader(options.device) for name, data in splits.items()}
        # worker → epoch, step, lost workers, and the images
        self._ahead: dict[int, tuple[tuple[int, int, frozenset[int]], Pending]] = {}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the labels, and of the first images if they are in memory."""
        parts = {f"the {NAMES[split]} labels": of for split, of in self._labels.items()}
        for split, reader in self._readers.items():
            if not reader.augments:
                parts[f"the first {NAMES[split]} images"] = reader.request(slice(0, FIRST))()
        return {part: sha256(tensor) for part, tensor in parts.items()}

    def batch(self, worker: int, epoch: int, step: int, lost: frozenset[int] = NOBODY) -> Batch:
        """The images and labels of a worker at a step of an epoch, 0 ≤ step < steps_per_epoch.

        Args:
            lost: Workers whose samples the others have, see Partition.
        """
        samples = self._shards.batch(worker, epoch, step, lost)
        images = self._pending(worker, epoch, step, lost, samples)()
        if self.augment is not None:
            images = self.augment(images, self._random(worker, epoch, step))
        return self._normalize(images), self._labels["train"].index_select(0, samples)

    def batches(self, workers: range, epoch: int, step: int) -> Batch | None:
        """The batches of several workers as one, [worker, sample, ...], or None. See Task."""
        reader = self._readers["train"]
        if self.augment is not None or reader.augments:
            return None
        samples = self._shards.full_batches(workers, epoch, step)
        if samples is None:
            return None
        images = self._normalize(reader.request(samples.flatten())())
        return images.unflatten(0, samples.shape), self._labels["train"][samples]

    def _random(self, worker: int, epoch: int, step: int) -> np.random.Generator:
        return generator(self._options.seed, "augment", epoch, worker, step)

    def _pending(
        self, worker: int, epoch: int, step: int, lost: frozenset[int], samples: Tensor
    ) -> Pending:
        """The images of a batch. A reader that augments prepares the next step's images as well."""
        reader = self._readers["train"]
        if not reader.augments:
            return reader.request(samples)

        def request(step: int) -> Pending:
            return reader.request(
                self._shards.batch(worker, epoch, step, lost), self._random(worker, epoch, step)
            )

        known, pending = self._ahead.pop(worker, (None, None))
        if pending is None or known != (epoch, step, lost):
            pending = request(step)
        if step + 1 < self.steps_per_epoch:
            self._ahead[worker] = (epoch, step + 1, lost), request(step + 1)
        return pending

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean cross-entropy [nats] of a batch. Metrics: it and the accuracy, detached."""
        images, labels = batch
        scores = model(images)  # [sample, label]
        loss = functional.cross_entropy(scores, labels)
        accuracy = (scores.detach().argmax(1) == labels).float().mean()
        return loss, {"cross_entropy": loss.detach(), "accuracy": accuracy}

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums over the i-th of n parts of a split, part = (i, n), without augmentation.

        The sums are cross-entropy [nats], accuracy (number of correct predictions), count, and with
        more than five labels top5_accuracy (number of labels among the five highest scores).
        """
        i, n = part
        assert 0 <= i < n
        all_labels, reader = self._labels[split], self._readers[split]
        first, last = (len(all_labels) * bound // n for bound in (i, i + 1))
        chunks = [
            slice(start, min(start + self._chunk, last))
            for start in range(first, last, self._chunk)
        ]
        cross_entropy = torch.zeros((), dtype=torch.float64, device=self._options.device)
        correct = torch.zeros((), dtype=torch.int64, device=self._options.device)
        among_best = torch.zeros_like(correct)
        with torch.no_grad(), modules.evaluation_mode(model):
            for chunk, pixels in zip(chunks, _one_ahead(reader, chunks), strict=True):
                scores, labels = model(self._normalize(pixels)), all_labels[chunk]
                losses = functional.cross_entropy(scores, labels, reduction="none")
                cross_entropy += losses.double().sum()
                correct += (scores.argmax(1) == labels).sum()
                if self._n_labels > TOP:
                    best = scores.topk(TOP).indices  # [sample, 5]
                    among_best += (best == labels[:, None]).sum()
        top = {"top5_accuracy": float(among_best.item())} if self._n_labels > TOP else {}
        return {
            "cross_entropy": cross_entropy.item(),
            "accuracy": float(correct.item()),
            **top,
            "count": float(last - first),
        }

    def label_counts(self, epoch: int = 0) -> Tensor:
        """Number of samples per worker and label in an epoch: int64 [worker, label]."""
        return self._shards.label_counts(self._labels["train"], self._n_labels, epoch)

    def _normalize(self, pixels: Tensor) -> Tensor:
        """uint8 [sample, row, column, channel] → float32 [sample, channel, row, column].

        The order in memory remains: channels_last. Convolutions and pooling keep it, and take down
        to half the time on a CPU.
        """
        rows = pixels.flatten(2).float()  # whole rows, for vector instructions
        return rows.sub_(self._shift).mul_(self._scale).view(pixels.shape).permute(0, 3, 1, 2)


def _normalization(
    images: Images, given: Mapping[str, Any], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation for each element of a row: float32 [column · channel].

    Args:
        given: Task options.

    Raises:
        ValueError: If the options have another number of channels.
    """
    channels, _, columns = images.shape
    for key in CONSTANTS:
        if key in given and len(given[key]) != channels:
            raise ValueError(
                f"task_options.{key}={given[key]}: use a number for each of the {channels} channels"
            )
    found = (
        {} if {*CONSTANTS} <= {*given} else dict(zip(CONSTANTS, images.statistics(), strict=True))
    )
    mean, deviation = (
        torch.tensor(list(given[key]), dtype=torch.float64) if key in given else found[key]
        for key in CONSTANTS
    )
    scale = 1 / torch.where(deviation > 0, 255 * deviation, 1)  # a constant channel becomes 0
    return (255 * mean).repeat(columns).float().to(device), scale.repeat(columns).float().to(device)


def _one_ahead(reader: Reader, chunks: Sequence[slice]) -> Iterator[Tensor]:
    """The pixels of each chunk, while the next chunk's pixels are prepared."""
    pending = [reader.request(chunk) for chunk in chunks[:1]]
    for following in [*chunks[1:], None]:
        if following is not None:
            pending.append(reader.request(following))
        if pending:
            yield pending.pop(0)()
