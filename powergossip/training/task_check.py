"""A check of a task before training: one batch, its loss and its metrics.

An error in a loss or metric of the user would otherwise end the run at its first evaluation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from powergossip.errors import BadInput
from powergossip.parameters import trained
from powergossip.tasks import MainMetric, Split, Task, main_metric
from powergossip.tasks.user_functions import users_code
from powergossip.training.config import Settings
from powergossip.training.precision import autocast

# Names of rows of all runs, and of the number of samples in the sums of an evaluation.
TAKEN = {
    "consensus_distance",
    "count",
    "phase_seconds",
    "spectrum",
    "uncompressed_gossip_bits",
    "workers",
}


def check_sizes(sizes: Sequence[tuple[int, Mapping[Any, Any]]], task: str) -> None:
    """Raise BadInput unless all processes have equally many steps and samples.

    Args:
        sizes: Steps in an epoch, and samples of each split with other facts, of each process.
    """
    for rank, (steps, samples) in enumerate(sizes):
        if (steps, samples) != sizes[0]:
            raise BadInput(
                f"task={task} has other data in process {rank} ({steps} steps, {dict(samples)}) "
                f"than in process 0 ({sizes[0][0]} steps, {dict(sizes[0][1])}); use the same files "
                "everywhere"
            )


def check_first_batch(
    task: Task, config: Settings, worker: int, device: torch.device
) -> MainMetric:
    """Train a model with the first batch of a worker, and evaluate it on a few more.

    The precision is that of the run. The model is a new one, and is discarded.

    Raises ValueError unless the loss is a finite scalar with a gradient, all metrics are finite
    numbers with names of their own, and the main metric is one of them. Returns the main metric.
    """
    name = f"task={config.task}"
    model = task.model(config.architecture, config.seed)
    with torch.random.fork_rng(devices=[]):
        of_step = autocast(config.precision, device)
        with users_code(f"the first batch of {name}"):
            batch = task.batch(worker, 0, 0)
            with _dtypes_named(name, model, batch), of_step:
                loss, metrics = task.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim > 0:
            raise ValueError(f"{name}: the loss of a batch is no scalar tensor; use its mean")
        if not loss.requires_grad:
            raise ValueError(
                f"{name}: the loss has no gradient; compute it by torch from the model's outputs"
            )
        _check_numbers({"loss": loss.detach(), **metrics}, f"{name}, first batch")
        with users_code(f"the gradient of {name}"), _dtypes_named(name, model, batch):
            loss.backward()
    if all(p.grad is None for p in trained(model).values()):
        raise ValueError(f"{name}: the loss does not depend on the parameters of the model")
    names: dict[Split, list[str]] = {}
    for split, count in task.samples.items():
        if split == "train":
            continue
        n_parts = max(1, count // (4 * config.batch_size))
        with users_code(f"the evaluation of {name}"):
            sums = task.evaluate(model, split, (0, n_parts))
        if not isinstance(sums, Mapping) or not sums.get("count"):
            raise ValueError(f'{name}: let evaluate return sums of metrics, and "count" above 0')
        means = {key: value / sums["count"] for key, value in sums.items() if key != "count"}
        _check_numbers(means, f"{name}, {split} data")
        with users_code(f"the derived metrics of {name}"):
            derived = task.derived(means)
        _check_types(derived, f"{name}, {split} data")
        replaced = {key for key in means.keys() & derived if means[key] != derived[key]}
        for key in sorted(replaced | TAKEN & {*metrics, *means, *derived}):
            raise ValueError(f'{name}: a metric is called "{key}", as another row; rename it')
        names[split] = [*means, *derived]
    return main_metric(task, names["test"])


@contextmanager
def _dtypes_named(name: str, model: nn.Module, batch: Any) -> Iterator[None]:
    """Raise BadInput for torch's error about dtypes, if those of the batch are not the model's."""
    try:
        yield
    except RuntimeError as error:
        own = next(iter(trained(model).values())).dtype
        leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
        # Targets may be integers, inputs come first.
        floating = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
        others = (floating | {leaf.dtype for leaf in leaves[:1]}) - {own}
        if not others or "type" not in str(error):
            raise
        found = " and ".join(sorted(map(str, others)))
        raise BadInput(
            f"{name}: data in {found}, a model in {own} ({str(error).splitlines()[0]}); use one "
            "dtype, or convert in the model's forward"
        ) from error


def _check_numbers(values: Mapping[str, Any], place: str) -> None:
    """Raise ValueError unless these are finite scalars."""
    _check_types(values, place)
    for name, value in values.items():
        if not math.isfinite(float(value)):
            raise ValueError(f"{place}: {name} is {float(value)}; use one that is finite")


def _check_types(values: Mapping[str, Any], place: str) -> None:
    """Raise ValueError unless these are scalars."""
    for name, value in values.items():
        shape = list(value.shape) if isinstance(value, Tensor) else []
        if shape or not isinstance(value, (Real, Tensor)):
            found = f"has the shape {shape}" if shape else f"is a {type(value).__name__}"
            raise ValueError(f"{place}: {name} {found}; use a number, the mean over the batch")
