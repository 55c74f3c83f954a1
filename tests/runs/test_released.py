"""Runs one after the other in one process: of those that are over, nothing stays."""

import gc
import multiprocessing
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip.network import processes, standstill
from powergossip.training import recorder

TINY = ["task_architecture=MLP", "num_epochs=1", "max_steps_per_epoch=2", "log_verbosity=0"]


def held() -> Counter[str]:
    """Live objects of the library, tensors, threads, processes and open files: their numbers."""
    gc.collect()
    found = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if issubclass(kind, torch.Tensor) or str(kind.__module__).startswith("powergossip")
    )
    del found["powergossip.network.standstill.waiting"]  # its thread refers to the last one seen
    found["threads"] = threading.active_count()
    found["processes"] = len(multiprocessing.active_children())
    files = Path("/proc/self/fd")  # of Linux
    found["files"] = len(os.listdir(files)) if files.exists() else 0
    return found


def assert_nothing_stays(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a second run as much is held as after the first one, before which one filled caches."""
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(recorder, "report", lambda *_: None)  # a table and a figure
    with standstill.waiting(0, ()):  # starts the thread of all waits
        pass
    counts = []
    for run in ("warm-up", "first", "second"):
        place = processes().broadcast(str(folder / run))
        train.main([*TINY, *arguments, "--output-dir", place])
        counts.append(held())
    assert counts[1] == counts[2]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("n_workers", [4, 32], ids=["one by one", "batched"])
def test_a_run_leaves_nothing(
    n_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are in flight while gradients are computed."""
    assert_nothing_stays([f"n_workers={n_workers}"], tmp_path, monkeypatch)


def test_a_run_of_events_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_nothing_stays(["gossip=asynchronous", "n_workers=2"], tmp_path, monkeypatch)
