"""Laws of GossipModelAverager in torch's PostLocalSGDOptimizer.

Axes: worker, one per process; D parameters of a worker's model.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from powergossip.errors import BadInput
from powergossip.network import Processes, processes
from powergossip.optimizers import GossipModelAverager, GossipOptimizer
from tests.harness.user_loop import (
    ALONE,
    OPTIMIZERS,
    barriers_of,
    everywhere,
    fill,
    mixing,
    mlp,
    numbers,
    run,
)

if TYPE_CHECKING:
    from torch.distributed.optim import PostLocalSGDOptimizer


def local_sgd(optimizer: torch.optim.Optimizer, averager: ModelAverager) -> "PostLocalSGDOptimizer":
    from torch.distributed.optim import PostLocalSGDOptimizer  # and FSDP

    return PostLocalSGDOptimizer(optimizer, averager)


def averaged(
    local: str = "momentum", method: str = "power-gossip", **options: Any
) -> "tuple[Any, PostLocalSGDOptimizer, GossipModelAverager]":
    """A model, torch's optimizer around a local one, and its averager."""
    model = mlp()
    averager = GossipModelAverager(method, **options)
    return model, local_sgd(OPTIMIZERS[local](model), averager), averager


@pytest.mark.parallel([4])
@pytest.mark.parametrize("given", ["tensors", "groups"])
def test_it_is_gossip_optimizer_to_the_bit(given: str) -> None:
    """Which gossips in the same steps if period = local_steps and warmup_steps = period − 1."""
    model, optimizer, averager = averaged(rank=2, period=3, warmup_steps=2)
    reference = mlp()
    theirs = GossipOptimizer(
        OPTIMIZERS["momentum"](reference), "power-gossip", rank=2, local_steps=3
    )
    for t in range(11):
        run(reference, theirs, range(t, t + 1))
        if given == "groups":
            run(model, optimizer, range(t, t + 1))
        else:
            run(model, optimizer.optim, range(t, t + 1))
            averager.average_parameters(model.parameters())
        assert torch.equal(numbers(model), numbers(reference)), t
    assert averager.bits == theirs.bits > 0
    with averager.mean_model(), theirs.mean_model():
        assert torch.equal(numbers(model), numbers(reference))
        assert torch.equal(*everywhere(model)[:2])
        with pytest.raises(RuntimeError, match="mean_model"):
            averager.average_parameters(model.parameters())
    assert torch.equal(numbers(model), numbers(reference))


@pytest.mark.parallel([4])
def test_steps_of_gossip_are_those_of_torchs_averager() -> None:
    for period, warmup_steps in ((1, 0), (1, 2), (3, 0), (3, 2), (2, 5)):
        model, optimizer, averager = averaged(
            "sgd", "dpsgd", period=period, warmup_steps=warmup_steps
        )
        due = []
        for t in range(9):
            before = averager.bits
            run(model, optimizer, range(t, t + 1))
            due += [t] if averager.bits > before else []
        assert due == list(range(warmup_steps, 9, period))


@pytest.mark.parallel([4])
def test_a_step_with_the_same_parameters_has_no_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the messages of the averaging algorithm. Other parameters are compared everywhere."""
    model, optimizer, averager = averaged(method="dpsgd")
    run(model, optimizer, range(2))
    calls: list[str] = []
    kind = type(processes())

    def count(name: str, call: Any) -> None:
        def counted(*given: Any) -> Any:
            calls.append(name)
            return call(*given)

        monkeypatch.setattr(kind, name, counted)

    for name in ("gather", "gather_arrays", "broadcast_array", "checked_barrier"):
        count(name, getattr(kind, name))
    before = averager.bits
    run(model, optimizer, range(2, 4))
    assert calls == []
    assert averager.bits == 2 * before
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(BadInput, match="5 of the 6 parameters"):
        averager.average_parameters(optimizer.param_groups)
    assert calls[:2] == ["checked_barrier", "gather"]


@pytest.mark.parallel([4])
@pytest.mark.parametrize("at", [1, 5])
def test_a_restored_averager_is_the_same_to_the_bit(at: int, tmp_path: Path) -> None:
    """Also from a state of the warm-up, before it has seen the parameters."""
    model, optimizer, averager = averaged(period=2, warmup_steps=3)
    run(model, optimizer, range(at))
    parts = (model, optimizer, averager)
    file = tmp_path / f"{processes().rank}.pt"
    torch.save([part.state_dict() for part in parts], file)
    bits = averager.bits
    run(model, optimizer, range(at, 10))

    resumed = averaged(period=2, warmup_steps=3)
    if at > 3:  # a state of the warm-up is for a new averager
        run(resumed[0], resumed[1], range(4))  # forgotten by loading
    for part, state in zip(resumed, torch.load(file), strict=True):
        part.load_state_dict(state)
    assert resumed[2].step == at
    assert resumed[2].bits == bits
    third = GossipModelAverager("power-gossip", period=2, warmup_steps=3)
    third.load_state_dict(copy.deepcopy(resumed[2].state_dict()))  # before it gossips
    assert third.bits == bits
    resumed = resumed[0], local_sgd(resumed[1].optim, third), third
    run(resumed[0], resumed[1], range(at, 10))
    assert torch.equal(numbers(resumed[0]), numbers(model))
    assert resumed[2].bits == averager.bits > bits


def test_the_steps_of_loaded_states_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next step, also if it is one without gossip."""
    barriers = barriers_of(monkeypatch)
    model, optimizer, averager = averaged(process_group=ALONE, period=2)
    run(model, optimizer, range(3), worker=0)
    before = len(barriers())
    averager.load_state_dict(averager.state_dict())
    run(model, optimizer, range(3, 6), worker=0)
    assert barriers()[before:] == [3]


