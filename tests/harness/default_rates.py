"""Every averaging rule with its defaults, for thousands of steps, on every graph.

The law: after 3000 steps, the error is below that after 300, or below 1e-5 of the start. Rules
whose errors do not vanish stay below the start. A default gives no warning. Learning rules over
plain gossip and compressed messages are, after 3000 steps on the quadratics of
tests/harness/quadratics.py, nearer to the optimum of the mean loss than workers alone.

Axes: copy (a kind of data and a multiple of the default rate), worker, D elements.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from powergossip import algorithms, compressors, topologies
from powergossip import registry_options as options
from powergossip.algorithms import learning
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology
from tests.harness.quadratics import SGD, Quadratics, train

STEPS, EARLY = 3000, 300
KINDS = ("Gaussian", "rank 1", "one large entry")
GRAPHS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ring 8": ("ring", 8, {}),
    "chain 8": ("chain", 8, {}),
    "star 8": ("star", 8, {}),
    "torus 16": ("torus", 16, {}),
    "hypercube 16": ("hypercube", 16, {}),
    "fully connected 8": ("fully-connected", 8, {}),
    "fully connected 16": ("fully-connected", 16, {}),
    "ring 8, constant weights": ("ring", 8, {"weights": "constant"}),
    "star 8, constant weights": ("star", 8, {"weights": "constant"}),
    "random 12": ("FILE", 12, {}),
    "one-peer exponential 8": ("one-peer-exponential", 8, {}),
    "random matching 8": ("random-matching", 8, {}),
    "directed ring 8": ("unidirectional-ring", 8, {}),
    "exponential 8": ("exponential", 8, {}),
    "equi-static 16": ("equi-static", 16, {}),
    "directed 7": ("FILE", 7, {"directed": True}),
}
# Rules whose errors do not vanish: the messages of DeepSqueeze and Moniqua depend on the mean.
STAYS = ("deepsqueeze", "moniqua")
MULTIPLES = (0.25, 0.5, 1, 1.4, 2, 2.8, 5.6, 16)  # of the default rate

LEARNING_RATES = (0.02, 0.001)
OF_LEARNING = ("ring 8", "star 8", "fully connected 8", "directed ring 8", "exponential 8")
WITHIN_THETA = 0.03  # a factor on the optima of workers that learn over Moniqua


@dataclass(frozen=True)
class Case:
    graph: str
    rule: str
    compressor: str  # "" without one
    elements: int
    unbiased: bool = False
    steps: int = STEPS

    @property
    def options(self) -> dict[str, Any]:
        chosen = {"compressor": self.compressor} if self.compressor else {}
        return chosen | ({"unbiased": True} if self.unbiased else {})


@dataclass(frozen=True)
class Result:
    """Errors relative to the start, by kind of data."""

    case: Case
    early: list[float]
    last: list[float]

    @property
    def holds(self) -> bool:
        if self.case.rule in STAYS:
            return all(error < 1 for error in self.last)
        early = self.early if self.case.steps > EARLY else [1.0] * len(KINDS)
        return all(e < 1e-5 or e < f for e, f in zip(self.last, early, strict=True))


def cases(graphs: Sequence[str] = tuple(GRAPHS)) -> Iterator[Case]:
    """All cases with default options and 100 elements that their graphs accept."""
    for graph in graphs:
        for rule, row in algorithms.AVERAGING.items():
            has_compressor = "compressor" in options.defaults(row)
            for compressor in compressors.COMPRESSORS if has_compressor else ("",):
                case = Case(graph, rule, compressor, 100)
                if is_accepted(case):
                    yield case


def is_accepted(case: Case) -> bool:
    network = Network(topology(case.graph), Processes())
    try:
        algorithms.make(case.rule, network, Layout([(2, 2)]), **case.options)
    except ValueError:
        return False
    return True


@cache
def topology(graph: str) -> Topology:
    name, n, given = GRAPHS[graph]
    if name != "FILE":
        return topologies.make(name, n, options=given)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.edgelist"
        drawn = nx.connected_watts_strogatz_graph(n, 4, 0.5, seed=2)
        if given:  # as many senders as receivers for each worker
            drawn = nx.DiGraph([(i, (i + hop) % n) for i in range(n) for hop in (1, 3)])
        nx.write_edgelist(drawn, path, data=False)
        return topologies.make(str(path), n, options=given)


def shape(elements: int) -> tuple[int, int]:
    """The matrix of that many elements that is nearest to a square."""
    rows = next(d for d in range(math.isqrt(elements), 0, -1) if elements % d == 0)
    return rows, elements // rows


def start(kind: str, workers: int, elements: int) -> Tensor:
    """The workers' x at the start: [worker, D]."""
    random = torch.Generator().manual_seed(KINDS.index(kind))
    rows, columns = shape(elements)
    x = torch.randn(workers, elements, generator=random)
    if kind == "rank 1":
        left = torch.randn(workers, rows, 1, generator=random)
        return (left * x[:, None, :columns]).flatten(1)
    if kind == "one large entry":
        x *= 0.01
        x[torch.arange(workers), torch.randint(elements, (workers,), generator=random)] = 10
    return x


