"""The laws of error feedback, for every compressor of the registry."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import compressors, topologies
from powergossip.algorithms.error_feedback import ErrorFeedback, ErrorFeedbackConfig
from powergossip.compressors import COMPRESSORS, Codec, Compressor, TopK
from powergossip.network import Network, Processes
from powergossip.optimizers import error_feedback as loop
from powergossip.parameters import Layout
from tests.harness.helpers import with_one_each
from tests.harness.loops import backward, gradients, model, step, vector

SHAPES = [(6, 5), (7,), (2, 3, 4), (), (6, 5), (3, 40)]
OPTIONS: dict[str, dict[str, Any]] = {
    "top-k": {"keep_ratio": 0.2},
    "random-k": {"keep_ratio": 0.3},
    "random-block": {"rank": 1},
    "qsgd": {"levels": 7},
}
MOMENTA = [{}, {"momentum": 0.8}, {"momentum": 0.8, "nesterov": True}]
RATES = (0.1, 0.1, 0.02, 0.5, 0.5)


def made(name: str) -> Compressor:
    return compressors.make(name, **OPTIONS.get(name, {}))


def aggregation(
    n_workers: int, compressor: Compressor, shapes: list[Any] = SHAPES, **options: Any
) -> tuple[Network, ErrorFeedback]:
    network = Network(topologies.make("ring", n_workers), Processes())
    config = ErrorFeedbackConfig(**options)
    return network, ErrorFeedback(network, Layout(shapes), compressor, config)


def sent_whole(name: str) -> Iterator[slice]:
    """The tensors whose part of a message would not be smaller."""
    layout = Layout(SHAPES)
    for start, shape in zip(layout.starts, layout.shapes, strict=True):
        size = prod(shape)
        rows, columns = (shape[0], size // shape[0]) if shape else (1, 1)
        if not is_smaller(name)(rows, columns):
            yield slice(start, start + size)


def is_smaller(name: str) -> Callable[[int, int], bool]:
    """True if the part of a matrix in a message is smaller than the matrix."""
    return lambda rows, columns: compressors.size(made(name), rows, columns) < 4 * rows * columns


def momenta(options: dict[str, Any], seen: list[Tensor]) -> Iterator[Tensor]:
    """The momentum, in plain words, of the gradients seen so far."""
    m, u = options.get("momentum", 0.0), torch.zeros_like(seen[0])
    for g in seen:
        u = m * u + g
        yield g + m * u if options.get("nesterov") else u


@pytest.mark.parametrize(
    ("name", "options", "rescaled"),
    [
        (name, options, rescaled)
        for name, (options, rescaled) in with_one_each(
            [*COMPRESSORS], [(o, r) for o in MOMENTA for r in (True, False)], "top-k".__eq__
        )
    ],
)
def test_it_agrees_with_the_algorithm(name: str, options: dict[str, Any], rescaled: bool) -> None:
    """p = u + (η_{t−1}/η_t) e; C(p) is applied and p − C(p) remains, worker by worker."""
    network, a = aggregation(3, made(name), rescale_error=rescaled, seed=5, **options)
    layout, e, before = Layout(SHAPES), torch.zeros(3, a.state_dict()["error"].shape[1]), None
    seen = [gradients(3, layout, t) for t in range(len(RATES))]
    codecs = [Codec(layout, made(name), [i], seed=5) for i in range(3)]
    for t, (u, rate) in enumerate(zip(momenta(options, seen), RATES, strict=True)):
        p = u + (before / rate if rescaled and before else 1.0) * e
        sent = torch.cat(
            [c.decode(c.encode(p[[i]], t), c.workers, t) for i, c in enumerate(codecs)]
        )
        for span in sent_whole(name):
            sent[:, span] = p[:, span]
        a.at_learning_rate(rate)
        mean = step(network, a, seen[t].clone())
        torch.testing.assert_close(mean[0], sent.mean(0), rtol=1e-4, atol=1e-5)
        e, before = a.state_dict()["error"], rate
        torch.testing.assert_close(e, p - sent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["top-k", "random-k", "random-block", "identity"])
def test_sparse_parts_and_errors_are_exact(name: str) -> None:
    """Every element is sent or kept, to the bit."""
    network, a = aggregation(1, made(name))
    for t in range(4):
        g = gradients(1, Layout(SHAPES), t)
        p = a.state_dict()["error"] + g
        mean = step(network, a, g)
        assert torch.equal(mean + a.state_dict()["error"], p)
        assert ((mean == 0) | (mean == p)).all()


def test_the_error_is_bounded() -> None:
    """‖e_t‖² ≤ 4 (1 − δ)/δ² G² for ‖g‖ ≤ G. Karimireddy et al. (2019), Lemma 3."""
    layout, kept = Layout([(10, 10)]), 0.2
    network, a = aggregation(1, TopK(kept), layout.shapes)
    largest = 0.0
    for t in range(60):
        g = gradients(1, layout, t)
        step(network, a, g.div_(g.norm()))
        largest = max(largest, a.state_dict()["error"].square().sum().item())
    assert 0.5 < largest <= 4 * (1 - kept) / kept**2


def test_without_feedback_the_error_is_dropped() -> None:
    network, a = aggregation(2, TopK(0.2), error_feedback=False)
    g = gradients(2, Layout(SHAPES), 0)
    first = step(network, a, g.clone())
    assert torch.equal(step(network, a, g.clone()), first)
    assert (a.state_dict()["error"] == 0).all()


# --- Messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSORS)
def test_bits_are_those_of_the_formula(name: str) -> None:
    """An all-reduce of the elements that are sent whole, and of the messages of linear compressors.
    Others are sent to each other worker, with their length."""
    n, linear = 5, ("random-k", "random-block", "identity")
    network, a = aggregation(n, made(name))
    whole = sum(span.stop - span.start for span in sent_whole(name))
    codec = Codec(Layout(SHAPES), made(name), [0], chosen=is_smaller(name))
    averaged = 32 * whole + (8 * codec.size if name in linear else 0)
    gathered = 0 if name in linear else 8 * codec.size + 32
    for t in (1, 2):
        step(network, a, gradients(n, Layout(SHAPES), t))
        expected = t * (round(2 * (n - 1) * averaged / n) + (n - 1) * gathered)
        assert network.bits.tolist() == [expected] * n
    sent = averaged + max(0, gathered - 32)
    assert a.compression_rate == pytest.approx(32 * Layout(SHAPES).size / sent)


def test_tensors_that_would_not_be_smaller_are_averaged_whole() -> None:
    """Vectors and small matrices have no error with svd, and none at a higher rate."""
    for rate, compressed in ((1.0, [0, 4, 5]), (2.9, [0, 4, 5]), (3.0, [5]), (9.0, [])):
        network, a = aggregation(
            2, compressors.SVD(), [(6, 6), (7,), (2, 2, 1), (), (6, 6), (9, 40)],
            min_compression_rate=rate,
        )  # fmt: skip
        layout = Layout([(6, 6), (7,), (2, 2, 1), (), (6, 6), (9, 40)])
        step(network, a, gradients(2, layout, 0))
        errors = layout.tensors(a.state_dict()["error"][0])
        assert [i for i, e in enumerate(errors) if e.norm() > 0] == compressed, rate


def test_all_tensors_as_one_vector() -> None:
    """The largest elements of the whole gradient, as GlobalTopKReducer of the PowerSGD paper."""
    network, a = aggregation(1, TopK(0.1), per_tensor=False)
    g = gradients(1, Layout(SHAPES), 0)
    mean = step(network, a, g.clone())
    kept = g.shape[1] // 10
    assert torch.equal(mean != 0, g.abs() >= g.abs().sort(descending=True).values[0, kept - 1])


# --- Learning rates and state ---------------------------------------------------------------------


def test_each_tensor_may_have_a_learning_rate() -> None:
    """The error of a tensor is rescaled by its own rates. A step with rate 0 leaves its unit."""
    layout = Layout([(4, 4), (9, 2)])
    network, a = aggregation(1, TopK(0.3), layout.shapes)
    a.at_learning_rate(0.1, 0.2)
    step(network, a, gradients(1, layout, 0))
    e = a.state_dict()["error"].clone()
    large = 100 * (e == 0).float() + (e == 0)  # is sent; the errors stay

    def errors(first: float, second: float) -> list[Tensor]:
        a.at_learning_rate(first, second)
        step(network, a, torch.zeros_like(e).add_(large))
        return layout.tensors(a.state_dict()["error"][0])

    one, two = (t.clone() for t in layout.tensors(e[0]))
    for rates, factors in (
        ((0.2, 0.1), (0.5, 2.0)),
        ((0.0, 0.1), (0.5, 2.0)),
        ((0.1, 0.4), (1, 0.5)),
    ):
        found = errors(*rates)
        torch.testing.assert_close(found[0], factors[0] * one)
        torch.testing.assert_close(found[1], factors[1] * two)


# --- A loop of your own ---------------------------------------------------------------------------


def test_a_name_is_no_compressor() -> None:
    name: Any = "top-k"
    with pytest.raises(ValueError, match=r'^compressor=top-k: use .* compressors.make\("top-k"\)$'):
        loop.ErrorFeedback(model(1).parameters(), name)


def test_each_parameter_has_the_rate_of_its_group() -> None:
    """SGD with two groups, whose rates change differently, is followed in units of the update."""
    net = model(1)
    first, second = net[0], net[2]  # type: ignore[index]
    groups = [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    feedback = loop.ErrorFeedback(net.parameters(), TopK(0.1))
    start, total = vector(net), torch.zeros_like(vector(net))
    for t in range(6):
        optimizer.param_groups[1]["lr"] = 0.2 / (1 + t)
        backward(net, 0, t)
        rates = [g["lr"] for g in optimizer.param_groups for _ in range(2)]
        total += torch.cat(
            [r * p.grad.flatten() for r, p in zip(rates, net.parameters(), strict=True)]  # type: ignore[union-attr]
        )
        loop.optimizer_step(optimizer, feedback)
    errors = feedback.flat.layout.tensors(feedback.state_dict()["aggregation"]["error"][0])
    rest = torch.cat([r * e.flatten() for r, e in zip(rates, errors, strict=True)])
    torch.testing.assert_close(start - vector(net) + rest, total)


def test_momentum_twice_is_rejected() -> None:
    net = model(0)
    feedback = loop.ErrorFeedback(net.parameters(), TopK(), loop.ErrorFeedbackConfig(momentum=0.9))
    backward(net, 0, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    with pytest.raises(ValueError, match="momentum"):
        loop.optimizer_step(optimizer, feedback)
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        loop.ErrorFeedbackConfig(momentum=1.5)
