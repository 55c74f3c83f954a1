"""Laws of Deep Gradient Compression: nothing is lost, the largest are sent, ratio 1 is SGD."""

from collections.abc import Callable
from math import ceil, gcd, prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from powergossip import topologies
from powergossip.algorithms.dgc import DGCAggregation, DGCConfig, Selector
from powergossip.errors import BadInput
from powergossip.network import Network, Processes
from powergossip.optimizers.dgc import DGC, DGCSGD, optimizer_step
from powergossip.parameters import Layout
from tests.harness.loops import gradients
from tests.harness.loops import step as step_of

SHAPES = [(40, 30), (9,), (50, 3, 2, 2), (7, 5), (1,), (200, 100)]


def aggregation(
    n_workers: int, shapes: Any = SHAPES, **options: Any
) -> tuple[Network, DGCAggregation]:
    network = Network(topologies.make("ring", n_workers), Processes())
    return network, DGCAggregation(network, Layout(shapes), DGCConfig(**options))


def step(network: Network, aggregation: DGCAggregation, gradient: Tensor) -> Tensor:
    mean = step_of(network, aggregation, gradient)
    assert (gradient == 0).all()
    return mean


def matrices(layout: Layout) -> list[slice]:
    return [
        slice(start, start + prod(shape))
        for start, shape in zip(layout.starts, layout.shapes, strict=True)
        if len(shape) >= 2
    ]


# --- The mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_workers", "ratio"), [(1, 1), (3, 1), (3, 0.02)])
def test_16_bits_lose_nothing(n_workers: int, ratio: float) -> None:
    """Rounding errors, and values beyond the range, are sent later. All means are finite."""
    layout = Layout(SHAPES)
    network, a = aggregation(n_workers, compress_ratio=ratio, momentum=0, fp16_values=True)
    applied, given = torch.zeros(layout.size).double(), torch.zeros(layout.size).double()
    for t in range(20):
        fresh = 1e-4 * gradients(n_workers, layout, t)
        fresh[:, 7] = 1e5 * (t < 5)
        given += fresh.double().mean(0)
        applied += step(network, a, fresh)[0]
    assert a.state_dict()["kept"].any()
    found = applied + a.state_dict()["kept"].double().mean(0)
    rest = torch.arange(layout.size) != 7
    # The sum of n 16-bit numbers has a rounding error of its own.
    rounding = 1e-3 if ratio == 1 else 1e-4
    assert (found - given)[rest].norm() < rounding * given[rest].norm()
    assert found[7] == pytest.approx(given[7].item(), rel=1e-3)
    if ratio == 1:
        assert a.compression_rate == 2
        bits = 20 * round(2 * (n_workers - 1) * 16 * layout.size / n_workers)
        assert network.bits.tolist() == [bits] * n_workers


def test_vectors_are_sgd_with_momentum_at_any_fraction() -> None:
    layout = Layout([(9,), (40, 30)])
    network, a = aggregation(2, layout.shapes, momentum=0.8)
    u, vector = torch.zeros(9), slice(layout.starts[0], layout.starts[0] + 9)
    for t in range(20):
        gradient = gradients(2, layout, t)
        u = 0.8 * u + gradient.mean(0)[vector]
        assert (step(network, a, gradient)[0, vector] - u).norm() < 1e-5 * u.norm()