class Run:
    """A case, for all kinds of data, with multiples of its default rate.

    Moniqua starts with differences of at most θ. Its errors are relative to (θ/2)² for each
    element, as its noise does not shrink with the start.
    """

    def __init__(self, case: Case, multiples: tuple[float, ...] = ()):
        graph, layout = topology(case.graph), Layout([shape(case.elements)])
        n, count = graph.n_workers, max(1, len(multiples))
        self.network = Network(graph, Processes(), copies=count * len(KINDS))
        rate = algorithms.default_rate(case.rule, graph, layout, case.options)
        given: dict[str, Any] = {}
        if multiples:
            assert isinstance(rate, float)
            each = torch.tensor([factor * rate for factor in multiples])
            given["diffusion_rate"] = each.repeat_interleave(len(KINDS) * n)
        self._averaging = algorithms.make(case.rule, self.network, layout, **case.options, **given)
        starts = [start(kind, n, case.elements) for kind in KINDS]
        theta = algorithms.defaults(case.rule).get("theta")
        if theta is not None:
            starts = [x * (theta / 2 / x.abs().max()) for x in starts]
        self.x = torch.cat(starts).repeat(count, 1)
        self._n, self._first = n, torch.ones(())
        if theta is None:
            self._first = self.errors()
        else:
            self._first = torch.tensor(n * case.elements * (theta / 2) ** 2)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.network.run(self._averaging.step(self.x))

    def errors(self) -> Tensor:
        """Σ_i ‖x_i − x̄‖² relative to the start: float64 [copy]. Infinity for NaN."""
        by_copy = self.x.double().unflatten(0, (-1, self._n))
        squares = (by_copy - by_copy.mean(1, keepdim=True)).square().sum((1, 2))
        return (squares / self._first).nan_to_num(math.inf)


def run(case: Case) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = Run(case)
    now.steps(EARLY)
    first = now.errors()
    for _ in range(EARLY, case.steps, EARLY):
        if now.errors().max() > 1e6:
            break
        now.steps(EARLY)
    last = now.errors().tolist()
    return Result(case, first.tolist(), last)


def speed(case: Case) -> list[float]:
    """Steps to an error of 1e-3 with the default rate, relative to its best multiple. By kind of
    data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the multiples
        now = Run(case, MULTIPLES)
    reached = torch.full((len(MULTIPLES), len(KINDS)), STEPS)
    default = MULTIPLES.index(1)
    for step in range(5, STEPS, 5):
        now.steps(5)
        fine = now.errors().view(reached.shape) < 1e-3
        reached[fine & (reached == STEPS)] = step
        if (reached[default] < STEPS).all():
            break
    ratios: list[float] = (reached[default] / reached.amin(0)).tolist()
    return ratios


def learn(name: str, case: Case, learning_rate: float) -> float:
    """Train with the defaults of the learning rule. Raises ValueError for a pair without one.

    Returns √(mean_i ‖x_i − x*‖²) after all steps, relative to that of workers alone.
    """
    problem = Quadratics(dtype=torch.float32)
    if case.rule == "moniqua":
        problem.b.mul_(WITHIN_THETA)
        problem.optimum.mul_(WITHIN_THETA)
    alone = float((problem.b - problem.optimum).square().sum(1).mean().sqrt())
    graph, given = topology(case.graph), case.options
    network = Network(graph, Processes())
    known = algorithms.defaults(case.rule, given)
    own = learning.averaging_defaults(name, case.rule).items()
    given = {option: value for option, value in own if option in known} | given
    given.pop("diffusion_rate", None)  # None: the default below
    factor = learning.diffusion_factor(name, case.rule)
    own_options = {"overlapping": False} | learning.options(name)
    largest = learning.rule(name).largest_rate(graph, own_options)

    def make(layout: Layout) -> algorithms.Averaging:
        rate = algorithms.default_rate(case.rule, graph, layout, given, factor, largest)
        return algorithms.make(case.rule, network, layout, **given, diffusion_rate=rate)

    averaging = make(problem.layout)
    learning.check(name, network, case.rule, averaging)
    overlapping = learning.overlapping(name, averaging)
    parameters: Any = problem
    local = SGD(learning_rate).of(problem.x)
    workers = learning.Workers(network, make, parameters, local)
    rule = learning.make(name, workers, overlapping=overlapping)
    train(rule, problem, case.steps)
    return float(torch.tensor(problem.error / alone).nan_to_num(math.inf))


def lessons() -> Iterator[tuple[str, Case, float]]:
    """The arguments of `learn`: all learning rules over plain gossip and all compressed rules that
    they accept without a warning."""
    rules = ("choco", "deepsqueeze")
    compressed = [(rule, c, False) for rule in rules for c in compressors.COMPRESSORS]
    pairs = [*compressed, ("choco", "qsgd", True), ("moniqua", "", False), ("dpsgd", "", False)]
    for name, kind in learning.LEARNING.items():
        graphs = ("chain 8", "star 8") if kind.relays else OF_LEARNING
        for rule, compressor, unbiased in pairs:
            for graph in graphs:
                case = Case(graph, rule, compressor, 30, unbiased)
                topology.cache_clear()  # one warning for each
                with suppress(ValueError, UserWarning), warnings.catch_warnings():
                    warnings.simplefilter("error")
                    learn(name, replace(case, steps=0), 1.0)
                    yield from ((name, case, rate) for rate in LEARNING_RATES)
