"""Laws of training with compressed gradients, for every row of the registry."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from powergossip import registry_options as rows
from powergossip import topologies
from powergossip.algorithms import aggregation as aggregations
from powergossip.algorithms.aggregation import AGGREGATIONS, OF_LOCAL_STEPS
from powergossip.algorithms.error_feedback import ErrorFeedbackConfig
from powergossip.algorithms.learning import CentralizedSGD
from powergossip.algorithms.power_sgd import PowerSGDConfig
from powergossip.compressors import COMPRESSORS, Identity, TopK
from powergossip.network import Conversation, Gather, Network, Processes, processes
from powergossip.optimizers import (
    DGC,
    DGCSGD,
    DGCConfig,
    ErrorFeedback,
    PowerSGD,
    optimizer_step,
)
from powergossip.parameters import Layout, Parameters
from powergossip.training.method_keys import ALIASES, DEFAULTS
from tests.harness.helpers import with_one_each
from tests.harness.loops import backward, gradients, model, vector
from tests.harness.loops import step as mean_of
from tests.harness.training import after_steps

# With these nothing is compressed, and all is applied at once.
EVERYTHING: dict[str, dict[str, Any]] = {
    "powersgd": {"optimizer_rank": 128},  # full
    "dgc": {"optimizer_keep_ratio": 1.0},
    "ef-sgd": {"optimizer_compressor": "identity"},
    "sparse-loco": {"optimizer_kept": 4096, "optimizer_bits": 32},
}
COMPRESSING: dict[str, dict[str, Any]] = {
    "powersgd": {"optimizer_rank": 1},
    "dgc": {"optimizer_keep_ratio": 0.03},
    "ef-sgd": {"optimizer_compressor": "sign-and-norm"},
    "sparse-loco": {"optimizer_kept": 32, "optimizer_bits": 8},
    # Never SGD. Their laws are in test_sign_sgd.py and test_chunked.py.
    "signsgd": {"learning_rate": 0.002},
    "demo": {"learning_rate": 0.002},
}
# Those with a residual, with their options.
RESIDUALS: list[tuple[str, dict[str, Any]]] = [
    ("powersgd", {"rank": 1}),
    ("powersgd", {"rank": 2, "num_iterations": 3}),
    ("dgc", {"keep_ratio": 0.03}),
    ("dgc", {"keep_ratio": 0.03, "int32_indices": False}),
    ("sparse-loco", {"kept": 8, "bits": 4, "error_decay": 1.0}),
    *(("ef-sgd", {"compressor": name}) for name in COMPRESSORS if name != "identity"),
]
# Both of DGC, which applies the momentum itself, and of one that does not.
with_and_without_nesterov = pytest.mark.parametrize(
    ("name", "nesterov"),
    with_one_each([*EVERYTHING], [True, False], lambda name: name == "dgc"),
)


def test_every_aggregation_is_tested() -> None:
    assert {*EVERYTHING, "signsgd", "demo"} == set(COMPRESSING) == set(AGGREGATIONS)


@pytest.mark.long
@with_and_without_nesterov
def test_without_compression_it_is_sgd_on_the_mean_gradient(name: str, nesterov: bool) -> None:
    """torch's SGD with momentum and weight decay, for 30 steps of a real model."""
    config = {"weight_decay": 0.01, "nesterov": nesterov, "lr_schedule_milestones": [[0.6, 0.1]]}
    run = after_steps(0, optimizer=name, **EVERYTHING[name], **config)
    reference = after_steps(0, optimizer="all-reduce")
    x = nn.Parameter(reference.parameters.x[0].clone())
    start = x.detach().clone()
    sgd = torch.optim.SGD([x], momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    for t in range(30):
        epoch, step = divmod(t, run.steps_per_epoch)
        reference.parameters.x.copy_(x.detach())
        reference.parameters.grad.zero_()
        reference.execution.gradient(epoch, step)
        x.grad = reference.parameters.grad.mean(0)
        run.execution.train_step(epoch, step)
        sgd.param_groups[0]["lr"] = run.execution.local.rate
        sgd.step()
        found = run.parameters.x
        assert (found - x.detach()).norm() < 1e-5 * found.norm()
    assert (x.detach() - start).norm() > 0.05 * start.norm(), "it has moved"


def rule(
    name: str,
    momentum: float = 0.9,
    dtype: torch.dtype = torch.float32,
    chosen: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[CentralizedSGD, Parameters]:
    """An aggregation with SGD, for two workers with one linear layer each. chosen: its options."""
    linear = nn.Linear(40, 30, dtype=dtype)
    parameters = Parameters([copy.deepcopy(linear) for _ in range(2)])
    network = Network(topologies.make("ring", 2), Processes(), dtype=dtype)
    of_name = {key.removeprefix("optimizer_"): value for key, value in COMPRESSING[name].items()}
    given = dict(chosen or of_name)
    own = rows.defaults(AGGREGATIONS[name])
    given |= {key: options[key] for key in ("nesterov", "clip") if key in own and key in options}
    given |= {"momentum": momentum} if "momentum" in own else {}
    aggregation = made(name, network, parameters.layout, given)
    x = nn.Parameter(parameters.x)
    owns = aggregation.owns_momentum
    nesterov = options.pop("nesterov", False)
    if owns:
        momentum, nesterov = 0.0, False
    sgd = torch.optim.SGD([x], lr=0.1, momentum=momentum, nesterov=nesterov)
    if aggregation.clips:
        options.pop("clip", None)

    def update(gradient: torch.Tensor) -> None:
        x.grad = gradient
        sgd.step()

    return CentralizedSGD(network, aggregation, parameters, update, **options), parameters


@pytest.mark.long
@with_and_without_nesterov
def test_weight_decay_is_not_compressed(name: str, nesterov: bool) -> None:
    """Without gradients, x follows torch's SGD with momentum and weight decay."""
    sgd, parameters = rule(name, weight_decay=5e-3, nesterov=nesterov)
    x = nn.Parameter(parameters.x.clone())
    start = x.detach().clone()
    expected = torch.optim.SGD([x], lr=0.1, momentum=0.9, weight_decay=5e-3, nesterov=nesterov)
    x.grad = torch.zeros_like(x)
    for _ in range(100):
        sgd.start()
        sgd.finish()
        expected.step()
        assert (parameters.x - x.detach()).norm() < 1e-5 * x.detach().norm()
    assert x.detach().norm() < 0.7 * start.norm()


@pytest.mark.long
@pytest.mark.parametrize("name", EVERYTHING)
def test_clipping_leaves_weight_decay_alone(name: str) -> None:
    """A step with a threshold far below λ‖x‖: gradients are clipped, the decay is not."""
    sgd, parameters = rule(name, weight_decay=1.0, clip=1e-4)
    x = parameters.x.clone()
    sgd.start()
    parameters.grad.add_(1.0)
    sgd.finish()
    assert (parameters.x - 0.9 * x).norm() < 1e-3 * x.norm()
    assert not torch.equal(parameters.x, 0.9 * x)


@pytest.mark.long
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_workers_stay_together_and_learn_with_fewer_bits(name: str) -> None:
    """Equal to the bit, also at the end of the buffer, where torch's kernels may round
    differently."""
    run = after_steps(80, optimizer=name, n_workers=3, **COMPRESSING[name])
    x = run.parameters.x
    assert x.numel() % 8, "the buffer ends within a vector of the processor"
    assert (x == x[0]).all()
    plain = after_steps(1, optimizer="all-reduce", n_workers=3).network.bits[0] * 80
    assert run.network.bits[0] < 0.2 * plain
    accuracy = run.task.evaluate(run.parameters.models[0])
    assert accuracy["accuracy"] > 0.85 * accuracy["count"]


@pytest.mark.parametrize("name", sorted({*EVERYTHING} - OF_LOCAL_STEPS))
def test_several_batches_a_step_are_one_large_batch(name: str) -> None:
    """Their mean gradient; nothing is sent in between, and parameters rest."""
    several = after_steps(3, optimizer=name, optimizer_num_batches_per_step=4, **EVERYTHING[name])
    start = after_steps(0).parameters.x
    assert torch.equal(several.parameters.x, start)
    assert several.network.bits[0] == 0
    several.execution.rule.start()
    several.execution.gradient(0, 3)
    several.execution.rule.finish()
    alone = after_steps(0, optimizer=name, **EVERYTHING[name])
    alone.parameters.grad.zero_()
    alone.execution.rule.start()
    for step in range(4):
        alone.execution.gradient(0, step)
    alone.parameters.grad.div_(4)
    alone.execution.rule.finish()
    x, y = several.parameters.x, alone.parameters.x
    assert (x - start).norm() > 1e-3 * start.norm()
    assert (x - y).norm() < 1e-5 * (x - start).norm()


@pytest.mark.parametrize(("name", "chosen"), RESIDUALS)
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-4), (torch.float64, 1e-13)])
def test_applied_and_residual_are_the_sum_of_the_mean_gradients(
    name: str, chosen: dict[str, Any], batches: int, dtype: torch.dtype, rounding: float
) -> None:
    """With compression, over several steps of several batches, without momentum."""
    sgd, parameters = rule(name, 0.0, dtype, chosen, num_batches_per_step=batches)
    start, given = parameters.x[0].double().clone(), torch.zeros(parameters.layout.size).double()
    random = torch.Generator().manual_seed(0)
    for _ in range(5 * batches):
        gradient = torch.randn(parameters.x.shape, generator=random, dtype=dtype)
        given += gradient.double().mean(0) / batches
        sgd.start()
        parameters.grad.add_(gradient)
        sgd.finish()
    state = sgd.state_dict()
    residual = (state["gradient"] if batches == 1 else state["error"]).double().mean(0)
    for name in {"kept", "error"} & set(state["aggregation"]):  # residuals of the aggregation
        residual = residual + state["aggregation"][name].double().mean(0)
    assert residual.norm() > 0.05 * given.norm(), "it compresses"
    applied = (start - parameters.x[0].double()) / 0.1
    assert (applied + residual - given).norm() < rounding * given.norm()


