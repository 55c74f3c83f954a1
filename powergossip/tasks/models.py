"""Image models: images [sample, channel, row, column] → scores [sample, label].

Initial weights are torch's defaults. `ARCHITECTURES` maps names to builders: (channels, rows,
columns) of the images and the number of labels → model. The keyword-only parameters of a builder
are options of the tasks.
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
    """Two 3 × 3 convolutions, each followed by 2 × 2 max pooling, and two linear layers.

    Without normalization: batch statistics are not gossiped, and a model of this size needs none.
    """

    def __init__(self, shape: Shape, n_labels: int, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        channels, rows, columns = shape
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (rows // 4) * (columns // 4), hidden)
        self.output = nn.Linear(hidden, n_labels)

    def forward(self, images: Tensor) -> Tensor:
        # Pooling before relu gives the same result as after it, with a quarter of the operations.
        x = functional.max_pool2d(self.conv1(images), 2).relu()
        x = functional.max_pool2d(self.conv2(x), 2).relu()
        return self.output(self.hidden(x.flatten(1)).relu())


class MLP(nn.Module):
    """A multilayer perceptron with two hidden layers."""

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
    """A 3 × 3 convolution, stages of residual blocks, global average pooling, a linear layer.

    widths: channels of each stage. The first stage keeps the size of the image, every other stage
    halves it. Where a stage changes the shape, the shortcut is a projection (option B of He et al.
    2015, arXiv 1512.03385, § 3.3).
    """

    def __init__(
        self, shape: Shape, n_labels: int, widths: list[int], depth: int, normalization: str
    ) -> None:
        """depth: residual blocks per stage; normalization: a name in `NORMALIZATIONS`."""
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
    """Three stages of three blocks with 16, 32 and 64 channels, 272,474 parameters for 3 channels
    and 10 labels.    He et al. (2015), arXiv 1512.03385, § 4.2

    For CIFAR they use option A, zeros for the new channels. Here projections are used, as the
    parameter count in the PowerGossip paper implies.
    """
    return ResNet(shape, n_labels, [16, 32, 64], 3, normalization)


def ResNet18(shape: Shape, n_labels: int, *, normalization: str = "batch") -> ResNet:
    """Four stages of two blocks with 64 to 512 channels, 11,173,962 parameters for 3 channels and
    10 labels.    He et al. (2015), arXiv 1512.03385, table 1

    The original is for images of 224 × 224 pixels. As is usual for CIFAR, one 3 × 3 convolution
    replaces its 7 × 7 convolution with stride 2 and the max pooling that follows.
    """
    return ResNet(shape, n_labels, [64, 128, 256, 512], 2, normalization)


class VGG11(nn.Module):
    """Eight 3 × 3 convolutions with five max poolings, global average pooling, a linear layer.

    64 to 512 channels, 9,228,362 parameters for 3 channels and 10 labels.    Simonyan & Zisserman
    (2014), arXiv 1409.1556, table 1, column A

    The original is for images of 224 × 224 pixels and ends in three linear layers. One is usual for
    CIFAR. Unlike the original, convolutions are normalized and have no biases, which normalization
    would cancel.
    """

    # Channels of each convolution, and max poolings.
    LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")

    def __init__(self, shape: Shape, n_labels: int, *, normalization: str = "batch") -> None:
        """Raises ValueError for images with fewer than 32 rows or columns."""
        super().__init__()
        channels, rows, columns = shape
        if min(rows, columns) < 32:
            raise ValueError(
                f"task_architecture=VGG11: use another one, or images of at least 32 × 32 pixels; "
                f"these have {rows} × {columns}"
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
