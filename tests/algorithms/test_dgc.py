"""Laws of Deep Gradient Compression: nothing is lost, the largest are sent, ratio 1 is SGD."""

import json
from collections.abc import Callable
from math import ceil, gcd, prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import dgc_selection
from powergossip import topologies
from powergossip.algorithms.dgc import CLIPPING, DGCAggregation, DGCConfig, Selector
from powergossip.errors import BadInput
from powergossip.network import Network, Processes, processes
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


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_fraction_of_1_in_16_bits_loses_nothing(n_workers: int) -> None:
    """Rounding errors, and values beyond the range, are sent later. All means are finite."""
    layout = Layout(SHAPES)
    network, a = aggregation(n_workers, compress_ratio=1, momentum=0, fp16_values=True)
    assert a.compression_rate == 2
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
    assert (found - given)[rest].norm() < 1e-3 * given[rest].norm()
    assert found[7] == pytest.approx(given[7].item(), rel=1e-3)
    assert (
        network.bits.tolist()
        == [20 * round(2 * (n_workers - 1) * 16 * layout.size / n_workers)] * n_workers
    )


def test_vectors_are_sgd_with_momentum_at_any_fraction() -> None:
    layout = Layout([(9,), (40, 30)])
    network, a = aggregation(2, layout.shapes, momentum=0.8)
    u, vector = torch.zeros(9), slice(layout.starts[0], layout.starts[0] + 9)
    for t in range(20):
        gradient = gradients(2, layout, t)
        u = 0.8 * u + gradient.mean(0)[vector]
        assert (step(network, a, gradient)[0, vector] - u).norm() < 1e-5 * u.norm()


@pytest.mark.parametrize("n_workers", [1, 3])
@pytest.mark.parametrize("fp16_values", [False, True])
@pytest.mark.parametrize("int32_indices", [False, True])
def test_the_means_and_the_accumulated_elements_sum_to_the_gradients(
    n_workers: int, fp16_values: bool, int32_indices: bool
) -> None:
    """Σ_t mean_t + mean_i v_i = Σ_t mean_i g_i, with rounding errors of sent values in v."""
    network, a = aggregation(
        n_workers,
        compress_ratio=0.02,
        momentum=0,
        fp16_values=fp16_values,
        int32_indices=int32_indices,
    )
    layout = Layout(SHAPES)
    applied, given = torch.zeros(layout.size).double(), torch.zeros(layout.size).double()
    for t in range(40):
        fresh = gradients(n_workers, layout, t)
        fresh[:, layout.starts[0]] *= 1e5  # beyond the range of 16 bits
        given += fresh.double().mean(0)
        applied += step(network, a, fresh)[0]
    kept = a.state_dict()["kept"].double().mean(0)
    assert (applied + kept - given).norm() < 1e-4 * given.norm()
    rest = torch.arange(layout.size) != layout.starts[0]
    assert (applied + kept - given)[rest].norm() < 1e-4 * given[rest].norm()
    assert kept[rest].norm() > 0.1 * given[rest].norm()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("clip", [None, 10.0])
def test_it_is_the_papers_algorithm_with_exact_selection(
    nesterov: bool, masking: bool, clip: float | None
) -> None:
    """The paper's lines with an exact top-k, as for small tensors."""
    n, m, shapes = 3, 0.7, [(20, 10), (6, 5)]
    layout = Layout(shapes)
    network, a = aggregation(
        n,
        shapes,
        compress_ratio=0.05,
        momentum=m,
        nesterov=nesterov,
        momentum_masking=masking,
        clip=clip,
    )
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


@pytest.mark.parametrize("masking", [False, True])
def test_masking_clears_the_momentum_of_sent_elements(masking: bool) -> None:
    network, a = aggregation(1, compress_ratio=0.1, momentum_masking=masking)
    layout = Layout(SHAPES)
    for t in range(3):
        mean = step(network, a, gradients(1, layout, t))[0]
        state = a.state_dict()
        for span in matrices(layout):
            sent = mean[span] != 0
            assert sent.any()
            assert (state["kept"][0, span][sent] == 0).all()
            assert ((state["momentum"][0, span][sent] == 0) == masking).all()
            assert (state["momentum"][0, span][~sent] != 0).all()


@pytest.mark.parametrize("fp16_values", [False, True])
def test_values_that_diverged_are_visible(fp16_values: bool) -> None:
    for bad in (torch.nan, torch.inf):
        network, a = aggregation(2, fp16_values=fp16_values)
        gradient = gradients(2, Layout(SHAPES), 0)
        gradient[1, Layout(SHAPES).starts[5] + 7_777] = bad
        assert not torch.isfinite(step(network, a, gradient)).all()


