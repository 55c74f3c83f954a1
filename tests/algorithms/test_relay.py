"""Laws of RelaySGD on trees."""

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import train as train_py
from powergossip import topologies
from powergossip.algorithms.learning import GossipRule, relay
from powergossip.network import Conversation, Network, Processes, processes
from powergossip.topologies import Tree
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.quadratics import SGD, Quadratics, rule_of, train

TREES = ["chain", "star", "binary-tree", "double-binary-tree"]


def relaying(
    problem: Quadratics, topology: str | Network, local: Any = 0.0, **options: Any
) -> GossipRule:
    return rule_of("relay-sgd", "plain", problem, local, topology, **options)


def trees_of(topology: str, n: int = 8) -> tuple[Tree, ...]:
    found = topologies.make(topology, n).trees
    assert found is not None
    return found


def hops(tree: Tree) -> list[list[int]]:
    """dist(i, j) [worker, worker]"""
    found = dict(nx.all_pairs_shortest_path_length(nx.Graph(tree)))
    return [[found[i][j] for j in range(len(found))] for i in range(len(found))]


def scattered() -> Quadratics:
    """Workers that start at different places."""
    problem = Quadratics()
    problem.x.copy_(torch.randn(problem.x.shape, generator=torch.Generator().manual_seed(0)))
    return problem


@pytest.mark.parametrize("topology", TREES)
def test_models_are_means_of_old_models(topology: str) -> None:
    """x_i = (1/n) Σ_j x_j of dist(i, j) steps ago, of one step ago for i itself, once all models
    have arrived. n_i = 1 + Σ_j n_ji counts those at a distance of t or less."""
    problem, trees = scattered(), trees_of(topology)
    rule, n = relaying(problem, topology), problem.n_workers
    history = [problem.x.clone()]
    for t in range(1, 15):
        train(rule, problem, 1)
        history.append(problem.x.clone())
        for k, (tree, received) in enumerate(
            zip(trees, rule.state_dict()["received"], strict=True)
        ):
            distance, part = hops(tree), slice(k, None, len(trees))
            counts = [sum(hops <= t for hops in of_worker) for of_worker in distance]
            assert (1 + received[:, :, 0].sum(1)).tolist() == counts
            if t < max(map(max, distance)):
                continue
            for i in range(n):
                old = [history[t - max(1, distance[i][j])][j, part] for j in range(n)]
                assert (problem.x[i, part] - torch.stack(old).mean(0)).abs().max() < 1e-14


@pytest.mark.parametrize("averaging", ["plain", "sign"])
def test_a_worker_alone_does_sgd(averaging: str) -> None:
    """Also after its state is restored in another rule."""
    problem, expected = Quadratics(1), Quadratics(1)
    for _ in range(2):
        rule = rule_of("relay-sgd", averaging, problem, 0.1, "chain")
        train(rule, problem, 2)
    rule.load_state_dict(rule.state_dict())
    train(rule, problem, 2)
    train(rule_of("dpsgd", "plain", expected, 0.1, "chain"), expected, 6)
    torch.testing.assert_close(problem.x, expected.x)


@pytest.mark.parametrize("topology", TREES)
def test_any_start_reaches_a_common_model(topology: str) -> None:
    problem = scattered()
    train(relaying(problem, topology), problem, 300)
    assert problem.x.std(0).max() < 1e-10


@pytest.mark.long
@pytest.mark.parametrize(("topology", "momentum"), [*zip(TREES, (0.0, 0.9, 0.9, 0.0), strict=True)])
def test_exact_fixed_points(topology: str, momentum: float) -> None:
    problem = Quadratics()
    train(relaying(problem, topology, SGD(0.02 * (1 - momentum), momentum)), problem, 1500)
    assert problem.error < 1e-9


SLOWDOWNS: list[tuple[Callable[[int], Tree], list[float]]] = [
    (lambda n: trees_of("chain", n)[0], [2.75, 5.375, 10.688]),
    (lambda n: trees_of("binary-tree", n)[0], [2.156, 3.320, 4.783]),
    (lambda n: trees_of("double-binary-tree", n)[1], [2.156, 3.320, 4.783]),
    (lambda n: trees_of("star", n)[0], []),
]


