"""Laws of the shards: partition, order and labels of the samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powergossip import tasks
from powergossip.randomness import generator
from powergossip.tasks.shards import Partition, apportion, bounds, skewed_by_label, sorted_by_label
from tests.harness.small_data import options

N_SAMPLES = 103  # a prime, so that nothing divides it
SPLITS: list[dict[str, Any]] = [
    {},
    {"reshuffle": False},
    {"decentralized": True},
    {"decentralized": True, "shuffled_ratio": 0.3},
    {"dirichlet_alpha": 0.01},
    {"dirichlet_alpha": 1.0, "reshuffle": False},
]


def shards(labels: Tensor | None = None, **changes: Any) -> Partition:
    labels = torch.arange(N_SAMPLES) % 10 if labels is None else labels
    return Partition(labels, options(**changes))


# The samples of each worker.


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("n_workers", [1, 3, 4, 11])
def test_every_sample_belongs_to_one_worker_in_an_epoch(
    split: dict[str, Any], n_workers: int
) -> None:
    """Labels need be neither consecutive nor equally frequent."""
    for labels in (None, torch.tensor([3] * 7 + [90] * 60 + [41] * 36)):
        dealt = shards(labels, n_workers=n_workers, **split)
        for epoch in (0, 1):
            pieces = [dealt.indices(worker, epoch) for worker in range(n_workers)]
            assert torch.equal(torch.cat(pieces).sort().values, torch.arange(N_SAMPLES))
            sizes = [len(piece) for piece in pieces]
            assert max(sizes) - min(sizes) <= 1
            assert dealt.steps_per_epoch == (min(sizes) + 6) // 8  # the last with 2 or more


@pytest.mark.parametrize("split", SPLITS)
def test_order_depends_on_epoch_worker_and_seed(split: dict[str, Any]) -> None:
    """The samples of a worker too, unless their order alone is random."""
    dealt, again, other = shards(**split), shards(**split), shards(seed=2, **split)
    first = dealt.indices(2, 0).tolist()
    assert first == again.indices(2, 0).tolist()
    for found in (dealt.indices(2, 7), dealt.indices(1, 0), other.indices(2, 0)):
        assert first != found.tolist()
    assert (set(first) == set(dealt.indices(2, 7).tolist())) == bool(split)
    if split not in ({}, {"decentralized": True}):
        assert set(first) != set(other.indices(2, 0).tolist())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("lost", [{0}, {1, 4}, {0, 2, 3, 4}])
def test_the_others_take_over_the_samples_of_lost_workers(
    split: dict[str, Any], lost: set[int]
) -> None:
    dealt, gone = shards(n_workers=5, **split), frozenset(lost)
    before = [dealt.indices(worker, 3) for worker in range(5)]
    pieces = {worker: dealt.indices(worker, 3, gone) for worker in range(5) if worker not in lost}
    assert torch.equal(torch.cat(list(pieces.values())).sort().values, torch.arange(N_SAMPLES))
    sizes = [len(piece) for piece in pieces.values()]
    assert max(sizes) - min(sizes) <= 2
    again = shards(n_workers=5, **split)
    for worker, piece in pieces.items():
        if split:  # fixed shards
            assert set(before[worker].tolist()) < set(piece.tolist())
        assert torch.equal(again.indices(worker, 3, gone), piece)
        assert torch.equal(dealt.indices(worker, 3), before[worker])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 26}, "^batch_size=26: use batch_size ≤ 25 or n_workers ≤ 3; 103 samples "),
        ({"batch_size": 1, "n_workers": 104}, "^batch_size=1: use n_workers ≤ 103; "),
        ({"batch_size": 104}, "^batch_size=104: use batch_size ≤ 25; "),
        ({"batch_size": 0}, "^batch_size=0: use 1 or more$"),
        ({"n_workers": 0}, "^n_workers=0: use 1 or more$"),
        ({"batch_size": 104, "n_workers": 104}, "^batch_size=104: use less of .*n_workers; "),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    assert shards(batch_size=25).steps_per_epoch == 1  # a whole shard
    with pytest.raises(ValueError, match=message):
        shards(**changes)


@pytest.mark.parametrize(
    ("n_samples", "n_workers", "steps", "sizes"),
    [
        (50_000, 8, 49, {106}),  # the published 48 · 128 + 106
        (8 * 258, 8, 3, {2}),
        (8 * 258 + 1, 8, 3, {2, 3}),
        (8 * 257, 8, 2, {128}),  # not one sample, which batch norm could not normalize
        (8 * 258 - 1, 8, 2, {128}),  # nor in one worker only
    ],
)
def test_the_rest_of_an_epoch_is_a_batch(
    n_samples: int, n_workers: int, steps: int, sizes: set[int]
) -> None:
    labels = torch.zeros(n_samples, dtype=torch.int64)
    for drop_last in (False, True):
        dealt = shards(labels, n_workers=n_workers, batch_size=128, drop_last=drop_last)
        full = n_samples // n_workers // 128
        assert dealt.steps_per_epoch == (full if drop_last else steps)
    last = {len(dealt.indices(w, 0)[(steps - 1) * 128 : steps * 128]) for w in range(n_workers)}
    assert last == sizes


# Sorted by label.


def concentration(counts: Tensor) -> float:
    """χ² / degrees of freedom of label counts [worker, label]; about 1 for IID shards."""
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    return chi_squared / ((counts.shape[0] - 1) * (counts.shape[1] - 1))


def test_sorting_gives_each_worker_few_labels_and_mixing_undoes_it() -> None:
    def label_counts(epoch: int = 0, **split: Any) -> Tensor:
        task = tasks.make("Digits", n_workers=8, batch_size=8, seed=3, **split)
        counts = task.label_counts(epoch)
        assert counts is not None
        return counts

    counts = {
        ratio: label_counts(decentralized=True, shuffled_ratio=ratio)
        for ratio in (0.0, 0.2, 0.5, 1.0)
    }
    labels_held = (counts[0.0] > 0).sum(1)
    assert labels_held.max() <= 3
    concentrations = [concentration(count) for count in counts.values()]
    assert concentrations == sorted(concentrations, reverse=True)
    # With 63 degrees of freedom: a deviation of 5 standard deviations, √(2/63) each.
    bound = 1 + 5 * math.sqrt(2 / 63)
    assert concentrations[-1] < bound < concentrations[-2] / 10
    reshuffled = label_counts(epoch=2)
    assert concentration(reshuffled) < bound
    for count in (*counts.values(), label_counts(dirichlet_alpha=0.1)):
        assert torch.equal(count.sum(0), reshuffled.sum(0))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_shuffled_ratio_is_the_fraction_of_samples_that_may_move(ratio: float) -> None:
    labels = torch.arange(1000) % 7
    order = sorted_by_label(labels, ratio, generator(0, "test"))
    assert sorted(order) == list(range(1000))
    moved = (order != labels.argsort(stable=True).numpy()).mean()
    assert ratio - 0.01 <= moved <= ratio  # a sample may return to its own index


# Drawn from Dirichlet's distribution.

N_LABELS = 10


def dealt_counts(
    alpha: float, n_workers: int, per_label: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The order of samples with equally frequent labels, and label counts [worker, label]."""
    labels = torch.from_numpy(
        generator(1, "labels").permutation(np.arange(N_LABELS).repeat(per_label))
    )
    ends = bounds(len(labels), n_workers)
    order = skewed_by_label(labels, ends, alpha, generator(seed, "test"))
    assert sorted(order) == list(range(len(labels)))
    pieces = np.split(labels.numpy()[order], ends[1:-1])
    return order, np.stack([np.bincount(piece, minlength=N_LABELS) for piece in pieces])


