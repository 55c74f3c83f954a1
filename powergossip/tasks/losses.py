"""Losses and metrics of a user's data sets by default."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from powergossip.errors import BadInput

IGNORED_TARGET = -100  # as in torch's cross entropy

Metric = Callable[[Any, Any], Any]  # outputs and targets of a batch → mean over its samples


def default_loss(outputs: Any, targets: Any, place: str) -> tuple[str, Metric, dict[str, Metric]]:
    """The name of the default loss for these targets, the loss, and the metrics beside it.

    Raises BadInput, with a text that begins with `place`, if their shapes do not match.
    """
    for name, value in (("output of the model", outputs), ("target", targets)):
        if not isinstance(value, Tensor):
            raise BadInput(
                f"{place}: the {name} is a {type(value).__name__}; use tensors, or give a loss or "
                "forward to Datasets"
            )
    if targets.is_floating_point():
        fits = _like(outputs, targets).shape == targets.shape
        wanted = "the same, for the mean squared error"
    else:
        fits = outputs.shape[:-1] == targets.shape and outputs.ndim > 0
        wanted = "one axis more, of labels, for the cross entropy"
    if not fits:
        raise BadInput(
            f"{place}: outputs of the model have the shape {list(outputs.shape)}, targets "
            f"{list(targets.shape)}; use {wanted}, or give a loss to Datasets"
        )
    if targets.is_floating_point():
        return "mse", mean_squared_error, {}
    return "cross_entropy", cross_entropy, {"accuracy": accuracy}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy [nats], without targets of −100. It is 0 if all targets are −100.

    Args:
        outputs: Scores `[*, label]`.
        targets: Labels `[*]`, integers.

    Raises BadInput, on a CPU, for labels without an output.
    """
    scores, labels = outputs.flatten(0, -2), targets.flatten().long()
    try:
        mean = functional.cross_entropy(scores, labels, ignore_index=IGNORED_TARGET)
    except IndexError as error:
        n = scores.shape[-1]
        raise BadInput(
            f"{str(error).rstrip('.')}: use labels from 0 to {n - 1}, as the model has {n} "
            "outputs, or give a loss to Datasets"
        ) from error
    return torch.where((labels != IGNORED_TARGET).any(), mean, 0)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The fraction of targets with the highest output, without targets of −100. 0 without others.

    Args:
        outputs: Scores `[*, label]`.
        targets: Labels `[*]`, integers.
    """
    counted = targets != IGNORED_TARGET
    correct = (outputs.argmax(-1) == targets) & counted
    return correct.sum() / counted.sum().clamp(min=1)


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error. outputs: [*], or [*, 1]. targets: floating-point numbers [*]."""
    if outputs.dtype in (torch.bfloat16, torch.float16):  # of autocast: targets are not rounded
        outputs = outputs.float()
    return functional.mse_loss(_like(outputs, targets), targets.to(outputs.dtype))


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [*, 1] as [*], if the targets are [*]."""
    return outputs.squeeze(-1) if outputs.shape == (*targets.shape, 1) else outputs
