"""The laws of averaging algorithms, for every one in the registry."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powergossip import algorithms, compressors, kernels, randomness, topologies
from powergossip.algorithms import (
    AVERAGING,
    CONSENSUS_ONLY,
    Averaging,
    PlainGossip,
)
from powergossip.algorithms.averaging import Incremental
from powergossip.compressors import COMPRESSORS
from powergossip.network import Network, processes
from powergossip.parameters import Layout
from tests.harness.averaging import (
    ALONE,
    COMPRESSED,
    EVERY,
    SHAPES,
    UNDIRECTED,
    Case,
    alone,
    label,
    start,
    steps,
    variance,
)
from tests.harness.helpers import with_one_each

TIME_VARYING = ["one-peer-exponential", "base-graph", "random-matching", "round-robin"]
UNDIRECTED_ONLY = {"power-gossip", *CONSENSUS_ONLY}


def test_every_name_is_among_the_cases() -> None:
    assert {name for name, _ in EVERY} == {*AVERAGING, *CONSENSUS_ONLY}
    for name in ("choco", "deepsqueeze"):
        assert {o["compressor"] for n, o in COMPRESSED if n == name} == set(COMPRESSORS)


# --- Every algorithm ------------------------------------------------------------------------------


def every_algorithm_and(*names: str, values: list[Any]) -> pytest.MarkDecorator:
    """An algorithm of each name with all values, and with other options one of them."""
    pairs = with_one_each(EVERY, values, lambda case: case[0])
    cases = [(*case, *(value if len(names) > 1 else (value,))) for case, value in pairs]
    return pytest.mark.parametrize(("name", "options", *names), cases, ids=label)


@every_algorithm_and(
    "topology",
    "n",
    values=[
        ("ring", 1),
        *(("chain", 2), ("torus", 2)),
        *(("ring", 3), ("star", 3)),
        *(("star", 8), ("torus", 8), ("tail", 8), ("directed", 8)),
    ],
)
def test_the_mean_is_kept_and_the_workers_approach_it(
    name: str, options: dict[str, Any], topology: str, n: int
) -> None:
    if topology == "directed" and name in UNDIRECTED_ONLY:
        with pytest.raises(ValueError, match="topology"):
            algorithms.make(name, alone(topology, n), Layout(SHAPES), **options)
        return
    layout, network = Layout(SHAPES), alone(topology, n)
    x = start(n, layout)
    before = x.clone()
    averaging = algorithms.make(name, network, layout, **options)
    steps(network, averaging, x, 60)
    weights = averaging.state_dict().get("weights", torch.ones(n, 1))  # of push-sum
    torch.testing.assert_close((weights * x).mean(0), before.mean(0), atol=2e-5, rtol=0)
    assert variance(x) <= 0.5 * variance(before) + 1e-12


@pytest.mark.parametrize(
    ("name", "options"),
    # Independent noise makes the messages of workers that agree differ.
    [case for case in EVERY if case[1].get("compressor") not in ("random-k", "qsgd")],
    ids=label,
)
def test_agreement_is_a_fixed_point(name: str, options: dict[str, Any]) -> None:
    layout, network = Layout(SHAPES), alone("tail", 6)
    x = start(1, layout).repeat(6, 1)
    before = x.clone()
    steps(network, algorithms.make(name, network, layout, **options), x, 3)
    torch.testing.assert_close(x, before, atol=5e-6, rtol=0)


@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_an_increment_is_what_a_step_adds_and_leaves_x_as_it_is(
    name: str, options: dict[str, Any]
) -> None:
    layout, network = Layout(SHAPES), alone("tail", 6)
    first, second = (algorithms.make(name, network, layout, **options) for _ in range(2))
    if not isinstance(second, Incremental):
        return
    x = start(6, layout)
    steps(network, first, x, 2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    before, increment = x.clone(), torch.full_like(x, torch.nan)
    network.run(second.increment(x, increment))
    assert torch.equal(x, before)
    steps(network, first, x, 1)
    torch.testing.assert_close(before + increment, x, atol=1e-5, rtol=0)


@every_algorithm_and("compiled", values=[True, False])
def test_a_restored_state_continues_bit_for_bit(
    name: str, options: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new algorithm, and in one that has made steps with another x. A state is a copy."""
    if not compiled:
        monkeypatch.setattr(kernels, "load", lambda network: None)
    layout, network = Layout(SHAPES), alone("tail", 6)
    x, other = start(6, layout), start(6, layout, seed=1)
    first = algorithms.make(name, network, layout, **options)
    steps(network, first, x, 3)
    state, saved = first.state_dict(), x.clone()
    steps(network, first, x, 4)
    for count in (0, 2):
        second = algorithms.make(name, network, layout, **options)
        steps(network, second, other, count)
        second.load_state_dict(state)
        assert torch.equal(steps(network, second, other.copy_(saved), 4), x)


