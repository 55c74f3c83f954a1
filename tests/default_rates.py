"""Every averaging rule with its defaults, for thousands of steps, on every graph.

    python -m tests.default_rates FOLDER [--processes 2]

A case is a graph, a rule, a compressor and a number of elements, with three kinds of data. Its
result is a line of FOLDER/results.jsonl. Cases that are there are not run again. At the end, and
with `--table` alone, it prints the tables of docs/methods/choco.md.

The law: after 3000 steps, the error is below that after 300, or below 1e-5 of the start. Rules
whose errors do not vanish stay below the start.

Speed: for a third of the cases of CHOCO-Gossip, the steps to an error of 1e-3 with the default
rate, and the fewest with eight multiples of it.

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
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from powergossip import algorithms, compressors, options, topologies
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology

STEPS, EARLY = 3000, 300
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
}
OF_LARGE = ("ring 8", "fully connected 8")
# Rules whose errors do not vanish: the messages of DeepSqueeze and Moniqua depend on the mean.
STAYS = ("deepsqueeze", "moniqua")
MULTIPLES = (0.5, 1, 1.4, 2, 2.8, 4, 8, 16)  # of the default rate


@dataclass(frozen=True)
class Case:
    graph: str
    rule: str
    compressor: str  # "" without one
    elements: int

    @property
    def name(self) -> str:
        return f"{self.rule} {self.compressor}".strip()

    @property
    def options(self) -> dict[str, Any]:
        return {"compressor": self.compressor} if self.compressor else {}


@dataclass(frozen=True)
class Result:
    """Errors relative to the start, by kind of data.

    rate   # the default diffusion rate, None where there is none or tensors have their own
    speed  # steps to 1e-3 with the default rate, and the fewest of `MULTIPLES`: `STEPS` for never
    """

    case: Case
    rate: float | None
    early: list[float]
    last: list[float]
    seconds: float
    speed: tuple[list[int], list[int]] | None = None

    @property
    def holds(self) -> bool:
        if self.case.rule in STAYS:
            return all(error < 1 for error in self.last)
        early = self.early if self.case.elements < LARGE else [1.0] * len(KINDS)
        return all(e < 1e-5 or e < f for e, f in zip(self.last, early, strict=True))


def cases() -> Iterator[Case]:
    """All cases that their graphs accept."""
    made = {graph: topology(graph) for graph in GRAPHS}
    for elements in (*SIZES, LARGE):
        for graph in GRAPHS if elements < LARGE else OF_LARGE:
            for rule, row in algorithms.AVERAGING.items():
                has_compressor = "compressor" in options.defaults(row)
                for compressor in compressors.COMPRESSORS if has_compressor else ("",):
                    case = Case(graph, rule, compressor, elements)
                    network = Network(made[graph], Processes())
                    try:
                        algorithms.make(rule, network, Layout([(2, 2)]), **case.options)
                    except ValueError:
                        continue
                    yield case


def topology(graph: str) -> Topology:
    name, n, given = GRAPHS[graph]
    if name != "FILE":
        return topologies.make(name, n, options=given)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.edgelist"
        drawn = nx.connected_watts_strogatz_graph(n, 4, 0.5, seed=2)
        nx.write_edgelist(drawn, path, data=False)
        return topologies.make(str(path), n)


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
    """A case, for all kinds of data, with multiples of its default rate."""

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
        x = torch.cat([start(kind, n, case.elements) for kind in KINDS])
        if case.rule == "moniqua":  # neighbors must differ by less than θ = 0.25
            x = 0.1 * x.sign()
        self.x = x.repeat(count, 1)
        self._n, self._first = n, torch.ones(())
        self._first = self.errors()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.network.run(self._averaging.step(self.x))

    def errors(self) -> Tensor:
        """Σ_i ‖x_i − x̄‖² relative to the start: float64 [copy]. Infinity for NaN."""
        by_copy = self.x.double().unflatten(0, (-1, self._n))
        squares = (by_copy - by_copy.mean(1, keepdim=True)).square().sum((1, 2))
        return (squares / self._first).nan_to_num(math.inf)


def run(case: Case, steps: int = STEPS, early: int = EARLY) -> Result:
    began, now = time.perf_counter(), Run(case)
    if case.elements >= LARGE:
        steps = early
    now.steps(early)
    first = now.errors()
    for _ in range(early, steps, early):
        if now.errors().max() > 1e6:
            break
        now.steps(early)
    last = now.errors().tolist()
    return Result(case, now.rate, first.tolist(), last, time.perf_counter() - began)


def speed(case: Case) -> tuple[list[int], list[int]]:
    """Steps to an error of 1e-3: with the default rate, and with the best multiple."""
    now, reached = Run(case, MULTIPLES), torch.full((len(MULTIPLES), len(KINDS)), STEPS)
    default = MULTIPLES.index(1)
    for step in range(5, STEPS, 5):
        now.steps(5)
        fine = now.errors().view(reached.shape) < 1e-3
        reached[fine & (reached == STEPS)] = step
        if (reached[default] < STEPS).all():
            break
    return reached[default].tolist(), reached.amin(0).tolist()


def is_timed(case: Case) -> bool:
    """A third of the cases of CHOCO-Gossip on graphs that need compressed copies, by chance."""
    chosen = random.Random(f"{case.graph} {case.compressor} {case.elements}").random() < 1 / 3
    return case.rule == "choco" and case.elements < LARGE and chosen


def _work(case: Case) -> Result:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = run(case)
    timed = speed(case) if is_timed(case) else None
    return Result(case, found.rate, found.early, found.last, found.seconds, timed)


def read(file: Path) -> list[Result]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [Result(**{**found, "case": Case(**found["case"])}) for found in map(json.loads, lines)]


def table(results: Iterable[Result]) -> str:
    """Markdown: for each rule, its rates, cases that diverge, and its speed."""
    by_rule: dict[str, list[Result]] = {}
    for result in results:
        by_rule.setdefault(result.case.name, []).append(result)
    lines = [
        "| rule, compressor | cases | default γ | diverge | largest error | steps to 10⁻³, "
        "relative to the best γ |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    every: list[float] = []
    for name, found in sorted(by_rule.items()):
        rates = sorted(r.rate for r in found if r.rate is not None)
        shown = f"{rates[0]:.2g} to {rates[-1]:.2g}" if rates else ""
        ratios = [own / best for r in found if r.speed for own, best in zip(*r.speed, strict=True)]
        every += ratios
        mean = f"{statistics.geometric_mean(ratios):.2f}" if ratios else ""
        failing = sum(not r.holds for r in found)
        largest = max(max(r.last) for r in found)
        lines.append(f"| {name} | {len(found)} | {shown} | {failing} | {largest:.1e} | {mean} |")
    if every:
        lines.append(
            f"\nAll of CHOCO: {statistics.geometric_mean(every):.2f}, "
            f"{len(every)} starts, the worst {max(every):.1f}."
        )
    failing_cases = [r for r in found_of(by_rule) if not r.holds]
    lines += [f"diverges: {r.case} {r.rate} {r.early} {r.last}" for r in failing_cases]
    return "\n".join(lines)


def found_of(by_rule: dict[str, list[Result]]) -> Iterator[Result]:
    for found in by_rule.values():
        yield from found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    file = given.folder / "results.jsonl"
    done = {result.case for result in read(file)}
    left = [] if given.table else [case for case in cases() if case not in done]
    with multiprocessing.Pool(given.processes) as pool, file.open("a") as out:
        for index, result in enumerate(pool.imap_unordered(_work, left), 1):
            out.write(json.dumps(asdict(result)) + "\n")
            out.flush()
            mark = "" if result.holds else "  DIVERGES"
            print(f"{index}/{len(left)} {result.case} {result.seconds:.1f} s{mark}", flush=True)
    results = read(file)
    print(table(results))
    sys.exit(not all(result.holds for result in results))


if __name__ == "__main__":
    main()
