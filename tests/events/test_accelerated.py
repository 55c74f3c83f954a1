"""Laws of A²CiD², the accelerated exchanges of gossip=a2cid2."""

import math
from typing import Any

import pytest
import torch

from powergossip.algorithms.learning import A2CiD2, Acceleration, acceleration
from powergossip.events.virtual_clock import VirtualClock
from tests.harness.averaging import graph
from tests.harness.exchanging import LATE, learning_clock, start, sum_of_unapplied
from tests.harness.quadratics import Quadratics


def constants(problem: Quadratics) -> Acceleration:
    return acceleration(graph("ring", problem.n_workers), delay=1)


def clock(problem: Quadratics, accelerated: bool, rate: float, **more: Any) -> VirtualClock:
    """Workers on a ring that minimize quadratics, with or without the second copy."""
    rule, gossip = ("a2cid2", "a2cid2") if accelerated else ("dpsgd", "asynchronous")
    options = {"acceleration": constants(problem)} if accelerated else {"overlapping": False}
    return learning_clock(problem, rule, rate, gossip=gossip, rule_options=options, **more)


def decay(workers: int, accelerated: bool, steps: int) -> float:
    """−ln of the factor of ‖x − x̄‖² per step, over the second half of the steps, without learning:
    the mean over two seeds."""
    found = []
    for seed in range(2):
        problem = Quadratics(workers, shapes=((4,),))
        problem.x.copy_(start(workers, torch.float64, seed, shapes=((4,),)))
        run = clock(problem, accelerated, 0.0, values={"jitter": 0.3}, seed=seed)
        distances = []
        for now in (steps / 2, steps):
            run.run(now)
            distances.append(float((problem.x - problem.x.mean(0)).square().sum()))
        found.append(math.log(distances[0] / distances[1]) / (steps / 2))
    return sum(found) / len(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "steps"), [(16, 120), pytest.param(32, 400, marks=pytest.mark.slow)]
)
def test_decay_rates_are_those_of_the_spectrum(workers, steps):
    """Steps of random length, in which an exchange takes two."""
    chi_1 = 1 / graph("ring", workers).spectral_gap
    chi_2 = 1 / (4 * (2 - graph("ring", workers).largest_eigenvalue))
    assert decay(workers, False, steps) == pytest.approx(1 / chi_1, rel=0.2)
    accelerated = 1 / (2 * math.sqrt(chi_1 * chi_2))
    assert decay(workers, True, steps) == pytest.approx(accelerated, rel=0.2)
    assert accelerated > 3 / chi_1


def test_where_acceleration_does_not_help_the_copies_are_equal():
    """On a graph that averages well, or with a diffusion rate that is too large."""
    assert acceleration(graph("fully-connected", 8)).ratio == 1
    assert acceleration(graph("ring", 8), diffusion_rate=1.6) == Acceleration(0.0, 1.0)


def test_the_sum_of_both_copies_is_conserved_at_all_times():
    loss = {"loss": {"fraction": 0.2, "ends": "both"}}
    problem = Quadratics()
    problem.x.copy_(start(8, torch.float64, shapes=((6, 5),)))
    total, ratio = 2 * problem.x.sum(0), constants(problem).ratio
    run, moved, apart = clock(problem, True, 0.0, values=LATE | loss), 0.0, 0.0
    for event in range(250):
        run.advance()
        if event % 15 == 0:
            rules: Any = [worker.rule for worker in run.workers.values()]
            assert isinstance(rules[0], A2CiD2)
            second = torch.cat([rule.second for rule in rules])
            unapplied = (1 + ratio) * sum_of_unapplied(run)
            moved = max(moved, float(unapplied.abs().max()))
            apart = max(apart, float((second - problem.x).sum(0).abs().max()))
            now = (problem.x + second).sum(0) + unapplied
            torch.testing.assert_close(now, total, rtol=0, atol=1e-11)
    assert moved > 1e-3  # the law is empty if no part is ever late
    assert apart > 1e-3


def test_equal_workers_take_the_steps_of_gradient_descent():
    """Gradients move both copies."""
    problem = Quadratics()
    problem.a.copy_(problem.a[:1].expand_as(problem.a))
    problem.b.copy_(problem.b[:1].expand_as(problem.b))
    clock(problem, True, 0.1, values={}).run(5)
    expected = problem.b * (1 - (1 - 0.1 * problem.a) ** 5)
    torch.testing.assert_close(problem.x, expected, rtol=0, atol=1e-12)


@pytest.mark.long
def test_workers_with_a_common_optimum_find_it_with_late_exchanges():
    problem = Quadratics()
    problem.b.copy_(problem.b[:1].expand_as(problem.b))
    problem.optimum = problem.b[0]
    clock(problem, True, 0.1, values=LATE).run(250)
    assert problem.error < 1e-6


@pytest.mark.long
def test_the_bias_of_different_optima_is_smaller_than_that_of_dpsgd():
    errors = []
    for accelerated in (False, True):
        problem = Quadratics(16)
        clock(problem, accelerated, 0.02, values={"jitter": 0.3}).run(300)
        errors.append(problem.error)
    assert errors[1] < 0.6 * errors[0]