@pytest.mark.parametrize(
    ("nesterov", "masking", "clip"),
    [(False, True, None), (True, False, 10.0), (False, False, 10.0), (True, True, None)],
)
def test_it_is_the_papers_algorithm_with_exact_selection(
    nesterov: bool, masking: bool, clip: float | None
) -> None:
    """The paper's lines with an exact top-k, as for small tensors. Masking clears the momentum of
    sent elements."""
    n, m, shapes = 3, 0.7, [(20, 10), (6, 5)]
    layout = Layout(shapes)
    options: dict[str, Any] = {"nesterov": nesterov, "momentum_masking": masking, "clip": clip}
    network, a = aggregation(n, shapes, compress_ratio=0.05, momentum=m, **options)
    u, v = torch.zeros(n, layout.size), torch.zeros(n, layout.size)
    for t in range(20):
        g = (1 + t) * gradients(n, layout, t)
        expected = torch.zeros(layout.size)
        mean = step(network, a, g.clone())
        for i in range(n):
            if clip is not None:
                g[i] *= min(1, n**0.5 * clip / g[i].norm().item())
            if nesterov:
                u[i] = m * (u[i] + g[i])
                v[i] = v[i] + u[i] + g[i]
            else:
                u[i] = m * u[i] + g[i]
                v[i] = v[i] + u[i]
            for span in matrices(layout):
                count = ceil(0.05 * (span.stop - span.start))
                sent = v[i, span].abs() >= v[i, span].abs().sort(descending=True).values[count - 1]
                assert sent.sum() == count
                expected[span] += torch.where(sent, v[i, span], 0) / n
                v[i, span] = torch.where(sent, 0, v[i, span])
                if masking:
                    u[i, span] = torch.where(sent, 0, u[i, span])
        assert (mean[0] - expected).norm() < 1e-5 * expected.norm()
        state = a.state_dict()
        assert (state["kept"] - v).norm() < 1e-5 * v.norm()
        assert (state["momentum"] - u).norm() < 1e-5 * u.norm()


# --- Selection ----------------------------------------------------------------------------------

DATA: dict[str, Callable[[torch.Generator, int], Tensor]] = {
    "normal": lambda g, n: torch.randn(n, generator=g),
    "uniform": lambda g, n: torch.rand(n, generator=g) - 0.3,
    "heavy-tailed": lambda g, n: torch.randn(n, generator=g) / torch.randn(n, generator=g) ** 3,
    "tiny": lambda g, n: 1e-30 * torch.randn(n, generator=g),
    "constant": lambda g, n: torch.full((n,), -2.5),
    "zero": lambda g, n: torch.zeros(n),
    "ties": lambda g, n: torch.randint(-3, 4, (n,), generator=g).float(),
    "two values": lambda g, n: 1 + (torch.rand(n, generator=g) < 5e-4).float(),
    "columns": lambda g, n: torch.randn(n, generator=g) * (torch.arange(n) % 100 == 17),
    "growing": lambda g, n: torch.linspace(0, 1, n) ** 4,
}


@pytest.mark.parametrize("kind", DATA)
def test_the_selected_elements_are_the_largest_and_their_number_is_the_target(kind: str) -> None:
    for size, share in ((1, 0.25), (17, 0.06), (5_000, 0.004), (100_000, 0.001), (100_003, 0.25)):
        values = DATA[kind](torch.Generator().manual_seed(1), size)
        before, target = values.clone(), ceil(share * size)
        selector = Selector(size, share, DGCConfig(**LARGEST))
        positions = selector.positions(values, selector.sample(np.random.default_rng(0)))
        assert len(positions) == len(positions.unique())
        assert 1 <= len(positions) <= target
        if len(positions) < 0.8 * target:  # only where there are no others
            assert (values[positions] != 0).sum() == (values != 0).sum()
        chosen = torch.zeros(size, dtype=torch.bool).index_fill_(0, positions, True)
        if not chosen.all():
            assert values[chosen].abs().min() >= values[~chosen].abs().max()
        assert torch.equal(values, before)


LARGEST: dict[str, Any] = {"compress_upper_bound": 1.0}


@pytest.mark.parametrize("iterations", [0, 1, 10])
def test_a_sample_that_misleads_is_corrected(iterations: int) -> None:
    """The sampled elements are larger than the others."""
    config = DGCConfig(compress_upper_bound=1.0, max_adaptation_iters=iterations)
    selector = Selector(100_003, 0.02, config)
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    assert selector.stride > 1
    sample = slice(5, None, selector.stride)
    values[sample] *= 3
    found = selector.positions(values, sample)
    assert 0.8 * selector.target <= len(found) <= selector.target
    exact = torch.topk(values.abs(), selector.target).indices
    assert torch.isin(found, exact).all()


