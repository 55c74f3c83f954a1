"""Workers that join on the virtual clock."""

import numpy as np
import pytest
import torch

from powergossip import topologies
from tests.harness.exchanging import averaging_clock, learning_clock, start
from tests.harness.quadratics import Quadratics

JOIN = {"deaths": [{"worker": 3, "at": 200.25}], "joins": [{"worker": 3, "at": 240.25}]}


@pytest.mark.parametrize("topology", ["ring", "torus", "binary-tree"])
@pytest.mark.parametrize("gossip", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("name", ["plain", "power", "sign"])
def test_the_models_of_the_others_do_not_move_at_a_join(name, gossip, topology):
    x = start(16, torch.float32)
    values = {"deaths": {"fraction": 0.3, "from": 2.0, "until": 9.0}, "jitter": 0.2}
    clock = averaging_clock(x, topology, name, gossip, values=values)
    dead = [deaths.worker for deaths in clock.scenario.deaths]
    assert len(dead) > 3
    again = {"joins": [{"worker": w, "at": 10.0 + 0.7 * k} for k, w in enumerate(dead)]}
    clock = averaging_clock(x, topology, name, gossip, values={**values, **again})
    joined = 0
    while joined < len(dead):
        before, alive = x.clone(), set(clock.alive)
        clock.advance()
        for index in set(clock.alive) - alive:
            joined += 1
            others = sorted(alive)
            assert torch.equal(x[others], before[others])
            assert x[index].norm() <= before[others].norm(dim=1).max()
    assert clock.alive == list(range(16))


class Noisy(Quadratics):
    """Quadratics with the same optimum, far from zero, whose gradients have noise."""

    def __init__(self, seed: int):
        super().__init__()
        self.a, self.b = torch.ones_like(self.a), self  # type: ignore[assignment]
        self._generator = torch.Generator().manual_seed(seed)

    def __getitem__(self, worker: int) -> torch.Tensor:
        noise = torch.randn(self.layout.size, dtype=self.x.dtype, generator=self._generator)
        return 50 + noise


@pytest.mark.parametrize("name", ["plain", "power"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_consensus_is_as_before_soon_after_a_join(name, seed):
    problem = Noisy(seed)
    clock = learning_clock(problem, "dpsgd", 0.1, name=name, values=JOIN, seed=seed)

    def distance_at(seconds: float) -> float:
        clock.run_until(seconds)
        x = problem.x[clock.alive]
        return float((x - x.mean(0)).square().sum(1).mean().sqrt())

    before = np.median([distance_at(t + 0.75) for t in range(100, 200)])
    gap = topologies.make("ring", 8).spectral_gap
    distance_at(240.5)
    after = [distance_at(241.75 + t) for t in range(int(3 / gap))]
    assert clock.alive == list(range(8))
    assert min(after) <= before
    later = [distance_at(300.75 + t) for t in range(100)]
    assert np.median(later) == pytest.approx(before, rel=0.2)
