"""Laws of gossip between replicas whose parameters are sharded by FSDP2.

The processes are a mesh [replica, shard]. A sharded run is the unsharded one of the same replicas,
in which each process has the whole model of its replica.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from powergossip.compressors import TopK
from powergossip.errors import BadInput
from powergossip.network import processes, torch_group
from powergossip.optimizers import (
    Config,
    GossipModelAverager,
    GossipOptimizer,
    PowerSGD,
    error_feedback,
    optimizer_step,
)
from tests.harness.user_loop import CPU, mlp, run

DILOCO = {"learning": "diloco", "local_steps": 2}
CORRECTED = {**DILOCO, "learning_options": {"gradient_correction": True}}
ADAM: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.AdamW(ps, lr=0.01)  # noqa: E731
SGD: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1)  # noqa: E731

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpsgd": ("dpsgd", {}),
    "all-reduce": ("all-reduce", {}),
    "power-gossip": ("power-gossip", {}),
    "power-gossip, rank 2": ("power-gossip", {"rank": 2, "warm_start": False}),
    "power-gossip, rounded": ("power-gossip", {"round_weights": True}),
    "power-gossip, overlapping": ("power-gossip", {"overlapping": True}),
    "push-sum": ("push-sum", {}),
    "moniqua": ("moniqua", {"theta": 2.0}),
    "sign": ("choco", {"compressor": "sign-and-norm"}),
    "qsgd": ("choco", {"compressor": "qsgd"}),
    "rounding": ("choco", {"compressor": "rounding"}),
    "top-k": ("choco", {"compressor": "top-k", "keep_ratio": 0.3}),
    "random-k": ("choco", {"compressor": "random-k", "keep_ratio": 0.3}),
    "random-block": ("choco", {"compressor": "random-block", "keep_ratio": 0.3}),
    "deepsqueeze": ("deepsqueeze", {"compressor": "top-k", "keep_ratio": 0.3}),
    "diloco": ("power-gossip", {**CORRECTED, "max_norm": 0.5}),
    "diloco, fragments": (
        "power-gossip",
        {**DILOCO, "learning_options": {"gradient_correction": True, "fragments": 2}},
    ),
    "diloco, overlapping": ("dpsgd", {**DILOCO, "overlapping": True}),
    "gasloc": ("choco", {"compressor": "top-k", "keep_ratio": 0.3, **DILOCO, "learning": "gasloc"}),
    "noloco": ("dpsgd", {**DILOCO, "learning": "noloco"}),
    "k-gt": ("power-gossip", {"learning": "k-gt", "local_steps": 2}),
    "gradient-tracking": ("power-gossip", {"learning": "gradient-tracking"}),
    "exact-diffusion": ("dpsgd", {"learning": "exact-diffusion"}),
}
OF_SGD: dict[str, tuple[str, dict[str, Any]]] = {
    "quasi-global": (
        "dpsgd",
        {"learning": "quasi-global-momentum", "learning_options": {"momentum": 0.9}},
    ),
    "gt-nsgd": ("dpsgd", {"learning": "gt-nsgd"}),
    "motef": ("choco", {"compressor": "sign-and-norm", "learning": "motef"}),
}


def long_ones_apart(names: Iterable[Any], *often: Any) -> list[Any]:
    """Cases, of which those that are not named here are slow."""
    return [n if n in often else pytest.param(n, marks=pytest.mark.slow) for n in names]


class Replicas(NamedTuple):
    """A mesh [replica, shard], and the place of this process in it."""

    mesh: DeviceMesh
    replica: int
    shard: int

    @property
    def between(self) -> DeviceMesh:
        return self.mesh["replica"]

    @property
    def inside(self) -> DeviceMesh:
        return self.mesh["shard"]

    def shards(self, model: nn.Module, **options: Any) -> Any:
        """The model, its linear layers and itself by fully_shard."""
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=self.inside, **options)
        return fully_shard(model, mesh=self.inside, **options)

    def added(self, *numbers: int) -> list[int]:
        """Sums over the shards of this replica."""
        found = torch.tensor(numbers)
        dist.all_reduce(found, group=self.inside.get_group())
        return list(map(int, found))


_meshes: dict[tuple[int, ...], Replicas] = {}


def replicas(count: int, ranks: Tensor | None = None) -> Replicas:
    """The mesh of this number of replicas. All processes call it."""
    torch_group(processes(), CPU)
    ranks = torch.arange(processes().size) if ranks is None else ranks
    key = (count, *ranks.tolist())
    if key not in _meshes:
        mesh = DeviceMesh("cpu", ranks.view(count, -1), mesh_dim_names=("replica", "shard"))
        place = mesh.get_coordinate() or (-1, -1)
        _meshes[key] = Replicas(mesh, *place)
    return _meshes[key]


def whole(model: nn.Module) -> Tensor:
    """The parameters, gathered: [D]."""
    tensors = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


SHAPES = (
    (6, 4),
    (8, 3),
    (5, 3),
    (3, 5),
    (2, 3, 2),
    (6,),
    (5,),
)  # also rows that do not divide evenly


def divided(x: Tensor, where: Replicas, *placements: Any) -> DTensor:
    """The DTensor of a tensor that all shards have, by default in blocks of rows."""
    return distribute_tensor(x, where.inside, placements or [Shard(0)], src_data_rank=None)


class Pair:
    """Sharded parameters and the same ones whole, with gradients from a formula."""

    def __init__(self, where: Replicas):
        self._where = where
        self.whole = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.sharded: list[Any] = [nn.Parameter(divided(p.data, where)) for p in self.whole]

    def start(self) -> None:
        """Other values in each replica."""
        torch.manual_seed(self._where.replica)
        with torch.no_grad():
            for x, sharded in zip(self.whole, self.sharded, strict=True):
                x.copy_(torch.randn(x.shape))
                sharded.copy_(divided(x, self._where))

    def backward(self, t: int) -> None:
        torch.manual_seed(100 * t + self._where.replica)
        for x, sharded in zip(self.whole, self.sharded, strict=True):
            x.grad = torch.randn(x.shape) + x.detach()
            sharded.grad = divided(x.grad.clone(), self._where)

    def check(self) -> None:
        for x, sharded in zip(self.whole, self.sharded, strict=True):
            own = divided(x.data, self._where).to_local()
            torch.testing.assert_close(sharded.to_local(), own, rtol=1e-5, atol=1e-5)


def check(case: tuple[str, dict[str, Any]], make: Any, where: Replicas) -> None:
    """A sharded run is the unsharded one, with its bits divided over the shards."""
    (method, given), pair = case, Pair(where)
    optimizer = GossipOptimizer(make(pair.sharded), method, mesh=where.between, **given)
    group = where.between.get_group()
    expected = GossipOptimizer(make(pair.whole), method, process_group=group, **given)
    pair.start()
    for t in range(4):
        pair.backward(t)
        for each in (optimizer, expected):
            each.step()
    pair.check()
    with optimizer.mean_model(), expected.mean_model():
        pair.check()
    pair.check()
    bits, inside = where.added(optimizer.bits, optimizer.bits_inside)
    # A number for each tensor in each shard, and slices rounded up to whole elements.
    more = 6 * 2 * len(SHAPES) * 2 * 32 * where.inside.size()
    assert expected.bits <= bits <= expected.bits + more
    alone = method in ("dpsgd", "all-reduce", "push-sum", "moniqua") and "max_norm" not in given
    assert alone == (inside == 0) or given.get("learning") == "gt-nsgd"


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    "name",
    long_ones_apart(
        CASES,
        *("dpsgd", "power-gossip, rank 2", "power-gossip, overlapping", "moniqua"),
        *("sign", "top-k", "random-k", "diloco, fragments"),
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
    check(CASES[name], ADAM, replicas(count))


@pytest.mark.parallel([4])
def test_noise_is_noise_beside_the_rows_of_all_shards() -> None:
    """Replicas that differ in small rows of the last shard only, by less than large rows round."""
    where = replicas(2)
    torch.manual_seed(where.replica)
    small = 1e-9 * torch.randn(4, 3)
    torch.manual_seed(9)
    start = torch.cat([torch.randn(4, 3), small])
    sharded, plain = nn.Parameter(divided(0 * start, where)), nn.Parameter(0 * start)
    group = where.between.get_group()
    for p, among in ((sharded, {"mesh": where.between}), (plain, {"process_group": group})):
        given: dict[str, Any] = {"num_iterations": 3, **among}
        optimizer = GossipOptimizer(torch.optim.SGD([p], lr=0.0), "power-gossip", **given)
        with torch.no_grad():
            p.copy_(divided(start, where) if p is sharded else start)
        optimizer.step()
    assert torch.equal(plain.data, start)
    assert torch.equal(sharded.to_local(), divided(start, where).to_local())  # type: ignore[attr-defined]


# Models.


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", long_ones_apart(["power-gossip", "top-k", "diloco"], "diloco"))
def test_a_run_of_fsdp_is_the_unsharded_one(name: str) -> None:
    where, (method, given) = replicas(2), CASES[name]
    model, reference = where.shards(mlp()), mlp()
    optimizer = GossipOptimizer(ADAM(model.parameters()), method, mesh=where.between, **given)
    group = where.between.get_group()
    expected = GossipOptimizer(ADAM(reference.parameters()), method, process_group=group, **given)
    run(model, optimizer, range(4), where.replica)
    run(reference, expected, range(4), where.replica)
    torch.testing.assert_close(whole(model), whole(reference), rtol=0, atol=1e-5)
    assert (whole(reference) - whole(mlp())).abs().max() > 0.02


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
@pytest.mark.parametrize("options", long_ones_apart([{}, {"reshard_after_forward": False}], {}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_and_frozen_parameters(options: dict[str, Any], dtype: torch.dtype) -> None:
    where = replicas(2)
    given: Any = {"num_iterations": 2}
    reference = Tied().to(dtype)
    model = Tied().to(dtype)
    fully_shard(model.hidden, mesh=where.inside, **options)
    fully_shard(model, mesh=where.inside, **options)
    found = []
    for its, among in (
        (model, {"mesh": where.between}),
        (reference, {"process_group": where.between.get_group()}),
    ):
        optimizer = GossipOptimizer(ADAM(its.parameters()), "power-gossip", **given, **among)
        for t in range(4):
            optimizer.zero_grad()
            of_batch(its, where.replica, t, dtype).backward()
            optimizer.step()
        found.append(whole(its))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*found, rtol=0, atol=tolerance)
    assert (found[0] - whole(Tied().to(dtype))).abs().max() > 0.02


def of_batch(model: nn.Module, replica: int, t: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * replica + t)
    inputs = torch.randn(8, 6, generator=generator)
    labels = torch.randint(3, (8,), generator=generator)
    return nn.functional.cross_entropy(model(inputs).float(), labels)


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
@pytest.mark.parametrize("given", [{}, {"learning": "gradient-tracking"}, CORRECTED])
def test_parameters_that_are_whole_in_all_shards(given: dict[str, Any]) -> None:
    where = replicas(2)
    start = torch.arange(15.0).view(5, 3), torch.arange(7.0)
    places = Replicate(), Shard(0)
    sharded: list[Any] = [
        nn.Parameter(divided(x, where, place)) for x, place in zip(start, places, strict=True)
    ]
    plain = [nn.Parameter(x.clone()) for x in start]
    group = where.between.get_group()
    for parameters, among in (
        (sharded, {"mesh": where.between}),
        (plain, {"process_group": group}),
    ):
        optimizer = GossipOptimizer(SGD(parameters), "power-gossip", **given, **among)
        for t in range(4):
            optimizer.zero_grad()
            losses = [(p - where.replica * t).square().sum() for p in parameters]
            (losses[0] + losses[1]).backward()
            optimizer.step()
    for parameter, expected in zip(sharded, plain, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.data, rtol=1e-5, atol=1e-5)


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
        ("power-gossip", {"rank": 1}),
        ("power-gossip", CORRECTED),
        ("choco", {"compressor": "top-k", "keep_ratio": 0.3}),
        ("choco", {"compressor": "svd"}),
        ("sparta", {"keep_ratio": 0.3}),
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


# Gradients.


@pytest.mark.parallel([4, 8])
def test_compressed_gradients_are_those_of_the_blocks() -> None:
    where = replicas(2)
    pair, group = Pair(where), where.between.get_group()
    blocks = blocks_of(pair)
    of = error_feedback.ErrorFeedback
    feedback = of(pair.sharded, TopK(keep_ratio=0.3), mesh=where.between)
    reference = of(blocks, TopK(keep_ratio=0.3), process_group=group)
    for t in range(4):
        start_and_gradients(pair, blocks, t)
        error_feedback.optimizer_step(SGD(pair.sharded), feedback)
        error_feedback.optimizer_step(SGD(blocks), reference)
    check_blocks(pair, blocks)
    assert feedback.bits == reference.bits > 0


@pytest.mark.parallel([4, 8])
def test_powersgd_is_that_of_the_blocks() -> None:
    where = replicas(2)
    pair, group = Pair(where), where.between.get_group()
    blocks = blocks_of(pair)
    config = Config(rank=1, min_compression_rate=1, start_compressing_after_num_steps=1)
    powersgd = PowerSGD(pair.sharded, config, mesh=where.between)
    reference = PowerSGD(blocks, config, process_group=group)
    assert any(reference.is_compressed_mask)
    for t in range(4):
        start_and_gradients(pair, blocks, t)
        optimizer_step(SGD(pair.sharded), powersgd)
        optimizer_step(SGD(blocks), reference)
    check_blocks(pair, blocks)
    assert powersgd.bits == reference.bits > 0


@pytest.mark.parallel([4])
def test_the_averager_is_gossip_optimizer() -> None:
    where = replicas(2)
    model, reference = where.shards(mlp()), where.shards(mlp())
    averager = GossipModelAverager("power-gossip", mesh=where.between)
    optimizer = PostLocalSGDOptimizer(SGD(model.parameters()), averager)
    expected = GossipOptimizer(SGD(reference.parameters()), "power-gossip", mesh=where.between)
    run(model, optimizer, range(4), where.replica)
    run(reference, expected, range(4), where.replica)
    assert torch.equal(whole(model), whole(reference))
    assert averager.bits == expected.bits > 0
    assert averager.bits_inside == expected.bits_inside > 0


# State.

STATES = {
    "power-gossip": CASES["power-gossip"],
    "diloco": CASES["diloco"],
    "fragments": CASES["diloco, fragments"],
    "top-k": CASES["top-k"],
    "deepsqueeze": CASES["deepsqueeze"],
}


def saved_and_loaded(
    case: tuple[str, dict[str, Any]], folder: Path, where: Replicas, then: Replicas, **options: Any
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Parameters and bits of a run, and of one that goes on in another mesh from its checkpoint."""
    method, given = case
    (folder,) = processes().gather(folder)[:1]
    place = folder / str(where.replica)
    model = where.shards(mlp())
    make = lambda its, mesh: GossipOptimizer(  # noqa: E731
        ADAM(its.parameters()), method, mesh=mesh.between, **given, **options
    )
    optimizer = make(model, where)
    run(model, optimizer, range(5), where.replica)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=place, process_group=where.inside.get_group())
    run(model, optimizer, range(5, 8), where.replica)
    end, bits = whole(model), where.added(optimizer.bits, optimizer.bits_inside)
    ends = processes().gather((where.replica, end, bits))
    if then.replica < 0:
        return end, end, bits, bits
    place = folder / str(then.replica)
    model = then.shards(mlp(1))
    optimizer = make(model, then)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=place, process_group=then.inside.get_group())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    run(model, optimizer, range(5, 8), then.replica)
    (expected, of_run), *_ = [(x, b) for replica, x, b in ends if replica == then.replica]
    found = then.added(optimizer.bits, optimizer.bits_inside)
    return expected, whole(model), of_run, found


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("power-gossip", {"per_shard": True}), ("diloco", {}), ("top-k", {})),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name in STATES
            for options in ({}, {"per_shard": True})
        ),
    ],
)
def test_resumed_bit_for_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    where = replicas(2)
    expected, found, bits, counted = saved_and_loaded(
        STATES[name], tmp_path, where, where, **options
    )
    assert torch.equal(found, expected)
    assert counted == bits


