"""Laws of the held-out data: which samples they are, which rows they give, what is chosen by them.

Axes: sample, worker.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from powergossip import kernels, tasks
from powergossip.runs import metrics
from powergossip.tasks import language
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.shards import held_out
from tests.harness import small_data
from tests.harness.training import run, value
from tests.harness.training import trained as short_run

RATIO = 0.2
TINY: dict[str, Any] = {"task_architecture": "MLP", "n_workers": 4, "log_verbosity": 0}


class Seen(nn.Module):
    """Remembers the first row of each image of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.rows.append(images[:, 0, 0, :2])
        return torch.zeros(len(images), 3)


def images(n: int) -> LabeledImages:
    """Image i has the bytes of i. A third of the labels are 0, a sixth 1, the others 2."""
    i = torch.arange(n)
    pixels = torch.stack([i // 256, i % 256], 1).to(torch.uint8)[:, None, None]
    return LabeledImages(pixels, torch.tensor([0, 2, 1, 0, 2, 2])[i % 6])


def split_samples(**changes: Any) -> tuple[Counter[tuple[float, ...]], Counter[tuple[float, ...]]]:
    """How often training batches (all workers, two epochs) and evaluation have each sample."""
    options = small_data.options(task="Images", validation_ratio=RATIO, **changes)
    task = ImageClassification(images(300), images(5), 3, options)
    trained, evaluated = Seen(), Seen()
    for epoch in range(2):
        for worker in range(options.n_workers):
            for step in range(task.steps_per_epoch):
                task.loss(trained, task.batch(worker, epoch, step))
    task.evaluate(evaluated, "valid")
    assert task.samples == {"train": 240, "valid": 60, "test": 5}
    return tuple(  # type: ignore[return-value]
        Counter(tuple(row.tolist()) for batch in model.rows for row in batch)
        for model in (trained, evaluated)
    )


@pytest.mark.parametrize(
    "partition",
    [{}, {"decentralized": True}, {"reshuffle": False}, {"dirichlet_alpha": 0.1}],
    ids=str,
)
def test_held_out_samples_are_in_no_shard_and_the_same_for_all(partition: dict[str, Any]) -> None:
    """They depend on no seed, partition or number of workers. All other samples are in a shard."""
    _, first = split_samples()
    for changes in ({}, {"seed": 7}, {"n_workers": 3}):
        trained, held = split_samples(**partition, **changes)
        assert held == first
        assert not set(trained) & set(held)
        assert len(trained) == 240
        assert set(trained.values()) == {2}


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9])
def test_each_label_loses_the_same_fraction(ratio: float) -> None:
    """Of labels with equal remainders, as in regression, some of the whole range."""
    labels = images(313).labels
    held = held_out(labels, ratio)
    assert held.sum() == round(313 * ratio)
    for label in range(3):
        of_label = labels.numpy() == label
        assert held[of_label].sum() == pytest.approx(ratio * of_label.sum(), abs=1)
    assert not np.array_equal(held, np.sort(held)[::-1]), "not simply the first"
    assert not held_out(labels, 0.0).any()
    distinct = torch.arange(1000)[torch.from_numpy(held_out(torch.arange(1000), 0.1))]
    assert len(distinct) == 100
    assert distinct.float().mean().item() == pytest.approx(499.5, abs=100)


@pytest.mark.long
def test_a_text_holds_out_its_end() -> None:
    """The vocabulary is that of the remaining text."""

    def words(split: str, task: tasks.Task) -> list[str]:
        assert isinstance(task, language.LanguageModeling)
        return [task.vocabulary[i] for i in task.splits[split]]  # type: ignore[index]

    common: dict[str, Any] = {"task_options": {"min_count": 1}, "batch_size": 8}
    whole = tasks.make("LSTM", n_workers=2, seed=1, **common)
    parts = tasks.make("LSTM", n_workers=3, seed=2, validation_ratio=0.1, **common)
    n_words = whole.samples["train"]
    assert parts.samples == {
        "train": n_words - round(0.1 * n_words),
        "valid": round(0.1 * n_words),
        "test": whole.samples["test"],
    }
    everything = words("train", whole)
    assert words("train", parts) == everything[: parts.samples["train"]]
    known = set(words("train", parts))
    end = everything[parts.samples["train"] :]
    assert words("valid", parts) == [word if word in known else "<unk>" for word in end]
    assert not set(end) <= known


