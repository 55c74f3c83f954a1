"""Laws of training: which rows a run writes and what they count, that it repeats, and what a step
computes.

Axes: worker, D numbers of a worker's model. Digits and a small MLP everywhere; a run takes 0.2 s.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import train
from powergossip import tasks
from powergossip.errors import BadInput
from powergossip.network import Network, processes
from powergossip.runs import metrics, summaries
from powergossip.runs.metrics import Hooks
from powergossip.tasks import models
from powergossip.tasks.task import Batch, Split
from powergossip.training import recorder
from powergossip.training.trainer import Trainer
from tests.harness import launch
from tests.harness.training import TINY, after_steps, built, reproducible, select, trained, value

pytestmark = pytest.mark.usefixtures("fresh")

SETTINGS = [f"{key}={text}" for key, text in TINY.items()]
PHASES = {"data", "gradient", "update", "averaging", "communication", "evaluation"}


# Rows.


def test_an_evaluation_gathers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gathering waits for the slowest process. The mean is in flight during the evaluation."""
    events: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            events.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    run = built()
    for name in ("gather", "start_mean"):
        noted(Network, name)
    noted(type(run.processes), "sum")
    noted(type(run.task), "evaluate")
    run.evaluation(1, 1, {})
    assert events == ["start_mean", *["evaluate"] * 5, "gather"]


def test_rows_have_the_published_names_tags_and_values() -> None:
    run, rows = trained(num_epochs=2)
    assert {"value", "epoch", "bits", "messages", "seconds"} <= set(rows.columns)
    for epoch in (1, 2):
        of_epoch = rows[rows["epoch"] == epoch]
        for name in ("accuracy", "cross_entropy"):
            assert len(select(of_epoch, name, split="train")) == 1
            assert sorted(select(of_epoch, name, split="test")["worker"]) == [0, 1, 2, 3]
            assert len(select(of_epoch, name, split="test_avg")) == 1
            assert len(select(of_epoch, name)) == 6
        distances = select(of_epoch, "consensus_distance")
        for kind in ("full_state_vector", "params_only"):
            assert len(distances[distances["type"] == kind]) == 1
        of_parameters = distances[distances["type"] == "parameter"]
        assert list(of_parameters["parameter"]) == run.parameters.names
        in_all = value(of_epoch, "consensus_distance", type="params_only")
        assert np.sqrt((of_parameters["value"] ** 2).sum()) == pytest.approx(in_all)
        phases = set(select(of_epoch, "phase_seconds")["phase"])
        assert phases == PHASES
    assert rows["seconds"].is_monotonic_increasing

    # The values of the last epoch, from the models as they are now.
    last = rows[rows["epoch"] == 2]
    x = run.parameters.x.double()
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt().item()  # over the workers
    assert value(last, "consensus_distance", type="params_only") == pytest.approx(distance)
    assert distance > 0
    mean_model = run.task.model("MLP", seed=1)
    nn.utils.vector_to_parameters(
        torch.cat([p.flatten() for p in mean_of_models(run.parameters.models)]),
        mean_model.parameters(),
    )
    measured_models: list[tuple[nn.Module, dict[str, Any]]] = [
        *((m, {"split": "test", "worker": i}) for i, m in enumerate(run.parameters.models)),
        (mean_model, {"split": "test_avg"}),
    ]
    for model, tags in measured_models:
        sums = run.task.evaluate(model)
        for name in ("accuracy", "cross_entropy"):
            measured = sums[name] / sums["count"]
            assert value(last, name, **tags) == pytest.approx(measured, rel=1e-5), tags


def mean_of_models(models: list[nn.Module]) -> list[Tensor]:
    tensors = zip(*(model.parameters() for model in models), strict=True)
    return [torch.stack([t.detach() for t in group]).mean(0) for group in tensors]


def test_evaluation_at_intervals_and_at_the_end() -> None:
    _, rows = trained(num_epochs=5, evaluation_interval=2, max_steps_per_epoch=1)
    assert select(rows, "accuracy", split="test_avg")["epoch"].tolist() == [2, 4, 5]