@pytest.mark.parallel([8])
@pytest.mark.parametrize("name", long_ones_apart(STATES, "diloco"))
def test_resumed_with_other_shards(name: str, tmp_path: Path) -> None:
    """2 × 4 → 2 × 2, with four of the processes, and 4 × 2 → 4 × 1."""
    for before, ranks in ((replicas(2), [0, 1, 4, 5]), (replicas(4), [0, 2, 4, 6])):
        count = before.mesh.size(0)
        after = replicas(count, torch.tensor(ranks))
        folder = tmp_path / str(count)
        expected, found, _, _ = saved_and_loaded(STATES[name], folder, before, after)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parallel([4])
def test_a_state_of_other_shards_is_rejected() -> None:
    where = replicas(2)
    pair = Pair(where)
    sharded, plain = pair.sharded, pair.whole
    optimizer = GossipOptimizer(ADAM(sharded), "dpsgd", mesh=where.between)
    state = copy.copy(optimizer.state_dict())
    per_shard = GossipOptimizer(ADAM(sharded), "dpsgd", mesh=where.between, per_shard=True)
    with pytest.raises(ValueError, match=r"per_shard=False \(here True\)"):
        per_shard.load_state_dict(state)
    group = where.between.get_group()
    with pytest.raises(ValueError, match="per_shard"):
        GossipOptimizer(ADAM(plain), "dpsgd", process_group=group).load_state_dict(state)


