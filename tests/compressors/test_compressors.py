"""The laws of compressors, for every one in the registry, and those of single compressors."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import ceil, log2, prod
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from powergossip import compressors, randomness
from powergossip import registry_options as _options
from powergossip.compressors import (
    COMPRESSORS,
    QSGD,
    SVD,
    Codec,
    Compressor,
    RandomBlock,
    RandomK,
    Rounding,
    Senders,
    SignAndNorm,
    Stream,
    TopK,
    pack,
    packed_size,
    sparse,
    unpack,
)
from powergossip.compressors.codec import AT_ONCE
from powergossip.parameters import Layout, Stack
from tests.harness.helpers import with_one_each

SHAPES = [(4, 3), (6, 5), (3,), (4, 3), (2, 2, 3), (1, 7), (), (5,), (3,), (20, 11)]
RANDOM: list[dict[str, Any]] = [{}, {"keep_ratio": 0.5}, {"keep_ratio": 1.0}, {"rank": 1}]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [{}, {"levels": 1}, {"levels": 3, "unbiased": True}, {"levels": 127}],
    "rounding": [{}, {"levels": 1}, {"levels": 3}, {"levels": 127}],
    "random-k": RANDOM,
    "random-block": RANDOM,
    "svd": [{}, {"rank": 2}, {"rank": 100}],
    "top-k": [{}, {"keep_ratio": 0.3}, {"keep_ratio": 1.0}, {"rank": 3}],
}
EVERY = [(name, options) for name in COMPRESSORS for options in VARIANTS.get(name, [dict()])]
every_compressor = pytest.mark.parametrize(("name", "options"), EVERY)


def every_compressor_and(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Defaults with all values, and other options with one of them."""
    cases = [(*row, value) for row, value in with_one_each(EVERY, values, lambda row: row[0])]
    return pytest.mark.parametrize(("name", "options", name), cases)


shapes_of_matrices = st.tuples(st.integers(1, 12), st.integers(1, 12))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stream(stack: Stack, workers: int = 1) -> Stream:
    """The random stream of a stack's layers, for 1000 entries a worker."""
    key = randomness.keys(0, "test", [()])[0]
    senders = Senders(key, torch.arange(workers), 0, Layout([(1000,)]))
    return Stream(senders, stack, stack, None, {})


def draws_of(matrices: int, numbers: int) -> Callable[[int], Tensor]:
    """Random int64 [matrix, count]."""
    key = randomness.keys(0, "test", [()])[0]
    starts = numbers * torch.arange(matrices)
    return lambda count: randomness.bits(key, 0, (count,), starts)


def compressed(compressor: Compressor, v: Tensor, counter: int = 0) -> Tensor:
    """C(v) for v [worker, row, column], all the way through a message."""
    codec = Codec(Layout([v.shape[1:]]), compressor, range(len(v)))
    message = codec.encode(v.flatten(1), counter)
    return codec.decode(message, codec.workers, counter).view_as(v)


def squares(v: Tensor) -> Tensor:
    """‖v‖² of each matrix."""
    return v.double().square().sum((-1, -2))


# --- Every compressor -----------------------------------------------------------------------------


@every_compressor
def test_messages_do_not_depend_on_the_layout_of_workers(
    name: str, options: dict[str, Any]
) -> None:
    """Receivers decode them as the sender."""
    layout, compressor = Layout(SHAPES), compressors.make(name, **options)
    x = normal(4, layout.size)
    codec = Codec(layout, compressor, range(4), seed=1)
    message = codec.encode(x, 7)
    for worker in range(4):
        alone = Codec(layout, compressor, [worker], seed=1).encode(x[worker : worker + 1], 7)
        assert torch.equal(alone[0], message[worker])
    own = codec.decode(message, codec.workers, 7).clone()
    neighbors = torch.tensor([[1, 3], [0, 2], [1, 3], [0, 2]])
    assert torch.equal(codec.decode(message[neighbors], neighbors, 7), own[neighbors])
    receiver, sender = Codec(layout, compressor, [9], seed=1), torch.tensor([2])
    assert torch.equal(receiver.decode(message[2:3].clone(), sender, 7)[0], own[2])


