"""A mesh [replica, shard] of the processes, runs on it, and the same unsharded."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from powergossip.network import processes, torch_group
from powergossip.optimizers import (
    GossipOptimizer,
)
from tests.harness.user_loop import CPU

DILOCO: dict[str, Any] = {"learning": "diloco", "local_steps": 2}
CORRECTED: dict[str, Any] = {**DILOCO, "learning_options": {"gradient_correction": True}}
ADAM: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.AdamW(ps, lr=0.01)  # noqa: E731
SGD: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1)  # noqa: E731

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpsgd": ("dpsgd", {}),
    "all-reduce": ("all-reduce", {}),
    "power-gossip": ("power-gossip", {}),
    "power-gossip, rank 2": ("power-gossip", {"rank": 2, "warm_start": False}),
    "power-gossip, 6 bits": ("power-gossip", {"bits": 6, "num_iterations": 1}),
    "power-gossip, rounded": ("power-gossip", {"round_weights": True}),
    "power-gossip, overlapping": ("power-gossip", {"overlapping": True}),
    "push-sum": ("push-sum", {}),
    "moniqua": ("moniqua", {"theta": 2.0}),
    "sign": ("choco", {"compressor": "sign-and-norm"}),
    "qsgd": ("choco", {"compressor": "qsgd"}),
    "qsgd, rates by size": ("choco", {"compressor": "qsgd", "unbiased": True}),
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


def check_pairs(*pairs: Pair) -> None:
    """Sharded parameters of several pairs are the same."""
    for others in zip(*(pair.sharded for pair in pairs), strict=True):
        for other in others[1:]:
            torch.testing.assert_close(other.to_local(), others[0].to_local())


def of_batch(model: nn.Module, replica: int, t: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * replica + t)
    inputs = torch.randn(8, 6, generator=generator)
    labels = torch.randint(3, (8,), generator=generator)
    return nn.functional.cross_entropy(model(inputs).float(), labels)
