"""The trainer: everything between a checked configuration and the rows of a run."""

import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powergossip import kernels, tasks
from powergossip.network import Processes, cuda_aware_mpi
from powergossip.runs import metrics
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.metrics import Hooks
from powergossip.runs.progress import Progress
from powergossip.runs.signals import Signals
from powergossip.state_trees import map_tensors
from powergossip.training import compilation, construction, resizing
from powergossip.training.config import Settings
from powergossip.training.ending import PATIENCE, interrupted
from powergossip.training.evaluation import Evaluation
from powergossip.training.final_merge import merge
from powergossip.training.measurements import log_phases, log_skipped
from powergossip.training.methods import diffusion_rate
from powergossip.training.resuming import load_checkpoint
from powergossip.training.state import load_run, run_state
from powergossip.training.stepping import Position


class Trainer:
    """Trains the workers of a run. All processes construct it and call its methods together.

    Args:
        config: Configuration as returned by `config_checks.checked`.
        hooks: Hooks that receive rows and facts, on process 0.
        resume_from: Output folder of a run to resume from its last checkpoint, if it has one. With
            config.evaluate_only, the checkpoint is the one that config.checkpoint names.
        task: Data and models, by default the configuration's.

    Raises:
        BadInput: In all processes, for impossible values, missing data, or a run to resume that had
            another configuration or model.
    """

    def __init__(
        self,
        config: Settings,
        processes: Processes,
        hooks: Hooks | None = None,
        resume_from: Path | None = None,
        task: tasks.Task | None = None,
    ):
        self.config, self._hooks = config, hooks or Hooks()
        built = self._built = construction.build(config, processes, task)
        run, self.execution = built.run, built.execution
        self.network, self.task, self.parameters = run.network, run.task, run.parameters
        self.clock, self.steps_per_epoch = run.clock, run.steps_per_epoch
        self.rows = self.execution.rows(self._hooks, self.network)
        self.position = Position()
        self.metrics_bytes = 0  # of metrics.jsonl that belong to the steps so far
        self.workers_before = config.n_workers  # their number in the checkpoint of a resumed run
        self.restored: str | None = None  # name of that checkpoint
        if resume_from is not None and self.execution.is_away:
            self.metrics_bytes = metrics.complete_bytes(resume_from / metrics.FILE)
        elif resume_from is not None:
            self._resume(resume_from)
        self.evaluation = Evaluation(
            config, self.execution.view, self.task, self.steps_per_epoch, self.rows
        )

    @property
    def processes(self) -> Processes:
        """The surviving processes."""
        return self.network.processes

    @property
    def step(self) -> int:
        """The number of steps since the start of the run."""
        return self.execution.step

    @property
    def metric(self) -> str:
        """The metric to show: the main one of the task, or else the accuracy."""
        return str(self._built.metric["name"]) if self._built.metric else "accuracy"

    def facts(self) -> dict[str, Any]:
        """Metadata of the run: software versions, layout of processes, topology, data."""
        built, network, layout = self._built, self.network, self.parameters.layout
        mpi_on_gpu = network.device.type == "cuda" and built.transport == "mpi"
        counts = self.task.label_counts()  # [worker][label]
        return {
            "processes": network.processes.size,
            "n_workers": network.n_workers,
            "threads_per_process": torch.get_num_threads(),
            "device": str(network.device),
            "transport": built.transport,
            "run": network.processes.name or None,
            "cuda_aware_mpi": cuda_aware_mpi() if mpi_on_gpu else None,
            "messages_staged_in_host_memory": network.connection.stage,
            "kernels": kernels.name(kernels.load(network)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": network.topology.summary(),
            "parameters": layout.size,
            "samples": dict(self.task.samples),
            **getattr(self.task, "facts", {}),
            **({} if counts is None else {"label_counts": counts.tolist()}),
            "diffusion_rate": diffusion_rate(self.config, network.topology, layout),
            "batched_gradients": built.run.gradients.are_batched,
            "steps_per_epoch": self.steps_per_epoch,
            "metric": built.metric,
            **self.execution.facts(),
        }

    # --- Training ---

    @property
    def total_steps(self) -> int:
        """The number of steps at the end of the run."""
        return int(self.config.num_epochs * self.steps_per_epoch)

    @property
    def is_complete(self) -> bool:
        """True after the last step."""
        return bool(self.position.epoch >= self.config.num_epochs)

    def train(
        self,
        checkpoints: Checkpoints | None = None,
        metrics_offset: Callable[[], int] = lambda: 0,
        save_first: bool = False,
    ) -> None:
        """Train the remaining epochs. Each is followed by its rows.

        Raises, in all processes and with the same text, Diverged and, after a signal, Interrupted.
        Diverged leaves no row and no checkpoint of its epoch. Interrupted leaves a checkpoint.

        Args:
            checkpoints: Checkpoints to write, or None.
            metrics_offset: Bytes of metrics.jsonl on the disk, saved with a checkpoint on process
                0.
            save_first: If True, the restored state is saved again, with a new metrics_offset.
        """
        c, position = self.config, self.execution.enter(self.position)
        self.execution.watch.start()
        if self.workers_before != c.n_workers:
            self.rows("workers", c.n_workers, position.epoch)
        save = partial(self._save, checkpoints, metrics_offset)
        if save_first:
            save(position)
        shown = self.processes.writes and c.log_verbosity > 0
        tokens = c.n_workers * getattr(self.task, "tokens_in_batch", 0)
        bar = Progress(self.total_steps, self.step, shown, tokens)
        patience = None if self._built.transport in ("none", "mpi") else PATIENCE
        with bar, Signals(patience=patience) as signals:
            for epoch in range(position.epoch, c.num_epochs):
                for position, number in self.execution.epoch(position, signals):  # noqa: B020
                    bar.advance_to(self.step)
                    if number is not None:
                        signals.agreed = True
                        save(position)
                        missing = self.execution.missing
                        raise interrupted(number, self.step, epoch + 1, missing)
                if c.final_merge and epoch + 1 == c.num_epochs:
                    with self.clock("averaging"), compilation.not_compiled(c.torch_compile):
                        merge(self._built.run)
                score = self._end_epoch(epoch + 1, position.sums, bar)
                position = Position(epoch + 1)
                if (epoch + 1) % c.checkpoint_interval == 0 or epoch + 1 == c.num_epochs:
                    save(position, score)

    def end(self, last: Callable[[], None] = lambda: None) -> None:
        """After `train`: call a last action, such as a figure, in one process, and wait for it."""

        def action() -> None:
            self.rows.take_over()
            last()

        self.execution.end(action)

    def close(self) -> None:
        """End work in the background, also the task's, if it has a method `close`."""
        close = getattr(self.task, "close", None)
        if close is not None:
            close()
        self.execution.close()

    def evaluate(self) -> None:
        """Log the rows of an evaluation of the models. Raises Diverged as `train` does."""
        self.execution.watch.start()
        self.evaluation(self.position.epoch, self.step, {})

    def sample(self) -> str | None:
        """The text of the task by the mean model of the last evaluation, or None."""
        make = getattr(self.task, "sample", None)
        evaluated = self.evaluation.main_metric is not None
        return make(self.evaluation.mean_model.models[0]) if make and evaluated else None

    def _end_epoch(self, epoch: int, sums: Mapping[str, Tensor], bar: Progress) -> float | None:
        """Log the rows at the end of an epoch. Returns the score, if there was an evaluation."""
        c, score = self.config, None
        if epoch % c.evaluation_interval == 0 or epoch == c.num_epochs:
            if self.execution.view.varies:
                self.rows("workers", len(self.execution.view.alive), epoch)
            with self.clock("evaluation"), compilation.not_compiled(c.torch_compile):
                shown, score = self.evaluation(epoch, self.step, sums)
            bar.note(shown)
            if c.log_verbosity > 1 and self.processes.writes:
                bar.write(f"epoch {epoch}: {shown}")
        if epoch in c.spectrum_logging_epochs:
            self.evaluation.log_spectra(epoch)
        if "bits" in c.options:
            log_skipped(self.rows, self.processes, self.execution.codes, epoch)
        log_phases(self.rows, self._hooks, self.clock, epoch, c.num_epochs)
        return score

    # --- Checkpoints ---

    def _resume(self, folder: Path) -> None:
        """Restore a checkpoint of the run in this folder. Raises BadInput."""
        workers, state = self.network.workers, partial(self.state_dict, self.position)
        start = resizing.Start(
            self.network.n_workers, workers, self.steps_per_epoch, state, self.execution.rule
        )
        found = load_checkpoint(
            folder, self.config, self.processes, self.parameters, start, self._data
        )
        if found is not None:
            saved, self.metrics_bytes, self.workers_before, self.restored = found
            self.load_state_dict(saved)

    @property
    def _data(self) -> str | None:
        """The hash of data that may have changed when a run is resumed, or None."""
        facts: Mapping[str, Any] = getattr(self.task, "facts", {})
        return facts.get("tokens_sha256")

    def state_dict(self, position: tuple[int, int, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are [worker, ...]."""
        (epoch, step, sums), view = position, self.execution.view
        return run_state(self._built.run, self.execution.parts) | {
            "step": self.step,
            "epoch": epoch,
            "step_in_epoch": step,
            "sums": sums,
            "seconds": self.execution.watch.seconds,
            **({"alive": list(view.alive)} if view.varies else {}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`: for an evaluation, without the method's."""
        moved = partial(map_tensors, lambda tensor: tensor.to(self.network.device))
        self.execution.step = saved["step"]
        self.position = Position(saved["epoch"], saved["step_in_epoch"], moved(saved["sums"]))
        with_method = not self.config.evaluate_only
        load_run(self._built.run, self.execution.parts, saved, with_method)
        self.execution.restore(saved.get("alive", range(self.config.n_workers)))
        self.execution.watch.before = saved["seconds"]

    def _save(
        self,
        checkpoints: Checkpoints | None,
        metrics_offset: Callable[[], int],
        position: Position,
        score: float | None = None,
    ) -> None:
        """Write a checkpoint, if there is a place for it."""
        if checkpoints is None:
            return

        def description() -> dict[str, Any]:
            self.rows.take_over()  # all rows until now are there
            return {
                "config": self.config.as_dict(),
                "steps_per_epoch": self.steps_per_epoch,
                "data": self._data,
                "metrics_bytes": metrics_offset(),
            }

        with self.clock("checkpoint"):
            now = self.state_dict(position)
            checkpoints.save(self.step, self.network.workers, now, description, score)
