"""Laws of the placement of shards on the graph."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import tasks, topologies
from powergossip.network import Processes, processes
from powergossip.tasks.placement import mixed
from powergossip.tasks.shards import Shards
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.small_data import options
from tests.harness.training import configured

GRAPHS = ["ring", "star", "torus", "exponential", "epidemic", "binary-tree"]


def mixing(name: str, n: int) -> Any:
    topology = topologies.make(name, n)
    matrices: list[Any] = [r.matrix() for r in topology.rounds]
    return sum(matrices) / topology.period


def sorted_counts(n: int, n_labels: int = 10) -> np.ndarray:
    """Label counts [shard, label] of data sorted by label."""
    labels = np.arange(60 * n * n_labels) * n_labels // (60 * n * n_labels)
    return np.stack([np.bincount(part, minlength=n_labels) for part in np.split(labels, n)])


def heterogeneity(counts: np.ndarray, mixing: Any) -> Any:
    """‖Σ_j w_ij h_j − h‖₂² of each worker: float64 [worker]. Arguments as of `mixed`."""
    proportions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return ((mixing @ (proportions - proportions.mean(axis=0))) ** 2).sum(axis=1)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("skew", ["sorted", "dirichlet"])
def test_the_objective_falls_and_never_rises(name: str, skew: str) -> None:
    n, W = 16, mixing(name, 16)
    random = np.random.default_rng(0)
    counts = sorted_counts(n)
    if skew == "dirichlet":
        counts = random.multinomial(1000, random.dirichlet(np.full(10, 0.1), n))
    placed = mixed(counts, W)
    assert sorted(placed) == list(range(n))
    before, after = (heterogeneity(c, W).mean() for c in (counts, counts[placed]))
    assert after <= before
    assert after < before or (name, skew) == ("star", "sorted")  # a swap of leaves has no effect
    again = mixed(counts[placed], W)
    assert again.tolist() == list(range(n)), "no swap is left"


def test_neighbors_on_a_ring_have_other_labels() -> None:
    """Not worse than 2 % above the best of all placements, and better for each worker."""
    counts, W = sorted_counts(8, 4), mixing("ring", 8)
    placed = mixed(counts, W)
    best = min(heterogeneity(counts[[0, *p]], W).mean() for p in permutations(range(1, 8)))
    assert heterogeneity(counts[placed], W).mean() <= 1.02 * best
    h = counts / counts.sum(1, keepdims=True)
    largest = [abs(W @ h[p] - h.mean(0)).sum(1).max() for p in (np.arange(8), placed)]
    assert largest[1] < 0.8 * largest[0]


def test_the_matrix_is_that_of_the_receiver() -> None:
    """Worker 0 receives from all others, which receive from it alone: Wᵀ has another optimum."""
    W = mixing("epidemic", 6)
    counts = np.eye(6, dtype=np.int64)[[0, 0, 1, 1, 2, 2]] * 10
    placed = mixed(counts, W)
    h = counts[placed] / 10 - (counts / 10).mean(0)
    expected = [((W.toarray()[i][:, None] * h).sum(0) ** 2).sum() for i in range(6)]
    np.testing.assert_allclose(heterogeneity(counts[placed], W), expected)
    for i in range(6):
        for j in range(i):
            swapped = placed.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert heterogeneity(counts[swapped], W).sum() >= sum(expected) - 1e-2


@pytest.mark.parametrize(
    "split", [{"reshuffle": False}, {"decentralized": True}, {"dirichlet_alpha": 0.1}], ids=str
)
def test_shards_are_permuted(split: dict[str, Any]) -> None:
    labels = torch.arange(103) % 10
    given, placed = (
        Shards(labels, options(n_workers=8, placement=W, **split))
        for W in (None, mixing("ring", 8))
    )
    first, second = (
        sorted(tuple(sorted(s.indices(i, 3).tolist())) for i in range(8)) for s in (given, placed)
    )
    assert first == second
    assert given.steps_per_epoch == placed.steps_per_epoch
    again = Shards(labels, options(n_workers=8, placement=mixing("ring", 8), **split))
    assert all(torch.equal(again.indices(i, 3), placed.indices(i, 3)) for i in range(8))


def test_shards_that_change_in_each_epoch_are_rejected() -> None:
    W = mixing("ring", 4)
    for make in (
        lambda: Shards(torch.arange(103) % 10, options(placement=W)),
        lambda: tasks.make("LSTM", n_workers=4, batch_size=4, seed=1, placement=W),
    ):
        with pytest.raises(ValueError, match=r"^decentralized_data_placement=mixed: use given"):
            make()


def facts(who: Processes, **changes: Any) -> list[list[int]]:
    """The label counts [worker, label] among the facts of a run."""
    given = {"n_workers": 8, "task_architecture": "MLP", "use_decentralized_data": True, **changes}
    run = Trainer(checked(configured(**given), who), who)
    return run.facts()["label_counts"]


def test_the_key_reaches_the_shards_and_the_facts() -> None:
    given, on_ring, elsewhere = (
        facts(Processes(), optimizer="dpsgd", topology=topology, decentralized_data_placement=place)
        for place, topology in (
            ("given", "ring"),
            ("mixed", "ring"),
            ("mixed", "one-peer-exponential"),
        )
    )
    assert sorted(given) == sorted(on_ring) == sorted(elsewhere)
    W = mixing("ring", 8)
    before, after = (heterogeneity(np.array(counts), W).mean() for counts in (given, on_ring))
    assert after < 0.8 * before
    assert on_ring != elsewhere


@pytest.mark.parallel([2])
def test_all_processes_place_alike() -> None:
    given = {"topology": "double-binary-tree", "topology_options": {"weights": "fastest"}}
    given["decentralized_data_placement"] = "mixed"
    both = processes()
    first, second = both.gather(facts(both, **given))
    assert first == second == facts(Processes(), **given)
