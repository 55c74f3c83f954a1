"""Gradients of the hosted workers: one model after the other, or all in one call.

Axes: worker (hosted by this process).
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powergossip import randomness, tasks
from powergossip.checks import BadValue
from powergossip.network import Network
from powergossip.parameters import Parameters, trained
from powergossip.runs.clock import Clock
from powergossip.training import batched, precision
from powergossip.training.config import Settings
from powergossip.training.ending import Agreement


class Gradients:
    """Computes the gradients of a step, and their metrics.

    Args:
        agreement: Agreement that is given a loss that is infinite or NaN.

    Raises:
        BadValue: Where batched_gradients=on or data_of_lost=redistributed is impossible.
    """

    def __init__(
        self,
        config: Settings,
        network: Network,
        task: tasks.Task,
        parameters: Parameters,
        clock: Clock,
        agreement: Agreement,
    ):
        c = self._config = config
        self._network, self._task, self._parameters = network, task, parameters
        self._clock, self._agreement = clock, agreement
        self._overlapping = c.overlapping and network.processes.size > 1
        self._batched: batched.BatchedGradient | None = None
        if c.data_of_lost == "redistributed" and not getattr(task, "redistributes", False):
            raise BadValue("data_of_lost", c.data_of_lost, f"left with task={c.task}")
        if not c.evaluate_only and self._to_be_batched():
            self._batched = self._in_one_call()
            if c.batched_gradients == "on":
                batched.check(self._batched, [task.batch(w, 0, 0) for w in network.workers])
        if self._overlapping:
            self._progress_messages_during_backward()

    def __call__(self, epoch: int, step: int, step_of_run: int) -> dict[str, Tensor]:
        """Add the hosted workers' gradients to parameters.grad. Returns metrics, each [worker].

        `step` counts from the start of the epoch.
        """
        workers, together = self._network.workers, None
        if self._batched is not None and hasattr(self._task, "batches"):
            with self._clock("data"):
                together = self._task.batches(workers, epoch, step)
        batches: Iterable[Any] = (self._batch(w, epoch, step, step_of_run) for w in workers)
        if self._batched is not None:
            groups: Sequence[tuple[Tensor | None, Any]] | None = [(None, together)]
            if together is None:
                batches = apart = list(batches)
                together = batched.stacked(apart)
                groups = batched.in_two(apart) if together is None else [(None, together)]
            if groups is not None:
                return self._in_groups(self._batched, groups, epoch, step_of_run)
        collected: dict[str, list[Tensor]] = {}
        for worker, model, batch in zip(workers, self._parameters.models, batches, strict=True):
            with _errors_name(worker, epoch, step_of_run):
                metrics = self._of_worker(worker, model, batch, epoch, step_of_run)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in collected.items()}

    def of_worker(
        self,
        worker: int,
        epoch: int,
        step: int,
        step_of_run: int,
        lost: frozenset[int] = frozenset(),
    ) -> dict[str, Tensor]:
        """Add the gradient of one hosted worker to its row of parameters.grad. See `__call__`.

        Args:
            lost: Workers whose samples the others have. Tasks with `redistributes` only.
        """
        batch = self._batch(worker, epoch, step, step_of_run, *([lost] if lost else []))
        model = self._parameters.models[worker - self._network.workers[0]]
        with _errors_name(worker, epoch, step_of_run):
            return self._of_worker(worker, model, batch, epoch, step_of_run)

    @property
    def are_batched(self) -> bool:
        """True if they are computed in one call."""
        return self._batched is not None

    def resume(self, were_batched: bool) -> None:
        """Compute them as before a checkpoint: the rounding differs."""
        several = len(self._parameters.models) > 1 or self._config.batched_gradients == "on"
        keeps = were_batched and several
        self._batched = (self._batched or self._in_one_call()) if keeps else None

    def _to_be_batched(self) -> bool:
        c, models = self._config, self._parameters.models
        if c.by_edges:
            return False  # each worker has gradients at its own time
        if c.batched_gradients != "auto" or not tasks.is_in_library(c.task, c.task_architecture):
            return bool(c.batched_gradients == "on")
        plain = not c.torch_compile and c.precision == "fp32"
        first = partial(self._task.batch, self._network.workers[0], 0, 0)
        return plain and batched.by_rule(models, first)

    def _in_one_call(self) -> batched.BatchedGradient:
        progress = self._network.progress if self._overlapping else None
        autocast = partial(precision.autocast, self._config.precision, self._network.device)
        return batched.BatchedGradient(self._task, self._parameters, autocast, progress)

    def _progress_messages_during_backward(self) -> None:
        # Weak: Python frees no cycle through a parameter's hooks.
        of_run = weakref.ref(self._network)

        def progress(_: Tensor) -> None:
            network = of_run()
            if network is not None:
                network.progress()

        for model in self._parameters.models:
            for parameter in trained(model).values():
                parameter.register_post_accumulate_grad_hook(progress)

    def _batch(self, worker: int, epoch: int, step: int, step_of_run: int, *lost: Any) -> Any:
        with self._clock("data"), _errors_name(worker, epoch, step_of_run):
            return self._task.batch(worker, epoch, step, *lost)

    def _of_worker(
        self, worker: int, model: nn.Module, batch: Any, epoch: int, step_of_run: int
    ) -> dict[str, Tensor]:
        with self._clock("gradient"):
            self._seed_layers(worker, step_of_run)
            with precision.autocast(self._config.precision, self._network.device):
                loss, metrics = self._task.loss(model, batch)
            values = loss.detach().view(1)  # a loss may have one axis
            self._agreement.note_all([worker], "loss", values, step_of_run, epoch + 1)
            loss.backward()  # also if it is not finite: other processes wait for messages
        return metrics

    def _in_groups(
        self,
        gradient: batched.BatchedGradient,
        groups: Sequence[tuple[Tensor | None, Any]],
        epoch: int,
        step_of_run: int,
    ) -> dict[str, Tensor]:
        workers, found = self._network.workers, []
        with self._clock("gradient"):
            self._seed_layers(workers[0], step_of_run)
            for rows, batches in groups:
                losses, metrics = gradient(batches, rows)
                of_group = workers if rows is None else [workers[row] for row in rows.tolist()]
                self._agreement.note_all(of_group, "loss", losses, step_of_run, epoch + 1)
                found.append(metrics)
        if len(groups) == 1:
            return found[0]
        order = torch.cat([rows for rows, _ in groups if rows is not None]).argsort()
        return {name: torch.cat([each[name] for each in found])[order] for name in found[0]}

    def _seed_layers(self, worker: int, step_of_run: int) -> None:
        """Seed torch's generator for layers that use it: equal in any layout of processes."""
        seed = randomness.torch_seed(self._config.seed, "layers", worker, step_of_run)
        randomness.seed_torch(seed, self._network.device)


@contextmanager
def _errors_name(worker: int, epoch: int, step_of_run: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in worker {worker} at step {step_of_run} (epoch {epoch + 1})")
        raise
