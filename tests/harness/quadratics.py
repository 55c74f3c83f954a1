"""Quadratics whose optima differ between workers, and learning rules on them.

Worker i minimizes f_i(x) = ½ Σ_k a_i[k] (x[k] − b_i[k])², with matrices of 6 × 5 parameters, so
that PowerGossip compresses. The optimum of the mean loss is known, and far from those of the
workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip import algorithms
from powergossip.algorithms import learning
from powergossip.network import Network
from powergossip.parameters import Layout
from tests.harness.averaging import graph

ROWS, COLUMNS, WORKERS = 6, 5, 8


class Quadratics:
    """`parameters` of learning rules: the flat buffers and the layout.

    hosted: the workers of this process, by default all of them
    """

    def __init__(
        self,
        workers: int = WORKERS,
        dtype: torch.dtype = torch.float64,
        hosted: range | None = None,
        shapes: Sequence[tuple[int, ...]] = ((ROWS, COLUMNS),),
    ):
        self.n_workers, self.layout = workers, Layout(shapes)
        i = torch.arange(workers, dtype=torch.float64)[:, None]
        k = torch.arange(self.layout.size, dtype=torch.float64)
        a, b = 1 + (k + i) % 5 / 4, 3 * torch.cos(i + k)
        self.optimum = (a * b).sum(0) / a.sum(0)
        own = slice(None) if hosted is None else slice(hosted.start, hosted.stop)
        self.a, self.b = a[own].to(dtype), b[own].to(dtype)
        self.x, self.grad = torch.zeros_like(self.a), torch.zeros_like(self.a)

    def gradients(self) -> Tensor:
        return self.a * (self.x - self.b)

    def decay_spans(self) -> list[slice]:
        return []

    @property
    def error(self) -> float:
        """√(mean_i ‖x_i − x*‖²)"""
        return float((self.x - self.optimum).square().sum(1).mean().sqrt())


class SGD:
    """A local optimizer. momentum: heavy ball."""

    def __init__(self, rate: float, momentum: float = 0.0):
        self.rate, self._momentum = rate, momentum
        self._m: Tensor | float = 0.0
        self._x: Tensor | None = None

    def of(self, x: Tensor) -> "SGD":
        """The same optimizer, whose steps are those of x [worker, D]."""
        self._x = x
        return self

    def step(self, gradient: Tensor) -> None:
        assert self._x is not None
        self._x.add_(self.displacement(gradient))

    def displacement(self, direction: Tensor) -> Tensor:
        self._m = self._momentum * self._m + direction
        return -self.rate * self._m


class Inner:
    """A local optimizer u = −η f(g), in place on x, with η/(1 + t/horizon)."""

    def __init__(
        self, problem: Quadratics, rate: float, f: Callable[[Tensor], Tensor], horizon: float = 1e9
    ):
        self._x, self._f, self._rate, self._horizon, self._t = problem.x, f, rate, horizon, 0

    @property
    def rate(self) -> float:
        return self._rate / (1 + self._t / self._horizon)

    def step(self, gradient: Tensor) -> None:
        self._x.add_(self.displacement(gradient))

    def displacement(self, direction: Tensor) -> Tensor:
        u = self._f(direction) * -self.rate
        self._t += 1
        return u


def adam(problem: Quadratics) -> Inner:
    m, v, k = torch.zeros_like(problem.x), torch.zeros_like(problem.x), 0

    def u(g: Tensor) -> Tensor:
        nonlocal k
        k += 1
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        return (m / (1 - 0.9**k)) / ((v / (1 - 0.99**k)).sqrt() + 1e-8)

    return Inner(problem, 0.01, u, 1500)


def normalized(problem: Quadratics) -> Inner:
    return Inner(problem, 0.01, lambda g: g / g.norm(dim=1, keepdim=True), 1500)


def sign(problem: Quadratics) -> Inner:
    return Inner(problem, 0.01, torch.sign, 1500)


def polar(problem: Quadratics) -> Inner:
    """Muon without momentum."""

    def u(g: Tensor) -> Tensor:
        left, _, right = torch.linalg.svd(g.view(-1, 6, 5), full_matrices=False)
        return (left @ right).flatten(1)

    return Inner(problem, 0.01, u, 1500)


# Averaging rules, by name: method and options.
AVERAGING: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("dpsgd", {}),
    "power-gossip": ("power-gossip", {"rank": 1}),
    "top-k": ("choco", {"compressor": "top-k", "keep_ratio": 0.2, "diffusion_rate": 0.1}),
    "sign": ("choco", {"diffusion_rate": 0.2}),
    "qsgd": ("choco", {"compressor": "qsgd", "unbiased": True, "levels": 4, "diffusion_rate": 0.5}),
    "identity": ("choco", {"compressor": "identity"}),
    "push-sum": ("push-sum", {}),
    "all-reduce": ("all-reduce", {}),
}


def rule_of(
    name: str,
    averaging: str,
    problem: Quadratics,
    rate: float | learning.Local,
    topology: str | Network = "ring",
    averaging_options: dict[str, Any] | None = None,
    clip: float | None = None,
    **options: Any,
) -> learning.GossipRule:
    """A learning rule with plain SGD of this rate, or another local optimizer.

    Corrections have a rate of 1 if not given: without noise, it is the fastest.
    """
    if options.get("gradient_correction"):
        options.setdefault("correction_rate", 1.0)
    method, given = AVERAGING[averaging]
    given = given | (averaging_options or {})
    if isinstance(topology, str):
        network = Network(graph(topology, problem.n_workers), dtype=problem.x.dtype)
    else:
        network = topology

    def make(layout: Layout) -> algorithms.Averaging:
        return algorithms.make(method, network, layout, **given)

    learning.check(name, network, method, make(problem.layout))
    parameters: Any = problem
    local = SGD(rate) if isinstance(rate, float) else rate
    if isinstance(local, SGD):
        local.of(problem.x)
    workers = learning.Workers(network, make, parameters, local, clip=clip)
    return learning.make(name, workers, **options)


def train(rule: learning.GossipRule, problem: Quadratics, steps: int) -> None:
    for _ in range(steps):
        rule.start()
        problem.grad.copy_(problem.gradients())
        rule.finish()
