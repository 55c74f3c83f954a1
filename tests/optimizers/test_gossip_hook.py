"""Laws of gossip_hook in torch's DistributedDataParallel.

Axes: worker, one per process; D parameters of a worker's model.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powergossip.errors import BadInput
from powergossip.network import processes, torch_group
from powergossip.optimizers import GossipOptimizer, GossipState
from tests.harness.user_loop import (
    CPU,
    METHODS,
    OPTIMIZERS,
    N,
    barriers_of,
    everywhere,
    fill,
    hooked,
    loss,
    mixing,
    mlp,
    numbers,
    run,
)


def dense_overlapping(W: Tensor, steps: int) -> Tensor:
    """x_i ← (W x)_i − η u(g(x_i)) of all workers, in this process: [worker, D]."""
    models = [mlp() for _ in range(N)]
    optimizers = [OPTIMIZERS["groups"](model) for model in models]
    for t in range(steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, worker, t).backward()
        mixed = W @ torch.stack([*map(numbers, models)])
        for model, optimizer, x in zip(models, optimizers, mixed, strict=True):
            fill(model, x)
            optimizer.step()
    return torch.stack([*map(numbers, models)])


@pytest.mark.parallel([4])
def test_it_is_the_dense_computation() -> None:
    ddp, optimizer, _ = hooked(local="groups")
    run(ddp, optimizer, range(8))
    expected = dense_overlapping(mixing(), 8)
    torch.testing.assert_close(everywhere(ddp.module), expected, rtol=1e-5, atol=1e-5)
    assert (expected - expected.mean(0)).abs().max() > 1e-3  # the workers do differ


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("name", "local_steps"),
    [
        ("power-gossip", 3),
        *((name, 1) for name in ("dpsgd", "choco", "push-sum")),
        *(
            pytest.param(name, local_steps, marks=pytest.mark.slow)
            for name in METHODS
            for local_steps in (1, 3)
            if METHODS[name]["method"] != "all-reduce"
        ),
    ],
)
def test_it_is_gossip_optimizer_to_the_bit(name: str, local_steps: int) -> None:
    ddp, optimizer, state = hooked(**METHODS[name], local_steps=local_steps)
    reference = mlp()
    theirs = GossipOptimizer(
        OPTIMIZERS["momentum"](reference),
        **METHODS[name],
        local_steps=local_steps,
        overlapping=True,
    )
    for t in range(7):
        run(ddp, optimizer, range(t, t + 1))
        run(reference, theirs, range(t, t + 1))
        assert torch.equal(numbers(ddp.module), numbers(reference)), t
    assert state.bits == theirs.bits > 0
    assert state.messages == theirs.messages
    with state.mean_model(), theirs.mean_model():
        assert torch.equal(numbers(ddp.module), numbers(reference))
        assert torch.equal(*everywhere(reference)[:2])
        for model in (ddp, reference):  # the gradient of the mean model is no step of gossip
            loss(model, processes().rank, 0).backward()
        with pytest.raises(RuntimeError, match="mean_model"):
            optimizer.step()
    assert state.bits == theirs.bits
    assert state.state_dict()["steps"] == 7


@pytest.mark.parallel([4])
def test_accumulated_gradients_gossip_once() -> None:
    """In the pass that is synchronized. A step of passes without synchronization does not."""
    ddp, optimizer, state = hooked()
    reference = mlp()
    theirs = GossipOptimizer(OPTIMIZERS["momentum"](reference), "dpsgd", overlapping=True)
    rank = processes().rank
    for t in range(4):
        optimizer.zero_grad()
        theirs.zero_grad()
        with ddp.no_sync():
            loss(ddp, rank, 2 * t).backward()
        loss(ddp, rank, 2 * t + 1).backward()
        optimizer.step()
        loss(reference, rank, 2 * t).backward()
        loss(reference, rank, 2 * t + 1).backward()
        theirs.step()
        torch.testing.assert_close(numbers(ddp.module), numbers(reference))
    assert state.bits == theirs.bits
    before, bits = numbers(ddp.module), state.bits
    with ddp.no_sync():
        run(ddp, optimizer, range(1))
    assert state.bits == bits
    assert not torch.equal(numbers(ddp.module), before)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("method", ["dpsgd", "power-gossip, rank 2"])
def test_a_worker_whose_step_is_skipped_still_gossips(method: str) -> None:
    """As in GossipOptimizer. A GradScaler that finds an overflow in worker 2 skips its step."""
    ddp, optimizer, state = hooked(**METHODS[method], local="sgd")
    reference = mlp()
    theirs = GossipOptimizer(OPTIMIZERS["sgd"](reference), **METHODS[method], overlapping=True)
    found = []
    loops: list[Any] = [(ddp, ddp.module, optimizer, state), (reference, reference, theirs, theirs)]
    for whole, model, its, gossip in loops:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(4):
            its.zero_grad()
            scaler.scale(loss(whole, processes().rank, t)).backward()
            if t in (1, 3) and processes().rank == 2:
                model[0].weight.grad[1, 1] = float("inf")
            scaler.step(its)
            scaler.update()
        with gossip.mean_model():
            found.append(torch.cat([numbers(model), everywhere(model).flatten()]))
    torch.testing.assert_close(*found)


@pytest.mark.parallel([4])
def test_a_restored_state_is_the_same_to_the_bit(tmp_path: Path) -> None:
    file = tmp_path / f"{processes().rank}.pt"
    ddp, optimizer, state = hooked("power-gossip", local_steps=2)
    run(ddp, optimizer, range(5))
    loss(ddp, processes().rank, 5).backward()  # its gossip is in flight, and its step is skipped
    torch.save([part.state_dict() for part in (ddp, optimizer, state)], file)
    run(ddp, optimizer, range(5, 10))
    resumed = hooked("power-gossip", local_steps=2)
    run(resumed[0], resumed[1], range(3))  # forgotten by loading, and an odd number
    for part, saved in zip(resumed, torch.load(file), strict=True):
        part.load_state_dict(saved)
    run(resumed[0], resumed[1], range(5, 10))
    assert torch.equal(numbers(resumed[0].module), numbers(ddp.module))
    assert resumed[2].bits == state.bits


class WithBuffers(nn.Sequential):
    """A model with a layer of batch norm."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parallel([2])
