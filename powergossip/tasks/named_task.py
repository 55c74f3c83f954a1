"""A task of the user by name: package.module:callable."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from powergossip import user_functions
from powergossip.tasks.dataset_task import Datasets, DatasetTask
from powergossip.tasks.task import Task, TaskOptions
from powergossip.user_functions import Named

SEED = 0  # of the global generators while the user's function makes the data, fixed for all runs
_FORM = (
    "return (train, test), powergossip.tasks.Datasets, or an object with the members of "
    "powergossip.tasks.Task"
)
_MEMBERS = [name for name in vars(Task) if not name.startswith("_")]


def defaults(name: str, known: Collection[str]) -> Mapping[str, Any]:
    """Key of train.py → default, from the mapping DEFAULTS in the module of a task.

    Raises ValueError if the task cannot be imported, or for a key that is not among `known`.
    """
    user_functions.find("task", name)  # imports the module
    module = name.partition(":")[0]
    found = getattr(sys.modules[module], "DEFAULTS", {})
    if not isinstance(found, Mapping):
        raise ValueError(f"DEFAULTS in {module} is a {type(found).__name__}; use a dict")
    unknown = sorted(map(str, set(found) - set(known)))
    if unknown:
        raise ValueError(
            f"DEFAULTS in {module} has the key {', '.join(unknown)}; choose from {', '.join(known)}"
        )
    return found


def make(options: TaskOptions) -> Task:
    """The task that the function options.task returns. Raises ValueError for wrong input."""
    function = user_functions.find("task", options.task)
    offered = {"options": options, "data_dir": options.data_dir}
    takers = [function] if options.architecture is None else [function, options.architecture]
    if options.architecture is not None:
        _check_keys(options, takers, offered)  # before the data are loaded
    if options.data_dir is not None and not {*offered} & {*function.parameters}:
        raise ValueError(
            f"data_dir={options.data_dir}: leave it out; {function.label} has no parameter data_dir"
        )
    with user_functions.seeded(SEED):
        made = function(options.task_options, offered)
    if isinstance(made, (tuple, list)) and len(made) == 2:
        made = Datasets(*made)
    if isinstance(made, Datasets):
        if options.architecture is None and callable(made.model):
            takers.append(Named(f"the model of {function.label}", "model", made.model))
        _check_keys(options, takers, offered)
        return DatasetTask(made, options)
    _check_keys(options, takers, offered)
    _check_task(made, options, function.label)
    task: Task = made
    return task


def _check_keys(options: TaskOptions, takers: list[Named], offered: Mapping[str, Any]) -> None:
    """Raise ValueError for a key of task_options that no function has as a parameter."""
    known = [name for taker in takers for name in taker.parameters if name not in offered]
    for key in options.task_options:
        if key not in known:
            places = " and ".join(taker.label for taker in takers)
            raise ValueError(
                f"task_options.{key}: no parameter of {places}; "
                f"use {', '.join(dict.fromkeys(known)) or 'none: they have no parameters'}"
            )


def _check_task(made: Any, options: TaskOptions, label: str) -> None:
    """Raise ValueError unless this is a Task with the architecture of the options."""
    lacking = [name for name in _MEMBERS if not hasattr(made, name)]
    if len(lacking) == len(_MEMBERS):
        size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise ValueError(f"{label} returned a {type(made).__name__}{size}; {_FORM}")
    if lacking:
        raise ValueError(
            f"{label} returned a {type(made).__name__}, which lacks {', '.join(lacking)} of a "
            f"task; {_FORM}"
        )
    own = options.architecture
    if own is not None and own.name not in made.architectures:
        raise ValueError(
            f"task_architecture={own.name}: use {' or '.join(made.architectures)}; "
            f"{label} makes its models itself"
        )
