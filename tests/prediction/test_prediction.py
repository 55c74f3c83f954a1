"""The cost model: exact counts, its equations on cases computed by hand, the program."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from powergossip import prediction, topologies
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.prediction import (
    METHODS,
    Cluster,
    Compute,
    Phase,
    PredictedMethod,
    Step,
    Traffic,
)
from powergossip.prediction import command_line as program
from powergossip.prediction import traffic as of_traffic
from powergossip.topologies import Round, Topology
from tests.harness.quadratics import Quadratics, rule_of, train

LAYOUT = Layout([(6, 5), (5, 6), (4, 3, 2), (7,)])
GRAPHS = ("ring", "torus", "exponential", "one-peer-exponential", "base-graph", "star")
EVERY = {**METHODS, "DeepSqueeze": PredictedMethod("deepsqueeze"),
         "Moniqua": PredictedMethod("moniqua"),
         "signSGD": PredictedMethod("signsgd"), "DGC": PredictedMethod("dgc"),
         "SparseLoCo": PredictedMethod("sparse-loco"),
         "PowerGossip, 4 bits": PredictedMethod("power-gossip", {"bits": 4})}  # fmt: skip
GOSSIP = METHODS["D-PSGD"]


# --- Counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_bytes_and_messages_are_those_that_the_network_counts(name: str) -> None:
    method = EVERY[name]
    traffic = prediction.count(method, LAYOUT)
    graphs = [topologies.make(graph, 8) for graph in GRAPHS]
    for topology in (graph for graph in graphs if not method.rejects(graph)):
        network = Network(topology)
        step = method.build(network, LAYOUT)
        x = torch.randn(8, LAYOUT.size, generator=torch.Generator().manual_seed(0))
        steps = 2 * topology.period
        for t in range(4 * steps):
            if t == 3 * steps:  # the first messages of few bits are whole
                before = network.bits.copy(), network.messages.copy()
            network.run(step(x))
        bits, messages = network.bits - before[0], network.messages - before[1]
        sent = np.mean([edges.out_degrees for edges in network.edges], axis=0)
        for worker in range(8):
            expected = round(steps * traffic.bits(8, sent[worker]))
            assert abs(bits[worker] - expected) <= steps  # an all-reduce is rounded to bits
            assert messages[worker] == steps * traffic.messages(8, sent[worker])


@pytest.mark.parametrize(("rank", "iterations"), [(1, 2), (8, 1)])
def test_power_gossip_in_few_bits_has_short_messages(rank: int, iterations: int) -> None:
    """8 times shorter than floats with 4 bits, except for the ranges and checksums of blocks."""
    layout, options = Layout([(256, 192)] * 4), {"rank": rank, "num_iterations": iterations}
    of = {
        bits: prediction.count(
            PredictedMethod("power-gossip", {**options, "bits": bits}), layout
        ).bits(8, 2)
        for bits in (4, 32)
    }
    assert 6.5 < of[32] / of[4] < 8


def test_an_all_reduce_in_few_bits_is_a_small_all_reduce() -> None:
    """After its first step. Blocks of 64 elements are divided evenly."""
    method, layout = PredictedMethod("all-reduce", {"bits": 4}), Layout([(48, 32)])
    network = Network(topologies.make("ring", 8))
    step = method.build(network, layout)
    network.run(step(torch.zeros(8, layout.size)))
    first = network.bits[0], network.messages[0]
    network.run(step(torch.ones(8, layout.size)))
    traffic = prediction.count(method, layout)
    (phase,) = traffic.phases
    assert phase == Phase(reduced=layout.size * (4 + 16 / 64) / 8, all_reduces=1)
    assert network.bits[0] - first[0] == traffic.bits(8, 2)
    assert network.messages[0] - first[1] == traffic.messages(8, 2)


def test_cpu_time_of_a_neighbor_is_the_difference_between_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2 and 3 workers, with 1 and 2 neighbors. A noisy measurement makes no time negative."""
    assert sum(prediction.cpu_seconds(GOSSIP, Layout([(300, 300)]), 0.0)) > 0
    for measured, expected in (
        ({2: 5.0, 3: 7.0}, (3.0, 2.0)),
        ({2: 2.0, 3: 7.0}, (0.0, 5.0)),
        ({2: 5.0, 3: 4.0}, (5.0, 0.0)),
    ):
        of_ring = measured.__getitem__
        monkeypatch.setattr(
            of_traffic, "measured_seconds", lambda method, layout, n, _, get=of_ring: get(n)
        )
        assert prediction.cpu_seconds(GOSSIP, LAYOUT) == expected