def test_the_mean_model_and_training_data_are_evaluated_only_if_wanted() -> None:
    _, plain = trained()
    _, without = trained(evaluate_average_model=False)
    run, rows = trained(evaluate_training_data=True)
    assert reproducible(without) == reproducible(plain[plain["split"] != "test_avg"])
    assert set(plain["split"].dropna()) == {"train", "test", "test_avg"}
    for worker, model in enumerate(run.parameters.models):
        sums = run.task.evaluate(model, "train")
        expected = sums["accuracy"] / sums["count"]
        assert value(rows, "accuracy", split="train_full", worker=worker) == expected
    assert len(select(rows, "accuracy", split="train_avg")) == 1


# Bits and messages: a formula in the shapes of the model's parameters.


def sent(run: Trainer, optimizer: str, degree: int, rank: int, iterations: int) -> list[int]:
    """Bits and messages of worker 0 for all steps of the run."""
    shapes = [tuple(p.shape) for p in run.parameters.models[0].parameters()]
    D, steps, n = sum(map(math.prod, shapes)), run.step, run.config.n_workers
    if optimizer == "dpsgd":
        return [steps * degree * 32 * D, steps * degree]
    if optimizer == "all-reduce":
        return [steps * round(2 * (n - 1) / n * 32 * D), steps * 2 * (n - 1)]
    matrices = [(shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1]
    compressed = [sides for sides in matrices if min(sides) > rank]
    rows, columns = map(sum, zip(*compressed, strict=True))
    plain = D - sum(map(math.prod, compressed))  # vectors above all
    rounds = steps * iterations
    in_turns = (rounds + 1) // 2 * columns + rounds // 2 * rows
    numbers = rank * in_turns + steps * plain
    return [degree * 32 * numbers, degree * (rounds + steps)]  # one plain message a step


@pytest.mark.parametrize(
    ("architecture", "topology", "degree", "optimizer", "rank", "iterations"),
    [
        ("MLP", "ring", 2, "power-gossip", 1, 1),
        ("MLP", "ring", 2, "power-gossip", 1, 2),
        ("CNN", "star", 3, "power-gossip", 2, 3),
        ("MLP", "ring", 2, "power-gossip", 12, 1),  # more than the last layer's 10 rows
        ("MLP", "star", 3, "dpsgd", 1, 1),
        ("CNN", "ring", 2, "dpsgd", 1, 1),
        ("MLP", "ring", 2, "all-reduce", 1, 1),
    ],
)
def test_bits_follow_from_the_shapes(
    architecture: str, topology: str, degree: int, optimizer: str, rank: int, iterations: int
) -> None:
    run, rows = trained(
        task_architecture=architecture,
        topology=topology,
        optimizer=optimizer,
        optimizer_rank=rank,
        optimizer_num_iterations=iterations,
        batch_size=52,  # seven steps: an odd number tells rows from columns
    )
    assert run.step == 7
    (counted,) = rows[["bits", "messages"]].drop_duplicates().to_numpy().tolist()
    assert counted == sent(run, optimizer, degree, rank, iterations)
    D = run.parameters.x.shape[1]
    assert value(rows, "uncompressed_gossip_bits") == run.step * degree * 32 * D


@pytest.mark.parametrize(
    "changes",
    [{}, {"learning": "diloco", "learning_options": {"fragments": 2}, "local_steps": 2},
     {"gossip": "asynchronous", "learning": "exact-diffusion", "optimizer_warm_start": False}],
    ids=["dpsgd", "diloco", "asynchronous"],
)  # fmt: skip
def test_blocks_that_were_left_out_are_counted_at_both_ends(changes: dict[str, Any]) -> None:
    few = {"optimizer_bits": 3, "optimizer_num_iterations": 1}
    run, rows = trained(num_epochs=2, batch_size=52, **few, **changes)
    row = select(rows, "skipped_blocks").to_dict("records")[-1]
    assert 0 < row["value"] < row["instances"]
    shapes = [tuple(p.shape) for p in run.parameters.models[0].parameters()]
    matrices = [shape for shape in shapes if len(shape) > 1]
    vectors = [shape for shape in shapes if len(shape) == 1]
    heights, widths = zip(*matrices, strict=True)
    columns, lines, rest = (
        math.ceil(sum(sizes) / 64) for sizes in (widths, heights, [size for (size,) in vectors])
    )
    if not changes:  # of 14 steps, the first four have whole messages
        assert row["instances"] == 8 * (5 * columns + 5 * lines + 12 * rest)
    assert select(trained(**changes)[1], "skipped_blocks").empty


# What the configuration changes.


def test_a_seed_repeats_a_run_and_another_does_not() -> None:
    first, again, other = (trained(seed=seed) for seed in (3, 3, 4))
    assert reproducible(first[1]) == reproducible(again[1])
    assert torch.equal(first[0].parameters.x, again[0].parameters.x)
    start, other_start = (built(seed=seed).parameters.x for seed in (3, 4))
    assert not torch.allclose(start, other_start, rtol=0.1)
    labels = [run.task.batch(2, 5, 0)[1] for run, _ in (first, again, other)]
    assert torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])


