"""Gradients of given lengths, and the time to a target."""

import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import train
from experiments import slow_gradients, study
from powergossip.checks import BadValue
from powergossip.runs import metrics


def test_the_time_to_a_target_is_interpolated() -> None:
    curve = [1.0, 2.0, 4.0], [50.0, 40.0, 20.0]
    assert study.time_to(60.0, *curve) == 1.0
    assert study.time_to(25.0, *curve) == pytest.approx(3.5)
    with pytest.raises(ValueError, match="10"):
        study.time_to(10.0, *curve)


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["gossip=asynchronous"]])
def test_gradients_take_the_given_time(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    given = ["task_architecture=MLP", "n_workers=2", "num_epochs=1", "max_steps_per_epoch=4"]
    given += ["log_verbosity=0", "--output-dir", str(tmp_path / "run")]
    start = time.monotonic()
    slow_gradients.main(["pace=[0.02,0.1]", *given, *more])
    assert time.monotonic() - start >= 4 * 0.12
    assert not metrics.load(tmp_path / "run").empty


def test_without_a_pace() -> None:
    with pytest.raises(BadValue, match="pace"):
        slow_gradients.main(["task=Digits"])