@pytest.mark.parametrize(
    ("kind", "lower", "upper"),
    [("normal", 0.95, 1.05), ("heavy-tailed", 0.95, 1.05), ("normal", 0.8, 2.0)],
)
def test_the_bounds_are_those_of_the_published_selection(
    kind: str, upper: float, lower: float
) -> None:
    values, size, share = DATA[kind](torch.Generator().manual_seed(2), 50_000), 50_000, 0.02
    config = DGCConfig(
        compress_upper_bound=upper, compress_lower_bound=lower, max_adaptation_iters=3
    )
    selector = Selector(size, share, config)
    random, endings = np.random.default_rng(1), set()
    for _ in range(40):
        sample = selector.sample(random)
        magnitudes, target = values.abs(), 1000
        sampled = magnitudes[sample].sort(descending=True).values
        threshold = sampled[ceil(share * len(sampled)) - 1].item()
        ending, expected = "no more iterations", (magnitudes > threshold).nonzero().view(-1)
        for _ in range(3):
            if len(expected) > upper * target:
                ending, expected = "surplus", magnitudes.topk(target).indices.sort().values
                break
            if len(expected) >= lower * target:
                ending = "within the bounds"
                break
            threshold *= lower
            expected = (magnitudes > threshold).nonzero().view(-1)
        if len(expected) < lower * target:
            ending, expected = "deficit", magnitudes.topk(target).indices.sort().values
        endings.add(ending)
        found = selector.positions(values, sample)
        order = found.sort().values
        assert torch.equal(order, expected[:target].sort().values), ending
    assert len(endings) > 1 or upper == 2.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_element_that_diverged_is_selected_at_the_end_of_memory_too(bad: float) -> None:
    """A surplus below the upper bound is cut to the first elements, but not with NaN among it."""
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    values[-1] = bad
    selector = Selector(50_000, 0.02, DGCConfig(compress_upper_bound=2.0))
    random = np.random.default_rng(1)
    for _ in range(10):
        assert 49_999 in selector.positions(values, selector.sample(random))


def test_a_sample_has_the_configured_size_and_meets_all_columns() -> None:
    for size in (100_000, 25_000_000, 2**22):
        for ratio in (0.01, 0.1):
            stride = Selector(size, 0.06, DGCConfig(sample_ratio=ratio)).stride
            assert ratio <= 1 / stride <= 1.5 * ratio
            assert gcd(size, stride) == 1
    assert Selector(1_000_000, 0.06, DGCConfig(sample_ratio=1)).stride == 1


def test_where_the_sample_starts_changes_by_step_and_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []
    positions = Selector.positions

    def spy(selector: Selector, values: Tensor, sample: Any) -> Tensor:
        assert 0 <= sample.start < sample.step == selector.stride
        starts.append(sample.start)
        return positions(selector, values, sample)

    monkeypatch.setattr(Selector, "positions", spy)
    layout = Layout([(1000, 100)])
    network, a = aggregation(4, layout.shapes, compress_ratio=0.02)
    for t in range(8):
        step(network, a, gradients(4, layout, t))
    assert len(set(starts)) > 20


