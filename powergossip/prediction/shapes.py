"""Tensors of a model: of an architecture, of a number of parameters, or given as shapes."""

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import nn

from powergossip import checks
from powergossip.parameters import Layout, matrix_shape
from powergossip.tasks import language_models, models

Shapes = list[tuple[int, ...]]

CIFAR, IMAGENET, DIGITS = (3, 32, 32), (3, 224, 224), (1, 8, 8)
WIKITEXT = (28_869, 30)  # words, and words of a sequence
BYTES = (256, 128)  # likewise

ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: models.MLP(DIGITS, 10),
    "CNN": lambda: models.CNN(DIGITS, 10),
    "ResNet20": lambda: models.ResNet20(CIFAR, 10),
    "ResNet110": lambda: models.ResNet110(CIFAR, 10),
    "ResNet18": lambda: models.ImageNetResNet18(IMAGENET, 1000),
    "ResNet50": lambda: models.ImageNetResNet50(IMAGENET, 1000),
    "VGG16": lambda: models.VGG16BN(IMAGENET, 1000),
    "LSTM": lambda: language_models.LSTM(WIKITEXT),
    "GPT": lambda: language_models.GPT(BYTES),
}
LAYERS = 16  # square matrices of a model, if only its number of parameters is known
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
MOST = 10**9  # parameters

ACCEPTED = (
    f"{', '.join(ARCHITECTURES)}, a number of parameters such as 25.6M, "
    "or shapes such as 64x3x7x7,64,1000x512"
)


def layout(text: str) -> Layout:
    """Return the layout of `--model`. Raises BadValue."""
    shapes = _shapes(text)
    size = sum(math.prod(shape) for shape in shapes)
    checks.check("--model", text, 1 <= size <= MOST, f"1 to {MOST:,} parameters")
    return Layout(shapes)


def _shapes(text: str) -> Shapes:
    if text in ARCHITECTURES:
        with torch.device("meta"):
            return [tuple(p.shape) for p in ARCHITECTURES[text]().parameters()]
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", text.lower())
    if number:
        return of_size(round(float(number[1]) * SUFFIXES[number[2]]))
    if re.fullmatch(r"[0-9]{1,9}([x,][0-9]{1,9})+", text):
        return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    raise checks.BadValue("--model", text, ACCEPTED)


def of_size(parameters: int) -> Shapes:
    """Shapes of a model with this number of parameters: 16 equal square matrices, and a vector of
    the rest."""
    side = math.isqrt(parameters // LAYERS)
    if side < 2:
        return [(parameters,)]
    rest = parameters - LAYERS * side**2
    extra, vector = divmod(rest, side)  # further rows, of the first matrix
    shapes: Shapes = [(side + extra, side), *[(side, side)] * (LAYERS - 1)]
    return [*shapes, (vector,)] if vector else shapes


def described(of: Layout) -> str:
    """A sentence about the tensors."""
    matrices = [shape for shape in of.shapes if len(shape) > 1]
    sides: Sequence[int] = [side for shape in matrices for side in matrix_shape(shape)]
    largest = f", the longest side {max(sides):,}" if sides else ""
    return f"{of.size:,} parameters, {len(matrices)} matrices{largest}"
