"""SparseLoCo, DeMo, and the compressor of chunks."""

from math import prod
from typing import Any

import pytest
import scipy.fft
import torch
from torch import Tensor

from powergossip import topologies
from powergossip.algorithms import aggregation
from powergossip.algorithms.chunked import cosines
from powergossip.compressors import ChunkTopK, Codec, chunk_shape
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from tests.harness.loops import gradients, step
from tests.harness.training import after_steps

WORKERS = 3
SHAPES = [(16, 24), (12, 10), (30,), (7, 33)]  # chunks of 8 × 8, 6 × 5, 6 × 1, 7 × 3
VALUES = 24 + 16 + 20 + 44  # the 4 largest of each


def value(index: int, shape: tuple[int, ...], worker: int, time: int) -> Tensor:
    i = torch.arange(prod(shape), dtype=torch.float64)
    waves = torch.sin(i * i * 0.37 + i * (1.3 + 0.11 * worker) + 2.1 * time + index)
    return (waves * (1 + torch.cos(0.05 * i))).view(shape).float()


def ten_steps(name: str, rate: float, **options: Any) -> tuple[list[Tensor], int]:
    """The displacement of each tensor after ten steps, and the bits of a worker."""
    layout, network = Layout(SHAPES), Network(topologies.make("ring", WORKERS), Processes())
    made = aggregation.make(name, network, layout, kept=4, chunk=8, **options)
    moved = torch.zeros(layout.size)
    for time in range(10):
        given = torch.zeros(WORKERS, layout.size)
        for worker, row in enumerate(given):
            for index, tensor in enumerate(layout.tensors(row)):
                tensor.copy_(value(index, SHAPES[index], worker, time))
        made.at_learning_rate(rate)
        moved -= rate * step(network, made, given)[0]
    return layout.tensors(moved), int(network.bits[0])


FLOATS: dict[str, Any] = {"error_decay": 0.999, "bits": 32}
TWO_BITS: dict[str, Any] = {"error_decay": 0.95, "bits": 2}
SENDERS = {"mean_over": "senders"}
# Sum and sum of squares of the displacement of each tensor, by the published programs: CCLoco with
# blocks for chunks (see docs/published.md), and DeMo. Without `senders`, their mean is over all.
PUBLISHED: list[tuple[str, float, dict[str, Any], list[tuple[float, float]]]] = [
    (
        "sparse-loco",
        1.0,
        FLOATS,
        [(-0.36, 58.7246), (3.0709, 31.7627), (1.6765, 16.8115), (6.2487, 46.2254)],
    ),
    (
        "sparse-loco",
        1.0,
        FLOATS | SENDERS,
        [(6.213, 653.3906), (4.4633, 343.3896), (0.173, 179.4391), (15.2945, 598.2016)],
    ),
    (
        "sparse-loco",
        1.0,
        TWO_BITS,
        [(0.8115, 49.629), (5.1711, 31.3674), (-0.1158, 13.3147), (3.7766, 47.3054)],
    ),
    (
        "sparse-loco",
        1.0,
        TWO_BITS | SENDERS,
        [(19.8564, 427.3667), (22.0103, 322.5907), (-3.9503, 153.7437), (21.4714, 589.4037)],
    ),
    (
        "demo",
        0.01,
        {},
        [(-0.3, 0.2476), (-0.18, 0.0836), (0.1, 0.0292), (0.48, 0.1704)],
    ),
    (
        "demo",
        0.01,
        SENDERS,
        [(-0.48, 0.2616), (0.0, 0.1088), (0.28, 0.0256), (0.14, 0.2236)],
    ),
]


