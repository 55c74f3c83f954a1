"""Models for images [sample, channel, row, column] → scores [sample, label].

Weights start as torch's default initializers leave them. `ARCHITECTURES` holds a builder for each:
(channels, rows, columns) of the images and the number of labels → model. What a builder takes by
name only is an option of the tasks.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]  # channels, rows, columns

# Batch norm: Ioffe & Szegedy (2015), arXiv 1502.03167. Group norm, with 8 groups: Wu & He (2018),
# arXiv 1803.08494.
NORMALIZATIONS: dict[str, Callable[[int], nn.Module]] = {
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


class ResNet(nn.Module):
    """A 3 × 3 convolution, stages of residual blocks, the mean over the image, a linear layer.

    widths: channels of each stage. The first stage keeps the size of the image, each other one
    halves it. Where a stage changes the shape, the shortcut is a projection (option B of He et al.
    2015, arXiv 1512.03385, § 3.3).
    """

    def __init__(
        self, shape: Shape, n_labels: int, widths: list[int], depth: int, normalization: str
    ) -> None:
        """depth: residual blocks in a stage; normalization: of `NORMALIZATIONS`."""
        super().__init__()
        norm = NORMALIZATIONS[normalization]
        self.conv = nn.Conv2d(shape[0], widths[0], 3, padding=1, bias=False)
        self.norm = norm(widths[0])
        blocks = []
        for before, after in zip([widths[0], *widths], widths, strict=False):
            blocks.append(ResidualBlock(before, after, 1 if before == after else 2, norm))
            blocks += [ResidualBlock(after, after, 1, norm) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(widths[-1], n_labels)

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


def ResNet20(shape: Shape, n_labels: int, *, normalization: str = "batch") -> ResNet:
    """Three stages of three blocks with 16, 32 and 64 channels; 272,474 parameters for 3 channels
    and 10 labels.    He et al. (2015), arXiv 1512.03385, § 4.2

    For CIFAR they use option A, zeros for the new channels; the PowerGossip paper's parameter count
    is that of projections.
    """
    return ResNet(shape, n_labels, [16, 32, 64], 3, normalization)


def ResNet18(shape: Shape, n_labels: int, *, normalization: str = "batch") -> ResNet:
    """Four stages of two blocks with 64 to 512 channels; 11,173,962 parameters for 3 channels and
    10 labels.    He et al. (2015), arXiv 1512.03385, table 1

    Theirs is for images of 224 × 224 pixels. For small ones, as is usual for CIFAR, its 7 × 7
    convolution with stride 2 and the max pooling after it are one 3 × 3 convolution.
    """
    return ResNet(shape, n_labels, [64, 128, 256, 512], 2, normalization)


class VGG11(nn.Module):
    """Eight 3 × 3 convolutions with 64 to 512 channels, five of which max pooling follows, the mean
    over what is left of the image, a linear layer; 9,228,362 parameters for 3 channels and 10
    labels.    Simonyan & Zisserman (2014), arXiv 1409.1556, table 1, column A

    Theirs is for images of 224 × 224 pixels and ends in three linear layers; one is usual for
    CIFAR. Unlike theirs, convolutions are normalized, which makes their biases pointless: there are
    none.
    """

    # Channels of each convolution, and pools between them.
    LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")

    def __init__(self, shape: Shape, n_labels: int, *, normalization: str = "batch") -> None:
        """Raises ValueError if there are less than 32 rows or columns."""
        super().__init__()
        channels, rows, columns = shape
        if min(rows, columns) < 32:
            raise ValueError(
                f"VGG11 halves images five times, for which {rows} × {columns} pixels are too few; "
                "use images of 32 × 32 or more, or another task_architecture"
            )
        layers: list[nn.Module] = []
        for width in self.LAYERS:
            if isinstance(width, int):
                layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=False))
                layers += [NORMALIZATIONS[normalization](width), nn.ReLU()]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(channels, n_labels)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.layers(images).mean((2, 3)))


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "CNN": CNN,
    "MLP": MLP,
    "ResNet20": ResNet20,
    "ResNet18": ResNet18,
    "VGG11": VGG11,
}
