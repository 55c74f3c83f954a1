"""Laws of PowerGossip."""

import re
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powergossip import algorithms, kernels, randomness, topologies
from powergossip.algorithms import PlainGossip, PowerGossip
from powergossip.algorithms.directions import EdgeConstants, matrix_sides
from powergossip.network import Conversation, Network
from powergossip.optimizers.precision import Rounding
from powergossip.parameters import Layout
from tests.harness.averaging import (
    ALONE,
    POWER_GOSSIP,
    SHAPES,
    UNDIRECTED,
    alone,
    start,
    steps,
    variance,
)
from tests.harness.launch import ROOT


def power_gossip(network: Network, layout: Layout, **options: Any) -> PowerGossip:
    given = {"num_iterations": 1, **options}
    return PowerGossip(network, layout, **given)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
@pytest.mark.parametrize("topology", UNDIRECTED)
def test_full_rank_is_plain_gossip(shape: tuple[int, int], topology: str) -> None:
    network, layout = alone(topology, 8), Layout([shape, shape])
    x = start(8, layout)
    plain = x.clone()
    for _ in range(3):
        steps(network, power_gossip(network, layout, rank=min(shape), diffusion_rate=0.9), x, 1)
        steps(network, PlainGossip(network, 0.9), plain, 1)
    torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-6)


def test_nearly_full_rank_finds_a_difference_of_lower_rank_at_once() -> None:
    """Rank 3 of a 4 × 6 difference of rank 2: after the first iteration d spans its rows."""
    network, layout = alone("ring", 2), Layout([(4, 6)])
    x = start(1, layout).repeat(2, 1)
    x[1] += (torch.randn(4, 2) @ torch.randn(2, 6)).flatten()
    mean = x.mean(0)
    averaging = power_gossip(network, layout, rank=3, num_iterations=2)
    steps(network, averaging, x, 1)
    torch.testing.assert_close(x, mean.expand(2, -1), atol=1e-4, rtol=0)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_variance_never_grows(data: st.DataObject) -> None:
    """Lemma 1 (arXiv:2008.01425) at γ = 1 on any connected graph, whatever the directions."""
    n = data.draw(st.integers(2, 9))
    seed = data.draw(st.integers(0, 2**16))
    tree = nx.from_prufer_sequence(
        data.draw(st.lists(st.integers(0, n - 1), min_size=n - 2, max_size=n - 2))
    )
    for i, j in data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))):
        if i != j:
            tree.add_edge(i, j)
    network = Network(topologies.undirected("random", tree), ALONE)
    layout = Layout([(5, 4), (3, 6)])
    averaging = power_gossip(
        network,
        layout,
        rank=data.draw(st.integers(1, 2)),
        num_iterations=data.draw(st.integers(1, 2)),
        warm_start=data.draw(st.booleans()),
    )
    scales = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 1e4]), min_size=n, max_size=n))
    x = start(n, layout, seed) * torch.tensor(scales)[:, None]
    initial = last = variance(x)
    for _ in range(8):
        steps(network, averaging, x, 1)
        assert variance(x) <= last * (1 + 1e-5) + 1e-11 * initial
        last = variance(x)


@pytest.mark.parametrize("rate", [1.0, 1.308, 1.499])
@pytest.mark.parametrize("rank", [1, 2])
def test_the_variance_never_grows_on_a_ring_up_to_the_bound(rate: float, rank: int) -> None:
    """2/λ_max = 1.5 on a ring of 8. The adversary: all differences in λ_max's eigenvector."""
    network, layout = alone("ring", 8), Layout([(6, 5)])
    signs = torch.tensor([1.0, -1.0] * 4)[:, None]
    x = signs * start(1, layout) + 0.01 * start(8, layout, seed=1)
    averaging = power_gossip(network, layout, rank=rank, diffusion_rate=rate)
    last = variance(x)
    for _ in range(50):
        steps(network, averaging, x, 1)
        assert variance(x) <= last * (1 + 1e-5) + 1e-9
        last = variance(x)


def test_beyond_the_bound_the_variance_can_grow() -> None:
    """The bound is tight: this adversary at γ = 1.6 > 1.5, at full rank."""
    network, layout = alone("ring", 8), Layout([(2, 2)])
    x = torch.tensor([1.0, -1.0] * 4)[:, None] * start(1, layout)
    before = variance(x)
    steps(network, power_gossip(network, layout, rank=2, diffusion_rate=1.6), x, 1)
    assert variance(x) > 1.1 * before


