"""Laws of PowerSGD: what it keeps, what it converges to, what it sends."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powergossip.optimizers
from powergossip import topologies
from powergossip.algorithms.power_sgd import Aggregation, Config
from powergossip.network import Network, Processes, processes
from powergossip.optimizers.power_sgd import PowerSGD, optimizer_step
from powergossip.parameters import Layout
from powergossip.randomness import generator
from powergossip.tasks.models import ARCHITECTURES

SHAPES = [(6, 4), (9,), (6, 4), (3, 2, 2), (8, 6), (1,)]
NO_LEAST_RATE = {"min_compression_rate": 1.0}


def aggregation(n_workers: int, shapes: Any = SHAPES, **options: Any) -> Aggregation:
    network = Network(topologies.make("ring", n_workers), Processes())
    return Aggregation(network, Layout(shapes), always_compressing(**options))


def always_compressing(**options: Any) -> Config:
    """A configuration with which every matrix travels compressed, even if that is longer."""
    config = Config(**(NO_LEAST_RATE | options))
    object.__setattr__(config, "min_compression_rate", 0.0)
    return config


def gradients(n_workers: int, layout: Layout, *ids: int) -> Tensor:
    drawn = generator(3, "test", *ids).standard_normal((n_workers, layout.size))
    return torch.from_numpy(drawn).float()


def step(a: Aggregation, gradient: Tensor) -> Tensor:
    mean = torch.full_like(gradient, torch.nan)
    a._network.run(a.step(gradient, mean))
    return mean


@pytest.mark.parametrize("n_workers", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("num_iters", [1, 2, 3])
def test_what_is_applied_and_what_is_kept_sum_to_the_gradients(
    n_workers: int, rank: int, num_iters: int
) -> None:
    """Σ_t mean_t + mean_i e_i = Σ_t mean_i g_i: error feedback loses nothing."""
    a = aggregation(n_workers, rank=rank, num_iters_per_step=num_iters)
    layout = Layout(SHAPES)
    error = torch.zeros(n_workers, layout.size)
    applied, given = torch.zeros(layout.size), torch.zeros(layout.size)
    for t in range(40):
        fresh = gradients(n_workers, layout, t)
        given += fresh.mean(0)
        error += fresh
        mean = step(a, error)
        assert (mean == mean[0]).all(), "all workers apply the same"
        applied += mean[0]
    assert (applied + error.mean(0) - given).norm() < 1e-4 * given.norm()
    assert 0 < error.mean(0).norm() < 20 * given.norm()


@pytest.mark.parametrize("n_workers", [1, 4])
def test_full_rank_with_two_half_iterations_is_all_reduce(n_workers: int) -> None:
    """The half-iteration from a whole basis of the shorter side takes everything."""
    a = aggregation(n_workers, rank=8)
    layout = Layout(SHAPES)
    for t in range(5):
        gradient = gradients(n_workers, layout, t)
        expected = gradient.mean(0)
        size = gradient.norm()
        mean = step(a, gradient)
        assert (mean - expected).norm() < 1e-5 * expected.norm()
        assert gradient.norm() < 1e-5 * size, "nothing is left"


@pytest.mark.parametrize("shape", [(12, 9), (9, 12)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_fixed_gradient_is_approximated_as_well_as_rank_r_can(
    rank: int, shape: tuple[int, int]
) -> None:
    """A half-iteration a step with warm start is power iteration, which converges to the leading
    singular vectors; the best of that rank is Eckart & Young's (1936), from torch.linalg.svd."""
    a = aggregation(1, [shape], rank=rank, num_iters_per_step=1)
    rows, columns = shape
    u = torch.linalg.qr(gradients(1, Layout([(rows, rows)]), 1).view(rows, rows)).Q[:, :9]
    v = torch.linalg.qr(gradients(1, Layout([(columns, columns)]), 2).view(columns, columns)).Q
    fixed = (u * 0.6 ** torch.arange(9.0)) @ v[:, :9].T
    for _ in range(60):
        mean = step(a, fixed.flatten()[None].clone())
    left, s, right = torch.linalg.svd(fixed)
    best = left[:, :rank] * s[:rank] @ right[:rank]
    assert (mean[0].view(shape) - best).norm() < 1e-4 * best.norm()


