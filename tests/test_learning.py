"""Laws of the learning rules for data that differ between workers, on quadratics."""

import copy
from typing import Any

import pytest
import torch

from powergossip import topologies
from powergossip.algorithms import learning
from powergossip.algorithms.learning.gossip_rule import COPIES
from powergossip.network import Network, Processes, processes
from tests.quadratics import Quadratics, rule_of, train

# rule, averaging, learning rate, steps, options of the rule, options of the averaging rule
EXACT = [
    ("gradient-tracking", "plain", 0.1, 400, {}, {}),
    ("gradient-tracking", "plain", 0.1, 400, {"overlapping": True}, {}),
    ("gradient-tracking", "power-gossip", 0.05, 1200, {}, {}),
    ("gradient-tracking", "top-k", 0.02, 6000, {"overlapping": True}, {}),
    ("gradient-tracking", "sign", 0.02, 6000, {"overlapping": True}, {}),
    ("gradient-tracking", "qsgd", 0.02, 2000, {"overlapping": True}, {}),
    ("k-gt", "plain", 0.05, 600, {}, {}),
    ("k-gt", "plain", 0.01, 3000, {"local_steps": 5}, {}),
    ("k-gt", "power-gossip", 0.05, 1500, {}, {}),
    ("k-gt", "power-gossip", 0.01, 6000, {"local_steps": 5}, {}),
    ("momentum-tracking", "plain", 0.01, 1500, {}, {}),
    ("momentum-tracking", "power-gossip", 0.005, 3000, {}, {}),
    ("exact-diffusion", "plain", 0.1, 600, {}, {}),
    ("exact-diffusion", "power-gossip", 0.1, 3000, {}, {"diffusion_rate": 0.25}),
    ("exact-diffusion", "qsgd", 0.05, 3000, {}, {"copy_rate": 0.5}),
    ("exact-diffusion", "identity", 0.1, 1000, {}, {"copy_rate": 0.5}),
    ("beer", "top-k", 0.02, 6000, {}, {}),
    ("beer", "sign", 0.02, 3000, {}, {}),
    ("beer", "qsgd", 0.02, 2000, {}, {}),
    ("motef", "top-k", 0.02, 6000, {"momentum": 0.9}, {}),
    ("motef", "qsgd", 0.02, 2000, {"momentum": 0.9}, {}),
]


@pytest.mark.parametrize(
    ("name", "averaging", "rate", "steps", "options", "averaging_options"),
    EXACT,
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_exact_fixed_points(
    name: str,
    averaging: str,
    rate: float,
    steps: int,
    options: dict[str, Any],
    averaging_options: dict[str, Any],
) -> None:
    """All workers reach the optimum of the mean loss, from which their own optima are far."""
    problem = Quadratics()
    rule = rule_of(name, averaging, problem, rate, averaging_options=averaging_options, **options)
    train(rule, problem, steps)
    assert problem.error < 1e-9


# Rules with an averaging rule and a topology that they accept, and options.
TYPICAL = [
    *((name, {"local_steps": 2} if name == "k-gt" else {}) for name in learning.LEARNING),
    ("quasi-global-momentum", {"local_optimizer": "adamw"}),
    ("gradient-tracking", {"overlapping": True}),
]


def typical(
    name: str, problem: Quadratics, who: Processes | None = None, **options: Any
) -> learning.GossipRule:
    found = learning.rule(name)
    averaging = "top-k" if found.kinds == COPIES else "plain"
    topology = topologies.make("double-binary-tree" if found.relays else "ring", problem.n_workers)
    network = Network(topology, who, dtype=problem.x.dtype)
    return rule_of(name, averaging, problem, 0.05, network, **options)


@pytest.mark.parametrize(("name", "options"), TYPICAL)
def test_a_restored_rule_continues_to_the_bit(name: str, options: dict[str, Any]) -> None:
    problem, resumed = Quadratics(), Quadratics()
    rule = typical(name, problem, **options)
    train(rule, problem, 5)
    state = copy.deepcopy(rule.state_dict())
    resumed.x.copy_(problem.x)
    restored = typical(name, resumed, **options)
    restored.load_state_dict(state)
    train(rule, problem, 5)
    train(restored, resumed, 5)
    assert torch.equal(resumed.x, problem.x)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("name", ["relay-sgd", "exact-diffusion"])
def test_two_processes_train_the_workers_of_one(name: str) -> None:
    """To the bit. On a ring and on two trees, of which each has edges between the processes."""
    who = processes()
    hosted = range(4 * who.rank, 4 * who.rank + 4)
    problem, together = Quadratics(hosted=hosted), Quadratics()
    train(typical(name, problem, who), problem, 20)
    train(typical(name, together, Processes()), together, 20)
    assert torch.equal(problem.x, together.x[hosted.start : hosted.stop])