def test_warm_directions_become_the_top_singular_vectors() -> None:
    """With γ → 0 the difference stays, and p converges to its singular vectors."""
    network, layout = alone("ring", 2), Layout([(8, 6)])
    U, _ = torch.linalg.qr(torch.randn(8, 6))
    V, _ = torch.linalg.qr(torch.randn(6, 6))
    difference = U @ torch.diag(torch.tensor([9.0, 7.0, 1.0, 0.5, 0.2, 0.1])) @ V.T
    x = start(1, layout).repeat(2, 1)
    x[1] += difference.flatten()
    averaging = power_gossip(network, layout, rank=2, diffusion_rate=1e-9, num_iterations=10)
    steps(network, averaging, x, 2)
    p = averaging.state_dict()["matrices"]["directions"][0][0, 0].view(
        2, 8
    )  # iteration 20: the rows' side
    p, _ = torch.linalg.qr(p.T)
    torch.testing.assert_close(p @ p.T, U[:, :2] @ U[:, :2].T, atol=1e-4, rtol=0)


def test_both_ends_hold_the_same_directions() -> None:
    network, layout = alone("torus", 8), Layout(SHAPES)
    for rank in (1, 2):
        averaging = power_gossip(network, layout, rank=rank)
        steps(network, averaging, start(8, layout), 3)
        (d,) = averaging.state_dict()["matrices"]["directions"]
        for i in range(8):
            for slot, j in enumerate(network.neighbors[i].tolist()):
                back = network.neighbors[j].tolist().index(i)
                assert torch.equal(d[i, slot], -d[j, back])  # each end's own sign
                assert d[i, slot].abs().max() > 0


def test_collapsed_directions_are_resampled_at_both_ends() -> None:
    """Neighbors that agree, and then disagree, find each other again."""
    network, layout = alone("ring", 3), Layout([(5, 4), (5, 4), (3, 7)])
    for options in POWER_GOSSIP:
        if options.get("rank", 1) > 2:
            continue
        x = start(1, layout).repeat(3, 1)
        averaging = algorithms.make("power-gossip", network, layout, **options)
        steps(network, averaging, x, 4)
        # Only one of the matrices starts to differ: the other directions stay collapsed.
        x[:, : 5 * 4] += start(3, Layout([(5, 4)]))
        before, mean = variance(x), x.mean(0)
        steps(network, averaging, x, 80)
        assert variance(x) < 0.2 * before
        torch.testing.assert_close(x.mean(0), mean, atol=1e-5, rtol=0)


def test_rounding_errors_are_no_direction() -> None:
    """Differences in the last bit, as products in different slots have them, count as agreement."""
    network, layout = alone("ring", 3), Layout([(16, 9)])
    x = start(1, layout).repeat(3, 1)
    x *= 1 + 1e-7 * torch.randint(-1, 2, x.shape)
    averaging = power_gossip(network, layout)
    steps(network, averaging, x, 1)
    (directions,) = averaging.state_dict()["matrices"]["directions"]
    assert (directions == 0).float().mean() > 0.3  # whole directions: where both ends say so
    for i in range(3):
        for slot, j in enumerate(network.neighbors[i].tolist()):
            back = network.neighbors[j].tolist().index(i)
            assert (directions[i, slot] == 0).all() == (directions[j, back] == 0).all()