# --- The model -----------------------------------------------------------------------------------


def seconds(name: str, cluster: Cluster, graph: str = "ring", n: int = 8, **more: bool) -> float:
    traffic = prediction.count(EVERY[name], LAYOUT)
    compute = Compute(1e-4, 2e-5, 1e-5)
    return prediction.step(traffic, topologies.make(graph, n), cluster, compute, **more).seconds


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_time_never_falls_with_latency_and_never_grows_with_rate(
    name: str, overlapping: bool
) -> None:
    by_rate = [
        seconds(name, Cluster(8, rate, 1e-4), overlapping=overlapping)
        for rate in (1e5, 1e6, 1e7, math.inf)
    ]
    assert by_rate == sorted(by_rate, reverse=True)
    assert by_rate[0] > by_rate[-1]
    by_latency = [
        seconds(name, Cluster(8, 1e7, latency), overlapping=overlapping)
        for latency in (0.0, 1e-3, 1e-2)
    ]
    assert by_latency == sorted(by_latency)
    assert by_latency[0] < by_latency[-1]


@pytest.mark.parametrize("name", METHODS)
def test_without_limits_a_step_is_its_computation(name: str) -> None:
    degree = 2
    assert seconds(name, Cluster(8, math.inf)) == pytest.approx(1e-4 + 2e-5 + degree * 1e-5)


def test_all_reduce_does_not_depend_on_the_graph() -> None:
    cluster = Cluster(4, 1e6, 1e-3, per_message=1e-5)
    traffic = prediction.count(METHODS["all-reduce"], LAYOUT)
    times = {
        prediction.step(traffic, topologies.make(graph, 8), cluster, Compute(1e-4)).seconds
        for graph in GRAPHS
    }
    assert max(times) == pytest.approx(min(times))


def test_a_gossip_step_by_hand() -> None:
    """1000 bytes to each of two neighbors at 1 Mbit/s of payload: 16 ms, and a latency."""
    traffic = Traffic((Phase(neighbor=1000, neighbor_messages=1),))
    ring = topologies.make("ring", 8)
    cluster = Cluster(8, 1e6, 5e-3, per_message=1e-3, payload=1.0)
    compute = Compute(gradient=4e-3, averaging=1e-3, per_neighbor=5e-4)
    step = prediction.step(traffic, ring, cluster, compute)
    assert step.seconds == pytest.approx(4e-3 + 1e-3 + 2 * 5e-4 + 2 * 1e-3 + 5e-3 + 16e-3)
    assert step.sent == 2000
    assert step.messages == 2
    overlapping = prediction.step(traffic, ring, cluster, compute, overlapping=True)
    assert overlapping.seconds == pytest.approx(step.seconds - 4e-3)
    # The second phase needs the gradient.
    double, long = Traffic(2 * traffic.phases), Compute(gradient=1.0)
    step = prediction.step(double, ring, cluster, long, overlapping=True)
    assert step.seconds == pytest.approx(1.0 + 2 * 2e-3 + 5e-3 + 16e-3)
    # Two hosts of four workers: of a host's 8 messages, one goes over the link in each direction
    # at both ends of its block.
    two = prediction.step(traffic, ring, Cluster(2, 1e6, payload=1.0), Compute())
    assert two.seconds == pytest.approx(16e-3)
    one = prediction.step(traffic, ring, Cluster(1, 1e6, 1.0, payload=1.0), Compute())
    assert one.seconds == 0
    large = Traffic((Phase(neighbor=100_000, neighbor_messages=1),))  # waits for an answer
    far = Cluster(8, math.inf, 5e-3)
    assert prediction.step(large, ring, far, Compute()).seconds == pytest.approx(15e-3)


