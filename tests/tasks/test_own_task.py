"""Tasks of the user: functions by name, data sets, partitions, losses, loading, errors.

Axes: sample, worker.
"""

import gc
import itertools
import json
import multiprocessing
import random
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import train
from powergossip import tasks, user_functions
from powergossip.errors import BadInput, Interrupted
from powergossip.randomness import generator
from powergossip.runs import metrics
from powergossip.tasks import Datasets, DatasetTask, losses
from powergossip.tasks.loading import Loader, Request, SampleSource
from powergossip.tasks.shards import Partition, by_group
from powergossip.training import recorder
from powergossip.training.stepping import Together
from powergossip.user_functions import UserCodeError
from tests.harness import launch
from tests.harness.checkpoints import end_of, entry_of
from tests.harness.helpers import wait_until
from tests.harness.small_data import options
from tests.harness.training import reproducible

N = 103  # training samples of the small data here: a prime, so that nothing divides it

# A module of a user: regression and classification, with random augmentation.
MODULE = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from powergossip.tasks import Datasets

DEFAULTS = {"batch_size": 8, "num_epochs": 2, "learning_rate": 0.02}

class Noisy(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return self.x[i] + 0.1 * noise, self.x[i].sum()

def regression(n_samples=96):
    return Noisy(n_samples), Noisy(40)

def net(width=5):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))

def of_images(shape, n_labels, width=8):
    channels, rows, columns = shape
    hidden = nn.Linear(channels * rows * columns, width)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(width, n_labels))

def with_model(width=5, n_samples=96):
    return Datasets(*regression(n_samples), model=net)

def made(**fields):
    return Datasets(*regression(), **{"model": net, **fields})

def scored():
    return made(derived=lambda means: {"gain": -means["mse"]}, main_metric="gain",
                larger_is_better=True)

def labeled():
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    data = TensorDataset(x, y)
    return Datasets(Subset(data, range(72)), Subset(data, range(72, 96)),
                    model=lambda: nn.Linear(4, 3), columns={"client": [i % 5 for i in range(72)]})
"""
TINY = ["n_workers=4", "log_verbosity=0"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A function that writes a module to the current folder, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train, "output_dir", None)
    names = (f"own_{tmp_path.name}_{i}".replace("-", "_") for i in itertools.count())
    written = []

    def write(source: str = MODULE) -> str:
        name = next(names)
        (tmp_path / f"{name}.py").write_text(source)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def run(*keys: str, folder: str = "out") -> None:
    train.main([*TINY, *keys, "--output-dir", folder])


def rows_of(folder: str) -> list[dict[str, Any]]:
    return reproducible(metrics.load(folder))


# --- Data sets as a task --------------------------------------------------------------------------


class Table(Dataset[tuple[Tensor, int]]):
    """Samples (number, label) with random noise in 0 … 0.4, and labels in the usual place."""

    def __init__(self, n: int = N):
        self.targets = [i * i % 7 for i in range(n)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = 0.1 * (torch.rand(()) + random.random() + np.random.rand())
        return i + noise.float(), self.targets[i]


class Scores(nn.Module):
    """Scores of 7 labels for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 7)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.linear(numbers[:, None] / N)


REPORT = recorder.report


@pytest.fixture(autouse=True)
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a figure take longer than these runs."""
    monkeypatch.setattr(recorder, "report", lambda *_: None)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Ends processes that load data, which keep files of this process open."""
    yield
    if multiprocessing.active_children():
        gc.collect()


def datasets(train: Any = None, test: Any = None, **fields: Any) -> Datasets:
    train = Table() if train is None else train
    return Datasets(train, train if test is None else test, **{"model": Scores, **fields})


def small(data: Datasets | None = None, **changes: Any) -> DatasetTask:
    return DatasetTask(data or datasets(test=Table(20)), options(task="mine:task", **changes))


def numbers(batch: Any) -> list[int]:
    """The numbers of the samples in a batch."""
    return batch[0].floor().int().tolist()


def shard(task: DatasetTask, worker: int, epoch: int = 0) -> list[int]:
    """The samples of a worker in an epoch."""
    batches = [task.batch(worker, epoch, step) for step in range(task.steps_per_epoch)]
    return [number for batch in batches for number in numbers(batch)]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def global_state() -> tuple[Any, ...]:
    """The states of the generators of Python, torch and NumPy."""
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy["state"]["key"].tolist()


