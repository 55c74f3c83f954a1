"""Benchmarks run and print their measurements. Speed is not tested."""

import json
from math import prod
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks import gossip_step
from powergossip.algorithms import AVERAGING
from powergossip.errors import BadInput


@pytest.mark.parametrize("algorithm", AVERAGING)
def test_a_step_of_averaging(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gossip_step, "config", OmegaConf.structured(gossip_step.GossipStep))
    quick = ["rounds=2", "seconds=0.1", "n_workers=8", "model=matrix100"]
    gossip_step.main([f"algorithm={algorithm}", *quick])
    line = json.loads(capsys.readouterr().out)
    assert line["algorithm"] == algorithm
    assert line["ms_per_step"] > 0
    assert line["floor_ms"] > 0
    expected = {
        "power-gossip": 2 * 32 * 100,
        "dpsgd": 2 * 32 * 10_000,
        "all-reduce": 2 * 7 * 32 * 10_000 // 8,
        "choco": 2 * (32 + 10_000),
        "deepsqueeze": 2 * (32 + 10_000),
        "moniqua": 2 * 2 * 10_000,
        "push-sum": 2 * 32 * 10_001,
        "sparta": 2 * 32 * 50,
    }
    assert line["bits_per_step"] == expected[algorithm]


def test_options_are_those_of_the_algorithms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that the chosen algorithm lacks is rejected."""

    def line(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(gossip_step, "config", OmegaConf.structured(gossip_step.GossipStep))
        quick = ["rounds=1", "seconds=0.01", "n_workers=4", "model=matrix100"]
        gossip_step.main([*quick, *arguments])
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    top_k = line("algorithm=choco", "options.compressor=top-k", "options.keep_ratio=0.05")
    assert (top_k["compressor"], top_k["bits_per_step"]) == ("top-k", 2 * 500 * (32 + 16))
    assert line("algorithm=power-gossip", "options.rank=3")["rank"] == 3
    for algorithm, bad in (("dpsgd", "rank=1"), ("choco", "keep_ratio=0.05")):
        with pytest.raises(BadInput, match=bad):
            line(f"algorithm={algorithm}", f"options.{bad}")
    with pytest.raises(BadInput, match="model=vgg"):
        line("model=vgg")


def test_shapes_are_those_of_the_models() -> None:
    sizes = {name: sum(map(prod, shapes())) for name, shapes in gossip_step.MODELS.items()}
    assert sizes == {"resnet20": 272_474, "lstm": 28_949_319, "matrix100": 10_000}
