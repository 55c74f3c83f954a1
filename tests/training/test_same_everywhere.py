"""Facts that must be equal in all processes: one sentence in all of them, before the first step."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gossip_run
import train
from powergossip.consensus.sweep import Sweep
from powergossip.errors import BadInput
from powergossip.network import processes
from powergossip.optimizers import GossipOptimizer, GossipState
from powergossip.runs import configuration
from powergossip.tasks import TASKS, Datasets, DatasetTask
from powergossip.topologies import TOPOLOGIES, Round, Topology
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.small_data import write_fashion_mnist
from tests.harness.training import configured

RANK = MPI.COMM_WORLD.rank
PROGRAMS = (train, gossip_run)


def rejected(action: Callable[[], object]) -> str:
    """The sentence with which all processes reject an action of theirs."""
    with pytest.raises(BadInput) as error:
        action()
    (sentence,) = {*processes().everywhere(str(error.value))}
    return sentence


@pytest.mark.parallel([2])
def test_a_key_that_differs_is_named_with_both_values() -> None:
    comm = processes()
    for program in PROGRAMS:
        default = configuration.plain(program.config)
        for key, value in default.items():
            values = {**default, key: "other"} if RANK else default
            if key in configuration.OF_PROCESS:
                configuration.check_same(comm, values)
            else:
                found = rejected(lambda: configuration.check_same(comm, values))  # noqa: B023
                assert f"{key}={value} in process 0 and {key}=other in process 1:" in found
    assert {*train.config} >= configuration.OF_PROCESS


@pytest.mark.parallel([2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_driver_or_command_line_that_differs_is_rejected_before_anything_is_written(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration.structured(program.Config)
    monkeypatch.setattr(program, "config", config)
    folder = f"run-{RANK}"
    assert "--output-dir=run-0 in" in rejected(lambda: program.main(["--output-dir", folder]))
    (tmp_path / "some.yaml").write_text(f"seed: {RANK}")
    assert "seed=0 in" in rejected(lambda: program.main(["--config", "some.yaml"]))
    (tmp_path / "some.yaml").unlink()
    config["seed"] = 3 + RANK
    assert "seed=3 in" in rejected(program.main)
    config["seed"] = 3
    version = f"1-{RANK}"
    monkeypatch.setattr(configuration, "version", lambda: version)
    assert "version=1-0 in process 0 and version=1-1" in rejected(program.main)
    assert list(tmp_path.iterdir()) == []


def trainer(**changes: Any) -> Trainer:
    given = {"n_workers": 2, "batch_size": 8, "optimizer": "dpsgd"} | changes
    return Trainer(checked(configured(**given), processes()), processes())


def pair(n_workers: int, seed: int) -> Topology:
    """Two workers, whose weights differ between processes."""
    weights = (0.5 - 0.1 * RANK) * np.array([[0, 1], [1, 0]])
    return Topology("pair", (Round(csr_array(weights)),))


@pytest.mark.parallel([2])
def test_a_graph_that_differs_is_rejected_wherever_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TOPOLOGIES, "pair", pair)
    local = torch.optim.SGD(nn.Linear(2, 2).parameters())
    config = configuration.structured(gossip_run.Config)
    config["topology"] = "pair"
    for action in (
        lambda: GossipOptimizer(local, "dpsgd", topology="pair"),
        lambda: GossipState(local, "dpsgd", topology="pair"),
        lambda: Sweep(config, processes()),
        lambda: trainer(topology="pair"),
    ):
        assert "the graph" in rejected(action)


class Model(nn.Module):
    """A model with random features, by a generator of its own."""

    features: Tensor

    def __init__(self, width: int = 3, frozen: bool = False):
        super().__init__()
        features = torch.from_numpy(np.random.default_rng().normal(size=(4, 8))).float()
        self.register_buffer("features", features)
        self.fixed = nn.Parameter(features.clone(), requires_grad=False)
        self.bias = nn.Parameter(features[0].clone(), requires_grad=not frozen)
        self.last = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ (self.features + self.fixed)).sin() + self.bias)


X, Y = torch.arange(160.0).view(40, 4), torch.arange(40) % 3
METRICS = {name: lambda outputs, targets: outputs.mean() for name in "ab"}


class Noisy(TensorDataset):
    """Samples with noise by a generator of their own."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + np.random.default_rng().normal(), Y[i]


def of_files(x: Tensor = X, y: Tensor = Y, **changes: Any) -> Datasets:
    whole = {"train": TensorDataset(x, y), "test": TensorDataset(X, Y), "model": partial(Model)}
    return Datasets(**{**whole, **changes})


def names(reverse: bool) -> dict[str, Any]:
    return dict(sorted(METRICS.items(), reverse=reverse))


DIFFERENT: list[tuple[Callable[[], Datasets], str]] = [
    (lambda: of_files(y=(Y + RANK) % 3), "the training labels differ between processes: "),
    (lambda: of_files(x=X + RANK), "the first training samples (tensor 0)"),
    (lambda: of_files(test=TensorDataset(X, (Y + RANK) % 3)), "the first test samples (tensor 1)"),
    (lambda: of_files(x=X[RANK:], y=Y[RANK:]), "the numbers of samples"),
    (lambda: of_files(model=partial(Model, 3 + RANK)), 'the kinds of "last.weight"'),
    (lambda: of_files(model=partial(Model, frozen=RANK == 1)), 'the kinds of "bias"'),
    (lambda: of_files(metrics=names(RANK == 1)), "the names of metrics"),
]


@pytest.mark.parallel([2])
def test_data_models_and_metrics_that_differ_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for datasets, words in DIFFERENT:
        monkeypatch.setitem(TASKS, "mine", lambda options: DatasetTask(datasets(), options))  # noqa: B023
        found = rejected(lambda: trainer(task="mine", task_architecture="model"))
        assert found.startswith(words), found


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("task", "file", "words"),
    [
        ("FashionMNIST", "train-images-idx3-ubyte", "the first training images"),
        ("FashionMNIST", "train-labels-idx1-ubyte", "the training labels"),
        ("LSTM", "wiki.train.tokens", "the training texts"),
    ],
)
def test_files_of_equal_lengths_that_differ_are_rejected(
    task: str, file: str, words: str, tmp_path: Path
) -> None:
    """In a folder of each process. Six bytes, or two words, are in another order in one of them."""
    write_fashion_mnist(tmp_path)
    for name in ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"):
        (tmp_path / name).write_text(" the cat and the dog \n" * 40)
    content = bytearray((tmp_path / file).read_bytes())
    if RANK:
        content[27:30], content[39:42] = content[39:42], content[27:30]
    (tmp_path / file).write_bytes(content)
    given = (
        {"task_options": {"dataset": "wikitext2", "sequence_length": 3}} if task == "LSTM" else {}
    )
    changes = {"task": task, "task_architecture": None, "data_dir": str(tmp_path), **given}
    assert words in rejected(lambda: trainer(**changes))


@pytest.mark.parallel([2])
def test_random_samples_are_accepted_and_models_begin_as_in_process_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = of_files(train=Noisy(X, Y))
    monkeypatch.setitem(TASKS, "mine", lambda options: DatasetTask(datasets, options))
    found = trainer(task="mine", task_architecture="model", n_workers=4)
    values = [
        torch.cat([t.flatten() for t in chain(model.parameters(), model.buffers())]).tolist()
        for model in found.parameters.models
    ]
    assert all(other == values[0] for others in processes().gather(values) for other in others)
