"""Laws of gossip between replicas whose parameters are sharded by FSDP2.

A sharded run is the unsharded one of the same replicas, in which each process has the whole model
of its replica.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from powergossip.compressors import TopK
from powergossip.network import processes
from powergossip.optimizers import (
    Config,
    ErrorFeedback,
    GossipOptimizer,
    PowerSGD,
    optimizer_step,
)
from tests.harness.replicas import (
    ADAM,
    CASES,
    CORRECTED,
    DILOCO,
    OF_SGD,
    SGD,
    Pair,
    check,
    check_pairs,
    divided,
    long_ones_apart,
    of_batch,
    replicas,
    whole,
)
from tests.harness.user_loop import mlp, run


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    "name",
    long_ones_apart(
        CASES,
        *("dpsgd", "power-gossip, rank 2", "power-gossip, overlapping", "moniqua"),
        *("sign", "top-k", "random-k", "qsgd, rates by size", "diloco, fragments"),
    ),
)
def test_a_sharded_run_is_the_unsharded_one(name: str) -> None:
    check(CASES[name], ADAM, replicas(2))


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", long_ones_apart(OF_SGD, "gt-nsgd"))
def test_a_sharded_run_with_sgd_is_the_unsharded_one(name: str) -> None:
    check(OF_SGD[name], SGD, replicas(2))


@pytest.mark.parallel([8])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("power-gossip, rank 2", 2), ("diloco", 4), ("sign", 2), ("top-k", 2), ("random-k", 4)),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name in CASES for n in (2, 4)),
    ],
)
def test_uneven_and_empty_shards(name: str, count: int) -> None:
    """Four shards of two to six rows: some are without rows. And a ring of replicas."""
    if "bits" in name and count == 2:
        with pytest.raises(ValueError, match="bits=6: use 32 with 4 shards"):
            check(CASES[name], ADAM, replicas(count))
        return
    check(CASES[name], ADAM, replicas(count))


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", ["power-gossip", "clipped"])
def test_a_sharded_run_in_float64_is_the_unsharded_one(name: str) -> None:
    where, group = replicas(2), replicas(2).between.get_group()
    given: Any = {"clipped": {**CORRECTED, "max_norm": 0.5}}.get(name, {})
    start = torch.arange(15.0, dtype=torch.float64).view(5, 3).sin()
    found = []
    for sharded in (True, False):
        p: Any = nn.Parameter(divided(start, where) if sharded else start.clone())
        among: Any = {"mesh": where.between} if sharded else {"process_group": group}
        optimizer = GossipOptimizer(SGD([p]), "power-gossip", **given, **among)
        for t in range(5):
            optimizer.zero_grad()
            (p * (p + where.replica + t)).sum().backward()
            optimizer.step()
        found.append(p.full_tensor() if sharded else p.data)
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


@pytest.mark.parallel([4, 8])
def test_directions_drawn_again_are_the_rows_of_whole_ones() -> None:
    """Replicas that agree for two rounds, one of each side, and then differ."""
    where = replicas(2)
    pair, group = Pair(where), where.between.get_group()
    make: Any = lambda ps: torch.optim.SGD(ps, lr=0.0)  # noqa: E731
    optimizer = GossipOptimizer(make(pair.sharded), "power-gossip", mesh=where.between)
    expected = GossipOptimizer(make(pair.whole), "power-gossip", process_group=group)
    for t in range(4):
        if t == 2:
            pair.start()
        optimizer.step()
        expected.step()
    pair.check()


def check_noise(large: int, small: int, sharded: bool = True) -> None:
    """Replicas that differ in their last rows only, by less than large rows round, stay as they
    are."""
    where = replicas(2)
    torch.manual_seed(where.replica)
    last = 1e-9 * torch.randn(small, 3)
    torch.manual_seed(9)
    start: Tensor = torch.cat([torch.randn(large, 3), last])
    p: Any = nn.Parameter(divided(0 * start, where) if sharded else 0 * start)
    among: Any = (
        {"mesh": where.between} if sharded else {"process_group": where.between.get_group()}
    )
    local = torch.optim.SGD([p], lr=0.0)
    optimizer = GossipOptimizer(local, "power-gossip", num_iterations=3, **among)
    with torch.no_grad():
        p.copy_(divided(start, where) if sharded else start)
    optimizer.step()
    if sharded:
        assert torch.equal(p.to_local(), divided(start, where).to_local())
    else:
        assert torch.equal(p.data, start)


@pytest.mark.parallel([4])
def test_noise_is_noise_beside_the_rows_of_all_shards() -> None:
    """The small rows are those of the last shard."""
    check_noise(4, 4)
    check_noise(4, 4, sharded=False)


@pytest.mark.parallel([8])
def test_noise_is_noise_beside_an_empty_shard() -> None:
    """Nine rows in blocks of three: the fourth shard has none, and decides as the others do."""
    check_noise(6, 3)


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, 0) for name in ("dpsgd", "power-gossip", "sign", "rounding")),
        *((name, 5) for name in ("power-gossip", "top-k", "random-k")),
    ],
)
def test_a_nan_in_one_shard_is_as_visible_as_in_an_unsharded_run(name: str, row: int) -> None:
    where = replicas(2)
    (method, given), group = CASES[name], where.between.get_group()
    start = torch.arange(24.0).view(6, 4).sin() + where.replica
    if where.replica == 0:
        start[row, 1] = torch.nan
    found = []
    for sharded in (True, False):
        zeros = torch.zeros(6, 4)
        p: Any = nn.Parameter(divided(zeros, where) if sharded else zeros)
        among: Any = {"mesh": where.between} if sharded else {"process_group": group}
        optimizer = GossipOptimizer(torch.optim.SGD([p], lr=0.0), method, **given, **among)
        with torch.no_grad():
            p.copy_(divided(start, where) if sharded else start)
        for _ in range(3):
            optimizer.step()
        found.append((p.full_tensor() if sharded else p.data).isnan())
    assert found[1].any()
    assert torch.equal(*found), found


# Models.


class Tied(nn.Module):
    """A model with tied and frozen parameters, whose root has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.frozen, self.norm = nn.Linear(6, 6).requires_grad_(False), nn.LayerNorm(6)
        self.head = nn.Linear(6, 3, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight[:3].detach().clone())
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.abs().mul(9).long().clamp(max=10)[:, 0]
        x = self.norm(self.frozen(self.hidden(self.embedding(tokens))))
        return self.head(x) + self.out(x)[:, :3]


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("power-gossip", torch.bfloat16, {}),
        ("power-gossip, overlapping", torch.float32, {}),
        ("diloco", torch.float32, {}),
        *(
            pytest.param(name, torch.float32, options, marks=pytest.mark.slow)
            for name in ("power-gossip", "top-k", "power-gossip, overlapping")
            for options in ({}, {"reshard_after_forward": False})
        ),
    ],
)
def test_a_run_of_fsdp_is_the_unsharded_one(
    name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    where, (method, given) = replicas(2), CASES[name]
    model, reference = Tied().to(dtype), Tied().to(dtype)
    fully_shard(model.hidden, mesh=where.inside, **options)
    fully_shard(model, mesh=where.inside, **options)
    found = []
    for its, among in (
        (model, {"mesh": where.between}),
        (reference, {"process_group": where.between.get_group()}),
    ):
        optimizer = GossipOptimizer(ADAM(its.parameters()), method, **given, **among)
        for t in range(4):
            optimizer.zero_grad()
            of_batch(its, where.replica, t, dtype).backward()
            optimizer.step()
        found.append(whole(its))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*found, rtol=0, atol=tolerance)
    assert (found[0] - whole(Tied().to(dtype))).abs().max() > 0.02


