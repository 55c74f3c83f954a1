"""Precision and compilation of the local step: the loss of a batch and its gradient."""

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def check_compiler(device: torch.device) -> None:
    """Raise BadValue if torch.compile lacks what it needs for a device."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(name) is None:
        raise BadValue("torch_compile", "true", f"false, or install a C++ compiler ({name}, CXX)")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise BadValue("torch_compile", "true", "false, or install triton")


def compile_models(models: Sequence[nn.Module]) -> None:
    """Compile the models' calls, in place: names of parameters and buffers stay the same.

    Each shape of a batch is compiled by itself, so that a result does not depend on the batches
    before it, and a resumed run is the same to the bit.
    """
    import torch._dynamo.config as settings  # takes a second

    # Beyond it, torch would silently run models as they are written. Each model has an entry for
    # each shape.
    settings.recompile_limit = max(settings.recompile_limit, 8 * (len(models) + 1))
    for model in models:
        model.compile(dynamic=False)


def not_compiled(compiled: bool) -> AbstractContextManager[object]:
    """A context where compiled models, if there are any, run uncompiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
