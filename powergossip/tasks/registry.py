"""Tasks by name: `TASKS`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from powergossip import user_functions
from powergossip.tasks import cifar, digits, fashion_mnist, imagenet, language, named_task, text
from powergossip.tasks.task import Task, TaskOptions
from powergossip.user_functions import is_name

TASKS: dict[str, Callable[[TaskOptions], Task]] = {
    "Digits": digits.task,
    "FashionMNIST": fashion_mnist.task,
    "Cifar": cifar.CIFAR10.task,
    "Cifar100": cifar.CIFAR100.task,
    "ImageNet": imagenet.task,
    "LSTM": language.task,
    "Text": text.task,
}
_IN_LIBRARY = frozenset(TASKS)  # not a row that a driver has added


def make(
    name: str,
    *,
    data_dir: str | Path | None = None,
    architecture: str | None = None,
    **options: Any,
) -> Task:
    """Build the task of this name, with its data loaded onto the device.

    A name package.module:callable refers to a function of the user, see the documentation page on
    your own model and data.

    The text of LSTM has no labels and keeps its order. Each worker has a fixed contiguous
    piece: `decentralized` and `reshuffle` have no effect. `dirichlet_alpha` is rejected, and so is
    `shuffled_ratio` above 0 with `decentralized`.

    Args:
        data_dir: Folder with the data files, see `TaskOptions`.
        architecture: package.module:callable, a model of the user. Other names have no effect here.
        options: n_workers, batch_size, seed and other fields of `TaskOptions`.

    Raises:
        ValueError: For an unknown name or option, an invalid value, sizes that do not match, a
            folder that does not exist, and data that are missing or damaged.
    """
    if not is_name(name):
        check_name(name)
    processes = options.get("data_processes", 0)
    if processes and name in _IN_LIBRARY:
        raise ValueError(
            f"data_processes={processes}: use 0 with task={name}; it is for a task of your own"
        )
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"data_dir={data_dir}: use an existing folder, or leave data_dir empty")
    own = None
    if is_name(architecture):
        own = user_functions.find("task_architecture", str(architecture))
    found = TaskOptions(task=name, data_dir=folder, architecture=own, **options)
    return named_task.make(found) if is_name(name) else TASKS[name](found)


def is_in_library(name: str, architecture: str | None) -> bool:
    """True if both the task and its model are part of the library."""
    return name in _IN_LIBRARY and not is_name(architecture)


def check_name(name: str) -> None:
    """Raise ValueError for a name that is no row."""
    if name not in TASKS:
        raise ValueError(
            f'task "{name}" is unknown; choose from {", ".join(TASKS)}, or use '
            "package.module:callable"
        )
