"""Tasks by name: `TASKS`, and the defaults of the configuration that depend on them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from powergossip.tasks import (
    cifar,
    digits,
    fashion_mnist,
    imagenet,
    language,
    text,
    user_functions,
    user_task,
)
from powergossip.tasks.task import Task, TaskOptions
from powergossip.tasks.user_functions import is_name

CPU = torch.device("cpu")

TASKS: dict[str, Callable[[TaskOptions], Task]] = {
    "Digits": digits.task,
    "FashionMNIST": fashion_mnist.task,
    "Cifar": cifar.CIFAR10.task,
    "Cifar100": cifar.CIFAR100.task,
    "ImageNet": imagenet.task,
    "LSTM": language.task,
    "Text": text.task,
}
# The keys of train.py whose defaults depend on the task: their defaults for any task, and the
# different ones of single tasks.
GENERAL_DEFAULTS: Mapping[str, Any] = {
    "task_architecture": "CNN",
    "batch_size": 16,
    "num_epochs": 40,
    "learning_rate": 0.02,
    "lr_schedule_milestones": [[30.0, 0.1]],
    "momentum": 0.9,
    "weight_decay": 0.0001,
    "gradient_clipping": None,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "Digits": {},
    "FashionMNIST": fashion_mnist.DEFAULTS,
    "Cifar": cifar.DEFAULTS,
    "Cifar100": cifar.DEFAULTS,
    "ImageNet": imagenet.DEFAULTS,
    "LSTM": language.DEFAULTS,
    "Text": text.DEFAULTS,
}
# The keys of train.py that have no effect on a task, by task.
IGNORED: dict[str, tuple[str, ...]] = {"LSTM": ("reshuffle_data", "use_decentralized_data")}
_IN_LIBRARY = frozenset(TASKS)  # not a row that a driver has added


def defaults(name: str) -> dict[str, Any]:
    """Key of train.py → its default for a task.

    For a user's task, task_architecture is None: the task's first architecture.

    Raises:
        ValueError: For an unknown name.
    """
    if is_name(name):
        given = user_task.defaults(name, GENERAL_DEFAULTS)
        return {**GENERAL_DEFAULTS, "task_architecture": None, **given}
    _check_name(name)
    return {**GENERAL_DEFAULTS, **DEFAULTS.get(name, {})}


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
    drop_last: bool = False,
    task_options: Mapping[str, Any] = {},
    validation_ratio: float = 0.0,
    column: str | None = None,
    data_processes: int = 0,
    architecture: str | None = None,
) -> Task:
    """Build the task of this name, with its data loaded onto the device.

    A name package.module:callable refers to a function of the user, see the documentation page on
    your own model and data.

    The text of LSTM has no labels and keeps its order. Each worker has a fixed contiguous
    piece: `decentralized` and `reshuffle` have no effect. `dirichlet_alpha` is rejected, and so is
    `shuffled_ratio` above 0 with `decentralized`.

    Args:
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
        architecture: package.module:callable, a model of the user. Other names have no effect here.

    Raises:
        ValueError: For an unknown name or option, an invalid value, sizes that do not match, a
            folder that does not exist, and data that are missing or damaged.
    """
    if not is_name(name):
        _check_name(name)
    if data_processes and name in _IN_LIBRARY:
        raise ValueError(
            f"data_processes={data_processes}: use 0 with task={name}; it is for a task of your own"
        )
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"data_dir={data_dir}: use an existing folder, or leave data_dir empty")
    options = TaskOptions(
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
        drop_last=drop_last,
        task_options=dict(task_options),
        validation_ratio=validation_ratio,
        column=column,
        data_processes=data_processes,
        architecture=(
            user_functions.find("task_architecture", str(architecture))
            if is_name(architecture)
            else None
        ),
    )
    return user_task.make(options) if is_name(name) else TASKS[name](options)


def is_in_library(name: str, architecture: str | None) -> bool:
    """True if both the task and its model are part of the library."""
    return name in _IN_LIBRARY and not is_name(architecture)


def _check_name(name: str) -> None:
    if name not in TASKS:
        raise ValueError(
            f'task "{name}" is unknown; choose from {", ".join(TASKS)}, or use '
            "package.module:callable"
        )
