"""Laws of GossipOptimizer around a torch optimizer, in a loop of plain PyTorch.

Axes: worker, one per process; D parameters of a worker's model.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from powergossip import algorithms, topologies
from powergossip.errors import BadInput
from powergossip.network import Network, processes
from powergossip.optimizers import DGC, DGCConfig, GossipOptimizer, gossip_part
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.parameters import Layout
from tests.harness import launch
from tests.harness.user_loop import (
    ALONE,
    METHODS,
    OPTIMIZERS,
    Make,
    N,
    dense,
    everywhere,
    fill,
    loss,
    mixing,
    mlp,
    numbers,
    run,
)


def wrapped(make: Make, method: str, start: int = 0, **options: Any) -> tuple[Any, GossipOptimizer]:
    """A model initialized from the seed `start`, and its optimizer."""
    model = mlp(start)
    return model, GossipOptimizer(make(model), method, **options)


# The computation, in four processes.

# A local optimizer, arguments of GossipOptimizer, and W.
DENSE: dict[str, tuple[str, dict[str, Any], Tensor]] = {
    "plain": ("sgd", {"method": "dpsgd"}, mixing()),
    "groups": ("groups", {"method": "dpsgd", "local_steps": 3}, mixing()),
    "adam": ("adam", {"method": "dpsgd"}, mixing()),
    "full rank": ("momentum", {"method": "power-gossip", "rank": 6, "local_steps": 3}, mixing()),
    "all-reduce": ("momentum", {"method": "all-reduce"}, torch.full((N, N), 1 / N)),
    "the rate of a star": (
        "sgd",
        {"method": "dpsgd", "topology": "star", "diffusion_rate": "auto"},
        torch.eye(N).lerp(mixing("star"), topologies.make("star", N).best_diffusion_rate),
    ),
}


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", DENSE)
def test_gossip_is_the_dense_computation(name: str) -> None:
    local, given, W = DENSE[name]
    model, optimizer = wrapped(OPTIMIZERS[local], start=processes().rank, **given)
    run(model, optimizer, range(10))
    expected = dense(OPTIMIZERS[local], W, 10, given.get("local_steps", 1))
    torch.testing.assert_close(everywhere(model), expected, rtol=1e-5, atol=1e-5)
    assert (expected - expected.mean(0)).abs().max() > 1e-3 or name == "all-reduce"  # they differ


@pytest.mark.parallel([4])
@pytest.mark.parametrize("learning", ["dpsgd", "gradient-tracking"])
def test_misaligned_parameters_stay_where_they_are(
    learning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU. The values are those of parameters that are moved, to the bit."""
    found = []
    for misaligned in ([], [(4,), (3,)], [(5, 6)]):

        def is_misaligned(view: Tensor, shapes: Any = misaligned) -> bool:
            return tuple(view.shape) in shapes

        monkeypatch.setattr(gossip_part, "is_misaligned", is_misaligned)
        model = mlp(processes().rank)
        before = {p: p.data_ptr() for p in model.parameters()}
        optimizer = GossipOptimizer(OPTIMIZERS["sgd"](model), "power-gossip", learning=learning)
        run(model, optimizer, range(5))
        state = optimizer.state_dict()
        with optimizer.mean_model():
            mean = everywhere(model)
        optimizer.load_state_dict(state)
        run(model, optimizer, range(5, 10))
        found.append((mean, everywhere(model)))
        stay = [tuple(p.shape) for p, address in before.items() if p.data_ptr() == address]
        assert stay == misaligned
    for both in zip(*found, strict=True):
        assert all(torch.equal(x, both[0]) for x in both[1:])


@pytest.mark.parallel([4])
def test_parameters_without_gradients_are_averaged_only() -> None:
    who = processes()
    model, optimizer = wrapped(OPTIMIZERS["momentum"], "dpsgd")
    with torch.no_grad():
        model[0].bias.fill_(who.rank)
    model[0].bias.requires_grad_(False)
    run(model, optimizer, range(1))
    expected = mixing() @ torch.arange(N).float()
    torch.testing.assert_close(model[0].bias, expected[who.rank].expand(5), check_stride=False)


@pytest.mark.parallel([4])
def test_training_starts_from_the_values_of_process_0() -> None:
    """The parameters become adjacent in memory."""
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd", start=processes().rank)
    assert torch.equal(everywhere(model), numbers(mlp(0)).expand(N, -1))
    first = min(p.data_ptr() for p in model.parameters())
    end = max(p.data_ptr() + p.nbytes for p in model.parameters())
    assert end - first == sum(p.nbytes for p in model.parameters())
    assert optimizer.n_workers == N


