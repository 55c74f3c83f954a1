"""Precision of the local step: the loss of a batch and its gradient."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from powergossip.checks import BadValue

PRECISIONS = ("fp32", "bf16")


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """The context of a forward pass. fp32: the dtype of the model. bf16: torch's autocast, with
    parameters in float32.

    On a CPU, autocast gives every LSTM to oneDNN, which has one in bf16 with AVX-512 only. Without
    it, PyTorch computes the forward pass without oneDNN.
    """
    if precision != "bf16":
        yield
        return
    onednn: Any = torch.backends.mkldnn
    enabled = onednn.enabled
    if device.type == "cpu" and not _lstm_has_bf16():
        onednn.enabled = False
    try:
        with torch.autocast(device.type, torch.bfloat16):
            yield
    finally:
        onednn.enabled = enabled


@functools.cache
def _lstm_has_bf16() -> bool:
    """True if an LSTM can be computed in bf16 on this CPU, as autocast does."""
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True


def check_precision(precision: str, dtype: torch.dtype) -> None:
    """Raise BadValue if a precision has no effect on a model of this dtype."""
    if precision == "bf16" and dtype == torch.float64:  # autocast leaves it as it is
        raise BadValue("precision", precision, "fp32, which leaves the model in torch.float64")
