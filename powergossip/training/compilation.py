"""Compilation of the local step by torch.compile."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from powergossip.checks import BadValue


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