@pytest.mark.parallel([4])
def test_bits_are_those_of_the_averaging_algorithm() -> None:
    for name, method in METHODS.items():
        model, optimizer = wrapped(OPTIMIZERS["sgd"], **method, local_steps=2)
        run(model, optimizer, range(5))
        directly = optimizer.method.network(processes(), torch.device("cpu"))
        layout = Layout(p.shape for p in model.parameters())
        averaging, x = optimizer.method.build(directly, layout, 0), torch.randn(1, layout.size)
        for _ in range(2):
            directly.run(averaging.step(x))
        assert optimizer.bits == directly.bits[0] > 0, name
        assert optimizer.messages == directly.messages[0], name


@pytest.mark.parallel([4])
def test_the_seed_is_also_that_of_the_topology() -> None:
    found, expected = [], []
    for seed in (0, 1):
        method = GossipMethod.on_graph("dpsgd", topology="random-matching", seed=seed)
        network = method.network(processes(), torch.device("cpu"))
        found.append(network.topology.fingerprint)
        expected.append(topologies.make("random-matching", N, seed=seed).fingerprint)
    assert found == expected
    assert found[0] != found[1]


# State.


@pytest.mark.parallel([4])
def test_a_restored_optimizer_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """With a scheduler, in a file, and in the middle of three local steps."""
    file = tmp_path / f"{processes().rank}.pt"
    for name, local in [*((name, "momentum") for name in METHODS), ("power-gossip", "adam")]:

        def made(seed: int = 0, method: str = name, local: str = local) -> tuple[Any, ...]:
            make = OPTIMIZERS[local]
            model, optimizer = wrapped(make, **METHODS[method], start=seed, local_steps=3)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

        def go_on(*parts: Any) -> tuple[Tensor, int]:
            model, optimizer, scheduler = parts
            for t in range(4, 7):
                run(model, optimizer, range(t, t + 1))
                scheduler.step()
            return numbers(model), optimizer.bits

        straight = made()
        run(straight[0], straight[1], range(4))
        torch.save([part.state_dict() for part in straight], file)
        expected, bits = go_on(*straight)

        resumed = made(seed=5)
        run(resumed[0], resumed[1], range(1))  # forgotten by loading
        for part, state in zip(resumed, torch.load(file), strict=True):
            part.load_state_dict(state)
        found, found_bits = go_on(*resumed)
        assert torch.equal(found, expected), (name, local)
        assert found_bits == bits, (name, local)


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("method", "local", "full"),
    [("choco", "sgd", False), ("choco, qsgd", "adam", True), ("power-gossip", "adam", True)],
)
def test_a_distributed_checkpoint_of_each_process_resumes(
    method: str, local: str, full: bool, tmp_path: Path
) -> None:
    """As PyTorch's pages on it have it. Neither saving nor loading is a step."""
    options = StateDictOptions(full_state_dict=full)
    place = {"checkpoint_id": tmp_path / str(processes().rank), "no_dist": True}
    model, optimizer = wrapped(OPTIMIZERS[local], **METHODS[method])
    run(model, optimizer, range(3))
    optimizer.zero_grad()
    bits = optimizer.bits
    values, state = get_state_dict(model, optimizer, options=options)
    assert optimizer.bits == bits
    dcp.save({"model": values, "optimizer": state}, **place)

    resumed, its = wrapped(OPTIMIZERS[local], **METHODS[method])
    values, state = get_state_dict(resumed, its, options=options)
    assert its.bits == 0
    both: dict[str, Any] = {"model": values, "optimizer": state}
    dcp.load(both, **place)
    set_state_dict(
        resumed,
        its,
        model_state_dict=both["model"],
        optim_state_dict=both["optimizer"],
        options=options,
    )
    assert its.bits == bits
    for one, its_own in ((model, optimizer), (resumed, its)):
        run(one, its_own, range(3, 6))
    assert torch.equal(numbers(model), numbers(resumed))


@pytest.mark.parallel([2])
def test_a_first_step_without_updates_is_one_of_gossip() -> None:
    """As a warm-up of the learning rate begins, with gradients that are 0 in one process."""
    model, optimizer = wrapped(lambda m: torch.optim.SGD(m.parameters(), lr=0), "dpsgd")
    fill(model, numbers(mlp(processes().rank)))
    (2 * processes().rank * loss(model, 0, 0)).backward()
    expected = everywhere(model).mean(0).expand(2, -1)
    optimizer.step()
    torch.testing.assert_close(everywhere(model), expected)