def test_keys_of_the_partition_reach_the_data() -> None:
    def labels(epoch: int = 0, **changes: Any) -> Tensor:  # [worker, label]
        counts = built(**changes).task.label_counts(epoch)
        assert counts is not None
        return counts

    sorted_ = {"use_decentralized_data": True}
    most = [
        int((labels(**changes) > 0).sum(1).max())
        for changes in ({}, sorted_, sorted_ | {"decentralized_data_shuffled_ratio": 1.0})
    ]
    assert (most[0], most[2]) == (10, 10)
    assert most[1] <= 4
    for reshuffle in (True, False):
        first, second = (labels(epoch, reshuffle_data=reshuffle) for epoch in (0, 1))
        assert torch.equal(first, second) is not reshuffle


def test_the_diffusion_rate_is_used_and_auto_is_the_best_for_gossip() -> None:
    """A star of 4, all weights 1/4: I − W has the eigenvalues 0, 1/4, 1/4, 1."""
    automatic, same, other = (
        after_steps(3, optimizer="dpsgd", topology="star", optimizer_diffusion_rate=rate)
        for rate in ("auto", 1.6, 1)
    )
    assert automatic.facts()["diffusion_rate"] == pytest.approx(2 / (1 / 4 + 1))
    torch.testing.assert_close(automatic.parameters.x, same.parameters.x)
    assert not torch.allclose(other.parameters.x, same.parameters.x)


@pytest.mark.parametrize("optimizer", ["power-gossip", "all-reduce"])
def test_one_worker_alone_sends_nothing_and_learns(optimizer: str) -> None:
    _, rows = trained(n_workers=1, optimizer=optimizer)
    assert rows["bits"].max() == rows["messages"].max() == 0
    assert value(rows, "consensus_distance", type="full_state_vector") == 0
    mean, only = (value(rows, "accuracy", split=split) for split in ("test_avg", "test"))
    assert mean == only > 0.8


@pytest.mark.parametrize("optimizer", ["power-gossip", "choco svd", "choco top-k", "powersgd"])
def test_a_rank_above_the_dimensions_is_the_full_rank(optimizer: str) -> None:
    """Nothing of the size of the rank is allocated."""
    name, _, compressor = optimizer.partition(" ")
    more = {"optimizer_compressor": compressor} if compressor else {}
    run = after_steps(1, optimizer=name, optimizer_rank=10**9, **more)
    assert run.parameters.x.isfinite().all()


def test_a_model_that_does_not_fit_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge(models.MLP):
        def __init__(self, shape: Any, n_labels: int, **options: Any) -> None:
            super().__init__(shape, n_labels)
            self.huge = nn.Linear(10**8, 10**8)

    monkeypatch.setitem(models.ARCHITECTURES, "MLP", Huge)
    with pytest.raises(BadInput, match=r"memory is too small"):
        built()


