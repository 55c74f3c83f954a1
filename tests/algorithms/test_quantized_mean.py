"""All-reduce in few bits: laws of its sums, its messages and its replicas."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import algorithms, topologies
from powergossip.compressors import BlockRounding, Codec
from powergossip.network import Network
from powergossip.parameters import Layout
from tests.harness.averaging import SHAPES, alone, start
from tests.harness.quadratics import Quadratics, rule_of, train

LAYOUT = Layout([*SHAPES, (30, 9)])
BITS = [2, 3, 4, 8]
every_bits = pytest.mark.parametrize("bits", BITS)


def displacements(network: Network, t: int) -> Tensor:
    """Of the hosted workers in step t: of different sizes, workers with much in common."""
    n = network.n_workers
    d = start(n, LAYOUT, 2 * t) + 3 * start(1, LAYOUT, 2 * t + 1)
    d = d.to(network.dtype) * 10.0 ** (t % 3 - 2)
    return d[network.workers.start : network.workers.stop]


def walk(network: Network, mean: Any, x: Tensor, steps: range) -> Tensor:
    """x after steps from models that are the same."""
    for t in steps:
        x += displacements(network, t)
        network.run(mean.step(x))
    return x


def models(network: Network) -> Tensor:
    return start(1, LAYOUT, 99).to(network.dtype).repeat(network.rows, 1)


@every_bits
@pytest.mark.parametrize("n", [1, 2, 5])
def test_results_and_errors_are_the_sum_of_mean_displacements(bits: int, n: int) -> None:
    network = Network(topologies.make("ring", n), dtype=torch.float64)
    mean, x = algorithms.make("all-reduce", network, LAYOUT, bits=bits), models(network)
    x0, total = x[0].clone(), torch.zeros(LAYOUT.size)
    for t in range(30):
        d = displacements(network, t)
        x += d
        network.run(mean.step(x))
        assert torch.equal(x, x[:1].expand_as(x))
        total = total + d.mean(0)
    state = mean.state_dict()
    errors = state["error"].mean(0) + state["rest"].flatten()[: LAYOUT.size]
    torch.testing.assert_close(x[0] + errors - x0, total, rtol=0, atol=1e-12)
    assert errors.norm() < 3 * 2.0 ** (1 - bits) * displacements(network, 29).norm(dim=1).mean()


@pytest.mark.parallel([2, 4])
@every_bits
def test_replicas_are_the_same_to_the_bit_in_every_layout(bits: int) -> None:
    network = Network(topologies.make("ring", 8))
    x = walk(
        network,
        algorithms.make("all-reduce", network, LAYOUT, bits=bits),
        models(network),
        range(5),
    )
    together = alone("star", 8)
    expected = models(together)
    walk(together, algorithms.make("all-reduce", together, LAYOUT, bits=bits), expected, range(5))
    assert torch.equal(network.gather(x), expected)
    assert network.bits.tolist() == together.bits[network.workers.start :][: len(x)].tolist()


@every_bits
def test_messages_have_b_bits_and_a_scale_for_each_block(bits: int) -> None:
    """347 elements are 6 blocks: 2 for each of 3 workers, and 1 for each of 8."""
    assert LAYOUT.size == 347
    for n, blocks in ((3, 2), (8, 1)):
        network = alone("ring", n)
        mean = algorithms.make("all-reduce", network, LAYOUT, bits=bits)
        network.run(mean.step(models(network)))
        first, messages = network.bits.copy(), network.messages.copy()
        network.run(mean.step(models(network)))
        assert (network.bits - first).tolist() == [2 * (n - 1) * blocks * (64 * bits + 16)] * n
        assert (network.messages - messages).tolist() == [2 * (n - 1)] * n


@every_bits
def test_a_resumed_walk_is_the_same_to_the_bit(bits: int) -> None:
    network = alone("ring", 4)
    x = models(network)
    first, second = (algorithms.make("all-reduce", network, LAYOUT, bits=bits) for _ in range(2))
    walk(network, first, x, range(4))
    walk(network, second, models(network), range(2))
    state, saved = copy.deepcopy(first.state_dict()), x.clone()
    second.load_state_dict(state)
    assert torch.equal(
        walk(network, first, x, range(4, 8)), walk(network, second, saved, range(4, 8))
    )


@every_bits
@pytest.mark.parametrize("local_steps", [1, 5])
@pytest.mark.parametrize("name", ["dpsgd", "diloco", "gasloc", "noloco"])
def test_quadratics_end_where_all_reduce_ends(name: str, local_steps: int, bits: int) -> None:
    """Up to the errors, in units of the displacements of workers that move apart in each round."""
    found = []
    for given in (dict[str, Any](), {"bits": bits}):
        problem = Quadratics()
        rule = rule_of(
            name, "all-reduce", problem, 0.05, averaging_options=given, local_steps=local_steps
        )
        train(rule, problem, 300)
        found.append(problem.x[0].clone())
    apart = 0.05 * local_steps * Quadratics().gradients().norm(dim=1).mean()
    assert (found[1] - found[0]).norm() < 2.0 ** (2 - bits) * apart


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("correction", [False, True])
def test_displacements_are_from_the_slow_model(fragments: int, correction: bool) -> None:
    """The first one, too: no message has 32 bits."""
    problem = Quadratics(shapes=((6, 5), (5, 4)))
    rule: Any = rule_of(
        "diloco", "all-reduce", problem, 0.05, averaging_options={"bits": 2}, local_steps=2,
        fragments=fragments, gradient_correction=correction, outer_momentum=0.9,
    )  # fmt: skip
    network = rule._network
    train(rule, problem, 10)
    for fragment in rule._fragments:
        (slow,) = fragment.take(rule._slow)
        (reference, *_) = fragment.joint.split(fragment.averaging.state_dict()["reference"])
        assert torch.equal(reference, slow)
    assert network.bits.tolist() == [5 * fragments * 2 * 7 * (2 * 64 + 16)] * 8
    assert torch.equal(rule._slow, rule._slow[:1].expand_as(rule._slow))


# --- The compressor -------------------------------------------------------------------------------


def compressed(v: Tensor, bits: int) -> Tensor:
    codec = Codec(Layout([v.shape[1:]]), BlockRounding(bits), range(len(v)))
    return codec.decode(codec.encode(v, 0), codec.workers, 0).clone()


@pytest.mark.parametrize("bits", range(2, 9))
def test_blocks_are_contracted(bits: int) -> None:
    """Also with one large entry, and few. On normal vectors, nearly as the best levels."""
    v = start(50, Layout([(150,)]))
    best = {2: 0.1188, 3: 0.03744, 4: 0.01154}  # Max (1960): levels at equal distances
    error = compressed(v, bits) - v
    assert error.square().mean() < 1.2 * best.get(bits, 1.2 * 8 / 3 * 4.0**-bits)
    for exponent in (1, 4):
        v = v * v.abs().pow(exponent)
        error, of_bfloat16 = compressed(v, bits) - v, 1 + 1e-3
        for part in (slice(64), slice(64, 128), slice(128, 150)):
            assert (error[:, part].norm(dim=1) < v[:, part].norm(dim=1) * of_bfloat16).all()
    v = torch.zeros(1, 150)
    assert torch.equal(compressed(v, bits), v)
    v[0, 70] = 3.0
    assert (compressed(v, bits) - v).norm() < 3.0
    v[0, 70] = torch.nan
    assert compressed(v, bits).isnan().tolist() == [[64 <= i < 128 for i in range(150)]]
    assert compressed(v.nan_to_num(nan=torch.inf), bits)[0, 64:128].isfinite().sum() == 0