def test_another_state_is_rejected_and_changes_nothing() -> None:
    make = OPTIMIZERS["momentum"]
    model, optimizer = wrapped(make, "power-gossip", process_group=ALONE)
    run(model, optimizer, range(2), worker=0)
    state = optimizer.state_dict()

    (group,) = state["param_groups"]

    def rejected(text: str, **changes: Any) -> None:
        before = copy.deepcopy(optimizer.state_dict())
        changed = {**group, "gossip": {**group["gossip"], **changes}}
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict({**state, "param_groups": [changed]})
        after = optimizer.state_dict()
        assert str(before) == str(after)

    rejected(r"rank=2 \(here 1\); use the same", rank=2)
    rejected(r"method='choco' \(here 'power-gossip'\)", method="choco")
    rejected(r"n_workers=4 \(here 1\)", n_workers=4)
    rejected(r"worker=1 \(here 0\)", worker=1)
    rejected("version 7, this is version 3", version=7)
    rejected(
        r"parameter 0 is of shape \(7, 6\) in the state, \(5, 6\) here",
        shapes=[[[7, 6], *group["gossip"]["shapes"][0][1:]]],
    )
    rejected(
        "6 parameters here|5 parameters in the state", shapes=[group["gossip"]["shapes"][0][1:]]
    )
    rejected("2 dtypes, here are 1", shapes=group["gossip"]["shapes"] * 2)
    for other in (make(mlp()).state_dict(), {}):
        with pytest.raises(ValueError, match="not the state of a GossipOptimizer"):
            optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": [group, group]})
    optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == str(state)


# The mean model.


