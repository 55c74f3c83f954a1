"""Laws of PyTorch's DDP hooks on our workers: what they equal, what they send, and that they go on.

Axes: worker, D numbers of a worker's model.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn

import train
from powergossip import algorithms, topologies
from powergossip.algorithms import ddp_hooks, learning
from powergossip.algorithms.ddp_hooks import HOOKS, DDPHook
from powergossip.errors import BadInput
from powergossip.network import Network, Processes, processes, torch_group
from powergossip.network.torch import rendezvous
from powergossip.parameters import Parameters
from powergossip.randomness import generator
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer

RATE = 0.05
SIZES = (12, 20, 7)


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:]))


def linear() -> nn.Module:
    """Its gradient is a matrix of no more than the rank of all workers' samples."""
    torch.manual_seed(3)
    return nn.Linear(12, 10, bias=False)


def wide() -> nn.Module:
    """Three of DDP's buckets, as the first ones hold 1 MiB."""
    torch.manual_seed(3)
    layers = [nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600)]
    return nn.Sequential(*layers)


class Worker:
    """One model and its learning algorithm, on random regression problems."""

    def __init__(
        self,
        make: Callable[[Network, Parameters, Callable[[Tensor], Any]], Any],
        model: Callable[[], nn.Module] = mlp,
        who: Processes | None = None,
        samples: int = 6,
        fixed: bool = False,
        update: Callable[[Tensor], Any] | None = None,
    ):
        self.who = who or processes()
        self.network = Network(topologies.make("ring", self.who.size), self.who)
        self.model = model()
        self.parameters = Parameters([self.model])
        self.rule = make(self.network, self.parameters, update or self.update)
        self.steps, self.samples, self.fixed = 0, samples, fixed

    def update(self, gradient: Tensor) -> None:
        self.parameters.x.sub_(gradient, alpha=RATE)

    def gradient(self) -> float:
        n_in = next(self.model.parameters()).shape[1]
        t = 0 if self.fixed else self.steps
        random = generator(5, "test", self.network.workers.start, t)
        inputs = torch.from_numpy(random.standard_normal((self.samples, n_in))).float()
        outputs = self.model(inputs)
        targets = torch.from_numpy(random.standard_normal(outputs.shape)).float()
        loss = (outputs - targets).square().mean()
        loss.backward()
        return loss.item()

    def train(self, steps: int) -> "Worker":
        for _ in range(steps):
            self.rule.start()
            self.gradient()
            self.rule.finish()
            self.steps += 1
        return self

    @property
    def x(self) -> Tensor:
        return self.parameters.x


def hooked(hook: str = "ddp-powersgd", **options: Any) -> Callable[..., DDPHook]:
    options = {"start_iteration": 3, "min_compression_rate": 1.0} | options
    return lambda network, parameters, update: DDPHook(
        network, parameters, update, hook=hook, **options
    )


def all_reduce(**options: Any) -> Callable[..., algorithms.DPSGD]:
    return lambda network, parameters, update: algorithms.DPSGD(
        learning.Workers(
            network,
            lambda layout: algorithms.ExactMean(network),
            parameters,
            SimpleNamespace(rate=RATE, step=update),
            **options,
        )
    )


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


# What it computes.


@pytest.mark.parallel([4])
@pytest.mark.parametrize("hook", HOOKS)
def test_before_compression_starts_it_is_all_reduce_sgd(hook: str) -> None:
    start = mlp()
    ours = Worker(hooked(hook, start_iteration=8, weight_decay=0.1)).train(8)
    theirs = Worker(all_reduce(weight_decay=0.1)).train(8)
    assert close(ours.x, theirs.x)
    assert not close(ours.x, Parameters([start]).x)
    assert ours.network.bits.tolist() == theirs.network.bits.tolist()
    assert ours.network.messages.tolist() == theirs.network.messages.tolist()


@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("hook", "model", "warm_start"),
    [
        ("ddp-powersgd", mlp, True),
        ("ddp-batched-powersgd", mlp, False),
        ("ddp-powersgd", wide, False),
    ],
)
def test_workers_stay_together_and_learn(
    hook: str, warm_start: bool, model: Callable[[], nn.Module]
) -> None:
    """Three buckets are all-reduced in the same order everywhere, or this would not end."""
    worker = Worker(hooked(hook, warm_start=warm_start), model, fixed=True)
    before = worker.gradient()
    worker.train(10)
    xs = worker.network.gather(worker.x)
    assert torch.equal(xs, xs[:1].expand_as(xs))
    assert worker.gradient() < before
    uncompressed = Worker(all_reduce(), model, fixed=True).train(10)
    assert not close(worker.x, uncompressed.x), "rank 1 is not all there is"