@pytest.mark.parallel([2, 4, 8])
@pytest.mark.parametrize("topology", ["ring", "star", "random-matching"])
def test_the_layout_of_processes_does_not_change_the_results(topology: str) -> None:
    """Eight workers in 2, 4 and 8 processes and in one: equal bits and messages, x to 1e-5.

    Where a worker has many neighbors, power iteration at rank 2 multiplies rounding errors by about
    1.6 a step: hence few steps, but enough for messages of all workers to arrive everywhere.
    """
    layout, who, count = Layout(SHAPES), processes(), 10
    of_pairs: list[Case] = [("power-gossip", {"num_iterations": 2}), ("dpsgd", {})]
    for name, options in of_pairs if topology == "random-matching" else EVERY:
        apart, of_one = Network(topologies.make(topology, 8)), None
        x = start(8, layout)[apart.workers.start : apart.workers.stop].clone()
        steps(apart, algorithms.make(name, apart, layout, **options), x, count)
        if who.rank == 0:
            together, expected = alone(topology, 8), start(8, layout)
            steps(together, algorithms.make(name, together, layout, **options), expected, count)
            of_one = expected, together.bits.tolist(), together.messages.tolist()
        of_one = who.broadcast(of_one)
        assert of_one is not None
        expected, bits, messages = of_one
        assert apart.gather(torch.tensor(apart.bits)).tolist() == bits
        assert apart.gather(torch.tensor(apart.messages)).tolist() == messages
        difference = (apart.gather(x) - expected).abs() / (1 + expected.abs())
        assert difference.max() < 1e-5, (name, options)


