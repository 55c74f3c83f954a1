"""Checkpoints of a run, compared."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powergossip.network import Processes
from powergossip.runs.checkpoints import Checkpoints


def entry_of(folder: Path, which: Any = "last") -> dict[str, Any]:
    """Step, score and facts of the last checkpoint, or of the best one."""
    found = Checkpoints(folder, Processes()).describe(which)
    assert found is not None
    return found


def end_of(folder: Path) -> dict[str, Any]:
    """The last checkpoint."""
    state: dict[str, Any] = Checkpoints(folder, Processes()).load(range(4))
    return state


def assert_same(one: Any, other: Any) -> None:
    """To the bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if key not in ("seconds", "phases"):
                assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
