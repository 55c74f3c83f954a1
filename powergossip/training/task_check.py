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
from powergossip.network import Processes
from powergossip.parameters import trained
from powergossip.state_trees import sha256
from powergossip.tasks import MainMetric, Split, Task, main_metric
from powergossip.training.config import Settings
from powergossip.training.precision import autocast
from powergossip.user_functions import users_code

# Names of rows of all runs, and of the number of samples in the sums of an evaluation.
TAKEN = {
    "consensus_distance",
    "count",
    "merge_bits",
    "phase_seconds",
    "skipped_blocks",
    "spectrum",
    "uncompressed_gossip_bits",
    "workers",
}


def data_facts(task: Task) -> dict[str, Any]:
    """Facts about the data that are equal in all processes."""
    return {
        "the numbers of steps in an epoch": task.steps_per_epoch,
        "the numbers of samples": dict(task.samples),
        **{f"the facts {key} of the data": v for key, v in getattr(task, "facts", {}).items()},
        **getattr(task, "fingerprints", {}),
    }


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Facts about a model that are equal in all processes."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found: dict[str, Any] = {"the numbers of tensors in the model": len(tensors)}
    for name, of in tensors:
        kind = "trained" if of.requires_grad else "not trained"
        found[f'the kinds of "{name}" in the model'] = f"{[*of.shape]}, {of.dtype}, {kind}"
    return found


def equalize(processes: Processes, models: Sequence[nn.Module]) -> str:
    """Give all models of all processes the values of worker 0's: they may depend on more than the
    seed. Returns a hash of the values."""
    first, *others = ([*model.parameters(), *model.buffers()] for model in models)
    if len({*processes.gather(sha256(*first))}) > 1:
        for tensor in first:
            processes.broadcast_tensors([tensor])
    with torch.no_grad():
        for tensors in others:
            for tensor, value in zip(tensors, first, strict=True):
                tensor.copy_(value)
    return sha256(*first)


def check_first_batch(
    task: Task, config: Settings, worker: int, device: torch.device
) -> tuple[MainMetric, list[str]]:
    """Train a model with the first batch of a worker, and evaluate it on a few more.

    The precision is the run's. The model is a new one, and is discarded.

    Raises ValueError unless the loss is a finite scalar with a gradient, all metrics are finite
    numbers with names that no other row has, and the main metric is one of them. Returns the main
    metric, and the names of the metrics of batches and test data.
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
        _check_numbers(derived, f"{name}, {split} data", finite=False)
        replaced = {key for key in means.keys() & derived if means[key] != derived[key]}
        for key in sorted(replaced | TAKEN & {*metrics, *means, *derived}):
            raise ValueError(f'{name}: a metric is called "{key}", as another row; rename it')
        names[split] = [*means, *derived]
    return main_metric(task, names["test"]), [*metrics, *names["test"]]


@contextmanager
def _dtypes_named(name: str, model: nn.Module, batch: Any) -> Iterator[None]:
    """Raise BadInput for torch's error about dtypes, if the batch has other dtypes than the
    model."""
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


def _check_numbers(values: Mapping[str, Any], place: str, finite: bool = True) -> None:
    """Raise ValueError unless these are scalars, and `finite`."""
    for name, value in values.items():
        shape = list(value.shape) if isinstance(value, Tensor) else []
        if shape or not isinstance(value, (Real, Tensor)):
            found = f"has the shape {shape}" if shape else f"is a {type(value).__name__}"
            raise ValueError(f"{place}: {name} {found}; use a number, the mean over the batch")
        if finite and not math.isfinite(float(value)):
            raise ValueError(f"{place}: {name} is {float(value)}; use one that is finite")