# --- Clipping ------------------------------------------------------------------------------------


def test_independent_gradients_whose_mean_is_short_are_not_clipped() -> None:
    """16 workers, norms of 2: the mean has a norm near 2/√16 = 0.5, below the threshold of 1."""
    layout = Layout(SHAPES)
    network, a = aggregation(16, compress_ratio=1, momentum=0, clip=1.0)
    gradient = gradients(16, layout, 0)
    gradient *= 2 / gradient.norm(dim=1, keepdim=True)
    expected = gradient.mean(0)
    mean = step(network, a, gradient.clone())[0]
    assert 0.4 < expected.norm() < 0.6
    assert (mean - expected).norm() < 1e-5 * expected.norm()
    equal = step(network, a, gradient[:1].expand(16, -1) * 100)[0]
    assert equal.norm() == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize("clip_by", CLIPPING)
@pytest.mark.parametrize("fraction", [1, 0.05])
def test_a_gradient_is_clipped_before_it_is_accumulated(clip_by: str, fraction: float) -> None:
    n, clip, layout = 3, 0.7, Layout(SHAPES)
    given = None if clip_by == "global-value" else clip
    network, a = aggregation(
        n, compress_ratio=fraction, momentum=0, clip=given, clip_by=clip_by, fp16_values=False
    )
    g = gradients(n, layout, 1) * torch.tensor([[0.01], [0.5], [1]])
    expected = torch.empty_like(g)
    tensors = [slice(s, s + prod(shape)) for s, shape in zip(layout.starts, SHAPES, strict=True)]
    for span in tensors:
        norms = [g[i, span].norm().item() for i in range(n)]
        together = (sum(norm**2 for norm in norms) / n) ** 0.5
        for i in range(n):
            expected[i, span] = {
                "gradient": g[i, span] * min(1, n**0.5 * clip / g[i].norm().item()),
                "norm": g[i, span] * min(1, clip / norms[i]),
                "value": g[i, span].clamp(-clip, clip),
                "global-norm": g[i, span] * min(1, clip / together),
                "global-value": g[i, span].clamp(-together, together),
            }[clip_by]
    assert not torch.allclose(expected, g, rtol=0.01)
    mean = step(network, a, g.clone())[0]
    found = mean + a.state_dict()["kept"].mean(0)
    assert (found - expected.mean(0)).norm() < 1e-5 * expected.mean(0).norm()
    bits = network.bits[0]
    plain, b = aggregation(n, compress_ratio=fraction)
    step(plain, b, g)
    sent_before = round(2 * (n - 1) * 32 * len(SHAPES) / n) if clip_by.startswith("global") else 0
    if fraction == 1:
        assert bits - plain.bits[0] == sent_before


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
@pytest.mark.parametrize("size", [1, 17, 5_000, 100_000, 300_007])
@pytest.mark.parametrize("share", [0.001, 0.004, 0.06, 0.25])
def test_the_selected_elements_are_the_largest_and_their_number_is_the_target(
    kind: str, size: int, share: float
) -> None:
    values = DATA[kind](torch.Generator().manual_seed(1), size)
    before = values.clone()
    target = ceil(share * size)
    for options in (EXACT, EXACT | {"strided_sample": False}):
        selector = Selector(size, share, DGCConfig(**options))
        positions = selector.positions(values, selector.sample(np.random.default_rng(0)))
        assert len(positions) == len(positions.unique())
        assert 1 <= len(positions) <= target
        if len(positions) < 0.8 * target:  # only where there are no others
            assert (values[positions] != 0).sum() == (values != 0).sum()
        chosen = torch.zeros(size, dtype=torch.bool).index_fill_(0, positions, True)
        if not chosen.all():
            assert values[chosen].abs().min() >= values[~chosen].abs().max()
    assert torch.equal(values, before)


EXACT: dict[str, Any] = {"compress_upper_bound": 1.0}


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


