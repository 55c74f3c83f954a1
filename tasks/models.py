"""Models for images [sample, channel, row, column] → scores [sample, label].

Weights start as torch's default initializers leave them. `ARCHITECTURES` holds a builder for each:
(channels, rows, columns) of the images and the number of labels → model.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]  # channels, rows, columns

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(min(8, channels), channels),
}


class CNN(nn.Module):
    """Two 3 × 3 convolutions, each halving the image by max pooling, and two linear layers.

    Without normalization: batch statistics are not gossiped, and so small a net needs none.
    """

    def __init__(self, shape: Shape, n_labels: int, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        channels, rows, columns = shape
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (rows // 4) * (columns // 4), hidden)
        self.output = nn.Linear(hidden, n_labels)

    def forward(self, images: Tensor) -> Tensor:
        # Pooling first and max(·, 0) after gives the same as the other way round, on a quarter.
        x = functional.max_pool2d(self.conv1(images), 2).relu()
        x = functional.max_pool2d(self.conv2(x), 2).relu()
        return self.output(self.hidden(x.flatten(1)).relu())


class MLP(nn.Module):
    """Two hidden layers."""

    def __init__(self, shape: Shape, n_labels: int, hidden: int = 128) -> None:
        super().__init__()
        channels, rows, columns = shape
        self.hidden1 = nn.Linear(channels * rows * columns, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, n_labels)

    def forward(self, images: Tensor) -> Tensor:
        x = self.hidden1(images.flatten(1)).relu()
        return self.output(self.hidden2(x).relu())


class ResNet20(nn.Module):
    """Three stages of three residual blocks with 16, 32 and 64 channels; 272,474 parameters for 3
    channels and 10 labels.    He et al. (2015), arXiv 1512.03385, § 4.2

    Where a stage changes the shape, the shortcut is a projection, their option B. For CIFAR they
    use option A, zeros for the new channels; the PowerGossip paper's parameter count is B's.
    `norm` is "batch" or "group" (Wu & He 2018, arXiv 1803.08494), with 8 groups.
    """

    def __init__(self, shape: Shape, n_labels: int, norm: str = "batch") -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f'norm "{norm}" is unknown; choose from {", ".join(NORMS)}')
        self.conv = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        self.norm = NORMS[norm](16)
        blocks = []
        for before, after, stride in [(16, 16, 1), (16, 32, 2), (32, 64, 2)]:
            blocks.append(ResidualBlock(before, after, stride, NORMS[norm]))
            blocks += [ResidualBlock(after, after, 1, NORMS[norm]) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(64, n_labels)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.conv(images)).relu())
        return self.output(x.mean((2, 3)))


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + f(x)), where f is two 3 × 3 convolutions."""

    def __init__(
        self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)
        self.shortcut: nn.Module = nn.Identity()
        if (before, stride) != (after, 1):
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), norm(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        f = self.norm1(self.conv1(x)).relu()
        return torch.relu(self.shortcut(x) + self.norm2(self.conv2(f)))


ARCHITECTURES: dict[str, Callable[[Shape, int], nn.Module]] = {
    "CNN": CNN,
    "MLP": MLP,
    "ResNet20": ResNet20,
}