@pytest.mark.parallel([4])
def test_the_mean_model_is_present_within_the_context_only() -> None:
    """Also if an evaluation fails."""
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd")
    run(model, optimizer, range(3))
    before, bits = everywhere(model), optimizer.bits
    with suppress(KeyError), optimizer.mean_model():
        torch.testing.assert_close(numbers(model), before.mean(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(*everywhere(model)[:2])
        with pytest.raises(RuntimeError, match="leave it first"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="mean already"), optimizer.mean_model():
            pass
        raise KeyError
    assert torch.equal(everywhere(model), before)
    assert optimizer.bits == bits
    run(model, optimizer, range(3, 5))


@pytest.mark.parallel([4])
def test_a_merge_is_one_all_reduce_after_which_all_have_the_mean() -> None:
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "power-gossip", learning="diloco", local_steps=2)
    run(model, optimizer, range(3))
    before, bits = everywhere(model), optimizer.bits
    optimizer.merge()
    after = everywhere(model)
    assert torch.equal(after, after[:1].expand_as(after))
    torch.testing.assert_close(after[0], before.mean(0), rtol=1e-5, atol=1e-6)
    for _ in range(2):  # the second costs nothing
        assert optimizer.bits - bits == 2 * 3 * 32 * before.shape[1] // 4
        optimizer.merge()
    with optimizer.mean_model(), pytest.raises(RuntimeError, match="mean already"):
        optimizer.merge()
    run(model, optimizer, range(3, 5))  # training may go on


@pytest.mark.parallel([4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_of_the_values_that_the_parameters_have(dtype: torch.dtype) -> None:
    """Also in half precision, whose values are copies."""
    model = mlp().to(dtype)
    optimizer = GossipOptimizer(OPTIMIZERS["sgd"](model), "dpsgd")
    fill(model, torch.full((74,), float(processes().rank), dtype=dtype))
    optimizer.merge()
    assert (numbers(model) == 1.5).all()


# Torch's own tools.


@pytest.mark.parallel([4])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_worker_with_overflowing_gradients_still_gossips(unscale_first: bool) -> None:
    """x ← W (x − lr g), without the second term for worker 2 in step 1."""
    who = processes()
    model, optimizer = wrapped(OPTIMIZERS["momentum"], "dpsgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(model, who.rank, t)).backward()
        if t == 1 and who.rank == 2:
            model[0].weight.grad[1, 1] = float("inf")
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        # The scale is each worker's own.
        assert scaler.get_scale() == (2.0**9 if t >= 1 and who.rank == 2 else 2.0**10)

    expected = dense(OPTIMIZERS["momentum"], mixing(), 4, skipped=(1, 2))
    torch.testing.assert_close(everywhere(model), expected, rtol=1e-5, atol=1e-5)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
}


@pytest.mark.filterwarnings("error")  # "lr_scheduler.step() before optimizer.step()" and the like
@pytest.mark.parametrize("name", SCHEDULERS)
def test_alone_with_a_scheduler_it_is_the_wrapped_optimizer_to_the_bit(name: str) -> None:
    make = OPTIMIZERS["momentum"]
    model, optimizer = wrapped(make, "power-gossip", process_group=ALONE)
    reference = mlp()
    plain = make(reference)
    schedulers = SCHEDULERS[name](optimizer), SCHEDULERS[name](plain)
    for t in range(8):
        run(model, optimizer, range(t, t + 1), worker=0)
        run(reference, plain, range(t, t + 1), worker=0)
        for scheduler in schedulers:
            scheduler.step()
        assert torch.equal(numbers(model), numbers(reference))
        assert optimizer.wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert optimizer.bits == optimizer.messages == 0
    state, expected = optimizer.state_dict(), plain.state_dict()
    del state["param_groups"][0]["gossip"]
    assert state["param_groups"] == expected["param_groups"]
    for index, of_parameter in expected["state"].items():
        assert torch.equal(
            state["state"][index]["momentum_buffer"], of_parameter["momentum_buffer"]
        )


@pytest.mark.slow  # imports of Lightning
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_alone_in_lightning_with_clipping_it_is_the_wrapped_optimizer(precision: Any) -> None:
    """Gradients are unscaled in the hook, and clipped."""
    lightning = pytest.importorskip("lightning")
    precisions = pytest.importorskip("lightning.pytorch.plugins.precision")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self, wraps: bool):
            super().__init__()
            self.model: Any = mlp()
            self.wraps, self.seen = wraps, list[Tensor]()

        def training_step(self, batch: Any, t: int) -> Tensor:
            return loss(self.model, 0, t)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            local = OPTIMIZERS["momentum"](self.model)
            return GossipOptimizer(local, "dpsgd", process_group=ALONE) if self.wraps else local

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.append(self.model[0].weight.grad.norm())

    found = []
    for wraps in (False, True):
        scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
        mixed = precisions.MixedPrecision(precision, "cpu", scaler=scaler)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        options = {"accelerator": "cpu", "devices": 1, "plugins": [mixed], **quiet}
        module = Module(wraps)
        lightning.Trainer(max_steps=3, gradient_clip_val=0.1, **options).fit(module, range(3))
        found.append(torch.cat([torch.stack(module.seen), numbers(module.model)]))
    assert torch.equal(*found)


def test_alone_closures_are_the_wrapped_optimizers() -> None:
    model, reference = mlp(), mlp()
    local = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer = GossipOptimizer(local, "dpsgd", process_group=ALONE)
    plain = torch.optim.LBFGS(reference.parameters(), max_iter=3)
    results = []
    for m, o in ((model, optimizer), (reference, plain)):

        def closure(m: nn.Module = m, o: torch.optim.Optimizer = o) -> Tensor:
            o.zero_grad()
            value = loss(m, 0, 0)
            value.backward()
            return value

        results.append([o.step(closure).item() for _ in range(3)])
    assert results[0] == results[1]
    assert torch.equal(numbers(model), numbers(reference))


def test_the_wrapped_optimizers_groups_state_and_defaults_are_its_own() -> None:
    model, optimizer = wrapped(OPTIMIZERS["momentum"], "dpsgd", process_group=ALONE)
    run(model, optimizer, range(1), worker=0)
    for _ in range(2):
        assert optimizer.param_groups is optimizer.wrapped.param_groups
        assert optimizer.state is optimizer.wrapped.state
        assert optimizer.defaults is optimizer.wrapped.defaults
        optimizer.load_state_dict(optimizer.state_dict())  # which replaces them
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
    assert repr(optimizer.wrapped) in repr(optimizer)
    assert "Method('dpsgd', topology='ring'" in repr(optimizer)


def test_hooks_run_once_a_step() -> None:
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd", process_group=ALONE)
    calls: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, a, k: calls.append("before")),
        optimizer.register_step_post_hook(lambda o, a, k: calls.append("after")),
        optimizer.wrapped.register_step_post_hook(lambda o, a, k: calls.append("wrapped")),
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving")),
        optimizer.register_state_dict_post_hook(lambda o, state: state | {"note": 1}),
        optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("loading")),
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded")),
    ]
    run(model, optimizer, range(1), worker=0)
    assert calls == ["before", "wrapped", "after"]
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert calls[3:] == ["saving", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    run(model, optimizer, range(1), worker=0)
    assert len(calls) == 6


def test_modes_of_schedule_free_optimizers_are_reached() -> None:
    _, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd", process_group=ALONE)
    optimizer.wrapped.eval = lambda: "averaged weights"  # type: ignore[attr-defined]
    assert optimizer.eval() == "averaged weights"
    with pytest.raises(AttributeError):
        optimizer.train()


def test_copies_and_further_groups_are_rejected() -> None:
    _, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd", process_group=ALONE)
    with pytest.raises(RuntimeError, match="wrap it in a new GossipOptimizer"):
        optimizer.add_param_group({"params": []})
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="save state_dict"):
            attempt(optimizer)


