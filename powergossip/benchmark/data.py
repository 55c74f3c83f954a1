"""Data of the tasks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


def _random(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, size, generator=generator)


def _low_rank(size: int, generator: torch.Generator) -> Tensor:
    u, v = torch.linalg.qr(torch.randn(2, size, size, generator=generator)).Q
    return u * torch.arange(1, size + 1) ** -2.0 @ v.mT


MATRICES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "random": _random,
    "low-rank": _low_rank,
}


def matrices(values: dict[str, Any], seed: int) -> Tensor:
    """The matrices of the workers, float32 [worker, row, column]."""
    make, generator = MATRICES[values["matrices"]], torch.Generator().manual_seed(seed)
    return torch.stack([make(values["size"], generator) for _ in range(values["n_workers"])])
