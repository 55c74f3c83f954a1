"""Outer optimizers: equalities with published forms, fixed points, stability, correction.

The quadratics are those of tests/harness/quadratics.py, as vectors of 10 elements or as matrices.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import algorithms, topologies
from powergossip.algorithms import learning
from powergossip.algorithms.learning import outer_stability
from powergossip.network import Network
from tests.harness.averaging import graph
from tests.harness.quadratics import (
    SGD,
    Quadratics,
    adam,
    normalized,
    polar,
    rule_of,
    sign,
    train,
)

VECTOR = ((10,),)
RULES = ("diloco", "gasloc", "noloco")


def run(
    name: str,
    averaging: str,
    rounds: int,
    H: int,
    rate: Any,
    problem: Quadratics | None = None,
    topology: Any = "ring",
    averaging_options: dict[str, Any] | None = None,
    **options: Any,
) -> Quadratics:
    """The quadratics after some rounds of H steps."""
    problem = Quadratics(shapes=VECTOR) if problem is None else problem
    local = rate(problem) if callable(rate) else rate
    rule = rule_of(
        name, averaging, problem, local, topology, averaging_options, local_steps=H, **options
    )
    train(rule, problem, rounds * H)
    return problem


# --- Equalities -----------------------------------------------------------------------------------


def test_over_all_reduce_it_is_diloco() -> None:
    """That of Algorithm 1: torch's SGD with Nesterov's momentum on −mean Δ."""
    H, rate, mu, beta = 5, 0.05, 0.7, 0.9
    ours = run("diloco", "all-reduce", 20, H, rate, outer_rate=mu, outer_momentum=beta)
    problem = Quadratics(shapes=VECTOR)
    slow = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([slow], lr=mu, momentum=beta, nesterov=True)
    for _ in range(20):
        problem.x.copy_(slow.detach().expand_as(problem.x))
        for _ in range(H):
            problem.x.sub_(problem.gradients(), alpha=rate)
        slow.grad = -(problem.x - slow.detach()).mean(0)
        outer.step()
    torch.testing.assert_close(ours.x, slow.detach().expand_as(ours.x), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "averaging"),
    [("diloco", "plain"), ("diloco", "top-k"), ("gasloc", "power-gossip"), ("gasloc", "top-k")],
)
def test_without_outer_momentum_it_is_dpsgd_to_the_bit(name: str, averaging: str) -> None:
    problems = []
    given: dict[str, Any] = {"outer_rate": 1.0, "outer_momentum": 0.0}
    for rule, options in (("dpsgd", dict[str, Any]()), (name, given)):
        problem = Quadratics(dtype=torch.float32)
        options |= {"overlapping": False} if rule == "dpsgd" else {}
        problems.append(run(rule, averaging, 10, 3, 0.05, problem, **options))
    assert torch.equal(problems[0].x, problems[1].x)


@pytest.mark.parametrize("averaging", ["plain", "power-gossip"])
def test_corrected_sgd_without_outer_momentum_is_k_gt(averaging: str) -> None:
    options: dict[str, Any] = {
        "outer_rate": 1.0,
        "outer_momentum": 0.0,
        "gradient_correction": True,
    }
    ours = run("diloco", averaging, 20, 4, 0.05, Quadratics(), **options)
    theirs = run("k-gt", averaging, 20, 4, 0.05, Quadratics())
    torch.testing.assert_close(ours.x, theirs.x, rtol=0, atol=1e-11)


def test_one_worker_is_lookahead() -> None:
    """Zhang et al. (2019), Algorithm 1."""
    H, rate, alpha = 5, 0.1, 0.5
    ours = run("diloco", "plain", 7, H, rate, Quadratics(1), outer_rate=alpha, outer_momentum=0.0)
    theirs = Quadratics(1)
    for _ in range(7):
        slow = theirs.x.clone()
        for _ in range(H):
            theirs.x.sub_(theirs.gradients(), alpha=rate)
        theirs.x.copy_(slow + alpha * (theirs.x - slow))
    torch.testing.assert_close(ours.x, theirs.x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("gamma", [None, 0.3])
def test_the_memory_of_noloco_has_displacements_and_the_pull_to_neighbors(
    gamma: float | None,
) -> None:
    """δ ← β δ + μ W Δ + γ (W φ − φ). By default γ = μ."""
    H, rate, mu, beta = 3, 0.05, 0.5, 0.4
    options: dict[str, Any] = {"outer_rate": mu, "outer_momentum": beta, "consensus_rate": gamma}
    ours = run("noloco", "plain", 9, H, rate, **options)
    W = torch.from_numpy(topologies.make("ring", 8).round(0).matrix().toarray())
    theirs = Quadratics(shapes=VECTOR)
    delta = torch.zeros_like(theirs.x)
    for _ in range(9):
        slow = theirs.x.clone()
        for _ in range(H):
            theirs.x.sub_(theirs.gradients(), alpha=rate)
        delta = beta * delta + mu * (W @ (theirs.x - slow)) + (gamma or mu) * (W @ slow - slow)
        theirs.x.copy_(slow + delta)
    torch.testing.assert_close(ours.x, theirs.x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("averaging", ["plain", "power-gossip", "top-k"])
def test_the_mean_of_equal_curvatures_follows_all_reduce(name: str, averaging: str) -> None:
    """For any averaging that keeps the mean."""
    means = []
    for method in (averaging, "all-reduce"):
        problem = Quadratics()
        problem.a.fill_(1.3)
        run(name, method, 15, 4, 0.05, problem, outer_rate=0.7, outer_momentum=0.4)
        means.append(problem.x.mean(0))
    torch.testing.assert_close(*means, rtol=0, atol=1e-13)


# --- Fixed points ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "mu", "beta"), [(1, 0.3, 0.5), (5, 0.7, 0.9), (5, 0.3, 0.5), (20, 1.0, 0.0)]
)
def test_over_all_reduce_the_fixed_point_is_that_of_fedavg(H: int, mu: float, beta: float) -> None:
    """Σ_i Q_i (b_i − φ) = 0, Q_i = I − (I − η A_i)^H, whatever the outer optimizer."""
    rate = 0.05
    found = run(
        "diloco", "all-reduce", max(250, 1500 // H), H, rate, outer_rate=mu, outer_momentum=beta
    )
    q = 1 - (1 - rate * found.a) ** H
    expected = (q * found.b).sum(0) / q.sum(0)
    torch.testing.assert_close(found.x, expected.expand_as(found.x), rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "beta", "error"),
    [("diloco", 0.0, 1.05), ("diloco", 0.9, 1.05), ("gasloc", 0.9, 1.05), ("noloco", 0.5, 1.43)],
)
def test_outer_momentum_does_not_enlarge_the_bias(name: str, beta: float, error: float) -> None:
    """Momentum of the pseudo-gradients alone, before the mixing, would have 4.17 for β = 0.9."""
    found = run(name, "plain", 400, 20, 0.05 / 20, outer_rate=0.7, outer_momentum=beta)
    assert found.error == pytest.approx(error, abs=0.02 if name != "noloco" else 0.1)


# --- Stability ------------------------------------------------------------------------------------


# Per period, without gradients.
RADII = [
    ("diloco", "ring", 8, 0.5, 0.729),
    ("diloco", "ring", 8, 0.9, 0.949),
    ("diloco", "hypercube", 8, 0.9, 1.297),
    ("diloco", "unidirectional-ring", 8, 0.5, 1.069),
    ("diloco", "one-peer-exponential", 8, 0.5, 0.75),
    ("diloco", "one-peer-exponential", 8, 0.7, 1.19),
    ("gasloc", "ring", 8, 0.5, 0.707),
    ("gasloc", "unidirectional-ring", 8, 0.5, 1.133),
    ("gasloc", "one-peer-exponential", 8, 0.9, 1.382),
    ("noloco", "unidirectional-ring", 8, 0.3, 1.025),
    ("noloco", "unidirectional-ring", 8, 0.5, 1.133),
]
RECURRENCES: dict[str, tuple[Any, ...]] = {
    "diloco": (outer_stability.diloco,),
    "gasloc": (outer_stability.gasloc,),
    "noloco": (outer_stability.noloco, 1.0),
}


@pytest.mark.parametrize(("name", "topology", "n", "beta", "radius"), RADII)
def test_disagreement_changes_by_the_radius(
    name: str, topology: str, n: int, beta: float, radius: float
) -> None:
    """Measured over many periods."""
    found, (recurrence, *more) = topologies.make(topology, n), RECURRENCES[name]
    predicted = outer_stability.radius(found, recurrence, 1.0, 0.0, beta, *more)
    assert predicted == pytest.approx(radius, abs=5e-3)
    problem = Quadratics(n, shapes=VECTOR)
    problem.a.zero_()
    problem.x.copy_(problem.b)
    rule = rule_of(name, "plain", problem, 0.1, topology, outer_momentum=beta, outer_rate=1.0)
    spreads = []
    for _ in range(2):
        train(rule, problem, 40 * found.period)
        spreads.append((problem.x - problem.x.mean(0)).norm())
    assert float(spreads[1] / spreads[0]) ** (1 / 40) == pytest.approx(radius, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "beta", "overlapping"),
    [
        *((name, beta, False) for name in RULES for beta in (0.3, 0.9)),
        *(("diloco", beta, True) for beta in (0.3, 0.9)),
    ],
)
def test_disagreement_decays_at_the_default_rate(name: str, beta: float, overlapping: bool) -> None:
    """Whatever the way that workers go towards their own optimum. Above the largest rate it grows
    for one."""
    given = {"outer_rate": 0.7, "outer_momentum": beta, "consensus_rate": None}
    recurrence, *more = RECURRENCES[name] if name != "noloco" else (outer_stability.noloco, 0.7)
    if overlapping:
        recurrence = outer_stability.overlapping_diloco
    graphs = [("ring", 8), ("star", 9), ("unidirectional-ring", 7), ("exponential", 16)]
    graphs += [("equi-static", 16), ("one-peer-exponential", 8), ("base-graph", 5)]
    graphs += [("random-matching", 16), ("epidemic", 8), ("fully-connected", 5)]
    for topology, n in graphs:
        found = topologies.make(topology, n)
        largest = learning.rule(name).largest_rate(found, given | {"overlapping": overlapping})
        pulls = np.linspace(0, 0.7, 15)
        below, above = (
            max(outer_stability.radius(found, recurrence, rate, q, beta, *more) for q in pulls)
            for rate in (min(1.0, 0.9 * largest), min(2.0, 1.01 * largest))
        )
        assert below < 1, topology
        assert above > 1 or largest >= 2, topology


def test_a_single_worker_has_no_largest_rate() -> None:
    one = topologies.make("ring", 1)
    assert outer_stability.largest_rate(one, outer_stability.diloco, 0.7, 0.9) == np.inf


# --- Gradient correction --------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "alpha"), [({"correction_rate": 0.4}, 0.4), ({}, 0.1)])
def test_a_correction_is_an_average_of_differences(given: Any, alpha: float) -> None:
    """Σ_t α (1 − α)^t (mean g − g_i) of the round t rounds ago, over all-reduce."""
    problem = Quadratics(shapes=VECTOR)
    problem.a.zero_()
    local, corrects = SGD(0.0).of(problem.x), {"gradient_correction": True, **given}
    network = Network(graph("ring", 8), dtype=problem.x.dtype)
    parameters: Any = problem

    def make(layout: Any) -> Any:
        return algorithms.make("all-reduce", network, layout)

    workers = learning.Workers(network, make, parameters, local)
    rule = learning.make("diloco", workers, local_steps=2, **corrects)
    expected = torch.zeros_like(problem.x)
    for _ in range(5):
        gradients = torch.randn(2, *problem.x.shape, dtype=problem.x.dtype)
        for g in gradients:
            rule.start()
            problem.grad.copy_(g)
            rule.finish()
        g = gradients.mean(0)
        expected = (1 - alpha) * expected + alpha * (g.mean(0) - g)
        torch.testing.assert_close(rule.state_dict()["c"], expected, rtol=0, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize(
    ("local", "averaging"),
    [
        (adam, "plain"),
        (normalized, "plain"),
        (sign, "plain"),
        (polar, "plain"),
        (adam, "all-reduce"),
    ],
)
def test_corrections_remove_the_bias_of_optimizers_that_are_not_linear(
    local: Any, averaging: str
) -> None:
    """With a learning rate that decays to 0. Without correction also all-reduce is biased."""
    errors = [
        run("diloco", averaging, 700, 5, local, Quadratics(), gradient_correction=c).error
        for c in (True, False)
    ]
    assert errors[0] < 0.05
    assert errors[1] > 0.4


@pytest.mark.long
def test_corrections_precede_clipping() -> None:
    """With a clip that is far below the norm of the workers' own gradients at the optimum."""
    options: dict[str, Any] = {"clip": 2.0, "outer_momentum": 0.5}
    errors = [
        run("diloco", "plain", rounds, 20, 0.02, Quadratics(), **options, gradient_correction=c)
        for rounds, c in ((500, True), (100, False))
    ]
    assert errors[0].error < 5e-5
    assert errors[1].error > 0.5