# Rows of a run, and the best checkpoint.


def trained(folder: Path, **changes: Any) -> pd.DataFrame:
    """The rows of a short run on Digits with a checkpoint after each epoch."""
    run(folder, {**TINY, "num_epochs": 3, "checkpoint_interval": 1, **changes})
    return metrics.load(folder)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with rows of all workers, of their mean, and of all splits."""
    folder: Path = tmp_path_factory.mktemp("everything")
    trained(folder, validation_ratio=RATIO)
    return folder


def by_epoch(rows: pd.DataFrame, name: str, split: str) -> list[float]:
    chosen = rows[(rows["name"] == name) & (rows["split"] == split)]
    return chosen.groupby("epoch")["value"].mean().tolist()


@pytest.mark.long
@pytest.mark.parametrize("averaged", [True, False])
def test_the_best_checkpoint_is_chosen_on_validation_data(
    averaged: bool, everything: Path, tmp_path: Path
) -> None:
    """Rows for every metric, beside the test rows; the validation rows give the score."""
    folder = everything if averaged else tmp_path
    if not averaged:
        trained(folder, validation_ratio=RATIO, evaluate_average_model=False)
    rows = metrics.load(folder)
    for name in ("accuracy", "cross_entropy"):
        for split in ("valid", "test"):
            of_workers = rows[(rows["name"] == name) & (rows["split"] == split)]
            assert len(of_workers) == 4 * 3
            assert len(by_epoch(rows, name, f"{split}_avg")) == (3 if averaged else 0)
    suffix = "_avg" if averaged else ""
    valid, test = (by_epoch(rows, "accuracy", f"{split}{suffix}") for split in ("valid", "test"))
    index = json.loads((folder / "checkpoints/index.json").read_text())
    assert index["best"]["score"] == pytest.approx(max(valid))
    assert index["last"]["score"] == pytest.approx(valid[-1])
    assert max(valid) not in test
    facts = json.loads((folder / "info.json").read_text())
    assert facts["samples"] == {"train": 1150, "valid": 287, "test": 360}
    assert sum(map(sum, facts["label_counts"])) == 1150
    assert facts["kernels"] == kernels.name(kernels.compiled())


@pytest.mark.long
def test_tuning_may_leave_out_workers_and_test_data(everything: Path, tmp_path: Path) -> None:
    """The other rows, and the score, stay the same."""
    fewer = {"evaluate_workers": False, "evaluate_test_data": False}
    rows = trained(tmp_path, validation_ratio=RATIO, **fewer)
    expected = metrics.load(everything)
    expected = expected[~expected["split"].isin(["test", "test_avg", "valid"])]
    expected, rows = (
        kept[kept["name"] != "phase_seconds"].drop(columns="seconds").reset_index(drop=True)
        for kept in (expected, rows)
    )
    pd.testing.assert_frame_equal(rows, expected[rows.columns])
    scores = [
        json.loads((folder / "checkpoints/index.json").read_text())["best"]["score"]
        for folder in (everything, tmp_path)
    ]
    assert scores[0] == scores[1] > 0


def test_validation_rows_are_of_the_models_on_the_held_out_samples() -> None:
    run, rows = short_run(validation_ratio=RATIO)
    whole = tasks.make("Digits", n_workers=1, batch_size=1, seed=9, validation_ratio=RATIO)
    for worker, model in enumerate(run.parameters.models):
        sums = whole.evaluate(model, "valid")
        for name in ("accuracy", "cross_entropy"):
            found = value(rows, name, split="valid", worker=worker)
            assert found == pytest.approx(sums[name] / sums["count"])