def test_it_is_the_definition_matrix_by_matrix() -> None:
    """The half-iterations one after the other, each subtracting from the matrices."""
    a = aggregation(3, [(14, 12)], rank=2, num_iters_per_step=3)
    directions = a._groups[0].directions[0].clone()  # [rank, column], orthonormal
    error = torch.zeros(3, 168)
    for t in range(6):
        error += gradients(3, Layout([(14, 12)]), t)
        m, expected = error.view(3, 14, 12).clone(), torch.zeros(14, 12)
        for half in range(3 * t, 3 * t + 3):
            basis = torch.linalg.qr(directions.double().T).Q.float()  # [length, rank]
            if half % 2 == 0:
                out = m @ basis
                m = m - out @ basis.T
                expected += out.mean(0) @ basis.T
            else:
                out = m.mT @ basis
                m = m - basis @ out.mT
                expected += basis @ out.mean(0).T
            directions = out.mean(0).T
        mean = step(a, error)
        assert (mean[0].view(14, 12) - expected).norm() < 1e-5 * expected.norm()
        assert (error.view(3, 14, 12) - m).norm() < 1e-5 * m.norm()


def test_a_gradient_of_zeros_does_not_end_learning() -> None:
    a = aggregation(2)
    for _ in range(3):
        mean = step(a, torch.zeros(2, Layout(SHAPES).size))
        assert (mean == 0).all()
    gradient = gradients(2, Layout(SHAPES), 1)
    mean = step(a, gradient)
    for view in Layout(SHAPES).tensors(mean[0]):
        assert view.norm() > 0.05


@pytest.mark.parametrize(("rank", "rate"), [(1, 243), (2, 136), (4, 72)])
def test_the_published_compression_of_resnet18(rank: int, rate: int) -> None:
    """Table 3 of Vogels et al. (2019), and the bits of real messages, which are all-reduces."""
    shapes = [p.shape for p in ARCHITECTURES["ResNet18"]((3, 32, 32), 10).parameters()]
    layout = Layout(shapes)
    assert layout.size == 11_173_962
    config = Config(rank=rank, min_compression_rate=2)
    network = Network(topologies.make("ring", 2), Processes())
    a = Aggregation(network, layout, config)
    assert round(a.compression_rate) == rate
    gradient = torch.randn(2, layout.size)
    step(a, gradient)
    # A ring of 2 all-reduces b bits by sending b of them, in two all-reduces here.
    assert abs(network.bits[0] - 32 * layout.size / a.compression_rate) <= 2


def test_small_tensors_and_the_first_steps_go_as_they_are() -> None:
    network = Network(topologies.make("ring", 2), Processes())
    layout = Layout([(40, 40), (40, 3), (7,)])
    config = Config(rank=1, min_compression_rate=10, start_compressing_after_num_steps=2)
    a = Aggregation(network, layout, config)
    for t in range(3):
        gradient = gradients(2, layout, t)
        expected, before = gradient.mean(0), network.bits[0]
        mean = step(a, gradient)
        wide, narrow, vector = (
            (x - y).norm() < 1e-6
            for x, y in zip(layout.tensors(mean[0]), layout.tensors(expected), strict=True)
        )
        assert narrow
        assert vector
        assert wide == (t < 2)
        sent = 32 * (layout.size if t < 2 else 2 * 40 + 120 + 7)
        assert network.bits[0] - before == sent


@pytest.mark.parametrize("rank", [1, 3])
def test_going_on_is_the_same_to_the_bit(rank: int) -> None:
    whole, layout = aggregation(2, rank=rank, num_iters_per_step=3), Layout(SHAPES)
    error = torch.zeros(2, layout.size)
    for t in range(5):
        error += gradients(2, layout, t)
        step(whole, error)
    other, kept = aggregation(2, rank=rank, num_iters_per_step=3), error.clone()
    other.load_state_dict(whole.state_dict())
    for t in range(5, 9):
        fresh = gradients(2, layout, t)
        error += fresh
        kept += fresh
        assert torch.equal(step(whole, error), step(other, kept))
    with pytest.raises(ValueError, match="another model, or another rank"):
        aggregation(2, rank=2).load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0: use 1 or more"),
        ({"min_compression_rate": 0.5}, "min_compression_rate=0.5: use 1 or more"),
        ({"min_compression_rate": float("nan")}, "min_compression_rate=nan"),
        ({"num_iters_per_step": 0}, "num_iters_per_step=0"),
        ({"start_compressing_after_num_steps": -1}, "start_compressing_after_num_steps=-1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


# In someone else's training loop.


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))


def data(worker: int, t: int) -> tuple[Tensor, Tensor]:
    drawn = generator(1, "test", worker, t).standard_normal((8, 12))
    x = torch.from_numpy(drawn).float()
    return x, x[:, :4].argmax(1)