def test_spectrum_rows_are_the_singular_values_of_differences() -> None:
    names, pairs = ["hidden1.weight", "output.bias"], [[0, 1], [3, 1]]
    run, rows = trained(
        num_epochs=2,
        spectrum_logging_params=names,
        spectrum_logging_epochs=[2],
        spectrum_logging_worker_pairs=pairs,
    )
    spectrum = select(rows, "spectrum")
    assert set(spectrum["epoch"]) == {2}
    models = [dict(model.named_parameters()) for model in run.parameters.models]
    for name in names:
        for first, second in pairs:
            difference = models[first][name] - models[second][name]
            expected = torch.linalg.svdvals(difference.detach().reshape(len(difference), -1))
            found = select(spectrum, "spectrum", parameter=name, workers=f"{first}-{second}")
            assert found["index"].tolist() == list(range(len(expected)))
            torch.testing.assert_close(torch.tensor(found["value"].tolist()), expected)
    assert spectrum["value"].max() > 0


# The schedule reaches the optimizer.


def test_an_epoch_may_have_fewer_steps() -> None:
    """Rows of training are means over its steps and the workers: with a learning rate of almost
    zero, the model of the start sees all batches."""
    run, rows = trained(max_steps_per_epoch=3, num_epochs=2, learning_rate=1e-12)
    whole, all_rows = trained(max_steps_per_epoch=10**6)
    assert (run.step, run.steps_per_epoch) == (6, 3)
    assert whole.step == whole.task.steps_per_epoch > 6
    per_step = all_rows["bits"].max() / whole.step
    assert rows.groupby("epoch")["bits"].max().tolist() == [3 * per_step, 6 * per_step]
    model = run.task.model("MLP", seed=1)
    losses = [
        run.task.loss(model, run.task.batch(worker, 0, step))[0].item()
        for worker in range(4)
        for step in range(3)
    ]
    of_first = rows[rows["epoch"] == 1]
    found = value(of_first, "cross_entropy", split="train")
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_milestone_holds_from_its_epoch_on() -> None:
    """Steps after a factor of almost zero change nothing (momentum is multiplied by it too)."""
    short: dict[str, Any] = {"optimizer": "all-reduce", "max_steps_per_epoch": 5}
    frozen = short | {"lr_schedule_milestones": [[1.001, 1e-12]]}
    after_two, _ = trained(num_epochs=2, **frozen)
    after_one, _ = trained(num_epochs=1, **frozen)
    torch.testing.assert_close(after_two.parameters.x, after_one.parameters.x, rtol=0, atol=1e-7)
    not_frozen, _ = trained(num_epochs=2, **short)
    assert not torch.allclose(not_frozen.parameters.x, after_one.parameters.x, atol=1e-4)


def test_a_diverged_last_step_is_no_result() -> None:
    """The loss of the only step is fine; what its update leaves is not."""
    with pytest.raises(train.Diverged, match=r"worker 0's test .* at step 1 \(epoch 1\)"):
        trained(batch_size=359, learning_rate=1e38)


# What a step computes, against direct computations.


class Fed:
    """A task that stands in for Digits: a worker's batch is its slice of one batch for all."""

    steps_per_epoch = 1000
    samples: Mapping[Split, int] = {"test": 360}

    def __init__(self, n_workers: int, model: Callable[[], nn.Module] | None = None) -> None:
        self.n_workers, self._model = n_workers, model
        self._digits = tasks.make("Digits", n_workers=1, batch_size=32, seed=5)

    def label_counts(self) -> None:
        return None

    def model(self, architecture: str, seed: int) -> nn.Module:
        if self._model is None:
            return self._digits.model(architecture, seed)
        torch.manual_seed(seed)
        return self._model()

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        images, labels = self._digits.batch(0, epoch, step)
        size = len(labels) // self.n_workers
        here = slice(worker * size, (worker + 1) * size)
        return images[here], labels[here]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self._digits.loss(model, batch)

    def evaluate(self, *given: Any) -> dict[str, float]:
        return self._digits.evaluate(*given)

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        return {}

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        return {}


