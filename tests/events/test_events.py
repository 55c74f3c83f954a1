"""Laws of exchanges by edges on the virtual clock: late, skipped, and without delays."""

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import algorithms
from powergossip import registry_options as _options
from powergossip.algorithms import learning
from powergossip.algorithms.averaging import Kind
from powergossip.events import averaging
from powergossip.events.worker import Edge, Message, Policy
from powergossip.network import Network
from powergossip.parameters import Layout
from tests.harness.averaging import graph
from tests.harness.exchanging import (
    EXCHANGES,
    LATE,
    SHAPES,
    averaging_clock,
    learning_clock,
    start,
    sum_of_unapplied,
)
from tests.harness.quadratics import SGD, Quadratics, rule_of, train

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_are_antisymmetric_to_the_bit(name, dtype):
    method, options = EXCHANGES[name]
    rule = averaging.make(method, Layout(SHAPES), **options)
    x = start(2, dtype)
    ends = [rule.end(3, 5, x), rule.end(5, 3, x)]
    for k in range(7):
        parts = [end.part(row, k) for end, row in zip(ends, x, strict=True)]
        u = ends[0].exchange(parts[0], parts[1], k, 0.3)
        v = ends[1].exchange(parts[1], parts[0], k, 0.3)
        assert torch.equal(u, -v)
        assert u.any()
        x += torch.stack([u, v]) + 0.01 * start(2, dtype, seed=k)


@pytest.mark.parametrize(
    ("gossip", "max_delay", "first"),
    [("synchronous", 0, 5), ("bounded", 0, 5), ("bounded", 2, 7), ("asynchronous", 0, None)],
)
def test_the_first_step_that_waits_for_an_exchange(gossip, max_delay, first):
    """One that was sent in step 5 is 1 exchange behind in it, and 3 in step 7."""
    rule = averaging.make("dpsgd", Layout(SHAPES))
    own = Message(k=0, incarnation=0, view=(0, 0), part=None)
    end = rule.end(0, 1, start(2, torch.float32))
    edge = Edge(end, incarnation=0, begins_later=False, own=own, started=5)
    waiting = [step for step in range(5, 10) if Policy(gossip, max_delay).waits(edge, step)]
    assert waiting == ([] if first is None else list(range(first, 10)))
    edge.inbox[0] = own
    assert not Policy(gossip, max_delay).waits(edge, 9)


def vectorized(x: Tensor, topology: str, name: str, steps: int, **more: Any) -> Tensor:
    """The rule of all workers at once."""
    x, (method, options) = x.clone(), EXCHANGES[name]
    network = Network(graph(topology, len(x)), dtype=x.dtype)
    averaging = algorithms.make(method, network, Layout(SHAPES), **(options | more))
    for _ in range(steps):
        network.run(averaging.step(x))
    return x


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "case"),
    zip(
        EXCHANGES,
        cycle(
            [
                ("tail", torch.float64, {}),
                ("torus", torch.float32, {}),
                ("ring", torch.float64, {"diffusion_rate": 0.3}),
            ]
        ),
        strict=False,
    ),
)
def test_synchronous_exchanges_are_the_rule_of_all_workers(name, case):
    """Also of matrices that PowerGossip does not compress."""
    topology, dtype, more = case
    x = start(9, dtype)
    expected = vectorized(x, topology, name, 4, **more)
    averaging_clock(x, topology, name, **more).run(4)
    torch.testing.assert_close(x, expected, rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize(
    ("name", "gossip"), [*zip(EXCHANGES, cycle(["bounded", "asynchronous"]), strict=False)]
)
def test_without_delays_all_policies_give_the_same_bits(name, gossip):
    x = start(8, torch.float32)
    y = x.clone()
    averaging_clock(x, name=name).run(5)
    averaging_clock(y, name=name, gossip=gossip, max_delay=3).run(5)
    assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["power", "top-k"])
