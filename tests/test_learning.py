"""Laws of the learning rules for data that differ between workers.

The problem: worker i minimizes f_i(x) = ½ Σ_k a_i[k] (x[k] − b_i[k])², with matrices of 6 × 5
parameters, so that PowerGossip compresses. The optimum of the mean loss is known, and far from
those of the workers.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import algorithms, topologies
from powergossip.algorithms import learning
from powergossip.network import Network
from powergossip.parameters import Layout

ROWS, COLUMNS, WORKERS = 6, 5, 8


class Quadratics:
    """`parameters` of learning rules: the flat buffers and the layout."""

    def __init__(self, workers: int = WORKERS, dtype: torch.dtype = torch.float64):
        i = torch.arange(workers, dtype=torch.float64)[:, None]
        k = torch.arange(ROWS * COLUMNS, dtype=torch.float64)
        self.a = (1 + (k + i) % 5 / 4).to(dtype)
        self.b = (3 * torch.cos(i + k)).to(dtype)
        self.layout = Layout([(ROWS, COLUMNS)])
        self.x = torch.zeros(workers, ROWS * COLUMNS, dtype=dtype)
        self.grad = torch.zeros_like(self.x)
        self.optimum = (self.a * self.b).double().sum(0) / self.a.double().sum(0)

    def gradients(self) -> Tensor:
        return self.a * (self.x - self.b)

    def decay_spans(self) -> list[slice]:
        return []

    @property
    def error(self) -> float:
        """√(mean_i ‖x_i − x*‖²)"""
        return float((self.x - self.optimum).square().sum(1).mean().sqrt())


class SGD:
    """A local optimizer."""

    def __init__(self, rate: float):
        self.rate = rate

    def displacement(self, direction: Tensor) -> Tensor:
        return -self.rate * direction


# Averaging rules, by name: method and options.
AVERAGING: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("dpsgd", {}),
    "power-gossip": ("power-gossip", {"rank": 1}),
    "top-k": ("choco", {"compressor": "top-k", "keep_ratio": 0.2, "diffusion_rate": 0.1}),
    "sign": ("choco", {"diffusion_rate": 0.2}),
    "qsgd": ("choco", {"compressor": "qsgd", "unbiased": True, "levels": 4, "diffusion_rate": 0.5}),
    "identity": ("choco", {"compressor": "identity"}),
}


def rule_of(
    name: str,
    averaging: str,
    problem: Quadratics,
    rate: float,
    topology: str = "ring",
    averaging_options: dict[str, Any] | None = None,
    **options: Any,
) -> learning.GossipRule:
    method, given = AVERAGING[averaging]
    given = given | (averaging_options or {})
    network = Network(topologies.make(topology, len(problem.x)), dtype=problem.x.dtype)

    def make(layout: Layout, factor: float) -> algorithms.Averaging:
        gamma = factor * given.get("diffusion_rate", 1.0)
        return algorithms.make(method, network, layout, **given | {"diffusion_rate": gamma})

    learning.check(name, network, method, make(problem.layout, 1.0))
    parameters: Any = problem
    return learning.make(name, network, make, parameters, SGD(rate), **options)


def train(rule: learning.GossipRule, problem: Quadratics, steps: int) -> None:
    for _ in range(steps):
        rule.start()
        problem.grad.copy_(problem.gradients())
        rule.finish()


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
