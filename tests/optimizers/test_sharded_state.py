"""The state, the counts and the bad input of sharded replicas."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from powergossip.errors import BadInput
from powergossip.network import processes
from powergossip.optimizers import (
    GossipOptimizer,
)
from powergossip.optimizers.sharded_parameters import Sharding
from powergossip.replica_group import Shards
from tests.harness.replicas import (
    ADAM,
    CASES,
    SGD,
    Pair,
    Replicas,
    check_pairs,
    divided,
    long_ones_apart,
    replicas,
    whole,
)
from tests.harness.user_loop import CPU, mlp, run

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
    inside = optimizer.bits_inside
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert optimizer.bits_inside == inside
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
def test_a_state_before_the_first_step_is_that_of_no_step() -> None:
    where = replicas(2)
    pairs = plain, saved, loaded = [Pair(where) for _ in range(3)]
    optimizers = [
        GossipOptimizer(ADAM(pair.sharded), "power-gossip", mesh=where.between) for pair in pairs
    ]
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    for pair, optimizer in zip(pairs, optimizers, strict=True):
        pair.start()
        for t in range(3):
            pair.backward(t)
            optimizer.step()
    check_pairs(plain, saved)
    check_pairs(plain, loaded)


@pytest.mark.parallel([4])
def test_sums_of_counts_stay_with_other_shards() -> None:
    where = replicas(2)
    sharding = Sharding(Shards(where.inside, CPU), False)
    counts = [[7, 2, 30], [8, 3, 41], [9, 1, 50]]  # of three shards
    network = sharding.loaded({"averaging": [], "network": {"of_shards": counts}})["network"]
    found = where.added(int(network["bits"]), int(network["messages"]), sharding.shards.bits)
    assert found == [24, 6, 121]
    state = {"averaging": [], "network": network}
    again = sharding.loaded(sharding.saved(state, sharding.shards.bits))["network"]
    assert again == network
    assert where.added(sharding.shards.bits) == [121]


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
    with pytest.raises(ValueError, match="of sharded replicas, these are whole"):
        GossipOptimizer(ADAM(plain), "dpsgd", process_group=group).load_state_dict(state)
    other = GossipOptimizer(ADAM(sharded), "choco", mesh=where.between, compressor="top-k")
    with pytest.raises(ValueError, match=r"has method='dpsgd' \(here 'choco'\); use the same"):
        other.load_state_dict(state)
    (group,) = state["param_groups"]
    for key in ("averaging", "optimizer", "worker"):
        lacking = {**group, "gossip": {k: v for k, v in group["gossip"].items() if k != key}}
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict({**state, "param_groups": [lacking]})


@pytest.mark.parallel([8])
def test_a_state_per_shard_of_another_number_of_shards_is_rejected() -> None:
    before, after = replicas(2), replicas(2, torch.tensor([0, 1, 4, 5]))
    state = GossipOptimizer(
        SGD(Pair(before).sharded), "power-gossip", mesh=before.between, per_shard=True
    ).state_dict()
    if after.replica < 0:
        return
    optimizer = GossipOptimizer(
        SGD(Pair(after).sharded), "power-gossip", mesh=after.between, per_shard=True
    )
    with pytest.raises(ValueError, match=r"shards=4 \(here 2\)"):
        optimizer.load_state_dict(state)


# Bits inside.


@pytest.mark.parallel([8])
def test_bits_inside_do_not_depend_on_the_number_of_neighbors() -> None:
    where = replicas(4)
    model = where.shards(mlp())
    optimizer = GossipOptimizer(
        SGD(model.parameters()), "power-gossip", mesh=where.between, topology="chain"
    )
    run(model, optimizer, range(3), where.replica)
    assert len(set(processes().gather(optimizer.bits_inside))) == 1


@pytest.mark.parallel([4, 8])
def test_bits_inside_are_lower_bounds_of_collectives() -> None:
    where = replicas(2)
    n, shards = where.inside.size(), Shards(where.inside, CPU)
    shards.sum_(torch.zeros(12))
    assert shards.bits == 2 * (n - 1) * 12 * 32 // n
    shards.gather(torch.zeros(3, dtype=torch.uint8))
    assert shards.bits == 2 * (n - 1) * 12 * 32 // n + (n - 1) * 3 * 8


# Bad input.


@pytest.mark.parallel([4])
def test_bad_input() -> None:
    where = replicas(2)
    pair = Pair(where)
    sharded, plain = pair.sharded, pair.whole
    column = nn.Parameter(distribute_tensor(torch.zeros(4, 4), where.inside, [Shard(1)]))
    both = nn.Parameter(distribute_tensor(torch.zeros(4, 4), where.mesh, [Replicate(), Shard(0)]))
    other = nn.Parameter(distribute_tensor(torch.zeros(4, 4), where.between, [Shard(0)]))
    same = nn.Parameter(divided(torch.zeros(4, 4), where, Replicate()))

    def of(parameters: Any, method: str = "dpsgd", **given: Any) -> None:
        GossipOptimizer(SGD(parameters), method, **{"mesh": where.between} | given)

    for match, parameters, given in (
        ("is not sharded; use fully_shard", plain, {}),
        ("whole in every process, or GossipOptimizer with mesh=", sharded, {"mesh": None}),
        ("is on a mesh of 2 dimensions", [both], {}),
        (r"has the placement S\(1\)|has the placement Shard", [column], {}),
        ("is no other dimension than", [other], {}),
        ("others on", [sharded[0], other], {}),
        ("has the placement R|has the placement Replicate", [same], {}),
        ("use one dimension of a DeviceMesh", sharded, {"mesh": where.mesh}),
        ("use one dimension of a DeviceMesh", sharded, {"mesh": "replica"}),
        ("process_group: leave it out with mesh=", sharded, {"process_group": processes()}),
        ("per_shard=True: use it with mesh=", plain, {"per_shard": True, "mesh": None}),
        ("per_shard=yes: use True or False", sharded, {"per_shard": "yes"}),
        (
            r"rank': 2.* in process 1, .*rank': 1.* in process 0",
            sharded,
            {"method": "power-gossip", "rank": 1 + where.shard},
        ),
        ("sparta of sharded parameters: use per_shard", sharded, {"method": "sparta"}),
        (
            "all-reduce with bits=4 of sharded parameters: use per_shard",
            sharded,
            {"method": "all-reduce", "bits": 4},
        ),
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
    uneven = distribute_tensor(torch.zeros(6, 4 + where.replica), where.inside, [Shard(0)])
    with pytest.raises(BadInput, match="use the same in all"):
        of([nn.Parameter(uneven)])
