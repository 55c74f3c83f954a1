"""Laws of x in float64, for every row of the registries: double precision all the way."""

from collections.abc import Iterator

import pytest
import torch

from powergossip import algorithms, topologies
from powergossip.algorithms import Options
from powergossip.network import Network
from powergossip.parameters import Layout
from tests.averaging import ALONE, SHAPES, start, steps, variance
from tests.test_algorithms import EVERY, label

N = 4
ENCODED = ("choco", "deepsqueeze", "moniqua")  # messages of bytes, the same for any dtype of x
# Their error is that of the compressor, which does not vanish.
NOISY = ("deepsqueeze", "moniqua")


def ring(dtype: torch.dtype = torch.float64) -> Network:
    return Network(topologies.make("ring", N), ALONE, dtype=dtype)


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_the_mean_is_kept_to_double_precision(name: str, options: Options) -> None:
    layout, network = Layout(SHAPES), ring()
    x = start(N, layout).double()
    before = x.mean(0)
    steps(network, algorithms.make(name, network, layout, options), x, 60)
    torch.testing.assert_close(x.mean(0), before, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("name", "options"), [c for c in EVERY if c[0] not in NOISY], ids=label)
def test_workers_agree_better_than_in_single_precision(name: str, options: Options) -> None:
    layout, network = Layout(SHAPES), ring()
    x = start(N, layout).double()
    least = 1e-17 * variance(x)  # in float32, 1e-15 to 1e-13 remain
    averaging = algorithms.make(name, network, layout, options)
    for _ in range(10):
        steps(network, averaging, x, 50)
        if variance(x) <= least:
            return
    pytest.fail(f"{variance(x)} after 500 steps")


@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_elements_that_are_not_encoded_have_64_bits(name: str, options: Options) -> None:
    layout, sent = Layout(SHAPES), {}
    for dtype in (torch.float32, torch.float64):
        network = ring(dtype)
        averaging = algorithms.make(name, network, layout, options)
        steps(network, averaging, start(N, layout).to(dtype), 2)
        sent[dtype] = network.bits
    factor = 1 if name in ENCODED else 2
    assert (sent[torch.float64] == factor * sent[torch.float32]).all()


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_the_default_dtype_of_torch_has_no_effect(name: str, options: Options) -> None:
    layout, found = Layout(SHAPES), []
    x = torch.randn(N, layout.size, dtype=torch.float32)
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        network = ring(torch.float32)
        averaging = algorithms.make(name, network, layout, options)
        found.append(steps(network, averaging, x.clone(), 3))
    assert torch.equal(*found)

