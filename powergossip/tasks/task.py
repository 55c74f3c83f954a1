"""What a task is: data for every worker, models to train on it, a loss, an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

# Inputs and targets, the first axis of both being the sample, and what else the task's loss needs.
Batch = tuple[Tensor, ...]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Options:
    """What every task is told. Each field is explained in `tasks.make`."""

    task: str  # its name in the registry
    n_workers: int
    batch_size: int  # per worker
    seed: int
    decentralized: bool
    shuffled_ratio: float
    reshuffle: bool
    data_dir: Path | None
    download: bool
    device: torch.device
    dirichlet_alpha: float | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)


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

        Raises ValueError if the task has no such architecture, or not for its data and options.
        """
        ...

    def batch(self, worker: int, epoch: int, step: int) -> Batch:
        """A worker's batch at a step of an epoch, 0 ≤ step < steps_per_epoch.

        A function of (seed, worker, epoch, step) alone, so that a run can be resumed at any step.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a batch, to differentiate, and named means over it, detached.

        Changes what the model carries to the worker's next batch, and no more of the model than
        running it changes.
        """
        ...

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """What the loss of the next batch depends on besides parameters and buffers.

        Empty for most tasks. With these, parameters and buffers, a run continues bit for bit.
        """
        ...

    def carry(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Let the model, in place, continue from what `carried` gave. Any device will do."""
        ...

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums of the metrics over the i-th of n parts of a split, part = (i, n), and "count".

        Processes that evaluate one part each add up what they get and divide by the count (which
        is 0 for the parts of more processes than there is to do).
        Leaves the model as it was, including which of its modules are in training mode, and what it
        carries.
        """
        ...

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further metrics, that follow from the means of those that `evaluate` adds up."""
        ...

    def label_counts(self, epoch: int = 0) -> Tensor | None:
        """How many samples of each label each worker has in an epoch: int64 [worker, label].

        None where samples have no labels.
        """
        ...
