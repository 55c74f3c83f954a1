"""Differences from messages of few bits: laws of both ends, of errors, and of ranges."""

import copy
import math

import pytest
import torch
from torch import Tensor

from powergossip import algorithms, kernels, topologies
from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.algorithms.directions import EdgeConstants
from powergossip.algorithms.power_gossip import PowerGossip
from powergossip.network import Conversation, Network, ToEach
from powergossip.parameters import Layout
from tests.harness.averaging import alone, graph, start

LENGTHS = (40, 3, 90, 17)
SHAPES = [(40, 30), (20, 25), (17,), (9,)]


def code_of(
    network: Network, bits: int, lengths: tuple[int, ...] = LENGTHS, index: int = 0
) -> DifferenceCode:
    edges = EdgeConstants(network, network.rounds[0], 1.0, 0)
    return DifferenceCode(edges, bits, lengths, 1, index)


def long_code(
    bits: int, lengths: tuple[int, ...] = (400, 30, 300, 70), n: int = 3
) -> tuple[DifferenceCode, Network]:
    """A code of 13 blocks, with compiled loops if there are any, and its network."""
    network = alone("ring", n)
    edges = EdgeConstants(network, network.rounds[0], 1.0, 0)
    return DifferenceCode(edges, bits, lengths, 1, 0, library=kernels.load(network)), network


def difference(code: DifferenceCode, network: Network, s: Tensor, counter: int) -> Tensor:
    """d [worker, neighbor, M] of an exchange of s [worker, neighbor, M], whole without ranges."""
    found = []

    def exchange() -> Conversation:
        coded = code.known(0)
        own = code.encode(s, 0, counter) if coded else s.clone()
        received = yield ToEach(own)
        found.append(code.decode(own, received, 0, s.clone()) if coded else received - own)
        if not coded:
            code.begin(found[0], 0)

    network.run(exchange())
    return found[0]


def products(x: Tensor, network: Network) -> Tensor:
    """s of each worker, the same for all its neighbors."""
    return x[:, None].expand(-1, network.neighbors.shape[1], -1).contiguous()


def expected(x: Tensor, network: Network) -> Tensor:
    there = (network.neighbors >= 0)[..., None]
    return (x[network.neighbors.clamp(min=0)] - x[:, None]) * there


def drawn(kind: str, n: int, t: int) -> Tensor:
    """Vectors of workers [worker, M] whose differences are about 1 in all parts, or not."""
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(n, sum(LENGTHS), dtype=torch.float64, generator=generator)
    if kind == "common":
        x += 1e4 * torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator)
    elif kind == "heavy tails":  # Student's t with 2 degrees of freedom
        x /= torch.rand(x.shape, dtype=torch.float64, generator=generator).log().neg().sqrt()
    elif kind == "one entry":
        x *= 0.01
        x[:, 50] *= 1e4
    elif kind == "periodic":  # with the number of blocks as the period
        x[:, ::2] *= 1e3
    elif kind == "sizes":
        x[:, :40] *= 1e-3
    return x


@pytest.mark.parametrize(
    "bits", [4, 11, *(pytest.param(bits, marks=pytest.mark.long) for bits in (3, 6, 8, 16))]
)
@pytest.mark.parametrize(
    "kind", ["normal", "common", "heavy tails", "one entry", "periodic", "sizes"]
)
def test_both_ends_have_the_same_difference_with_a_relative_error(kind: str, bits: int) -> None:
    """On a graph whose workers have 1 to 3 neighbors. The error falls with the number of bits."""
    network = Network(graph("tail", 6), dtype=torch.float64)
    code, errors = code_of(network, bits), []
    for t in range(60):
        x = drawn(kind, 6, t)
        d, true = difference(code, network, products(x, network), t), expected(x, network)
        for i, slots in enumerate(network.neighbors.tolist()):
            for slot, j in enumerate(slots):
                if j >= 0:
                    assert torch.equal(d[i, slot], -d[j, network.neighbors[j].tolist().index(i)])
                else:
                    assert not d[i, slot].any()
        errors.append(float((d - true).norm() / true.norm()))
    if kind == "normal" and bits >= 8:
        assert int(code.skipped) == 0, "nor where there is no neighbor"
    assert sorted(errors[20:])[20] < 32 * 2.0**-bits  # the median, once there are ranges