def test_dependent_directions_do_no_harm() -> None:
    """All differences have rank 1, so that the second and third directions add nothing."""
    network, layout = alone("ring", 4), Layout([(6, 5)])
    factors = torch.tensor([0.0, 1.0, -2.0, 5.0])
    x = (factors[:, None] * torch.outer(torch.randn(6), torch.randn(5)).flatten()).contiguous()
    before, mean = variance(x), x.mean(0)
    averaging = power_gossip(network, layout, rank=3, num_iterations=2)
    for _ in range(40):
        last = variance(x)
        steps(network, averaging, x, 1)
        assert variance(x) <= last * (1 + 1e-5) + 1e-11 * before
    assert variance(x) < 1e-8 * before
    torch.testing.assert_close(x.mean(0), mean, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_bits_are_the_formula(rank: int, iterations: int) -> None:
    """32 r Σ columns and 32 r Σ rows in turns, and 32 for each element that is not compressed."""
    layout, network = Layout(SHAPES), alone("ring", 4)
    options = dict(rank=rank, num_iterations=iterations)
    averaging = algorithms.make("power-gossip", network, layout, **options)
    matrices = [(s[0], int(np.prod(s[1:]))) for s in SHAPES if len(s) >= 2]
    low = [(m, k) for m, k in matrices if min(m, k) > rank]
    sides = [sum(k for _, k in low), sum(m for m, _ in low)]
    rest = layout.size - sum(m * k for m, k in low)
    expected, x = 0, start(4, layout)
    for step in range(5):
        steps(network, averaging, x, 1)
        sent = sum(sides[(step * iterations + i) % 2] for i in range(iterations))
        expected += 2 * 32 * (rank * sent + rest)
        assert network.bits.tolist() == [expected] * 4


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("topology", ["chain", "random-matching"])
def test_elements_that_are_not_compressed_are_one_plain_message(rank: int, topology: str) -> None:
    """Matrices at γ, vectors at 1, in one message with a value for each of them."""
    layout, network = Layout([(4, 4), (5,), (2, 3), (9, 1)]), alone(topology, 4)
    x = start(4, layout)
    plain, expected = alone(topology, 4), x.clone()
    averaging = power_gossip(network, layout, rank=rank, diffusion_rate=0.5)
    for t in range(3):
        degrees = [len(network.topology.round(t).targets(i)) for i in range(4)]
        before = network.messages.copy()
        steps(network, averaging, x, 1)
        kinds = 1 if rank == 4 else 2  # power iteration too
        assert (network.messages - before).tolist() == [kinds * degree for degree in degrees]
        steps(plain, PlainGossip(plain, 0.5), expected[:, : layout.matrices_size], 1)
        plain.round -= 1
        steps(plain, PlainGossip(plain, 1.0), expected[:, layout.matrices_size :], 1)
        first = layout.compressible(rank)[-1].stop if rank < 4 else 0
        assert torch.equal(x[:, first:], expected[:, first:])


@pytest.fixture(scope="module")
def reference() -> Any:
    """The class of the page on PowerGossip, in NumPy: one matrix and one edge at a time."""
    page = (ROOT / "docs/methods/power-gossip.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^n = 8$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["PowerGossip"]


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_power_gossip_agrees_with_the_plain_reference(
    reference: Any, topology: str, iterations: int, rank: int, warm_start: bool
) -> None:
    """To rounding, over steps in which the sides alternate. Both draw the same directions."""
    n, shape = 5, (7, 5)
    network, layout = alone(topology, n), Layout([shape])
    options: dict[str, Any] = {"rank": rank, "num_iterations": iterations, "diffusion_rate": 0.8}
    options |= {"warm_start": warm_start}
    averaging = power_gossip(network, layout, seed=3, **options)

    class Plain(reference):
        def random_directions(self, edge: tuple[int, int]) -> Any:
            size = (rank, shape[self.iterations % 2])
            key = randomness.keys(3, "power-gossip", [edge])
            return randomness.normal(key, self.iterations, size)[0].T.double().numpy()

    plain = Plain(network.topology.round(0).matrix().toarray(), shape, **options)
    x = start(n, layout)
    X = x.double().view(n, *shape).numpy()
    for _ in range(4):
        steps(network, averaging, x, 1)
        plain.step(X)
        np.testing.assert_allclose(x.view(n, *shape).numpy(), X, atol=2e-5, rtol=1e-5)


def test_batched_matrices_agree_with_the_plain_reference(reference: Any) -> None:
    """Several matrices, two of one shape, with the directions that were drawn for each."""
    shapes = [(7, 5), (4, 6), (7, 5)]
    n, layout = 6, Layout(shapes)
    network, x = alone("ring", n), start(n, layout)
    averaging = power_gossip(network, layout, rank=2, num_iterations=2)
    (message,) = averaging.state_dict()["matrices"]["directions"]
    W = network.topology.round(0).matrix().toarray()
    # Directions lie in a message as the matrices' rows lie in x, rank by rank.
    order = sorted(range(3), key=lambda index: layout.starts[index])
    pieces = message.split([2 * shapes[index][0] for index in order], dim=2)
    references, X = {}, {}
    for index, piece in zip(order, pieces, strict=True):
        plain = references[index] = reference(W, shapes[index], rank=2)
        for i, j in plain.edges:
            slot = network.neighbors[i].tolist().index(j)
            plain.p[i, j] = piece[i, slot].view(2, -1).T.double().numpy()
        X[index] = torch.stack([layout.tensors(row)[index] for row in x]).double().numpy()
    for _ in range(4):
        steps(network, averaging, x, 1)
        for index, plain in references.items():
            plain.step(X[index])
            fast = torch.stack([layout.tensors(row)[index] for row in x]).numpy()
            np.testing.assert_allclose(fast, X[index], atol=2e-5, rtol=1e-5)


def test_edges_have_random_directions_of_their_own() -> None:
    """Two edges of a worker, at either end; and one edge in two rounds."""
    layout = Layout([(6, 5)])
    network = alone("star", 4)
    (drawn,) = power_gossip(network, layout).state_dict()["matrices"]["directions"]
    edges = [drawn[0, slot] for slot in range(3)] + [-drawn[i, 0] for i in (1, 2, 3)]
    assert torch.equal(torch.stack(edges[:3]), torch.stack(edges[3:]))
    assert torch.unique(drawn[0], dim=0).shape[0] == 3
    # Edges with the same higher index: a star whose center is the last worker.
    graph = nx.empty_graph(4)
    graph.add_edges_from([(0, 3), (1, 3), (2, 3)])
    center = topologies.undirected("last", graph)
    (drawn,) = power_gossip(Network(center, ALONE), layout).state_dict()["matrices"]["directions"]
    assert torch.unique(drawn[3], dim=0).shape[0] == 3
    # The same edges in two rounds.
    rounds = network.topology.rounds * 2
    twice = Network(topologies.Topology("twice", rounds), ALONE)
    first, second = power_gossip(twice, layout).state_dict()["matrices"]["directions"]
    for i, slot in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        assert not torch.equal(first[i, slot], second[i, slot])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("theirs", "agree"),
    [
        # An entry of 1, and elsewhere 64 differences just below the noise level of 1e-6.
        ([1.0] + [0.9e-6] * 64, True),
        ([1.0] + [0.9e-6] * 63 + [1.1e-6], False),
        # A difference between 1e-6 of the one end's maximum and 1e-6 of the other's, a larger one.
        ([1 + 8 * 2**-23] + [0.0] * 63 + [1e-6 * (1 + 5e-7)], True),
        ([1 + 8 * 2**-23] + [0.0] * 63 + [1e-6 * (1 + 2e-6)], False),
    ],
)
def test_both_ends_decide_alike_about_rounding_errors(
    theirs: list[float], agree: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "load", lambda network: None)
    own = torch.tensor([[1.0] + [0.0] * 64, theirs])
    difference = torch.zeros(2, 65) if agree else torch.stack([own[1] - own[0], own[0] - own[1]])
    assert torch.equal(next_directions(own), difference)


@pytest.mark.parametrize("compiled", [True, False])
def test_both_ends_decide_alike_about_messages_in_half_precision(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference between 1e-6 of the maximum of a message, and of the product before rounding."""
    if not compiled:
        monkeypatch.setattr(kernels, "load", lambda network: None)
    difference = torch.tensor([0.0] * 64 + [168 * 2**-27])
    own = torch.stack([torch.tensor([1.253] + [0.0] * 64), difference])
    own[1, 0] = 1.25  # as 1.253 in bfloat16
    found = next_directions(own, Rounding(torch.bfloat16))
    assert torch.equal(found, torch.stack([difference, -difference]))


def next_directions(
    rows: Tensor, sent: Callable[[Conversation], Conversation] = lambda conversation: conversation
) -> Tensor:
    """Directions of two workers after an iteration with (1, 0), with which products are the rows
    [worker, column]."""
    network, layout = alone("ring", 2), Layout([(2, rows.shape[1])])
    averaging = power_gossip(network, layout)
    state = averaging.state_dict()
    state["matrices"]["directions"] = [torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])]
    averaging.load_state_dict(state)
    network.run(sent(averaging.step(torch.cat([rows, torch.zeros_like(rows)], 1))))
    (found,) = averaging.state_dict()["matrices"]["directions"]
    return found[:, 0]


def test_directions_of_another_run_are_rejected() -> None:
    first = power_gossip(alone("ring", 4), Layout([(3, 3)]))
    second = power_gossip(alone("ring", 4), Layout([(5, 3)]))
    with pytest.raises(ValueError, match=r"directions.*\(4, 2, 5\)"):
        second.load_state_dict(first.state_dict())


def iterated(branches: bool, rank: int, rounded: bool) -> Tensor:
    """x after iterations of workers that agree at first, some of them with few neighbors."""
    network, layout = alone("tail", 6), Layout([(3, 40), (5, 7), (5, 7)])
    sides = matrix_sides(
        EdgeConstants(network, network.slots, 1.0, 0), rank, layout.compressible(rank)
    )
    for side in sides:
        side.branches = branches
    x = start(6, layout)[:1].repeat(6, 1)
    x[1::2] = x[1::2].nextafter(torch.tensor(2.0))  # to rounding, which is noise

    def conversation(t: int) -> Conversation:
        side = sides[t % 2]
        side.update(x, (yield side.project(x, t, rounded)))

    for t in range(7):
        if t == 3:
            x += start(6, layout, seed=1)
        network.run(conversation(t))
    return x


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("rounded", [False, True])
def test_skipped_work_would_change_nothing(rank: int, rounded: bool) -> None:
    """A GPU skips none. Directions collapse at first, and are drawn again."""
    assert torch.equal(iterated(True, rank, rounded), iterated(False, rank, rounded))
