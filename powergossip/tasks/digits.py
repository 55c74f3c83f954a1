"""Digits: 1797 handwritten digits of 8 × 8 pixels in 17 gray levels, shipped with scikit-learn.

References:
    Alpaydin & Kaynak (1998), "Optical Recognition of Handwritten Digits", doi:10.24432/C50P49 (the
    test part of it).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from powergossip.randomness import generator
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.task import Task, TaskOptions

SPLIT_SEED = 0  # of the split into training and test images, fixed for all runs


def task(options: TaskOptions) -> Task:
    """Classification of 1437 training and 360 test images. Needs neither files nor a network.

    Raises ValueError if the options do not match the data.
    """
    train, test = load()
    return ImageClassification(train, test, n_labels=10, options=options)


def _file() -> Path:
    """The file in scikit-learn, which takes longer to import than torch."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"


def load() -> tuple[LabeledImages, LabeledImages]:
    """Training and test images, split with equal label proportions."""
    rows = np.loadtxt(_file(), delimiter=",")
    pixels, digits = rows[:, :-1], rows[:, -1].astype(int)
    shuffled = generator(SPLIT_SEED, "digits").permutation(len(digits))
    by_label = shuffled[digits[shuffled].argsort(kind="stable")]
    images = torch.from_numpy(pixels[by_label]).to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.from_numpy(digits[by_label]).to(torch.int64)
    is_test = torch.arange(len(labels)) % 5 == 0
    return (
        LabeledImages(images[~is_test], labels[~is_test]),
        LabeledImages(images[is_test], labels[is_test]),
    )