def test_a_large_alpha_gives_equal_proportions() -> None:
    for alpha in (1e6, 1e308):
        _, counts = dealt_counts(alpha, n_workers=20, per_label=1000)
        assert np.abs(counts - 50).max() <= 3


@pytest.mark.parametrize("alpha", [1e-4, 1e-300, 5e-324])
def test_a_small_alpha_gives_each_worker_a_label_or_two(alpha: float) -> None:
    """A worker has another label only if one ran out, which each of the ten does once. The samples
    of a label are not in the order of the file."""
    for seed in range(3):
        order, counts = dealt_counts(alpha, n_workers=12, per_label=1000, seed=seed)
        held = counts > 10
        assert held.sum() < 12 + N_LABELS
        assert (held.sum(1) <= 2).mean() >= 0.7
        assert (np.diff(order[:800]) > 0).mean() < 0.7


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_proportions_have_the_moments_of_dirichlet(alpha: float) -> None:
    """Mean 1/k, variance (1/k)(1 − 1/k) / (kα + 1), for the k labels of a worker whom others leave
    enough: the first of each of many deals."""
    shares = np.stack(
        [dealt_counts(alpha, 10, 200, seed)[1][0] / 200 for seed in range(300)]
    )  # [deal, label]
    variance = 0.1 * 0.9 / (N_LABELS * alpha + 1)
    assert np.abs(shares.mean(0) - 0.1).max() < 5 * math.sqrt(variance / 300)
    # Shares of a deal are nearly independent, but their squares' tails are heavy.
    assert shares.var() == pytest.approx(variance, rel=0.25)


def test_the_proportion_of_an_exhausted_label_goes_to_the_others() -> None:
    available = np.array([5, 1000, 1000, 0, 1000])
    log_shares = np.log([0.5, 0.2, 0.1, 0.1, 0.1])
    counts = apportion(405, log_shares, available)
    assert counts.tolist() == [5, 200, 100, 0, 100]
    assert available.tolist() == [5, 1000, 1000, 0, 1000]
    assert apportion(3005, log_shares, available).tolist() == available.tolist()


def test_apportioned_numbers_add_up_and_are_rounded_proportions() -> None:
    """For some λ, each number is λ times its weight to within 1, or all that is available."""
    random = generator(0, "test")
    for _ in range(300):
        available = random.integers(0, 30, 8)
        size = int(random.integers(0, available.sum() + 1))
        log_shares = random.normal(size=8) * random.choice([0.1, 3, 100, 1000])
        counts = apportion(size, log_shares, available)
        assert counts.sum() == size
        assert (counts >= 0).all()
        assert (counts <= available).all()
        not_out, several = counts < available, counts >= 2
        if not_out.any() and several.any():
            most = (np.log(counts[not_out] + 1) - log_shares[not_out]).min()  # bounds on log λ
            least = (np.log(counts[several] - 1) - log_shares[several]).max()
            assert least < most + 1e-9
