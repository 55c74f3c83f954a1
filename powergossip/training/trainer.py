"""The trainer: everything between a checked configuration and the rows of a run."""

import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from math import ceil
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from scipy.sparse import csr_array
from torch import Tensor, nn

from powergossip import algorithms, kernels, randomness, tasks, topologies
from powergossip.algorithms import aggregation, ddp, learning
from powergossip.errors import Interrupted
from powergossip.network import Network, Processes, choose_device, cuda_aware_mpi
from powergossip.parameters import Layout, Parameters, trained
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.clock import Clock, PhaseTime, Signals, data_fraction
from powergossip.runs.progress import Progress
from powergossip.training import batched, compute
from powergossip.training.agreement import PATIENCE, Agreement
from powergossip.training.evaluation import Evaluation
from powergossip.training.first_batch import check_first_batch, check_sizes
from powergossip.training.local_optimizers import LocalOptimizer, learning_rate
from powergossip.training.measurements import Hooks, Rows
from powergossip.training.resuming import check_same_run, check_same_run_without_checkpoint
from powergossip.training.settings import (
    data_differ,
    errors_name_keys,
    errors_name_learning_options,
    hook_options,
    method_options,
)
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
            )
            self._check_method()
        channel = self.network.channel  # all processes make it together
        self._transport = "none" if channel is None else channel.name
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
        self._batched: batched.BatchedGradient | None = None
        with processes.agreed(), _memory_errors(len(self.network.workers)):
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
                self._make_rule()
                if self._batches_gradients():
                    self._batched = self._batched_gradient()
                    if c.batched_gradients == "on":
                        batched.check(self._batched, self._first_batches())
        self.rows = Rows(self._hooks, self.network, lambda: time.perf_counter() - self._started)
        self.evaluation = Evaluation(
            self._values, self.network, self.task, self.parameters, self.steps_per_epoch, self.rows
        )
        if c.overlapping and processes.size > 1:
            self._progress_messages_during_backward()

        self.step = 0  # since the start of the run
        self.position: Position = (0, 0, {})
        self.metrics_bytes = 0  # of metrics.jsonl that belong to the steps so far
        self._seconds = 0.0  # of the run, without time lost in interruptions
        self._started = time.perf_counter()
        self._agreement = Agreement(processes)
        if resume_from is not None:
            self._resume(resume_from)

    def close(self) -> None:
        """End processes of the task, if it has a method `close`."""
        close = getattr(self.task, "close", None)
        if close is not None:
            close()

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

    def _check_method(self) -> None:
        """Raise ValueError for bad options of the method, before data are loaded.

        Give `overlapping` its default, which depends on the averaging rule.
        """
        c, layout = self.config, Layout([(2, 2)])
        self.hint, overlapping = "", True  # hint: a sentence for the start of the run
        if c.optimizer in algorithms.AVERAGING:
            averaging = self.averaging(layout)
            learning.check(c.learning, self.network, c.optimizer, averaging)
            overlapping = learning.overlapping(c.learning, averaging)
            self.hint = self._hint(averaging)
        elif c.optimizer in aggregation.AGGREGATIONS:
            owns_momentum = self._aggregation(layout).owns_momentum
            if owns_momentum and c.local_optimizer != "sgd":
                raise ValueError(
                    f"local_optimizer={c.local_optimizer}: {c.optimizer} corrects the momentum of "
                    "sgd; use sgd"
                )
        if c.overlapping is None:
            c.overlapping = overlapping

    def _hint(self, averaging: algorithms.Averaging) -> str:
        """A sentence on learning rules, or nothing where they do not apply."""
        c = self.config
        averages_fully = isinstance(averaging, algorithms.AllReduce)
        if c.learning != learning.DEFAULT or averages_fully or not data_differ(c):
            return ""
        rules = learning.accepting(self.network, c.optimizer, averaging, c.local_optimizer)
        if not rules:
            return ""
        return (
            f"learning rules for data that differ between workers: learning={', '.join(rules)} "
            "(docs/different-data.md)"
        )

    def averaging(self, layout: Layout) -> algorithms.Averaging:
        """Build the averaging algorithm of the configuration. Raises ValueError."""
        given = method_options(self.config)
        with errors_name_keys(self.config.optimizer):
            return algorithms.make(self.config.optimizer, self.network, layout, **given)

    def _aggregation(self, layout: Layout) -> aggregation.Aggregation:
        given = method_options(self.config)
        with errors_name_keys(self.config.optimizer):
            return aggregation.make(self.config.optimizer, self.network, layout, **given)

    def _make_rule(self) -> None:
        """Build the local optimizer and the learning rule."""
        c, parameters, network = self.config, self.parameters, self.network
        self._at_epoch: Callable[[float], None] = lambda epoch: None
        self.rule: learning.Learning
        if c.optimizer in aggregation.AGGREGATIONS:
            aggregate = self._aggregation(parameters.layout)

            def follow(epoch: float) -> None:
                aggregate.at_epoch(epoch)
                aggregate.at_learning_rate(self.local.rate)

            self._at_epoch = follow
            self.local = LocalOptimizer(parameters, c, 0.0 if aggregate.owns_momentum else None)
            self.rule = learning.CentralizedSGD(
                network,
                aggregate,
                parameters,
                self._update,
                weight_decay=self.local.coupled_decay,
                clip=None if aggregate.clips else c.gradient_clipping,
                num_batches_per_step=c.optimizer_num_batches_per_step,
            )
            return
        if c.learning != learning.DEFAULT:
            self._make_gossip_rule()
            return
        self.local = LocalOptimizer(parameters, c)
        if c.optimizer in ddp.HOOKS:
            options = hook_options(c)
            if options["start_iteration"] == ddp.AUTO:
                options["start_iteration"] = self._guided_start()
            with errors_name_keys(c.optimizer):
                self.rule = ddp.DDPHook(
                    network,
                    parameters,
                    self._update,
                    hook=c.optimizer,
                    **options,
                    seed=c.seed,
                    weight_decay=self.local.coupled_decay,
                    clip=c.gradient_clipping,
                )
        else:
            self.rule = learning.DPSGD(
                network,
                self.averaging(parameters.layout),
                parameters,
                self._update,
                overlapping=c.overlapping,
                weight_decay=self.local.coupled_decay,
                clip=c.gradient_clipping,
                local_steps=c.local_steps,
            )

    def _make_gossip_rule(self) -> None:
        """Build a rule of learning.LEARNING."""
        c = self.config
        own = learning.rule(c.learning, c.local_optimizer).owns_momentum
        self.local = LocalOptimizer(
            self.parameters, c, *((0.0, "sgd") if own else (None, c.local_optimizer))
        )
        with errors_name_learning_options(c):
            self.rule = learning.make(
                c.learning,
                self.network,
                self.averaging,
                self.parameters,
                self.local,
                c.local_optimizer,
                overlapping=c.overlapping,
                local_steps=c.local_steps,
                momentum=c.momentum,
                nesterov=c.nesterov and c.momentum > 0,
                adam_beta1=c.adam_beta1,
                adam_beta2=c.adam_beta2,
                adam_epsilon=c.adam_epsilon,
                weight_decay=self.local.coupled_decay,
                clip=c.gradient_clipping,
                **c.learning_options,
            )

    def _guided_start(self) -> int:
        """The first compressed step of PyTorch's hooks for the run as it is planned now.

        A resumed run keeps that of its checkpoint. A warm-up by a factor of 1 is none.
        """
        c, steps = self.config, self.steps_per_epoch
        epochs = c.distributed_lr_warmup_epoch if c.distributed_lr_warmup_factor != 1 else 0
        return ddp.guided_start(c.num_epochs * steps, ceil(min(epochs, c.num_epochs) * steps))

    def _update(self, gradient: Tensor) -> None:
        """The local update of a learning rule."""
        with self.clock("update"):
            self.local.step(gradient)

    def _progress_messages_during_backward(self) -> None:
        for model in self.parameters.models:
            for parameter in trained(model).values():
                parameter.register_post_accumulate_grad_hook(lambda _: self.network.progress())

    def _batches_gradients(self) -> bool:
        """Whether the hosted workers' gradients are computed in one call."""
        c, models = self.config, self.parameters.models
        if c.batched_gradients != "auto" or not tasks.is_in_library(c.task, c.task_architecture):
            return bool(c.batched_gradients == "on")
        plain = not c.torch_compile and c.precision == "fp32"
        first = partial(self.task.batch, self.network.workers[0], 0, 0)
        return plain and batched.by_rule(models, first)

    def _batched_gradient(self) -> batched.BatchedGradient:
        overlapping = self.config.overlapping and self.processes.size > 1
        progress = self.network.progress if overlapping else None
        precision = partial(compute.autocast, self.config.precision, self.device)
        return batched.BatchedGradient(self.task, self.parameters, precision, progress)

    def _first_batches(self) -> list[Any]:
        return [self.task.batch(worker, 0, 0) for worker in self.network.workers]

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
            "batched_gradients": self._batched is not None,
            "steps_per_epoch": self.steps_per_epoch,
            "samples": dict(self.task.samples),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": self.topology.summary(),
            "start_iteration": (
                self.rule.start_iteration if isinstance(self.rule, ddp.DDPHook) else None
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

    def check_epochs(self) -> None:
        """Raise ValueError if a resumed run already has more than num_epochs epochs."""
        epoch, step, _ = self.position
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
        save = partial(self._save, checkpoints, metrics_offset)
        if save_first:
            save(self.position)
        shown = self.processes.rank == 0 and c.log_verbosity > 0
        bar = Progress(c.num_epochs * steps, self.step, shown)
        first, first_step, sums = self.position
        patience = None if self._transport in ("none", "mpi") else PATIENCE
        with bar, Signals(patience=patience) as signals:
            for epoch in range(first, c.num_epochs):
                for step in range(first_step, steps):
                    self._train_step(epoch, step, sums)
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
        """Train one step of all hosted workers. Returns the batches' metrics, each [worker]."""
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

    def gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Add the hosted workers' gradients to parameters.grad. Returns metrics, each [worker]."""
        workers = self.network.workers
        batches: Iterable[Any] = (self._batch(worker, epoch, step) for worker in workers)
        if self._batched is not None:
            batches = list(batches)
            # The last batches of an epoch may differ: some workers have a sample more.
            if batched.fit(batches):
                return self._batched_step(self._batched, batches, epoch)
        collected: dict[str, list[Tensor]] = {}
        for worker, model, batch in zip(workers, self.parameters.models, batches, strict=True):
            with self._errors_name(worker, epoch):
                metrics = self._worker_gradient(worker, model, batch, epoch)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in collected.items()}

    def _batch(self, worker: int, epoch: int, step: int) -> Any:
        with self.clock("data"), self._errors_name(worker, epoch):
            return self.task.batch(worker, epoch, step)

    def _worker_gradient(
        self, worker: int, model: nn.Module, batch: Any, epoch: int
    ) -> dict[str, Tensor]:
        with self.clock("gradient"):
            self._seed_layers(worker)
            with compute.autocast(self._values.precision, self.device):
                loss, metrics = self.task.loss(model, batch)
            self._agreement.note(worker, "loss", loss.item(), self.step, epoch + 1)
            loss.backward()  # also if it is not finite: other processes wait for messages
        return metrics

    def _batched_step(
        self, gradient: batched.BatchedGradient, batches: list[Any], epoch: int
    ) -> dict[str, Tensor]:
        workers = self.network.workers
        with self.clock("gradient"):
            self._seed_layers(workers[0])
            losses, metrics = gradient(batches)
            for worker, loss in zip(workers, losses.tolist(), strict=True):
                self._agreement.note(worker, "loss", loss, self.step, epoch + 1)
        return metrics

    def _seed_layers(self, worker: int) -> None:
        """Seed torch's generator for layers that use it: equal in any layout of processes."""
        seed = randomness.torch_seed(self._values.seed, "layers", worker, self.step)
        randomness.seed_torch(seed, self.device)

    @contextmanager
    def _errors_name(self, worker: int, epoch: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in worker {worker} at step {self.step} (epoch {epoch + 1})")
            raise

    def _end_epoch(self, epoch: int, sums: Mapping[str, Tensor], bar: Progress) -> float | None:
        """Log the rows at the end of an epoch. Returns the score, if there was an evaluation."""
        c, score = self.config, None
        if epoch % c.evaluation_interval == 0 or epoch == c.num_epochs:
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
            norms = torch.linalg.vector_norm(self.parameters.x, dim=1, dtype=torch.float64)
            for worker, norm in zip(self.network.workers, norms.tolist(), strict=True):
                self._agreement.note(worker, "parameter norm", norm, self.step, epoch + 1)
            number = self._agreement.settle(number or signals.received)
        if number is not None:
            signals.agreed = True
            text = f"stopped by {signal.Signals(number).name} after step {self.step}"
            text += f" (epoch {epoch + 1})"
            if save(position):
                text += "; the same command with resume=true resumes there"
            raise Interrupted(text, number)

    def _received_signal(self, signals: Signals) -> int | None:
        """A signal that some process received, in all processes after the same step."""
        return self._agreement.after_step(self.step, signals.received)

    # --- Checkpoints ---

    def _resume(self, folder: Path) -> None:
        """Restore a checkpoint of the run in this folder. Raises BadInput."""
        saved, which = Checkpoints(folder, self.processes), self.config.checkpoint
        entry = saved.describe(which)
        if entry is None:  # killed before the first checkpoint, or a new folder
            with self.processes.agreed():
                if self.config.evaluate_only:
                    raise ValueError(
                        f"evaluate_only=true: {folder} has no {which} checkpoint; use the folder "
                        "of a run that has one"
                    )
                check_same_run_without_checkpoint(folder, self.config)
            return
        with self.processes.agreed():
            check_same_run(folder, entry["facts"]["config"], self.config)
        state = saved.load(self.network.workers, which)
        with self.processes.agreed():
            self._check_same_model(folder, state)
        self.metrics_bytes = entry["facts"]["metrics_bytes"]
        self.load_state_dict(state)

    def _check_same_model(self, folder: Path, state: Mapping[str, Any]) -> None:
        for name in ("x", "buffers"):
            saved, now = state[name].shape[1], getattr(self.parameters, name).shape[1]
            if saved != now:
                raise ValueError(
                    f"the run in {folder} has another model: {saved} elements of {name} for each "
                    f"worker, not {now}; use the same data and version of this program"
                )

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are [worker, ...]."""
        parameters, (epoch, step, sums) = self.parameters, position
        integer_buffers = [_integer_buffers(model) for model in parameters.models]
        return {
            "step": self.step,
            "epoch": epoch,
            "step_in_epoch": step,
            "sums": sums,
            "x": parameters.x,
            "buffers": parameters.buffers,
            "whole_number_buffers": {
                name: torch.stack([buffers[name] for buffers in integer_buffers])
                for name in integer_buffers[0]
            },
            "optimizer": self.local.state_dict(),
            "algorithm": self.rule.state_dict(),
            "network": self.network.state_dict(),
            "batched_gradients": self._batched is not None,
            "carried": _stacked([self.task.carried(model) for model in parameters.models]),
            "seconds": time.perf_counter() - self._started,
            "phases": {
                name: [spent.instances, spent.total, spent.squares]
                for name, spent in self.clock.phases.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`: for an evaluation, without the method's."""
        parameters, device = self.parameters, self.device
        moved = partial(map_tensors, lambda tensor: tensor.to(device))
        self.step = state["step"]
        self.position = state["epoch"], state["step_in_epoch"], moved(state["sums"])
        parameters.x.copy_(state["x"])
        parameters.buffers.copy_(state["buffers"])
        for i, model in enumerate(parameters.models):
            for name, buffer in _integer_buffers(model).items():
                buffer.copy_(state["whole_number_buffers"][name][i])
            self.task.carry(model, {k: v[i].to(device) for k, v in state["carried"].items()})
        if not self.config.evaluate_only:
            # As before: the rounding differs. Earlier versions had no batched gradients.
            several = len(parameters.models) > 1 or self.config.batched_gradients == "on"
            keeps = state.get("batched_gradients", False) and several
            self._batched = (self._batched or self._batched_gradient()) if keeps else None
            self.local.load_state_dict(moved(state["optimizer"]))
            self.rule.load_state_dict(moved(state["algorithm"]))
        self.network.load_state_dict(state["network"])
        self._seconds = state["seconds"]
        for name, values in state["phases"].items():
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
        with self.clock("checkpoint"):
            facts = {
                "config": OmegaConf.to_container(self.config),
                "metrics_bytes": metrics_offset() if self.processes.rank == 0 else 0,
            }
            state = self.state_dict(position)
            checkpoints.save(self.step, self.network.workers, state, facts, score)
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


def _integer_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A model's buffers that are not floating-point, such as batch norm's count of batches."""
    return {name: b for name, b in model.named_buffers() if not b.is_floating_point()}


def _stacked(by_worker: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name] for state in by_worker]) for name in by_worker[0]}