@every_compressor
def test_a_batch_equals_its_matrices_one_by_one(name: str, options: dict[str, Any]) -> None:
    compressor = compressors.make(name, **options)
    v = normal(2, 3, 9, 4)  # [worker, layer, row, column]
    codes = compressor.compress(v, stream(Stack(9, 4, 3, 50), 2))
    fields = [field.float() if field.dtype is torch.bool else field for field in codes]
    out = torch.zeros_like(v)
    compressor.decompress(tuple(fields), out, stream(Stack(9, 4, 3, 50), 2))
    for layer in range(3):
        only = stream(Stack(9, 4, 1, 50 + 36 * layer), 2)
        one = compressor.compress(v[:, layer : layer + 1], only)
        for part, field in zip(one, codes, strict=True):
            assert torch.equal(part, field[:, layer : layer + 1])
        result = torch.zeros(2, 1, 9, 4)
        fields_of_one = tuple(field[:, layer : layer + 1] for field in fields)
        compressor.decompress(fields_of_one, result, only)
        assert torch.equal(result, out[:, layer : layer + 1])


@every_compressor
def test_add_adds_the_decoded_elements(name: str, options: dict[str, Any]) -> None:
    layout = Layout(SHAPES)
    codec = Codec(layout, compressors.make(name, **options), [3, 1])
    message = codec.encode(normal(2, layout.size), 4)
    for senders in (torch.tensor([3, 1]), torch.tensor([[3], [1]])):
        sent = message.view(*senders.shape, -1)
        out = normal(*senders.shape, layout.size, seed=1)
        expected = out + codec.decode(sent, senders, 4)
        codec.add(sent, senders, 4, out)
        assert torch.equal(out, expected)
        codec.add(sent, senders, 4, out.copy_(expected))
        assert torch.equal(out, expected + codec.decode(sent, senders, 4))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_senders_of_large_messages_are_decoded_one_after_the_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, neighbors = Layout([*SHAPES, (300, 230)]), torch.tensor([[1, 2], [0, 2], [0, 1]])
    x, found = normal(3, layout.size), []
    for limit in (AT_ONCE, 0):
        monkeypatch.setattr("powergossip.compressors.codec.AT_ONCE", limit)
        made = Codec(layout, compressors.make(name), range(3))
        message = made.encode(x, 5, minus=x.flip(0))
        found.append(made.decode(message[neighbors], neighbors, 5))
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", [RandomK, RandomBlock])
def test_all_workers_send_the_same_random_entries_and_others_in_the_next_step(
    kind: type[RandomK | RandomBlock],
) -> None:
    layout, compressor = Layout([(30, 20)]), kind(0.1)
    x = torch.ones(3, layout.size)
    codec = Codec(layout, compressor, [0, 1, 2], seed=5)
    first = codec.decode(codec.encode(x, 0), codec.workers, 0).clone()
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    second = codec.decode(codec.encode(x, 1), codec.workers, 1)
    assert not torch.equal(first, second)
    assert torch.equal(codec.decode(codec.encode(x, 0), codec.workers, 0), first)


def formula(name: str, options: dict[str, Any], rows: int, columns: int) -> int:
    """Bits of a matrix' part of a message; a whole message ends with a whole byte."""
    n = rows * columns
    options = {**_options.defaults(COMPRESSORS[name]), **options}
    kept = max(1, int(options.get("keep_ratio", 0.0) * n + 1e-9))
    rank = options.get("rank") or 1
    match name:
        case "identity":
            return 32 * n
        case "sign-and-norm":
            return 32 + n
        case "qsgd" | "rounding":
            return 32 + n * ceil(log2(2 * options["levels"] + 1))
        case "random-k" | "random-block":
            if options["rank"]:
                kept = min(n, options["rank"] * (rows + columns))
            return 32 * kept
        case "svd":
            return 32 * min(n, min(rank, rows, columns) * (rows + columns))
        case "top-k":
            if options["rank"]:
                ratio = options["rank"] * (rows + columns) / (4 * rows * columns)
                kept = min(n, max(1, int(ratio * n + 1e-9)))
            return kept * (32 + (8 if n <= 256 else 16 if n <= 65536 else 32))
    raise AssertionError(f"which formula has {name}?")