@pytest.mark.parametrize(("reverse", "sent"), [(False, 2), (True, 3)])
def test_a_gossip_step_on_a_directed_graph_by_hand(reverse: bool, sent: int) -> None:
    """A worker receives 3 messages, or in reverse sends them, and takes the time for 3."""
    weights = np.zeros((4, 4))  # [receiver, sender]
    weights[[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 1, 2]] = 1 / 4
    made = csr_array(weights.T if reverse else weights)
    graph = Topology("directed", (Round(made),), row_stochastic=True)
    traffic = Traffic((Phase(neighbor=1000, neighbor_messages=1),))
    cluster = Cluster(4, 1e6, per_message=1e-3, payload=1.0)
    step = prediction.step(traffic, graph, cluster, Compute(per_neighbor=5e-4))
    assert step.seconds == pytest.approx(3 * (5e-4 + 1e-3 + 8e-3))
    copying = Cluster(4, 1e6, per_byte=1e-4, payload=1.0)  # slower than the link
    assert prediction.step(traffic, graph, copying, Compute()).seconds == pytest.approx(0.3)
    assert (step.sent, step.messages) == (1000 * sent, sent)


def test_an_all_gather_has_a_phase_for_the_lengths() -> None:
    """1000 bytes to each of 7 others at 1 Mbit/s: 56 ms, with two latencies and 14 messages."""
    traffic = Traffic((Phase(gathered=1004, gathers=1),))
    cluster = Cluster(8, 1e6, 20e-3, per_message=1e-3, payload=1.0)
    step = prediction.step(traffic, topologies.make("ring", 8), cluster, Compute())
    assert step.seconds == pytest.approx(2 * 20e-3 + 14e-3 + 7 * 1004 * 8e-6)
    assert (step.sent, step.messages) == (7 * 1004, 14)


def test_a_round_of_local_steps_by_hand() -> None:
    """Two phases of 16 ms each after 10 gradients of 4 ms, and in flight during them."""
    phase = Phase(neighbor=1000, neighbor_messages=1)
    ring, traffic = topologies.make("ring", 8), Traffic((phase, phase))
    cluster = Cluster(8, 1e6, payload=1.0, per_message=1e-3)
    compute = Compute(gradient=4e-3, averaging=1e-3)
    after = prediction.step(traffic, ring, cluster, compute, interval=10)
    assert after.seconds == pytest.approx((40e-3 + 1e-3 + 4e-3 + 32e-3) / 10)
    assert (after.sent, after.messages) == (400, 0.4)
    during = prediction.step(traffic, ring, cluster, compute, overlapping=True, interval=10)
    assert during.seconds == pytest.approx((40e-3 + 1e-3 + 4e-3) / 10)
    short = prediction.step(traffic, ring, cluster, compute, overlapping=True, interval=5)
    assert short.seconds == pytest.approx((32e-3 + 1e-3 + 4e-3) / 5)


@pytest.mark.parametrize("name", ["power-gossip", "dpsgd"])
def test_bytes_of_a_round_are_those_of_the_learning_rule(name: str) -> None:
    problem = Quadratics(shapes=LAYOUT.shapes, dtype=torch.float32)
    network = Network(topologies.make("ring", 8))
    averaging = name.replace("dpsgd", "plain")
    train(rule_of("diloco", averaging, problem, 0.01, network, local_steps=6), problem, 12)
    traffic = prediction.count(PredictedMethod(name, local_steps=6), LAYOUT)
    ring, cluster = topologies.make("ring", 8), Cluster(8, 1e6)
    step = prediction.step(traffic, ring, cluster, Compute(), interval=6)
    assert 8 * 12 * step.sent == pytest.approx(float(network.bits[0]))
    assert 12 * step.messages == pytest.approx(float(network.messages[0]))


def test_an_all_reduce_by_hand() -> None:
    """Each of 4 workers sends a quarter of 4000 bytes to 3 others, twice."""
    traffic = Traffic((Phase(reduced=4000, all_reduces=1),))
    ring = topologies.make("ring", 4)
    cluster = Cluster(4, 1e6, 5e-3, per_message=1e-3, payload=1.0)
    step = prediction.step(traffic, ring, cluster, Compute())
    assert step.seconds == pytest.approx(2 * (3 * 1e-3 + 5e-3 + 24e-3))
    assert (step.sent, step.messages) == (6000, 6)
    # Two workers on a host: each sends to two workers elsewhere.
    half = prediction.step(traffic, ring, Cluster(2, 1e6, payload=1.0), Compute())
    assert half.seconds == pytest.approx(2 * 32e-3)