@pytest.mark.parametrize(("tree", "values"), SLOWDOWNS)
def test_slowdown_is_the_mean_distance(tree: Callable[[int], Tree], values: list[float]) -> None:
    """With 1 as the distance of a worker to itself. The values are those of a simulation
    of github.com/epfml/relaysgd."""
    sizes = (8, 16, 32)
    found = [relay.slowdown(tree(n), n) for n in sizes]
    assert found[: len(values)] == pytest.approx(values, abs=6e-4)
    for n, c in zip(sizes, found, strict=True):
        assert c == pytest.approx(sum(max(1, h) for row in hops(tree(n)) for h in row) / n**2)


class Constant:
    """A local optimizer that adds the same to all coordinates in every step."""

    rate = 1.0

    def __init__(self) -> None:
        self.size = 0.0

    def displacement(self, direction: Tensor) -> Tensor:
        return torch.full_like(direction, self.size)


@pytest.mark.long
@pytest.mark.parametrize("topology", TREES)
def test_the_correction_moves_the_mean_by_the_whole_update(topology: str) -> None:
    """Without it, the mean moves by 1/c."""
    c = relay.slowdown(trees_of(topology)[0], 8)
    for correction, expected in [("auto", 1.0), (1, 1 / c), (2.0, 2 / c)]:
        problem, local = Quadratics(), Constant()
        rule = relaying(problem, topology, local, correction=correction)
        for size, steps in [(0.0, 7), (1.0, 1), (0.0, 300)]:
            local.size = size
            train(rule, problem, steps)
        assert (problem.x - expected).abs().max() < 1e-9


def losing(conversation: Conversation, worker: int) -> Conversation:
    """A conversation in which a worker's first messages are lost: they are zeros, of no model."""
    messages = next(conversation)
    while True:
        received = yield messages
        for of_tree in received:
            of_tree[worker, 0] = 0
        try:
            messages = conversation.send(received)
        except StopIteration:
            return