@every_compressor
def test_sizes_are_those_of_the_formulas(name: str, options: dict[str, Any]) -> None:
    compressor = compressors.make(name, **options)
    for shape in [(1, 1), (1, 7), (10, 1), (9, 16), (16, 16), (257, 1), (256, 256), (256, 257)]:
        assert compressors.size(compressor, *shape) == ceil(formula(name, options, *shape) / 8)
    layout = Layout(SHAPES)
    codec = Codec(layout, compressor, [0, 1])
    matrices = [(s[0], prod(s[1:])) if s else (1, 1) for s in SHAPES]
    assert codec.size == ceil(sum(formula(name, options, *shape) for shape in matrices) / 8)
    message = codec.encode(normal(2, layout.size), 0)
    assert message.dtype == torch.uint8
    assert message.shape == (2, codec.size)
    assert message.is_contiguous()


def contraction(compressor: Compressor, v: Tensor) -> Tensor:
    """δ of each matrix."""
    numbers = prod(v.shape[-2:])
    match compressor:
        case TopK():
            return torch.tensor(compressor.kept(*v.shape[-2:]) / numbers).double()
        case RandomK() | RandomBlock():
            return torch.tensor(compressor.fields(*v.shape[-2:])[0].length / numbers).double()
        case SignAndNorm():
            return v.double().abs().sum((-1, -2)) ** 2 / (numbers * squares(v))
        case SVD():
            values = torch.linalg.svdvals(v.double())
            return values[..., : compressor.rank].square().sum(-1) / squares(v)
        case Rounding():
            half = v.double().abs().amax((-1, -2), keepdim=True) / (2 * compressor.levels)
            return 1 - squares(torch.minimum(v.double().abs(), half)) / squares(v)
        case QSGD():
            return torch.tensor(1 / (1 + compressor.variance_bound(numbers))).double()
    return torch.tensor(1.0).double()