def losses(
    net: nn.Module, workers: list[int], steps: int, optimizer: Any, take: Any, clear: Any = None
) -> Iterator[None]:
    """The mean loss of some workers' batches, step by step."""
    for t in range(steps):
        if clear is not None:
            clear()
        for worker in workers:
            x, y = data(worker, t)
            (nn.functional.cross_entropy(net(x), y) / len(workers)).backward()
        take(optimizer)
        yield


@pytest.mark.parallel(nprocs=[1, 2, 4])
@pytest.mark.parametrize("zero", ["never", "to none"])
def test_five_lines_in_a_loop(zero: str) -> None:
    """While nothing is compressed, it is SGD on the mean gradient; afterwards all workers still
    have the same parameters, also if the loop goes on calling zero_grad()."""
    who = processes()
    net, reference = model(who.rank), model(0)  # process 0's parameters count
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    config = Config(rank=1, min_compression_rate=1, start_compressing_after_num_steps=5)
    aggregator = PowerSGD(net.named_parameters(), config)

    def take(of: Any) -> None:
        optimizer_step(of, aggregator)

    def plain_step(of: Any) -> None:
        of.step()
        of.zero_grad()

    clear = optimizer.zero_grad if zero == "to none" else None
    mine = losses(net, [who.rank], 12, optimizer, take, clear)
    theirs = losses(reference, list(range(who.size)), 12, plain, plain_step)
    for t, _ in enumerate(zip(mine, theirs, strict=True)):
        x = nn.utils.parameters_to_vector(net.parameters()).detach()
        if t < 5:
            y = nn.utils.parameters_to_vector(reference.parameters())
            assert (x - y).norm() < 1e-5 * y.norm()
        assert len({tuple(x.tolist()) for x in who.gather(x)}) == 1
    errors = [p.grad.norm() for p in net.parameters() if p.grad is not None and p.dim() > 1]
    assert min(errors) > 0, "what was not sent is kept"
    if who.size > 1:
        numbers = sum(p.numel() for p in net.parameters())
        share = 2 * (who.size - 1) / who.size
        compressed = numbers / aggregator.compression_rate
        expected = 32 * share * (5 * numbers + 7 * compressed)
        assert abs(aggregator.bits - expected) <= 12 * 2
        assert aggregator.compression_rate > 1.5


@pytest.mark.parametrize("zero", [False, True])
def test_a_loop_goes_on_where_it_was(zero: bool) -> None:
    def one(net: nn.Module) -> tuple[torch.optim.Optimizer, PowerSGD]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return optimizer, PowerSGD(net.parameters(), Config(min_compression_rate=1))

    def some(net: nn.Module, optimizer: Any, aggregator: PowerSGD, times: range) -> None:
        for t in times:
            if zero:
                optimizer.zero_grad()
            x, y = data(0, t)
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer_step(optimizer, aggregator)

    net = model(1)
    optimizer, aggregator = one(net)
    some(net, optimizer, aggregator, range(6))
    again = model(2)
    again.load_state_dict(net.state_dict())
    other, their = one(again)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares memory
    their.load_state_dict(aggregator.state_dict())
    for pair in ((net, optimizer, aggregator), (again, other, their)):
        some(*pair, range(6, 12))
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    assert their.bits == aggregator.bits


def test_zero_grad_does_not_lose_what_was_not_sent() -> None:
    """A loop that goes on calling it learns the same as one that does not."""
    ends = []
    for calls in (False, True):
        net = model(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        aggregator = PowerSGD(net.parameters(), Config(min_compression_rate=1))
        for t in range(8):
            if calls:
                optimizer.zero_grad()
            x, y = data(0, t)
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer_step(optimizer, aggregator)
        ends.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    assert (ends[0] - ends[1]).norm() < 1e-5 * ends[0].norm()
    start = nn.utils.parameters_to_vector(model(1).parameters())
    assert (ends[0] - start).norm() > 0.05 * start.norm()


def test_what_cannot_be_averaged_is_named() -> None:
    def refused(params: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PowerSGD(params)

    refused([], "there are no parameters")
    whole = torch.zeros(3, dtype=torch.int64)
    refused([("w", torch.zeros(2)), ("k", whole)], 'parameter "k" is torch.int64')
    refused([torch.zeros(2, dtype=torch.complex64)], "parameter 0 .* is torch.complex64")
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    aggregator = PowerSGD(net.named_parameters())
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
        aggregator.load_state_dict(PowerSGD(nn.Linear(4, 2).parameters()).state_dict())


def test_powersgd_reads_its_registry_names() -> None:
    """The names that its users know."""
    assert {f for f in vars(powergossip.optimizers) if not f.startswith("_")} >= {
        "Config",
        "PowerSGD",
        "optimizer_step",
    }