def test_rounds_of_gossip() -> None:
    """The number of steps of W after which the slowest vector is a tenth."""
    ring = topologies.make("ring", 16)
    slow = torch.cos(2 * math.pi * torch.arange(16) / 16).double()
    rounds = math.ceil(prediction.rounds(ring))
    W = torch.from_numpy(ring.rounds[0].matrix().toarray())
    norms = [
        float((torch.linalg.matrix_power(W, k) @ slow).norm()) for k in (0, rounds - 1, rounds)
    ]
    assert norms[2] <= norms[0] / 10 < norms[1]
    for graph, exact in (("fully-connected", 1), ("one-peer-exponential", 4), ("base-graph", 4)):
        assert prediction.rounds(topologies.make(graph, 16)) == exact
    assert prediction.rounds(topologies.make("ring", 1)) == 1


def test_models_have_their_parameters() -> None:
    sizes = {"ResNet20": 272_474, "ResNet50": 25_557_032, "LSTM": 28_949_319, "GPT": 164_288}
    sizes["25.6M"] = 25_600_000
    for name, size in sizes.items():
        assert prediction.layout(name).size == size
    assert prediction.layout("7x5,9,2x3x4").shapes == [(7, 5), (9,), (2, 3, 4)]
    for size in (1, 63, 64, 1000, 12_345):
        assert Layout(prediction.of_size(size)).size == size


# --- The program ---------------------------------------------------------------------------------

QUICK = ["--workers", "8", "--model", "30x20,20", "--no-measure", "--compute", "1ms"]


def line(method: str, rounds: float, fidelity: int, took: float) -> program.Line:
    step = Step(seconds=took, compute=0.0, sent=0.0, messages=0.0)
    return program.Line(method, "ring", fidelity, step, rounds)


def test_the_table_has_each_method_on_each_graph(capsys: pytest.CaptureFixture[str]) -> None:
    program.main([*QUICK, "--rate", "1mbit", "--topology", "ring", "--topology", "exponential"])
    text = capsys.readouterr().out
    for method in METHODS:
        undirected = method.startswith("PowerGossip") or method == "CHOCO, sign"
        expected = 2 if METHODS[method].gossips and not undirected else 1
        lines = [row for row in text.splitlines() if row.strip().startswith(f"{method}  ")]
        assert len(lines) == expected, method
    assert "Recommended" in text


def test_fast_networks_need_no_compression_and_slow_ones_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def recommended(rate: str) -> str:
        program.main([*QUICK, "--rate", rate])
        last = [row for row in capsys.readouterr().out.splitlines() if "Recommended" in row]
        return last[0]

    whole = ("all-reduce", "D-PSGD")
    assert any(method in recommended("none").split(",")[0] for method in whole)
    assert not any(method in recommended("10kbit").split(",")[0] for method in whole)


def test_the_recommendation_weighs_speed_and_agreement() -> None:
    slow, near, fast = line("slow", 1, 0, 2.0), line("near", 2, 1, 1.2), line("fast", 9, 2, 1.0)
    assert "near on ring" in program.recommendation([slow, near, fast]).split(",")[0]
    twin = line("twin", 2, 0, 1.25)
    assert "twin on ring" in program.recommendation([slow, near, fast, twin]).split(",")[0]


def test_rank_comes_before_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight messages that wait for each other take longer than one of the whole model. Among equal
    bytes, fewer messages are recommended, also where the others are as fast."""
    iterations, rank = "power-gossip:num_iterations=8", "power-gossip:rank=8,num_iterations=1"
    far, ring, layout = Cluster(8, 1e8, 0.05), topologies.make("ring", 8), Layout([(400, 400)])
    given = [
        PredictedMethod("power-gossip", {"num_iterations": 8}),
        PredictedMethod("dpsgd"),
        PredictedMethod("power-gossip", {"rank": 8, "num_iterations": 1}),
    ]
    steps = [prediction.step(prediction.count(m, layout), ring, far, Compute()) for m in given]
    assert [step.seconds for step in steps] == sorted((s.seconds for s in steps), reverse=True)
    assert steps[0].sent == steps[2].sent
    for order in ([iterations, rank], [rank, iterations]):
        program.main([*QUICK, "--rate", "1mbit", *(f"--method={method}" for method in order)])
        assert f"Recommended: {rank} on " in capsys.readouterr().out
