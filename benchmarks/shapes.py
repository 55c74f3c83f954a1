"""The shapes of the parameters of the models that benchmarks use."""

Shapes = list[tuple[int, ...]]


def resnet20() -> Shapes:
    """3 input channels, 10 classes, projection shortcuts: 272,474 parameters."""
    shapes, inputs = _convolution(16, 3, 3), 16
    for channels in (16, 32, 64):
        for _ in range(3):
            shapes += _convolution(channels, inputs, 3) + _convolution(channels, channels, 3)
            if inputs != channels:
                shapes += _convolution(channels, inputs, 1)
            inputs = channels
    return [*shapes, (10, 64), (10,)]


def resnet50() -> Shapes:
    """25,557,032 parameters. He et al. (2015), arXiv:1512.03385, Table 1."""
    shapes, inputs = _convolution(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _convolution(width, inputs, 1) + _convolution(width, width, 3)
            shapes += _convolution(4 * width, width, 1)
            if block == 0:
                shapes += _convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def _convolution(channels: int, inputs: int, size: int) -> Shapes:
    return [(channels, inputs, size, size), (channels,), (channels,)]  # and batch norm


def lstm() -> Shapes:
    """3 layers of 650, tied, vocabulary of 28,869 (WikiText-2): 28,949,319 parameters."""
    layer: Shapes = [(4 * 650, 650), (4 * 650, 650), (4 * 650,), (4 * 650,)]
    return [(28_869, 650), *layer * 3, (28_869,)]


def matrix100() -> Shapes:
    """The single matrix of the consensus experiments."""
    return [(100, 100)]


MODELS = {"resnet20": resnet20, "lstm": lstm, "matrix100": matrix100}