def test_synchronous_steps_depend_on_no_delay(name):
    x = start(8, torch.float32)
    y = x.clone()
    averaging_clock(x, name=name).run(5)
    clock = averaging_clock(y, name=name, values=LATE)
    steps: dict[int, Tensor] = {}
    while len(steps) < 8:
        clock.advance()
        for index, worker in clock.workers.items():
            if worker.steps == 5 and index not in steps:
                steps[index] = y[index].clone()
    assert torch.equal(x, torch.stack([steps[i] for i in range(8)]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gossip"),
    [
        ("plain", "asynchronous"),
        ("power", "synchronous"),
        ("power rank 2", "asynchronous"),
        ("top-k", "bounded"),
        ("sign", "asynchronous"),
    ],
)
def test_the_sum_is_conserved_at_all_times(name, gossip):
    x = start(8, torch.float64)
    total, moved = x.sum(0), 0.0
    clock = averaging_clock(x, name=name, gossip=gossip, max_delay=2, values=LATE)
    for event in range(110):
        clock.advance()
        if event % 15 == 0:
            unapplied = sum_of_unapplied(clock)
            moved = max(moved, float(unapplied.abs().max()))
            torch.testing.assert_close(x.sum(0) + unapplied, total, rtol=0, atol=1e-12)
    assert moved > 1e-3  # the law is empty if no part is ever late


@pytest.mark.parametrize("name", ["top-k", "sign", "qsgd"])
def test_an_edge_whose_first_exchange_one_end_skips_begins_again(name):
    method, options = EXCHANGES[name]
    rule, x = averaging.make(method, Layout(SHAPES), **options), start(2, torch.float32)
    ends = [rule.end(0, 1, x, 1), rule.end(1, 0, x, 1)]
    for k in range(4):
        a, b = (end.part(row, k) for end, row in zip(ends, x, strict=True))
        u = ends[0].exchange(a, b, k, 0.3)
        if k > 0:
            assert torch.equal(u, -ends[1].exchange(b, a, k, 0.3))
            assert u.any() == (k > 1)


def test_a_part_of_another_shape_is_skipped_and_a_message_too_far_ahead_is_ignored():
    worker = averaging_clock(start(4, torch.float32)).workers[0]
    edge, x = worker.edges[1], worker.rule.x.clone()
    own: Any = edge.own
    for k in (2, -1):
        worker.receive(1, Message(k, own.incarnation, own.view, own.part))
        assert not edge.inbox
    worker.receive(1, Message(0, own.incarnation, own.view, own.part[:-1]))
    worker.apply(1)
    assert (edge.own, edge.k) == (None, 1)
    assert torch.equal(worker.rule.x, x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "delay", "steps", "below", "seeds"),
    [
        ("plain", 0, 450, 1e-13, range(1)),
        ("power", 0, 600, 1e-8, range(1)),
        pytest.param("plain", 4, 700, 1e-8, range(20), marks=pytest.mark.slow),
        pytest.param("power", 0, 1200, 1e-13, range(1, 20), marks=pytest.mark.slow),
    ],
)
def test_late_exchanges_average_exactly(name, delay, steps, below, seeds):
    """V is never above its start, and reaches rounding. Also with smaller rates γ/(1 + delay)."""
    values = {"speeds": {2: 0.25}, "late": {"fraction": 0.3, "seconds": 4.0}}
    options = {"num_iterations": 1} if name == "power" else {}
    for seed in seeds:
        x = start(8, torch.float64, seed, shapes=((6, 5),))
        mean, largest = x.mean(0), 0.0
        first = float((x - mean).square().sum())
        clock = averaging_clock(
            x,
            name=name,
            gossip="asynchronous",
            shapes=((6, 5),),
            values=values,
            seed=seed,
            diffusion_rate=1 / (1 + delay),
            **options,  # type: ignore[arg-type]
        )
        while clock.progress < steps:
            clock.advance()
            if clock.now < 100:
                largest = max(largest, float((x - mean).square().sum()))
        assert largest <= (1 + 1e-12) * first
        assert float((x - mean).square().sum()) < below * first