@pytest.mark.parametrize("topology", TREES)
def test_the_own_model_takes_the_place_of_lost_messages(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models never leave the range of the initial ones. Afterwards, all models arrive again."""
    problem = scattered()
    problem.x += 10  # the range is without 0
    low, high = problem.x.min(0).values - 1e-12, problem.x.max(0).values + 1e-12
    rule = relaying(problem, topology)
    for t in range(50):
        with monkeypatch.context() as patch:
            patch.setattr(rule, "mixing", lambda t=t, mix=rule.mixing: losing(mix(), t % 8))
            train(rule, problem, 1)
        assert (problem.x >= low).all()
        assert (problem.x <= high).all()
    train(rule, problem, 7)
    for received in rule.state_dict()["received"]:
        assert (1 + received[:, :, 0].sum(1) == 8).all()


@pytest.mark.parametrize("topology", TREES)
def test_messages_have_the_coordinates_of_their_tree_and_a_count(topology: str) -> None:
    problem = Quadratics(dtype=torch.float32)
    network = Network(topologies.make(topology, 8))
    train(relaying(problem, network), problem, 2)
    trees = trees_of(topology)
    degrees = [sum(nx.Graph(tree).degree[i] for tree in trees) for i in range(8)]
    elements = 30 // len(trees) + 1
    assert network.bits.tolist() == [2 * 32 * elements * degree for degree in degrees]
    assert network.messages.tolist() == [2 * degree for degree in degrees]


@pytest.mark.parametrize("local_optimizer", ["sgd", "adamw"])
def test_a_run_with_a_correction(local_optimizer: str) -> None:
    """The first step moves models in proportion to it. The run has no diffusion rate."""
    moved = []
    for correction in (1, 2):
        config = OmegaConf.structured(train_py.Config)
        config.merge_with(
            {
                "n_workers": 4,
                "optimizer": "dpsgd",
                "topology": "binary-tree",
                "learning": "relay-sgd",
                "learning_options": {"correction": correction},
                "local_optimizer": local_optimizer,
            }
        )
        found = checked(config, Processes())
        assert "diffusion_rate" not in found.options
        run = Trainer(found, Processes())
        before = run.parameters.x.clone()
        run.execution.train_step(0, 0)
        moved.append(run.parameters.x - before)
    assert moved[0].norm() > 1e-3
    assert torch.allclose(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-6)


# Compressed messages.

COMPRESSORS = ["sign", "top-k"]


def test_identity_has_the_models_of_uncompressed_messages() -> None:
    """Up to single precision, in which messages are."""
    runs = []
    for averaging in ("plain", "identity"):
        problem = scattered()
        train(rule_of("relay-sgd", averaging, problem, 0.02, "binary-tree"), problem, 30)
        runs.append(problem.x)
    assert (runs[0] - runs[1]).abs().max() < 1e-5
    assert not torch.equal(*runs)


@pytest.mark.long
@pytest.mark.parametrize(("compressor", "momentum"), [("sign", 0.9), ("top-k", 0.0)])
def test_compressed_messages_have_exact_fixed_points(compressor: str, momentum: float) -> None:
    problem = Quadratics()
    sgd = SGD(0.02 * (1 - momentum), momentum)
    train(rule_of("relay-sgd", compressor, problem, sgd, "binary-tree"), problem, 2500)
    assert problem.error < 1e-9


def test_the_first_message_is_uncompressed_and_the_others_are_not() -> None:
    problem = Quadratics(dtype=torch.float32)
    network = Network(topologies.make("chain", 8))
    rule = rule_of("relay-sgd", "sign", problem, 0.02, network)
    train(rule, problem, 1)
    assert network.bits.tolist() == [32 * 31 * degree for degree in [1, 2, 2, 2, 2, 2, 2, 1]]
    train(rule, problem, 2)
    compressed = 32 + 8 * 4 + 32  # count, 30 signs in bytes, norm
    expected = [(32 * 31 + 2 * compressed) * degree for degree in [1, 2, 2, 2, 2, 2, 2, 1]]
    assert network.bits.tolist() == expected


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_compressed_relaying_resumes_with_the_same_bits(compressor: str) -> None:
    """Both ends of an edge have the same copies."""
    whole, first, second = scattered(), scattered(), scattered()
    train(rule_of("relay-sgd", compressor, whole, 0.02, "chain"), whole, 13)
    rule = rule_of("relay-sgd", compressor, first, 0.02, "chain")
    train(rule, first, 9)
    state = rule.state_dict()
    sent, received = state["sent_copies"], state["received_copies"]
    for i in range(1, 8):  # slot 0 is the lower neighbor, or the only one
        to_the_right = sent[i - 1, 0 if i == 1 else 1]
        assert torch.equal(received[i, 0], to_the_right)
        assert torch.equal(received[i - 1, 0 if i == 1 else 1], sent[i, 0])
    assert state["received"][0][3, :, 0].tolist() == [3, 4]
    again = rule_of("relay-sgd", compressor, second, 0.02, "chain")
    train(again, second, 2)  # forgotten by loading
    second.x.copy_(first.x)
    again.load_state_dict(state)
    train(again, second, 4)
    assert torch.equal(second.x, whole.x)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_two_processes_with_a_worker_each_relay_compressed_messages(compressor: str) -> None:
    """Their only message has any stride. Two workers of one process have the same models."""
    who = processes()
    alone = Quadratics(2, hosted=range(who.rank, who.rank + 1))
    together = Quadratics(2)
    for problem, of in ((alone, who), (together, Processes())):
        network = Network(topologies.make("chain", 2), of, dtype=problem.x.dtype)
        train(rule_of("relay-sgd", compressor, problem, 0.02, network), problem, 10)
    assert torch.equal(alone.x[0], together.x[who.rank])