TENSORS = ((3, 4), (2, 3), (5,), (4, 3), (2,))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "corrects"), [("diloco", True), ("gasloc", False), ("noloco", True)]
)
def test_fragments_have_the_fixed_point_of_the_whole(name: str, corrects: bool) -> None:
    slow = []
    for p in (1, 3):
        problem = Quadratics(shapes=TENSORS)
        options: dict[str, Any] = {"outer_momentum": 0.3, "gradient_correction": corrects}
        rule = rule_of(name, "plain", problem, 0.04, local_steps=6, fragments=p, **options)
        train(rule, problem, 300 * 6)
        slow.append(rule.state_dict()["slow"])
    torch.testing.assert_close(slow[1], slow[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("overlapping", [False, True])
def test_a_rule_is_restored_in_the_middle_of_a_round(
    overlapping: bool, fragments: int, corrects: bool
) -> None:
    """Overlapping and without a correction, messages are in flight then."""
    options: dict[str, Any] = {"fragments": fragments, "local_steps": 6}
    options["gradient_correction"] = corrects
    runs = []
    for steps in (7, 3):
        problem = Quadratics(shapes=TENSORS)
        rule = rule_of("diloco", "power-gossip", problem, 0.05, overlapping=overlapping, **options)
        train(rule, problem, steps)
        runs.append((rule, problem))
    (rule, problem), (restored, resumed) = runs
    restored.load_state_dict(copy.deepcopy(rule.state_dict()))
    resumed.x.copy_(problem.x)
    for run in runs:
        train(*run, 9)
    assert torch.equal(resumed.x, problem.x)


def test_the_first_round_of_a_fragment_has_the_mean_of_its_own_steps() -> None:
    """It is shorter. Without steps of x, all gradients are equal, and c is what they lack."""
    problem = Quadratics(shapes=TENSORS)
    options: dict[str, Any] = {"local_steps": 6, "fragments": 3, "gradient_correction": True}
    rule = rule_of("diloco", "all-reduce", problem, 0.0, **options)
    g = problem.gradients()
    corrections = g.mean(0) - g
    ended = []
    for _ in range(3):
        train(rule, problem, 2)
        c = rule.state_dict()["c"]
        is_whole = (c - corrections).abs().amax(0) < 1e-12
        assert (is_whole | (c == 0).all(0)).all()
        ended.append(int(is_whole.sum()))
    assert 0 < ended[0] < ended[1] < ended[2] == problem.layout.size


def test_fragments_send_the_bits_of_the_whole_in_parts() -> None:
    sent = []
    for fragments in (1, 3):
        problem = Quadratics(shapes=TENSORS)
        network = Network(graph("ring", 8), dtype=problem.x.dtype)
        rule = rule_of("diloco", "plain", problem, 0.1, network, local_steps=6, fragments=fragments)
        bits = []
        for _ in range(12):
            before = int(network.bits[0])
            train(rule, problem, 1)
            bits.append(int(network.bits[0]) - before)
        sent.append(bits)
    whole, parts = sent
    assert sum(whole) == sum(parts)
    assert [step for step, b in enumerate(whole, 1) if b] == [6, 12]
    assert [step for step, b in enumerate(parts, 1) if b] == [2, 4, 6, 8, 10, 12]
    assert max(parts) < 0.6 * max(whole)


@pytest.mark.parametrize("corrects", [False, True])
def test_overlapping_messages_are_in_flight_during_the_round(corrects: bool) -> None:
    """Or with the correction, which the local steps need, during its first gradient."""
    problem = Quadratics()
    network = Network(graph("ring", 8), dtype=problem.x.dtype)
    options = {"overlapping": True, "gradient_correction": corrects}
    rule = rule_of(
        "diloco",
        "power-gossip",
        problem,
        0.1,
        network,
        {"num_iterations": 4},
        local_steps=8,
        **options,
    )
    sent = []
    for _ in range(24):
        before = int(network.messages[0])
        train(rule, problem, 1)
        sent.append((int(network.messages[0]) - before) // 2)
    later = [1, 1, 0, 1, 0, 1, 0, 0]
    assert sent == 3 * [4, *7 * [0]] if corrects else sent == [2, 1, 1, *5 * [0], *later, *later]


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_look_at_the_state_receives_overlapping_messages_and_changes_nothing(
    fragments: int,
) -> None:
    models = []
    for looks in (False, True):
        problem = Quadratics(shapes=TENSORS)
        options: dict[str, Any] = {"local_steps": 12, "fragments": fragments, "overlapping": True}
        rule = rule_of("diloco", "power-gossip", problem, 0.05, **options)
        for step in range(60):
            train(rule, problem, 1)
            if looks and step % 5 == 0:
                rule.state_dict()
        models.append(problem.x)
    assert torch.equal(*models)


@pytest.mark.long
@pytest.mark.parametrize(("corrects", "fragments"), [(False, 1), (True, 2)])
def test_overlapping_has_the_fixed_point_of_stable_rates(corrects: bool, fragments: int) -> None:
    """At the default of a lazy ring. With the correction it is exact."""
    options: dict[str, Any] = {"overlapping": True, "gradient_correction": corrects}
    topology = topologies.make("ring", 8)
    rates = {"outer_rate": 0.7, "outer_momentum": 0.5, "overlapping": True}
    given = {"diffusion_rate": 0.9 * learning.rule("diloco").largest_rate(topology, rates)}
    problem = Quadratics(shapes=VECTOR if fragments == 1 else TENSORS)
    options["fragments"] = fragments
    run("diloco", "plain", 900 if corrects else 300, 10, 0.01, problem, "ring", given, **options)
    assert problem.error < 1e-9 if corrects else 0.3 < problem.error < 3


@pytest.mark.parametrize("fragments", [1, 3])
def test_models_in_flight_that_agree_stay_as_they_are_without_gradients(fragments: int) -> None:
    """From the first step on, in which the messages of all fragments begin."""
    problem = Quadratics(shapes=TENSORS)
    problem.a.zero_()
    start = problem.x.copy_(problem.b[:1]).clone()
    options: dict[str, Any] = {"local_steps": 6, "fragments": fragments, "overlapping": True}
    train(rule_of("diloco", "plain", problem, 0.1, **options), problem, 15)
    torch.testing.assert_close(problem.x, start, rtol=0, atol=1e-13)
