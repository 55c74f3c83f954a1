"""The trainer: everything between a checked configuration and the rows of a run."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from omegaconf import OmegaConf
from torch import Tensor

from powergossip import algorithms, kernels, tasks
from powergossip.network import Processes
from powergossip.network.resilient.workers import Links
from powergossip.parameters import Layout, Parameters
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.clock import Clock
from powergossip.runs.progress import Progress
from powergossip.runs.signals import Signals
from powergossip.training import construction, facts, precision, resizing
from powergossip.training.asynchronous.epochs import LinkedEpochs
from powergossip.training.asynchronous.execution import EventTraining, event_driven, replaces
from powergossip.training.asynchronous.links import finish, make_links, without
from powergossip.training.ending import PATIENCE, Agreement, interrupted
from powergossip.training.evaluation import Evaluation
from powergossip.training.gradients import Gradients
from powergossip.training.measurements import Hooks, Rows, log_phases, log_replaced
from powergossip.training.methods import (
    averaging_options,
    check_method,
    diffusion_rate,
    make_averaging,
    make_method,
    warn_of_rate,
)
from powergossip.training.resuming import load_checkpoint
from powergossip.training.schedule import learning_rate
from powergossip.training.state import Parts, Stateful
from powergossip.training.task_check import check_first_batch, check_sizes
from powergossip.trees import map_tensors

Position = tuple[int, int, dict[str, Tensor]]  # epoch, step in it, sums of metrics over its steps
Save = Callable[[Position], None]  # see Trainer._save


class Trainer:
    """Trains the workers of a run. All processes construct it and call its methods together.

    config      # as `settings.checked` returns it
    hooks       # receive rows and facts, on process 0
    resume_from # output folder of a run to resume from its last checkpoint, if it has one, or with
                # config.evaluate_only from the one that config.checkpoint names
    task        # data and models, by default those of the configuration
    links       # of a process that replaces a lost one: then `join` follows

    Raises BadInput, in all processes, for impossible values, missing data, or a run to resume that
    had another configuration or model.
    """

    def __init__(
        self,
        config: Any,
        processes: Processes,
        hooks: Hooks | None = None,
        resume_from: Path | None = None,
        task: tasks.Task | None = None,
        links: Links | None = None,
    ):
        c = self.config = config
        self.links = links or make_links(c, processes)
        if self.links is not None:
            processes = self.links.group
        self.processes, self._hooks = processes, hooks or Hooks()
        self.clock = Clock()
        with processes.agreed():
            self.network = construction.make_network(c, processes, self.clock)
            self.hint = check_method(c, self.network)  # a sentence for the start of the run
        self.topology, self.device = self.network.topology, self.network.device
        self._transport = construction.transport(self.network, self.links)
        kernels.load(self.network)  # together: later calls find them
        self.task = task or processes.one_by_one(partial(construction.make_task, c, self.network))
        c.task_architecture = c.task_architecture or next(iter(self.task.architectures), None)
        # The same as plain values, for the hot path: reading a DictConfig takes microseconds.
        plain: Any = OmegaConf.to_container(c)
        self._values = SimpleNamespace(**plain)
        self._metric: dict[str, Any] | None = None  # the main one of a task of the user
        of_user = task is None and not tasks.is_in_library(c.task, c.task_architecture)
        if of_user:
            sizes = processes.gather((self.task.steps_per_epoch, dict(self.task.samples)))
            check_sizes(sizes, c.task)
        self.steps_per_epoch = min(
            self.task.steps_per_epoch, c.max_steps_per_epoch or self.task.steps_per_epoch
        )
        self._agreement = Agreement(processes)
        with processes.agreed():
            construction.check_evaluation(c, self.task)
            models = [self.task.model(c.task_architecture, c.seed) for _ in self.network.workers]
            self.parameters = Parameters(models, self.device)
            dtype = self.parameters.x.dtype
            precision.check_precision(c.precision, dtype)
            if dtype != self.network.dtype:
                self.network = self.network.in_precision(dtype)
            construction.check_spectrum_names(c, self.parameters)
            warn_of_rate(c, self.network, self.parameters.layout)
            construction.warn_of_rank(c, self.network, self.parameters)
            method: dict[str, Stateful] = {}
            if not c.evaluate_only:
                if of_user:
                    worker = self.network.workers[0]
                    main = check_first_batch(self.task, c, worker, self.device)
                    self._metric = {"name": main.name, "larger_is_better": main.larger_is_better}
                if c.torch_compile:
                    precision.compile_models(models)
                if not event_driven(c):
                    self.local, self.rule, self._at_epoch = make_method(
                        c, self.network, self.parameters, self.clock, self.steps_per_epoch
                    )
                    method = {"optimizer": self.local, "algorithm": self.rule}
            of_run = self.network, self.task, self.parameters, self.clock
            self._gradients = Gradients(self._values, *of_run, self._agreement)
            self._events: EventTraining | None = None
            self._linked: LinkedEpochs | None = None
            if event_driven(c) and not c.evaluate_only:
                options = averaging_options(c, self.topology, self.parameters.layout)
                self._events = EventTraining(
                    *(self._values, options, self.network, self.parameters),
                    *(self._gradients.of_worker, self.steps_per_epoch, self.links, self.clock),
                )
                method = {"events": self._events}
                if self.links is not None:
                    of_linked = self.links, self._events, self.parameters, self._agreement
                    self._linked = LinkedEpochs(*of_linked, self.clock)
        self._parts = Parts(*of_run, self._gradients, method)
        self._present: list[int] | None = None  # the workers of a checkpoint that is evaluated
        self.rows = Rows(self._hooks, self.network, self._elapsed, joins=links is not None)

        self.step = 0  # since the start of the run
        self.position: Position = (0, 0, {})
        self.metrics_bytes = 0  # of metrics.jsonl that belong to the steps so far
        self.workers_before = c.n_workers  # their number in the checkpoint of a resumed run
        self._seconds = 0.0  # of the run, without time lost in interruptions
        self._started = time.perf_counter()
        if resume_from is not None:
            self._resume(resume_from)
        network, parameters = construction.evaluated(
            c, self.network, self.parameters, self.present, self.links, self._events
        )
        of_evaluation = network, self.task, parameters, self.steps_per_epoch
        self.evaluation = Evaluation(self._values, *of_evaluation, self.rows)

    def present(self) -> list[int]:
        """The indices of the hosted workers that are alive."""
        if self._events is not None:
            return self._events.present
        hosted = self.network.workers
        return [i for i in hosted if self._present is None or i in self._present]

    @property
    def time_is_virtual(self) -> bool:
        """Whether seconds of rows are those of the virtual clock."""
        return self._events is not None and self.links is None

    def _elapsed(self) -> float:
        """Seconds since the start of the run, virtual ones on the virtual clock."""
        if self._events is not None and self.links is None:
            return self._events.clock.now
        return time.perf_counter() - self._started

    def close(self) -> None:
        """End processes of the task, if it has a method `close`, and heartbeats."""
        close = getattr(self.task, "close", None)
        if close is not None:
            close()
        if self.links is not None:
            self.links.close()

    def begin_in(self, folder: Path) -> None:
        """Write the order of events to this folder, and replace lost processes, if the
        configuration asks for it. To be called before the first step."""
        if self._events is not None and self.config.record_order:
            self._events.record_order(folder)
        if self._linked is not None and replaces(self.config):
            run = OmegaConf.to_container(self.config), str(folder)
            self._linked.replace_lost(run, self._elapsed)

    def join(self) -> None:
        """Join the others as a new process, after `begin_in`. Then `train`."""
        assert self._linked is not None
        moment = self._linked.join()
        self.step, self._seconds = moment.step, moment.seconds
        self.position = moment.epoch, moment.step - moment.epoch * self.steps_per_epoch, {}

    @property
    def missing(self) -> list[int]:
        """The workers that were lost and not replaced, as of the last collective operation."""
        return [] if self.links is None else self.links.missing

    def finish(self, action: Callable[[], None] = lambda: None) -> None:
        """After `train`: call a last action, such as a figure, in one process, and wait for it.

        If that process is lost meanwhile, the next one calls it.
        """

        def last() -> None:
            self.rows.take_over()
            if self._events is not None:
                self._events.merge_order()
            action()

        finish(self.links, self.processes, last)

    def averaging(self, layout: Layout) -> algorithms.Averaging:
        """Build the averaging algorithm of the configuration. Raises ValueError."""
        return make_averaging(self.config, self.network, layout)

    @property
    def metric(self) -> str:
        """The metric to show: the main one of a task of the user, or else the accuracy."""
        return str(self._metric["name"]) if self._metric else "accuracy"

    def facts(self) -> dict[str, Any]:
        """Metadata of the run: software versions, layout of processes, topology, data."""
        of_run = {
            "diffusion_rate": diffusion_rate(self.config, self.topology, self.parameters.layout),
            "batched_gradients": self._gradients.are_batched,
            "steps_per_epoch": self.steps_per_epoch,
            "start_iteration": facts.start_iteration(None if self._events else self.rule),
            "metric": self._metric,
        }
        loops = kernels.name(kernels.load(self.network))
        of_environment = facts.of_environment(self.network, self._transport, loops)
        return of_environment | facts.of_task(self.task, self.parameters) | of_run

    # --- Training ---

    @property
    def total_steps(self) -> int:
        """The number of steps at the end of the run."""
        return int(self.config.num_epochs * self.steps_per_epoch)

    @property
    def is_complete(self) -> bool:
        """Whether no step is left."""
        return bool(self.position[0] >= self.config.num_epochs)

    def train(
        self,
        checkpoints: Checkpoints | None = None,
        metrics_offset: Callable[[], int] = lambda: 0,
        save_first: bool = False,
    ) -> None:
        """Train the remaining epochs. Each is followed by its rows.

        checkpoints     # where to save, or None
        metrics_offset  # bytes of metrics.jsonl on the disk, saved with a checkpoint on process 0
        save_first      # save the restored state again, with a new metrics_offset

        Raises, in all processes and with the same text, Diverged and, after a signal, Interrupted.
        Diverged leaves no row and no checkpoint of its epoch. Interrupted leaves a checkpoint.
        """
        c, steps = self.config, self.steps_per_epoch
        self._started = time.perf_counter() - self._seconds
        if self.workers_before != c.n_workers:
            self.rows("workers", c.n_workers, self.position[0])
        save = partial(self._save, checkpoints, metrics_offset)
        if save_first:
            save(self.position)
        shown = self.processes.rank == 0 and c.log_verbosity > 0
        bar = Progress(c.num_epochs * steps, self.step, shown)
        first, first_step, sums = self.position
        patience = None if self._transport in ("none", "mpi") else PATIENCE
        with bar, Signals(patience=patience) as signals:
            for epoch in range(first, c.num_epochs):
                if self._linked is not None:
                    sums = self._train_linked_epoch(self._linked, epoch, signals, save)
                    bar.update(steps - first_step)
                else:
                    for step in range(first_step, steps):
                        for name, values in self.train_step(epoch, step).items():
                            sums[name] = sums[name] + values if name in sums else values
                        bar.update()
                        self._stop_if_asked(signals, (epoch, step + 1, sums), save)
                score = self._end_epoch(epoch + 1, sums, bar)
                first_step, sums = 0, {}
                if (epoch + 1) % c.checkpoint_interval == 0 or epoch + 1 == c.num_epochs:
                    save((epoch + 1, 0, {}), score)

    def evaluate(self) -> None:
        """Log the rows of an evaluation of the present models. Raises Diverged as `train` does."""
        self._started = time.perf_counter() - self._seconds
        self.evaluation(self.position[0], self.step, {})

    def train_step(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Train one step of all hosted workers. Returns the batches' metrics, each [worker].

        On the virtual clock, workers alive then have taken one more step on average. It returns the
        sums over an epoch at its end, and nothing before.
        """
        if self._events is not None:
            with self.clock("averaging"):
                metrics = self._events.run(self.step + 1)
            self.step += 1
            return metrics
        self.local.rate = learning_rate(self._values, epoch + (step + 1) / self.steps_per_epoch)
        self._at_epoch(epoch + step / self.steps_per_epoch)
        # The phase has compression and mixing. The phases within it count for themselves.
        with self.clock("averaging"):
            self.rule.start()
            metrics = self.gradient(epoch, step)
            self.rule.finish()
        self.step += 1
        return metrics

    def _train_linked_epoch(
        self, linked: LinkedEpochs, epoch: int, signals: Signals, save: Save
    ) -> dict[str, Tensor]:
        """Train an epoch of all processes that are left. Returns the sums of metrics over it."""
        shown = self.config.log_verbosity > 0
        for step, number in linked.stages(epoch, lambda: signals.received):
            self.step = step
            log_replaced(self.rows, self._hooks, linked.replaced, linked.take_notes(), shown)
            if number is not None:
                done = self.step - epoch * self.steps_per_epoch
                self._interrupt(number, signals, (epoch, done, {}), save)
        assert self._events is not None
        return self._events.take_sums()

    def gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Add the hosted workers' gradients to parameters.grad. Returns metrics, each [worker]."""
        return self._gradients(epoch, step, self.step)

    def _end_epoch(self, epoch: int, sums: Mapping[str, Tensor], bar: Progress) -> float | None:
        """Log the rows at the end of an epoch. Returns the score, if there was an evaluation."""
        c, score = self.config, None
        if epoch % c.evaluation_interval == 0 or epoch == c.num_epochs:
            if self._events is not None:
                sums = self._events.of_present(sums)
                self.rows("workers", len(self._events.everybody()), epoch)
            with self.clock("evaluation"), precision.not_compiled(c.torch_compile):
                shown, score = self.evaluation(epoch, self.step, sums)
            bar.note(shown)
            if c.log_verbosity > 1 and self.processes.rank == 0:
                bar.write(f"epoch {epoch}: {shown}")
        if epoch in c.spectrum_logging_epochs:
            self.evaluation.log_spectra(epoch)
        if self._events is not None:
            self._events.end_epoch(epoch)
        log_phases(self.rows, self._hooks, self.clock, epoch, c.num_epochs)
        return score

    def _stop_if_asked(self, signals: Signals, position: Position, save: Save) -> None:
        """Save and raise Interrupted if a process has received a signal.

        Here and at the end of an epoch, raise Diverged if a loss was not finite or parameters are
        not.
        """
        epoch, step, _ = position
        number = self._received_signal(signals)
        if number is not None or step == self.steps_per_epoch:
            x = self.parameters.x
            self._agreement.note_norms(self.network.workers, x, self.step, epoch + 1)
            number = self._agreement.agree(number or signals.received)
        if number is not None:
            self._interrupt(number, signals, position, save)

    def _interrupt(self, number: int, signals: Signals, position: Position, save: Save) -> NoReturn:
        """Save and raise Interrupted, in all processes."""
        signals.agreed = True
        save(position)
        raise interrupted(number, self.step, position[0] + 1, without(self.missing))

    def _received_signal(self, signals: Signals) -> int | None:
        """A signal that some process received, in all processes after the same step."""
        return self._agreement.after_step(self.step, signals.received)

    # --- Checkpoints ---

    def _resume(self, folder: Path) -> None:
        """Restore a checkpoint of the run in this folder. Raises BadInput."""
        workers, start = self.network.workers, self._start_of_run
        found = load_checkpoint(
            folder, self.config, self.processes, self.parameters, workers, start
        )
        if found is not None:
            state, self.metrics_bytes, self.workers_before = found
            self.load_state_dict(state)

    def _start_of_run(self) -> resizing.Start:
        n_workers, workers = self.network.n_workers, self.network.workers
        state = partial(self.state_dict, self.position)
        rule: Any = None if event_driven(self.config) else self.rule
        return resizing.Start(n_workers, workers, self.steps_per_epoch, state, rule)

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are [worker, ...]."""
        epoch, step, sums = position
        return self._parts.state_dict() | {
            "step": self.step,
            "epoch": epoch,
            "step_in_epoch": step,
            "sums": sums,
            "seconds": time.perf_counter() - self._started,
            **({} if self._events is None else {"present": self._events.everybody()}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`: for an evaluation, without the method's."""
        moved = partial(map_tensors, lambda tensor: tensor.to(self.device))
        self.step = saved["step"]
        self.position = saved["epoch"], saved["step_in_epoch"], moved(saved["sums"])
        self._parts.load_state_dict(saved, with_method=not self.config.evaluate_only)
        self._present = saved.get("present")
        self._seconds = saved["seconds"]

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
                "config": OmegaConf.to_container(self.config),
                "steps_per_epoch": self.steps_per_epoch,
                "metrics_bytes": metrics_offset(),
            }

        with self.clock("checkpoint"):
            now = self.state_dict(position)
            checkpoints.save(self.step, self.network.workers, now, description, score)