@pytest.mark.parallel([4])
def test_a_model_that_was_moved_is_noticed() -> None:
    """A copy of the model does not count, nor do values loaded into it."""
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd")
    run(copy.deepcopy(model), optimizer, range(1))
    model.load_state_dict(mlp(1).state_dict())
    run(model, optimizer, range(1))
    model[2].weight.data = model[2].weight.data.double()
    with pytest.raises(RuntimeError, match=r"shape \(4, 5\).*after moving the model"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="after moving the model"), optimizer.mean_model():
        pass


@pytest.mark.parallel([2])
def test_a_model_with_other_parameters_than_the_optimizer_is_noticed() -> None:
    """Unless these have gradients, or have no other one in their place."""
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd")
    head, model[4] = model[4], nn.Linear(4, 3)
    run(model, optimizer, range(1))
    head.load_state_dict({name: p.clone() for name, p in head.named_parameters()}, assign=True)
    with pytest.raises(RuntimeError, match=r'"weight" of Linear.*assign=True'):
        run(model, optimizer, range(1))
    del head
    run(model, optimizer, range(1))


@pytest.mark.parallel([4])
@pytest.mark.parametrize("overlapping", [False, True])
def test_values_assigned_to_data_are_as_those_written_in_place(overlapping: bool) -> None:
    """By the wrapped optimizer, between steps, and in the mean model, which forgets them."""

    def assign(parameter: nn.Parameter, values: Tensor) -> None:
        parameter.data = values

    def write(parameter: nn.Parameter, values: Tensor) -> None:
        parameter.data.copy_(values)

    found = []
    for change in (assign, write):
        model, optimizer = wrapped(OPTIMIZERS["sgd"], "power-gossip", overlapping=overlapping)

        def shrink(*_: Any, model: nn.Module = model, change: Any = change) -> None:
            for parameter in model.parameters():
                change(parameter, 0.9 * parameter.data)

        optimizer.wrapped.register_step_post_hook(shrink)
        for t in range(3):
            run(model, optimizer, range(t, t + 1))
            shrink()
            with optimizer.mean_model():
                shrink()
        found.append(everywhere(model))
    assert torch.equal(*found)


class SharpnessAware(torch.optim.Optimizer):
    """SAM as widely used (github.com/davda54/sam), with its assignments."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], **options: Any):
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]
        self.base.step()

    def step(self, closure: Any) -> None:  # type: ignore[override]
        self.first_step()
        self.zero_grad()
        torch.enable_grad()(closure)()
        self.second_step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


@pytest.mark.parallel([4])
def test_sharpness_aware_optimizers_are_wrapped_or_wrap() -> None:
    """Both ways, with the method of two calls in the second one."""
    sgd = torch.optim.SGD
    models = [mlp(processes().rank) for _ in range(2)]
    outside = GossipOptimizer(SharpnessAware(models[0].parameters(), sgd, lr=0.1), "dpsgd")
    inside = SharpnessAware(
        models[1].parameters(), lambda groups, lr: GossipOptimizer(sgd(groups, lr), "dpsgd"), lr=0.1
    )
    for t in range(4):
        for model, optimizer in zip(models, (outside, inside), strict=True):

            def compute(model: nn.Module = model, t: int = t) -> None:
                model.zero_grad()
                loss(model, processes().rank, t).backward()

            compute()
            if optimizer is outside:
                outside.step(compute)
            else:
                inside.first_step()
                compute()
                inside.second_step()
                inside.load_state_dict(inside.state_dict())
    assert torch.equal(*map(everywhere, models))
    spread = everywhere(models[0]).std(0).max()
    assert 0 < spread < 0.01
    with pytest.raises(AttributeError, match="makes no step of gossip"):
        outside.second_step()


# Frozen parameters.


def partly_frozen(seed: int) -> tuple[nn.Sequential, GossipOptimizer]:
    """A model with a frozen layer of half precision, whose optimizer has all parameters."""
    model = mlp(seed)
    model[0].requires_grad_(False).half()
    return model, GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd")


def partly_frozen_steps(model: nn.Sequential, optimizer: GossipOptimizer, steps: int) -> None:
    for t in range(steps):
        optimizer.zero_grad()
        model[1:](torch.full((2, 5), processes().rank + t)).sum().backward()
        optimizer.step()


@pytest.mark.parallel([4])
def test_frozen_parameters_start_equal_and_are_not_sent() -> None:
    model, optimizer = partly_frozen(processes().rank)
    expected = numbers(mlp(0)[0].half())
    addresses = [p.data_ptr() for p in model[0].parameters()]
    partly_frozen_steps(model, optimizer, 2)
    assert torch.equal(numbers(model[0]), expected)
    assert [p.data_ptr() for p in model[0].parameters()] == addresses
    trainable = sum(p.numel() for p in mlp()[1:].parameters())
    assert optimizer.bits == 2 * 2 * 32 * trainable  # steps, neighbors

    own = numbers(model[2])
    with optimizer.mean_model():
        assert torch.equal(numbers(model[0]), expected)
        assert not torch.equal(numbers(model[2]), own)


def test_an_unfrozen_parameter_is_noticed() -> None:
    model, optimizer = partly_frozen(0)
    partly_frozen_steps(model, optimizer, 1)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\(5, 6\) was frozen"):
        optimizer.step()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("loaded", ["before", "after", "before, then changed", "never"])
def test_a_model_may_be_loaded_before_or_after_the_optimizer_is_made(loaded: str) -> None:
    """Construction gives it the values of process 0; the state brings its own back."""
    model, optimizer = wrapped(OPTIMIZERS["momentum"], "power-gossip")
    run(model, optimizer, range(3))
    values, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(3, 5))
    again = mlp()
    if "before" in loaded:
        again.load_state_dict(values)
    optimizer = GossipOptimizer(OPTIMIZERS["momentum"](again), "power-gossip")
    if "changed" in loaded:
        again.load_state_dict(mlp(1).state_dict())
    optimizer.load_state_dict(state)
    if loaded == "after":
        again.load_state_dict(values)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(again, optimizer, range(3, 5))
    right = loaded in ("before", "after")
    assert torch.equal(numbers(again), numbers(model)) == right
    assert (
        any("not those with which the state was saved" in str(w.message) for w in caught) != right
    )


# Unequal numbers of steps.

UNEVEN = """
import sys
import torch
from torch import nn
from powergossip.network import processes
from powergossip.optimizers import Config, GossipOptimizer, PowerSGD, optimizer_step

