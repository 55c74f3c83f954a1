"""Laws of gradients that are batched over the workers: those of one worker after the other."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from powergossip.errors import Diverged
from powergossip.network import Processes, processes
from powergossip.parameters import Parameters
from powergossip.tasks.models import ARCHITECTURES
from powergossip.training.batched import BatchedGradient, check, stacked
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.training import configured

ALONE = Processes()
TEXT = {"task": "LSTM", "task_architecture": "GPT"}
LARGE = ("ResNet110", "ResNet18", "VGG11")  # of the same layers as ResNet20, and slow


def trainer(choice: str, who: Processes = ALONE, **changes: Any) -> Trainer:
    config = configured(batched_gradients=choice, **changes)
    run = Trainer(checked(config, who), who)
    assert run.facts()["batched_gradients"] == (choice == "on")
    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *({"task_architecture": name} for name in ARCHITECTURES if name not in LARGE),
        {"task_architecture": "ResNet20", "task_options": {"normalization": "group"}},
        TEXT,
        {"precision": "bf16"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_gradients_buffers_and_metrics_are_those_of_one_worker_at_a_time(
    changes: dict[str, Any],
) -> None:
    """To rounding, added to what the gradient buffer has."""
    batched, apart = (trainer(choice, n_workers=3, **changes) for choice in ("on", "off"))
    noise = torch.randn(apart.parameters.x.shape, generator=torch.Generator().manual_seed(1))
    metrics = []
    for run in (batched, apart):
        run.parameters.x.add_(noise, alpha=0.01)
        run.parameters.grad.fill_(0.001)
        metrics.append(run.execution.gradient(0, 0))
    half = changes.get("precision") == "bf16"  # whose sums of products differ in 8 bits
    for name, values in metrics[1].items():
        torch.testing.assert_close(metrics[0][name], values, rtol=1e-2 if half else 1e-5, atol=0)
    for row in ("grad", "buffers"):
        found, expected = (getattr(run.parameters, row) for run in (batched, apart))
        assert (found - expected).norm() <= (0.1 if half else 1e-4) * expected.norm()
    first, second = (run.state_dict((0, 1, {}))["whole_number_buffers"] for run in (batched, apart))
    assert {k: v.tolist() for k, v in first.items()} == {k: v.tolist() for k, v in second.items()}


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["MLP", "ResNet20"])
def test_batches_of_two_sizes_take_two_calls(architecture: str) -> None:
    """The last ones of an epoch: of 5 workers, two have a sample more."""
    batched, apart = (
        trainer(choice, n_workers=5, task_architecture=architecture) for choice in ("on", "off")
    )
    noise = torch.randn(apart.parameters.x.shape, generator=torch.Generator().manual_seed(1))
    calls, metrics, last = [], [], apart.steps_per_epoch - 1
    sizes = [len(apart.task.batch(worker, 0, last)[0]) for worker in range(5)]
    assert sizes == [15, 15, 16, 15, 16]
    for run in (batched, apart):
        run.parameters.x.add_(noise, alpha=0.01)
        run.parameters.grad.fill_(0.001)
        with pytest.MonkeyPatch.context() as patch:
            loss = Mock(wraps=run.task.loss)
            patch.setattr(run.task, "loss", loss)
            metrics.append(run.execution.gradient(0, last))
        calls.append(loss.call_count)
    assert calls == [2, 5]
    for name, values in metrics[1].items():
        torch.testing.assert_close(metrics[0][name], values, rtol=1e-4, atol=0)
    # A rounding error at a kink of relu changes the gradients of a deep model.
    for row in ("grad",) if architecture == "MLP" else ("buffers",):
        found, expected = (getattr(run.parameters, row) for run in (batched, apart))
        assert (found - expected).norm() <= 1e-4 * expected.norm()
    batched.parameters.x[3] = torch.nan  # the last one of its group
    execution: Any = batched.execution
    execution.gradient(0, last)
    with pytest.raises(Diverged, match="worker 3"):
        execution.run.agreement.agree()


class Odd(nn.Module):
    """Tied, frozen and unused parameters, and a buffer that a forward pass replaces."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.frozen(self.embedding(inputs)).tanh() * self.scalar
        self.largest = torch.maximum(self.largest, hidden.detach().max())
        return hidden @ self.out.weight


