"""The trainer: everything between a checked configuration and the rows of a run."""

import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from omegaconf import OmegaConf
from scipy.sparse import csr_array
from torch import Tensor

from powergossip import algorithms, kernels, tasks, topologies
from powergossip.algorithms import ddp
from powergossip.errors import Interrupted
from powergossip.network import Network, Processes, choose_device, cuda_aware_mpi
from powergossip.parameters import Layout, Parameters
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.clock import Clock, PhaseTime, Signals, data_fraction
from powergossip.runs.progress import Progress
from powergossip.training import compute, elastic, state
from powergossip.training.agreement import PATIENCE, Agreement
from powergossip.training.evaluation import Evaluation
from powergossip.training.event_training import (
    EventTraining,
    PresentParameters,
    Survivors,
    event_driven,
    losses_of,
)
from powergossip.training.first_batch import check_first_batch, check_sizes
from powergossip.training.gradients import Gradients
from powergossip.training.linked import LinkedNetwork, finish, make_links
from powergossip.training.local_optimizers import learning_rate
from powergossip.training.measurements import Hooks, Rows
from powergossip.training.methods import check_method, make_averaging, make_method
from powergossip.training.resuming import load_checkpoint
from powergossip.training.settings import method_options
from powergossip.trees import map_tensors

Position = tuple[int, int, dict[str, Tensor]]  # epoch, step in it, sums of metrics over its steps