@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_copies_are_runs_of_their_own(name: str, options: dict[str, Any]) -> None:
    """Three settings at once, each with its diffusion rate, are three runs one after the other."""
    layout, factors = Layout(SHAPES), (1.0, 0.5, 0.1)
    topology = topologies.make("chain", 4)
    network = Network(topology, ALONE, copies=3)
    rates = torch.tensor([f * float(options.get("diffusion_rate", 1.0)) for f in factors])
    known = "diffusion_rate" in algorithms.defaults(name)

    def with_rate(rate: Any) -> dict[str, Any]:
        return {**options, "diffusion_rate": rate} if known else options

    all_options = with_rate(rates.repeat_interleave(4))
    x = torch.cat([start(4, layout, copy_index) for copy_index in range(3)])
    steps(network, algorithms.make(name, network, layout, **all_options), x, 10)
    for copy_index, rate in enumerate(rates.tolist()):
        single = Network(topology, ALONE)
        expected = start(4, layout, copy_index)
        steps(single, algorithms.make(name, single, layout, **with_rate(rate)), expected, 10)
        rows = slice(4 * copy_index, 4 * copy_index + 4)
        torch.testing.assert_close(x[rows], expected, atol=1e-5, rtol=1e-5)
        assert network.bits[rows].tolist() == single.bits.tolist()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *(
            (name, {"diffusion_rate": rate}, "diffusion_rate")
            for name in sorted(set(AVERAGING) - {"all-reduce", "push-sum"})
            for rate in (0.0, float("nan"))
        ),
        *(("all-reduce", {"bits": bits}, "2 to 8, or 32") for bits in (1, 9, 33)),
        *(("sparta", {"keep_ratio": ratio}, "keep_ratio") for ratio in (0.0, 1.1)),
        *(("moniqua", {"theta": theta}, "theta=") for theta in (0.0, float("nan"))),
        ("sgd", {}, r'algorithm.*"sgd"'),
    ],
)
def test_bad_options_are_rejected(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithms.make(name, alone("ring", 3), Layout([(3, 3)]), **options)


# --- Plain gossip and all-reduce ------------------------------------------------------------------


@pytest.mark.parametrize(
    "topology",
    [*UNDIRECTED, "unidirectional-ring", "exponential", *TIME_VARYING, "epidemic"],
)
def test_plain_gossip_is_multiplication_by_the_mixing_matrix(topology: str) -> None:
    """That of each round."""
    for rate in (1.0, 0.3):
        network, x = (
            alone(topology, 7 if topology in TIME_VARYING else 8),
            start(8, Layout([(50,)])),
        )
        averaging, x = PlainGossip(network, rate), x[: network.n_workers]
        expected = x.double()
        for t in range(2 * network.topology.period):
            W = torch.from_numpy(network.topology.round(t).matrix().toarray())
            expected += rate * (W @ expected - expected)
            steps(network, averaging, x, 1)
            torch.testing.assert_close(x, expected.float(), atol=1e-5, rtol=1e-5)


class Copying(Network):
    """Every worker receives copies of its neighbors' messages."""

    shares = False


def mixed(network: Network, size: int) -> tuple[Tensor, Tensor]:
    """x and the last increment, after 3 steps of plain gossip."""
    gossip, generator = PlainGossip(network, 0.7), torch.Generator().manual_seed(0)
    x = torch.randn(network.rows, size, dtype=network.dtype, generator=generator)
    increment = torch.empty_like(x)
    for _ in range(3):
        network.run(gossip.increment(x, increment))
        network.run(gossip.step(x))
    return x, increment


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "torch"])


@BOTH
@pytest.mark.parametrize(
    ("topology", "size"),
    [
        *(("fully-connected", 1), ("fully-connected", 24_577), ("ring", 24_577)),
        *(("star", 47), ("one-peer-exponential", 47)),
    ],
)
def test_the_bits_are_those_of_copied_messages(
    dtype: torch.dtype, topology: str, size: int
) -> None:
    shared, copied = (
        mixed(kind(topologies.make(topology, 8), ALONE, copies=2, dtype=dtype), size)
        for kind in (Network, Copying)
    )
    torch.testing.assert_close(shared, copied, rtol=0, atol=0)
    assert (shared[1] != 0).any(0).all()  # no element is left out


@pytest.mark.long
@BOTH
def test_messages_within_a_process_take_no_memory(dtype: torch.dtype) -> None:
    network = Network(topologies.make("fully-connected", 8), ALONE, dtype=dtype)
    with torch.profiler.profile(profile_memory=True) as profiler:
        x, increment = mixed(network, 100_000)
    events = profiler.profiler.kineto_results.events()
    allocated = np.cumsum([e.nbytes() for e in events if e.name() == "[memory]"]).max()
    assert allocated < 2 * (x.nbytes + increment.nbytes)  # of these themselves, and blocks


