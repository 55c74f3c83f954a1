"""What a task is: data for every worker, models to train on it, a loss, an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs, targets: the first axis of both is the sample
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Options:
    """What every task is told. Each field is explained in `tasks.make`."""

    n_workers: int
    batch_size: int  # per worker
    seed: int
    decentralized: bool
    shuffled_ratio: float
    reshuffle: bool
    data_dir: Path | None
    download: bool
    device: torch.device


class Task(Protocol):
    """Knows the data of all workers, so that any process can serve any of them."""

    @property
    def architectures(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Name → a function that builds the model on the CPU with fresh random weights."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """The same for all workers: the full batches in the smallest shard."""
        ...

    def model(self, architecture: str, seed: int) -> nn.Module:
        """A new model on the task's device; its weights depend on architecture and seed only.

        Raises ValueError if the task has no such architecture.
        """
        ...

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        """A worker's batch at a step of an epoch, 0 ≤ step < steps_per_epoch.

        A function of (seed, worker, epoch, step) alone, so that a run can be resumed at any step.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a batch, to differentiate, and named means over it, detached."""
        ...

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums of the metrics over the i-th of n parts of a split, part = (i, n), and "count".

        Processes that evaluate one part each add up what they get and divide by the count.
        Leaves the model as it was, including which of its modules are in training mode.
        """
        ...

    def label_counts(self, epoch: int = 0) -> Tensor:
        """How many samples of each label each worker has in an epoch: int64 [worker, label]."""
        ...