@pytest.mark.long
def test_the_difference_is_unbiased() -> None:
    network = Network(topologies.make("ring", 3), dtype=torch.float64)
    code, x = code_of(network, 4), drawn("normal", 3, 0)
    s, true = products(x, network), expected(x, network)
    for t in range(40):
        difference(code, network, s, t)
    saved, skipped = copy.deepcopy(code.saved()), code.skipped
    saved["state"][..., -2] += 3  # room for all draws
    total, squares, draws = torch.zeros_like(true), torch.zeros_like(true), 400
    for t in range(draws):
        code.load(saved)
        d = difference(code, network, s, 100 + t)
        total += d - true
        squares += (d - true).square()
    deviation = (squares / draws).sqrt().clamp(min=1e-6)
    assert float((total / draws / deviation).abs().max()) < 4.5 / draws**0.5
    assert float(code.skipped - skipped) == 0, "else it would be biased"


@pytest.mark.long
@pytest.mark.skipif(kernels.compiled() is None, reason="without a C compiler")
@pytest.mark.parametrize("bits", [3, 4, 8, 11, 16])
@pytest.mark.parametrize("lengths", [(5,), (64,), (40, 3, 90, 17), (300, 1000, 7, 3)], ids=str)
def test_compiled_loops_give_the_same_bits(lengths: tuple[int, ...], bits: int) -> None:
    """Messages, differences and ranges, also after wraps and for a worker without finite values."""
    network, threads = alone("ring", 5), torch.get_num_threads()
    edges = EdgeConstants(network, network.rounds[0], 1.0, 0)
    codes = [
        DifferenceCode(edges, bits, lengths, 2, 1, library=library)
        for library in (None, kernels.compiled())
    ]
    generator = torch.Generator().manual_seed(0)
    for t in range(40):
        x = torch.randn(5, sum(lengths), generator=generator) * (50 if 20 <= t < 24 else 1)
        x += 1e3 * (t % 3)
        x[1] = {30: torch.nan, 33: 1e30}.get(t, x[1])
        reference, compiled = (difference(code, network, products(x, network), t) for code in codes)
        assert torch.equal(compiled, reference.float()), t
        assert torch.equal(codes[0].state, codes[1].state), t
        torch.set_num_threads(1 + t % 2)
    torch.set_num_threads(threads)
    assert torch.equal(*(torch.stack([code.skipped, code.blocks]) for code in codes))
    assert int(codes[0].skipped) > 0


