"""Workers on the virtual clock, for averaging and for quadratics."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import algorithms
from powergossip import registry_options as _options
from powergossip.algorithms import learning as rules
from powergossip.events import averaging, scenario
from powergossip.events.members import Members, View, Weights
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.worker import Policy, Worker
from powergossip.network import Network
from powergossip.parameters import Layout
from tests.harness.averaging import graph
from tests.harness.quadratics import SGD, Quadratics

# Averaging rules in edge form, by name: method and options.
EXCHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("dpsgd", {}),
    "power": ("power-gossip", {"num_iterations": 3}),
    "power rank 2": ("power-gossip", {"rank": 2, "num_iterations": 2}),
    "power 6 bits": ("power-gossip", {"bits": 6, "num_iterations": 3}),
    "power rounded": ("power-gossip", {"round_weights": True, "warm_start": False}),
    "top-k": ("choco", {"compressor": "top-k", "keep_ratio": 0.3, "diffusion_rate": 0.3}),
    "sign": ("choco", {"diffusion_rate": 0.3}),
    "qsgd": ("choco", {"compressor": "qsgd", "unbiased": True, "levels": 4, "copy_rate": 0.5,
                       "diffusion_rate": 0.3}),
    "qsgd by size": ("choco", {"compressor": "qsgd", "unbiased": True}),
}  # fmt: skip
SHAPES = ((6, 5), (6, 5), (4, 7), (7,), (5, 1))
LATE: dict[str, Any] = {  # a scenario
    "speeds": {1: 0.25, 4: 0.7},
    "jitter": 0.3,
    "latency": 0.3,
    "late": {"fraction": 0.2, "seconds": 3.0},
}


def start(workers: int, dtype: torch.dtype, seed: int = 0, shapes: Any = SHAPES) -> Tensor:
    """Random x [worker, D]."""
    size = Layout(shapes).size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(workers, size, dtype=torch.float64, generator=generator).to(dtype)


def matrix(weights: Weights) -> np.ndarray:
    """W of the workers alive, in ascending order: float64 [worker, worker]."""
    alive = sorted(weights)
    place = {worker: index for index, worker in enumerate(alive)}
    W = np.zeros((len(alive), len(alive)))
    for i, row in weights.items():
        for j, w in row.items():
            W[place[i], place[j]] = w
    np.fill_diagonal(W, 1 - W.sum(1))
    return W


def made(
    name: str, topology: str, n: int, layout: Layout, options: Mapping[str, Any]
) -> averaging.Exchanges:
    """An averaging rule of EXCHANGES with the default rate of the graph."""
    method, of_name = EXCHANGES[name]
    given = {**of_name, **options}
    rate = algorithms.default_rate(method, graph(topology, n), layout, given)
    return averaging.make(method, layout, **{"diffusion_rate": rate, **given})


def averaging_clock(
    x: Tensor,
    topology: str = "ring",
    name: str = "plain",
    gossip: str = "synchronous",
    max_delay: int = 0,
    shapes: Any = SHAPES,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> VirtualClock:
    """A clock whose workers average x, in place."""
    layout, n = Layout(shapes), len(x)
    members = Members(graph(topology, n))
    rule = made(name, topology, n, layout, options)
    policy = Policy(gossip, max_delay)

    network = Network(graph(topology, n), dtype=x.dtype)

    def make(index: int, view: View, steps: int) -> Worker:
        row = x[index : index + 1]
        buffers = rules.Buffers(row, row.clone(), layout)
        own = rules.DPSGD(rules.Workers(network, lambda _: rule, buffers, SGD(0.0).of(row)))
        return Worker(index, members, rule, own, policy, view, steps)

    drawn = scenario.read(values or {}, n, seed)
    return VirtualClock(drawn, [x], make, lambda worker, step: None)


def learners(
    problem: Quadratics,
    learning: str,
    rate: float | Sequence[float],
    topology: str = "ring",
    name: str = "plain",
    gossip: str = "synchronous",
    max_delay: int = 0,
    rule_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Callable[[int, View, int], Worker], Callable[[int, int], None]]:
    """`make` and `compute` of a clock whose workers minimize quadratics.

    rate: of all steps, or of each.
    """
    n = problem.n_workers
    members = Members(graph(topology, n))
    policy = Policy(gossip, max_delay)
    kind: Callable[..., rules.GossipRule] = {**rules.LEARNING, **rules.POLICIES}[learning]
    known = _options.defaults(kind)
    network = Network(graph(topology, n), dtype=problem.x.dtype)
    first, *_ = rates = [rate] if isinstance(rate, float) else rate
    own_optimizers: dict[int, SGD] = {}

    def make(index: int, view: View, steps: int) -> Worker:
        own = slice(index, index + 1)
        x, g, local = problem.x[own], problem.grad[own], SGD(first).of(problem.x[own])
        own_optimizers[index], of_rule = local, dict(rule_options or {})
        if "overlapping" in known:
            of_rule.setdefault("overlapping", learning != "diloco")
        exchanges: list[averaging.Exchanges] = []

        def of_layout(layout: Layout) -> averaging.Exchanges:
            exchanges.append(made(name, topology, n, layout, options))
            return exchanges[0]

        buffers = rules.Buffers(x, g, problem.layout)
        rule = kind(rules.Workers(network, of_layout, buffers, local), **of_rule)
        rule.begin_after(steps)
        return Worker(index, members, exchanges[0], rule, policy, view, steps)

    def compute(worker: int, step: int) -> None:
        own_optimizers[worker].rate = rates[min(step, len(rates) - 1)]
        problem.grad[worker] = problem.a[worker] * (problem.x[worker] - problem.b[worker])

    return make, compute


def learning_clock(
    problem: Quadratics,
    *arguments: Any,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> VirtualClock:
    """A clock with learners."""
    drawn = scenario.read(values or {}, problem.n_workers, seed)
    return VirtualClock(drawn, [problem.x], *learners(problem, *arguments, **options))


def settled(worker: Worker, updated: bool | None = None) -> Tensor:
    """The variables whose sum over the workers changes by local updates and settling only, [D''].

    Those after the present step, if its local update is made.

    Args:
        updated: Whether it is, by default as the phase of the worker has it.
    """
    rule = worker.rule
    if updated is None:
        updated = worker.phase == "exchange"
    x, state = rule.x.clone(), copy.deepcopy(rule.variables_dict())
    if updated and not rule.overlapping:
        rule.settle()
    found = rule.x + rule.second if isinstance(rule, rules.A2CiD2) else rule.variables().clone()
    if isinstance(rule, rules.KGT):  # z is of one round, and a late exchange changes it at one end
        found = torch.cat([rule.x, state["c"]], 1)
    rule.x.copy_(x)
    rule.load_variables(state)
    return found[0].double()


def sum_of_unapplied(
    clock: VirtualClock, variables: Callable[[Worker], Tensor] = lambda worker: worker.rule.x[0]
) -> Tensor:
    """The sum of all u_ij that are applied at j's end but not at i's, by their effect at i on some
    variables of a worker.

    The sum of the variables of all workers and of this is conserved, as long as no worker dies and
    no message is lost at one end.
    """
    total, workers = torch.zeros(()), clock.workers
    for i, worker in workers.items():
        for j, edge in list(worker.edges.items()):
            other = workers[j].edges.get(i) if j in workers else None
            if edge.own is None or other is None or other.k <= edge.k:
                continue
            parts = [m for m in (*edge.inbox.values(), *clock.in_flight(j, i)) if m.k == edge.k]
            if edge.own.part is None or parts[0].part is None:
                continue
            x, state = worker.rule.x.clone(), copy.deepcopy(worker.state_dict())
            late = set(worker.late)
            worker.receive(j, parts[0])
            before = variables(worker).clone()
            worker.apply(j)
            total = total + (variables(worker) - before)
            worker.rule.x.copy_(x)
            worker.load_state_dict(state)
            worker.late = late
    return total