def test_broadcast_buffers_are_rejected_and_others_stay_local() -> None:
    """In the first forward pass, before DDP has overwritten any."""
    ddp, optimizer, _ = hooked(model=WithBuffers(), broadcast_buffers=True)
    before = copy.deepcopy(ddp.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"buffer 1\.running_mean .*_buffers=False"):
            run(ddp, optimizer, range(1))
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, before[name])
    ddp, optimizer, _ = hooked(model=WithBuffers())
    run(ddp, optimizer, range(3))
    means = processes().gather(ddp.module[1].running_mean)
    assert not torch.equal(*means)


@pytest.mark.parallel([2])
def test_bad_input_is_rejected() -> None:
    with pytest.raises(BadInput, match="all-reduce"):
        hooked("all-reduce")
    with pytest.raises(BadInput, match="local_steps=0"):
        hooked(local_steps=0)
    with pytest.raises(BadInput, match="local_steps differs between processes"):
        hooked(local_steps=1 + processes().rank)
    with pytest.raises(BadInput, match="cannot be wrapped"):
        GossipState(mlp(), "dpsgd")  # type: ignore[arg-type]
    ddp, optimizer, _ = hooked()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match="the optimizer has 7 parameters"):
        run(ddp, optimizer, range(1))


@pytest.mark.long
def test_alone_it_is_ddp_without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = barriers_of(monkeypatch)
    ddp, optimizer, state = hooked("power-gossip")
    reference = mlp()
    plain = OPTIMIZERS["momentum"](reference)
    run(ddp, optimizer, range(3), worker=0)
    run(reference, plain, range(3), worker=0)
    assert torch.equal(numbers(ddp.module), numbers(reference))
    assert state.bits == 0
    with state.mean_model():
        assert barriers() == [3, 3]


@pytest.mark.parallel(2)
def test_an_optimizer_rejects_ddp_that_averages_gradients() -> None:
    """Gossip of equal models would do nothing, without a word."""
    for of_all in (True, False):
        ddp = DistributedDataParallel(mlp(), process_group=torch_group(processes(), CPU))
        local = OPTIMIZERS["sgd"](ddp.module)
        group = None if of_all else processes()  # DDP may be within another group
        optimizer = GossipOptimizer(local, "dpsgd", process_group=group)
        if of_all:
            with pytest.raises(RuntimeError, match="DistributedDataParallel"):
                optimizer.step()
        else:
            optimizer.step()
