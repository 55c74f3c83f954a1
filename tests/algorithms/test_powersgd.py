"""Laws of PowerSGD: error feedback, convergence of the directions, cost of the messages."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from powergossip import topologies
from powergossip.algorithms.power_sgd import PowerSGDAggregation, PowerSGDConfig, orthonormalize
from powergossip.errors import BadInput
from powergossip.network import Network, Processes, processes
from powergossip.optimizers import (
    DGC,
    PowerSGD,
    optimizer_step,
)
from powergossip.parameters import Layout
from powergossip.randomness import generator
from powergossip.tasks.models import ARCHITECTURES
from tests.harness.loops import backward, gradients, model, step, vector

SHAPES = [(6, 4), (9,), (6, 4), (3, 2, 2), (8, 6), (1,)]
# Compresses from the first step on, both sides in each step.
AT_ONCE = PowerSGDConfig(
    1, min_compression_rate=1, num_iters_per_step=2, start_compressing_after_num_steps=0
)


def aggregation(
    n_workers: int, shapes: Any = SHAPES, **options: Any
) -> tuple[Network, PowerSGDAggregation]:
    """An aggregation that compresses every matrix from the first step on."""
    defaults = {
        "rank": 1,
        "min_compression_rate": 0,
        "num_iters_per_step": 2,
        "start_compressing_after_num_steps": 0,
    }
    network = Network(topologies.make("ring", n_workers), Processes())
    return network, PowerSGDAggregation(
        network, Layout(shapes), PowerSGDConfig(**defaults | options)
    )


@pytest.mark.parametrize(("shape", "rank"), [((12, 9), 1), ((9, 12), 3)])
def test_a_fixed_gradient_is_approximated_as_well_as_rank_r_can(
    rank: int, shape: tuple[int, int]
) -> None:
    """A half-iteration a step with warm start is power iteration, which converges to the leading
    singular vectors; the best of that rank is Eckart & Young's (1936), from torch.linalg.svd."""
    network, a = aggregation(1, [shape], rank=rank, num_iters_per_step=1)
    rows, columns = shape
    u = torch.linalg.qr(gradients(1, Layout([(rows, rows)]), 1).view(rows, rows)).Q[:, :9]
    v = torch.linalg.qr(gradients(1, Layout([(columns, columns)]), 2).view(columns, columns)).Q
    fixed = (u * 0.6 ** torch.arange(9.0)) @ v[:, :9].T
    for _ in range(60):
        mean = step(network, a, fixed.flatten()[None].clone())
    left, s, right = torch.linalg.svd(fixed)
    best = left[:, :rank] * s[:rank] @ right[:rank]
    assert (mean[0].view(shape) - best).norm() < 1e-4 * best.norm()


@pytest.mark.parametrize(
    ("n_workers", "rank", "num_iters"), [(1, 1, 1), (3, 1, 2), (1, 2, 2), (3, 2, 1), (3, 2, 3)]
)
def test_it_agrees_with_the_paper(n_workers: int, rank: int, num_iters: int) -> None:
    """Vogels et al. (2019), Algorithm 1, on M [worker, row, column], a gradient plus its error. P
    and Q are factors in turns, across steps too."""
    shape = 14, 12
    network, a = aggregation(n_workers, [shape], rank=rank, num_iters_per_step=num_iters)
    factor = a.state_dict()["directions"][0].view(rank, shape[1]).T.clone()
    error, on_the_right = torch.zeros(n_workers, 168), True
    for t in range(6):
        error += gradients(n_workers, Layout([shape]), t)
        M, expected = error.view(n_workers, *shape).clone(), torch.zeros(shape)
        for _ in range(num_iters):
            Q = torch.linalg.qr(factor.double()).Q.float()
            if on_the_right:
                P = M @ Q
                M, factor = M - P @ Q.T, P.mean(0)
                expected = expected + factor @ Q.T
            else:
                P = M.mT @ Q
                M, factor = M - Q @ P.mT, P.mean(0)
                expected = expected + Q @ factor.T
            on_the_right = not on_the_right
        mean = step(network, a, error)
        assert (mean.view(-1, *shape) - expected).norm() < 1e-5 * mean.norm()
        assert (error.view(-1, *shape) - M).norm() < 1e-5 * M.norm()


