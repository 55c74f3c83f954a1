"""Data of the tasks."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from powergossip.consensus.data import DRAWN
from powergossip.state_trees import sha256
from powergossip.tasks import fashion_mnist as files
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.task import TaskOptions


class Images(ImageClassification):
    """The first images of a data set, with a hash of them."""

    def __init__(self, train: LabeledImages, test: LabeledImages, options: TaskOptions):
        super().__init__(train, test, files.N_LABELS, options)
        parts = (train.images, train.labels, test.images, test.labels)
        self.facts = {"data": sha256(*parts)}


def fashion_mnist(options: TaskOptions, images: int, test_images: int) -> Images:
    """FashionMNIST's first training and test images, as many as these."""
    given = dataclasses.replace(options, task="FashionMNIST", task_options={})
    paths = files.find(given)
    train, test = (
        LabeledImages(split.images[:count], split.labels[:count])
        for split, count in (
            (files.load(*paths[:2]), images),
            (files.load(*paths[2:]), test_images),
        )
    )
    return Images(train, test, given)


def matrices(values: dict[str, Any], seed: int) -> Tensor:
    """The matrices of the workers, float32 [worker, row, column]."""
    make, generator = DRAWN[values["matrices"]], torch.Generator().manual_seed(seed)
    return torch.stack([make(values["size"], generator) for _ in range(values["n_workers"])])
