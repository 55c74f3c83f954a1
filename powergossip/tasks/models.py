"""Image models: images [sample, channel, row, column] → scores [sample, label].

`ARCHITECTURES` (small images) and `IMAGENET` map names to builders: (channels, rows, columns) of
the images and the number of labels → model. The keyword-only parameters of a builder are options of
the tasks::

    normalization       batch or group
    initialization      of the weights: a name in `INITIALIZATIONS`
    shortcut            where the shape of a residual changes: a name in `SHORTCUTS`
    plain               of VGG11: without normalization, with three linear layers
    zero_init_residual  whether the last normalization of a residual block starts with factors 0, so
                        that f(x) = 0    Goyal et al. (2017), arXiv:1706.02677, § 5.1
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import ClassVar

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


def _fan_out(model: nn.Module) -> None:
    """Convolutions: normal with variance 2 / (k² · channels of the output), no biases.

    References:
        He et al. (2015), arXiv:1502.01852, eq. 14.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


# Initial weights of convolutions. Other layers have torch's defaults.
INITIALIZATIONS: dict[str, Callable[[nn.Module], None]] = {
    "torch": lambda model: None,
    "fan-out": _fan_out,
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


class ZeroPadding(nn.Module):
    """Every other row and column, and zeros for the new channels.

    References:
        He et al. (2015), arXiv:1512.03385, § 3.3, option A.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self._new, self._stride = after - before, stride

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, :: self._stride, :: self._stride]
        return functional.pad(kept, (0, 0, 0, 0, 0, self._new))


def _projection(
    before: int, after: int, stride: int, norm: Callable[[int], nn.Module]
) -> nn.Module:
    """Option B of He et al. (2015), arXiv:1512.03385, § 3.3"""
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))


# Shortcuts where the shape changes: channels before and after, stride, normalization → module.
SHORTCUTS: dict[str, Callable[[int, int, int, Callable[[int], nn.Module]], nn.Module]] = {
    "projection": _projection,
    "zeros": lambda before, after, stride, norm: ZeroPadding(before, after, stride),
}


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + f(x)), where f is two 3 × 3 convolutions."""

    expansion = 1  # channels of the output, in widths
    sizes: ClassVar[tuple[int, ...]] = (3, 3)  # of the convolutions
    strided = 1  # the convolution that has the stride

    def __init__(
        self,
        before: int,
        width: int,
        stride: int,
        norm: Callable[[int], nn.Module],
        shortcut: str = "projection",
    ) -> None:
        super().__init__()
        after = self.expansion * width
        channels = [before, *[width] * (len(self.sizes) - 1), after]
        for i, (size, (inputs, outputs)) in enumerate(
            zip(self.sizes, pairwise(channels), strict=True), 1
        ):
            own = stride if i == self.strided else 1
            convolution = nn.Conv2d(inputs, outputs, size, own, padding=size // 2, bias=False)
            self.add_module(f"conv{i}", convolution)
            self.add_module(f"norm{i}", norm(outputs))
        self.shortcut: nn.Module = nn.Identity()
        if (before, stride) != (after, 1):
            self.shortcut = SHORTCUTS[shortcut](before, after, stride, norm)

    @property
    def last_norm(self) -> nn.Module:
        """The normalization that ends f."""
        return self.get_submodule(f"norm{len(self.sizes)}")

    def forward(self, x: Tensor) -> Tensor:
        f = x
        for i in range(1, 1 + len(self.sizes)):
            f = f.relu() if i > 1 else f
            f = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(f))
        return torch.relu(self.shortcut(x) + f)


class Bottleneck(ResidualBlock):
    """relu(shortcut(x) + f(x)), where f is 1 × 1, 3 × 3 and 1 × 1 convolutions.

    The 3 × 3 convolution has the stride, as in torchvision. He et al. have it in the first.
    """

    expansion = 4
    sizes = (1, 3, 1)
    strided = 2


class ResNet(nn.Module):
    """A convolution, stages of residual blocks, global average pooling, a linear layer.

    The first convolution is 3 × 3. With large_images it is 7 × 7 with stride 2, followed by 3 × 3
    max pooling with stride 2. The first stage keeps the size of the image, every other stage halves
    it.

    References:
        He et al. (2015), arXiv:1512.03385.
    """

    def __init__(
        self,
        block: type[ResidualBlock],
        widths: list[int],
        depths: list[int],
        large_images: bool,
        shape: Shape,
        n_labels: int,
        *,
        normalization: str = "batch",
        initialization: str = "torch",
        shortcut: str = "projection",
        zero_init_residual: bool = False,
    ) -> None:
        """widths, depths: of each stage, channels and number of residual blocks."""
        super().__init__()
        norm = NORMALIZATIONS[normalization]
        size, stride = (7, 2) if large_images else (3, 1)
        self.conv = nn.Conv2d(shape[0], widths[0], size, stride, padding=size // 2, bias=False)
        self.norm = norm(widths[0])
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large_images else nn.Identity()
        blocks: list[ResidualBlock] = []
        before = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(before, width, stride, norm, shortcut))
                before = block.expansion * width
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(before, n_labels)
        INITIALIZATIONS[initialization](self)
        if zero_init_residual:
            for each in blocks:
                nn.init.zeros_(each.last_norm.get_parameter("weight"))

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.norm(self.conv(images)).relu()))
        return self.output(x.mean((2, 3)))