@pytest.mark.parametrize("ratio", [1e-6, 0.29, 1.0])
def test_sparta_is_plain_gossip_of_as_many_random_elements(ratio: float) -> None:
    """Others in each step, the same in all workers. On the complete graph, their exact mean. Of 100
    elements 29, though 0.29 · 100 = 28.999999999999996 in floats."""
    layout, network = Layout([(10, 10)]), alone("fully-connected", 5)
    kept, before = {1e-6: 1, 0.29: 29, 1.0: 100}[ratio], start(5, layout)
    averaging = algorithms.make("sparta", network, layout, keep_ratio=ratio, seed=1)
    seen = set()
    for _ in range(3):
        x = steps(network, averaging, before.clone(), 1)
        moved = (x != before).all(0)
        assert torch.equal(x[:, ~moved], before[:, ~moved])
        means = before.mean(0).expand(5, -1)
        torch.testing.assert_close(x[:, moved], means[:, moved], rtol=0, atol=1e-6)
        assert moved.sum() == kept
        seen.add(tuple(moved.tolist()))
    assert len(seen) == (1 if kept == layout.size else 3)
    assert network.bits.tolist() == [3 * 32 * kept * 4] * 5


# --- The limits, and compressed messages to all --------------------------------------------------


@pytest.mark.parametrize("name", topologies.UNDIRECTED)
def test_finite_time_gossip_does_not_go_away_from_the_mean(name: str) -> None:
    """On the way to exactness, also on long and irregular graphs."""
    n, layout = 32, Layout([(10, 10)])
    network, x = alone(name, n), start(n, layout)
    averaging = algorithms.make("finite-time", network, layout)
    errors = [variance(x)]
    for _ in network.topology.distinct_eigenvalues:
        steps(network, averaging, x, 1)
        errors.append(variance(x))
    assert max(errors) < 1.1 * errors[0]
    assert errors[-1] < 1e-6 * errors[0]


@pytest.mark.parametrize(
    ("name", "topology"),
    [("choco", "star"), ("choco", "exponential"), ("deepsqueeze", "base-graph")],
)
def test_the_identity_is_plain_gossip(name: str, topology: str) -> None:
    layout, network, other = Layout(SHAPES), alone(topology, 6), alone(topology, 6)
    x = start(6, layout)
    plain = x.clone()
    options = dict(compressor="identity", diffusion_rate=0.9)
    averaging = algorithms.make(name, network, layout, **options)
    for _ in range(10):
        steps(network, averaging, x, 1)
        steps(other, PlainGossip(other, 0.9), plain, 1)
        torch.testing.assert_close(x, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "options"), COMPRESSED, ids=label)