def test_a_batch_depends_on_seed_worker_epoch_and_step_alone() -> None:
    """With random augmentation, in any order of the calls, and for any number of processes."""
    first = small()
    places = [(w, e, s) for e in range(2) for s in range(first.steps_per_epoch) for w in range(4)]
    expected = {place: first.batch(*place) for place in places}
    state = global_state()
    for second in (small(), small(data_processes=2)):
        for place in places + places[::-7]:  # in the order of training, and in another one
            assert same(second.batch(*place), expected[place])
    assert state == global_state()
    assert not same(expected[0, 0, 0], small(seed=2).batch(0, 0, 0))
    noise = [(batch[0] % 1).tolist() for batch in expected.values()]
    assert len({tuple(values) for values in noise}) == len(noise)


def test_tensors_in_memory_are_as_their_samples() -> None:
    data = TensorDataset(torch.randn(N, 3), torch.arange(N))

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return data[i]

    one, other = (small(datasets(d)) for d in (data, Slow()))
    assert all(same(one.batch(w, 1, 2), other.batch(w, 1, 2)) for w in range(4))
    assert one.batch(0, 0, 0)[0].shape == (8, 3)


def test_parts_of_an_evaluation_add_up_and_leave_the_model() -> None:
    data = datasets(test=Table(20), valid=Table(30))
    alone, task = small(data), small(data, data_processes=2)
    model = task.model("Scores", seed=1).train()
    sizes: dict[tasks.Split, int] = {"test": 20, "valid": 30, "train": N}
    for split, size in sizes.items():
        whole = task.evaluate(model, split)
        assert whole == alone.evaluate(model, split)
        assert whole["count"] == size == task.samples[split]
        for n_parts in (2, 9):
            parts = [task.evaluate(model, split, (i, n_parts)) for i in range(n_parts)]
            assert all(list(part) == list(whole) for part in parts)
            for name in ("count", "accuracy"):
                assert sum(part[name] for part in parts) == pytest.approx(whole[name])
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_validation_data_are_held_out_of_each_label() -> None:
    task = small(validation_ratio=0.2, batch_size=1)
    assert task.samples == {"train": 82, "test": 20, "valid": 21}
    used = [number for w in range(4) for epoch in range(9) for number in shard(task, w, epoch)]
    assert len(set(used)) == 82
    with pytest.raises(ValueError, match=r"^validation_ratio=0.2: use 0"):
        small(datasets(valid=Table()), validation_ratio=0.2)


# Labels and columns.


@pytest.mark.parametrize("place", ["targets", "labels", "subset", "tensors"])
def test_partitions_by_label_find_the_labels(place: str) -> None:
    table = Table()
    labels = torch.tensor(table.targets)
    data: Any = table
    if place == "subset":
        data = Subset(Subset(table, range(1, N)), range(N - 1))
    if place == "tensors":
        data = TensorDataset(torch.arange(N).float(), labels)
    if place == "labels":
        del table.targets
        data = [(torch.tensor(float(i)), int(label)) for i, label in enumerate(labels)]
    given = labels.numpy() if place == "labels" else None
    for split in ({"decentralized": True}, {"dirichlet_alpha": 1e-3}):
        counts = small(datasets(data, labels=given), **split).label_counts()
        assert counts is not None
        assert counts.sum() == len(data)
        assert (counts > 0).sum(1).max() <= 3  # of 4 labels: squares modulo 7
        frequencies = np.bincount(labels[-len(data) :].numpy() % 7)[[0, 1, 2, 4]]
        assert sorted(counts.sum(0)) == sorted(frequencies)


