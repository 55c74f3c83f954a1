"""Random changes to a batch of images that keep what they show.

Axis names: sample, channel, row, column. Any data type; the arguments are left alone.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Augmentation = Callable[[Tensor, np.random.Generator], Tensor]


def crop_and_flip(images: Tensor, random: np.random.Generator, padding: int = 4) -> Tensor:
    """Each image is shifted by up to `padding` pixels along both axes and, half of the time,
    mirrored.    Images [sample, channel, row, column] → the same shape.

    As in § 4.2 of He et al. (2015), arXiv 1512.03385.
    """
    corners = random.integers(0, 2 * padding + 1, size=(len(images), 2))
    mirrored = random.random(len(images)) < 0.5
    return flip(crop(images, torch.from_numpy(corners), padding), torch.from_numpy(mirrored))


def crop(images: Tensor, corners: Tensor, padding: int) -> Tensor:
    """Each image surrounded by zeros, cut to its size again at its own corner.

    corners: [sample, 2], first row and first column of the cut, in 0 … 2 · padding; (padding,
    padding) returns the image itself.
    """
    n_rows, n_columns = images.shape[2:]
    padded = functional.pad(images, [padding] * 4)
    cuts = padded.unfold(2, n_rows, 1).unfold(3, n_columns, 1)  # a view of all possible cuts
    first_row, first_column = corners.to(images.device).unbind(1)
    return cuts[torch.arange(len(images), device=images.device), :, first_row, first_column]


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Left and right exchanged in those images that `mirrored` [sample] (bool) says."""
    flipped = images.clone()
    chosen = mirrored.to(images.device).nonzero().squeeze(1)
    flipped[chosen] = images[chosen].flip(-1)  # a third of the time of torch.where on a CPU
    return flipped
