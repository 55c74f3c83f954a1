"""The accelerated exchanges of pairs: conserved sums, and decay rates per unit of time."""

import math

import numpy as np
import pytest
import torch

from powergossip import topologies
from powergossip.events.pairwise import AcceleratedPairs, rates_of
from tests.harness.averaging import graph
from tests.harness.exchanging import start


def decay(workers: int, accelerated: bool, units: int) -> float:
    """The factor of ‖x − x̄‖² per unit of time, over the second half of this time: the geometric
    mean over four seeds."""
    logarithms = []
    for seed in range(4):
        x = start(workers, torch.float64, seed, shapes=((4,),))
        x -= x.mean(0)
        pairs = AcceleratedPairs(topologies.make("ring", workers), x, accelerated=accelerated,
                                 seed=seed)  # fmt: skip
        found = []
        for time in (units / 2, units):
            pairs.run(time)
            found.append(float(x.square().sum()))
        logarithms.append(math.log(found[1] / found[0]) / (units / 2))
        assert float((x + pairs.second).sum(0).abs().max()) < 1e-12 * workers
    return math.exp(sum(logarithms) / len(logarithms))


@pytest.mark.parametrize(
    ("workers", "units", "plain", "accelerated"),
    [
        (16, 160, 0.927, 0.798),
        pytest.param(32, 200, 0.980, 0.888, marks=pytest.mark.slow),
        pytest.param(64, 500, 0.995, 0.944, marks=pytest.mark.slow),
    ],
)
def test_decay_rates_per_unit_of_time(workers, units, plain, accelerated):
    """To 15 % of the exponent. Those expected are measured on other seeds, with numpy."""
    assert math.log(decay(workers, False, units)) == pytest.approx(math.log(plain), rel=0.15)
    assert math.log(decay(workers, True, units)) == pytest.approx(math.log(accelerated), rel=0.15)


@pytest.mark.parametrize("topology", ["ring", "star", "tail"])
def test_exchanges_of_an_edge_are_those_that_its_ends_start(topology):
    """Each worker starts half of its exchanges, with a random neighbor: those of workers of few
    neighbors fall on few edges."""
    made = graph(topology, 8)
    adjacency = made.union.toarray()
    started = 1.5 / 2 * adjacency / adjacency.sum(1, keepdims=True)
    i, j = made.edges.T
    np.testing.assert_allclose(rates_of(made, rate=1.5), (started + started.T)[i, j])


def test_the_seed_decides_on_the_pairs():
    found = []
    for seed in (0, 0, 1):
        x = start(8, torch.float64)
        AcceleratedPairs(topologies.make("ring", 8), x, seed=seed).run(4.0)
        found.append(x)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_constants_of_a_ring():
    found = AcceleratedPairs(topologies.make("ring", 32), torch.zeros(32, 1)).constants
    assert math.exp(-1 / found.chi_1) == pytest.approx(0.981, abs=5e-4)
    assert math.exp(-1 / math.sqrt(found.chi_1 * found.chi_2)) == pytest.approx(0.869, abs=5e-4)