def test_labels_are_integers_of_every_sample() -> None:
    real = TensorDataset(torch.randn(N, 1), torch.randn(N))
    ragged: Any = [(i, torch.zeros(1 + i // 2 % 5).long()) for i in range(N)]
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (real, None, {"decentralized": True}),
        (real, None, {"dirichlet_alpha": 1.0}),
        (ragged, None, {"batch_size": 1, "decentralized": True}),
        *((real, labels, {}) for labels in ([1, 2], torch.randn(N), [[1], [2, 3]])),
    ]
    for data, labels, split in cases:
        with pytest.raises(ValueError, match=r"^task=mine:task: a partition by label"):
            small(datasets(data, labels=labels), **split)
    assert small(datasets(real)).label_counts() is None


@pytest.mark.parametrize("n_groups", [4, 5, 40])
def test_groups_of_a_column_stay_together(n_groups: int) -> None:
    """Balanced: 8 + 3, 7 + 4 and 6 + 5 samples."""
    column = [f"client {i % n_groups}" for i in range(N)]
    given = options(column="client", batch_size=4)
    first, again, other = (
        Partition(torch.zeros(N), replace(given, seed=seed), column).indices for seed in (1, 1, 2)
    )
    held = [first(worker, 3).tolist() for worker in range(4)]
    assert sorted(itertools.chain(*held)) == list(range(N))
    groups = [{column[sample] for sample in of_worker} for of_worker in held]
    assert sum(map(len, groups)) == n_groups
    sizes = list(map(len, held))
    assert max(sizes) - min(sizes) <= -(-N // n_groups)  # the largest group
    assert sorted(first(0, 4).tolist()) == sorted(held[0]) != first(0, 4).tolist()
    assert again(0, 3).tolist() == held[0]
    assert n_groups < 40 or set(other(0, 3).tolist()) != set(held[0])
    unequal = [group for group in range(3, 9) for _ in range(group)]
    _, bounds = by_group(unequal, 3, generator(n_groups, "test"))
    assert np.diff(bounds).tolist() == [11, 11, 11]


def test_an_epoch_has_the_batches_of_the_smallest_shard() -> None:
    """Workers with more samples use all of them over several epochs."""
    columns = {"client": [min(i // 10, 3) for i in range(N)]}  # 10, 10, 10 and 73 samples
    task = small(datasets(columns=columns), column="client")
    assert task.steps_per_epoch == 2
    shards = [{n for epoch in range(40) for n in shard(task, w, epoch)} for w in range(4)]
    assert sorted(map(len, shards)) == [10, 10, 10, 73]
    assert {len(shard(task, worker)) for worker in range(4)} == {10, 16}
    table = Table()  # a column may be an attribute of the data
    task = small(datasets(table), column="targets", batch_size=1)
    labels = [{table.targets[n] for n in shard(task, w)} for w in range(4)]
    assert [len(of_worker) for of_worker in labels] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("columns", "changes", "words"),
    [
        ({"client": [0] * N}, {}, r"^n_workers=4: use 1 or fewer"),
        ({"client": [1, 2, 3]}, {}, r"^decentralized_data_column=client: .* 103 "),
        ({"region": [0] * N}, {}, r"^decentralized_data_column=client: .*region"),
        (None, {}, r"^decentralized_data_column=client: .*null"),
        ({"client": range(N)}, {"decentralized": True}, "use null with use_decentralized_data"),
        ({"client": range(N)}, {"dirichlet_alpha": 0.1}, "use null with decentralized_data_diri"),
        ({"client": [*range(3), *[9] * 100]}, {}, r"^batch_size=8: use 1 or less"),
    ],
)
def test_columns_that_do_not_fit_are_rejected(columns: Any, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(datasets(columns=columns), column="client", **changes)


# Losses and metrics.


def measured(inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """The default metrics of a model that returns its inputs."""
    loss, found = small().loss(nn.Identity(), (inputs, targets))
    assert not any(value.requires_grad for value in found.values())
    assert loss.item() == pytest.approx(next(iter(found.values())).item())
    return {name: value.item() for name, value in found.items()}


def test_defaults_for_integers_are_cross_entropy_and_accuracy() -> None:
    """With labels on the last axis, and without ignored targets."""
    scores = torch.randn(5, 3, 7, requires_grad=True)
    targets = torch.randint(7, (5, 3))
    targets[0], targets[1] = -100, scores[1].argmax(-1)
    found = measured(scores, targets)
    kept = targets != -100
    by_hand = -scores.log_softmax(-1)[kept].gather(1, targets[kept][:, None]).mean().item()
    assert list(found) == ["cross_entropy", "accuracy"]
    assert found["cross_entropy"] == pytest.approx(by_hand)
    correct = (scores.argmax(-1) == targets)[kept].double().mean().item()
    assert found["accuracy"] == pytest.approx(correct)


def test_labels_without_an_output_are_rejected_wherever_they_stand() -> None:
    scores, targets = torch.randn(5, 3, 7, requires_grad=True), torch.randint(7, (5, 3))
    targets[0], targets[1, :2] = -100, torch.tensor([0, 6])
    measured(scores, targets)
    for target in (-101, -99, -1, 7, 100):
        targets[4, 2] = target
        with pytest.raises(BadInput, match=f"Target {target} is out of bounds: use .* 0 to 6, as"):
            measured(scores, targets)


def test_ignored_targets_do_not_count() -> None:
    """A batch of them has no loss and no gradient."""
    scores, targets = torch.randn(6, 2, 3, requires_grad=True), torch.full((6, 2), -100)
    loss = losses.cross_entropy(scores, targets)
    loss.backward()
    assert scores.grad is not None
    assert (loss.item(), scores.grad.abs().max().item()) == (0, 0)
    assert losses.accuracy(scores, targets) == 0
    targets[0, 0] = 1
    of_torch = nn.functional.cross_entropy(scores[0, :1], targets[0, :1])
    assert losses.cross_entropy(scores, targets) == of_torch
    labels = torch.randint(7, (20, 3))
    labels[4:], labels[2, 1] = -100, -100
    data = TensorDataset(torch.randn(20, 3, 7), labels)
    sums = small(datasets(data), batch_size=2).evaluate(nn.Identity())
    assert sums["count"] == 11
    kept = labels != -100
    expected = (data.tensors[0].argmax(-1) == labels)[kept].sum().item()
    assert sums["accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_for_reals_is_the_mean_squared_error(dtype: torch.dtype) -> None:
    """Outputs under autocast are rounded, targets are not. Targets may lack an axis of length 1."""
    for shape, of_targets in (((6,), (6,)), ((6, 1), (6,)), ((6, 2), (6, 2))):
        outputs = torch.randn(shape, requires_grad=True).to(dtype)
        targets = torch.randn(of_targets).double()
        found = measured(outputs, targets)
        expected = (outputs.double().reshape(of_targets) - targets).square().mean().item()
        assert found == {"mse": pytest.approx(expected, rel=1e-5)}


def test_loss_metrics_forward_and_collate_may_be_given() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "y": [y for _, y in samples]}

    task = small(
        datasets(
            collate=collate,
            forward=lambda model, batch: (model(batch["x"]), torch.tensor(batch["y"])),
            loss=lambda outputs, targets: outputs.square().mean(),
            metrics={"largest": lambda outputs, targets: float(targets.max())},
            derived=lambda means: {"root": means["loss"] ** 0.5},
            main_metric="root",
            larger_is_better=False,
        )
    )
    model = task.model("Scores", 1)
    loss, found = task.loss(model, task.batch(0, 0, 0))
    assert list(found) == ["loss", "largest"]
    assert loss.requires_grad
    assert list(task.evaluate(model)) == ["loss", "largest", "count"]
    assert task.derived({"loss": 4.0}) == {"root": 2.0}
    main = tasks.main_metric(task, ["loss", "root"])
    assert main.score({"root": 3.0}) == -3.0


def test_the_main_metric_is_that_of_the_task_or_the_accuracy_or_the_loss() -> None:
    task = small()
    cases = {
        ("cross_entropy", "accuracy"): ("accuracy", True),
        ("cross_entropy", "accuracy", "perplexity"): ("cross_entropy", False),
        ("mse", "r2"): ("mse", False),
        ("loss", "r2"): ("loss", False),
    }
    for names, expected in cases.items():
        assert tasks.main_metric(task, names) == tasks.MainMetric(*expected)
    with pytest.raises(ValueError, match="r2"):
        tasks.main_metric(task, ["r2"])
    auc = small(datasets(main_metric="auc", larger_is_better=True))
    with pytest.raises(ValueError, match=r"^main_metric=auc: use .*r2"):
        tasks.main_metric(auc, ["r2"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": []}, "train is empty"),
        ({"test": 3}, "test is of the type int"),
        ({"valid": iter([])}, "valid is of the type list_iterator"),
        ({"model": nn.Linear(1, 1)}, "model is a module"),
        ({"model": None}, r"^task_architecture: use package.module:callable"),
        ({"model": "net"}, "model is of the type str"),
        ({"loss": 1.0}, "loss is of the type float"),
        ({"metrics": [1]}, "metrics is of the type list"),
        ({"metrics": {"a": 1}}, "metric a is of the type int"),
        ({"main_metric": "r2"}, "main_metric=r2 needs larger_is_better"),
    ],
)
def test_wrong_fields_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(datasets(**changes))


# --- Names, options, errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "task_architecture | package.module:callable | regression"),
        ("task=absent:task", "task=absent:task | no module absent"),
        ("task=MODULE.sub:task", "task=MODULE.sub:task | no module MODULE.sub"),
        ("task=MODULE.py:task", "use package.module:callable, such as MODULE:task"),
        ("task=MODULE:a-b", "task=MODULE:a-b | package.module:callable"),
        ("task=MODULE:regresion", "regresion | regression"),
        ("task=MODULE:DEFAULTS", "DEFAULTS | not callable"),
        ("task=MODULE:net", "task=MODULE:net | Sequential | (train, test)"),
        ("task_architecture=MODULE:nett", "task_architecture=MODULE:nett | net"),
        ("task_architecture=MODULE:regression", "returned a tuple | torch.nn.Module"),
        ("task=MODULE:with_model task_architecture=CNN", '"CNN" | net'),
        ("task=MODULE:with_model task_options.depth=3", "task_options.depth | width"),
        ("task_architecture=MODULE:net task_options.depth=3", "depth | width | n_samples"),
        ("task=MODULE:with_model data_dir=.", "data_dir=. | no parameter data_dir"),
        ("task=MODULE:with_model data_processes=-1", "data_processes=-1"),
        ("task=MODULE:with_model task_options.n_samples=20", "batch_size=8 | 5"),
        (
            "task=Digits task_architecture=MODULE:net task_options.normalization=group",
            '"normalization" | width',
        ),
        ("task=LSTM task_architecture=MODULE:net", "LanguageModel"),
    ],
)
def test_errors_in_names_and_options_are_one_sentence(
    module: Callable[..., str], rejection: Callable[..., str], arguments: str, words: str
) -> None:
    name = module()
    given = [f"task={name}:regression", *arguments.replace("MODULE", name).split()]
    line = rejection(train.command, *TINY, *given)
    assert [w for w in words.replace("MODULE", name).split(" | ") if w not in line] == []


class Half:
    steps_per_epoch = 3


def rejects(m: Any) -> None:
    raise BadInput("task_options.level=7: use 1 to 3")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m: None, "NoneType | (train, test)"),
        (lambda m: Half(), "Half | lacks | evaluate"),
        (lambda m: (1, 2, 3), "tuple of 3 | (train, test)"),
        (rejects, "task_options.level=7: use 1 to 3"),
        (lambda m: m.made(loss=lambda y, t: (y.detach() - t).mean()), "the loss has no gradient"),
        (lambda m: m.made(loss=lambda y, t: y[:, 0] - t), "a tensor of the shape [8] | scalar"),
        (lambda m: m.made(loss=lambda y, t: 1.0), "the loss is of the type float | scalar"),
        (lambda m: m.made(loss=lambda y, t: y.square().mean() / 0), "loss is inf | finite"),
        (
            lambda m: m.made(loss=lambda y, t: t.mean().requires_grad_()),
            "does not depend on the parameters",
        ),
        (lambda m: m.made(metrics={"m": lambda y, t: y[:, 0] - t}), "the metric m | [8] | mean"),
        (lambda m: m.made(metrics={"m": lambda y, t: "good"}), "the metric m | str"),
        (lambda m: m.made(metrics={"m": lambda y, t: float("nan")}), "m is nan | finite"),
        (
            lambda m: m.made(metrics={"mse": lambda y, t: 3.0}),
            'a metric is called "mse", as the loss',
        ),
        (
            lambda m: m.made(metrics={"consensus_distance": lambda y, t: 3.0}),
            'a metric is called "consensus_distance", as another row',
        ),
        (
            lambda m: m.made(derived=lambda means: {"mse": means["mse"] ** 0.5}),
            'a metric is called "mse", as another row',
        ),
        (lambda m: m.made(main_metric="auc", larger_is_better=True), "main_metric=auc | mse"),
        (lambda m: m.made(model=lambda: nn.Linear(4, 3)), "[8, 3] | [8] | loss"),
        (lambda m: Datasets(*(2 * [[(torch.zeros(4), 3)] * 96]), model=m.net), "Target 3 is out"),
        (lambda m: m.made(derived=lambda means: 3), "derived returned | dict"),
        (lambda m: Datasets(*(2 * [[{"x": 1}] * 96]), model=m.net), "a batch is a dict | forward"),
        (lambda m: m.made(model=lambda: m.net().requires_grad_(False)), "requires_grad"),
    ],
)
def test_a_task_that_cannot_be_trained_is_rejected_before_training(
    rejection: Callable[..., str], monkeypatch: pytest.MonkeyPatch, function: Any, words: str
) -> None:
    own: Any = types.ModuleType("own")
    exec(MODULE, vars(own))
    own.task = lambda: function(own)
    monkeypatch.setitem(sys.modules, "own", own)
    line = rejection(train.command, *TINY, "task=own:task")
    assert [word for word in words.split(" | ") if word not in line] == []


BROKEN = """
import torch
from torch import nn
from powergossip.tasks import Datasets

class Broken(torch.utils.data.Dataset):
    def __init__(self, kind): self.kind = kind
    def __len__(self): return 96
    def __getitem__(self, i):
        if self.kind == "sample": int("item five")  # line of the sample
        return torch.zeros(4), torch.zeros(())

def task(kind):
    if kind == "file": open("absent.csv")  # line of the file
    def model():
        if kind == "model": raise KeyError("layer")  # line of the model
        return nn.Linear(4, 1)
    def loss(outputs, targets):
        if kind == "loss": raise ValueError("bad loss")  # line of the loss
        if kind == "bf16" and outputs.dtype == torch.bfloat16:
            outputs.detach().numpy()  # line of the bf16
        return outputs.mean()
    return Datasets(Broken(kind), Broken(kind), model=model, loss=loss)
"""


@pytest.mark.parametrize("kind", ["file", "model", "loss", "sample", "bf16"])
def test_errors_in_the_users_code_keep_their_traceback(
    module: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    """Not BadInput, although some are ValueErrors; and no file is written. One is an error in the
    precision of the run only."""
    name = module(BROKEN)
    changes = ["precision=bf16"] * (kind == "bf16") + ["data_processes=1"] * (kind == "sample")
    with pytest.raises((UserCodeError, KeyError, TypeError)) as caught:
        run(f"task={name}:task", f"task_options.kind={kind}", *changes)
    shown = "".join(traceback.format_exception(caught.value))
    assert f"# line of the {kind}" in shown
    assert f"{name}.py" in shown
    assert f"task={name}:task" in shown
    assert not (tmp_path / "out").exists()


def test_an_error_in_the_users_code_ends_the_processes_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    arguments = [*TINY, "task=broken:task", "task_options.kind=file", "--output-dir", "out"]
    ended = launch.python(launch.ROOT / "train.py", *arguments, processes=2, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("# line of the file") == 1
    assert not (tmp_path / "out").exists()


def test_what_a_loading_process_cannot_send_is_an_error() -> None:
    """A batch or an exception that cannot be pickled. The process goes on."""

    class Own(Exception):
        pass

    def collate(samples: list[int]) -> Any:
        if samples == [1]:
            raise Own("mine")
        return (lambda: 0) if samples == [0] else samples

    data: Any = range(3)
    loader = Loader(SampleSource({"train": data}, collate), "task=m:f", processes=1)
    pending = [loader.request(Request("train", (i,), seed=0)) for i in range(3)]
    for failing, word in zip(pending, ("pickle", "mine"), strict=False):
        with pytest.raises(UserCodeError, match=word):
            failing.wait()
    assert pending[2].wait() == [2]
    loader.close()


def test_an_error_at_import_is_a_sentence_with_its_line(module: Callable[..., str]) -> None:
    for source, error in (
        ("\nimport absent_library", "ModuleNotFoundError"),
        ("\nx = (", "SyntaxError"),
        ("\nfloat(chr(97))", "ValueError"),
    ):
        name = module(source)
        with pytest.raises(
            BadInput, match=rf"task={name}:task fails in {name}.py, line 2: {error}"
        ):
            train.main([*TINY, f"task={name}:task"])


KEYS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from powergossip.tasks import Datasets
seen = {}

def task(options, data_dir, length, file="none", *, flag=False):
    seen["task"] = (options.n_workers, str(data_dir), length, file, flag)
    data = TensorDataset(torch.randn(40, length), torch.randint(3, (40,)))
    return Datasets(data, data, model_arguments={"n_labels": 3})

class Net(nn.Module):
    def __init__(self, length, n_labels, *, width: int):
        super().__init__()
        seen["model"] = (length, n_labels, width)
        self.layers = nn.Sequential(nn.Linear(length, width), nn.Linear(width, n_labels))
    def forward(self, x):
        return self.layers(x)
"""


def test_keys_go_to_the_functions_that_have_them(module: Callable[..., str]) -> None:
    name = module(KEYS)

    def made(seed: int, data_dir: str | None, **more: Any) -> tasks.Task:
        of_task = {"length": 6, "width": 2, **more}
        given: Any = {"n_workers": 2, "batch_size": 4, "architecture": f"{name}:Net"}
        return tasks.make(
            f"{name}:task", seed=seed, data_dir=data_dir, task_options=of_task, **given
        )

    with pytest.raises(ValueError, match=r'"length" has no default; give task_options.length'):
        tasks.make(f"{name}:task", n_workers=1, batch_size=1, seed=1)
    task = made(3, ".", flag=True)
    first = task.model(f"{name}:Net", 1)
    assert sys.modules[name].seen == {"task": (2, ".", 6, "none", True), "model": (6, 3, 2)}
    torch.manual_seed(7)
    data = made(4, None)
    # Models depend on the seed of the run alone, random data on nothing.
    assert same(list(first.parameters()), list(data.model(f"{name}:Net", 1).parameters()))
    assert not same(list(first.parameters()), list(data.model(f"{name}:Net", 2).parameters()))
    assert task.evaluate(first) == data.evaluate(first)


def test_a_name_is_found_in_a_package_and_as_an_attribute(
    module: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="os:nofn") as caught:
        user_functions.find("task", "os:nofn")
    listed = str(caught.value).partition("; use ")[2].split(" or ")  # a few public names
    assert 0 < len(listed) <= 5
    assert [name for name in listed if name.startswith("_")] == []
    package = module("class Tasks:\n    @staticmethod\n    def task():\n        return 1")
    assert user_functions.find("task", f"{package}:Tasks.task").function() == 1
    (tmp_path / f"{package}_folder").mkdir()
    (tmp_path / f"{package}_folder" / "inside.py").write_text("def task(): return 2")
    assert user_functions.find("task", f"{package}_folder.inside:task")({}, {}) == 2


# --- Runs -----------------------------------------------------------------------------------------


def test_a_run_has_the_defaults_of_the_module_and_records_names(
    module: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "report", REPORT)
    name = module()
    run(f"task={name}:with_model", "task_options.width=3")
    config = OmegaConf.load("out/config.yaml")
    assert (config.task, config.task_architecture) == (f"{name}:with_model", "net")
    assert (config.batch_size, config.num_epochs, config.momentum) == (8, 2, 0.9)
    info = json.loads((tmp_path / "out/info.json").read_text())
    assert info["metric"] == {"name": "mse", "larger_is_better": False}
    assert 0 < info["data_fraction"] < 1
    assert info["parameters"] == 4 * 3 + 3 + 3 + 1
    rows = metrics.load("out")
    assert len(metrics.select_rows(rows, "mse", split="test_avg")) == 2
    assert len(metrics.select_rows(rows, "mse", split="test")) == 8
    assert (tmp_path / "out/figure.png").exists()
    file = tmp_path / f"{name}.py"
    file.write_text("DEFAULTS = {'learning_rat': 1}\ndef task(): pass")
    sys.modules.pop(name)
    with pytest.raises(BadInput, match=r"learning_rat;.*learning_rate"):
        train.main([*TINY, f"task={name}:task"])


def test_rows_are_the_same_with_processes_and_after_a_resume(
    module: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with random augmentation and dropout; stopped within an epoch by a signal."""
    task = [f"task={module()}:with_model", "num_epochs=2"]
    run(*task, folder="whole")
    original = Together.train_step

    def interrupted(self: Together, epoch: int, step: int) -> dict[str, Tensor]:
        if self.step == 4 and not self.run.config.resume:
            signal.raise_signal(signal.SIGTERM)
        return original(self, epoch, step)

    monkeypatch.setattr(Together, "train_step", interrupted)
    with pytest.raises(Interrupted):
        run(*task, "data_processes=1", folder="stopped")
    run(*task, "resume=true", "data_processes=2", folder="stopped")
    assert rows_of("stopped") == rows_of("whole")
    assert torch.equal(end_of(tmp_path / "stopped")["x"], end_of(tmp_path / "whole")["x"])
    before = (tmp_path / "whole/metrics.jsonl").read_bytes()
    run("evaluate_only=true", folder="whole")
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == before


def test_the_best_checkpoint_is_chosen_by_the_main_metric(
    module: Callable[..., str], tmp_path: Path
) -> None:
    """The learning rate is far too large from the third epoch on."""
    keys = "num_epochs=4 checkpoint_interval=1 lr_schedule_milestones=[[2,300]] gradient_clipping=1"
    run(f"task={module()}:scored", *keys.split())
    rows = metrics.select_rows(metrics.load("out"), "mse", split="test_avg")
    best = entry_of(tmp_path / "out", "best")
    assert best["score"] == -rows["value"].min()
    assert best["step"] == 3 * rows["epoch"].iloc[rows["value"].argmin()] < 12


def test_an_architecture_of_the_user_trains_a_task_of_the_library(
    module: Callable[..., str], tmp_path: Path
) -> None:
    of_task = f"task_architecture={module()}:of_images", "max_steps_per_epoch=2"
    run(*of_task, "task_options={width: 12, pixel_mean: [0.5]}", "num_epochs=1")
    info = json.loads((tmp_path / "out/info.json").read_text())
    assert info["parameters"] == 64 * 12 + 12 + 12 * 10 + 10


LINE = """
import torch
from torch import nn
from powergossip.tasks import MainMetric

class Line:
    main_metric = MainMetric("distance", larger_is_better=False)
    steps_per_epoch, samples = 5, {"train": 40, "test": 7}
    architectures = {"linear": lambda: nn.Linear(1, 1)}
    def __init__(self, options): self.options = options
    def model(self, architecture, seed):
        torch.manual_seed(seed)
        return self.architectures[architecture]()
    def batch(self, worker, epoch, step): return torch.ones(8, 1)
    def loss(self, model, batch):
        loss = (model(batch) - 3).abs().mean()
        return loss, {"distance": loss.detach()}
    def carried(self, model): return {}
    def carry(self, model, state): pass
    def evaluate(self, model, split="test", part=(0, 1)):
        with torch.no_grad():
            return {"distance": 7 * float((model(torch.ones(1, 1)) - 3).abs()), "count": 7.0}
    def derived(self, means): return {}
    def label_counts(self, epoch=0): return None

def task(options): return Line(options)
"""


def test_an_object_with_the_members_of_a_task_is_used(module: Callable[..., str]) -> None:
    name = module(LINE)
    run(f"task={name}:task", "num_epochs=3")
    values = metrics.select_rows(metrics.load("out"), "distance", split="test_avg")["value"]
    assert values.iloc[-1] < values.iloc[0]
    with pytest.raises(BadInput, match=rf"^task_architecture={name}:Line: use linear"):
        train.main([*TINY, f"task={name}:task", f"task_architecture={name}:Line"])


def test_all_layouts_agree(module: Callable[..., str], tmp_path: Path) -> None:
    """Two processes with two workers each, and data processes, as one process with four."""
    keys = [f"task={module()}:labeled", "decentralized_data_column=client"]
    run(*keys, folder="one")
    arguments = ["n_workers=4", *keys, "data_processes=1", "--output-dir", "two"]
    ended = launch.python(launch.ROOT / "train.py", *arguments, processes=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "test accuracy, mean model" in ended.stdout
    assert "of a step" in ended.stdout
    one, two = end_of(tmp_path / "one")["x"], end_of(tmp_path / "two")["x"]
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    counts = json.loads((tmp_path / "two/info.json").read_text())["label_counts"]
    assert sorted(map(sum, counts)) == [14, 15, 15, 28]


KILLED = """
import multiprocessing, os, signal
import train
from powergossip.training.stepping import Together

def killed(self, epoch, step):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

Together.train_step = killed
train.main(["task=mine:with_model", "n_workers=2", "data_processes=2", "log_verbosity=0"])
"""


@pytest.mark.slow
def test_processes_that_load_data_end_with_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "driver.py").write_text(KILLED)
    ended = launch.python("driver.py", cwd=tmp_path, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    loading = [Path("/proc") / pid for pid in ended.stdout.split()[-2:]]
    assert len(loading) == 2
    wait_until(lambda: not any(folder.exists() for folder in loading), seconds=20)