@pytest.mark.parallel([4])
def test_groups_that_are_added_are_averaged_and_restored() -> None:
    def made() -> "tuple[Any, PostLocalSGDOptimizer, GossipModelAverager]":
        model = mlp(processes().rank)
        averager = GossipModelAverager("power-gossip")
        return (
            model,
            local_sgd(torch.optim.SGD(model[4].parameters(), lr=0.1), averager),
            averager,
        )

    model, optimizer, averager = made()
    run(model, optimizer, range(2))
    optimizer.add_param_group({"params": model[:4].parameters()})
    run(model, optimizer, range(2, 4))
    states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, averager)]
    spread = everywhere(model)[:, 0].std()
    run(model, optimizer, range(4, 6))
    assert everywhere(model)[:, 0].std() < spread

    resumed = made()
    resumed[1].add_param_group({"params": resumed[0][:4].parameters()})
    for part, state in zip(resumed, states, strict=True):
        part.load_state_dict(state)
    run(resumed[0], resumed[1], range(4, 6))
    assert torch.equal(numbers(resumed[0]), numbers(model))


@pytest.mark.parallel([4])
def test_frozen_parameters_and_those_of_half_precision() -> None:
    """Frozen ones, of any dtype, stay each worker's own. Half precision is rounded once."""
    who = processes()
    frozen = nn.Parameter(torch.full((3,), who.rank), requires_grad=False)
    half = nn.Parameter(torch.full((4,), 1.0 + who.rank / 64).bfloat16())
    averager = GossipModelAverager("dpsgd", message_dtype="parameter")
    averager.average_parameters([frozen, half])
    assert frozen.eq(who.rank).all()
    expected = (mixing() @ (1 + torch.arange(4) / 64))[who.rank].bfloat16()
    assert half.eq(expected).all()
    assert averager.bits == 2 * 4 * 16


def test_alone_it_changes_nothing_and_needs_no_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barriers = barriers_of(monkeypatch)
    model, optimizer, averager = averaged(process_group=ALONE, warmup_steps=1)
    assert isinstance(averager, ModelAverager)
    reference = mlp()
    run(model, optimizer, range(3), worker=0)
    run(reference, OPTIMIZERS["momentum"](reference), range(3), worker=0)
    assert torch.equal(numbers(model), numbers(reference))
    assert averager.bits == 0
    with averager.mean_model():
        assert barriers() == [3, 1, 3]  # at the end, before the first step of gossip, here


def test_bad_input_is_rejected_at_construction() -> None:
    bad: list[tuple[str, Any]] = [
        ("period", 0),
        ("period", 1.5),
        ("warmup_steps", -1),
        ("message_dtype", "bf16"),
        ("rank", 0),
        ("levels", 3),
        ("topology", "rign"),
    ]
    for key, value in bad:
        with pytest.raises(BadInput, match=key):
            GossipModelAverager("power-gossip", process_group=Processes(), **{key: value})


def test_other_parameters_than_before_are_rejected() -> None:
    model, _, averager = averaged(process_group=ALONE)
    averager.average_parameters(model.parameters())
    with pytest.raises(ValueError, match="5 of the 6 parameters"):
        averager.average_parameters(list(model.parameters())[1:])
    with pytest.raises(ValueError, match=r"torch\.float64"):
        averager.average_parameters([*model.parameters(), torch.zeros(2).double()])


def test_a_state_of_another_method_is_rejected() -> None:
    model, optimizer, averager = averaged(process_group=ALONE)
    run(model, optimizer, range(2), worker=0)
    state = averager.state_dict()
    for loaded in (True, False):
        _, other, theirs = averaged(process_group=ALONE, rank=2)
        if loaded:
            run(model, other, range(1), worker=0)
            with pytest.raises(ValueError, match=r"rank=1 \(here 2\)"):
                theirs.load_state_dict(state)
        else:
            theirs.load_state_dict(state)
            with pytest.raises(ValueError, match=r"rank=1 \(here 2\)"):
                theirs.average_parameters(model.parameters())


@pytest.mark.parallel([4])
def test_workers_start_from_their_own_values() -> None:
    """The first step of gossip keeps the mean, as it keeps the local updates before it."""
    model = mlp()
    fill(model, torch.full_like(numbers(model), float(processes().rank)))
    averager = GossipModelAverager("dpsgd")
    averager.average_parameters(model.parameters())
    with pytest.raises(BadInput, match="the periods differs between processes"):
        GossipModelAverager("dpsgd", warmup_steps=processes().rank)
    expected: Tensor = mixing() @ torch.arange(4.0)
    torch.testing.assert_close(everywhere(model)[:, 0], expected)