@pytest.mark.slow
def test_exact_diffusion_with_late_exchanges_is_exact():
    values = {"jitter": 0.5, "late": {"fraction": 0.5, "seconds": 4.0}, "speeds": {5: 0.3}}
    problem = Quadratics()
    learning_clock(
        problem,
        "exact-diffusion",
        0.05,
        gossip="bounded",
        max_delay=3,
        values=values,
        diffusion_rate=0.2,
    ).run(2500)
    assert problem.error < 1e-9


@pytest.mark.long
def test_duals_that_grow_slowly_do_not_oscillate():
    """NIDS diverges with late exchanges, for small learning rates."""
    errors = []
    for dual_rate, steps in ((1.0, 150), (0.2, 400)):
        problem = Quadratics()
        learning_clock(
            problem,
            "exact-diffusion",
            0.02,
            gossip="asynchronous",
            values={"jitter": 0.3, "late": {"fraction": 0.5, "seconds": 4.0}},
            rule_options={"dual_rate": dual_rate},
        ).run(steps)
        errors.append(problem.error)
    assert errors[0] > 10
    assert errors[1] < 0.02


LATE_RULES = [name for name, kind in learning.LEARNING.items() if not kind.relays]


OVER = [("plain", "top-k"), ("power", "qsgd")]  # averaging rules, for each second learning rule


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "name"),
    [(rule, name) for index, rule in enumerate(LATE_RULES) for name in OVER[index % 2]],
)
def test_synchronous_learning_is_the_rule_of_all_workers(rule, name):
    method, options = EXCHANGES[name]
    given: dict[str, Any] = {}
    if rule == "exact-diffusion":
        given = {"num_iterations": 1}  # of several, each sees half of those before it
    given = given if method == "power-gossip" else {}
    options = options | given
    network = Network(graph("tail", 8), dtype=torch.float64)

    def make(layout: Layout) -> algorithms.Averaging:
        rate = {
            "diffusion_rate": algorithms.default_rate(method, network.topology, layout, options)
        }
        return algorithms.make(method, network, layout, **rate | options)

    try:
        learning.check(rule, network, method, make(Quadratics().layout))
    except ValueError:
        return
    known = learning.options(rule)
    variants: list[dict[str, Any]] = [{"local_steps": 3} if "local_steps" in known else {}]
    if "overlapping" in known and rule != "diloco":
        variants = [
            {**v, "overlapping": overlapping} for v in variants for overlapping in (False, True)
        ]
    if "gradient_correction" in known:
        variants += [{**variants[0], "gradient_correction": True, "correction_rate": 0.5}]
    for variant in variants:
        problem, expected = Quadratics(), Quadratics()
        parameters: Any = expected
        workers = learning.Workers(network, make, parameters, SGD(0.05).of(expected.x))
        train(learning.make(rule, workers, **variant), expected, 5)
        clock = learning_clock(problem, rule, 0.05, "tail", name, rule_options=variant, **given)
        clock.run(5)
        torch.testing.assert_close(problem.x, expected.x, rtol=0, atol=1e-12)


def test_quasi_global_momentum_restarts_as_that_of_all_workers():
    """Also in a run that resumes before the restart."""
    rates = [0.05, 0.02, 0.001, 0.0, 0.0, 0.05, 0.05, 0.04]
    problem, expected = Quadratics(), Quadratics()
    local = SGD(0.1)
    reference = rule_of("quasi-global-momentum", "plain", expected, local)
    for rate in rates:
        local.rate = rate
        train(reference, expected, 1)
    clocks = [
        learning_clock(problem, "quasi-global-momentum", rates, rule_options={"overlapping": False})
        for _ in range(2)
    ]
    clocks[0].run(4)
    clocks[1].load_state_dict(copy.deepcopy(clocks[0].state_dict()))
    clocks[1].run(len(rates))
    torch.testing.assert_close(problem.x, expected.x, rtol=0, atol=1e-12)