# --- Cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_workers", "value", "index", "ratio"),
    [(1, 16, 32, 0.01), (4, 32, 32, 0.001), (4, 16, 64, 0.01), (4, 32, 64, 0.01)],
)
def test_bits_are_those_of_the_formula(
    n_workers: int, value: int, index: int, ratio: float
) -> None:
    """k positions and numbers, in whole words, to n − 1 workers; their length; the vectors. The
    published rate of 0.1 % is 500."""
    bits: dict[str, Any] = {"fp16_values": value == 16, "int32_indices": index == 32}
    network, a = aggregation(n_workers, compress_ratio=ratio, **bits)
    layout, n = Layout(SHAPES), n_workers
    step(network, a, gradients(n, layout, 0))
    target = sum(ceil(ratio * prod(s)) for s in SHAPES if len(s) >= 2)
    rest = torch.zeros(layout.size, dtype=torch.bool)
    for span in matrices(layout):
        rest[span] = True
    sent = (a.state_dict()["momentum"][:, rest] == 0).sum(1).tolist()  # masked
    assert all(0.8 * target <= count <= target for count in sent)
    own = [count * index + ceil(count * value / index) * index for count in sent]
    vectors = round(2 * (n - 1) * value * 10 / n)
    expected = [(n - 1) * (bits + 32) + vectors for bits in own]
    assert network.bits.tolist() == expected
    assert network.messages.tolist() == [4 * (n - 1)] * n
    whole = target * index + ceil(target * value / index) * index
    assert a.compression_rate == pytest.approx(32 * layout.size / (whole + 10 * value))
    _, large = aggregation(1, [(4000, 1000)], **bits)
    assert large.compression_rate == pytest.approx(32_000 / (value + index), rel=1e-3)


def test_only_vectors_and_only_matrices() -> None:
    for shapes in ([(5,), (3,)], [(30, 4)]):
        layout = Layout(shapes)
        network, a = aggregation(2, shapes, compress_ratio=0.5, momentum=0)
        applied, given = torch.zeros(layout.size), torch.zeros(layout.size)
        for t in range(3):
            gradient = gradients(2, layout, t)
            given += gradient.mean(0)
            applied += step(network, a, gradient)[0]
        assert torch.allclose(applied + a.state_dict()["kept"].mean(0), given, atol=1e-5)


# --- Warm-up -------------------------------------------------------------------------------------


def test_the_fraction_warms_up() -> None:
    config = DGCConfig(warmup_epochs=4)
    fractions = [config.fraction(epoch) for epoch in (0, 0.9, 1, 2, 3, 4, 100)]
    paper = [0.25, 0.25, 0.0625, 0.0156, 0.004, 0.001, 0.001]
    assert fractions == pytest.approx(paper, rel=0.02)
    listed = (0.25, 0.063, 0.015, 0.004, 0.001)
    config = DGCConfig(warmup_epochs=5, warmup_coeff=listed, compress_ratio=0.0005)
    assert [config.fraction(e + 0.5) for e in range(7)] == [*listed, 0.0005, 0.0005]
    assert DGCConfig().fraction(0) == DGCConfig(warmup_epochs=-1).fraction(0) == 0.001
    assert DGCConfig(compress_ratio=1000).fraction(0) == DGCConfig().fraction(0)
    layout, warming = Layout([(100, 100)]), {"warmup_epochs": 2, "warmup_coeff": (1, 0.1)}
    network, a = aggregation(1, layout.shapes, compress_ratio=0.01, **LARGEST, **warming)
    for epoch, expected in ((0, 10_000), (1, 1_000), (1.99, 1_000), (2, 100), (0, 10_000)):
        a.at_epoch(epoch)
        assert (step(network, a, gradients(1, layout, int(epoch))) != 0).sum() == expected


# --- In a training loop of your own -------------------------------------------------------------


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    inputs = torch.randn(64, 6)
    return model, inputs, inputs.sum(1, keepdim=True)


@pytest.mark.parametrize(("nesterov", "resumed"), [(False, True), (True, False)])
def test_weight_decay_is_that_of_torchs_sgd(nesterov: bool, resumed: bool) -> None:
    """Without gradients, for a fraction of 0.02, x follows SGD. The momentum is in state_dict."""
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov}
    start = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    x, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    dgc = DGC([x], DGCConfig(compress_ratio=0.02, **options))
    optimizer = DGCSGD([x], lr=0.1, weight_decay=0.02, **options)
    sgd = torch.optim.SGD([theirs], lr=0.1, weight_decay=0.02, **options)
    x.grad, theirs.grad = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(100):
        if resumed and t == 3:
            state = optimizer.state_dict()
            optimizer = DGCSGD([x], lr=0.1)
            optimizer.load_state_dict(state)
        optimizer_step(optimizer, dgc)
        sgd.step()
    assert (x - theirs).norm() < 1e-5 * theirs.norm()
    assert theirs.norm() < 0.2 * start.norm()