@pytest.mark.parallel([2])
def test_errors_are_fed_back() -> None:
    """Σ_t of what is applied + mean_i e_i = Σ_t mean_i g_i, if gradients do not depend on x."""
    applied = []
    given: list[Tensor] = []
    worker = Worker(hooked(), mlp, update=lambda gradient: applied.append(gradient.clone()))
    worker.train(9)
    plain = Worker(
        all_reduce(),
        mlp,
        update=lambda gradient: given.append(plain.network.gather(gradient).mean(0, keepdim=True)),
    )
    plain.train(9)
    (error,) = worker.rule.state.error_dict.values()
    missing = worker.network.gather(error[None]).mean(0)
    difference = sum(given) - sum(applied)  # in the order of the flat buffer, not the bucket's
    assert isinstance(difference, Tensor)
    assert difference.norm() > 0.01
    assert torch.allclose(difference[0].sort().values, missing.sort().values, atol=1e-5)


@pytest.mark.parametrize("hook", HOOKS)
def test_epsilon_is_given_to_both_hooks(hook: str) -> None:
    """With torch's default of 0, a gradient of zeros gives NaN."""
    for epsilon in (0.0, 1e-8):
        options: dict[str, Any] = {"rank": 2, "orthogonalization_epsilon": epsilon}
        worker = Worker(hooked(hook, min_compression_rate=0, **options), linear, who=Processes())
        for _ in range(5):
            worker.rule.start()
            (worker.model(torch.zeros(1, 12)).sum()).backward()
            worker.rule.finish()
        assert worker.x.isfinite().all() == (epsilon > 0)


def test_the_smallest_bucket_is_that_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    hook, count = HOOKS["ddp-powersgd"]

    def spy(state: Any, bucket: dist.GradBucket) -> list[int]:
        found.append(bucket.buffer().numel())
        return count(state, bucket)

    monkeypatch.setitem(HOOKS, "ddp-powersgd", (hook, spy))
    worker = Worker(hooked(rank=2), wide, who=Processes()).train(4)
    sizes = [p.numel() for p in worker.model.parameters()]
    assert ddp_hooks.smallest_bucket(sizes) == min(found) < sum(sizes)
    state = worker.rule.state
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (2, 3)


@pytest.mark.parallel([2])
def test_the_mean_gradient_is_clipped() -> None:
    """Gradients stay in the flat buffer."""
    seen: list[Tensor] = []
    worker = Worker(hooked(clip=0.01), update=lambda gradient: seen.append(gradient.clone()))
    views = [parameter.grad.data_ptr() for parameter in worker.model.parameters()]  # type: ignore[union-attr]
    worker.train(5)
    assert torch.stack(seen).norm(dim=2).flatten().tolist() == pytest.approx([0.01] * 5)
    assert [p.grad.data_ptr() for p in worker.model.parameters()] == views  # type: ignore[union-attr]
    start = worker.parameters.grad.data_ptr()
    assert all(0 <= view - start < 4 * worker.parameters.layout.size for view in views)


# What it sends.


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize(
    ("hook", "rank", "least_rate", "model"),
    [
        ("ddp-powersgd", 1, 1.0, wide),
        ("ddp-powersgd", 2, 3.0, mlp),
        ("ddp-batched-powersgd", 2, 1.0, mlp),
        ("ddp-batched-powersgd", 1, 1.0, wide),
    ],
)
def test_what_is_counted_is_what_pytorch_all_reduces(
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    rank: int,
    least_rate: float,
    model: Callable[[], nn.Module],
) -> None:
    """By the ring's formula, 2 (n − 1)/n of the bits in 2 (n − 1) messages."""
    sizes: list[int] = []
    original = dist.all_reduce

    def spy(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *rest, **more)

    monkeypatch.setattr(dist, "all_reduce", spy)
    worker = Worker(hooked(hook, rank=rank, min_compression_rate=least_rate), model).train(6)
    n, state = worker.who.size, worker.rule.state
    assert sum(sizes) == 3 * worker.parameters.layout.size + state.total_numel_after_compression
    expected = sum(round(2 * (n - 1) * 32 * size / n) for size in sizes)
    assert worker.network.bits.tolist() == [expected]
    assert worker.network.messages.tolist() == [2 * (n - 1) * sum(size > 0 for size in sizes)]


# Checkpoints.


@pytest.mark.long
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("hook", "warm_start", "at"),
    [
        ("ddp-powersgd", True, 5),
        ("ddp-powersgd", False, 2),
        ("ddp-batched-powersgd", True, 2),
        ("ddp-batched-powersgd", False, 5),
    ],
)
def test_it_goes_on_bit_for_bit(hook: str, warm_start: bool, at: int) -> None:
    """A state is a copy, with an axis of workers."""
    through = Worker(hooked(hook, warm_start=warm_start, seed=7), wide).train(at)
    x, state = through.x.clone(), through.rule.state_dict()
    assert all(len(tensor) == 1 for name in ("p", "q") for tensor in state[name].values())
    before = str(state)
    through.train(4)
    assert str(state) == before
    again = Worker(hooked(hook, warm_start=warm_start, seed=8), wide).train(3)
    again.x.copy_(x)
    again.rule.load_state_dict(state)
    again.steps = at
    again.train(4)
    assert torch.equal(again.x, through.x)
    ours, theirs = again.rule.state_dict(), through.rule.state_dict()
    assert str(ours) == str(theirs)


