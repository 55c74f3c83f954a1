"""All-reduce in few bits: laws of its sums, its messages and its replicas."""

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


class Walk:
    """Steps from models that are the same. Workers move by vectors of different sizes, with much in
    common."""

    def __init__(self, network: Network, bits: int):
        self.network, self.t = network, 0
        self.mean = algorithms.make("all-reduce", network, LAYOUT, bits=bits)
        self.x = start(1, LAYOUT, 99).to(network.dtype).repeat(network.rows, 1)

    def displacements(self) -> Tensor:
        """Of all workers in this step."""
        d = start(self.network.n_workers, LAYOUT, 2 * self.t) + 3 * start(1, LAYOUT, 2 * self.t + 1)
        return d.to(self.x.dtype) * 10.0 ** (self.t % 3 - 2)

    def go(self, steps: int) -> Tensor:
        """x after more steps."""
        for _ in range(steps):
            own = self.network.workers
            self.x += self.displacements()[own.start : own.stop]
            self.network.run(self.mean.step(self.x))
            self.t += 1
        return self.x


@every_bits
@pytest.mark.parametrize("n", [1, 2, 5])
def test_results_and_errors_are_the_sum_of_mean_displacements(bits: int, n: int) -> None:
    walk = Walk(Network(topologies.make("ring", n), dtype=torch.float64), bits)
    total = walk.x[0].clone()
    for _ in range(30):
        total += walk.displacements().mean(0)
        x = walk.go(1)
        assert torch.equal(x, x[:1].expand_as(x))
    state = walk.mean.state_dict()
    errors = state["error"].mean(0) + state["rest"].flatten()[: LAYOUT.size]
    torch.testing.assert_close(x[0] + errors, total, rtol=0, atol=1e-12)
    walk.t -= 1
    assert errors.norm() < 6 * 2.0**-bits * walk.displacements().norm(dim=1).mean()


@pytest.mark.parallel([2, 4])
@every_bits
def test_replicas_are_the_same_to_the_bit_in_every_layout(bits: int) -> None:
    """Each of 8 workers has 44 elements, or fewer, and a scale of 16 bits."""
    apart, together = Walk(Network(topologies.make("ring", 8)), bits), Walk(alone("star", 8), bits)
    assert torch.equal(apart.network.gather(apart.go(5)), together.go(5))
    few = 2 * 7 * 8 * (-(-44 * bits // 8) + 2)
    assert {*apart.network.bits} == {round(2 * 7 / 8 * 32 * LAYOUT.size) + 4 * few}
    assert {*apart.network.messages} == {5 * 2 * 7}


@every_bits
@pytest.mark.parametrize("before", [0, 4])
def test_a_resumed_walk_is_the_same_to_the_bit(bits: int, before: int) -> None:
    """From what was saved, in whatever state the object is."""
    first, second = (Walk(alone("ring", 4), bits) for _ in range(2))
    second.go(2)
    second.x.copy_(first.go(before))
    state = first.mean.state_dict()
    second.t = first.t
    expected = first.go(4)
    second.mean.load_state_dict(state)
    assert torch.equal(second.go(4), expected)


@every_bits
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
def test_models_that_are_repaired_are_averaged_as_before(
    bits: int, value: float, steps: int
) -> None:
    """After a value of one worker that is not finite, or large."""
    walk = Walk(alone("ring", 4), bits)
    walk.go(steps)[1, 7] = value
    assert walk.go(1).isfinite().all() == (value == 1e38)
    if value == 1e38:
        return
    walk.x.copy_(start(1, LAYOUT, 5))
    total, walk.t = walk.x[0].clone(), 0
    for _ in range(15):
        total += walk.displacements().mean(0)
        walk.go(1)
    walk.t -= 1
    assert (walk.x[0] - total).norm() < 8 * 2.0**-bits * walk.displacements().norm(dim=1).mean()


@pytest.mark.long
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", ["dpsgd", "diloco", "gasloc", "noloco"])
def test_quadratics_end_where_all_reduce_ends(name: str, bits: int) -> None:
    """Up to the errors, in units of the displacements of workers that move apart in each round."""
    found = []
    for given in (dict[str, Any](), {"bits": bits}):
        problem = Quadratics()
        rule = rule_of(name, "all-reduce", problem, 0.05, averaging_options=given, local_steps=3)
        train(rule, problem, 150)
        found.append(problem.x[0].clone())
    apart = 3 * 0.05 * Quadratics().gradients().norm(dim=1).mean()
    assert (found[1] - found[0]).norm() < 2.0 ** (1 - bits) * apart


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("correction", [False, True])
def test_displacements_are_from_the_slow_model(fragments: int, correction: bool) -> None:
    """The first one, too: no message has 32 bits."""
    problem = Quadratics(shapes=((6, 5), (5, 4)))
    network = Network(topologies.make("ring", 8), dtype=problem.x.dtype)
    rule = rule_of(
        "diloco", "all-reduce", problem, 0.05, network, averaging_options={"bits": 2},
        local_steps=2, fragments=fragments, gradient_correction=correction, outer_momentum=0.9,
    )  # fmt: skip
    train(rule, problem, 10)
    slow, averaging = rule.state_dict()["slow"], rule.state_dict()["averaging"]
    references = [part["reference"] for part in averaging.get("fragments", [averaging])]
    assert sum(r.shape[1] for r in references) >= slow.shape[1]
    for row, reference in zip(slow, torch.cat(references, 1), strict=True):
        assert set(row.tolist()) <= set(reference.tolist())
    lengths = [length * (1 + correction) for length in ([7], [4, 3])[fragments - 1]]
    sent = 2 * 7 * 8 * sum(-(-2 * length // 8) + 2 for length in lengths)
    assert network.bits.tolist() == [5 * sent] * 8
    assert torch.equal(slow, slow[:1].expand_as(slow))


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
    limit = {2: 1.06, 3: 0.97}.get(bits, 1.0) * best.get(bits, 8 / 3 * 4.0**-bits)
    assert error.square().mean() < limit
    for exponent in (1, 4):
        v = v * v.abs().pow(exponent)
        error, of_bfloat16 = compressed(v, bits) - v, 1 + 1e-3
        for part in (slice(64), slice(64, 128), slice(128, 150)):
            assert (error[:, part].norm(dim=1) < v[:, part].norm(dim=1) * of_bfloat16).all()
            decoded = (error + v)[:, part]  # with the best scale
            assert ((error[:, part] * decoded).sum(1).abs() < 2**-8 * decoded.square().sum(1)).all()
    v = torch.zeros(1, 150)
    assert torch.equal(compressed(v, bits), v)
    v[0, 70] = 3.0
    assert (compressed(v, bits) - v).norm() < 3.0
    v[0, 70] = torch.nan
    assert compressed(v, bits).isnan().tolist() == [[64 <= i < 128 for i in range(150)]]
    assert compressed(v.nan_to_num(nan=torch.inf), bits)[0, 64:128].isfinite().sum() == 0
