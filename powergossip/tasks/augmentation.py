"""Data augmentation: random crops and flips of a batch of images.

Axis names: sample, row, column, channel. Arguments are contiguous tensors of any data type and are
not changed. The channels of a pixel are adjacent, so that a row of an image is contiguous: shifting
an image copies whole rows, in a fifth of the time that separate channels take.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from powergossip.tasks.loading import on_device

Augmentation = Callable[[Tensor, np.random.Generator], Tensor]


def crop_and_flip(images: Tensor, random: np.random.Generator, padding: int = 4) -> Tensor:
    """Shift each image by up to `padding` pixels along both axes, and mirror it with probability ½.

    Images [sample, row, column, channel] → the same shape.

    References:
        He et al. (2015), arXiv:1512.03385, § 4.2.
    """
    corners = random.integers(0, 2 * padding + 1, size=(len(images), 2))
    mirrored = random.random(len(images)) < 0.5
    return flip(crop(images, torch.from_numpy(corners), padding), torch.from_numpy(mirrored))


def crop(images: Tensor, corners: Tensor, padding: int) -> Tensor:
    """Pad each image with zeros and crop it to its former size, each at its own corner.

    Args:
        corners: First row and first column of the crop [sample, 2], in 0 … 2 · padding. (padding,
            padding) returns the image itself.
    """
    n, n_rows, n_columns, n_channels = images.shape
    padded = functional.pad(images, (0, 0, padding, padding, padding, padding))
    first_row, first_column = on_device(corners, images.device).unbind(1)
    # The first pixel of each row of each crop, and a view of the rows that start at every pixel.
    rows = first_row[:, None] + torch.arange(n_rows, device=images.device)
    rows = rows + torch.arange(n, device=images.device)[:, None] * padded.shape[1]
    starts = rows * padded.shape[2] + first_column[:, None]
    length = n_columns * n_channels
    n_starts = (padded.numel() - length) // n_channels + 1
    all_rows = padded.as_strided((n_starts, length), (n_channels, 1))
    return all_rows.index_select(0, starts.flatten()).view(images.shape)


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror, left to right, the images where `mirrored` [sample] (bool) is set."""
    chosen = on_device(mirrored.nonzero().squeeze(1), images.device)
    both = torch.cat((images, images.index_select(0, chosen).flip(2)))
    source = torch.arange(len(images), device=images.device)
    source[chosen] = len(images) + torch.arange(len(chosen), device=images.device)
    return both.index_select(0, source)