@pytest.mark.parametrize(("name", "rate", "options", "published"), PUBLISHED)
def test_ten_steps_are_those_of_the_published_program(
    name: str, rate: float, options: dict[str, Any], published: list[tuple[float, float]]
) -> None:
    moved, bits = ten_steps(name, rate, **options)
    for tensor, (total, squares) in zip(moved, published, strict=True):
        assert float(tensor.sum()) == pytest.approx(total, rel=1e-4, abs=2e-4)
        assert float(tensor.square().sum()) == pytest.approx(squares, rel=1e-4, abs=1e-4)
    tables = 4 * 4 * len(SHAPES)  # of 4 bins, in bytes
    size = VALUES + (VALUES // 4 + tables if "bits" in options and options["bits"] == 2 else 0)
    size += 0 if options.get("bits") == 2 else 4 * VALUES
    length = 4  # of a message in front of it
    assert bits == 10 * (WORKERS - 1) * 8 * (size + length)


# --- The compressor -------------------------------------------------------------------------------


def test_chunks_are_blocks_of_the_largest_divisors() -> None:
    assert chunk_shape(256, 96, 64) == (64, 48)
    assert chunk_shape(97, 1, 64) == (1, 1)
    assert chunk_shape(30, 1, 8) == (6, 1)


def decoded(x: Tensor, shapes: list[Any], *options: int) -> Tensor:
    codec = Codec(Layout(shapes), ChunkTopK(*options), range(len(x)))
    message = codec.encode(x, 0)
    alone = Codec(Layout(shapes), ChunkTopK(*options), [0])
    for row, own in zip(x, message, strict=True):  # whatever else the process hosts
        assert torch.equal(alone.encode(row[None], 0)[0], own)
    neighbors = torch.tensor([[1, 0]]).expand(len(x), 2)
    own = codec.decode(message, codec.workers, 0).clone()
    assert torch.equal(codec.decode(message[neighbors], neighbors, 0), own[neighbors])
    return own


@pytest.mark.parametrize("bits", [1, 5, 32])
def test_the_largest_of_each_chunk_are_kept(bits: int) -> None:
    """‖v − C(v)‖² ≤ (1 − K/(h w)) ‖v‖² with floats, and less than ‖v‖² with bins."""
    shape, kept = (12, 10), 5
    v = torch.randn(2, 12, 10)
    found = decoded(v.flatten(1), [shape], kept, 6, bits).view_as(v)
    blocks = [t.unflatten(2, (2, 5)).unflatten(1, (2, 6)) for t in (v, found)]
    chunks, of_found = (b.transpose(2, 3).reshape(2, 4, 30) for b in blocks)
    threshold = chunks.abs().topk(kept).values[..., -1:]
    large = chunks.abs() >= threshold
    assert (of_found[~large] == 0).all()
    left = (v - found).square().sum((1, 2))
    if bits == 32:
        assert torch.equal(of_found[large], chunks[large])
        assert (left <= (1 - kept / 30) * v.square().sum((1, 2))).all()
    else:
        kept_squares = (chunks * large).square().sum((1, 2))
        worst = v.square().sum((1, 2)) - kept_squares
        assert (left - worst < {1: 1.0, 5: 0.02}[bits] * kept_squares).all()
        assert len(found[0].unique()) <= 2**bits + 1


# --- DeMo -----------------------------------------------------------------------------------------


def test_the_cosine_transform_is_orthonormal() -> None:
    for size in (1, 2, 7, 64):
        matrix = cosines(size)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
        x = torch.randn(size, dtype=torch.float64)
        expected = torch.from_numpy(scipy.fft.dct(x.numpy(), type=2, norm="ortho"))
        torch.testing.assert_close(matrix @ x, expected)
    assert cosines(7)[1::2, 3].tolist() == [0.0] * 3  # odd frequencies in the middle


def test_demo_with_all_components_is_the_sign_of_the_mean() -> None:
    layout, network = Layout(SHAPES), Network(topologies.make("ring", WORKERS), Processes())
    made = aggregation.make("demo", network, layout, kept=4096)
    for time in range(3):
        made.at_learning_rate(0.1)
        g = gradients(WORKERS, layout, time)
        assert torch.equal(step(network, made, g.clone())[0], g.mean(0).sign())


# --- SparseLoCo -----------------------------------------------------------------------------------

WHOLE = {"optimizer_kept": 4096, "optimizer_bits": 32}


@pytest.mark.long
@pytest.mark.parametrize(("local_optimizer", "outer_rate"), [("adamw", 1.0), ("muon", 0.5)])
def test_uncompressed_it_is_the_mean_of_models_after_local_steps(
    local_optimizer: str, outer_rate: float
) -> None:
    """The outer rate multiplies the mean. Nothing is sent within a round."""
    local = {"local_steps": 3, "local_optimizer": local_optimizer, "learning_rate": 0.005}
    ours, reference, start = (
        after_steps(0, optimizer=name, muon_precision="fp32", **local, **own)
        for name, own in (
            ("sparse-loco", WHOLE | {"optimizer_outer_rate": outer_rate}),
            ("all-reduce", {}),
            ("all-reduce", {}),
        )
    )
    sent = []
    for time in range(3):
        for run in (ours, reference):
            run.execution.train_step(0, time)
        x = ours.parameters.x
        sent.append(int(ours.network.bits[0]))
        assert (x == x[0]).all() == (time == 2)
    expected = start.parameters.x.lerp(reference.parameters.x, outer_rate)
    assert (expected - start.parameters.x).norm() > 0.01
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
    assert sent[:2] == [0, 0] < sent[2:]


def error_of_mean(decay: float) -> float:
    """Distance of the time average of φ from FedAvg's fixed point, on quadratics of 8 workers with
    different data: top 1 of 10, 5 local steps."""
    k, i = torch.arange(10.0)[None], torch.arange(8.0)[:, None]
    a, b = 1 + (k + i) % 5 / 4, 3 * torch.cos(i + k)
    walked = 1 - (1 - 0.05 * a) ** 5  # fraction of the way to its own optimum
    fixed = (walked * b).sum(0) / walked.sum(0)
    layout, network = Layout([(10,)]), Network(topologies.make("ring", 8), Processes())
    options = {"kept": 1, "bits": 32, "error_decay": decay}
    made = aggregation.make("sparse-loco", network, layout, **options)
    x, total, rounds = torch.zeros(10), torch.zeros(10), 1500
    for time in range(rounds):
        x = x - step(network, made, walked * (x - b))[0]
        if time >= rounds // 2:
            total += x
    return float((total / (rounds - rounds // 2) - fixed).norm())


@pytest.mark.long
def test_errors_that_are_kept_average_to_the_fixed_point_of_local_steps() -> None:
    """Errors that decay are forgotten: a bias."""
    assert error_of_mean(1.0) < 0.01
    assert error_of_mean(0.95) > 0.05