# Small images, He et al. (2015), § 4.2. Parameters for 3 channels and 10 labels: 272,474 and
# 1,730,714. With shortcut=zeros, which they use for CIFAR, as DGC's published program does, 269,722
# and 1,727,962. Projections are the default, as the number of parameters in the PowerGossip paper
# implies.
ResNet20 = partial(ResNet, ResidualBlock, [16, 32, 64], [3, 3, 3], False)
ResNet110 = partial(ResNet, ResidualBlock, [16, 32, 64], [18, 18, 18], False)
# He et al. (2015), table 1, but for small images, as is usual for CIFAR. 11,173,962 parameters.
ResNet18 = partial(ResNet, ResidualBlock, [64, 128, 256, 512], [2, 2, 2, 2], False)
# The same table, large images. Parameters for 3 channels and 1000 labels, as in torchvision:
# 11,689,512 and 25,557,032.
ImageNetResNet18 = partial(
    ResNet, ResidualBlock, [64, 128, 256, 512], [2, 2, 2, 2], True, initialization="fan-out"
)
ImageNetResNet50 = partial(
    ResNet, Bottleneck, [64, 128, 256, 512], [3, 4, 6, 3], True, initialization="fan-out"
)


def _convolutions(
    channels: int, layers: tuple[int | str, ...], normalization: str, bias: bool
) -> nn.Sequential:
    """3 × 3 convolutions with these channels, each normalized, and 2 × 2 max poolings ("pool").

    Args:
        normalization: A name in NORMALIZATIONS, or "" for none.
    """
    modules: list[nn.Module] = []
    for width in layers:
        if isinstance(width, int):
            modules.append(nn.Conv2d(channels, width, 3, padding=1, bias=bias))
            modules += [NORMALIZATIONS[normalization](width)] if normalization else []
            modules.append(nn.ReLU())
            channels = width
        else:
            modules.append(nn.MaxPool2d(2))
    return nn.Sequential(*modules)


def _check_size(architecture: str, shape: Shape) -> None:
    """Raise ValueError for images that five poolings would make empty."""
    _, rows, columns = shape
    if min(rows, columns) < 32:
        raise ValueError(
            f"task_architecture={architecture}: use another one, or images of at least 32 × 32 "
            f"pixels; these have {rows} × {columns}"
        )


class VGG11(nn.Module):
    """Eight 3 × 3 convolutions with five max poolings, global average pooling, a linear layer.

    64 to 512 channels, 9,228,362 parameters for 3 channels and 10 labels.

    The original is for images of 224 × 224 pixels and ends in three linear layers. One is usual for
    CIFAR. Unlike the original, convolutions are normalized and have no biases, which normalization
    would cancel.

    With `plain`, as in the original, convolutions have biases and no normalization, and three
    linear layers with dropout follow. They have 512 units, not 4096: 9,750,922 parameters.

    References:
        - Simonyan & Zisserman (2014), arXiv:1409.1556, table 1, column A.
        - Vogels et al. (2021), arXiv:2110.04175, for the model with `plain`.
    """

    # Channels of each convolution, and max poolings.
    LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")

    def __init__(
        self,
        shape: Shape,
        n_labels: int,
        *,
        normalization: str = "batch",
        initialization: str = "torch",
        plain: bool = False,
    ) -> None:
        """Raises ValueError for images with fewer than 32 rows or columns."""
        super().__init__()
        _check_size("VGG11", shape)
        self.layers = _convolutions(
            shape[0], self.LAYERS, "" if plain else normalization, bias=plain
        )
        hidden: list[nn.Module] = []
        for _ in range(2 if plain else 0):
            hidden += [nn.Dropout(), nn.Linear(512, 512), nn.ReLU()]
        last = nn.Linear(512, n_labels)
        self.output = nn.Sequential(*hidden, last) if plain else last
        INITIALIZATIONS[initialization](self)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.layers(images).mean((2, 3)))


class VGG16BN(nn.Module):
    """13 normalized 3 × 3 convolutions with five max poolings, and three linear layers.

    138,365,992 parameters for 3 channels and 1000 labels, as in torchvision: convolutions have
    biases, 7 × 7 average pooling adapts to the size of the image, linear weights are normal with
    standard deviation 0.01.

    References:
        Simonyan & Zisserman (2014), arXiv:1409.1556, table 1, column D.
    """

    LAYERS = (
        *(64, 64, "pool"),
        *(128, 128, "pool"),
        *(256, 256, 256, "pool"),
        *(512, 512, 512, "pool"),
        *(512, 512, 512, "pool"),
    )

    def __init__(
        self,
        shape: Shape,
        n_labels: int,
        *,
        normalization: str = "batch",
        initialization: str = "fan-out",
    ) -> None:
        """Raises ValueError for images with fewer than 32 rows or columns."""
        super().__init__()
        _check_size("VGG16BN", shape)
        self.layers = _convolutions(shape[0], self.LAYERS, normalization, bias=True)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.linear = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, n_labels),
        )
        INITIALIZATIONS[initialization](self)
        if initialization == "fan-out":
            for layer in self.linear:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=0.01)
                    nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.pool(self.layers(images)).flatten(1))


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "CNN": CNN,
    "MLP": MLP,
    "ResNet20": ResNet20,
    "ResNet110": ResNet110,
    "ResNet18": ResNet18,
    "VGG11": VGG11,
}
IMAGENET: dict[str, Callable[..., nn.Module]] = {
    "ResNet18": ImageNetResNet18,
    "ResNet50": ImageNetResNet50,
    "VGG16BN": VGG16BN,
}
