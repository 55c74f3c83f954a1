"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 color images of 32 × 32 pixels, 10 or 100 labels.

The files are from https://www.cs.toronto.edu/~kriz/cifar.html, which describes their format: the
"python version", unpacked.

References:
    Krizhevsky (2009), "Learning multiple layers of features from tiny images".
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powergossip.tasks import data_files
from powergossip.tasks.augmentation import crop_and_flip
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.task import Task, TaskOptions

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)  # channel, row, column
N_BYTES = 3 * 32 * 32  # of an image

# The defaults of the published program.    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425
DEFAULTS: Mapping[str, Any] = {
    "task_architecture": "ResNet18",
    "batch_size": 128,
    "num_epochs": 300,
    "learning_rate": 0.1,
    "lr_schedule_milestones": [[150.0, 0.1], [250.0, 0.1]],
}


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100, by the names of its files."""

    name: str  # prefix of the archives' names
    n_labels: int
    batches: tuple[str, ...]  # files: training batches, then the test batch
    folder: str
    labels_key: bytes  # in a file
    label_column: str  # on the hub

    def task(self, options: TaskOptions) -> Task:
        """Classification of the images, with random crops and flips of the training batches.

        The data come from `data_dir`, or from the first place that has them: $DATA, the user's
        cache, the Hugging Face hub. Raises ValueError if they are not found, if a file is damaged,
        or if the options do not match them.
        """
        train, test = self.load(options)
        return ImageClassification(train, test, self.n_labels, options, crop_and_flip)

    def load(self, options: TaskOptions) -> tuple[LabeledImages, LabeledImages]:
        """Training and test images, in the order of the files."""
        source = data_files.DataSource(
            options.task,
            self.batches,
            f"uoft-cs/{self.name.replace('-', '')}",
            self._convert,
            folder=self.folder,
            remedy=f"unpack {self.name}-python.tar.gz from {ADDRESS}",
        )
        paths = data_files.find(source, options.data_dir, options.download)
        *batches, test = map(self._images, paths)
        train = LabeledImages(
            torch.cat([batch.images for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
        )
        return train, test

    def _images(self, path: Path) -> LabeledImages:
        """The images and labels of a file, {b"data": uint8 [sample, 3072], labels_key: […], …}.

        Raises ValueError, with its name, if it has others.
        """
        content = data_files.read(path)
        try:
            batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
            images = torch.from_numpy(batch[b"data"].copy())
            labels = torch.tensor(batch[self.labels_key])
            if not len(labels) or images.shape != (len(labels), N_BYTES):
                raise ValueError(f"{len(labels)} labels, and images {list(images.shape)}")
            if (images.dtype, labels.dtype) != (torch.uint8, torch.int64):
                raise ValueError(f"images of {images.dtype}, labels of {labels.dtype}")
            if labels.min() < 0 or labels.max() >= self.n_labels:
                raise ValueError(f"use labels 0 to {self.n_labels - 1}")
        except Exception as error:  # damaged pickles raise exceptions of any type
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is damaged, or no file of {self.name}: {reason}") from error
        return LabeledImages(images.view(-1, *SHAPE), labels)

    def _convert(self, splits: Any) -> Iterator[tuple[str, bytes]]:
        """Convert the splits of the hub to files: (name, content)."""
        *train, test = self.batches
        for split, names in (("train", train), ("test", [test])):
            rows = splits[split]
            bounds = np.arange(len(names) + 1) * len(rows) // len(names)
            for name, first, last in zip(names, bounds, bounds[1:], strict=False):
                batch = [rows[int(i)] for i in range(first, last)]
                images = np.stack([self._image(row) for row in batch])
                labels = [row[self.label_column] for row in batch]
                yield name, pickle.dumps({b"data": images, self.labels_key: labels})

    def _image(self, row: Any) -> np.ndarray:
        """The bytes of an image of the hub, channel by channel."""
        image = np.asarray(row["img"], dtype=np.uint8)  # [row, column, channel]
        if image.shape != (32, 32, 3):
            raise ValueError(f"an image on the hub is {image.shape} instead of (32, 32, 3)")
        return image.transpose(2, 0, 1).ravel()


CIFAR10 = Cifar(
    name="cifar-10",
    n_labels=10,
    batches=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    folder="cifar-10-batches-py",
    labels_key=b"labels",
    label_column="label",
)
CIFAR100 = Cifar(
    name="cifar-100",
    n_labels=100,
    batches=("train", "test"),
    folder="cifar-100-python",
    labels_key=b"fine_labels",
    label_column="fine_label",
)


class _Unpickler(pickle.Unpickler):
    """An unpickler of numpy arrays and built-in types alone: a data file must not run code.

    `KNOWN` has the names written by Python 2 and 3, and by numpy before and after version 2.
    """

    KNOWN: Mapping[tuple[str, str], Any] = {
        ("multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),  # bytes, of Python 3
    }

    def find_class(self, module: str, name: str) -> Any:
        plain = module.removeprefix("numpy.core.").removeprefix("numpy._core.")
        if (plain, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which is not allowed in data")
        return self.KNOWN[plain, name]