how, longer = sys.argv[1], int(sys.argv[2])
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if how == "powersgd":
    powersgd = PowerSGD(model.parameters(), Config(rank=1, start_compressing_after_num_steps=0))
elif how == "round":
    rounds = {"learning": "diloco", "local_steps": 10, "overlapping": True}
    optimizer = GossipOptimizer(optimizer, "power-gossip", num_iterations=8, **rounds)
else:
    optimizer = GossipOptimizer(optimizer, "dpsgd", local_steps=10)
for _ in range(5 + (processes().rank == longer)):
    if how != "powersgd":
        optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    if how == "powersgd":
        optimizer_step(optimizer, powersgd)
    else:
        optimizer.step()
if how == "round" and processes().rank == 0:
    optimizer.state_dict()
if how == "loaded":
    state = optimizer.state_dict()
    state["param_groups"][0]["gossip"]["steps"] -= processes().rank
    optimizer.load_state_dict(state)
    optimizer.step()
print("end")
"""


@pytest.mark.parametrize(
    ("how", "longer"),
    [
        ("powersgd", 1),
        ("round", 9),  # ends with messages in flight, which one process receives earlier
        ("loaded", 8),  # states of 5 and of 4 steps
        pytest.param("local", 1, marks=pytest.mark.slow),  # which sends nothing in that step
    ],
)
def test_a_further_step_of_one_process_ends_all(how: str, longer: int, tmp_path: Path) -> None:
    """Instead of waiting forever for its neighbors."""
    (tmp_path / "uneven.py").write_text(UNEVEN)
    ended = launch.python(tmp_path / "uneven.py", how, str(longer), processes=2, timeout=60)
    if longer == 9:
        assert (ended.returncode, ended.stdout) == (0, "end\nend\n"), ended.stderr
        return
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) in (1, 2), "the second process may notice it before the first has ended it"
    for line in lines:
        if how == "powersgd":
            assert f"process {longer} is in a further step" in line
        else:
            assert all(f"after {steps} steps" in line for steps in (5, 4 + 2 * (how == "local")))


# Bad input.


def parameters(*tensors: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(t, requires_grad=t.dtype != torch.int64) for t in tensors]


SHARED = torch.zeros(2, 3)
BAD_PARAMETERS: dict[str, tuple[list[Any], str]] = {
    "complex": (
        parameters(torch.zeros(2), torch.zeros(2, 3, dtype=torch.complex64)),
        r"parameter 1 of shape \(2, 3\) is torch.complex64",
    ),
    "frozen": (parameters(torch.zeros(4, dtype=torch.int64)), "no trainable parameters"),
    "mixed types": (
        parameters(torch.zeros(4).bfloat16(), torch.zeros(3).double()),
        "parameter 1 is torch.float64",
    ),
    "sparse": (parameters(torch.zeros(2, 3).to_sparse()), r"\(2, 3\) is sparse"),
    "mixed devices": (
        parameters(torch.zeros(4), torch.zeros(3, device="meta")),
        r"parameter 1 of shape \(3,\) has no memory",
    ),
    "twice": (parameters(SHARED, SHARED), r"parameter 1 of .* the same memory as parameter 0"),
    "lazy": ([nn.LazyLinear(3).weight], "parameter 0 has no shape yet; run a batch"),
    "nothing": (parameters(torch.zeros(0)), "no trainable parameters with elements"),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_bad_parameters_are_rejected(name: str) -> None:
    bad, text = BAD_PARAMETERS[name]
    local = torch.optim.SGD(bad, lr=0.1)
    with pytest.raises(ValueError, match=text):
        GossipOptimizer(local, "dpsgd", process_group=ALONE)


BAD_METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "topology": ("dpsgd", {"topology": "rign"}, 'topology "rign" is unknown; choose from'),
    "topology's type": ("dpsgd", {"topology": 3}, "^topology=3: use"),
    "rate's spectrum": (
        "dpsgd",
        {"topology": "random-matching", "diffusion_rate": "auto"},
        "best diffusion rate",
    ),
    "rank's type": ("power-gossip", {"rank": 1.5}, "^rank=1.5: use a whole number$"),
    "compressor's rank": (
        "choco",
        {"compressor": "top-k", "rank": "1"},
        "^rank='1': use a whole number or None$",
    ),
    "not for learning": ("chebyshev", {}, 'algorithm "chebyshev" is unknown'),
    "another's option": ("dpsgd", {"rank": 1}, "^rank=1: dpsgd .*use diffusion_rate$"),
}


@pytest.mark.parametrize("name", BAD_METHODS)
def test_bad_methods_are_rejected(name: str) -> None:
    method, options, text = BAD_METHODS[name]
    with pytest.raises(BadInput, match=text):
        wrapped(OPTIMIZERS["sgd"], method, **options, process_group=ALONE)


def test_sparse_gradients_are_rejected() -> None:
    """Also those of a closure."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 3, sparse=True))
    optimizer = GossipOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd", process_group=ALONE
    )

    def closure() -> Tensor:
        value: Tensor = model[1](torch.tensor([1])).sum()
        value.backward()
        return value

    for given in (closure, None):
        with pytest.raises(ValueError, match=r"parameter 2 of shape \(5, 3\) has a sparse grad"):
            optimizer.step(given)


