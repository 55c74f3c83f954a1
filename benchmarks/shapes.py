"""The shapes of the parameters of the models that benchmarks use."""

from collections.abc import Callable

from powergossip import prediction

Shapes = list[tuple[int, ...]]


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet20": lambda: prediction.layout("ResNet20").shapes,  # 272,474 parameters
    "lstm": lambda: prediction.layout("LSTM").shapes,  # 28,949,319 parameters
    "matrix100": lambda: [(100, 100)],  # of the consensus experiments
}
