"""Push-sum: the laws of column-stochastic averaging, its place in learning, running sums."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from powergossip import algorithms, topologies
from powergossip.algorithms import AVERAGING, DPSGD, Averaging, PushSum
from powergossip.algorithms.learning import Workers
from powergossip.network import Conversation, Network, Processes, processes
from powergossip.optimizers import GossipOptimizer
from powergossip.optimizers.precision import Rounding
from powergossip.parameters import Layout
from powergossip.topologies import Topology
from tests.harness.quadratics import SGD, Quadratics, train
from tests.harness.user_loop import OPTIMIZERS, everywhere, fill, mlp, numbers, run

ALONE = Processes()
N, D = 8, 10
CHORDS = [*((i, (i + 1) % N) for i in range(N)), (0, 4), (3, 7)]  # source, target


@pytest.fixture
def irregular(tmp_path: Path) -> Topology:
    """A directed ring of 8 with two chords, from a file."""
    return from_file(tmp_path, CHORDS)


def from_file(folder: Path, edges: Sequence[tuple[int, int]], n: int = N) -> Topology:
    nx.write_edgelist(nx.DiGraph(edges), folder / "graph.edgelist")
    return topologies.make(str(folder / "graph.edgelist"), n, options={"directed": True})


def matrix(topology: Topology, t: int = 0) -> np.ndarray:
    """P of a round: p_ji = 1/(out-degree of i + 1), [receiver, sender]."""
    edges = (topology.round(t).weights.toarray() > 0) + np.eye(topology.n_workers)
    return np.asarray(edges / edges.sum(0))


def start(n: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, D, generator=generator, dtype=torch.float64)


def alone(topology: Topology, dtype: torch.dtype = torch.float64) -> Network:
    return Network(topology, ALONE, dtype=dtype)


def made(network: Network, **options: Any) -> PushSum:
    averaging = algorithms.make("push-sum", network, Layout([(D,)]), **options)
    assert isinstance(averaging, PushSum)
    return averaging


def weights(averaging: Averaging) -> Tensor:
    """w [worker, 1]"""
    w = averaging.state_dict()["weights"]
    assert isinstance(w, Tensor)
    return w.double()


# Averaging.


@pytest.mark.parametrize("running_sums", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_is_conserved_in_every_step(
    irregular: Topology, dtype: torch.dtype, running_sums: bool
) -> None:
    network, x = alone(irregular, dtype), start().to(dtype)
    averaging, before = made(network, running_sums=running_sums), start().sum(0)
    rounding = 100 * torch.finfo(dtype).eps
    for _ in range(100):
        network.run(averaging.step(x))
        w = weights(averaging)
        assert abs(w.sum().item() - N) < rounding
        assert ((w * x).sum(0) - before).abs().max() < rounding
    assert w.max() - w.min() > 0.5


def test_workers_reach_the_exact_mean_at_the_rate_of_the_second_eigenvalue(
    irregular: Topology,
) -> None:
    """Without the division by w they agree on nothing, and their sums are biased."""
    network, x, P = alone(irregular), start(), matrix(irregular)
    averaging, mean, errors = made(network), start().mean(0), []
    for _ in range(60):
        network.run(averaging.step(x))
        errors.append((x - mean).abs().max().item())
    second = np.sort(np.abs(np.linalg.eigvals(P)))[-2]
    assert (errors[55] / errors[25]) ** (1 / 30) == pytest.approx(second, rel=0.02)
    for _ in range(60):
        network.run(averaging.step(x))
    assert (x - mean).abs().max() < 1e-12
    stationary = np.linalg.matrix_power(P, 1000)[:, 0]
    np.testing.assert_allclose(weights(averaging).flatten(), N * stationary, atol=1e-12)
    ignored = np.linalg.matrix_power(P, 120) @ start().numpy()
    assert np.abs(ignored - mean.numpy()).max() > 0.05


@pytest.mark.parametrize("topology", ["epidemic", "star", "watts-strogatz", "random-matching"])
def test_a_step_is_the_dense_computation(topology: str) -> None:
    """Also where the edges change, and degrees differ."""
    network, x = alone(topologies.make(topology, 7)), start(7)
    averaging, total, w = made(network), start(7), torch.ones(7, 1, dtype=torch.float64)
    for t in range(2 * network.topology.period + 3):
        P = torch.from_numpy(matrix(network.topology, t))
        total, w = P @ total, P @ w
        network.run(averaging.step(x))
        torch.testing.assert_close(x, total / w)
        torch.testing.assert_close(weights(averaging), w)


def test_bits_are_those_of_one_message_with_the_weight(irregular: Topology) -> None:
    for running_sums in (False, True):
        network, x = alone(irregular, torch.float32), start().float()
        averaging = made(network, running_sums=running_sums)
        for _ in range(3):
            network.run(averaging.step(x))
        degrees = [2 if i in (0, 3) else 1 for i in range(N)]
        assert network.bits.tolist() == [3 * 32 * (D + 1) * degree for degree in degrees]
        assert network.messages.tolist() == [3 * degree for degree in degrees]


def test_messages_in_half_precision_conserve_mass() -> None:
    """The rounding of 1/3 to bfloat16 would otherwise make w grow without bound."""
    network, x = alone(topologies.make("ring", N), torch.float32), start().float()
    averaging, rounding, before = made(network), Rounding(torch.bfloat16), start().sum(0)
    for _ in range(200):
        network.run(rounding(averaging.step(x)))
    w = weights(averaging)
    assert w.sum().item() == pytest.approx(N, abs=1e-4)
    torch.testing.assert_close((w * x).sum(0), before, atol=1e-4, rtol=0)


# Learning.


def error_of_training(
    topology: Topology, rate: float, overlapping: bool, ignore_weights: bool = False
) -> float:
    network, problem = alone(topology), Quadratics(N, shapes=((D,),))
    averaging: Any = made(network)
    if ignore_weights:
        averaging = SimpleNamespace(step=averaging.step)
    parameters: Any = problem
    workers = Workers(network, lambda layout: averaging, parameters, SGD(rate).of(problem.x))
    train(DPSGD(workers, overlapping=overlapping), problem, math.ceil(8 / rate))
    return problem.error


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_fixed_point_of_learning_tends_to_the_optimum(
    irregular: Topology, overlapping: bool
) -> None:
    """The distance is proportional to the learning rate. An update without w keeps a bias."""
    large, small = (error_of_training(irregular, rate, overlapping) for rate in (0.04, 0.01))
    assert 0.15 < small / large < 0.35
    large, small = (error_of_training(irregular, rate, overlapping, True) for rate in (0.04, 0.01))
    assert small > 0.5


def test_a_step_of_learning_is_that_of_the_paper(irregular: Topology) -> None:
    """x̂ ← P (x̂ − η g(z)), and z ← x̂/w."""
    network, P = alone(irregular), torch.from_numpy(matrix(irregular))
    averaging, problem = made(network), Quadratics(N, shapes=((D,),))
    parameters: Any = problem
    workers = Workers(network, lambda layout: averaging, parameters, SGD(0.1).of(problem.x))
    rule = DPSGD(workers, overlapping=False)
    w, z = torch.ones(N, 1, dtype=torch.float64), problem.x.clone()
    for _ in range(5):
        total, w = P @ (w * z - 0.1 * problem.a * (z - problem.b)), P @ w
        z = total / w
        train(rule, problem, 1)
        torch.testing.assert_close(problem.x, z)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", ["sgd", "momentum"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_the_optimizer_is_the_dense_computation(name: str, local_steps: int) -> None:
    """On a star, whose workers have unequal weights."""
    make, n = OPTIMIZERS[name], processes().size
    model = mlp()
    optimizer = GossipOptimizer(make(model), "push-sum", topology="star", local_steps=local_steps)
    run(model, optimizer, range(10))
    P = torch.from_numpy(matrix(topologies.make("star", n))).float()
    models, w = [mlp() for _ in range(n)], torch.ones(n, 1)
    optimizers = [make(m) for m in models]
    for t in range(10):
        before = torch.stack([*map(numbers, models)])
        for worker, (m, local) in enumerate(zip(models, optimizers, strict=True)):
            run(m, local, range(t, t + 1), worker)
        z = before + (torch.stack([*map(numbers, models)]) - before) / w
        if (t + 1) % local_steps == 0:
            total, w = P @ (w * z), P @ w
            z = total / w
        for m, of_worker in zip(models, z, strict=True):
            fill(m, of_worker)
    expected = torch.stack([*map(numbers, models)])
    torch.testing.assert_close(everywhere(model), expected, rtol=1e-5, atol=1e-5)
    assert w.max() > 1.2


# Running sums.


class Lossy:
    """Conversations in which worker 1 may lose the messages addressed to it."""

    def __init__(self, network: Network, running_sums: bool):
        self.network, self.running_sums = network, running_sums
        self.last: Any = 0  # that worker 1 received

    def run(self, conversation: Conversation, lost: bool) -> None:
        (received,) = self.network.receive(self.network.post([next(conversation)]))
        if lost:
            received[1] = self.last if self.running_sums else 0
        self.last = received[1].clone()
        with pytest.raises(StopIteration):
            conversation.send(received)
        self.network.round += 1


@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.float32, 2e-6), (torch.float64, 1e-9), (torch.float64, None)]
)
def test_the_next_message_repairs_a_loss(
    irregular: Topology, dtype: torch.dtype, exact: float | None
) -> None:
    """With running sums. exact: None without them."""
    network, x, running_sums = alone(irregular, dtype), start().to(dtype), exact is not None
    averaging, mean = made(network, running_sums=running_sums), start().mean(0)
    lossy = Lossy(network, running_sums)
    for t in range(150):
        lossy.run(averaging.step(x), t in (0, 3, 4, 7))
    error = (x - mean).abs().max()
    if exact is not None:
        assert error < exact
        assert weights(averaging).sum().item() == pytest.approx(N, abs=1e-5)
    else:
        assert error > 0.01
        assert weights(averaging).sum() < N - 0.5


def test_running_sums_are_exact_beyond_their_range(irregular: Topology) -> None:
    """They pass 128 every few steps."""
    network, other = (alone(irregular, torch.float32) for _ in range(2))
    x, expected = 50 + start().float(), 50 + start().float()
    averaging, plain = made(network, running_sums=True), made(other)
    for _ in range(300):
        network.run(averaging.step(x))
        other.run(plain.step(expected))
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=0)
    assert averaging.state_dict()["sums"].dtype == torch.int32


def test_running_sums_reject_what_they_cannot_hold(irregular: Topology) -> None:
    network = alone(irregular, torch.float32)
    averaging = made(network, running_sums=True)
    with pytest.raises(ValueError, match="running_sums"):
        network.run(averaging.step(torch.full((N, D), 300.0)))
    with pytest.raises(ValueError, match=r"running_sums=True: use False.*epidemic"):
        made(alone(topologies.make("epidemic", N)), running_sums=True)


# Directed graphs from files.


def test_a_directed_file_is_read_in_the_direction_of_its_edges(irregular: Topology) -> None:
    assert [j for j, _ in irregular.round(0).targets(0)] == [1, 4]
    assert [j for j, _ in irregular.round(0).sources(4)] == [0, 3]
    assert irregular.row_stochastic
    assert irregular.biased
    np.testing.assert_allclose(irregular.round(0).matrix().toarray().sum(1), 1)


@pytest.mark.parametrize("name", AVERAGING)
def test_other_methods_reject_unequal_degrees(name: str, irregular: Topology) -> None:
    network, layout = alone(irregular), Layout([(3, 3)])
    if name in ("push-sum", "all-reduce"):
        algorithms.make(name, network, layout)
        return
    with pytest.raises(ValueError, match=r"topology=.*: use"):
        algorithms.make(name, network, layout)
    if name != "power-gossip":  # it rejects all directed graphs
        with pytest.raises(ValueError, match="push-sum"):
            algorithms.make(name, network, layout)


def test_equal_degrees_are_for_all_methods(tmp_path: Path) -> None:
    """Each worker has as many sources as targets, but not all have the same number."""
    back = [(4, 0), (7, 3)]
    topology = from_file(tmp_path, [*CHORDS, *back])
    assert not topology.row_stochastic
    np.testing.assert_allclose(topology.round(0).matrix().toarray().sum(0), 1)
    algorithms.make("dpsgd", alone(topology), Layout([(3, 3)]))


def test_bad_directed_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not strongly connected"):
        from_file(tmp_path, [(0, 1), (1, 2)], 3)
    with pytest.raises(ValueError, match=r"topology_options\.directed='yes': use"):
        topologies.make(str(tmp_path / "graph.edgelist"), 3, options={"directed": "yes"})