# Sizes of the first of four parts and of others until a message and from it on, that message, and
# the number of further ones until differences are found, with 4 and 8 bits.
FOLLOWS = {
    "alike": ((1, 1), (1, 1), 2, (0, 0)),
    "grow": ((1, 1), (1e6, 1e6), 40, (13, 13)),
    "shrink": ((1, 1), (1e-4, 1e-4), 40, (12, 20)),
    "part grows": ((1, 1), (1e4, 1), 40, (8, 9)),
    "part shrinks": ((1, 1), (1e-3, 1), 40, (14, 15)),
    "part was small": ((1e-7, 1), (1, 1), 40, (8, 8)),
    "part begins": ((0, 1), (1, 1), 40, (8, 8)),
    "part begins early": ((0, 1), (1, 1), 2, (8, 8)),
    "agreement": ((0, 0), (1, 1), 40, (32, 36)),
    "long agreement": ((0, 0), (1, 1), 300, (36, 34)),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", FOLLOWS)
def test_ranges_follow_differences(case: str, bits: int) -> None:
    (code, network), generator, found = long_code(bits), torch.Generator().manual_seed(0), []
    before, after, change, limits = FOLLOWS[case]
    parts, limit = slice(400 if "part" in case else None), limits[bits == 8]
    for t in range(change + limit + 3):
        start_apart = "agreement" in case and t < 2
        first, others = after if t >= change or start_apart else before
        common, own = (torch.randn(n, 800, generator=generator) for n in (1, 3))
        own[:, :400] *= first
        own[:, 400:] *= others
        x = common + own
        d, true = difference(code, network, products(x, network), t), expected(x, network)
        error = (d - true)[..., parts].norm() / true[..., parts].norm()
        found.append(bool(error < {4: 0.8, 8: 0.2}[bits]))
    assert any(all(found[i : i + 3]) for i in range(change, change + limit + 1))


@pytest.mark.parametrize(
    ("kind", "bits", "limit"),
    [("sizes", 3, 0.25), ("sizes", 4, 0.22), ("sizes", 8, 0.14), ("heavy tails", 3, 0.012),
     ("heavy tails", 4, 0.007), ("heavy tails", 8, 0.003), ("growing", 3, 0.002),
     ("waves", 4, 0.0025)],
)  # fmt: skip
def test_few_blocks_are_left_out(kind: str, bits: int, limit: float) -> None:
    """Of differences that change by up to 100 times from message to message, and others."""
    (code, network), generator = long_code(bits), torch.Generator().manual_seed(0)
    for t in range(120):
        x = torch.randn(3, 800, generator=generator)
        if kind == "sizes":
            x *= 10.0 ** (2 * float(torch.rand(1, generator=generator)) - 1)
        elif kind == "heavy tails":
            x /= torch.rand(3, 800, generator=generator).log().neg().sqrt()
        elif kind == "waves":
            x *= 10 ** math.sin(t / 8)
        else:
            x *= 1.05**t
        difference(code, network, products(x, network), t)
    assert float(code.skipped / code.blocks) < limit


@pytest.mark.long
@pytest.mark.parametrize(("bits", "alone_grows"), [(4, False), (8, True)])
def test_no_message_moves_models_apart(bits: int, alone_grows: bool) -> None:
    """Differences grow a thousandfold in a step, shrink again, and begin at 0: V grows in no step
    by an exchange, messages that are skipped are few, and the differences stay as small as those
    with whole messages."""
    least = {}
    for b in (bits, 32):
        network, layout = Network(topologies.make("ring", 8), dtype=torch.float64), Layout(SHAPES)
        gossip = algorithms.make("power-gossip", network, layout, bits=b)
        assert isinstance(gossip, PowerGossip)
        x = torch.zeros(8, layout.size, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        network.run(gossip.step(x))
        mean = torch.zeros(layout.size, dtype=torch.float64)
        for t in range(240):
            noise = torch.randn(x.shape, dtype=torch.float64, generator=generator).mul_(1e-3)
            noise[:, : 1200 if alone_grows else None] *= 1e3 if 80 <= t < 120 else 1
            x += noise
            mean += noise.mean(0)
            before = float((x - mean).square().sum())
            network.run(gossip.step(x))
            assert float((x - mean).square().sum()) <= before * (1 + 1e-9), t
        least[b] = float((x - mean).norm())
        for code in (c for codes in gossip.codes for c in codes):
            assert float(code.skipped) <= 0.15 * float(code.blocks)
        torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-9)
    assert least[bits] < 1.5 * least[32]


def test_16_bits_are_nearly_whole_messages() -> None:
    """With a round of its own for each pair, in which the third worker has no neighbor."""
    found, layout = [], Layout([(12, 10), (5, 9), (7,)])
    for bits in (16, 32):
        network = Network(topologies.make("round-robin", 3), dtype=torch.float64)
        gossip = algorithms.make("power-gossip", network, layout, bits=bits)
        x = torch.zeros(3, layout.size, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            x += torch.randn(x.shape, dtype=torch.float64, generator=generator)
            mean = x.mean(0)
            network.run(gossip.step(x))
            torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-12)
        found.append(x - mean)
    assert (found[0] - found[1]).norm() < 2e-3 * found[1].norm()


def test_each_message_has_its_own_random_numbers() -> None:
    """Also of what is not compressed: the same vectors, with the same ranges."""
    network, layout = alone("ring", 4), Layout(SHAPES)
    gossip = algorithms.make("power-gossip", network, layout, bits=4)
    assert isinstance(gossip, PowerGossip)
    x, sent = start(4, layout), []
    for _ in range(3):
        network.run(gossip.step(x.clone()))
    ranges = gossip.ranges()
    for _ in range(2):
        gossip.load_ranges(ranges)
        *_, rest = gossip.messages(x, 0)
        assert isinstance(rest, ToEach)
        sent.append(rest.tensor.clone())
        network.run(gossip.step(x.clone()))
    assert not torch.equal(*sent)


def test_a_checksum_finds_wraps_in_opposite_directions() -> None:
    """Of differences a little too large for the ranges: one that is not left out is right."""
    code, network = long_code(4, (64,), 60)
    for _ in range(2):
        code.begin(torch.ones(60, 2, 64), 0)
    saved = code.saved()
    step = 2.0 ** (int(saved["state"][0, 0, 0, 0]) + int(saved["state"][0, 0, 0, 1]) / 4 + 1 / 8)
    generator = torch.Generator().manual_seed(0)
    for t in range(100):
        code.load(saved)
        x = 1.6 * torch.randn(60, 64, generator=generator)
        d, true = difference(code, network, products(x, network), t), expected(x, network)
        wrong = (d - true).norm(dim=-1) > 8 * step  # of 64 elements, each below a step
        assert not (wrong & d.any(-1)).any()
    assert 0.5 < float(code.skipped / code.blocks) < 1


def test_a_wrong_bit_of_a_checksum_leaves_its_block_out() -> None:
    """If more than a quarter of the blocks are left out, all are."""
    code, network = long_code(6)
    for _ in range(2):
        code.begin(torch.ones(3, 2, 800), 0)
    own = code.encode(products(torch.ones(3, 800), network), 0, 0).clone()
    for wrong in (*([bit] for bit in range(8 * 2 * 13)), [0, 8, 16], [0, 8, 16, 24]):
        received, before = own.clone(), int(code.skipped)
        for bit in wrong:
            received[2, 1, -26 + bit // 8] ^= 1 << bit % 8
        code.decode(own, received, 0, torch.empty(3, 2, 800))
        assert int(code.skipped) - before == {1: 1, 3: 3, 4: 13}[len(wrong)]


def test_codes_of_an_edge_have_their_own_random_numbers() -> None:
    network = Network(topologies.make("ring", 3), dtype=torch.float64)
    s = products(drawn("normal", 3, 0), network)
    first, second = (code_of(network, 4, index=index).encode(s, 0, 0) for index in range(2))
    assert not torch.equal(first, second)


@pytest.mark.long
@pytest.mark.parametrize(("bits", "limit"), [(8, 1.02), (6, 1.05), (4, 1.3)])
def test_consensus_takes_few_more_steps(bits: int, limit: float) -> None:
    """Steps to an error that whole messages reach in 120."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(8, 60 * 50, dtype=torch.float64, generator=generator)
    target = 0.0
    for b, steps in ((32, 120), (bits, int(120 * limit))):
        network = Network(topologies.make("ring", 8), dtype=torch.float64)
        gossip = algorithms.make("power-gossip", network, Layout([(60, 50)]), bits=b)
        x = first.clone()
        for _ in range(steps):
            network.run(gossip.step(x))
        error = float((x - first.mean(0)).square().sum())
        target = target or error
    assert error <= target


@pytest.mark.parametrize(("bits", "iterations"), [(4, 1), (6, 2), (11, 3)])
def test_bits_are_the_formula(bits: int, iterations: int) -> None:
    """The first two messages of each side and iteration are whole."""
    network, layout = alone("ring", 4), Layout(SHAPES)
    gossip = algorithms.make("power-gossip", network, layout, bits=bits, num_iterations=iterations)
    x = torch.randn(4, layout.size)
    sides, rest = (40 + 20, 30 + 25), 17 + 9

    def size(length: int) -> int:
        fields = [bits] if bits <= 8 else [8, bits - 8]
        return 8 * (sum(-(-length * b // 8) for b in fields) + 2 * -(-length // 64))

    expected_bits, slots = 0, iterations * (1 + iterations % 2)
    for k in range(5 * iterations):
        whole, length = k < 2 * slots, sides[1 - k % 2]
        expected_bits += 2 * (32 * length if whole else size(length))
        if k % iterations == 0:
            expected_bits += 2 * (32 * rest if k < 2 * iterations else size(rest))
    for _ in range(5):
        network.run(gossip.step(x))
    assert network.bits.tolist() == [expected_bits] * 4


def test_a_broken_neighbor_does_not_reach_others() -> None:
    network, layout = alone("ring", 4), Layout(SHAPES)
    gossip = algorithms.make("power-gossip", network, layout, bits=6)
    x = torch.randn(4, layout.size)
    for t in range(20):
        if t == 10:
            x[2] = torch.nan
        network.run(gossip.step(x))
    assert x[[0, 1, 3]].isfinite().all()
    assert x[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("agree", "messages", "lengths"), [(2, 13, LENGTHS), (60, 100, (7, 13))])
def test_differences_are_found_after_an_agreement(
    agree: int, messages: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Also from ranges that have shrunk by more than the precision holds."""
    network = Network(topologies.make("ring", 3), dtype=dtype)
    code, x = code_of(network, 6, lengths), drawn("normal", 3, 0)[:, : sum(lengths)].to(dtype)
    for t in range(messages):
        s = products(x[:1].expand(3, -1) if 1 < t <= 1 + agree else x, network)
        d = difference(code, network, s, t)
    true = expected(x, network)
    assert float((d - true).norm() / true.norm()) < 12 * 2.0**-6
