"""Lost messages of push-sum and RelaySGD."""

import copy
from typing import Any

import pytest
import torch

from powergossip import algorithms, topologies
from powergossip.events import scenario
from powergossip.network import Conversation, Losses, Network, ToAll
from powergossip.parameters import Layout
from tests.harness.exchanging import SHAPES, start
from tests.harness.quadratics import Quadratics, rule_of, train
from tests.harness.training import built, trained

pytestmark = pytest.mark.usefixtures("fresh")


def network_of(
    fraction: float, topology: str = "ring", repeat: bool = False, **more: Any
) -> Network:
    drawn = scenario.read({"loss": {"fraction": fraction, "ends": "one", **more}}, 8, 1)
    made = topologies.make(topology, 8)
    return Network(made, dtype=torch.float64, losses=Losses(drawn.lost, repeat))


@pytest.mark.long
def test_running_sums_repair_losses_and_plain_push_sum_does_not():
    biases = {}
    for running_sums in (False, True):
        x = start(8, torch.float64)
        mean, network = x.mean(0), network_of(0.1, repeat=running_sums)
        averaging = algorithms.make("push-sum", network, Layout(SHAPES), running_sums=running_sums)
        for _ in range(300):
            network.run(averaging.step(x))
        biases[running_sums] = float((x - mean).abs().max())
    assert biases[True] < 1e-9
    assert biases[False] > 1e-2


@pytest.mark.long
def test_relays_without_some_messages_keep_near_the_optimum():
    """The error is that of models which are older than without losses, and does not grow."""
    errors = []
    for fraction in (0.0, 0.1):
        problem = Quadratics()
        rule = rule_of("relay-sgd", "plain", problem, 0.05, network_of(fraction, "chain"))
        train(rule, problem, 400)
        errors.append(problem.error)
    assert errors[0] < 1e-6
    assert 1e-3 < errors[1] < 3


def test_each_of_several_messages_is_repeated_by_itself():
    """Two messages a step, of which the second steps loses both."""
    network = Network(
        topologies.make("chain", 2),
        dtype=torch.float64,
        losses=Losses(lambda source, destination, step: step == 1, repeat=True),
    )
    found = []

    def step(value: float) -> Conversation:
        x = torch.full((2, 1), value, dtype=torch.float64)
        received = yield ToAll(x), ToAll(10 * x)
        received_later = yield ToAll(100 * x)
        found.append([float(of[0, 0, 0]) for of in (*received, received_later)])

    for value in (1.0, 2.0, 3.0):
        network.run(step(value))
    assert found == [[1, 10, 100], [1, 10, 100], [3, 30, 300]]


def test_plain_gossip_keeps_its_own_share_of_the_mean():
    """A lost message is 0, also where a worker could read its neighbor's model."""
    network = Network(topologies.make("ring", 8), losses=Losses(lambda *_: True, repeat=False))
    x = torch.ones(8, 3)
    network.run(algorithms.PlainGossip(network).step(x))
    torch.testing.assert_close(x, torch.full((8, 3), 1 / 3))


def test_losses_resume_with_the_same_bits():
    x = start(8, torch.float32)
    drawn = scenario.read({"loss": {"fraction": 0.3, "ends": "both"}}, 8, 1)

    def build() -> tuple[Network, Any]:
        network = Network(topologies.make("ring", 8), losses=Losses(drawn.lost, repeat=True))
        return network, algorithms.make("push-sum", network, Layout(SHAPES), running_sums=True)

    network, averaging = build()
    for step in range(20):
        if step == 10:
            saved = copy.deepcopy((network.state_dict(), averaging.state_dict(), x))
        network.run(averaging.step(x))
    other, again = build()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for _ in range(10):
        other.run(again.step(saved[2]))
    assert torch.equal(saved[2], x)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        {"optimizer": "push-sum"},
        {"optimizer": "push-sum", "optimizer_running_sums": True},
        {"optimizer": "dpsgd", "learning": "relay-sgd", "topology": "chain"},
    ],
)
def test_training_with_losses(method):
    without, _ = trained(**method)
    lossy, _ = trained(**method, scenario={"loss": {"fraction": 0.1, "ends": "one"}})
    assert not torch.equal(without.parameters.x, lossy.parameters.x)
    assert lossy.parameters.x.isfinite().all()
    with pytest.raises(ValueError, match="scenario="):
        built(**method, scenario={"speeds": {1: 0.5}})


def test_losses_are_rejected_with_compressed_relays():
    """A lost message would leave the copies at both ends different for ever."""
    with pytest.raises(ValueError, match="optimizer=choco: use dpsgd"):
        built(
            optimizer="choco",
            learning="relay-sgd",
            topology="chain",
            scenario={"loss": {"fraction": 0.1, "ends": "one"}},
        )


@pytest.mark.long
@pytest.mark.parametrize("ends", scenario.ENDS)
def test_the_given_fraction_of_messages_is_lost(ends, tmp_path):
    """Of exchanges on a star, and of push-sum on a directed graph."""
    values = {"loss": {"fraction": 0.1, "ends": ends}}
    drawn, lost = scenario.read(values, 6, 0), []
    edges = [edge for j in range(1, 6) for edge in ((0, j), (j, 0))]
    skipped = [drawn.lost(i, j, k) for i, j in edges for k in range(100)]

    def count(source: int, destination: int, step: int) -> bool:
        lost.append(drawn.lost(source, destination, step))
        return lost[-1]

    graph = tmp_path / "graph.edges"
    graph.write_text("0 1\n1 0\n1 2\n2 0\n2 3\n3 0\n")
    directed = topologies.make(str(graph), 4, options={"directed": True})
    network, x = Network(directed, losses=Losses(count)), start(4, torch.float32)
    averaging = algorithms.make("push-sum", network, Layout(SHAPES))
    for _ in range(300):
        network.run(averaging.step(x))
    for found in (skipped, lost):
        assert sum(found) / len(found) == pytest.approx(0.1, abs=0.03)
