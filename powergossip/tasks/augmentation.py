"""Random changes to a batch of images that keep what they show.

Axis names: sample, row, column, channel. Contiguous tensors of any data type; the arguments are
left alone. A pixel's channels lie next to each other, so that a row of an image is one piece of
memory: moving images is a few copies of rows (a fifth of the time it takes a channel at a time).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Augmentation = Callable[[Tensor, np.random.Generator], Tensor]


def crop_and_flip(images: Tensor, random: np.random.Generator, padding: int = 4) -> Tensor:
    """Each image is shifted by up to `padding` pixels along both axes and, half of the time,
    mirrored.    Images [sample, row, column, channel] → the same shape.

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
    n, n_rows, n_columns, n_channels = images.shape
    padded = functional.pad(images, (0, 0, padding, padding, padding, padding))
    first_row, first_column = corners.to(images.device).unbind(1)
    # The pixels that rows of the cuts begin at, and a view of the rows that begin at every pixel.
    rows = first_row[:, None] + torch.arange(n_rows, device=images.device)
    rows = rows + torch.arange(n, device=images.device)[:, None] * padded.shape[1]
    starts = rows * padded.shape[2] + first_column[:, None]
    length = n_columns * n_channels
    n_starts = (padded.numel() - length) // n_channels + 1
    cuts = padded.as_strided((n_starts, length), (n_channels, 1))
    return cuts.index_select(0, starts.flatten()).view(images.shape)


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Left and right exchanged in those images that `mirrored` [sample] (bool) says."""
    chosen = mirrored.to(images.device).nonzero().squeeze(1)
    both = torch.cat((images, images.index_select(0, chosen).flip(2)))
    source = torch.arange(len(images), device=images.device)
    source[chosen] = len(images) + torch.arange(len(chosen), device=images.device)
    return both.index_select(0, source)
