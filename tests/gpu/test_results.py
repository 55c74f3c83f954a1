"""Results on a device are those of the CPU to rounding, for every row of the registries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import compressors, randomness
from powergossip.algorithms import aggregation
from powergossip.runs.checkpoints import Checkpoints
from powergossip.state_trees import Tree, map_tensors
from tests.harness.averaging import ALONE, EVERY
from tests.harness.on_device import (
    CPU,
    WORKERS,
    Difference,
    Rule,
    allowed,
    described,
    difference,
    layout,
    ring,
    values,
)

pytestmark = pytest.mark.gpu

STEPS = 2  # before a checkpoint, and after it


@pytest.mark.parametrize(
    ("sample", "tolerance"),
    [
        (lambda keys: randomness.bits(keys, 3, (999,)), 0.0),
        (lambda keys: randomness.bits(keys, 3, (9,), torch.arange(5, device=keys.device)), 0.0),
        (lambda keys: randomness.uniform(keys, 3, 999), 0.0),
        (lambda keys: randomness.normal(keys, 3, (999,)), 1e-6),
    ],
    ids=["bits", "bits from an index on", "uniform", "normal"],
)
def test_random_streams_are_those_of_the_cpu(
    sample: Callable[[Tensor], Tensor], tolerance: float, device: torch.device
) -> None:
    keys = randomness.keys(1, "check", [(i,) for i in range(5)])
    torch.testing.assert_close(sample(keys.to(device)).cpu(), sample(keys), rtol=0, atol=tolerance)


def save(rule: Rule, folder: Path) -> None:
    """Write a checkpoint, as the trainer does."""
    state = {
        "x": rule.x,
        "rule": rule.averaging.state_dict(),
        "network": rule.network.state_dict(),
    }
    Checkpoints(folder, ALONE).save(STEPS, rule.network.workers, state, {})


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*case, id=described(*case)) for case in EVERY]
)
def test_averaging_is_that_of_the_cpu(
    name: str, options: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    """Also after a checkpoint of the other device. The mean is kept, and the copies that neighbors
    keep of a worker's x are equal to the bit."""
    x, limit = values(seed=0), allowed(name, options)
    rules = {
        "device": Rule(name, options, ring(device), x),
        "cpu": Rule(name, options, ring(CPU), x),
    }
    for place, rule in rules.items():
        rule.steps(STEPS)
        save(rule, tmp_path / place)
        rule.steps(STEPS)
    on_device, on_cpu = rules["device"].x, rules["cpu"].x

    def resumed(place: str, where: torch.device) -> Tensor:
        state: Tree = Checkpoints(tmp_path / place, ALONE).load(range(WORKERS))
        rule = Rule(name, options, ring(where), state["x"])
        rule.averaging.load_state_dict(map_tensors(lambda t: t.to(where), state["rule"]))
        rule.network.load_state_dict(state["network"])
        return rule.steps(STEPS)

    apart = {
        "on the device": difference(on_device, on_cpu),
        "resumed on the CPU": difference(resumed("device", CPU), on_device),
        "resumed on the device": difference(resumed("cpu", device), on_cpu),
    }
    wrong = off(apart, limit)
    assert not wrong, wrong
    means = on_device.double().mean(0), x.double().mean(0)
    assert not difference(means[0] + 1, means[1] + 1).off
    state = rules["device"].averaging.state_dict()
    if {"public", "publics"} <= {*state}:  # each worker's copy of its own x, and those of neighbors
        neighbors = rules["device"].network.neighbors
        assert torch.equal(state["public"][neighbors], state["publics"])


AGGREGATIONS: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in aggregation.AGGREGATIONS if name != "ef-sgd"),
    *(("ef-sgd", {"compressor": compressor}) for compressor in compressors.COMPRESSORS),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, given, id=" ".join([name, *given.values()]))
        for name, given in AGGREGATIONS
    ],
)
def test_aggregations_are_those_of_the_cpu(
    name: str, options: dict[str, str], device: torch.device
) -> None:
    """The residuals, and the sum of the means, of a few random gradients."""

    def aggregated(where: torch.device) -> dict[str, Tensor]:
        network = ring(where)
        rule: Any = aggregation.make(name, network, layout(), **options)
        residual, mean, total = (torch.zeros_like(values(0), device=where) for _ in range(3))
        for step in range(2 * STEPS):
            rule.at_epoch(float(step))
            rule.at_learning_rate(0.1)
            residual += values(seed=1 + step).to(where)
            network.run(rule.step(residual, mean))
            total += mean
        return {"residual": residual, "sum of the means": total}

    found, expected = aggregated(device), aggregated(CPU)
    apart = {key: difference(found[key], expected[key]) for key in expected}
    wrong = off(apart, allowed(name, options))
    assert not wrong, wrong


def off(apart: dict[str, Difference], limit: float) -> dict[str, str]:
    """Differences in more than a fraction of the elements."""
    return {key: str(found) for key, found in apart.items() if found.off > limit}