@pytest.mark.parallel([4])
def test_mixed_precision_averages_the_parameters_in_float32() -> None:
    where = replicas(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = where.shards(mlp(), mp_policy=policy)
    optimizer = GossipOptimizer(ADAM(model.parameters()), "all-reduce", mesh=where.between)
    run(model, optimizer, range(3), where.replica)
    everywhere = processes().gather(whole(model))
    assert all(torch.equal(x, everywhere[0]) for x in everywhere)
    assert (whole(model) - whole(mlp())).abs().max() > 0.01


@pytest.mark.parallel([4])
def test_the_mean_model_is_computed_with_after_a_forward_pass_alone() -> None:
    """After which the root of FSDP2 keeps its whole parameters."""
    where = replicas(2)
    model: Any = fully_shard(mlp(), mesh=where.inside)
    optimizer = GossipOptimizer(
        SGD(model.parameters()), "dpsgd", mesh=where.between, local_steps=100
    )
    run(model, optimizer, range(3), where.replica)
    inputs = torch.ones(1, 6)
    before = model(inputs).detach().clone()
    with optimizer.mean_model():
        averaged = model(inputs).detach().clone()
    after = model(inputs).detach().clone()
    assert torch.equal(before, after)
    everywhere = processes().gather((before, averaged))
    assert all(torch.equal(mean, averaged) for _, mean in everywhere)
    assert not torch.equal(everywhere[0][0], everywhere[-1][0])
    assert not torch.equal(before, averaged)

    bits = optimizer.bits
    optimizer.merge()  # of two replicas: each sends its shard once
    assert optimizer.bits - bits == 32 * sum(p.to_local().numel() for p in model.parameters())
    assert torch.equal(model(inputs), averaged)


@pytest.mark.parallel([4])
def test_replicas_start_with_the_values_of_the_first() -> None:
    """Frozen ones, too, and after a forward pass, which leaves whole parameters in the root."""
    where, inputs = replicas(2), torch.ones(1, 6)
    model: Any = mlp(where.replica)
    model[2].requires_grad_(False)
    local = SGD(fully_shard(model, mesh=where.inside).parameters())
    model(inputs)
    GossipOptimizer(local, "dpsgd", mesh=where.between)
    torch.testing.assert_close(model(inputs), mlp(0)(inputs))


@pytest.mark.parallel([4])
def test_an_overflow_in_one_shard_skips_the_update_of_its_replica() -> None:
    where = replicas(2)
    model = where.shards(mlp())
    optimizer: Any = GossipOptimizer(
        SGD(model.parameters()), "dpsgd", mesh=where.between, local_steps=2
    )
    before = whole(model)
    of_batch(model, where.replica, 0, torch.float32).backward()
    optimizer.grad_scale = None
    optimizer.found_inf = torch.tensor(float((where.replica, where.shard) == (0, 1)))
    optimizer.step()
    assert torch.equal(whole(model), before) == (where.replica == 0)


# Blocks by themselves.


def blocks_of(pair: Pair) -> list[nn.Parameter]:
    """Plain copies of this shard's blocks, as far as it has rows."""
    found = [p.to_local().detach().clone() for p in pair.sharded]
    return [nn.Parameter(block) for block in found if block.numel()]


def start_and_gradients(pair: Pair, blocks: list[nn.Parameter], t: int) -> None:
    """Gradients of step t for both, and values before the first."""
    with_rows = [p for p in pair.sharded if p.to_local().numel()]
    if t == 0:
        pair.start()
        with torch.no_grad():
            for p, block in zip(with_rows, blocks, strict=True):
                block.copy_(p.to_local())
    errors = [p.grad for p in pair.sharded]
    pair.backward(t)
    gradients = {id(p): p.grad.to_local().detach().clone() for p in with_rows}
    for p, error in zip(pair.sharded, errors, strict=True):
        if error is not None:  # as a backward pass
            p.grad = error.add_(p.grad)
    for p, block in zip(with_rows, blocks, strict=True):
        own = gradients[id(p)]
        block.grad = own if block.grad is None else block.grad.add_(own)


def check_blocks(pair: Pair, blocks: list[nn.Parameter]) -> None:
    found = [p.to_local() for p in pair.sharded if p.to_local().numel()]
    for p, block in zip(found, blocks, strict=True):
        torch.testing.assert_close(p, block.data, rtol=1e-6, atol=1e-6)


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("power-gossip", CORRECTED),
        ("choco", {"compressor": "top-k", "keep_ratio": 0.3}),
        ("choco", {"compressor": "svd"}),
        ("sparta", {"keep_ratio": 0.3}),
        ("all-reduce", {"bits": 4, **DILOCO}),
    ],
)
def test_per_shard_a_block_is_a_parameter(method: str, given: dict[str, Any]) -> None:
    where = replicas(2)
    pair = Pair(where)
    blocks = blocks_of(pair)
    optimizer = GossipOptimizer(
        ADAM(pair.sharded), method, mesh=where.between, per_shard=True, **given
    )
    group = where.between.get_group()
    reference = GossipOptimizer(ADAM(blocks), method, process_group=group, **given)
    for t in range(6):
        optimizer.zero_grad()
        reference.zero_grad()
        start_and_gradients(pair, blocks, t)
        optimizer.step()
        reference.step()
    check_blocks(pair, blocks)
    assert optimizer.bits == reference.bits > 0
    assert optimizer.bits_inside == 0


