"""Laws of default diffusion rates: no rule diverges with them, and none is needlessly slow."""

import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip import algorithms, compressors, topologies
from powergossip.algorithms import learning
from powergossip.compressors import Identity, RandomK, Rounding, SignAndNorm, TopK
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness import default_rates
from tests.harness.default_rates import Case

ALONE = Processes()
LAYOUT = Layout([(25, 40), (5, 2), (20,)])
RING = topologies.make("ring", 8)
COMPRESSED = ("choco", "deepsqueeze")


def consensus(
    topology: Topology, elements: int, steps: int, name: str = "choco", **options: Any
) -> float:
    """The error of x from N(0, 1) after some steps, relative to the start."""
    network, layout = Network(topology, ALONE), Layout([default_rates.shape(elements)])
    averaging = algorithms.make(name, network, layout, **options)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(topology.n_workers, elements, generator=random)
    error = [float((x - x.mean(0)).double().square().sum())]
    for _ in range(steps):
        network.run(averaging.step(x))
    return float((x - x.mean(0)).double().square().sum()) / error[0]


def warned(build: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return [str(warning.message) for warning in caught]


# No default diverges


@pytest.mark.long
@pytest.mark.parametrize("compressor", compressors.COMPRESSORS)
@pytest.mark.parametrize("rule", COMPRESSED)
def test_no_default_diverges(rule: str, compressor: str) -> None:
    steps = 600 if compressor in ("svd", "rounding") else 1500
    cases = [("ring 8, constant weights", 10), ("fully connected 8", 100)]
    for graph, elements in cases if rule == "choco" else cases[:1]:
        result = default_rates.run(Case(graph, rule, compressor, elements, steps=steps))
        assert result.holds, result


@pytest.mark.long
def test_no_default_diverges_on_a_directed_graph() -> None:
    """All rules and compressors that it accepts."""
    accepted = default_rates.cases(["directed ring 8"])
    for case in (c for c in accepted if c.compressor != "svd"):
        slow = case.compressor == "rounding"
        result = default_rates.run(replace(case, steps=600) if slow else case)
        assert result.holds, result


@pytest.mark.slow
def test_no_default_diverges_on_any_graph() -> None:
    """All graphs and rules."""
    for case in default_rates.cases():
        if case.compressor != "svd":
            result = default_rates.run(case)
            assert result.holds, result


@pytest.mark.parametrize("compressor", ["random-k", "random-block", "top-k"])
def test_deepsqueeze_converges_with_one_neighbor_at_a_time(compressor: str) -> None:
    result = default_rates.run(Case("one-peer exponential 8", "deepsqueeze", compressor, 100))
    assert result.holds, result


@pytest.mark.parametrize("compressor", ["random-k", "random-block"])
def test_entries_at_random_times_converge_in_the_mean_square(compressor: str) -> None:
    """Neighbors on a ring with opposite values: λ_max = 2 max_i (1 − w_ii). An entry is sent every
    100 steps in the mean, and the mean square falls to 5/9 each time."""
    network, layout = Network(RING, ALONE), Layout([(10, 10)] * 20)
    averaging = algorithms.make("choco", network, layout, compressor=compressor)
    x = torch.tensor([1.0, -1.0]).repeat(4)[:, None].repeat(1, layout.size)
    for _ in range(1000):
        network.run(averaging.step(x))
    assert x.square().mean() < 0.06


@pytest.mark.parametrize("compressor", ["random-k", "sign-and-norm"])
@pytest.mark.parametrize("rule", COMPRESSED)
def test_quasi_global_momentum_does_not_diverge(rule: str, compressor: str) -> None:
    """With the rate of D-PSGD, its momentum of gossip would."""
    case = Case("ring 8", rule, compressor, 30, steps=1000)
    assert default_rates.learn("quasi-global-momentum", case, 0.001) < 1


@pytest.mark.long
@pytest.mark.parametrize(("rule", "compressor"), [("dpsgd", ""), ("choco", "identity")])
def test_quasi_global_momentum_does_not_diverge_on_a_directed_graph(
    rule: str, compressor: str
) -> None:
    """With the rates of an undirected graph, the error is 1e13 and 1e23 after 3000 steps."""
    case = Case("directed ring 8", rule, compressor, 30)
    assert default_rates.learn("quasi-global-momentum", case, 0.001) < 1


@pytest.mark.long
def test_copies_and_momentum_limit_a_rate_together_on_a_directed_graph() -> None:
    """With the smaller of both limits, the error is 1e12 after 3000 steps."""
    assert default_rates.learn("gasloc", Case("directed ring 8", "choco", "qsgd", 30), 0.02) < 1


def test_exact_diffusion_over_copies_needs_an_undirected_graph() -> None:
    """On a directed ring it diverges, also without compression."""
    case = Case("directed ring 8", "choco", "identity", 30, steps=0)
    with pytest.raises(ValueError, match="use an undirected topology with learning=exact-diff"):
        default_rates.learn("exact-diffusion", case, 0.02)


@pytest.mark.parametrize("name", ["gradient-tracking", "beer", "motef"])
def test_tracking_over_copies_on_a_directed_graph_gives_a_warning(name: str) -> None:
    case = Case("directed ring 8", "choco", "qsgd", 30, steps=0)
    default_rates.topology.cache_clear()  # one warning for each
    (text,) = warned(lambda: default_rates.learn(name, case, 0.02))
    assert f"learning={name}" in text
    assert warned(lambda: default_rates.learn(name, replace(case, graph="ring 8"), 0.02)) == []


@pytest.mark.slow
def test_no_default_of_a_learning_rule_diverges() -> None:
    """A seventh of the pairs, graphs and learning rates."""
    for lesson in list(default_rates.lessons())[::7]:
        assert default_rates.learn(*lesson) < 1, lesson


@pytest.mark.parametrize("keep_ratio", [0.02, 0.3])
def test_largest_entries_converge_on_a_dense_graph(keep_ratio: float) -> None:
    full = topologies.make("fully-connected", 8)
    assert consensus(full, 100, 1000, compressor="top-k", keep_ratio=keep_ratio) < 1e-3


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_rounding_to_few_levels_converges(levels: int) -> None:
    for topology in (RING, topologies.make("ring", 8, options={"weights": "constant"})):
        for elements in (10, 300):
            assert consensus(topology, elements, 100, compressor="rounding", levels=levels) < 1e-5


def test_defaults_are_nearly_as_fast_as_the_best_rates() -> None:
    """The best of eight multiples of the default, by hindsight."""
    ratios = []
    for graph in ("ring 8", "star 8", "fully connected 8"):
        for compressor in ("top-k", "random-k", "qsgd", "sign-and-norm"):
            ratios += default_rates.speed(Case(graph, "choco", compressor, 10))
    assert statistics.geometric_mean(ratios) < 2.5


# The rule


def default(compressor: Any, topology: Topology = RING, layout: Layout = LAYOUT) -> Any:
    return algorithms.rates.default_choco_rate(topology, layout, compressor)


def test_the_rule_by_hand() -> None:
    """γ = min(1, min_X s(X)/max_i (1 − w_ii)). A worker of this ring gives 2/3 to its neighbors."""
    assert default(TopK(0.1)) == pytest.approx(0.1 * 3 / 2)
    assert default(TopK(0.01)) == pytest.approx(0.01 * 3 / 2)
    assert default(TopK(0.07)) == pytest.approx(1 / 20 * 3 / 2)  # the vector's K is 1
    assert default(RandomK(0.1)) == pytest.approx(0.1 / 3 * 3 / 2)
    assert default(SignAndNorm()) == pytest.approx(1 / 2)
    assert default(Rounding(1)) == pytest.approx(1 / 5 * 3 / 2)
    assert default(Identity()) == 1
    full = topologies.make("fully-connected", 8)
    assert default(TopK(0.1), full) == pytest.approx(0.1 * 8 / 7)
    assert default(TopK(0.1), topologies.make("chain", 1)) == pytest.approx(0.1)

    class Own(SignAndNorm):
        gossip_rate = 0.7

    assert default(Own()) == 0.7


@pytest.mark.parametrize("graph", default_rates.GRAPHS)
def test_eigenvalues_are_at_most_the_largest_move_from_it(graph: str) -> None:
    """Complex ones, too, of I − W on a directed graph."""
    topology = default_rates.topology(graph)
    move = topology.largest_move
    for r in topology.rounds:
        eigenvalues = np.linalg.eigvals(np.eye(r.n_workers) - r.matrix().toarray())
        assert abs(eigenvalues - move).max() <= move + 1e-12


@pytest.mark.parametrize("keep_ratio", [0.01, 0.3, 0.7])
def test_copies_that_follow_slowly_are_stable_on_a_directed_ring(keep_ratio: float) -> None:
    """x̂ ← x̂ + δ (x − x̂), x ← x − γ λ x̂ at 1 % below the largest rate, not at 1 % above it."""
    directed = topologies.make("unidirectional-ring", 64)
    rate = default(TopK(keep_ratio), directed, Layout([(10, 10)])) / algorithms.rates.DIRECTED
    eigenvalues = np.linalg.eigvals(np.eye(64) - directed.rounds[0].matrix().toarray())
    for factor, decays in ((0.99, True), (1.01, False)):
        radii = []
        for step in factor * rate * eigenvalues[abs(eigenvalues) > 1e-9]:
            d = keep_ratio
            radii += [*abs(np.linalg.eigvals([[1 - step * d, step * (d - 1)], [d, 1 - d]]))]
        assert (max(radii) < 1) == decays


@pytest.mark.parametrize("rule", COMPRESSED)
def test_signs_have_no_default_on_a_directed_graph(rule: str) -> None:
    for graph in ("unidirectional-ring", "exponential", "equi-static"):
        network = Network(topologies.make(graph, 8), ALONE)
        with pytest.raises(ValueError, match=f"compressor=sign-and-norm: use .*topology={graph}"):
            algorithms.make(rule, network, LAYOUT)
        algorithms.make(rule, network, LAYOUT, diffusion_rate=0.001)
        algorithms.make(rule, network, LAYOUT, compressor="qsgd")
        rate = algorithms.default_rate(rule, network.topology, LAYOUT, {"compressor": "qsgd"})
        assert isinstance(rate, float)
    with pytest.raises(ValueError, match=r"^optimizer_compressor=sign-and-norm: use .*exponential"):
        run_of(optimizer=rule, topology="exponential")
    run_of(optimizer=rule, topology="exponential", optimizer_diffusion_rate=0.01)


@pytest.mark.parametrize("rule", ["deepsqueeze", "moniqua"])
def test_errors_of_messages_do_not_move_the_mean(rule: str) -> None:
    """The rounds of `epidemic` would: only their rows sum to 1."""
    network = Network(topologies.make("epidemic", 8), ALONE)
    with pytest.raises(ValueError, match="topology=epidemic: use push-sum"):
        algorithms.make(rule, network, LAYOUT)


def test_deepsqueeze_has_the_same_default_but_at_most_a_tenth() -> None:
    def rate(**options: Any) -> Any:
        return algorithms.default_rate("deepsqueeze", RING, LAYOUT, options)

    assert rate() == 0.1
    assert rate(compressor="top-k") == pytest.approx(0.015)
    assert rate(compressor="top-k", keep_ratio=0.5) == 0.1
    assert rate(compressor="identity") == 1
    assert algorithms.default_rate("moniqua", RING, LAYOUT) == 0.1
    assert algorithms.default_rate("push-sum", RING, LAYOUT) is None
    for compressor, expected in (
        ("sign-and-norm", 0.05),
        ("top-k", 0.0015),
    ):  # with a factor of 0.1
        given = {"compressor": compressor}
        found = algorithms.default_rate("deepsqueeze", RING, LAYOUT, given, 0.1)
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"compressor": "top-k"}])
def test_quasi_global_momentum_has_a_tenth_of_the_default(options: dict[str, str]) -> None:
    by_default = algorithms.default_rate("choco", RING, LAYOUT, options)
    assert isinstance(by_default, float)
    factor = learning.diffusion_factor("quasi-global-momentum", "choco")
    assert algorithms.default_rate("choco", RING, LAYOUT, options, factor) == 0.1 * by_default
    keys = {f"optimizer_{name}": value for name, value in options.items()}
    facts = [run_of(learning=name, **keys).facts() for name in ("dpsgd", "quasi-global-momentum")]
    assert facts[1]["diffusion_rate"] == pytest.approx(0.1 * facts[0]["diffusion_rate"])


def run_of(**values: Any) -> Trainer:
    config = OmegaConf.structured(train.Config)
    config |= {"n_workers": 4, "optimizer": "choco", "num_epochs": 1, **values}
    config["task_architecture"] = "MLP"
    return Trainer(checked(config, ALONE), ALONE)
