"""Data and models: a task gives batches to a worker, a loss and an evaluation.

A new task is its module and its row in `TASKS`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from powergossip.tasks import cifar, digits, fashion_mnist, language
from powergossip.tasks.task import Batch, Options, Split, Task

__all__ = ["TASKS", "Batch", "Options", "Split", "Task", "make"]

CPU = torch.device("cpu")

TASKS: dict[str, Callable[[Options], Task]] = {
    "Digits": digits.task,
    "FashionMNIST": fashion_mnist.task,
    "Cifar": cifar.CIFAR10.task,
    "Cifar100": cifar.CIFAR100.task,
    "LSTM": language.task,
}


def make(
    name: str,
    *,
    n_workers: int,
    batch_size: int,
    seed: int,
    decentralized: bool = False,
    shuffled_ratio: float = 0.0,
    reshuffle: bool = True,
    data_dir: str | Path | None = None,
    download: bool = True,
    device: torch.device = CPU,
    dirichlet_alpha: float | None = None,
    task_options: Mapping[str, Any] = {},
) -> Task:
    """The task of this name, with its data loaded onto the device.

    batch_size      per worker
    seed            decides who gets which samples and in which order
    decentralized   sort the samples by label and give each worker a contiguous piece, for good
    shuffled_ratio  the share of the samples that is mixed back then; in [0, 1]
    reshuffle       deal the samples out anew each epoch; if False, each worker keeps its own.
                    Without meaning when decentralized or dealt out by Dirichlet's distribution.
    data_dir        the folder with the data's files; None: the usual places. Tasks whose data come
                    with a library need none.
    download        whether to fetch what is in none of these places
    dirichlet_alpha draw each worker's proportions of labels from Dirichlet(α·1), for good; small α:
                    few labels each. None: do not.
    task_options    name → value: what only this task understands; what is not named keeps its
                    default

    Text has no labels and keeps its order: language tasks give each worker a contiguous piece, for
    good, whatever `decentralized` and `reshuffle` say, and refuse `dirichlet_alpha`, and
    `shuffled_ratio` above 0 with `decentralized`.

    Raises ValueError for an unknown name or option, a value that is impossible, sizes that do not
    fit each other, a folder that does not exist, data that are missing or damaged.
    """
    if name not in TASKS:
        raise ValueError(f'task "{name}" is unknown; choose from {", ".join(TASKS)}')
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"data_dir={data_dir} is not a folder; name one, or leave data_dir empty")
    return TASKS[name](
        Options(
            task=name,
            n_workers=n_workers,
            batch_size=batch_size,
            seed=seed,
            decentralized=decentralized,
            shuffled_ratio=shuffled_ratio,
            reshuffle=reshuffle,
            data_dir=folder,
            download=download,
            device=device,
            dirichlet_alpha=dirichlet_alpha,
            task_options=dict(task_options),
        )
    )