def test_tied_frozen_and_unused_parameters() -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        value = functional.mse_loss(model(batch["inputs"]), batch["targets"])
        return value, {"mse": value.detach()}

    task: Any = SimpleNamespace(loss=loss, carried=lambda model: {})
    random = torch.Generator().manual_seed(1)
    start, workers = Odd(), range(3)
    batches = [
        {name: torch.randn(5, 4, generator=random) for name in ("inputs", "targets")}
        for _ in workers
    ]
    apart, batched = (Parameters([copy.deepcopy(start) for _ in workers]) for _ in range(2))
    apart.x.add_(torch.randn(apart.x.shape, generator=random), alpha=0.1)
    batched.x.copy_(apart.x)
    for model, batch in zip(apart.models, batches, strict=True):
        loss(model, batch)[0].backward()
    BatchedGradient(task, batched)(stacked(batches))
    assert (batched.grad - apart.grad).norm() <= 1e-5 * apart.grad.norm()
    largest = torch.stack([model.get_buffer("largest") for model in apart.models])
    torch.testing.assert_close(batched.buffers.flatten(), largest)


def test_a_check_changes_nothing_and_each_worker_has_its_own_dropout_mask() -> None:
    """Neither random numbers, of which a forward pass draws some, nor gradients and buffers. Equal
    models with equal batches have different losses."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return model(batch).square().mean(), {}

    task: Any = SimpleNamespace(loss=loss, carried=lambda model: {})
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.BatchNorm1d(64, affine=False))
    parameters = Parameters([copy.deepcopy(model) for _ in range(3)])
    batched = BatchedGradient(task, parameters)

    def state() -> tuple[Tensor, ...]:
        return torch.get_rng_state(), parameters.grad.clone(), parameters.buffers.clone()

    before = state()
    check(batched, [torch.randn(5, 4, generator=torch.Generator()) for _ in range(3)])
    assert all(map(torch.equal, before, state()))
    losses, _ = batched(torch.ones(3, 5, 4))
    assert len(set(losses.tolist())) == 3


def test_batches_fit_only_if_values_without_axes_are_equal() -> None:
    """All workers have those of the first batch."""
    first, equal = ({"inputs": torch.ones(3, 4), "weight": torch.tensor(1.0)} for _ in range(2))
    together = stacked([first, equal])
    assert together is not None
    assert together["inputs"].shape == (2, 3, 4)
    assert together["weight"].ndim == 0
    for other in (torch.tensor(2.0), torch.ones(1), torch.tensor(1), 1.0, None):
        assert stacked([first, {**equal, "weight": other}]) is None


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{"batch_size": 100}, {"task_architecture": "dropout", "max_steps_per_epoch": 2}]
)
def test_a_resumed_run_is_the_same_to_the_bit(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the last batches of an epoch, of which some have a sample more."""

    def with_dropout(shape: Any, n_labels: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, n_labels))

    monkeypatch.setitem(ARCHITECTURES, "dropout", with_dropout)
    options = {"n_workers": 4, "gradient_clipping": 1.0, **changes}
    straight = trainer("on", **options)
    steps = straight.steps_per_epoch
    for step in range(steps):
        straight.execution.train_step(0, step)
    resumed = trainer("on", **options)
    resumed.execution.train_step(0, 1)  # forgotten by loading
    resumed.load_state_dict(copy.deepcopy(straight.state_dict((1, 0, {}))))
    for run in (straight, resumed):
        for step in range(2):
            run.execution.train_step(1, step)
    assert torch.equal(straight.parameters.x, resumed.parameters.x)


@pytest.mark.parallel([2])
def test_layouts_agree_to_rounding() -> None:
    who = processes()
    here, alone = (trainer("on", by, n_workers=4) for by in (who, ALONE))
    for run in (here, alone):
        for step in range(3):
            run.execution.train_step(0, step)
    expected = alone.parameters.x[here.network.workers.start : here.network.workers.stop]
    assert (here.parameters.x - expected).norm() <= 1e-5 * expected.norm()


def test_auto_follows_a_rule_and_keeps_the_choice_of_a_checkpoint() -> None:
    """Many small models of the library are batched."""
    few, many = (
        Trainer(checked(configured(n_workers=n), ALONE), ALONE).facts()["batched_gradients"]
        for n in (8, 16)
    )
    assert (few, many) == (False, True)
    for recorded in (False, True):
        run = Trainer(checked(configured(n_workers=16), ALONE), ALONE)
        state = run.state_dict((0, 0, {}))
        run.load_state_dict({**state, "batched_gradients": recorded})
        assert run.facts()["batched_gradients"] is recorded