@pytest.mark.parametrize("upper", [1.05, 1.3, 2.0])
@pytest.mark.parametrize("lower", [0.8, 0.95])
@pytest.mark.parametrize("resample", [True, False])
@pytest.mark.parametrize("kind", ["normal", "growing"])
def test_the_bounds_are_those_of_the_published_selection(
    kind: str, upper: float, lower: float, resample: bool
) -> None:
    values, size, share = DATA[kind](torch.Generator().manual_seed(2), 50_000), 50_000, 0.02
    config = DGCConfig(
        compress_upper_bound=upper,
        compress_lower_bound=lower,
        resample=resample,
        max_adaptation_iters=3,
        strided_sample=False,
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
                ending = "surplus"
                if resample:
                    expected = magnitudes.topk(target).indices.sort().values
                    break
                threshold *= upper
            elif len(expected) < lower * target:
                threshold *= lower
            else:
                ending = "within the bounds"
                break
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


def test_a_sample_is_strided_or_uniform() -> None:
    random = np.random.default_rng(0)
    strided = Selector(100_000, 0.05, DGCConfig())
    uniform = Selector(100_000, 0.05, DGCConfig(strided_sample=False))
    assert strided.stride == uniform.stride > 1
    for _ in range(3):
        one, other = strided.sample(random), uniform.sample(random)
        assert isinstance(one, slice)
        assert isinstance(other, Tensor)
        assert one.step == strided.stride
        assert len(other) == ceil(100_000 / strided.stride)
        assert 0 <= other.min() < 1000
        assert 99_000 < other.max() < 100_000
        assert len(other.diff().unique()) > 0.9 * len(other) / 2, "no common distance"


def test_the_sample_has_the_configured_size_and_meets_all_columns() -> None:
    for size in (100_000, 1_000_000, 25_000_000, 2**22):
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


@pytest.mark.parametrize("n_workers", [1, 4])
@pytest.mark.parametrize(("fp16_values", "value"), [(True, 16), (False, 32)])
@pytest.mark.parametrize(("int32_indices", "index"), [(True, 32), (False, 64)])
@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_bits_are_those_of_the_formula(
    n_workers: int, fp16_values: bool, value: int, int32_indices: bool, index: int, ratio: float
) -> None:
    """k positions and numbers, in whole words, to n − 1 workers; their length; the vectors."""
    network, a = aggregation(
        n_workers, compress_ratio=ratio, fp16_values=fp16_values, int32_indices=int32_indices
    )
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


def test_the_rate_is_the_published_one() -> None:
    """0.1 % of the elements with positions of 32 bits: a rate of 500; with 16-bit values 667."""
    for fp16_values, rate in ((False, 500), (True, 667)):
        _, a = aggregation(1, [(4000, 1000)], int32_indices=True, fp16_values=fp16_values)
        assert a.compression_rate == pytest.approx(rate, rel=1e-3)


def test_the_benchmark_prints_its_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    dgc_selection.main(["size=200_000", "share=0.01", "rounds=2", "seconds=0.1"])
    line = json.loads(capsys.readouterr().out)
    assert line["target"] == 2_000
    assert line["recall"] > 0.8
    assert min(line["selection_ms"], line["topk_ms"]) > 0


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
    config = DGCConfig(warmup_epochs=4, warmup_coeff=0.1, compress_ratio=500)
    found = [config.fraction(e) for e in range(6)]
    assert found == pytest.approx([0.1, 0.01, 0.002, 0.002, 0.002, 0.002])
    assert DGCConfig().fraction(0) == DGCConfig(warmup_epochs=-1).fraction(0) == 0.001
    assert DGCConfig(compress_ratio=1000).fraction(0) == DGCConfig().fraction(0)


def test_the_fraction_is_that_of_the_epoch() -> None:
    layout = Layout([(100, 100)])
    network, a = aggregation(
        1, layout.shapes, warmup_epochs=2, warmup_coeff=(1, 0.1), compress_ratio=0.01, **EXACT
    )
    for epoch, expected in (
        (0, 10_000),
        (1, 1_000),
        (1.99, 1_000),
        (2, 100),
        (3, 100),
        (0, 10_000),
    ):
        a.at_epoch(epoch)
        assert (step(network, a, gradients(1, layout, int(epoch))) != 0).sum() == expected


# --- In several processes ------------------------------------------------------------------------


@pytest.mark.parallel([4])
@pytest.mark.parametrize("hosted", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"clip": 60.0},
        {"clip": 60.0, "fp16_values": True},
        {"clip": 10.0, "clip_by": "global-norm", "strided_sample": False, "resample": False},
    ],
)
def test_processes_are_one_process(hosted: int, options: dict[str, Any]) -> None:
    topology = topologies.make("ring", hosted * processes().size)
    layout = Layout([(300, 100), (9,), (12, 5)])
    config = DGCConfig(compress_ratio=0.011, **options)
    several, one = Network(topology), Network(topology, Processes())
    apart = DGCAggregation(several, layout, config)
    alone = DGCAggregation(one, layout, config)
    vectors = torch.zeros(layout.size, dtype=torch.bool)
    vectors[layout.spans([1])[0]] = True
    here = list(several.workers)
    for t in range(5):
        gradient = gradients(topology.n_workers, layout, t)
        gradient *= torch.rand(len(gradient), 1, generator=torch.Generator().manual_seed(t))
        expected = step(one, alone, gradient.clone())
        mean = step(several, apart, gradient[here].clone())
        assert torch.equal(mean[:, ~vectors], expected[here][:, ~vectors])
        assert torch.allclose(mean, expected[here], atol=1e-6)
    for name in ("kept", "momentum"):
        assert torch.equal(apart.state_dict()[name], alone.state_dict()[name][here])
    assert several.bits.tolist() == one.bits[here].tolist()
    assert several.messages.tolist() == one.messages[here].tolist()