@pytest.mark.parallel([4])
def test_per_shard_a_norm_is_that_of_the_replica() -> None:
    """D-PSGD is the same with and without per_shard."""
    where = replicas(2)
    pairs = [Pair(where) for _ in range(2)]
    for pair, per_shard in zip(pairs, (False, True), strict=True):
        optimizer = GossipOptimizer(
            SGD(pair.sharded), "dpsgd", mesh=where.between, per_shard=per_shard, learning="gt-nsgd"
        )
        pair.start()
        for t in range(3):
            pair.backward(t)
            optimizer.step()
    check_pairs(*pairs)


# Gradients.


FROM_STEP_1 = Config(rank=1, min_compression_rate=1, start_compressing_after_num_steps=1)
OF_GRADIENTS: dict[str, Callable[..., Any]] = {
    "ef-sgd": lambda ps, **among: ErrorFeedback(ps, TopK(keep_ratio=0.3), **among),
    "powersgd": lambda ps, **among: PowerSGD(ps, FROM_STEP_1, **among),
}


@pytest.mark.parallel([4, 8])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_compressed_gradients_are_those_of_the_blocks(name: str) -> None:
    where = replicas(2)
    pair, group = Pair(where), where.between.get_group()
    blocks = blocks_of(pair)
    aggregator = OF_GRADIENTS[name](pair.sharded, mesh=where.between)
    reference = OF_GRADIENTS[name](blocks, process_group=group)
    for t in range(4):
        start_and_gradients(pair, blocks, t)
        optimizer_step(SGD(pair.sharded), aggregator)
        optimizer_step(SGD(blocks), reference)
    check_blocks(pair, blocks)
    assert name != "powersgd" or reference.compression_rate > 1
    assert aggregator.bits == reference.bits > 0