# The first compressed step of train.py.


def started(processes_: Processes, **changes: Any) -> Trainer:
    config = OmegaConf.structured(train.Config)
    values = {"optimizer": "ddp-powersgd", "n_workers": 1, "task_architecture": "MLP"}
    for key, value in {**values, "log_verbosity": 0, **changes}.items():
        config[key] = value
    return Trainer(checked(config, processes_), processes_)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_epochs": 31}, 31),
        ({"num_epochs": 1}, 2),
        ({"distributed_lr_warmup_factor": 2.0}, 50),
        ({"distributed_lr_warmup_factor": 2.0, "num_epochs": 3}, 30),
        ({"optimizer_start_iteration": 7}, 7),
    ],
)
def test_compression_starts_by_the_guidance(changes: dict[str, Any], expected: int) -> None:
    """At a tenth of 40 epochs of 10 steps, after a warm-up of 5 epochs if there is one."""
    run = started(Processes(), **{"max_steps_per_epoch": 10} | changes)
    assert run.execution.rule.state.start_powerSGD_iter == expected
    assert run.facts()["start_iteration"] == expected


def test_a_rank_that_no_bucket_has_is_rejected_at_construction() -> None:
    """The layer-wise hook compresses no matrix at such a rank."""
    with pytest.raises(BadInput, match="optimizer_rank=100000"):
        started(Processes(), optimizer="ddp-batched-powersgd", optimizer_rank=10**5)
    worker = Worker(hooked(rank=10**9), who=Processes()).train(5)
    assert worker.rule.state.compression_stats()[0] == 1


def test_a_prolonged_run_keeps_its_start() -> None:
    first = started(Processes(), num_epochs=2, max_steps_per_epoch=10)
    again = started(Processes(), num_epochs=200, max_steps_per_epoch=10)
    assert again.execution.rule.state.start_powerSGD_iter == 200
    again.execution.rule.load_state_dict(first.execution.rule.state_dict())
    assert again.execution.rule.state.start_powerSGD_iter == 2


# The process group.


@pytest.mark.parallel([2])
def test_the_process_group_is_made_once_and_anew_for_other_processes() -> None:
    device = torch.device("cpu")
    if processes().transport != "mpi":
        pytest.skip("with torch.distributed, the default process group is that of the run")
    group = torch_group(processes(), device)
    assert torch_group(processes(), device) is group
    assert (group.size(), group.rank()) == (2, processes().rank)
    assert torch_group(Processes(), device).size() == 1
    assert torch_group(processes(), device).size() == 2


def test_a_process_group_of_someone_else_is_used_or_refused(tmp_path: Any) -> None:
    rendezvous.end()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_group(Processes(), torch.device("cpu"))
        rendezvous.end()
        assert dist.is_initialized(), "it is not ours to take down"
        two = Processes()
        two.size = 2
        with pytest.raises(ValueError, match=r"process 0 of 1, where MPI has 0 of 2"):
            torch_group(two, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank=0: use"),
        ({"min_compression_rate": float("nan")}, "min_compression_rate=nan"),
        ({"start_iteration": -1}, "start_iteration=-1: use"),
        ({"start_iteration": 1}, "start_iteration=1: use 2 or more"),
        ({"start_iteration": 1, "warm_start": False}, "optimizer_error_feedback=false"),
        ({"start_iteration": 0, "error_feedback": False}, "optimizer_warm_start=false"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon=-1e-08"),
        ({"hook": "powersgd"}, "choose from ddp-powersgd, ddp-batched-powersgd"),
        ({"hook": "ddp-batched-powersgd", "rank": 22}, "rank=22: use 21 or less"),
    ],
)
def test_what_pytorch_cannot_do_is_refused_before_the_start(
    options: dict[str, Any], words: str
) -> None:
    """Compression may start at once without memory."""
    with pytest.raises(ValueError, match=words):
        Worker(hooked(**options), who=Processes())
    at_once: dict[str, Any] = {"start_iteration": 0, "warm_start": False, "error_feedback": False}
    Worker(hooked(**at_once), who=Processes()).train(1)


def test_models_that_do_not_fit_are_refused() -> None:
    """Frozen parameters are not sent."""
    network = Network(topologies.make("ring", 4), Processes())
    parameters = Parameters([mlp() for _ in range(4)])
    with pytest.raises(ValueError, match=r"4 workers in a process.*mpirun -np N"):
        DDPHook(network, parameters, lambda gradient: None, hook="ddp-powersgd")
    net: Any = mlp()
    net[1].register_parameter("idle", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"parameter 1\.idle gets no gradient"):
        Worker(hooked(), lambda: net, who=Processes()).train(1)
    frozen: Any = mlp()
    frozen[0].requires_grad_(False)
    before = frozen[0].weight.detach().clone()
    worker = Worker(hooked(), lambda: frozen, who=Processes()).train(5)
    assert torch.equal(frozen[0].weight, before)
    assert worker.rule.state.total_numel_before_compression == 2 * (7 * 20 + 7)