def test_bits_are_those_of_the_compressor(name: str, options: dict[str, Any]) -> None:
    """32 K + positions, N + 32, ...: per tensor and neighbor; the formulas are the compressors'."""
    layout, network = Layout(SHAPES), alone("star", 5)
    steps(network, algorithms.make(name, network, layout, **options), start(5, layout), 3)
    if name == "moniqua":
        size = -(-2 * layout.size // 8)
    else:
        own = {k: v for k, v in options.items() if k not in ("compressor", "diffusion_rate")}
        compressor = compressors.make(options["compressor"], **own)
        size = compressors.Codec(layout, compressor, [0]).size
    assert network.bits.tolist() == [3 * 8 * size * degree for degree in (4, 1, 1, 1, 1)]


def test_choco_is_the_papers_algorithm() -> None:
    """Dense: with top-k, W, and every worker's x̂ in one matrix."""
    n, layout = 6, Layout([(5, 4)])
    network = alone("ring", n)
    W = torch.from_numpy(network.topology.round(0).matrix().toarray()).float()
    options = dict(compressor="top-k", keep_ratio=0.25, diffusion_rate=0.4)
    x = start(n, layout)
    expected, public = x.clone(), torch.zeros_like(x)
    averaging = algorithms.make("choco", network, layout, **options)
    for _ in range(6):
        q = torch.zeros_like(expected)
        kept = (expected - public).abs().topk(5, dim=1).indices
        q.scatter_(1, kept, (expected - public).gather(1, kept))
        public += q
        expected += 0.4 * (W - torch.eye(n)) @ public
        steps(network, averaging, x, 1)
    torch.testing.assert_close(x, expected)


def test_deepsqueeze_keeps_the_compression_error() -> None:
    """Σ_t c_t + δ = Σ_t x_t: nothing is lost."""
    layout, network = Layout(SHAPES), alone("ring", 4)
    x = start(4, layout)
    options = dict(compressor="sign-and-norm", diffusion_rate=0.05)
    averaging = algorithms.make("deepsqueeze", network, layout, **options)
    v_before, W = torch.zeros_like(x), network.topology.round(0).matrix().toarray()
    L = torch.from_numpy(np.eye(4) - W).float()
    for _ in range(5):
        before = x.clone()
        steps(network, averaging, x, 1)
        error = averaging.state_dict()["error"]
        c = before + v_before - error  # what was sent, if nothing is lost
        torch.testing.assert_close(x, before - 0.05 * L @ c, atol=1e-5, rtol=1e-5)
        v_before = error


@pytest.mark.parametrize("topology", ["ring", "star", "one-peer-exponential"])
def test_moniqua_is_the_papers_algorithm(topology: str) -> None:
    """Dense, in double precision, also where neighbors differ by more than θ."""
    n, theta, gamma, delta, layout = 7, 1.5, 0.3, 1 / 3, Layout([(9, 5), (3,)])
    network = alone(topology, n)
    x = start(n, layout) * 2
    bound = 2 * theta / (1 - 2 * delta)
    options = dict(theta=theta, diffusion_rate=gamma, seed=3)
    averaging = algorithms.make("moniqua", network, layout, **options)

    def mod(value: Tensor, a: float) -> Tensor:
        return value - a * torch.floor(value / a + 0.5)

    for t in range(5):
        before = x.double()
        W = torch.from_numpy(network.topology.round(t).matrix().toarray())
        u = randomness.uniform(randomness.keys(3, "moniqua", [()])[0], t, layout.size).double()
        q = torch.floor((mod(before / bound, 1) + 0.5) / delta + u) * delta - 0.5
        own = q * bound - mod(before, bound)
        theirs = mod(q[None, :] * bound - before[:, None], bound)  # [i, j, D]
        expected = before + gamma * (W[:, :, None] * (theirs - own[:, None])).sum(1)
        diagonal = torch.arange(n)
        expected -= gamma * W[diagonal, diagonal, None] * (theirs[diagonal, diagonal] - own)
        steps(network, averaging, x, 1)
        torch.testing.assert_close(x, expected.float(), atol=2e-5, rtol=1e-5)


# --- Time-varying topologies ---------------------------------------------------------------------


@pytest.mark.parametrize("topology", TIME_VARYING)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("power-gossip", dict(num_iterations=2)),
        ("deepsqueeze", dict(diffusion_rate=0.1)),
        ("moniqua", dict(theta=6.0, diffusion_rate=0.1)),
        ("choco", {}),
    ],
    ids=label,
)
def test_algorithms_on_time_varying_topologies_average(
    topology: str, name: str, options: dict[str, Any]
) -> None:
    layout, network = Layout(SHAPES), alone(topology, 8)
    if name == "choco" or (name == "power-gossip" and not network.symmetric):
        with pytest.raises(ValueError, match=f"topology={topology}: use"):
            algorithms.make(name, network, layout, **options)
        return
    x = start(8, layout)
    before = x.clone()
    averaging = algorithms.make(name, network, layout, **options)
    last = variance(x)
    for _ in range(12 * network.topology.period):
        steps(network, averaging, x, 1)
        if name == "power-gossip":
            assert variance(x) <= last * (1 + 1e-5) + 1e-9
            last = variance(x)
    torch.testing.assert_close(x.mean(0), before.mean(0), atol=2e-5, rtol=0)
    assert variance(x) <= 0.5 * variance(before)


@pytest.mark.parametrize("make", [lambda n: PlainGossip(n), lambda n: algorithms.ExactMean(n)])
def test_stateless_algorithms_reject_a_state(make: Callable[[Network], Averaging]) -> None:
    averaging = make(alone("ring", 3))
    assert averaging.state_dict() == {}
    with pytest.raises(ValueError, match=r"PlainGossip|ExactMean"):
        averaging.load_state_dict({"directions": 1})
