"""FashionMNIST: 60,000 + 10,000 gray images of clothes, 28 × 28 pixels, 10 labels.

References:
    Xiao, Rasul & Vollgraf (2017), arXiv:1708.07747.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powergossip.tasks import data_files, idx
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.task import Task, TaskOptions

N_LABELS = 10
DEFAULTS: Mapping[str, Any] = {
    "batch_size": 32,
    "num_epochs": 5,
    "lr_schedule_milestones": [[4.0, 0.1]],
}
SPLITS = {"train": "train", "test": "t10k"}  # split → prefix of its file names
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
NAMES = tuple(
    f"{prefix}-{kind}-ubyte"
    for prefix in SPLITS.values()
    for kind in ("images-idx3", "labels-idx1")
)


def task(options: TaskOptions) -> Task:
    """Classification of the images, without augmentation.

    The data come from `data_dir`, or from the first place that has them: $DATA, Debian's package
    dataset-fashion-mnist, the user's cache, the Hugging Face hub. Raises ValueError if they are not
    found, if a file is damaged, or if the options do not match them.
    """
    train_images, train_labels, test_images, test_labels = find(options)
    train, test = load(train_images, train_labels), load(test_images, test_labels)
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"training and test images in {train_images.parent} differ in size: "
            f"{list(train.images.shape[2:])} and {list(test.images.shape[2:])} pixels"
        )
    return ImageClassification(train, test, N_LABELS, options)


def find(options: TaskOptions) -> list[Path]:
    """The four files: training images and labels, test images and labels."""
    source = data_files.DataSource(
        options.task,
        NAMES,
        "zalando-datasets/fashion_mnist",
        _convert,
        suffix=".gz",
        places=(DEBIAN_FOLDER,),
        remedy="install Debian's package dataset-fashion-mnist",
    )
    return data_files.find(source, options.data_dir, options.download)


def load(images_path: Path, labels_path: Path) -> LabeledImages:
    """Load a split from its two IDX files. Raises ValueError if they are damaged or mismatched."""
    images, labels = idx.read(images_path, rank=3), idx.read(labels_path, rank=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} holds {len(images)} images, {labels_path} {len(labels)} labels"
        )
    if labels.max() >= N_LABELS:
        raise ValueError(f"{labels_path} holds label {labels.max()}: use 0 to {N_LABELS - 1}")
    return LabeledImages(images[:, None], labels.to(torch.int64))


def _convert(splits: Any) -> Iterator[tuple[str, bytes]]:
    names = iter(NAMES)
    for split in SPLITS:
        rows = list(splits[split])
        for column in ("image", "label"):
            array = np.stack([np.asarray(row[column], dtype=np.uint8) for row in rows])
            yield next(names), idx.encoded(torch.from_numpy(array))