def fed(task: Fed, steps: int, **changes: Any) -> Trainer:
    """A run on this task, after some steps."""
    run = built(task=task, n_workers=task.n_workers, **changes)
    for step in range(steps):
        run.execution.rule.start()
        run.execution.gradient(0, step)
        run.execution.rule.finish()
        run.execution.step += 1
    return run


class Wide(nn.Linear):
    """A model with few activations and a million parameters."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.unused = nn.Parameter(torch.ones(1000, 1000))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))


def test_an_evaluation_makes_no_copy_of_the_models() -> None:
    """Of distances 1.5 and 0.5 in all elements, however many there are at once."""
    rows: list[Any] = []
    hooks = Hooks(
        log_metric=lambda name, values, tags: rows.append({"name": name, **values, **tags})
    )
    run = built(hooks, task=Fed(4, Wide), n_workers=4)
    run.parameters.x += torch.arange(4.0)[:, None]
    assert [p.grad for p in run.evaluation.mean_model.models[0].parameters()] == [None] * 3
    with torch.profiler.profile(profile_memory=True) as profiler:
        run.evaluation(1, 1, {})
    events = profiler.profiler.kineto_results.events()
    allocated = [e.nbytes() for e in events if e.name() == "[memory]"]  # negative: released
    assert 0 < np.cumsum(allocated).max() < run.parameters.x.nbytes / 2
    found = value(pd.DataFrame(rows), "consensus_distance", type="params_only")
    assert found == pytest.approx(math.sqrt(1.25 * run.parameters.x.shape[1]))


def test_all_reduce_is_one_worker_with_all_batches() -> None:
    settings = {"optimizer": "all-reduce", "momentum": 0.9, "weight_decay": 0.01}
    settings |= {"learning_rate": 0.05}
    several, one = fed(Fed(4), 10, **settings), fed(Fed(1), 10, **settings)
    start = fed(Fed(1), 0).parameters.x
    assert (one.parameters.x - start).norm() > 0.05 * start.norm(), "it has moved"
    for x in several.parameters.x:
        assert (x - one.parameters.x[0]).norm() < 1e-5 * one.parameters.x.norm()


def normalized_model() -> nn.Module:
    """With a layer whose parameters weight decay spares."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 10)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": False},
        {"momentum": 0.9, "gradient_clipping": 1.9},
        {"momentum": 0.9, "local_steps": 3},
        {"local_optimizer": "adamw", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
@pytest.mark.parametrize("overlapping", [True, False])
def test_a_step_of_dpsgd_is_the_dense_computation(
    overlapping: bool, changes: dict[str, Any]
) -> None:
    """overlapping: x_{t+1} = W x_t − η u(g(x_t)); otherwise: x_{t+1} = W (x_t − η u(g(x_t)))."""
    weight_decay, rate, steps = 0.1, 0.05, 5
    task = Fed(4, normalized_model)
    settings = {"learning_rate": rate, "weight_decay": weight_decay, "overlapping": overlapping}
    run = fed(task, steps, optimizer="dpsgd", **settings, **changes)

    W = torch.from_numpy(run.network.topology.round(0).matrix().toarray()).float()
    models = [task.model("", run.config.seed) for _ in range(4)]
    adamw = "local_optimizer" in changes
    decayed = torch.cat(  # all but the normalization layer's
        [torch.full((p.numel(),), p.shape != (12,) or i == 1) for i, p in enumerate(_of(models[0]))]
    )
    kept = 1 - rate * weight_decay * decayed if adamw else torch.ones(len(decayed))

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        parameters: list[Any] = _of(model)
        if adamw:
            return torch.optim.AdamW(parameters, rate, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0)
        momentum = changes["momentum"]
        groups: list[dict[str, Any]] = [
            {"params": [*parameters[:2], *parameters[4:]]},
            {"params": parameters[2:4], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(
            groups,
            lr=rate,
            momentum=momentum,
            nesterov=momentum > 0 and changes.get("nesterov", True),
            weight_decay=weight_decay,
        )

    optimizers = [optimizer_of(model) for model in models]

    def read() -> Tensor:  # [worker, D]
        return torch.stack([nn.utils.parameters_to_vector(_of(m)) for m in models]).detach()

    start, clipped = read(), 0
    for step in range(steps):
        before = read()
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            task.loss(model, task.batch(worker, 0, step))[0].backward()
            if "gradient_clipping" in changes:
                norm = nn.utils.clip_grad_norm_(_of(model), changes["gradient_clipping"])
                clipped += int(norm > changes["gradient_clipping"])
            optimizer.step()
        update = read() - before
        mixing = W if (step + 1) % changes.get("local_steps", 1) == 0 else torch.eye(4)
        if overlapping:
            mixed = kept * (mixing @ before) + update
        else:
            mixed = mixing @ (kept * before + update)
        for model, x in zip(models, mixed, strict=True):
            nn.utils.vector_to_parameters(x.clone(), _of(model))

    expected = read()
    found = torch.stack([nn.utils.parameters_to_vector(_of(m)) for m in run.parameters.models])
    assert (expected - start).norm() > 0.05 * start.norm(), "it has moved"
    assert (found - expected).norm() < 1e-5 * expected.norm()
    if "gradient_clipping" in changes:
        assert 0 < clipped < 4 * steps, "some gradients are short enough"


def _of(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


# Statistics of the mean model.


def test_statistics_of_the_mean_model_are_recalibrated_or_averaged() -> None:
    """Recalibrated ones are those of its activations; averaged ones are part of the full state."""
    settings: dict[str, Any] = {"task_architecture": "ResNet20", "n_workers": 2, "batch_size": 100}
    settings |= {"max_steps_per_epoch": 2, "recalibration_batches": 2}
    run, rows = trained(**settings, mean_model_statistics="recalibrated")
    model = run.task.model("ResNet20", seed=1)
    nn.utils.vector_to_parameters(
        torch.cat([p.flatten() for p in mean_of_models(run.parameters.models)]), _of(model)
    )
    activations: list[Tensor] = []
    model.conv.register_forward_hook(lambda *given: activations.append(given[2]))  # type: ignore[union-attr]
    model.train()
    with torch.no_grad():
        for worker in range(2):
            for step in range(2):
                run.task.loss(model, run.task.batch(worker, 0, step))
    seen = torch.stack([a.mean((0, 2, 3)) for a in activations]).mean(0)
    spread = torch.stack([a.transpose(0, 1).flatten(1).var(1) for a in activations]).mean(0)
    norm = run.evaluation.mean_model.models[0].norm
    assert isinstance(norm, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, seen, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norm.running_var, spread, atol=1e-5, rtol=1e-4)
    assert norm.momentum == 0.1

    run, averaged = trained(**settings, mean_model_statistics="averaged")
    kinds = [value(r, "cross_entropy", split="test_avg") for r in (rows, averaged)]
    assert kinds[0] != kinds[1]
    for name in ("accuracy", "cross_entropy"):  # and nothing else is another
        for worker in (0, 1):
            tags = {"split": "test", "worker": worker}
            assert value(rows, name, **tags) == value(averaged, name, **tags)
    x, buffers = run.parameters.x, run.parameters.buffers
    torch.testing.assert_close(run.evaluation.mean_model.buffers[0], buffers.mean(0))
    assert not torch.equal(buffers[0], buffers[1])
    squares = [(t - t.mean(0)).double().square().sum(1).mean().item() for t in (x, buffers)]
    for kind, sum_of_squares in (("full_state_vector", sum(squares)), ("params_only", squares[0])):
        found = value(averaged, "consensus_distance", type=kind)
        assert found == pytest.approx(math.sqrt(sum_of_squares), rel=1e-4)


# main(): files, table, hooks.


def test_main_leaves_a_run_that_can_be_repeated_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "deep" / "first", tmp_path / "second"
    train.main([*SETTINGS, "learning_rate=1e-2", "weight_decay=1e-5", "--output-dir", str(first)])

    rows = metrics.load(first)
    table = capsys.readouterr().out
    assert f"{value(rows, 'accuracy', split='test_avg'):.2%}" in table
    assert summaries.summary(rows) in table
    assert str(first / "figure.png") in table
    assert (first / "figure.png").read_bytes().startswith(b"\x89PNG")
    info = json.loads((first / "info.json").read_text())
    assert (info["n_workers"], info["processes"], info["state.progress"]) == (4, 1, 1.0)

    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    train.main(["--config", str(first / "config.yaml"), "--output-dir", str(second)])
    assert reproducible(metrics.load(second)) == reproducible(rows)
    assert (second / "config.yaml").read_text() == (first / "config.yaml").read_text()


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a figure take longer than these runs."""
    monkeypatch.setattr(recorder, "report", lambda *_: None)


@pytest.mark.usefixtures("without_report")
def test_an_edited_copy_of_a_config_can_be_used_again(tmp_path: Path) -> None:
    """A copy lies beside no rows, and has options of its method alone."""
    changes = ["optimizer=dgc", "max_steps_per_epoch=1"]
    train.main([*SETTINGS, *changes, "--output-dir", str(tmp_path / "first")])
    saved = (tmp_path / "first" / "config.yaml").read_text()
    edited = re.sub("(?m)^seed: .*", "seed: 7", saved)
    (tmp_path / "mine.yaml").write_text(edited)
    (tmp_path / "short.yaml").write_text("learning_rate: 0.02\n")
    files = ["--config", str(tmp_path / "mine.yaml"), "--config", str(tmp_path / "short.yaml")]
    train.main([*files, "--output-dir", str(tmp_path / "second")])
    repeated = (tmp_path / "second" / "config.yaml").read_text()
    assert repeated == re.sub("(?m)^learning_rate: .*", "learning_rate: 0.02", edited)


@pytest.mark.usefixtures("without_report")
def test_overwriting_leaves_nothing_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SETTINGS, "max_steps_per_epoch=1", "--output-dir", str(tmp_path)]
    train.main([*settings, "num_epochs=2"])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "figure.png").write_text("old")
    before_the_first_step = Mock(side_effect=RuntimeError("before the first step"))
    monkeypatch.setattr(Trainer, "train", before_the_first_step)
    with pytest.raises(RuntimeError, match="before the first step"):
        train.main([*settings, "num_epochs=1", "overwrite=true"])
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["config.yaml", "info.json", "metrics.jsonl", "notes.txt"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert "num_epochs: 1" in (tmp_path / "config.yaml").read_text()
    with pytest.raises(BadInput, match="already holds a run"):
        train.main([*settings, "overwrite=false"])


DRIVER = """
import json, os, sys

import train

assert "mpi4py.MPI" not in sys.modules, "nothing happens at import"
assert os.listdir() == ["driver.py"]

hooked = {"metric": [], "info": [], "runtime": []}
default = train.log_metric
train.log_metric = lambda *arguments: hooked["metric"].append(arguments)
train.log_info = hooked["info"].append
train.log_runtime = lambda *arguments: hooked["runtime"].append(arguments)
train.config["task_architecture"] = "MLP"
train.config["log_verbosity"] = 0
train.config["num_epochs"] = 2
train.config.n_workers = 4
folders = [train.main()]

train.log_metric = default
train.config.num_epochs = 1
train.config["optimizer"] = "all-reduce"
train.output_dir = "second"
folders.append(train.main())
folders.append(train.main(["evaluate_only=true"]))
assert [str(folder) for folder in folders[1:]] == ["second", "second"]
assert os.listdir("output") == [folders[0].name]
print(json.dumps(hooked))
"""


def test_a_driver_in_another_folder_replaces_hooks_and_runs_twice(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    ended = launch.python("driver.py", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    hooked = json.loads(ended.stdout.splitlines()[-1])

    hooked_rows = [{"name": name, **values, **tags} for name, values, tags in hooked["metric"]]
    _, expected = trained(num_epochs=2)
    assert reproducible(pd.DataFrame(hooked_rows)) == reproducible(expected)
    progress = [info["state.progress"] for info in hooked["info"] if "state.progress" in info]
    assert progress[:2] == [0.5, 1.0]
    for label, mean, std, instances in hooked["runtime"]:
        assert label in PHASES | {"checkpoint"}
        assert mean > 0
        assert std >= 0
        assert instances >= 1

    (dated,) = (tmp_path / "output").iterdir()
    assert (dated / "metrics.jsonl").read_bytes() == b"", "the hook took the rows"
    rows = metrics.load(tmp_path / "second")
    assert rows["epoch"].max() == 1
    assert value(rows, "consensus_distance", type="params_only") < 1e-4, "that is all-reduce"


# Measurements of the models.


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "dpsgd", "local_steps": 3},
        {"optimizer": "powersgd", "optimizer_num_batches_per_step": 3},
    ],
    ids=str,
)
def test_plain_gossip_would_send_in_every_third_step_only(changes: dict[str, Any]) -> None:
    """Also where a step has three batches."""
    run, rows = trained(batch_size=52, **changes)
    assert run.step == 7
    D = run.parameters.x.shape[1]
    assert value(rows, "uncompressed_gossip_bits") == 2 * 2 * 32 * D


def test_dropout_is_drawn_for_each_step() -> None:
    task = Fed(1, lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)))
    run, gradients = fed(task, 0), []
    for run.execution.step in (0, 1, 0):
        run.parameters.grad.zero_()
        run.execution.gradient(0, 0)
        gradients.append(run.parameters.grad.clone())
    assert torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])


# Frozen parameters.


def half_frozen_model() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Linear(12, 10))
    for parameter in (*model[1].parameters(), model[2].bias):
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("optimizer", ["dpsgd", "power-gossip", "choco", "powersgd", "dgc"])
def test_frozen_parameters_stay_as_they_are_and_are_not_sent(optimizer: str) -> None:
    task = Fed(4, half_frozen_model)
    run = fed(task, 3, optimizer=optimizer, weight_decay=0.1)
    start = task.model("", run.config.seed)
    models = [*run.parameters.models, run.evaluation.mean_model.models[0]]
    for model in models:
        for name, before in start.named_parameters():
            now = model.get_parameter(name)
            assert torch.equal(now, before) is not before.requires_grad or model is models[-1]
    assert run.parameters.names == ["2.weight", "3.weight", "3.bias"]
    assert run.parameters.x.shape[1] == 12 + 12 * 10 + 10
    if optimizer == "dpsgd":
        assert run.network.bits[0] == 3 * 2 * 32 * run.parameters.x.shape[1]


@pytest.mark.parallel(nprocs=2)
@pytest.mark.timeout(60)
def test_frozen_parameters_stay_as_they_are_with_hooks() -> None:
    task = Fed(2, half_frozen_model)
    run = fed(task, 4, optimizer="ddp-powersgd", weight_decay=0.1)
    for name, before in task.model("", run.config.seed).named_parameters():
        now = run.parameters.models[0].get_parameter(name)
        assert torch.equal(now, before) is not before.requires_grad


# What a driver has set.


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("arguments", [[], ["optimizer=adam"], ["learning_rate=1e30"]], ids=str)
def test_main_leaves_the_generator_and_the_threads_of_a_driver(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    during: list[int] = []
    monkeypatch.setattr(train, "log_info", lambda info: during.append(torch.get_num_threads()))
    given = [*SETTINGS, "max_steps_per_epoch=3", "--output-dir", str(tmp_path), *arguments]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(processes().threads + 1)
        torch.manual_seed(5)
        expected = torch.rand(4)
        torch.manual_seed(5)
        with pytest.raises((BadInput, train.Diverged)) if arguments else nullcontext():
            train.main(given)
        assert torch.equal(torch.rand(4), expected)
        assert torch.get_num_threads() == processes().threads + 1
        assert set(during) <= {processes().threads}
    finally:
        torch.set_num_threads(threads)