def test_other_bad_arguments_are_rejected() -> None:
    for local_steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"^local_steps={local_steps}: use"):
            wrapped(OPTIMIZERS["sgd"], "dpsgd", local_steps=local_steps, process_group=ALONE)
    model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd", process_group=ALONE)
    with pytest.raises(ValueError, match=r'^algorithm "3" is unknown; .*all-reduce'):
        wrapped(OPTIMIZERS["sgd"], 3, process_group=ALONE)  # type: ignore[arg-type]
    for wrong in (optimizer, model):
        with pytest.raises(ValueError, match=f"{type(wrong).__name__} cannot be wrapped"):
            GossipOptimizer(wrong, "dpsgd", process_group=ALONE)


@pytest.mark.parallel([4])
def test_processes_that_differ_are_rejected_everywhere() -> None:
    """No process waits for another."""
    who = processes()
    odd = who.rank == 2
    methods: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("power-gossip", {"rank": 2 if odd else 1}, "the method differs between processes"),
        ("dpsgd" if odd else "choco", {}, "the method differs between processes"),
        ("dpsgd", {"diffusion_rate": -1.0 if odd else 1.0}, "diffusion_rate"),
        ("dpsgd", {"rank" if odd else "diffusion_rate": 1}, "rank=1: dpsgd has no such option"),
        ("dpsgd", {"learning": "gradient-tracking" if odd else "dpsgd"}, "learning"),
    )
    for method, options, text in methods:
        with pytest.raises(BadInput, match=text):
            wrapped(OPTIMIZERS["sgd"], method, **options)
    with pytest.raises(BadInput, match="local_steps differs between processes: 2 in process 2"):
        wrapped(OPTIMIZERS["sgd"], "dpsgd", local_steps=2 if odd else 1)

    def another(shape: tuple[int, ...], **options: Any) -> list[nn.Parameter]:
        return parameters(torch.zeros(2), torch.zeros(shape if odd else (3, 3), **options))

    for bad, text in (
        (another((3, 4)), r"parameter 1 differs .* of shape \(3, 4\) in process 2, .*\(3, 3\) in"),
        (
            another((3, 3))[: 1 if odd else 2],
            "number of parameters differs between processes: 1 in process 2, 2 in",
        ),
        (
            another((3, 3), dtype=torch.float64 if odd else None),
            "parameter 1 differs .* torch.float64 of shape",
        ),
    ):
        with pytest.raises(BadInput, match=text):
            GossipOptimizer(torch.optim.SGD(bad, lr=0.1), "dpsgd")


