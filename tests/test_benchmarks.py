"""Benchmarks run and say what they measured; how fast is not for a test."""

import json

import pytest
from omegaconf import OmegaConf

import train
from benchmarks import train_step


@pytest.mark.parametrize("optimizer", ["power-gossip", "all-reduce"])
def test_a_step_of_training(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train_step, "ROUNDS", 3)
    monkeypatch.setattr(train_step, "SECONDS", 0.3)
    train_step.main([f"optimizer={optimizer}", "task_architecture=MLP", "n_workers=2"])
    line = json.loads(capsys.readouterr().out)
    assert (line["optimizer"], line["n_workers"], line["processes"]) == (optimizer, 2, 1)
    times = [value for key, value in line.items() if key.endswith("_ms")]
    assert len(times) == 5
    assert min(times) > 0
    assert line["data_ms"] < line["compute_ms"]