def test_the_decay_of_dgcsgd_is_dampened_as_published() -> None:
    x = nn.Parameter(torch.tensor([4.0]))
    optimizer = DGCSGD([x], lr=0.5, momentum=0.5, dampening=0.25, weight_decay=0.1)
    optimizer.step()
    assert x.item() == 4.0, "there is no gradient"
    decay, d = [], 0.0
    for t in range(3):
        x.grad = torch.tensor([1.0])
        decay.append(0.1 * x.item())
        d = 0.5 * d + 0.75 * decay[-1] if t else decay[-1]
        expected = x.item() - 0.5 * (1 + d)
        optimizer.step()
        assert x.item() == pytest.approx(expected)
    for bad in ({"lr": -1}, {"momentum": -0.1}, {"weight_decay": -1}, {"nesterov": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            DGCSGD([x], **{"lr": 0.1, **bad})  # type: ignore[arg-type]


def kept(dgc: DGC) -> Tensor:
    found: Tensor = dgc.state_dict()["aggregation"]["kept"]
    return found.clone()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum.* use"),
        (lambda p: torch.optim.AdamW(p), "momentum.* use"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5), "momentum.* use"),
        (lambda p: DGCSGD(p, lr=0.1), "momentum.* use"),
        (lambda p: DGCSGD(p, lr=0.1, momentum=0.9, nesterov=True), "momentum.* use"),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3), None),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.999)), None),
    ],
)
def test_an_optimizer_with_momentum_is_rejected_before_anything_changes(
    make: Any, message: str | None
) -> None:
    model, inputs, targets = model_and_data()
    dgc = DGC(model.named_parameters(), DGCConfig(momentum=0.9))
    optimizer = make(model.parameters())
    (model(inputs) - targets).square().mean().backward()
    before, bias = kept(dgc), model[2].bias  # type: ignore[index]
    if message is None:
        optimizer_step(optimizer, dgc)
        bias.grad, message = None, r"2\.bias.* has no gradient"
        before = kept(dgc)
    gradient = model[0].weight.grad.clone()  # type: ignore[index]
    with pytest.raises(ValueError, match=message):
        optimizer_step(optimizer, dgc)
    assert torch.equal(kept(dgc), before)
    assert torch.equal(model[0].weight.grad, gradient)  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress_ratio": 0}, "compress_ratio=0: use "),
        ({"compress_upper_bound": 0.9}, "compress_upper_bound=0.9: use "),
        ({"compress_lower_bound": 0}, "compress_lower_bound=0: use "),
        ({"sample_ratio": 0.005}, "sample_ratio=0.005: use "),
        ({"max_adaptation_iters": -1}, "max_adaptation_iters=-1: use "),
        ({"momentum": 1}, "momentum=1: use "),
        ({"clip": 0}, "clip=0: use "),
        ({"warmup_epochs": -2}, "warmup_epochs=-2: use "),
        ({"seed": -1}, "seed=-1: use "),
        ({"warmup_epochs": 3, "warmup_coeff": (0.2, 0.1)}, "warmup_coeff=.*warmup_epochs=3"),
        ({"warmup_epochs": 2, "warmup_coeff": (0.2, 0)}, "warmup_coeff=.*0"),
    ],
)
def test_values_that_make_no_sense_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        DGCConfig(**options)


def test_odd_parameters_are_rejected() -> None:
    with pytest.raises(ValueError, match="epoch=-1"):
        DGCConfig().fraction(-1)
    for dtype in (torch.int64, torch.float64):
        with pytest.raises(BadInput, match=r"parameter 1.*\(3, 2\) is torch.*use "):
            DGC([torch.zeros(2, 2), torch.zeros(3, 2, dtype=dtype)])
