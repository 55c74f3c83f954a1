"""The compiled loops of PowerGossip and of all-reduce, beside PyTorch's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import algorithms, kernels, topologies
from powergossip.algorithms.compiled_directions import CompiledSide, compiled_sides
from powergossip.algorithms.directions import EdgeConstants, MatrixSide
from powergossip.network import Conversation, Network, Processes
from powergossip.parameters import Layout

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="without a C compiler")

SHAPES = [(40, 23), (5, 7), (40, 23), (17, 16), (9, 33), (3, 5), (6,)]


def alone(topology: str, n: int) -> Network:
    return Network(topologies.make(topology, n), Processes())


def start(n: int, layout: Layout) -> Tensor:
    return torch.randn(n, layout.size, generator=torch.Generator().manual_seed(1))


def compiled(network: Network, rank: int, layout: Layout) -> tuple[CompiledSide, CompiledSide]:
    library = kernels.compiled()
    assert library is not None
    edges = EdgeConstants(network, network.slots, 1.0, 3)
    return compiled_sides(library, edges, rank, layout.compressible(rank))


def iterate(network: Network, p: CompiledSide, x: Tensor, counter: int) -> None:
    def conversation() -> Conversation:
        p.update(x, (yield p.project(x, counter, False)))

    network.run(conversation())


def both(
    topology: str, n: int, x: Tensor, layout: Layout, steps: int, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """x and directions after some steps: by compiled loops, then by PyTorch."""
    results = []
    for torch_only in (False, True):
        with pytest.MonkeyPatch.context() as context:
            if torch_only:
                context.setattr(kernels, "load", lambda network: None)
            network, own = alone(topology, n), x.clone()
            averaging = algorithms.make("power-gossip", network, layout, **options)
            for _ in range(steps):
                network.run(averaging.step(own))
            (directions,) = averaging.state_dict()["matrices"]["directions"]
            absent = (network.neighbors < 0)[..., None]
            results.append((own, directions.masked_fill(absent, 0)))
    return results


@pytest.mark.parametrize("topology", ["star", "ring"])
@pytest.mark.parametrize(
    "options",
    [
        dict(rank=1),
        dict(rank=2, num_iterations=2, diffusion_rate=0.7),
        dict(rank=4),
        dict(rank=3, warm_start=False),
        dict(round_weights=True, num_iterations=3),
        dict(round_weights=True, warm_start=False),
    ],
    ids=str,
)
def test_both_compute_the_same_to_rounding(topology: str, options: dict[str, Any]) -> None:
    """Several rows of x, slots and stacks; the slots of a star's leaves are padding."""
    layout = Layout(SHAPES)
    ours, reference = both(topology, 6, start(6, layout), layout, 4, options)
    torch.testing.assert_close(ours[0], reference[0], atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], reference[1], atol=1e-3, rtol=1e-3)


def test_many_neighbors_and_one_worker_alone() -> None:
    layout = Layout(SHAPES)
    for n in (1, 2, 40):
        ours, reference = both("fully-connected", n, start(n, layout), layout, 2, dict())
        torch.testing.assert_close(ours[0], reference[0], atol=3e-5, rtol=1e-5)


def test_random_directions_are_those_of_pytorch() -> None:
    """Up to one rounding in float32, for which there is one chance in 10⁸."""
    network, layout = alone("star", 5), Layout([(300, 400), (50, 60)])
    ours = compiled(network, 2, layout)[0]
    edges = EdgeConstants(network, network.slots, 1.0, 3)
    theirs = MatrixSide(edges, 2, layout.compressible(2), side=0)
    for counter in (0, 7, 2**31 - 1):
        ours.draw(counter)
        theirs.draw(counter)
        drawn, expected = ours.packed(), theirs.packed()
        assert (drawn != expected).sum() <= 1
        torch.testing.assert_close(drawn, expected, atol=0, rtol=2e-7)


def test_collapsed_directions_alone_are_resampled() -> None:
    """The workers agree on one matrix of two. Its directions are those of the random stream."""
    network, layout = alone("ring", 2), Layout([(40, 23), (30, 20)])
    sides, x = compiled(network, 2, layout), start(2, layout)
    agreed, other = layout.stacks
    x[1, agreed.start : agreed.stop] = x[0, agreed.start : agreed.stop]
    before = x.clone()
    sides[0].draw(0)
    iterate(network, sides[0], x, 0)
    d = sides[1].packed()
    length = 2 * agreed.columns
    assert not d[..., :length].any()
    assert torch.equal(x[:, agreed.start : agreed.stop], before[:, agreed.start : agreed.stop])
    iterate(network, sides[1], x, 1)
    drawn = compiled(network, 2, layout)[1]
    drawn.draw(1)
    p = sides[1].packed()
    for span, source in ((slice(0, length), drawn.packed()), (slice(length, None), d)):
        Q = p[0, 0, span].view(2, -1).double()
        P = source[0, 0, span].view(2, -1).double()
        torch.testing.assert_close(Q @ Q.T, torch.eye(2).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(P @ Q.T @ Q, P, atol=1e-5, rtol=1e-5)
    assert other.start == agreed.stop


@pytest.mark.parametrize("rank", [1, 2])
def test_nan_reaches_the_neighbors(rank: int) -> None:
    """But no other matrix."""
    layout = Layout([(40, 23), (9, 33)])
    first, x = layout.stacks[0], start(4, layout)
    x[0, first.start + 5] = float("nan")
    for result, _ in both("ring", 4, x, layout, 1, dict(rank=rank, num_iterations=1)):
        finite = result[:, first.start : first.stop].isfinite().all(1)
        assert finite.tolist() == [False, False, True, False]
        assert result[:, first.stop :].isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"), [("dpsgd", {}), ("power-gossip", {"rank": 2, "num_iterations": 2})]
)
def test_threads_change_no_bit(name: str, options: dict[str, int]) -> None:
    """Of enough elements for three threads, and a remainder."""
    threads, layout = torch.get_num_threads(), Layout([(700, 801), (30, 20), ()])
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            network, x = alone("ring", 2), start(2, layout)
            network.run(algorithms.make(name, network, layout, **options).step(x))
            results.append(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_sums_have_the_bits_of_pytorch(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = start(n, Layout([(1000,)]))
    ours = alone("ring", n).mean(x)
    monkeypatch.setattr(kernels, "compiled", lambda: None)
    assert torch.equal(ours, alone("ring", n).mean(x))