LAYOUT = Layout([(60, 50), (9,), (6, 4), (3, 2, 2)])
# Options of an aggregation, and others that reject its state.
RESTORED: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("powersgd", {"rank": 1, "num_iterations": 3, "min_compression_rate": 0}, {"rank": 2}),
    ("powersgd", {"rank": 3, "num_iterations": 1, "start_compressing_after": 7}, None),
    ("powersgd", {"rank": 1, "num_iterations": 3, "warm_start": False}, None),
    ("dgc", {"keep_ratio": 0.02, "warmup_epochs": 2, "fp16_values": True, "clip": 50.0}, None),
    ("dgc", {"keep_ratio": 0.02, "clip": 2.0, "compress_upper_bound": 1.3}, None),
    *(
        ("ef-sgd", {"compressor": name, "momentum_before_compression": True}, {"compressor": name})
        for name in ("random-k", "qsgd", "sign-and-norm")
    ),
    ("signsgd", {"momentum": 0.0}, {"momentum": 0.9}),
    ("signsgd", {"momentum": 0.9}, {"momentum": 0.0}),
    ("demo", {"kept": 8}, None),
    ("sparse-loco", {"kept": 8, "bits": 4}, None),
]


def made(name: str, network: Network, layout: Layout, options: dict[str, Any]) -> Any:
    """An aggregation with the defaults of train.py."""
    given = DEFAULTS.get(name, {}) | options
    given = {ALIASES.get(name, {}).get(key, key): value for key, value in given.items()}
    return aggregations.make(name, network, layout, **given)