@every_compressor_and("shape", [(1, 1), (5, 1), (3, 8), (30, 20)])
def test_contraction(name: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    """E‖v − C(v)‖² ≤ (1 − δ)‖v‖²; for random positions, equal."""
    biased = {key: value for key, value in options.items() if key != "unbiased"}
    compressor = compressors.make(name, **biased)
    random = name in ("random-k", "random-block")
    draws = 400 if random or name == "qsgd" else 1
    for v in (normal(*shape), normal(*shape, seed=1) ** 5, torch.ones(shape)):
        if random:  # other entries of each layer, the same for all workers
            codec = Codec(Layout([shape] * draws), compressor, [0])
            message = codec.encode(v.flatten().repeat(draws)[None], 0)
            result = codec.decode(message, codec.workers, 0).view(draws, *shape)
        else:
            result = compressed(compressor, v.expand(draws, *shape))
        error = squares(v - result) / squares(v)
        bound = 1 - contraction(compressor, v)
        spread = 5 * error.std() / draws**0.5 if draws > 1 else 0
        assert error.mean() <= bound + spread + 1e-6
        if random:
            assert error.mean() >= bound - spread - 1e-6


@every_compressor
def test_arguments_are_left_alone(name: str, options: dict[str, Any]) -> None:
    layout = Layout(SHAPES)
    codec = Codec(layout, compressors.make(name, **options), [0, 1])
    x = normal(2, layout.size)
    before = x.clone()
    message = codec.encode(x, 0).clone()
    assert torch.equal(x, before)
    sent, senders = message.clone(), torch.tensor([0, 1])
    codec.decode(sent, senders, 0)
    assert torch.equal(sent, message)
    assert torch.equal(senders, torch.tensor([0, 1]))
    assert not torch.equal(codec.encode(-x, 0), message)  # another tensor, through the same codec
    assert torch.equal(codec.encode(x, 0), message)
    wide = torch.cat([x, x], 1)  # a span of a larger x: rows are not adjacent
    assert torch.equal(codec.encode(wide[:, : layout.size], 0), message)


@every_compressor
def test_tiny_tensors_and_zeros(name: str, options: dict[str, Any]) -> None:
    for shape in ((), (1,), (1, 1), (2,), (1, 3), (3, 1), (2, 2)):
        compressor, layout = compressors.make(name, **options), Layout([shape])
        codec = Codec(layout, compressor, [0])
        zeros = torch.zeros(1, layout.size)
        assert torch.equal(codec.decode(codec.encode(zeros, 0), codec.workers, 0), zeros)
        x = torch.full((1, layout.size), -3.0)
        result = codec.decode(codec.encode(x, 1), codec.workers, 1)
        assert result.isfinite().all()
        if prod(shape) == 1 and name != "qsgd":
            torch.testing.assert_close(result, x)


@every_compressor
def test_divergence_stays_visible(name: str, options: dict[str, Any]) -> None:
    layout = Layout([(6, 4), (6, 4), (5,)])
    codec = Codec(layout, compressors.make(name, **options), [0, 1])
    for bad, position in ((torch.nan, 0), (torch.nan, 23), (torch.inf, 11), (-torch.inf, 0)):
        x = normal(2, layout.size)
        x[1, position] = bad
        tensors = layout.tensors(
            codec.decode(codec.encode(x, position), codec.workers, position)[1]
        )
        assert not tensors[0].isfinite().all()
        if bad != bad:
            assert tensors[0].isnan().any()
        assert tensors[1].isfinite().all()
        assert tensors[2].isfinite().all()


@every_compressor
def test_an_empty_slot_decodes_to_zeros(name: str, options: dict[str, Any]) -> None:
    """Padding: no message is received there, and weight 0 times its values must be 0."""
    codec = Codec(Layout(SHAPES), compressors.make(name, **options), [0])
    nothing = torch.zeros(1, 2, codec.size, dtype=torch.uint8)
    assert (codec.decode(nothing, torch.tensor([[1, -1]]), 3) == 0).all()
    nobody = torch.zeros(1, 0, dtype=torch.int64)  # the only worker has no neighbors
    assert codec.decode(nothing[:, :0], nobody, 3).shape == (1, 0, Layout(SHAPES).size)


@pytest.mark.parametrize("name", ["random-k", "random-block", "qsgd"])
def test_random_numbers_depend_on_seed_worker_tensor_and_counter(name: str) -> None:
    layout = Layout([(40, 25), (40, 25)])
    options: dict[str, Any] = {} if name == "qsgd" else {"keep_ratio": 0.1}
    compressor = compressors.make(name, **options)
    x = normal(1, 1000).repeat(1, 2)

    def result(worker: int = 3, counter: int = 0, seed: int = 0) -> list[Tensor]:
        codec = Codec(layout, compressor, [worker], seed)
        decoded = codec.decode(codec.encode(x, counter), codec.workers, counter)
        return [tensor.clone() for tensor in layout.tensors(decoded[0])]

    first, second = result()
    assert torch.equal(first, result()[0])
    assert not torch.equal(first, second)
    for other in (result(counter=1), result(seed=1)):
        assert not torch.equal(first, other[0])
    # Positions, which are not sent, must be the same for all workers.
    assert torch.equal(first, result(worker=4)[0]) == (name != "qsgd")


# --- Single compressors ---------------------------------------------------------------------------


@given(
    st.one_of(shapes_of_matrices, st.tuples(st.integers(2000, 2003), st.just(9))),
    st.floats(0.001, 1),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_top_k_keeps_the_largest(
    shape: tuple[int, int], keep_ratio: float, tied: bool, seed: int
) -> None:
    v = normal(2, *shape, seed=seed)
    if tied:
        v = v.mul(4).round().add(0.25)
    compressor = TopK(keep_ratio)
    kept = compressor.kept(*shape)
    fields = compressor.compress(v, stream(Stack(*shape, 1, 0)))
    (values, positions), result = fields, compressed(compressor, v)
    assert all(len(set(row.tolist())) == kept for row in positions)
    largest = v.flatten(1).abs().sort(-1, descending=True).values[:, :kept]
    assert torch.equal(values.abs().sort(-1, descending=True).values, largest)
    assert ((result == v) | (result == 0)).all()
    assert torch.equal(result.flatten(1).abs().sort(-1, descending=True).values[:, :kept], largest)


@pytest.mark.parametrize("numbers", [256, 257, 32_769, 65_536, 65_537])
def test_top_k_positions_have_room(numbers: int) -> None:
    v = torch.zeros(1, numbers, 1)
    v[0, -1] = -2
    assert torch.equal(compressed(TopK(1e-9), v), v)
    assert TopK(0.29).kept(10, 10) == 29  # int(0.29 * 100) is 28


@pytest.mark.parametrize(("n", "keep_ratio"), [(7, 0.3), (16, 1), (300, 0.02), (64, 0.06)])
def test_random_k_positions_are_distinct_and_uniform(n: int, keep_ratio: float) -> None:
    draws, compressor = 2000, RandomK(keep_ratio)
    positions = compressor.positions(stream(Stack(n, 1, draws, 7)), n, 1)
    kept = positions.shape[1]
    assert (positions.sort(-1).values.diff() > 0).all()
    chosen = torch.zeros(draws, n).scatter_(-1, positions, 1)
    share = kept / n
    assert (chosen.mean(0) - share).abs().max() <= 5 * (share * (1 - share) / draws) ** 0.5
    # the order in the message is random too, and all pairs are equally frequent
    first = positions[:, 0].float()
    assert abs(first.mean() - (n - 1) / 2) <= 5 * (n**2 / 12 / draws) ** 0.5
    if n > kept > 1:
        both = (chosen[:, :-1] * chosen[:, 1:]).sum(1)
        expected = (n - 1) * share * (kept - 1) / (n - 1)
        assert abs(both.mean() - expected) <= 5 * both.std() / draws**0.5


def test_a_random_block_is_in_one_piece_and_goes_on_at_the_first_entry() -> None:
    rows, columns, kept, draws = 6, 5, 9, 3000
    compressor = RandomBlock(kept / (rows * columns))
    positions = compressor.positions(stream(Stack(rows, columns, draws, 0)), rows, columns)
    assert positions.shape == (draws, kept)
    assert ((positions.diff() - 1) % 30 == 0).all()
    assert (positions[:, -1] < positions[:, 0]).any(), "some go on at the first entry"
    chosen = torch.zeros(draws, 30).scatter_(-1, positions, 1).mean(0)
    assert (chosen - kept / 30).abs().max() <= 5 * (0.3 * 0.7 / draws) ** 0.5


@pytest.mark.parametrize("name", [n for n, row in COMPRESSORS.items() if hasattr(row, "linear")])
def test_means_of_the_messages_of_linear_compressors_decode_to_the_mean(name: str) -> None:
    layout = Layout(SHAPES)
    options: dict[str, Any] = {} if name == "identity" else {"keep_ratio": 0.3}
    codec = Codec(layout, compressors.make(name, **options), [0, 1, 2, 3])
    assert codec.linear
    message = codec.encode(normal(4, layout.size), 3)
    expected = codec.decode(message, codec.workers, 3).mean(0)
    mean = message.view(torch.float32).mean(0, keepdim=True).view(torch.uint8)
    found = codec.decode(mean, codec.workers[2:3], 3)[0]
    torch.testing.assert_close(found, expected)


def test_tensors_that_are_not_chosen_are_not_in_the_message() -> None:
    layout, x = Layout([(4, 3), (5,), (2, 2)]), normal(2, 21)
    codec = Codec(layout, compressors.make("identity"), [0, 1], chosen=lambda r, c: r * c > 4)
    assert codec.size == 4 * (12 + 5)
    decoded = codec.decode(codec.encode(x, 0), codec.workers, 0)
    assert torch.equal(decoded[:, 0:12], x[:, 0:12])
    assert (decoded[:, 12:16] == 0).all()
    assert torch.equal(decoded[:, 16:], x[:, 16:])


def test_random_k_with_too_few_draws_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix by matrix, without an effect on the others of the batch."""
    count, n = 20, 400
    enough = sparse.distinct(draws_of(200, n), count, n)
    monkeypatch.setattr(sparse, "SPARE_DRAWS", -6)
    scarce = sparse.distinct(draws_of(200, n), count, n)
    fallen = (scarce != enough).any(-1)
    assert 0 < fallen.sum() < 200
    assert (scarce.sort(-1).values.diff() > 0).all()
    assert torch.equal(sparse.distinct(draws_of(7, n), count, n), scarce[:7])


@given(shapes_of_matrices, st.integers(0, 99))
def test_sign_and_norm(shape: tuple[int, int], seed: int) -> None:
    v = normal(2, *shape, seed=seed).mul(2).round()
    v[0, 0] = -0.0
    expected = torch.where(v >= 0, 1.0, -1.0) * v.abs().mean((1, 2), keepdim=True)
    torch.testing.assert_close(compressed(SignAndNorm(), v), expected)


@given(shapes_of_matrices, st.integers(1, 5), st.integers(0, 99))
@example((50, 80), 1, 0)  # large enough for LAPACK to look for a few vectors only
@example((80, 50), 5, 0)
@example((49, 50), 1, 0)
def test_svd_is_the_best_approximation(shape: tuple[int, int], rank: int, seed: int) -> None:
    v = normal(2, *shape, seed=seed)
    u, s, vt = torch.linalg.svd(v.double(), full_matrices=False)
    best = (u[..., :rank] * s[:, None, :rank]) @ vt[:, :rank]
    result = compressed(SVD(rank), v)
    if rank * sum(shape) >= prod(shape):
        assert torch.equal(result, v)
    else:
        gap = s[:, rank - 1] - s[:, rank]
        for i in range(2):  # the approximation is as sharp as the gap between singular values
            assert (result[i] - best[i]).norm() <= 1e-5 * s[i, 0] * (1 + s[i, 0] / gap[i])
        torch.testing.assert_close(
            squares(v - result), s[:, rank:].square().sum(-1), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("shape", "rank", "leading", "scale"),
    [
        ((60, 90), 1, (2, 3), 1e-25),
        ((60, 90), 2, (1,), 1e25),
        ((90, 60), 1, (), 1.0),
        ((90, 60), 6, (2, 3), 1e25),
        ((60, 90), 7, (), 1.0),
    ],
)
def test_svd_of_large_matrices(
    leading: tuple[int, ...], shape: tuple[int, int], rank: int, scale: float
) -> None:
    """Few singular vectors or many, with any leading axes, of entries whose squares overflow or
    underflow a float: the error is the least possible at that rank."""
    v, unused = scale * normal(*leading, *shape), stream(Stack(*shape, 1, 0))
    result = torch.zeros_like(v)
    SVD(rank).decompress(SVD(rank).compress(v, unused), result, unused)
    left = (v - result).double() / scale
    values = torch.linalg.svdvals(v.double() / scale)
    least = values[..., rank:].square().sum(-1)
    torch.testing.assert_close(left.square().sum((-2, -1)), least, rtol=1e-6, atol=0)


@pytest.mark.parametrize("levels", [1, 4, 7, 127])
def test_qsgd_is_unbiased_and_on_its_grid(levels: int) -> None:
    draws = 2000
    v = normal(1, 5, 7).expand(draws, 5, 7)
    norm = v[0].norm()
    compressor = QSGD(levels, unbiased=True)
    result = compressed(compressor, v)
    spread = result.std(0) / draws**0.5
    assert ((result.mean(0) - v[0]).abs() <= 5 * spread + 1e-5).all()
    steps = result * levels / norm
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    assert ((steps.abs() - v.abs() * levels / norm).abs() <= 1 + 1e-4).all()
    bound = min(35 / levels**2, 35**0.5 / levels)
    assert compressor.variance_bound(35) == pytest.approx(bound, rel=1e-12)
    assert squares(result - v).mean() <= bound * squares(v[0])
    torch.testing.assert_close(compressed(QSGD(levels), v) * (1 + bound), result)


def test_qsgd_of_a_single_large_entry_stays_on_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """In floats, s + u is s + 1 for u close to 1."""
    monkeypatch.setattr(Stream, "uniform", lambda self: torch.full((3,), 1 - 2.0**-24))
    for levels in (1, 3, 4, 127):
        v = torch.tensor([0.0, 0.0, -3.0]).view(1, 3, 1)
        assert torch.equal(compressed(QSGD(levels, unbiased=True), v), v)


# --- Packing --------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 50), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=60)
def test_unpack_inverts_pack(bits: int, count: int, offset: int, seed: int) -> None:
    """Packed bytes are one string of bits."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(2**bits, (2, 3, count + offset), generator=generator).to(torch.uint8)
    levels = levels[..., offset:]  # neither aligned nor in one piece
    before = levels.clone()
    packed = pack(levels, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_size(count, bits))
    assert packed.shape[-1] == ceil(count * bits / 8)
    for row, of_row in zip(levels.flatten(0, 1), packed.flatten(0, 1), strict=True):
        string = sum(number << bits * j for j, number in enumerate(row.tolist()))
        assert bytes(of_row.tolist()) == string.to_bytes(len(of_row), "little")
        assert torch.equal(pack(row, bits), of_row)  # in one piece, not aligned
    kept = packed.clone()
    assert torch.equal(unpack(packed, bits, count), levels)
    assert torch.equal(packed, kept)
    assert torch.equal(levels, before)


def test_what_a_compressor_of_ones_own_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        def compress(self, v: Tensor, stream: object) -> Tensor:
            return v.flatten(-2)

    class WithFields(Bare):
        def fields(self, rows: int, columns: int) -> tuple[compressors.Field, ...]:
            return (compressors.Field(torch.float32, rows * columns),)

        def decompress(self, fields: object, out: Tensor, stream: object) -> None: ...

    monkeypatch.setitem(compressors.COMPRESSORS, "bare", Bare)
    with pytest.raises(TypeError, match="compressor bare has no method fields"):
        compressors.make("bare")
    monkeypatch.setitem(compressors.COMPRESSORS, "bare", WithFields)
    layout = Layout([(2, 3)])
    codec = compressors.Codec(layout, compressors.make("bare"), range(2))
    with pytest.raises(TypeError, match="compress returned Tensor; use a tuple of 1 tensors"):
        codec.encode(torch.zeros(2, 6), 0)


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [
        (compressors.Levels(-1, 1, 3), 0, 2),
        *(
            (dtype, torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
        ),
    ],
)
def test_integers_of_a_compressor_of_a_script_fit_into_their_field(
    kind: Any, lowest: int, highest: int
) -> None:
    """In every message, behind an empty field and floats. They would wrap around silently."""

    class Integers(compressors.Identity):
        values: ClassVar[Tensor]

        def fields(self, rows: int, columns: int) -> tuple[compressors.Field, ...]:
            floats, empty = (compressors.Field(torch.float32, n) for n in (rows, 0))
            return floats, empty, compressors.Field(kind, 2)

        def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
            rows = v[..., 0]
            return rows, rows[..., :0], self.values.expand(*v.shape[:2], 2)

    made, x = Codec(Layout([(128, 300)]), Integers(), [0]), torch.zeros(1, 128 * 300)
    for values, fits in (
        ((lowest, highest), True),
        ((lowest - 1, 0), False),
        ((0, highest + 1), False),
    ):
        Integers.values = torch.tensor(values)
        sentence = f"returned .* for field 2, which holds {lowest} … {highest}; the matrix is 128"
        with nullcontext() if fits else pytest.raises(ValueError, match=sentence):
            made.encode(x, 0)
        made.encode(torch.full_like(x, torch.nan), 0)  # a run that diverges
