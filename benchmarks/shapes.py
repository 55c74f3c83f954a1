"""The shapes of the parameters of the models that benchmarks use."""

Shapes = list[tuple[int, ...]]


def resnet20() -> Shapes:
    """3 input channels, 10 classes, projection shortcuts: 272,474 parameters."""

    def convolution(channels: int, inputs: int, size: int = 3) -> Shapes:
        return [(channels, inputs, size, size), (channels,), (channels,)]  # and batch norm

    shapes, inputs = convolution(16, 3), 16
    for channels in (16, 32, 64):
        for _ in range(3):
            shapes += convolution(channels, inputs) + convolution(channels, channels)
            if inputs != channels:
                shapes += convolution(channels, inputs, size=1)
            inputs = channels
    return [*shapes, (10, 64), (10,)]


def lstm() -> Shapes:
    """3 layers of 650, tied, vocabulary of 28,869 (WikiText-2): 28,949,319 parameters."""
    layer: Shapes = [(4 * 650, 650), (4 * 650, 650), (4 * 650,), (4 * 650,)]
    return [(28_869, 650), *layer * 3, (28_869,)]


def matrix100() -> Shapes:
    """The single matrix of the consensus experiments."""
    return [(100, 100)]


MODELS = {"resnet20": resnet20, "lstm": lstm, "matrix100": matrix100}
