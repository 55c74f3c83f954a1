"""The protocol `Task`: data for every worker, models, a loss and an evaluation."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from powergossip.user_functions import Named

# Inputs and targets, both with samples as the first axis, and further arguments of the task's loss.
# Only the task itself reads it.
Batch = tuple[Tensor, ...]
Split = Literal["train", "valid", "test"]
NAMES: Mapping[Split, str] = {"train": "training", "valid": "validation", "test": "test"}
CPU = torch.device("cpu")
FIRST = 8  # samples whose hash is compared between processes


@dataclass(frozen=True)
class TaskOptions:
    """Options of all tasks.

    Attributes:
        task: Name in the registry, or package.module:callable.
        batch_size: Number of samples of a batch of one worker.
        seed: Seed of the partition of the samples and of their order.
        decentralized: True if the partition is non-IID: the samples are sorted by label, and each
            worker has a contiguous piece. The shards are fixed.
        shuffled_ratio: Fraction of the sorted samples that is shuffled, in [0, 1].
        reshuffle: True if samples are repartitioned every epoch. False: fixed shards. Without
            effect on non-IID shards, which are fixed.
        data_dir: The folder with the data files. None: the default places (see `data_files`). Tasks
            on data from a library need none.
        download: If True, data that are not in these places are downloaded.
        device: Device of the data and the models.
        dirichlet_alpha: Parameter α of non-IID shards: the label proportions of each worker are
            sampled from Dirichlet(α·1). Small α: few labels per worker. The shards are fixed. None:
            off.
        drop_last: If True, the last, smaller batch of an epoch is skipped. False: it is used if
            every worker has at least two samples for it.
        task_options: Values of this task's options, by name. Missing options have their defaults.
        validation_ratio: Fraction of the training data held out as the split "valid", in [0, 1): a
            random sample of the images of each label, or the end of the training text. It is the
            same for all workers and seeds, and in no worker's shard.
        column: Column of non-IID shards: samples with the same value in this column belong to one
            worker, which has one or several values. The shards are fixed. Only tasks of the user
            have columns, and Text, whose column is topic.
        data_processes: Number of processes that load the samples of a task of the user ahead of
            time. 0: none.
        architecture: Model of the user.
    """

    task: str
    n_workers: int
    batch_size: int
    seed: int
    decentralized: bool = False
    shuffled_ratio: float = 0.0
    reshuffle: bool = True
    data_dir: Path | None = None
    download: bool = True
    device: torch.device = CPU
    dirichlet_alpha: float | None = None
    drop_last: bool = False
    task_options: Mapping[str, Any] = field(default_factory=dict)
    validation_ratio: float = 0.0
    column: str | None = None
    data_processes: int = 0
    architecture: Named | None = None


@dataclass(frozen=True)
class MainMetric:
    """The metric that chooses the best checkpoint."""

    name: str
    larger_is_better: bool

    def score(self, means: Mapping[str, float]) -> float:
        """The value among these metrics, with the sign for which larger is better."""
        return means[self.name] if self.larger_is_better else -means[self.name]


class Task(Protocol):
    """Data, models, loss and evaluation. Every process has the data of all workers.

    A task may have further attributes::

        main_metric      see the function of this name
        redistributes    true: `batch` has a fourth parameter, lost, a frozenset of workers whose
                         samples are partitioned over the others
        batches          function of (workers, epoch, step) that returns the batches of consecutive
                         workers as one, with tensors [worker, ...], or None if they have different
                         shapes, for gradients of many workers in one call
        facts            mapping of facts about the data for info.json, equal in all processes
        fingerprints     mapping from a part of the data, such as "the training labels", to a hash
                         of it, equal in all processes that have one
        tokens_in_batch  number of tokens of a batch of one worker, whose rate is shown
        sample           function of a model that returns a text for the end of a run, or None
    """

    @property
    def architectures(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Name → a function that builds the model on the CPU with fresh random weights."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch, the same for all workers."""
        ...

    @property
    def samples(self) -> Mapping[Split, int]:
        """Number of samples of each split. "valid" is absent without validation data."""
        ...

    def model(self, architecture: str, seed: int) -> nn.Module:
        """Build a model on the task's device. Its weights depend on architecture and seed only.

        Raises:
            ValueError: If the task has no such architecture for its data and options.
        """
        ...

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        """The batch of a worker at a step of an epoch, 0 ≤ step < steps_per_epoch.

        A function of (seed, worker, epoch, step) alone, so that a run can resume at any step.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a batch, for differentiation, and named mean metrics, detached.

        Updates the carried state of the model. Otherwise the model changes only as a forward pass
        changes it.
        """
        ...

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """State that the loss of the next batch depends on, besides parameters and buffers.

        Empty for most tasks. With this state, parameters and buffers, a run resumes bit for bit.
        """
        ...

    def carry(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Restore, in place, the state returned by `carried`, from any device."""
        ...

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums of the metrics over the i-th of n parts of a split, part = (i, n), and "count".

        Processes that evaluate one part each sum up the results and divide by the count. A part may
        be empty, with count 0. The model is not changed, including its carried state and the
        training mode of its modules.
        """
        ...

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further metrics, as functions of the means of the metrics of `evaluate`."""
        ...

    def label_counts(self, epoch: int = 0) -> Tensor | None:
        """Number of samples per worker and label in an epoch: int64 [worker, label].

        None where samples have no labels.
        """
        ...


def main_metric(task: Task, names: Collection[str]) -> MainMetric:
    """The metric that selects the best checkpoint, among the metrics of these names.

    It is the attribute `main_metric` of the task, a MainMetric. Without that, it is the accuracy if
    the task has no perplexity, or else the loss: cross_entropy, mse or loss.

    Raises:
        ValueError: If the task has no such metric.
    """
    given: MainMetric | None = getattr(task, "main_metric", None)
    if given is not None and given.name in names:
        return given
    listed = ", ".join(names)
    if given is not None:
        raise ValueError(f"main_metric={given.name}: use one of the task's metrics, {listed}")
    if "accuracy" in names and "perplexity" not in names:
        return MainMetric("accuracy", True)
    for name in ("cross_entropy", "mse", "loss"):
        if name in names:
            return MainMetric(name, False)
    raise ValueError(
        f"the task has the metrics {listed} and does not name the main one; give it the attribute "
        "main_metric"
    )
