"""Optimizers for training loops of your own: groups of processes, half precision, tied weights,
accumulated gradients, overlapping messages.

Axes: worker, one per process; D parameters of a worker's model.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

from powergossip.compressors import RandomK, TopK
from powergossip.errors import BadInput
from powergossip.network import processes, torch_group
from powergossip.optimizers import (
    DGC,
    DGCSGD,
    Config,
    DGCConfig,
    ErrorFeedback,
    GossipOptimizer,
    PowerSGD,
    SignSGD,
    SignSGDConfig,
    dgc,
    optimizer_step,
)
from tests.harness.user_loop import (
    ALONE,
    METHODS,
    OPTIMIZERS,
    everywhere,
    hooked,
    loss,
    mixing,
    mlp,
    numbers,
    run,
)

CPU = torch.device("cpu")
AT_ONCE = Config(1, min_compression_rate=1, start_compressing_after_num_steps=0)


# --- Groups of processes -------------------------------------------------------------------------


def halves(kind: str) -> Any:
    """A group of this process and one other of four: processes 0 and 1, or 2 and 3."""
    rank = processes().rank
    if kind == "communicator":
        return MPI.COMM_WORLD.Split(rank // 2, rank)
    torch_group(processes(), CPU)  # the default group, of which the others are parts
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


GROUPS = ["communicator", "process group"]
# A loop's optimizer and its step, for a model and a group.
Loop = Callable[[nn.Module, Any], tuple[torch.optim.Optimizer, Callable[[], None]]]


def gossip_loop(model: nn.Module, group: Any) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    optimizer = GossipOptimizer(OPTIMIZERS["momentum"](model), "power-gossip", process_group=group)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def gradient_loop(make: Callable[[nn.Module, Any], Any]) -> Loop:
    def loop(model: nn.Module, group: Any) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        aggregator = make(model, group)
        return optimizer, lambda: optimizer_step(optimizer, aggregator)

    return loop


LOOPS: dict[str, Loop] = {
    "gossip": gossip_loop,
    "powersgd": gradient_loop(lambda m, g: PowerSGD(m.parameters(), AT_ONCE, process_group=g)),
    "dgc": gradient_loop(
        lambda m, g: DGC(m.parameters(), DGCConfig(compress_ratio=0.3), process_group=g)
    ),
    "ef-sgd": gradient_loop(
        lambda m, g: ErrorFeedback(m.parameters(), TopK(keep_ratio=0.3), process_group=g)
    ),
    "signsgd": gradient_loop(
        lambda m, g: SignSGD(m.parameters(), SignSGDConfig(momentum=0.0), process_group=g)
    ),
}


def trained(loop: Loop, group: Any, steps: int = 4) -> Tensor:
    """The parameters after some steps: [worker, D]."""
    model = mlp()
    _, step = loop(model, group)
    for t in range(steps):
        loss(model, processes().rank, t).backward()
        step()
    return everywhere(model)


def gossip_of(model: nn.Module, group: Any, **options: Any) -> GossipOptimizer:
    local = OPTIMIZERS["sgd"](model)
    return GossipOptimizer(local, "power-gossip", process_group=group, **options)


def model_and_step(name: str, group: Any) -> tuple[nn.Module, Callable[[], object]]:
    """Those of a loop in LOOPS, of gossip with "overlapping" or "learning", or of a "hook"."""
    model: nn.Module = mlp()
    if name in LOOPS:
        return model, LOOPS[name](model, group)[1]
    if name == "hook":
        model, optimizer, _ = hooked(process_group=group)
        return model, optimizer.step
    options = {"learning": {"learning": "gradient-tracking"}}.get(name, {"overlapping": True})
    return model, gossip_of(model, group, **options).step


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["gossip", *(pytest.param(n, marks=pytest.mark.slow) for n in [*LOOPS, "overlapping"])]
)
def test_a_compiled_training_step_is_the_same(name: str) -> None:
    """Communication is not compiled."""
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model, step = model_and_step(name, processes())

        def train(
            inputs: Tensor, model: nn.Module = model, step: Callable[[], object] = step
        ) -> None:
            model(inputs).square().mean().backward()
            step()

        run_step = torch.compile(train, backend="eager") if compiled else train
        for t in range(3):
            run_step(torch.full((2, 6), 1.0 + processes().rank + t))
        found.append(everywhere(model))
    assert torch.equal(*found)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["gossip", "powersgd", "overlapping", "learning", "hook"])
def test_a_loop_that_is_over_is_freed(name: str) -> None:
    """A program can train one model after the other: nothing refers to their parameters."""
    group = MPI.COMM_WORLD.Dup()  # whose first optimizer has the barrier at exit

    def train() -> list[weakref.ref[nn.Parameter]]:
        model, step = model_and_step(name, group)
        for t in range(2):
            loss(model, processes().rank, t).backward()
            step()
        return [weakref.ref(parameter) for parameter in model.parameters()]

    for parameters in [train(), train()]:
        gc.collect()
        assert all(parameter() is None for parameter in parameters)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["gossip", "powersgd"])
def test_a_buffer_that_differs_is_named(name: str, recwarn: pytest.WarningsRecorder) -> None:
    model = mlp(processes().rank)
    model.append(nn.BatchNorm1d(3))
    LOOPS[name](model, None)
    assert not recwarn
    model[1].register_buffer("frequencies", torch.randn(2))
    LOOPS[name](nn.Sequential(model), None)
    said = ["1.frequencies" in str(w.message) and "manual_seed" in str(w.message) for w in recwarn]
    assert said == [True] * (processes().rank == 0)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", LOOPS)
def test_two_groups_train_independently(name: str) -> None:
    """Each as its two processes would by themselves, and the same with both kinds of group."""
    who = processes()
    found = [trained(LOOPS[name], halves(kind)) for kind in GROUPS]
    assert torch.equal(*found)
    first, second = found[0].split(2)
    assert (first.mean(0) - second.mean(0)).abs().max() > 1e-3

    # Processes 2 and 3 with the data of 0 and 1.
    model = mlp()
    _, step = LOOPS[name](model, halves("communicator"))
    for t in range(4):
        loss(model, who.rank % 2, t).backward()
        step()
    both = everywhere(model)
    assert torch.equal(both[:2], both[2:])
    assert torch.equal(both[:2], first)


# Aggregated gradients of a model and of a group, and the momentum of its SGD.
RESUMED: dict[str, tuple[Callable[..., Any], float]] = {
    "powersgd": (lambda m, g=None: PowerSGD(m.parameters(), AT_ONCE, process_group=g), 0.9),
    "dgc": (
        lambda m, g=None: DGC(m.parameters(), DGCConfig(compress_ratio=0.1), process_group=g),
        0.0,
    ),
    "ef-sgd": (
        lambda m, g=None: ErrorFeedback(m.parameters(), RandomK(0.2), process_group=g),
        0.9,
    ),
    "signsgd": (
        lambda m, g=None: SignSGD(m.parameters(), SignSGDConfig(momentum=0.9), process_group=g),
        0.0,
    ),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_loop_is_the_same_to_the_bit(name: str) -> None:
    """While the learning rate changes."""
    make, momentum = RESUMED[name]

    def begun(seed: int, steps: range) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = mlp(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        run = model, optimizer, make(model)
        go_on(run, steps)
        return run

    def go_on(run: tuple[nn.Module, torch.optim.Optimizer, Any], steps: range) -> None:
        model, optimizer, aggregated = run
        for t in steps:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + t)
            loss(model, processes().rank, t).backward()
            optimizer_step(optimizer, aggregated)

    whole, resumed = begun(1, range(7)), begun(2, range(2))
    for restored, saved in zip(resumed, whole, strict=True):
        restored.load_state_dict(copy.deepcopy(saved.state_dict()))
    go_on(whole, range(7, 12))
    go_on(resumed, range(7, 12))
    assert torch.equal(numbers(whole[0]), numbers(resumed[0]))
    assert whole[2].bits == resumed[2].bits


def scaled_loop(
    name: str,
    steps: Any,
    *,
    scaled: bool,
    clip: float | None = None,
    zero: bool = True,
    group: Any = None,
) -> Tensor:
    """The parameters after a loop with a GradScaler. The loss of process 1 overflows in step -1."""
    make, momentum = RESUMED[name]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    aggregator = make(model, group)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    for t in steps:
        if zero:
            optimizer.zero_grad()
        factor = torch.inf if t < 0 and processes().rank == 1 else 1.0
        scaler.scale(factor * loss(model, processes().rank, abs(t))).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        own = [p.grad for p in model.parameters()]
        optimizer_step(optimizer, aggregator, scaler)
        scaler.update()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), own, strict=True))
    return numbers(model)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_gradients_may_be_scaled_clipped_and_cleared(name: str, clip: float | None) -> None:
    """Between steps, p.grad has the gradients alone: what changes them leaves the errors."""
    expected = scaled_loop(name, range(8), scaled=False, clip=clip)
    assert (expected - numbers(mlp())).norm() > 0.01
    for scaled in (False, True):
        for zero in (False, True):
            found = scaled_loop(name, range(8), scaled=scaled, clip=clip, zero=zero)
            assert (found - expected).norm() < 1e-5 * expected.norm(), (scaled, zero)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_step_that_overflows_in_one_process_is_left_out_in_all(name: str) -> None:
    """Parameters, errors and momentum are those of the loop without it. All are those of a group:
    process 0 alone takes the step."""
    steps = [0, 1, 2, -1, 3, 4, 5]
    found = scaled_loop(name, steps, scaled=True, clip=1.0, zero=False)
    assert torch.equal(found, scaled_loop(name, range(6), scaled=True, clip=1.0))
    assert torch.equal(*processes().gather(found))
    taken = [0, 1, 2, 3, 4, 5] if processes().rank else [0, 1, 2, 1, 3, 4, 5]
    alone = scaled_loop(name, steps, scaled=True, group=ALONE)
    expected = scaled_loop(name, taken, scaled=False, group=ALONE)
    assert (alone - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["powersgd", "gossip"])
def test_a_state_is_that_of_a_worker_among_as_many(name: str) -> None:
    """It is no other worker's, as in a file that process 0 alone has written."""
    who = processes()

    def made(group: Any = None) -> Any:
        model = mlp()
        if name == "gossip":
            return gossip_of(model, group)
        return RESUMED[name][0](model, group)

    own = made()
    state = copy.deepcopy(own.state_dict())
    for other, message in (
        (who.gather(state)[1 - who.rank], rf"worker={1 - who.rank} \(here {who.rank}\)"),
        (made(ALONE).state_dict(), r"n_workers=1 \(here 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            own.load_state_dict(other)
        assert str(own.state_dict()) == str(state)
    own.load_state_dict(state)


# --- Half precision ------------------------------------------------------------------------------

HALF = [torch.bfloat16, torch.float16]


def half_mlp(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    return mlp(seed).to(dtype)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("dtype", HALF)
def test_gossip_of_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """x ← round(W x)."""
    model = half_mlp(dtype)
    optimizer = GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), "dpsgd")
    model.load_state_dict(half_mlp(dtype, processes().rank).state_dict())
    before = everywhere(model)
    optimizer.step()
    expected = (mixing() @ before.float())[processes().rank]
    ulp = torch.finfo(dtype).eps * expected.abs()
    assert ((numbers(model).float() - expected).abs() <= 0.5001 * ulp + 1e-7).all()
    assert optimizer.bits == 2 * 32 * before.shape[1]
    own = numbers(model)
    with optimizer.mean_model():
        assert torch.equal(*everywhere(model)[:2])
    assert torch.equal(numbers(model), own)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_method_keeps_the_mean_and_brings_workers_together(dtype: torch.dtype) -> None:
    """At a learning rate of 0, up to the rounding of parameters."""
    for name, method in METHODS.items():
        model = half_mlp(dtype)
        local = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = GossipOptimizer(local, **method)
        model.load_state_dict(half_mlp(dtype, processes().rank).state_dict())
        before = everywhere(model).float()
        for _ in range(15):
            optimizer.step()
        after = everywhere(model).float()
        rounding = 1e-5 if dtype == torch.float32 else 0.02
        assert (after.mean(0) - before.mean(0)).abs().max() < rounding, name
        # Moniqua has noise of size θ.
        assert after.std(0).norm() < 0.6 * before.std(0).norm(), name


class Scaled(nn.Module):
    """A model in bfloat16 whose scale is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = half_mlp(torch.bfloat16), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.bfloat16()).float() * self.scale
        return y


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["gossip", "powersgd", "dgc"])
def test_models_of_several_precisions_learn(name: str) -> None:
    model = Scaled()
    take: Any = optimizer_step
    aggregator: Any
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    if name == "gossip":
        optimizer = GossipOptimizer(optimizer, "power-gossip")
    elif name == "powersgd":
        aggregator = PowerSGD(model.parameters(), AT_ONCE)
    else:
        config = DGCConfig(compress_ratio=0.3, int32_indices=True)
        aggregator, take = DGC(model.parameters(), config), dgc.optimizer_step
        optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    losses = []
    for t in range(40):
        generator = torch.Generator().manual_seed(2 * (t % 4) + processes().rank)
        inputs = torch.randn(64, 6, generator=generator)
        value = nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1))
        value.backward()
        losses.append(value.item())
        if name == "gossip":
            optimizer.step()
            optimizer.zero_grad()
        else:
            take(optimizer, aggregator)
    assert losses[-1] < 0.7 * losses[0]
    if name != "gossip":
        assert torch.equal(*everywhere(model))


# --- Tied weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model whose two layers have one weight, as word embeddings and their decoder do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))[:, :3]
        return y


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", LOOPS)
def test_tied_weights_stay_tied(name: str) -> None:
    model = Tied()
    _, step = LOOPS[name](model, None)
    start = numbers(model)
    assert len(start) == 36 + 12
    for t in range(3):
        loss(model, processes().rank, t).backward()
        step()
    assert model.last.weight is model.first.weight
    assert (numbers(model) - start).abs().max() > 1e-3
    state = model.state_dict()
    assert state["first.weight"].data_ptr() == state["last.weight"].data_ptr()


# --- Overlapping messages ------------------------------------------------------------------------


def overlapping(method: Any = "dpsgd", **options: Any) -> tuple[Any, GossipOptimizer]:
    model = mlp()
    local = OPTIMIZERS["momentum"](model)
    return model, GossipOptimizer(local, method, overlapping=True, **options)


@pytest.mark.parallel([4])
def test_messages_are_in_flight_during_the_backward_pass() -> None:
    """And nothing else can be done with the parameters until the step."""
    model, optimizer = overlapping(local_steps=2)
    loss(model, processes().rank, 0).backward()
    assert optimizer.bits == 0
    optimizer.step()
    for part in range(2):  # accumulated
        loss(model, processes().rank, part).backward()
        assert optimizer.bits == 2 * 32 * len(numbers(model))
    for call in (optimizer.state_dict, optimizer.mean_model().__enter__, optimizer.merge):
        with pytest.raises(RuntimeError, match="call it after step"):
            call()
    optimizer.step()
    assert optimizer.bits == 2 * 32 * len(numbers(model))
    with optimizer.mean_model():
        assert torch.equal(*everywhere(model)[:2])


@pytest.mark.parallel([4])
def test_a_closure_computes_at_the_mixed_parameters() -> None:
    model, optimizer = overlapping()
    optimizer.zero_grad()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model, processes().rank, 0)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.bits == 3 * 2 * 32 * len(numbers(model))


def test_overlapping_all_reduce_is_rejected() -> None:
    with pytest.raises(BadInput, match="all-reduce"):
        overlapping("all-reduce", process_group=ALONE)


def test_alone_overlapping_is_the_wrapped_optimizer() -> None:
    model, optimizer = overlapping(process_group=ALONE)
    reference = mlp()
    run(model, optimizer, range(3), worker=0)
    run(reference, OPTIMIZERS["momentum"](reference), range(3), worker=0)
    assert torch.equal(numbers(model), numbers(reference))