class Run:
    """An aggregation of workers, and their gradients, which grow by what they leave."""

    def __init__(
        self, name: str, options: dict[str, Any], workers: int, who: Processes | None = None
    ):
        self.network = Network(topologies.make("ring", workers), who or Processes())
        self.made = made(name, self.network, LAYOUT, options)
        self.own = list(self.network.workers)
        self.rest = torch.zeros(len(self.own), LAYOUT.size)

    def step(self, t: int, bad: float = 1.0) -> torch.Tensor:
        """The mean. The learning rate and the epoch change. bad: factor of one element."""
        if t % 4 == 0:
            self.made.at_epoch(t // 4)
        self.made.at_learning_rate(0.1 / (1 + t))
        fresh = gradients(self.network.n_workers, LAYOUT, t)
        fresh[:, ::3] = 0
        fresh[-1, 4] *= bad
        self.rest += fresh[self.own]
        return mean_of(self.network, self.made, self.rest)


@pytest.mark.parametrize(("name", "options", "others"), RESTORED)
def test_a_restored_aggregation_is_the_same_to_the_bit(
    name: str, options: dict[str, Any], others: dict[str, Any] | None
) -> None:
    """Across steps with other learning rates and an increasing ratio."""
    whole, other = Run(name, options, 3), Run(name, options, 3)
    for t in range(6):
        whole.step(t)
    other.step(9)  # forgotten by loading
    state = copy.deepcopy(whole.made.state_dict())
    other.made.load_state_dict(state)
    other.rest.copy_(whole.rest)
    for t in (6, 7, 8):
        assert torch.equal(other.step(t), whole.step(t))
    if name != "signsgd" or options["momentum"]:  # its state has no shapes
        with pytest.raises(ValueError, match=r"use |another"):
            made(name, other.network, Layout([(2, 2)]), options).load_state_dict(state)
    if others is not None:
        with pytest.raises(ValueError, match=r"use |another"):
            made(name, other.network, LAYOUT, others).load_state_dict(state)


ROWS = [*RESIDUALS, *((name, options) for name, options, _ in RESTORED)]


@pytest.mark.parallel([2, 4])
def test_the_layout_of_processes_does_not_change_the_results() -> None:
    """To the bit, but for all-reduces, whose order of summation depends on it."""
    for name, options in ROWS:
        apart, together = Run(name, options, 4, processes()), Run(name, options, 4)
        for t in range(3):
            mean, expected = apart.step(t), together.step(t)[apart.own]
            rounding = 1e-5 if name in ("powersgd", "dgc") else 0.0
            torch.testing.assert_close(mean, expected, rtol=rounding, atol=rounding)
            torch.testing.assert_close(
                apart.rest, together.rest[apart.own], rtol=rounding, atol=rounding
            )
        assert apart.network.bits.tolist() == together.network.bits[apart.own].tolist()
        assert apart.network.messages.tolist() == together.network.messages[apart.own].tolist()


def test_divergence_stays_visible() -> None:
    for name, options in ROWS:
        for bad in (torch.nan, torch.inf):
            run = Run(name, options, 3)
            assert not run.step(1, bad).isfinite().all(), (name, options)


@pytest.mark.long
def test_clipping_concerns_the_new_gradient_only() -> None:
    """A worker whose gradients are shorter than the limit, but not its error, is not held back."""
    plain = after_steps(optimizer="powersgd")
    norms = plain.parameters.grad.norm(dim=1)
    clipped = after_steps(optimizer="powersgd", gradient_clipping=2.0)
    assert norms.min() > 0, "there are errors"
    x, y = plain.parameters.x, clipped.parameters.x
    assert (x - y).norm() < 1e-5 * x.norm()
    tight = after_steps(optimizer="powersgd", gradient_clipping=0.1)
    start = after_steps(0).parameters.x
    assert (tight.parameters.x - start).norm() < 0.5 * (x - start).norm()


def test_an_aggregation_of_ones_own_needs_a_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    network, layout = Network(topologies.make("ring", 2), Processes()), Layout([(1, 2)])

    class Bare:
        def __init__(self, network: Network, layout: Layout): ...

        def step(self, gradient: torch.Tensor, mean: torch.Tensor) -> Conversation:
            received = yield Gather(list(gradient))
            mean.copy_(torch.stack(received).mean(0))
            gradient.zero_()

    class Derived(Bare, aggregations.Aggregation): ...

    for row in (Bare, Derived):
        monkeypatch.setitem(AGGREGATIONS, row.__name__, row)
    with pytest.raises(TypeError, match=r"Bare has no .*; derive Bare from .*Aggregation"):
        aggregations.make("Bare", network, layout)
    made = aggregations.make("Derived", network, layout)
    made.at_epoch(0.0)
    made.at_learning_rate(0.1)
    made.load_state_dict(made.state_dict())
    g, mean = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 2)
    network.run(made.step(g, mean))
    assert mean.tolist() == [[2.0, 3.0]] * 2


