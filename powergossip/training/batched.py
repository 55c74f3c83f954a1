"""Gradients of all hosted workers in one call, vectorized over the worker axis.

Axes: worker (hosted by this process); D parameters of a worker.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from powergossip.checks import BadValue
from powergossip.parameters import Layout, Parameters
from powergossip.tasks import Task

# The rule of `auto`, measured on a CPU. With fewer workers or larger models one call takes as long,
# or longer: the memory of all models no longer fits into the caches, and vectorized convolutions
# are slower than single ones.
FEWEST_WORKERS = 12
MOST_PARAMETERS = 2**16  # of a worker
MOST_PIXELS = 2**11  # elements of a worker's batch, for models with convolutions


class BatchedGradient:
    """g_i ← g_i + ∇f(x_i; batch of worker i) for all hosted workers i, in one call.

    One forward pass is vectorized over the workers by `torch.func.vmap`: the rows of `parameters.x`
    are its parameters, the rows of `parameters.buffers` its buffers. The gradient of Σ_i f(x_i) has
    ∇f(x_i) in row i. Up to rounding it equals the gradients of one worker after the other, apart
    from dropout, whose masks are others.

    Hooks of parameters are not called. State of a model other than parameters and buffers is not
    kept. Frozen parameters are the first model's.

    Args:
        precision: Context of the forward pass.
        progress: Function called when the gradients are complete, once for each parameter tensor.
    """

    def __init__(
        self,
        task: Task,
        parameters: Parameters,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        progress: Callable[[], object] | None = None,
    ):
        self._parameters, self._precision, self._progress = parameters, precision, progress
        self._loss = _Loss(task, parameters.models[0])
        names = [f"model.{name}" for name in parameters.names]
        x = _by_tensor(parameters.layout, parameters.x)
        self._x = {  # name → [worker, ...], a view of parameters.x
            name: values.detach().requires_grad_() for name, values in zip(names, x, strict=True)
        }
        self._grad = _by_tensor(parameters.layout, parameters.grad)
        self._buffers = self._views_of_buffers()

    def __call__(
        self, batches: Any, rows: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of these batches, which are `stacked`, to `parameters.grad`.

        Returns the losses and the metrics, each [worker] and detached. Buffers change as forward
        passes change them.

        Args:
            rows: The workers, int64 [worker], by default all.
        """
        x = self._x
        if rows is not None:
            rows = rows.to(self._parameters.x.device)
            x = {name: values.detach()[rows].requires_grad_() for name, values in x.items()}
        losses, metrics, buffers = self._forward(batches, x, rows)
        gradients = torch.autograd.grad(losses.sum(), list(x.values()), allow_unused=True)
        for total, gradient in zip(self._grad, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient) if rows is None else total.index_add_(0, rows, gradient)
            if self._progress is not None:
                self._progress()
        for name, buffer in self._buffers.items():
            buffer[slice(None) if rows is None else rows] = buffers[name]
        return losses.detach(), metrics

    def try_on(self, batches: Any) -> None:
        """Compute the gradients of these batches of all workers, and discard them."""
        losses, _, _ = self._forward(batches, self._x, None)
        torch.autograd.grad(losses.sum(), list(self._x.values()), allow_unused=True)

    def _forward(
        self, batches: Any, x: dict[str, Tensor], rows: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The losses, the metrics and the buffers afterwards, each [worker]."""
        leaves, structure = tree_flatten(batches)
        axes = [0 if _has_axes(leaf) else None for leaf in leaves]
        # Forward passes change contiguous copies in place: in vmap, views may become copies.
        buffers = {
            name: buffer.clone() if rows is None else buffer[rows]
            for name, buffer in self._buffers.items()
        }

        def loss(x: dict[str, Tensor], buffers: dict[str, Tensor], leaves: list[Any]) -> Any:
            batch = tree_unflatten(leaves, structure)
            return functional_call(self._loss, {**x, **buffers}, (batch,))

        vectorized = vmap(loss, in_dims=(0, 0, axes), randomness="different")
        found: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
        # vmap has no rule for fused attention: on a GPU it fails, on a CPU it is no faster.
        with self._precision(), sdpa_kernel(SDPBackend.MATH):
            found = vectorized(x, buffers, leaves)
        return found

    def _views_of_buffers(self) -> dict[str, Tensor]:
        """Name → [worker, ...]: views of parameters.buffers, and one memory for integer buffers.

        The models' integer buffers become views of it.
        """
        parameters = self._parameters
        views = iter(_by_tensor(parameters.buffer_layout, parameters.buffers))
        found: dict[str, Tensor] = {}
        for name, buffer in parameters.models[0].named_buffers():
            if buffer.is_floating_point():
                found[f"model.{name}"] = next(views)
                continue
            rows = torch.stack([model.get_buffer(name) for model in parameters.models])
            for model, row in zip(parameters.models, rows, strict=True):
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = row
            found[f"model.{name}"] = rows
        return found


class _Loss(nn.Module):
    """The loss of a task as a module, whose parameters and buffers can be replaced."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self._task, self.model = task, model

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss, the metrics, and the buffers afterwards."""
        loss, metrics = self._task.loss(self.model, batch)
        if self._task.carried(self.model):
            raise NotImplementedError("the model carries state from batch to batch")
        return loss, dict(metrics), dict(self.named_buffers())


def stacked(batches: Sequence[Any]) -> Any | None:
    """The batches of the workers as one, with tensors [worker, ...], and the same values otherwise.

    None unless they have the same structure, shapes and values without axes.
    """
    first, *others = map(tree_flatten, batches)
    if not all(_fit(first, other) for other in others):
        return None
    leaves, structure = first
    columns = zip(leaves, *(other_leaves for other_leaves, _ in others), strict=True)
    one = [torch.stack(column) if _has_axes(column[0]) else column[0] for column in columns]
    return tree_unflatten(one, structure)


def in_two(batches: Sequence[Any]) -> list[tuple[Tensor, Any]] | None:
    """Two groups of workers, int64 [worker], and their `stacked` batches. None if there are more.

    The last batches of an epoch are an example: some workers have a sample more.
    """
    flat = list(map(tree_flatten, batches))
    like_first = [_fit(flat[0], other) for other in flat]
    found = []
    for alike in (True, False):
        rows = [row for row, is_alike in enumerate(like_first) if is_alike == alike]
        together = stacked([batches[row] for row in rows]) if rows else None
        if together is None:
            return None
        found.append((torch.tensor(rows), together))
    return found


def _fit(first: tuple[list[Any], TreeSpec], other: tuple[list[Any], TreeSpec]) -> bool:
    return first[1] == other[1] and all(map(_alike, first[0], other[0]))


def _has_axes(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _alike(first: Any, other: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        same = first.shape == other.shape and first.dtype == other.dtype
        return same and (first.ndim > 0 or first is other or bool(first == other))
    return bool(type(first) is type(other) and first == other)


def _by_tensor(layout: Layout, rows: Tensor) -> list[Tensor]:
    """Views of rows [worker, D] as tensors [worker, ...], in the order of `layout.shapes`."""
    return [
        rows[:, start : start + prod(shape)].unflatten(1, shape) if shape else rows[:, start]
        for start, shape in zip(layout.starts, layout.shapes, strict=True)
    ]


def by_rule(models: Sequence[nn.Module], batch: Callable[[], Any]) -> bool:
    """True if `auto` batches the gradients of these models, with batches like this one.

    A function of the number of models, of their layers and of sizes, the same on any device: the
    rounding of a run must not depend on measured times.
    """
    model = models[0]
    layers = {type(m) for m in model.modules() if any(True for _ in m.parameters(recurse=False))}
    return (
        len(models) >= FEWEST_WORKERS
        and layers <= {nn.Linear, nn.Conv2d}
        and sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS
        and (nn.Conv2d not in layers or tree_flatten(batch())[0][0].numel() <= MOST_PIXELS)
    )


def check(batched: BatchedGradient, batches: Sequence[Any]) -> None:
    """Raise BadValue unless the gradient of these batches, one for each worker, can be batched.

    Changes neither gradients nor buffers, and no random generator.
    """
    with torch.random.fork_rng():
        try:
            one = stacked(batches)
            if one is None:
                raise ValueError("batches differ in shape")
            batched.try_on(one)
        except Exception as error:  # of torch or of the user's code, of any kind
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            accepted = f"auto or off; the model or its loss cannot be vectorized ({reason})"
            raise BadValue("batched_gradients", "on", accepted) from error