def not_redrawn(attempt: int) -> Tensor:
    raise AssertionError("the directions are independent")


def test_nearly_parallel_directions_come_out_orthonormal() -> None:
    """A condition of 1e4 and more, for which one pass of Cholesky's method is not accurate."""
    axes = torch.eye(4, 30)
    for angle in (1e-2, 1e-4, 3e-5):
        nearly = torch.stack([axes[0], axes[0] + angle * axes[1], axes[2], axes[3]])
        p = orthonormalize(nearly[None], not_redrawn)[0]
        assert (p @ p.T - torch.eye(4)).abs().max() < 1e-12
        assert (p - axes).abs().max() < 1e-3, "in the order of the directions"


def test_dependent_directions_are_redrawn() -> None:
    axes = torch.eye(3, 30)
    for dependent in (torch.zeros(30), axes[0], -2 * axes[0], 1e-37 * axes[2]):
        p = orthonormalize(torch.stack([axes[0], dependent])[None], lambda attempt: axes[None, 1:])
        assert (p - axes[[0, 2]]).abs().max() < 1e-6


def test_matrices_of_all_shapes_start_with_directions_of_their_own() -> None:
    """Also those with rows of the same length, and those of one shape."""
    _, a = aggregation(2, [(6, 4), (8, 4), (6, 4)])
    drawn = a.state_dict()["directions"][0].view(3, 4)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[one] - drawn[other]).abs().max() > 1e-2
        assert (drawn[one] + drawn[other]).abs().max() > 1e-2


def test_a_gradient_of_zeros_does_not_end_learning() -> None:
    network, a = aggregation(2)
    for _ in range(3):
        mean = step(network, a, torch.zeros(2, Layout(SHAPES).size))
        assert (mean == 0).all()
    gradient = gradients(2, Layout(SHAPES), 1)
    mean = step(network, a, gradient)
    for view in Layout(SHAPES).tensors(mean[0]):
        assert view.norm() > 0.05


@pytest.mark.long
def test_the_published_compression_of_resnet18() -> None:
    """Table 3 of Vogels et al. (2019)."""
    shapes = [p.shape for p in ARCHITECTURES["ResNet18"]((3, 32, 32), 10).parameters()]
    layout = Layout(shapes)
    assert layout.size == 11_173_962
    for rank, rate in ((1, 243), (2, 136), (4, 72)):
        _, a = aggregation(2, shapes, rank=rank, min_compression_rate=2)
        assert round(a.compression_rate) == rate


def test_small_tensors_and_the_first_steps_are_not_compressed() -> None:
    """A matrix is compressed above the least rate: that of 20 × 20 at rank 1 is 10."""
    layout = Layout([(40, 40), (40, 3), (7,)])
    network, a = aggregation(
        2, layout.shapes, min_compression_rate=10, start_compressing_after_num_steps=2
    )
    for t in range(3):
        gradient = gradients(2, layout, t)
        expected, before = gradient.mean(0), network.bits[0]
        mean = step(network, a, gradient)
        wide, narrow, vector = (
            (x - y).norm() < 1e-6
            for x, y in zip(layout.tensors(mean[0]), layout.tensors(expected), strict=True)
        )
        assert narrow
        assert vector
        assert wide == (t < 2)
        sent = 32 * (layout.size if t < 2 else 2 * 40 + 120 + 7)
        assert network.bits[0] - before == sent
    for rate, compressed in ((9.9, True), (10, False), (10.1, False)):
        _, a = aggregation(1, [(20, 20)], min_compression_rate=rate)
        assert a.compression_rate == (10 if compressed else 1)


def test_without_error_feedback_a_step_forgets_the_one_before() -> None:
    """No error is left, and the mean is the projection of this gradient alone."""
    network, a = aggregation(3, rank=2, error_feedback=False, warm_start=False)
    _, other = aggregation(3, rank=2, error_feedback=False, warm_start=False)
    other.load_state_dict(a.state_dict())
    layout = Layout(SHAPES)
    gradient = gradients(3, layout, 1)
    first = step(network, a, gradient.clone())
    error = gradient.clone()
    second = step(network, other, error)
    assert torch.equal(first, second)
    assert (error == 0).all()
    assert (second - gradient.mean(0)).norm() > 0.1 * gradient.mean(0).norm(), "it compresses"


