"""Every averaging rule with its defaults, for thousands of steps, on every graph.

    python -m tests.harness.default_rates [--processes 2]

It prints the tables of docs/methods/choco.md, and exits with 1 if a case diverges.

The law: after 3000 steps, the error is below that after 300, or below 1e-5 of the start. Rules
whose errors do not vanish stay below the start. A default gives no warning. Other options of the
compressors, and 30,000 steps, follow the same law. A third of the cases is timed: the steps to an
error of 1e-3 with eight multiples of the default diffusion rate. Learning rules over plain gossip
and compressed messages are, after 3000 steps on the quadratics of tests/harness/quadratics.py,
nearer to the optimum of the mean loss than workers alone.

Axes: copy (a kind of data and a multiple of the default rate), worker, D elements.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from powergossip.formatting import markdown
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology
from tests.harness.quadratics import SGD, Quadratics, train

STEPS, EARLY, LONG = 3000, 300, 30_000
LARGE = 10**5  # elements: on a ring and fully connected only, for `EARLY` steps
SIZES = (10, 100, 1000)
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
DIRECTED = ("directed ring 8", "exponential 8", "equi-static 16", "directed 7")
OF_LARGE = ("ring 8", "fully connected 8")
# Rules whose errors do not vanish: the messages of DeepSqueeze and Moniqua depend on the mean.
STAYS = ("deepsqueeze", "moniqua")
MULTIPLES = (0.25, 0.5, 1, 1.4, 2, 2.8, 5.6, 16)  # of the default rate

# Compressors with other options, of CHOCO-Gossip, on graphs whose eigenvalues differ much.
OTHERS = {
    "top-k": ("keep_ratio=0.05", "keep_ratio=0.1", "keep_ratio=0.3"),
    "random-k": ("keep_ratio=0.1", "keep_ratio=0.3"),
    "random-block": ("keep_ratio=0.1", "keep_ratio=0.3"),
    "rounding": ("levels=1", "levels=2", "levels=3"),
    "qsgd": ("levels=1", "levels=64", "unbiased=true", "levels=64 unbiased=true"),
    "svd": ("rank=2", "rank=4"),
}
OF_OTHERS = ("ring 8, constant weights", "chain 8", "star 8", "fully connected 16", "random 12")
OF_LONG = ("ring 8, constant weights", "fully connected 8")  # with 100 elements
COMPRESSORS_OF_LONG = ("top-k", "random-k", "sign-and-norm", "qsgd", "rounding")

LEARNING_RATES = (0.02, 0.001)
OF_LEARNING = ("ring 8", "star 8", "fully connected 8", "directed ring 8", "exponential 8")
WITHIN_THETA = 0.03  # a factor on the optima of workers that learn over Moniqua


@dataclass(frozen=True)
class Case:
    """given: options of the compressor beside the defaults, such as "levels=2 unbiased=true"."""

    graph: str
    rule: str
    compressor: str  # "" without one
    elements: int
    given: str = ""
    steps: int = STEPS

    @property
    def name(self) -> str:
        return f"{self.rule} {self.compressor}".strip()

    @property
    def options(self) -> dict[str, Any]:
        pairs = (pair.split("=") for pair in self.given.split())
        chosen = {"compressor": self.compressor} if self.compressor else {}
        return chosen | {name: json.loads(value) for name, value in pairs}


@dataclass(frozen=True)
class Result:
    """Errors relative to the start, by kind of data.

    rate  # the default diffusion rate, None where there is none or tensors have their own
    """

    case: Case
    rate: float | None
    early: list[float]
    last: list[float]

    @property
    def holds(self) -> bool:
        if self.case.rule in STAYS:
            return all(error < 1 for error in self.last)
        early = self.early if self.case.steps > EARLY else [1.0] * len(KINDS)
        return all(e < 1e-5 or e < f for e, f in zip(self.last, early, strict=True))


@dataclass(frozen=True)
class Speed:
    """Steps to an error of 1e-3, `STEPS` for never: [kind of data][multiple of the rate]."""

    case: Case
    steps: list[list[int]]

    @property
    def ratios(self) -> list[float]:
        """With the default rate, relative to the best multiple. By kind of data."""
        return [steps[MULTIPLES.index(1)] / min(steps) for steps in self.steps]

    @property
    def at_an_end(self) -> int:
        """Kinds of data where the best multiple is the first or the last, and no other."""
        return sum(min(s[1:-1]) > min(s) for s in self.steps)


@dataclass(frozen=True)
class Learned:
    """A learning rule over an averaging rule.

    rate   # the default diffusion rate
    error  # √(mean_i ‖x_i − x*‖²) after all steps, relative to that of workers alone
    """

    learning: str
    case: Case
    learning_rate: float
    rate: float | None
    error: float

    @property
    def holds(self) -> bool:
        return self.error < 1


def cases(graphs: Sequence[str] = tuple(GRAPHS)) -> Iterator[Case]:
    """All cases with default options that their graphs accept."""
    for elements in (*SIZES, LARGE):
        for graph in (
            graphs if elements < LARGE else [graph for graph in OF_LARGE if graph in graphs]
        ):
            for rule, row in algorithms.AVERAGING.items():
                has_compressor = "compressor" in options.defaults(row)
                for compressor in compressors.COMPRESSORS if has_compressor else ("",):
                    steps = STEPS if elements < LARGE else EARLY
                    case = Case(graph, rule, compressor, elements, steps=steps)
                    if is_accepted(case):
                        yield case


def other_cases() -> Iterator[Case]:
    """Other options of compressors, and more steps."""
    for compressor, each in OTHERS.items():
        for given in each:
            for graph in OF_OTHERS:
                for elements in (100, 1000):
                    yield Case(graph, "choco", compressor, elements, given)
    for compressor in COMPRESSORS_OF_LONG:
        for graph in OF_LONG:
            yield Case(graph, "choco", compressor, 100, steps=LONG)


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
        self.rate = None if callable(rate) else rate
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
    return Result(case, now.rate, first.tolist(), last)


def speed(case: Case) -> Speed:
    """Until all kinds of data are below 1e-3 with the default rate."""
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
    return Speed(case, reached.T.tolist())


def is_timed(case: Case) -> bool:
    """A third of the cases that have a diffusion rate, by chance. None on directed graphs."""
    rate = algorithms.default_rate(case.rule, topology(case.graph), Layout([(2, 2)]), case.options)
    chosen = random.Random(f"{case.graph} {case.name} {case.elements}").random() < 1 / 3
    return rate is not None and case.elements < LARGE and case.graph not in DIRECTED and chosen


def learn(name: str, case: Case, learning_rate: float) -> Learned:
    """Train with the defaults of the learning rule. Raises ValueError for a pair without one."""
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
    rate = algorithms.default_rate(case.rule, graph, problem.layout, given, factor, largest)

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
    error = float(torch.tensor(problem.error / alone).nan_to_num(math.inf))
    return Learned(name, case, learning_rate, None if callable(rate) else rate, error)


def lessons() -> Iterator[tuple[str, Case, float]]:
    """The arguments of `learn`: all learning rules over plain gossip and all compressed rules that
    they accept without a warning."""
    compressed = [(c, "") for c in compressors.COMPRESSORS] + [("qsgd", "unbiased=true")]
    pairs = [("choco", c, g) for c, g in compressed]
    pairs += [("deepsqueeze", c, g) for c, g in compressed if not g]
    pairs += [("moniqua", "", ""), ("dpsgd", "", "")]
    for name, kind in learning.LEARNING.items():
        graphs = ("chain 8", "star 8") if kind.relays else OF_LEARNING
        for rule, compressor, given in pairs:
            for graph in graphs:
                case = Case(graph, rule, compressor, 30, given)
                topology.cache_clear()  # one warning for each
                with suppress(ValueError, UserWarning), warnings.catch_warnings():
                    warnings.simplefilter("error")
                    learn(name, replace(case, steps=0), 1.0)
                    yield from ((name, case, rate) for rate in LEARNING_RATES)


def table(results: Sequence[Result], speeds: Sequence[Speed]) -> str:
    """Markdown: for each rule, its rates, cases that diverge, and its speed."""
    rows = []
    for name in [*sorted({r.case.name for r in results}), "all"]:
        of_rule = [r for r in results if name in (r.case.name, "all")]
        timed = [s for s in speeds if name in (s.case.name, "all")]
        rates = sorted(r.rate for r in of_rule if r.rate is not None)
        ratios = [ratio for found in timed for ratio in found.ratios]
        row: list[object] = [name, len(of_rule)]
        row.append(" to ".join(dict.fromkeys(f"{rate:.2g}" for rate in rates[:1] + rates[-1:])))
        row.append(sum(not r.holds for r in of_rule))
        row.append(f"{max(max(r.last) for r in of_rule if r.case.steps > EARLY):.1e}")
        if ratios:
            at_an_end = sum(found.at_an_end for found in timed)
            row += [f"{statistics.geometric_mean(ratios):.2f}", len(ratios), at_an_end]
        rows.append([*row, "", "", ""][:8])
    header = ["rule, compressor", "cases", "default γ", "diverge"]
    header += ["largest error after 3000 steps", "steps to 10⁻³, in units of those with the best γ"]
    header += ["starts", "starts whose best γ is the smallest or largest tried"]
    return markdown(header, rows)


def table_of_learning(learned: Iterable[Learned]) -> str:
    """Markdown: for each learning rule and averaging rule, the largest errors."""
    by_rule: dict[tuple[str, str], list[Learned]] = {}
    for found in learned:
        by_rule.setdefault((found.learning, found.case.rule), []).append(found)
    rows = []
    for pair, of_rule in by_rule.items():
        row: list[object] = [*pair, len(of_rule), sum(not found.holds for found in of_rule)]
        for rate in LEARNING_RATES:
            errors = [found.error for found in of_rule if found.learning_rate == rate]
            row.append(f"{max(errors):.2g}" if errors else "")
        rows.append(row)
    rates = [f"largest error, η = {rate}" for rate in LEARNING_RATES]
    return markdown(["`learning`", "rule", "cases", "diverge", *rates], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    every = list(cases())
    with multiprocessing.Pool(given.processes, torch.set_num_threads, [1]) as pool:
        results = pool.map(run, every, 1)
        print(table(results, pool.map(speed, filter(is_timed, every), 1)), flush=True)
        others = pool.map(run, other_cases(), 1)
        print(f"\n{table(others, [])}", flush=True)
        learned = pool.starmap(learn, lessons(), 1)
        print(f"\n{table_of_learning(learned)}")
    everything: list[Result | Learned] = [*results, *others, *learned]
    failing = [found for found in everything if not found.holds]
    print(*(f"diverges: {result}" for result in failing), sep="\n")
    sys.exit(bool(failing))


if __name__ == "__main__":
    main()
