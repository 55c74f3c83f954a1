"""Weights of the edges between survivors, lost workers, and replacements."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from powergossip import topologies
from powergossip.events import scenario
from powergossip.events.members import Members, dead, union, without
from powergossip.events.virtual_clock import VirtualClock
from tests.harness.exchanging import (
    averaging_clock,
    learners,
    learning_clock,
    matrix,
    settled,
    start,
    sum_of_unapplied,
)
from tests.harness.quadratics import Quadratics


@st.composite
def graphs_with_dead(draw):
    n = draw(st.integers(3, 12))
    seed = draw(st.integers(0, 10**6))
    tree = nx.random_labeled_tree(n, seed=seed)
    graph = nx.compose(tree, nx.gnp_random_graph(n, draw(st.floats(0, 0.5)), seed=seed))
    gone = draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    return graph, gone


@settings(max_examples=60, deadline=None)
@given(graphs_with_dead())
def test_survivors_are_connected_by_doubly_stochastic_weights(drawn):
    graph, gone = drawn
    members = Members(topologies.undirected("graph", graph))
    left = without(members.first, gone)
    W, before = matrix(left), matrix(members.first)
    alive = sorted(left)
    assert alive == [i for i in graph if i not in gone]
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(1), 1, atol=1e-12)
    assert (W >= -1e-12).all()
    assert (np.diag(W) >= np.diag(before)[alive] - 1e-12).all()
    assert nx.is_connected(nx.from_numpy_array(W))


def test_a_ring_closes_and_a_worker_with_many_neighbors_becomes_a_chain():
    ring = Members(topologies.make("ring", 8))
    assert ring.weight(2, 4, (0, 0, 0, 1, 0, 0, 0, 0)) == pytest.approx(1 / 3)
    assert ring.weight(2, 4, ring.start) == 0
    star = Members(topologies.make("star", 5))
    w = star.first[0][1]
    left = star.weights((1, 0, 0, 0, 0))
    assert left[2] == {1: pytest.approx(w / 2), 3: pytest.approx(w / 2)}


def test_views_of_both_ends_give_one_weight():
    assert union((0, 1, 2), (1, 0, 2)) == (1, 1, 2)
    assert dead((1, 0, 2, 3)) == {0, 3}


@pytest.mark.parametrize("name", ["directed", "time-varying"])
def test_other_topologies_are_rejected(name):
    kind = {"directed": "unidirectional-ring", "time-varying": "round-robin"}[name]
    with pytest.raises(ValueError, match="topology="):
        Members(topologies.make(kind, 8))


DEATHS = {
    "speeds": {1: 0.5},
    "jitter": 0.3,
    "latency": 0.2,
    "deaths": [{"worker": 3, "at": 6.0}, {"worker": 4, "at": 6.1}, {"worker": 0, "at": 11.0}],
    "detection": 1.0,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gossip"),
    [("plain", "synchronous"), ("power", "asynchronous"), ("top-k", "bounded")],
)
def test_survivors_agree_on_their_mean(name, gossip):
    """From the moment on at which all know of the deaths, the sum of the survivors is conserved."""
    x = start(8, torch.float64)
    clock = averaging_clock(x, "torus" if name == "power" else "ring", name, gossip, 2,
                            values=DEATHS)  # fmt: skip
    clock.run_until(30.0)
    alive = clock.alive
    assert alive == [1, 2, 5, 6, 7]
    assert all(dead(worker.view) == {0, 3, 4} for worker in clock.workers.values())
    total = x[alive].sum(0) + sum_of_unapplied(clock)
    clock.run_until(200.0)
    torch.testing.assert_close(x[alive].sum(0) + sum_of_unapplied(clock), total, rtol=0, atol=1e-12)
    assert float((x[alive] - x[alive].mean(0)).abs().max()) < 1e-6
    gone = [0, 3, 4]
    assert float((x[gone] - x[alive].mean(0)).abs().max()) > 1e-2


def of_survivors(problem: Quadratics, alive: list[int]) -> float:
    """The distance to the optimum of the survivors."""
    optimum = (problem.a * problem.b)[alive].sum(0) / problem.a[alive].sum(0)
    return float((problem.x[alive] - optimum).square().sum(1).mean().sqrt())


@pytest.mark.long
@pytest.mark.parametrize("gossip", ["synchronous", "asynchronous"])
def test_survivors_find_their_optimum_and_their_duals_sum_to_0(gossip):
    problem = Quadratics()
    values = {"deaths": [{"worker": 3, "at": 40.0}], "detection": 0.5}
    clock = learning_clock(
        problem, "exact-diffusion", 0.1, gossip=gossip, values=values, diffusion_rate=0.5
    )
    clock.run_until(400.2)
    assert of_survivors(problem, clock.alive) < 1e-5
    of_workers: list[Any] = [worker.rule for worker in clock.workers.values()]
    duals = [d for rule in of_workers for d in rule.duals.values()]
    assert float(sum(duals).add(sum_of_unapplied(clock)).abs().max()) < 1e-14 * len(duals) * 10


LATER_DEATHS: dict[str, Any] = {
    "deaths": [{"worker": 3, "at": 21.3}, {"worker": 4, "at": 21.9}, {"worker": 0, "at": 30.2}],
    "detection": 1.7,
}
CHURN = LATER_DEATHS | {"joins": [{"worker": 4, "at": 40.6}, {"worker": 7, "at": 13.7}]}


LATER: dict[str, Any] = {
    "jitter": 0.3,
    "latency": 0.3,
    "late": {"fraction": 0.3, "seconds": 1.5},
}
CORRECTED: dict[str, Any] = {"local_steps": 3, "gradient_correction": True, "correction_rate": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gossip", "overlapping"),
    [("plain", "synchronous", False), ("plain", "asynchronous", True),
     ("power", "asynchronous", False), ("top-k", "bounded", True)],
)  # fmt: skip
def test_tracking_restarts_wherever_workers_learn_of_deaths_and_joins(name, gossip, overlapping):
    """Σ y + unapplied = Σ u of the survivors, without an agreed step."""
    problem = Quadratics()
    options = {"overlapping": overlapping}
    clock = learning_clock(
        problem,
        "gradient-tracking",
        0.05,
        name=name,
        gossip=gossip,
        max_delay=2,
        values=CHURN | LATER,
        rule_options=options,
    )
    clock.run_until(60.0)
    assert len({worker.view for worker in clock.workers.values()}) == 1
    size, moved = problem.layout.size, 0.0
    for seconds in range(61, 70):
        clock.run_until(seconds)
        states = [worker.rule.variables_dict() for worker in clock.workers.values()]
        difference = sum(state["y"] - state["v"] for state in states)
        # In the order of the joint buffer, where y lies behind x.
        unapplied = (torch.zeros(2 * size).double() + sum_of_unapplied(clock, settled))[size:]
        torch.testing.assert_close(difference[0], -unapplied, rtol=0, atol=1e-12)
        moved = max(moved, float(unapplied.abs().max()))
    assert moved > 1e-6


Exact = tuple[str, str, str, dict[str, Any], float, dict[str, Any]]
# Rules that reach the optimum, with averaging, gossip, deaths and joins, learning rate, options.
EXACT: list[Exact] = [
    ("gradient-tracking", "plain", "synchronous", CHURN, 0.1, {}),
    ("gradient-tracking", "plain", "bounded", LATER_DEATHS, 0.05, {}),
    ("diloco", "plain", "synchronous", CHURN, 0.1, CORRECTED),
    ("diloco", "top-k", "bounded", LATER_DEATHS, 0.03, CORRECTED),
    ("k-gt", "plain", "asynchronous", CHURN, 0.02, {"local_steps": 2}),
    ("momentum-tracking", "power", "asynchronous", CHURN, 0.005, {}),
    ("beer", "top-k", "asynchronous", CHURN, 0.02, {}),
    ("gasloc", "plain", "asynchronous", CHURN, 0.03, CORRECTED | {"correction_rate": 0.5}),
    ("noloco", "plain", "asynchronous", CHURN, 0.03, CORRECTED | {"correction_rate": 0.3}),
]


@pytest.mark.long
@pytest.mark.parametrize(("rule", "name", "gossip", "events", "rate", "options"), EXACT)
def test_survivors_find_their_optimum(rule, name, gossip, events, rate, options):
    """Corrections restart, and sum to 0 again with the exchanges that are not applied."""
    problem = Quadratics()
    clock = learning_clock(
        problem,
        rule,
        rate,
        name=name,
        gossip=gossip,
        max_delay=2,
        values={**events, **LATER},
        rule_options=options,
    )
    while clock.now < 400 and (clock.now < 150 or of_survivors(problem, clock.alive) > 1e-2):
        clock.run_until(clock.now + 50)
    assert of_survivors(problem, clock.alive) < 1e-2


def test_without_corrections_survivors_do_not_find_their_optimum():
    problem, options = Quadratics(), {"local_steps": 3}
    clock = learning_clock(problem, "diloco", 0.05, values=CHURN | LATER, rule_options=options)
    clock.run_until(100)
    assert of_survivors(problem, clock.alive) > 1


def test_ends_that_know_of_different_deaths_use_one_weight():
    """The weights of all edges change with a death. Duals are the sums of what was exchanged."""
    problem = Quadratics()
    values = {"jitter": 0.3, "latency": 0.4, "deaths": [{"worker": 3, "at": 4.0}], "detection": 0.9}
    clock = learning_clock(
        problem, "exact-diffusion", 0.05, "fully-connected", values=values, gossip="asynchronous"
    )
    clock.run_until(20.0)
    workers: dict[int, Any] = dict(clock.workers)
    pairs = [(i, j) for i in workers for j in workers if i < j]
    same = [(i, j) for i, j in pairs if workers[i].edges[j].k == workers[j].edges[i].k]
    assert len(same) > 5
    for i, j in same:
        assert torch.equal(workers[i].rule.duals[j], -workers[j].rule.duals[i])


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "power"])
def test_a_replacement_begins_with_the_mean_of_its_neighbors(name):
    x = start(8, torch.float32)
    values = {"deaths": [{"worker": 3, "at": 2.5}], "joins": [{"worker": 3, "at": 9.5}]}
    clock = averaging_clock(x, name=name, values=values)
    clock.run_until(9.49)
    others = [i for i in range(8) if i != 3]
    before, bits = x.clone(), clock.counter.bits.tolist()
    clock.run_until(9.5)
    assert torch.equal(x[others], before[others])
    assert torch.equal(x[3], before[[2, 4]].mean(0))
    assert clock.counter.bits[2] - bits[2] >= 32 * x.shape[1]
    assert clock.alive == list(range(8))
    clock.run_until(12)
    assert set(clock.workers[3].edges) == {2, 4}
    assert clock.workers[2].edges[3].incarnation == 2
    clock.run_until(100)
    assert all(worker.view[3] == 2 for worker in clock.workers.values())
    assert float((x - x.mean(0)).abs().max()) < 1e-3


def test_a_replacement_begins_at_the_mean_step_of_its_neighbors():
    values: dict[str, Any] = {"speeds": {2: 0.5}, "deaths": [{"worker": 3, "at": 2.5}]}
    values["joins"] = [{"worker": 3, "at": 8.5}]
    clock = averaging_clock(start(8, torch.float64), gossip="asynchronous", values=values)
    clock.run_until(8.5)
    assert [clock.workers[i].steps for i in (2, 3, 4)] == [4, 6, 8]


def test_a_replacement_receives_buffers_too_and_all_that_it_receives_is_counted():
    problem, buffers = Quadratics(5), torch.arange(15.0).view(5, 3)
    drawn = scenario.read({"joins": [{"worker": 3, "at": 1.5}]}, 5, 0)
    clock = VirtualClock(drawn, [problem.x, buffers], *learners(problem, "dpsgd", 0.1))
    clock.run_until(1.4)
    before = clock.counter.bits.copy()
    clock.run_until(1.5)
    assert torch.equal(buffers[3], buffers[[2, 4]].mean(0))
    of_each = 8 * (problem.x[0].nbytes + buffers[0].nbytes)
    assert (clock.counter.bits - before)[[0, 1, 2, 4]].tolist() == [0, 0, of_each, of_each]


@pytest.mark.parametrize("name", ["plain", "power", "top-k"])
def test_parts_of_a_lost_worker_that_arrive_after_its_replacement_are_not_applied(name):
    """Their edges are those of another incarnation: the sum is conserved from the join on."""
    x = start(8, torch.float64)
    values: dict[str, Any] = {"latency": 3.0, "jitter": 0.3}
    values |= {"deaths": [{"worker": 3, "at": 6.5}], "joins": [{"worker": 3, "at": 7.0}]}
    clock = averaging_clock(x, name=name, gossip="asynchronous", values=values)
    clock.run_until(7.0)
    total = x.sum(0) + sum_of_unapplied(clock)
    clock.run_until(40.0)
    torch.testing.assert_close(x.sum(0) + sum_of_unapplied(clock), total, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "gossip", "topology"),
    [
        ("plain", "synchronous", "ring"),
        ("power", "asynchronous", "torus"),
        ("sign", "asynchronous", "binary-tree"),
    ],
)
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


def test_a_worker_that_is_absent_at_the_start_joins():
    x = start(6, torch.float64)
    clock = averaging_clock(x, values={"joins": [{"worker": 5, "at": 4.0}]})
    assert clock.alive == [0, 1, 2, 3, 4]
    clock.run_until(4.0)
    assert clock.alive == [0, 1, 2, 3, 4, 5]
    clock.run_until(200.0)
    assert float((x - x.mean(0)).abs().max()) < 1e-9
