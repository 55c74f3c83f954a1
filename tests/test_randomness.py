"""Derived randomness: independent streams, the same wherever they are drawn."""

import numpy as np
import torch

import randomness


def test_a_stream_does_not_depend_on_what_is_drawn_beside_it() -> None:
    pairs = [(0, 1), (1, 2), (0, 7)]
    together = randomness.normal(randomness.keys(3, "edge", pairs), 5, (4, 2))
    for pair, expected in zip(pairs, together, strict=True):
        alone = randomness.normal(randomness.keys(3, "edge", [pair]), 5, (4, 2))[0]
        assert torch.equal(alone, expected)


def test_start_takes_a_stream_up_later() -> None:
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