def test_equal_scenarios_and_seeds_give_equal_bits():
    found = []
    for seed in (0, 0, 1):
        x = start(8, torch.float32)
        clock = averaging_clock(x, name="power", gossip="asynchronous", values=LATE, seed=seed)
        clock.run_until(10)
        found.append((x, clock.counter.bits.tolist()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.long
@pytest.mark.parametrize("rule", [*LATE_RULES, "a2cid2"])
def test_a_rule_resumes_anywhere_in_a_step_with_the_same_bits(rule):
    """Its late messages included, and steps of which some are without messages. The clock that
    resumes may have run for a while."""
    kind = {**learning.LEARNING, **learning.POLICIES}[rule]
    known = _options.defaults(kind)
    options: dict[str, Any] = {"local_steps": 2} if "local_steps" in known else {}
    if "gradient_correction" in known:
        options["gradient_correction"] = True
    if rule == "a2cid2":
        options = {"acceleration": learning.acceleration(graph("ring", 5))}
    name = "plain" if Kind.ANTISYMMETRIC in kind.kinds else "top-k"
    name = "power 6 bits" if rule == "dpsgd" else name

    def started() -> tuple[Quadratics, Any]:
        problem = Quadratics(5, torch.float32)
        return problem, learning_clock(
            problem, rule, 0.05, "ring", name, "asynchronous", 0, options, values=LATE
        )

    problem, clock = started()
    clock.run(7 if rule == "dpsgd" else 3)  # beyond the whole messages before few bits
    states = []
    for _ in range(100):
        states.append(copy.deepcopy((clock.state_dict(), problem.x, problem.grad)))
        clock.advance()
    for event in (0, 19, 44):
        state, x, grad = states[event]
        again, resumed = started()
        resumed.run(1)
        for last in (event + 9, 100):  # a state may be loaded several times
            again.x.copy_(x)
            again.grad.copy_(grad)
            resumed.load_state_dict(state)
            for _ in range(event, last):
                resumed.advance()
        assert torch.equal(again.x, problem.x)


@pytest.mark.long
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"speeds": {1: 0.4}},
        {"deaths": [{"worker": 2, "at": 1.5}], "speeds": {1: 0.4}},
    ],
    ids=["alike", "slow", "death"],
)
def test_a_clock_resumes_after_each_event(values):
    """Also between events at the same time, such as the resumptions of workers that waited."""

    def clock_of(x):
        return averaging_clock(x, "ring", "plain", "synchronous", values=values, shapes=[(2,)])

    x = start(5, torch.float32, shapes=[(2,)])
    clock = clock_of(x)
    states, xs, order = [], [], []
    for _ in range(70):
        states.append(copy.deepcopy(clock.state_dict()))
        xs.append(x.clone())
        order.append(clock.now)
        clock.advance()
    y = x.clone()
    for i, state in enumerate(states[:-20]):
        y.copy_(xs[0])
        resumed = clock_of(y)
        y.copy_(xs[i])
        resumed.load_state_dict(state)
        for _ in range(19):
            resumed.advance()
        assert torch.equal(y, xs[i + 19]), f"event {i}"
        assert resumed.now == order[i + 19]


@pytest.mark.long
@pytest.mark.parametrize(("name", "steps"), [("plain", 80), ("power", 80)])
def test_losses_at_both_ends_are_exact_and_at_one_end_biased(name, steps):
    biases = {}
    for ends in ("both", "one"):
        x = start(8, torch.float64, shapes=((6, 5),))
        mean = x.mean(0)
        loss = {"loss": {"fraction": 0.1, "ends": ends}}
        averaging_clock(x, name=name, values=loss, shapes=((6, 5),)).run(steps)
        biases[ends] = float((x.mean(0) - mean).abs().max())
        if ends == "both":
            assert float((x - mean).abs().max()) < 1e-3
    assert biases["both"] < 1e-12
    assert biases["one"] > 1e-2