@pytest.mark.parallel([4])
def test_anyones_training_loop_between_processes() -> None:
    """A fraction of 1 is SGD on the mean over the processes; with less they stay together too."""
    who = processes()
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(who.rank))
    targets = inputs.sum(1, keepdim=True)
    for ratio in (1.0, 0.1):
        torch.manual_seed(who.rank)  # not the same at first
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
        dgc = DGC(model.named_parameters(), DGCConfig(compress_ratio=ratio, clip=50.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(150):
            loss = (model(inputs) - targets).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer_step(optimizer, dgc)
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        for other in who.gather(parameters):
            assert torch.equal(other, parameters)
        assert losses[-1] < 0.1 * losses[0]
        assert dgc.bits > 0


# --- In a training loop of your own -------------------------------------------------------------


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    inputs = torch.randn(64, 6)
    return model, inputs, inputs.sum(1, keepdim=True)


@pytest.mark.parametrize("batches", [1, 4])
def test_several_batches_a_step_are_one_large_batch(batches: int) -> None:
    parameters = []
    for number in (1, batches):
        model, inputs, targets = model_and_data()
        config = DGCConfig(compress_ratio=0.1, num_batches_per_step=number)
        dgc = DGC(model.parameters(), config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            before = [p.detach().clone() for p in model.parameters()]
            for call, (x, y) in enumerate(
                zip(inputs.chunk(number), targets.chunk(number), strict=True), start=1
            ):
                optimizer.zero_grad()  # allowed, not needed
                (model(x) - y).square().mean().backward()
                optimizer_step(optimizer, dgc)
                same = map(torch.equal, before, model.parameters())
                assert all(same) == (call < number), "only the last one steps"
                assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        parameters.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(parameters[0], parameters[1], atol=1e-5)


def test_gradients_that_are_none_or_odd_are_rejected_before_anything_changes() -> None:
    model, inputs, targets = model_and_data()
    dgc = DGC(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = dgc.state_dict()
    with pytest.raises(ValueError, match=r"0\.weight.* has no gradient"):
        optimizer_step(optimizer, dgc)
    (model(inputs) - targets).square().mean().backward()
    model[2].bias.grad = None  # type: ignore[index]
    with pytest.raises(ValueError, match=r"2\.bias.* has no gradient"):
        optimizer_step(optimizer, dgc)
    assert torch.equal(dgc.state_dict()["gradient"], before["gradient"])

    embedding = nn.Embedding(10, 3, sparse=True)
    dgc = DGC(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 0.*\(10, 3\).*sparse"):
        optimizer_step(torch.optim.SGD(embedding.parameters(), lr=0.1), dgc)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_fraction_of_1_is_torchs_sgd_with_weight_decay(nesterov: bool) -> None:
    """DGC and DGCSGD in place of SGD with momentum and weight decay, for 50 steps of a model."""
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov}
    model, inputs, targets = model_and_data()
    theirs, _, _ = model_and_data()
    dgc = DGC(model.parameters(), DGCConfig(compress_ratio=1, **options))
    optimizer = DGCSGD(model.parameters(), lr=0.02, weight_decay=0.01, **options)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.02, weight_decay=0.01, **options)
    for _ in range(50):
        (model(inputs) - targets).square().mean().backward()
        optimizer_step(optimizer, dgc)
        sgd.zero_grad()
        (theirs(inputs) - targets).square().mean().backward()
        sgd.step()
    for found, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_weight_decay_is_that_of_torchs_sgd(nesterov: bool, resumed: bool) -> None:
    """Without gradients, for a fraction of 0.02, x follows SGD. The momentum is in state_dict."""
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov}
    start = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    x, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    dgc = DGC([x], DGCConfig(compress_ratio=0.02, **options))
    optimizer = DGCSGD([x], lr=0.1, weight_decay=0.01, **options)
    sgd = torch.optim.SGD([theirs], lr=0.1, weight_decay=0.01, **options)
    x.grad, theirs.grad = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(200):
        if resumed and t == 3:
            state = optimizer.state_dict()
            optimizer = DGCSGD([x], lr=0.1)
            optimizer.load_state_dict(state)
        optimizer_step(optimizer, dgc)
        sgd.step()
    assert (x - theirs).norm() < 1e-5 * theirs.norm()
    assert 0.1 < theirs.norm() / start.norm() < 0.2


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


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.5),
        lambda p: DGCSGD(p, lr=0.1),
        lambda p: DGCSGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ],
)
def test_an_optimizer_with_momentum_is_rejected_before_anything_changes(optimizer: Any) -> None:
    model, inputs, targets = model_and_data()
    dgc = DGC(model.parameters(), DGCConfig(momentum=0.9))
    (model(inputs) - targets).square().mean().backward()
    gradient = model[0].weight.grad.clone()  # type: ignore[index]
    before = dgc.state_dict()
    with pytest.raises(ValueError, match=r"momentum.* use"):
        optimizer_step(optimizer(model.parameters()), dgc)
    assert torch.equal(dgc.state_dict()["gradient"], before["gradient"])
    assert torch.equal(model[0].weight.grad, gradient)  # type: ignore[index]