class Trainer:
    """Trains the workers of a run. All processes construct it and call its methods together.

    config      # as `settings.checked` returns it
    hooks       # receive rows and facts, on process 0
    resume_from # output folder of a run to resume from its last checkpoint, if it has one, or with
                # config.evaluate_only from the one that config.checkpoint names
    task        # data and models, by default those of the configuration

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
    ):
        c = self.config = config
        self.links = make_links(c, processes)
        if self.links is not None:
            processes = self.links.group
        self.processes, self._hooks = processes, hooks or Hooks()
        self.clock = Clock()
        with processes.agreed():
            self.topology = topologies.make(
                c.topology, c.n_workers, seed=c.seed, options=c.topology_options
            )
            self.device = choose_device(c.device, processes.local_rank)
            if c.torch_compile and not c.evaluate_only:
                compute.check_compiler(self.device)
            stage = {"on": False, "off": True, "auto": None}[c.cuda_aware]
            self.network = Network(
                self.topology,
                processes,
                self.device,
                stage,
                measure=self.clock,
                all_reduce=c.all_reduce,
                losses=losses_of(c),
            )
            self.hint = check_method(c, self.network)  # a sentence for the start of the run
        if self.links is None:
            channel = self.network.channel  # all processes make it together
            self._transport = "none" if channel is None else channel.name
        else:
            self._transport = "mpi"
        self._kernels = kernels.name(kernels.load(self.network))
        self.task = task or processes.one_by_one(self._make_task)
        if c.task_architecture is None:
            c.task_architecture = next(iter(self.task.architectures), None)
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
        with processes.agreed(), _memory_errors(len(self.network.workers)):
            if not c.evaluate_test_data and "valid" not in self.task.samples:
                raise ValueError(
                    "evaluate_test_data=false: use true without validation data, or hold some out "
                    "(validation_ratio)"
                )
            models = [self.task.model(c.task_architecture, c.seed) for _ in self.network.workers]
            self.parameters = Parameters(models, self.device)
            self._check_spectrum_names()
            if not c.evaluate_only:
                if of_user:
                    worker = self.network.workers[0]
                    main = check_first_batch(self.task, c, worker, self.device)
                    self._metric = {"name": main.name, "larger_is_better": main.larger_is_better}
                if c.torch_compile:
                    compute.compile_models(models)
                if not event_driven(c):
                    self.local, self.rule, self._at_epoch = make_method(
                        c, self.network, self.parameters, self.clock, self.steps_per_epoch
                    )
            self._gradients = Gradients(
                self._values,
                self.network,
                self.task,
                self.parameters,
                self.clock,
                self._agreement,
            )
            self._events: EventTraining | None = None
            if event_driven(c) and not c.evaluate_only:
                self._events = EventTraining(
                    self._values,
                    method_options(c),
                    self.network,
                    self.parameters,
                    self._gradients.of_worker,
                    self.steps_per_epoch,
                    self.links,
                    self.clock,
                )
        self._present: list[int] | None = None  # the workers of a checkpoint that is evaluated
        self.rows = Rows(self._hooks, self.network, self._elapsed)
        network, parameters = self._evaluated()
        self.evaluation = Evaluation(
            self._values, network, self.task, parameters, self.steps_per_epoch, self.rows
        )

        self.step = 0  # since the start of the run
        self.position: Position = (0, 0, {})
        self.metrics_bytes = 0  # of metrics.jsonl that belong to the steps so far
        self.workers_before = c.n_workers  # their number in the checkpoint of a resumed run
        self._seconds = 0.0  # of the run, without time lost in interruptions
        self._started = time.perf_counter()
        if resume_from is not None:
            self._resume(resume_from)

    def _evaluated(
        self,
    ) -> tuple[Network | Survivors | LinkedNetwork, Parameters | PresentParameters]:
        """The network and the parameters of the workers that are evaluated."""
        if self.links is not None:
            assert self._events is not None
            return LinkedNetwork(self.network, self.links, self._events.everybody), self.parameters
        if not event_driven(self.config):
            return self.network, self.parameters
        of_present = PresentParameters(self.parameters, self.present)
        return Survivors(self.network, self.present), of_present

    def present(self) -> list[int]:
        """The indices of the hosted workers that are alive."""
        if self._events is not None:
            return self._events.present
        return list(self.network.workers) if self._present is None else self._present

    def _elapsed(self) -> float:
        """Seconds since the start of the run, virtual ones on the virtual clock."""
        if self._events is not None and self.links is None:
            return self._events.clock.now
        return time.perf_counter() - self._started

    def close(self) -> None:
        """End processes of the task, if it has a method `close`."""
        close = getattr(self.task, "close", None)
        if close is not None:
            close()

    def record_order(self, folder: Path) -> None:
        """Write the order of events to this folder, if the configuration asks for it."""
        if self._events is not None and self.config.record_order:
            self._events.record_order(folder)

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

    # --- Construction ---

    def _make_task(self) -> tasks.Task:
        c = self.config
        given: Any = OmegaConf.to_container(c.task_options)
        return tasks.make(
            c.task,
            n_workers=c.n_workers,
            batch_size=c.batch_size,
            seed=c.seed,
            decentralized=c.use_decentralized_data,
            shuffled_ratio=c.decentralized_data_shuffled_ratio,
            dirichlet_alpha=c.decentralized_data_dirichlet_alpha,
            reshuffle=c.reshuffle_data,
            drop_last=c.drop_last,
            data_dir=c.data_dir,
            download=c.download,
            device=self.device,
            task_options=given,
            validation_ratio=c.validation_ratio,
            column=c.decentralized_data_column,
            placement=self._placement(),
            data_processes=c.data_processes,
            architecture=c.task_architecture,
        )

    def _placement(self) -> csr_array | None:
        """The mixing matrix, averaged over its rounds, if shards are placed by their labels."""
        if self.config.decentralized_data_placement == "given":
            return None
        matrices = [r.matrix() for r in self.topology.rounds]
        return csr_array(reduce(add, matrices) / len(matrices))

    def averaging(self, layout: Layout) -> algorithms.Averaging:
        """Build the averaging algorithm of the configuration. Raises ValueError."""
        return make_averaging(self.config, self.network, layout)

    def _check_spectrum_names(self) -> None:
        for name in self.config.spectrum_logging_params:
            if name not in self.parameters.names:
                names = ", ".join(self.parameters.names)
                raise ValueError(f'spectrum_logging_params: no parameter "{name}" among {names}')

    def diffusion_rate(self) -> float | None:
        """γ as configured, or the best for plain gossip on this topology. None without gossip."""
        rate = self.config.get("optimizer_diffusion_rate")
        if rate == "auto":
            return self.topology.best_diffusion_rate
        return None if rate is None else float(rate)

    @property
    def metric(self) -> str:
        """The metric to show: the main one of a task of the user, or else the accuracy."""
        return str(self._metric["name"]) if self._metric else "accuracy"

    def facts(self) -> dict[str, Any]:
        """Metadata of the run: software versions, layout of processes, topology, data."""
        mpi_on_gpu = self.device.type == "cuda" and self._transport == "mpi"
        counts = self.task.label_counts()
        return {
            "processes": self.processes.size,
            "n_workers": self.config.n_workers,
            "threads_per_process": torch.get_num_threads(),
            "device": str(self.device),
            "transport": self._transport,
            "cuda_aware_mpi": cuda_aware_mpi() if mpi_on_gpu else None,
            "messages_staged_in_host_memory": self.network.stage,
            "kernels": self._kernels,
            "diffusion_rate": self.diffusion_rate(),
            "parameters": self.parameters.layout.size,
            "batched_gradients": self._gradients.are_batched,
            "steps_per_epoch": self.steps_per_epoch,
            "samples": dict(self.task.samples),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": self.topology.summary(),
            "start_iteration": (
                self.rule.start_iteration
                if self._events is None and isinstance(self.rule, ddp.DDPHook)
                else None
            ),
            "metric": self._metric,
        } | ({} if counts is None else {"label_counts": counts.tolist()})  # [worker][label]

    # --- Training ---

    @property
    def total_steps(self) -> int:
        """The number of steps at the end of the run."""
        return int(self.config.num_epochs * self.steps_per_epoch)

    @property
    def is_complete(self) -> bool:
        """Whether no step is left."""
        return bool(self.position[0] >= self.config.num_epochs)

    def check_resumption(self) -> None:
        """Raise ValueError if a resumed run already has more than num_epochs epochs, or if its
        order of events would be incomplete.

        With another number of workers, it must have fewer: its checkpoint remains otherwise.
        """
        if self.step and self.config.record_order:
            raise ValueError(
                "record_order=true: use false for a resumed run, whose first events are not known"
            )
        epoch, step, _ = self.position
        if self.is_complete and self.workers_before != self.network.n_workers:
            raise ValueError(
                f"n_workers={self.network.n_workers}: use {self.workers_before}, or a larger "
                f"num_epochs; the run was complete after {epoch} epochs"
            )
        if (epoch, step) > (self.config.num_epochs, 0):
            begun = epoch + (step > 0)
            raise ValueError(
                f"num_epochs={self.config.num_epochs}: use {begun} or more; the run already has "
                f"{self.step} steps"
            )

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
                if self.links is not None:
                    sums = self._train_linked_epoch(epoch, signals, save)
                    bar.update(steps - first_step)
                else:
                    for step in range(first_step, steps):
                        self._train_step(epoch, step, sums)
                        bar.update()
                        self._stop_if_asked(signals, (epoch, step + 1, sums), save)
                with self.links.quiet() if self.links is not None else nullcontext():
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

        On the virtual clock, workers alive then have taken one more step on average.
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

    def _train_step(self, epoch: int, step: int, sums: dict[str, Tensor]) -> None:
        """Train one step and add the batches' metrics to their sums."""
        for name, values in self.train_step(epoch, step).items():
            sums[name] = sums[name] + values if name in sums else values

    def _train_linked_epoch(
        self, epoch: int, signals: Signals, save: Callable[[Position], bool]
    ) -> dict[str, Tensor]:
        """Train an epoch of all processes that are left. Returns the sums of metrics over it."""
        assert self._events is not None
        first, end = epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch
        complete = False
        while not complete:
            with self.clock("averaging"):
                complete = self._events.run_linked(
                    end, lambda: signals.received is not None or self._agreement.has_noted
                )
            taken = self.processes.gather(self._events.steps_between(first, end))
            self.step = end if complete else first + min(taken)
            self._check_norms(epoch)
            number = self._agreement.settle(signals.received)
            if number is not None:
                self._interrupt(number, signals, (epoch, self.step - first, {}), save)
        means = self._events.take_metrics()
        return {name: values * self.steps_per_epoch for name, values in means.items()}

    def gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Add the hosted workers' gradients to parameters.grad. Returns metrics, each [worker]."""
        return self._gradients(epoch, step, self.step)

    def _end_epoch(self, epoch: int, sums: Mapping[str, Tensor], bar: Progress) -> float | None:
        """Log the rows at the end of an epoch. Returns the score, if there was an evaluation."""
        c, score = self.config, None
        if epoch % c.evaluation_interval == 0 or epoch == c.num_epochs:
            if self._events is not None:
                if self.links is None:
                    present = self._events.present
                    sums = {name: values[present] for name, values in sums.items()}
                self.rows("workers", len(self._events.everybody()), epoch)
            with self.clock("evaluation"), compute.not_compiled(c.torch_compile):
                shown, score = self.evaluation(epoch, self.step, sums)
            bar.note(shown)
            if c.log_verbosity > 1 and self.processes.rank == 0:
                bar.write(f"epoch {epoch}: {shown}")
        if epoch in c.spectrum_logging_epochs:
            self.evaluation.log_spectra(epoch)
        for phase, spent in self.clock.phases.items():
            self.rows("phase_seconds", spent.total, epoch, phase=phase, instances=spent.instances)
            if self.processes.rank == 0:
                self._hooks.log_runtime(phase, spent.mean, spent.deviation, spent.instances)
        if self.processes.rank == 0:
            progress = {"state.progress": epoch / c.num_epochs}
            totals = {phase: spent.total for phase, spent in self.clock.phases.items()}
            self._hooks.log_info(progress | {"data_fraction": data_fraction(totals)})
        return score

    def _stop_if_asked(
        self, signals: Signals, position: Position, save: Callable[[Position], bool]
    ) -> None:
        """Save and raise Interrupted if a process has received a signal.

        Here and at the end of an epoch, raise Diverged if a loss was not finite or parameters are
        not.
        """
        epoch, step, _ = position
        number = self._received_signal(signals)
        if number is not None or step == self.steps_per_epoch:
            self._check_norms(epoch)
            number = self._agreement.settle(number or signals.received)
        if number is not None:
            self._interrupt(number, signals, position, save)

    def _check_norms(self, epoch: int) -> None:
        """Note parameters that are not finite."""
        norms = torch.linalg.vector_norm(self.parameters.x, dim=1, dtype=torch.float64)
        for worker, norm in zip(self.network.workers, norms.tolist(), strict=True):
            self._agreement.note(worker, "parameter norm", norm, self.step, epoch + 1)

    def _interrupt(
        self, number: int, signals: Signals, position: Position, save: Callable[[Position], bool]
    ) -> NoReturn:
        """Save and raise Interrupted, in all processes."""
        signals.agreed = True
        text = f"stopped by {signal.Signals(number).name} after step {self.step}"
        text += f" (epoch {position[0] + 1})"
        if save(position):
            text += "; the same command with resume=true resumes there"
        raise Interrupted(text, number)

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

    def _start_of_run(self) -> elastic.Start:
        n_workers, workers = self.network.n_workers, self.network.workers
        state = partial(self.state_dict, self.position)
        rule: Any = None if event_driven(self.config) else self.rule
        return elastic.Start(n_workers, workers, self.steps_per_epoch, state, rule)

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are [worker, ...]."""
        epoch, step, sums = position
        return state.of_models(self.task, self.parameters) | {
            "step": self.step,
            "epoch": epoch,
            "step_in_epoch": step,
            "sums": sums,
            **self._state_of_method(),
            "network": self.network.state_dict(),
            "batched_gradients": self._gradients.are_batched,
            "seconds": time.perf_counter() - self._started,
            "phases": {
                name: [spent.instances, spent.total, spent.squares]
                for name, spent in self.clock.phases.items()
            },
        }

    def _state_of_method(self) -> dict[str, Any]:
        if self._events is not None:
            return {"present": self._events.everybody(), "events": self._events.state_dict()}
        return {"optimizer": self.local.state_dict(), "algorithm": self.rule.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`: for an evaluation, without the method's."""
        moved = partial(map_tensors, lambda tensor: tensor.to(self.device))
        self.step = saved["step"]
        self.position = saved["epoch"], saved["step_in_epoch"], moved(saved["sums"])
        state.load_models(self.task, self.parameters, saved)
        if not self.config.evaluate_only:
            # Earlier versions had no batched gradients.
            self._gradients.resume(saved.get("batched_gradients", False))
            if self._events is not None:
                self._events.load_state_dict(saved["events"])
            else:
                self.local.load_state_dict(moved(saved["optimizer"]))
                self.rule.load_state_dict(moved(saved["algorithm"]))
        self._present = saved.get("present")
        self.network.load_state_dict(saved["network"])
        self._seconds = saved["seconds"]
        for name, values in saved["phases"].items():
            self.clock.phases[name] = PhaseTime(*values)

    def _save(
        self,
        checkpoints: Checkpoints | None,
        metrics_offset: Callable[[], int],
        position: Position,
        score: float | None = None,
    ) -> bool:
        """Write a checkpoint. Returns whether there was a place for it."""
        if checkpoints is None:
            return False

        def facts() -> dict[str, Any]:
            self.rows.take_over()  # all rows until now are there
            return {
                "config": OmegaConf.to_container(self.config),
                "steps_per_epoch": self.steps_per_epoch,
                "metrics_bytes": metrics_offset(),
            }

        with self.clock("checkpoint"):
            now = self.state_dict(position)
            checkpoints.save(self.step, self.network.workers, now, facts, score)
        return True


@contextmanager
def _memory_errors(workers: int) -> Iterator[None]:
    """Raise ValueError if the block needs more memory than there is."""
    try:
        yield
    except RuntimeError as error:  # that of torch's CPU allocator has no type of its own
        if "allocate" not in str(error):
            raise
        raise ValueError(
            f"the memory is too small for the models and messages of {workers} workers in a "
            f"process ({str(error).splitlines()[0]}); use fewer workers or smaller options"
        ) from error
