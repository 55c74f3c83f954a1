"""Derived randomness: independent streams, the same wherever they are drawn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import randomness
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from tests.harness.training import after_steps


def test_a_stream_does_not_depend_on_the_other_keys() -> None:
    pairs = [(0, 1), (1, 2), (0, 7)]
    together = randomness.normal(randomness.keys(3, "edge", pairs), 5, (4, 2))
    for pair, expected in zip(pairs, together, strict=True):
        alone = randomness.normal(randomness.keys(3, "edge", [pair]), 5, (4, 2))[0]
        assert torch.equal(alone, expected)


def test_start_is_an_index_in_the_stream() -> None:
    key = randomness.keys(3, "edge", [(0, 1)])
    whole = randomness.normal(key, 5, (10,))
    assert torch.equal(randomness.normal(key, 5, (6,), start=4), whole[:, 4:])
    assert torch.equal(randomness.normal(key, 5, (6,), start=torch.tensor([4])), whole[:, 4:])


def test_streams_are_standard_normal_and_independent() -> None:
    keys = randomness.keys(0, "edge", [(i, i + 1) for i in range(4)])
    numbers = torch.cat([randomness.normal(keys, t, (20_000,)) for t in (0, 1)]).double()
    n = numbers.shape[1]
    assert numbers.mean(1).abs().max() < 5 / n**0.5
    assert (numbers.var(1) - 1).abs().max() < 5 * (2 / n) ** 0.5
    assert ((numbers**4).mean(1) - 3).abs().max() < 5 * (96 / n) ** 0.5
    correlation = torch.corrcoef(numbers) - torch.eye(8)
    assert correlation.abs().max() < 5 / n**0.5
    lag = (numbers[:, 1:] * numbers[:, :-1]).mean(1)
    assert lag.abs().max() < 5 / n**0.5


def test_uniform_numbers_are_uniform_from_any_start() -> None:
    n = 40_002
    keys = randomness.keys(0, "edge", [(i, i + 1) for i in range(4)])
    numbers = randomness.uniform(keys, 2, n)
    assert numbers.dtype == torch.float32
    assert numbers.shape == (4, n)
    odd = numbers.double() * 2**17
    assert (odd % 2 == 1).all()
    assert odd.min() >= 1
    assert odd.max() < 2**17
    counts = torch.stack([torch.histc(row, 16, 0, 1) for row in numbers])
    chi_squared = ((counts - n / 16) ** 2 / (n / 16)).sum(1)  # mean 15, variance 30
    assert (chi_squared - 15).abs().max() < 5 * 30**0.5
    assert (torch.corrcoef(numbers) - torch.eye(4)).abs().max() < 5 / n**0.5
    for lag in (1, 2, 3, 4):  # also within what one hash gives
        products = (numbers[:, lag:] - 0.5) * (numbers[:, :-lag] - 0.5)
        assert products.mean(1).abs().max() < 5 / 12 / n**0.5
    assert torch.equal(randomness.uniform(keys[1], 2, 6, first=20), numbers[1, 20:26])
    assert not torch.equal(randomness.uniform(keys[1], 3, 6, first=20), numbers[1, 20:26])


def test_uniform_numbers_round_without_bias() -> None:
    n = 40_000
    numbers = randomness.uniform(randomness.keys(0, "rounding", [()])[0], 5, n)
    rounded = (2.3 + numbers).floor()
    assert abs(rounded.mean() - 2.3) < 5 * (0.21 / n) ** 0.5


def test_keys_and_starts_broadcast() -> None:
    keys = randomness.keys(0, "edge", [(0, 1), (1, 2)])
    before = keys.clone()
    starts = torch.tensor([0, 4, 9])
    together = randomness.bits(keys[:, None], 3, (2, 2), starts)
    assert together.shape == (2, 3, 2, 2)
    for i, key in enumerate(keys):
        for j, start in enumerate(starts.tolist()):
            assert torch.equal(randomness.bits(key, 3, (2, 2), start), together[i, j])
    assert torch.equal(keys, before)
    assert torch.equal(starts, torch.tensor([0, 4, 9]))


def test_bits_are_balanced_and_never_repeat() -> None:
    key = randomness.keys(0, "edge", [(0, 1)])
    numbers = torch.cat([randomness.bits(key, t, (20_000,)) for t in range(3)], 1)[0]
    assert len(numbers.unique()) == 60_000
    ones = (numbers[:, None] >> torch.arange(64) & 1).double().mean(0)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 60_000**0.5


def test_every_argument_counts() -> None:
    asked: list[tuple[int, str, tuple[int, ...]]] = [
        (1, "a", ()),
        (2, "a", ()),
        (1, "b", ()),
        (1, "a", (0,)),
        (1, "a", (1,)),
        (1, "a", (0, 1)),
        (1, "a", (1, 0)),
        (2**32 + 1, "a", ()),
    ]
    draws = {
        tuple(randomness.generator(seed, purpose, *ids).integers(0, 2**62, 2))
        for seed, purpose, ids in asked
    }
    assert len(draws) == 8
    assert randomness.torch_seed(1, "a") != randomness.torch_seed(1, "b")
    assert 0 <= randomness.torch_seed(1, "a") < 2**63


def test_edge_keys_do_not_collide() -> None:
    pairs = [(i, j) for i in range(60) for j in range(i + 1, 60)]
    assert len(np.unique(randomness.keys(0, "edge", pairs).numpy())) == len(pairs)


# Optimizers, other keys, and the purposes of their random numbers besides those of every run.
RANDOM_K: dict[str, Any] = {"optimizer_compressor": "random-k"}
CLOCK = {
    "jitter": 0.1,
    "late": {"fraction": 0.1, "seconds": 1.0},
    "loss": {"fraction": 0.1},
    "deaths": {"fraction": 0.25, "from": 1.0, "until": 2.0},
}
PURPOSES: list[tuple[str, dict[str, Any], set[str]]] = [
    *((name, {}, set()) for name in ("all-reduce", "dpsgd", "push-sum", "signsgd")),
    *((name, {}, set()) for name in ("sparse-loco", "demo")),  # with keys that nothing draws from
    *((name, {}, {name}) for name in ("power-gossip", "moniqua", "powersgd", "dgc", "sparta")),
    *((name, RANDOM_K, {"compressor"}) for name in ("choco", "deepsqueeze", "ef-sgd")),
    ("choco", {**RANDOM_K, "learning": "relay-sgd", "topology": "chain"}, {"compressor"}),
    ("dpsgd", {"topology": "random-regular"}, {"topology random-regular"}),
    ("dpsgd", {"topology": "random-matching"}, {"topology random-matching"}),
    ("dpsgd", {"use_decentralized_data": True}, {"decentralize"}),
    ("dpsgd", {"decentralized_data_dirichlet_alpha": 0.1}, {"dirichlet"}),
    ("dpsgd", {"scenario": CLOCK}, {"step length", "late", "loss", "deaths"}),
    ("power-gossip", {"scenario": {}}, {"power-gossip"}),
    ("choco", {**RANDOM_K, "scenario": {}}, {"compressor"}),
]


@pytest.mark.long
def test_a_run_draws_all_random_numbers_from_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the split of Digits into training and test data, which is the same for all seeds."""
    drawn: set[tuple[str, int]] = set()

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def record(seed: int, purpose: str, *ids: Any) -> Any:
            drawn.add((purpose, seed))
            return original(seed, purpose, *ids)

        return record

    for root in ("seed_sequence", "keys"):
        monkeypatch.setattr(randomness, root, recorded(getattr(randomness, root)))
    assert {name for name, _, _ in PURPOSES} == {*AVERAGING, *AGGREGATIONS}
    for name, changes, purposes in PURPOSES:
        drawn.clear()
        after_steps(1, seed=77, optimizer=name, n_workers=6, **changes)
        of_run = {"model", "shuffle", "layers", *purposes}
        drawn.discard(("compressor", 0))
        assert drawn == {("digits", 0), *((purpose, 77) for purpose in of_run)}, (name, changes)