def test_other_optimizers_without_momentum_are_accepted() -> None:
    model, inputs, targets = model_and_data()
    dgc = DGC(model.parameters())
    for optimizer in (torch.optim.RMSprop, torch.optim.Adagrad):
        (model(inputs) - targets).square().mean().backward()
        optimizer_step(optimizer(model.parameters(), lr=1e-3), dgc)
    betas = torch.optim.Adam(model.parameters(), betas=(0.0, 0.999))
    (model(inputs) - targets).square().mean().backward()
    optimizer_step(betas, dgc)


def test_an_optimizer_of_other_parameters_is_rejected() -> None:
    model, inputs, targets = model_and_data()
    dgc = DGC(model.parameters())
    (model(inputs) - targets).square().mean().backward()
    with pytest.raises(ValueError, match="same list"):
        optimizer_step(torch.optim.SGD(list(model.parameters())[:2], lr=0.1), dgc)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float64])
def test_odd_parameters_are_rejected(dtype: torch.dtype) -> None:
    odd = torch.zeros(3, 2, dtype=dtype)
    with pytest.raises(BadInput, match=r"parameter 1.*\(3, 2\) is torch.*use "):
        DGC([torch.zeros(2, 2), odd])


def test_no_parameters_and_too_many_workers_are_rejected() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        DGC([])
    with pytest.raises(ValueError, match="hosts 3 workers"):
        DGC([torch.zeros(2, 2)], network=Network(topologies.make("ring", 3), Processes()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress_ratio", 0),
        ("compress_ratio", -0.1),
        ("compress_ratio", float("inf")),
        ("compress_upper_bound", 0.9),
        ("compress_lower_bound", 0),
        ("compress_lower_bound", 1),
        ("clip_by", "tensor"),
        ("warmup_coeff", 1.5),
        ("warmup_coeff", 0),
        ("compress_ratio", float("nan")),
        ("sample_ratio", 0.005),
        ("sample_ratio", 1.1),
        ("max_adaptation_iters", -1),
        ("momentum", 1),
        ("momentum", -0.1),
        ("clip", 0),
        ("clip", float("inf")),
        ("warmup_epochs", -2),
        ("num_batches_per_step", 0),
        ("num_batches_per_step", 1.5),
        ("seed", -1),
    ],
)
def test_values_that_make_no_sense_are_rejected(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{key}={value}: use "):
        DGCConfig(**{key: value})


def test_warm_up_lists_that_make_no_sense_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"warmup_coeff=.*warmup_epochs=3"):
        DGCConfig(warmup_epochs=3, warmup_coeff=(0.2, 0.1))
    with pytest.raises(ValueError, match=r"warmup_coeff=.*0"):
        DGCConfig(warmup_epochs=2, warmup_coeff=(0.2, 0))
    with pytest.raises(ValueError, match="epoch=-1"):
        DGCConfig().fraction(-1)


def test_options_that_exclude_each_other_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^compress_upper_bound=1\.0: .*resample"):
        DGCConfig(compress_upper_bound=1.0, resample=False)
    with pytest.raises(ValueError, match=r"^clip=None: .*clip_by=value"):
        DGCConfig(clip_by="value")
    with pytest.raises(ValueError, match=r"^clip=1: .*clip_by=global-value"):
        DGCConfig(clip=1, clip_by="global-value")