def test_without_warm_start_a_step_starts_from_random_directions() -> None:
    """So a constant gradient is not approximated better by and by, and no two steps are alike."""
    shape = 12, 9
    constant = gradients(1, Layout([shape]), 1)
    misses = {}
    for warm in (True, False):
        network, a = aggregation(1, [shape], rank=1, warm_start=warm, error_feedback=False)
        means = [step(network, a, constant.clone()) for _ in range(40)]
        misses[warm] = [(mean - constant).norm().item() for mean in means]
    last = misses[False][-20:]
    assert max(last) > 1.01 * min(last)
    assert sum(last) / 20 > 1.02 * misses[True][-1]


@pytest.mark.parametrize("rank", [1, 10**9])
def test_the_rank_is_at_most_the_shorter_side(rank: int) -> None:
    """Memory does not grow beyond it."""
    network, a = aggregation(2, rank=rank)
    layout = Layout(SHAPES)
    step(network, a, gradients(2, layout, 1))
    most = sum(min(rank, r, c) * (r + c) for r, c in [(6, 4), (6, 4), (3, 4), (8, 6)])
    assert abs(network.bits[0] - 32 * (most + 9 + 1)) <= 2


# In a training loop of your own.


def test_parameters_and_gradients_that_cannot_be_averaged_are_named() -> None:
    def rejected(params: Any, message: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            PowerSGD(params, AT_ONCE, **more)

    rejected([], "there are no parameters")
    several = Network(topologies.make("ring", 3), Processes())
    rejected([torch.zeros(2, 2)], "hosts 3 workers", network=several)
    whole = torch.zeros(3, dtype=torch.int64)
    rejected([("w", torch.zeros(2)), ("k", whole)], 'parameter "k" is torch.int64')
    rejected([torch.zeros(2, dtype=torch.complex64)], "parameter 0 .* is torch.complex64")
    rejected([torch.zeros(2), torch.zeros(0, 3)], r"parameter 1 of shape \(0, 3\) has no elements")
    shared = torch.zeros(4)
    rejected([shared, shared.view(2, 2)], "parameter 1 .* same memory as parameter 0")
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    aggregator = PowerSGD(net.named_parameters(), AT_ONCE)
    with pytest.raises(ValueError, match='parameter "weight" has no gradient'):
        optimizer_step(optimizer, aggregator)
    before = net.weight.detach().clone()
    net.weight.grad = torch.zeros(2, 3).to_sparse()
    net.bias.grad = torch.zeros(2)
    with pytest.raises(ValueError, match='parameter "weight" has a sparse gradient'):
        optimizer_step(optimizer, aggregator)
    other = torch.optim.SGD([net.weight], lr=0.1)
    with pytest.raises(ValueError, match="1 parameters that are not the 2"):
        optimizer_step(other, aggregator)
    assert torch.equal(before, net.weight)
    with pytest.raises(ValueError, match="use the same model"):
        aggregator.load_state_dict(PowerSGD(nn.Linear(4, 2).parameters(), AT_ONCE).state_dict())


@pytest.mark.parallel([1, 2])
def test_a_full_rank_of_float64_is_the_mean_to_the_rounding_of_float64() -> None:
    """Also the uncompressed tensors."""
    who = processes()
    drawn = [generator(3, "test", r).standard_normal((2, 48)) for r in range(who.size)]
    given = torch.from_numpy(np.stack(drawn))  # [worker, tensor, element]
    expected = given.mean(0)
    params = [torch.zeros(8, 6, dtype=torch.float64), torch.zeros(48, dtype=torch.float64)]
    mine = [given[who.rank, 0].view(8, 6).clone(), given[who.rank, 1].clone()]
    means = PowerSGD(params, PowerSGDConfig(6, 0, 2, 0)).aggregate(mine)
    for mean, of_tensor in zip(means, expected, strict=True):
        assert mean.dtype == torch.float64
        assert (mean.flatten() - of_tensor).norm() < 1e-14 * of_tensor.norm()
    assert all(error.norm() < 1e-13 for error in mine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_means_and_the_errors_sum_to_the_gradients_in_every_precision(
    dtype: torch.dtype,
) -> None:
    """Errors of half-precision gradients are kept in float32: Σ_t mean_t + e = Σ_t g_t."""
    weight = nn.Parameter(torch.zeros(8, 6, dtype=dtype))
    bias = nn.Parameter(torch.zeros(6))  # mixed
    powersgd = PowerSGD([weight, bias], AT_ONCE)
    applied: list[Tensor] = []

    class Keeps(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert weight.grad is not None
            assert weight.grad.dtype == dtype
            applied.append(powersgd.flat.means[0].double().clone())

    optimizer = Keeps([weight, bias], {})
    given = torch.zeros(8, 6, dtype=torch.float64)
    for t in range(20):
        fresh = gradients(1, Layout([(8, 6)]), t).view(8, 6).to(dtype)
        given += fresh.double()
        weight.grad = fresh if weight.grad is None else weight.grad.add_(fresh)
        bias.grad = torch.ones(6)
        optimizer_step(optimizer, powersgd)
    error = powersgd.flat.gradients[0].double()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert (sum(applied) + error - given).norm() < tolerance * given.norm()
    assert error.norm() > 0.1
    assert weight.grad is not None
    assert (weight.grad == 0).all()
    assert powersgd.flat.means[1].eq(1).all()


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kind", ["PowerSGD", "DGC"])
def test_frozen_parameters_are_neither_changed_nor_sent(kind: str) -> None:
    """Nor is a gradient applied that is left from an earlier phase of training."""
    who = processes()
    net: Any = model(who.rank)
    net[0].requires_grad_(False)
    before, head = vector(net[0]).clone(), vector(net[2]).clone()
    net[0].weight.grad = torch.ones(10, 12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    make: dict[str, Any] = {
        "PowerSGD": lambda params: PowerSGD(params, PowerSGDConfig(1, 1e9, 1, 0)),
        "DGC": DGC,
    }
    aggregator = make[kind](net.named_parameters())
    for t in range(2):
        backward(net, who.rank, t)
        optimizer_step(optimizer, aggregator)
    assert torch.equal(vector(net[0]), before)
    assert not torch.equal(vector(net[2]), head)
    assert aggregator.flat.layout.size == 44
    net[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight"):
        optimizer_step(optimizer, aggregator)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="all 4 parameters are frozen"):
        PowerSGD(net.named_parameters(), AT_ONCE)


@pytest.mark.parallel([2])
def test_workers_that_differ_in_what_they_train_are_rejected() -> None:
    who = processes()
    frozen = [nn.Parameter(torch.zeros(2, 2), requires_grad=i != who.rank) for i in range(2)]
    with pytest.raises(BadInput):
        PowerSGD(frozen, AT_ONCE)
    dtype = torch.float64 if who.rank else torch.float32
    with pytest.raises(BadInput):
        PowerSGD([torch.zeros(2, 2, dtype=dtype)], AT_ONCE)


def test_the_published_defaults() -> None:
    with pytest.raises(TypeError):
        PowerSGDConfig()  # type: ignore[call-arg]
    assert PowerSGDConfig(3) == PowerSGDConfig(3, 2, 1, 100)
    named = PowerSGDConfig(
        rank=3, min_compression_rate=4, num_iters_per_step=5, start_compressing_after_num_steps=6
    )
    assert PowerSGDConfig(3, 4, 5, 6) == named


@pytest.mark.parallel([4])
def test_workers_start_from_the_values_of_process_0() -> None:
    """To the bit, −0 and NaN included; other shapes are rejected in all processes. A network of
    one process leaves them alone."""
    who = processes()
    value = [-0.0, torch.nan, 1e-45] if who.rank == 0 else [1.0, 2.0, 3.0]
    parameters = [torch.tensor(value), torch.full((2, 2), float(who.rank))]
    alone = Network(topologies.make("ring", 1), Processes())
    assert PowerSGD(parameters, AT_ONCE, network=alone).network is alone
    assert (parameters[1] == who.rank).all()
    PowerSGD(parameters, AT_ONCE)
    expected = torch.tensor([-0.0, torch.nan, 1e-45])
    assert torch.equal(parameters[0].view(torch.int32), expected.view(torch.int32))
    assert torch.equal(parameters[1], torch.zeros(2, 2))
    with pytest.raises(BadInput, match=r"parameter 1 .* in process 2"):
        PowerSGD([torch.zeros(2), torch.zeros(3 if who.rank == 2 else 2)], AT_ONCE)