@pytest.mark.parametrize("name", algorithms.AVERAGING)
def test_every_averaging_algorithm_is_reached_by_its_name(name: str) -> None:
    layout = Layout(p.shape for p in mlp().parameters())
    assert name in {method["method"] for method in METHODS.values()}
    method = GossipMethod.on_graph(name, overlapping=False, topology="torus", seed=2)
    assert set(method.options) == set(algorithms.defaults(name))
    method.build(method.network(ALONE, torch.device("cpu")), layout, 0)
    by_name = wrapped(OPTIMIZERS["sgd"], name, topology="torus", seed=2, process_group=ALONE)[1]
    assert by_name.method.facts() == method.facts()


def test_options_without_a_type_accept_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def build(network: Network, layout: Layout, *, gain=None, kind: Any = None) -> Any:
        found.append((gain, kind))
        return algorithms.PlainGossip(network)

    monkeypatch.setitem(algorithms.AVERAGING, "mine", build)
    wrapped(OPTIMIZERS["sgd"], "mine", gain="high", process_group=ALONE)
    wrapped(OPTIMIZERS["sgd"], "mine", kind=(1, 2), process_group=ALONE)
    assert list(dict.fromkeys(found)) == [("high", None), (None, (1, 2))]


@pytest.mark.parallel([4])
def test_parameters_of_two_dtypes_draw_different_directions() -> None:
    """So a step changes them differently, even if their values are the same."""
    layers = [nn.Linear(6, 5, bias=False, dtype=d) for d in (torch.float32, torch.bfloat16)]
    local = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0)
    optimizer = GossipOptimizer(local, "power-gossip")
    values = torch.randn(30, generator=torch.Generator().manual_seed(processes().rank))
    for layer in layers:
        fill(layer, values)
    optimizer.step()
    first, second = map(numbers, layers)
    assert (first - second).abs().max() > 0.1


def described(method: str, **options: Any) -> str:
    _, optimizer = wrapped(OPTIMIZERS["sgd"], method, process_group=ALONE, **options)
    return f"{optimizer} {optimizer.state_dict()}"


def described_dgc(**options: Any) -> str:
    made = DGC(mlp().parameters(), DGCConfig(**options), process_group=ALONE)
    return str(made.state_dict())


# A description of what is made with options, by each of the ways to give them.
NUMPY: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "gossip": (
        partial(described, "choco", compressor="random-k"),
        {"local_steps": 2, "seed": 3, "keep_ratio": 0.2, "diffusion_rate": 0.02},
    ),
    "topology": (
        lambda **o: described("dpsgd", topology="random-matching", topology_options=o),
        {"period": 3},
    ),
    "learning": (
        lambda **o: described(
            "dpsgd", learning="diloco", max_norm=o.pop("norm"), learning_options=o
        ),
        {"norm": 0.5, "outer_rate": 0.7, "gradient_correction": True, "fragments": 1},
    ),
    "aggregation": (described_dgc, {"compress_ratio": 0.1, "seed": 3}),
    "graph": (
        lambda n, seed: topologies.make("exponential", n, seed=seed).fingerprint,
        {"n": 32, "seed": 1},
    ),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    make, known = NUMPY[name]
    for kinds in ({int: np.int64, float: np.float64, bool: np.bool_}, {float: np.float32}):
        given = {k: kinds[type(v)](v) for k, v in known.items() if type(v) in kinds}
        plain = {option: value.item() for option, value in given.items()}
        assert str(make(**known | given)) == str(make(**known | plain))


@pytest.mark.parallel([4])
def test_topologies_are_also_objects_and_paths(tmp_path: Path) -> None:
    own = tmp_path / "ring.edgelist"
    own.write_text("0 1\n1 2\n2 3\n3 0\n")
    file = processes().broadcast(own)
    found = []
    topologies.make("round-robin", 4, options={"graph": file})
    for topology in ("ring", nx.cycle_graph(4), topologies.make("ring", 4), file):
        model, optimizer = wrapped(OPTIMIZERS["sgd"], "dpsgd", topology=topology)
        run(model, optimizer, range(2))
        found.append(everywhere(model))
        optimizer.load_state_dict(optimizer.state_dict())
    for x in found:
        torch.testing.assert_close(x, found[0])
    with pytest.raises(BadInput, match="it has 5 workers, the run has 4"):
        wrapped(OPTIMIZERS["sgd"], "dpsgd", topology=nx.cycle_graph(5))