# Aggregators in a loop of your own: without compression, and with it.
LOOPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "powersgd": (
        lambda parameters: PowerSGD(parameters, PowerSGDConfig(16, 0, 2, 0)),
        lambda parameters: PowerSGD(parameters, PowerSGDConfig(1, 1, 2, 0)),
    ),
    "dgc": (
        lambda parameters: DGC(parameters, DGCConfig(compress_ratio=1)),
        lambda parameters: DGC(parameters, DGCConfig(compress_ratio=0.1)),
    ),
    "ef-sgd": (
        lambda parameters: ErrorFeedback(parameters, Identity()),
        lambda parameters: ErrorFeedback(parameters, TopK(0.2)),
    ),
    "ef-sgd of momentum": (
        lambda parameters: ErrorFeedback(parameters, Identity(), ErrorFeedbackConfig(0.9)),
        lambda parameters: ErrorFeedback(parameters, TopK(0.2), ErrorFeedbackConfig(0.9)),
    ),
}


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize("name", LOOPS)
def test_five_lines_in_a_loop(name: str) -> None:
    """Without compression it is SGD on the mean gradient. With it, all workers have the same
    parameters, and the mean gradient counts in the end."""
    who, kind = processes(), DGCSGD if name in ("dgc", "ef-sgd of momentum") else torch.optim.SGD
    reference, loops = model(0), []
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    plain = torch.optim.SGD(reference.parameters(), **options)
    for make in LOOPS[name]:
        net = model(who.rank)  # process 0's parameters count
        loops.append((net, kind(net.parameters(), **options), make(net.named_parameters())))
    for t in range(9):
        for optimizer in (plain, *(optimizer for _, optimizer, _ in loops)):
            optimizer.param_groups[0]["lr"] = 0.1 if t < 6 else 0.05
        for net, *pair in loops:
            backward(net, who.rank, t)
            optimizer_step(*pair)
        for worker in range(who.size):
            backward(reference, worker, t, 1 / who.size)
        plain.step()
        plain.zero_grad()
        y, (exact, compressed) = vector(reference), (vector(net) for net, *_ in loops)
        assert (exact - y).norm() < 1e-5 * y.norm()
        assert len({tuple(x.tolist()) for x in who.gather(compressed)}) == 1
    whole, less = (aggregator.bits for *_, aggregator in loops)
    assert (less > 0) == (whole > 0) == (who.size > 1)
    assert 0 < (compressed - y).norm() < 0.5 * y.norm()
    assert less < 0.7 * whole or who.size == 1