# Bad input.


@pytest.mark.parallel([4])
def test_bad_input() -> None:
    where = replicas(2)
    pair = Pair(where)
    sharded, plain = pair.sharded, pair.whole
    column = nn.Parameter(distribute_tensor(torch.zeros(4, 4), where.inside, [Shard(1)]))
    both = nn.Parameter(distribute_tensor(torch.zeros(4, 4), where.mesh, [Replicate(), Shard(0)]))
    other = nn.Parameter(distribute_tensor(torch.zeros(4, 4), where.between, [Shard(0)]))
    scalar = nn.Parameter(distribute_tensor(torch.zeros(()), where.inside, [Replicate()]))

    def of(parameters: Any, method: str = "dpsgd", **given: Any) -> None:
        GossipOptimizer(SGD(parameters), method, **{"mesh": where.between} | given)

    for match, parameters, given in (
        ("is not sharded; use fully_shard", plain, {}),
        ("whole in every process, or GossipOptimizer with mesh=", sharded, {"mesh": None}),
        ("is on a mesh of 2 dimensions", [both], {}),
        (r"has the placement S\(1\)|has the placement Shard", [column], {}),
        ("is no other dimension than", [other], {}),
        ("others on", [sharded[0], other], {}),
        ("is a scalar", [scalar], {}),
        ("use one dimension of a DeviceMesh", sharded, {"mesh": where.mesh}),
        ("use one dimension of a DeviceMesh", sharded, {"mesh": "replica"}),
        ("process_group: leave it out with mesh=", sharded, {"process_group": processes()}),
        ("per_shard=True: use it with mesh=", plain, {"per_shard": True, "mesh": None}),
        ("message_dtype='parameter': use float32", sharded, {"message_dtype": "parameter"}),
        ("sparta of sharded parameters: use per_shard", sharded, {"method": "sparta"}),
        (
            "running_sums=True of sharded parameters",
            sharded,
            {"method": "push-sum", "running_sums": True},
        ),
        (
            "learning=relay-sgd of sharded parameters",
            sharded,
            {"learning": "relay-sgd", "topology": "chain"},
        ),
        (
            "compressor SVD of sharded matrices: use per_shard",
            sharded,
            {"method": "choco", "compressor": "svd"},
        ),
    ):
        with pytest.raises(ValueError, match=match):
            of(parameters, **given)
    with pytest.raises(BadInput, match="process_group: leave it out with mesh="):
        GossipModelAverager("dpsgd", mesh=where.between, process_group=processes())
    same = nn.Parameter(divided(torch.zeros(4, 4), where, Replicate()))
    with pytest.raises(BadInput, match="is whole in all shards"):
        PowerSGD([sharded[0], same], Config(rank=1), mesh=where.between)
    uneven = distribute_tensor(torch.zeros(6, 4 + where.replica), where.inside, [Shard(0)])
    with pytest.raises(BadInput, match="use the same model"):
        of([nn.Parameter(uneven)])
