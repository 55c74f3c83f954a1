"""Deep learning on a graph of workers: configuration, `main()`, and hooks.

    mpirun -np 8 python train.py                          eight processes, one worker each
    python train.py n_workers=8 optimizer=all-reduce      one process hosts all eight

As a driver:

    import train
    train.config["topology"] = "torus"
    train.log_metric = my_function     # called on process 0, with what is described at its default
    train.main()

Nothing happens at import. `python train.py --help` lists the keys.

A run that was killed goes on from its last checkpoint, in the same or another layout of processes:

    mpirun -np 8 python train.py --output-dir output/mine resume=true
"""

import math
import platform
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from powergossip import algorithms, randomness, tasks, topologies
from powergossip.algorithms import aggregation, ddp, dgc
from powergossip.errors import BadInput, Interrupted, Stopped
from powergossip.network import Network, Processes, choose_device, cuda_aware_mpi, processes
from powergossip.parameters import Parameters
from powergossip.runs import configuration, figures, metrics, tables
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.clock import Clock, PhaseTime, Signals
from powergossip.runs.output import FIGURE, Output
from powergossip.training.evaluation import Evaluation
from powergossip.training.local_optimizers import DECOUPLED, LOCAL_OPTIMIZERS, learning_rate
from powergossip.training.settings import (
    averaging_options,
    centralized_options,
    checked,
    hook_options,
)

V = TypeVar("V")


@dataclass
class Config:
    """Every key, its type and default. What stands behind # is what --help shows."""

    # The run
    n_workers: int | None = None  # workers in all; null: one for each process
    seed: int = 1
    num_epochs: int = 40
    max_steps_per_epoch: int | None = None  # leave out the rest of each epoch; null: nothing
    device: str = "auto"  # auto, cpu, cuda or cuda:NUMBER; auto spreads processes over the GPUs
    cuda_aware: str = "auto"  # give GPU memory to MPI? auto asks the MPI library; on, off
    overwrite: bool = False  # allow an output folder that holds a run, which is then lost
    resume: bool = False  # go on with the run in the output folder, from its last checkpoint
    checkpoint_interval: int = 5  # epochs between checkpoints; the end of the run has one anyway
    log_verbosity: int = 1  # 0: only the end; 1: a progress bar; 2: and a line for each epoch
    tensorboard: bool = False  # write events for TensorBoard beside metrics.jsonl
    evaluation_interval: int = 1  # epochs between evaluations; the last epoch has one anyway
    evaluate_average_model: bool = True  # evaluate the mean of all workers' models
    evaluate_training_data: bool = False  # evaluate on all training data too, not augmented
    mean_model_statistics: str = "averaged"  # of batch norm: averaged, or recalibrated on data
    recalibration_batches: int = 10  # per worker

    # Data and model
    task: str = "Digits"
    task_architecture: str = "CNN"
    task_options: dict[str, Any] = field(default_factory=dict)  # such as {normalization: group}
    batch_size: int = 16  # per worker
    data_dir: str | None = None  # folder with the task's files; null: the usual places
    download: bool = True  # fetch data that is in none of these places
    reshuffle_data: bool = True  # deal the data out anew each epoch; false: workers keep theirs
    use_decentralized_data: bool = False  # sort the data by label before giving each worker a part
    decentralized_data_shuffled_ratio: float = 0.0  # share of the sorted data that is mixed back
    decentralized_data_dirichlet_alpha: float | None = None  # or: mix labels by Dirichlet(alpha)

    # The local optimizer
    local_optimizer: str = "sgd"  # sgd or adamw
    learning_rate: float = 0.05
    momentum: float = 0.9  # of sgd
    nesterov: bool = True  # of sgd
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0001  # not on normalization layers; of adamw: decoupled
    gradient_clipping: float | None = None  # scale a worker's gradient down to this norm; null: no
    lr_schedule_milestones: list[Any] = field(  # [[epoch, factor], ...]: from then on times factor
        default_factory=lambda: [[30.0, 0.1]]
    )
    distributed_lr_warmup_epoch: float = 5.0  # length of the linear warm-up; 0: none
    distributed_lr_warmup_factor: float = 1.0  # the warm-up ends at learning_rate times this

    # Averaging
    optimizer: str = "power-gossip"  # all-reduce, dpsgd, power-gossip, choco, deepsqueeze, moniqua;
    #   or compressed gradients: powersgd, dgc, ddp-powersgd, ddp-batched-powersgd
    topology: str = "ring"  # a name, or the path of an edge list or adjacency file
    topology_options: dict[str, Any] = field(default_factory=dict)  # such as {degree: 4}
    optimizer_diffusion_rate: float | int | str = 1.0  # a number; auto: the best for plain gossip
    optimizer_rank: int = 1  # of power-gossip's messages
    optimizer_num_iterations: int = 2  # of power iteration, a step
    optimizer_warm_start: bool = True  # begin with the last step's directions; false: random ones
    optimizer_round_weights: bool = False  # round directions to their signs
    optimizer_compressor: str = "sign-and-norm"  # of choco and deepsqueeze; see compressors/
    optimizer_keep_ratio: float = 0.01  # share of the numbers that top-k and random-k send
    optimizer_levels: int = 4  # of qsgd
    optimizer_theta: float = 0.25  # moniqua: bound on the differences of neighbors' numbers
    overlapping: bool = True  # gossip while the gradient is computed; false: after the update
    local_steps: int = 1  # gossip in every so many-th step only

    # Compressed gradients, which all workers apply alike: powersgd, dgc, PyTorch's DDP hooks
    optimizer_min_compression_rate: float = 2.0  # tensors that would compress less go as they are
    optimizer_start_compressing_after: int = 0  # powersgd: steps of plain all-reduce at the start
    optimizer_num_batches_per_step: int = 1  # powersgd, dgc: batches between two messages
    optimizer_start_iteration: int = 2  # of the hooks: plain all-reduce before it
    optimizer_error_feedback: bool = True  # of the hooks
    optimizer_sample_ratio: float = 0.01  # dgc: share of the numbers that the threshold is from
    optimizer_max_adaptation_iterations: int = 10  # dgc: corrections of that threshold, at most
    optimizer_momentum_masking: bool = True  # dgc: forget the momentum of what is sent
    optimizer_warmup_epochs: int = 0  # dgc: epochs in which the share falls to the keep ratio
    optimizer_warmup_ratios: list[float] = field(default_factory=list)  # dgc: one for each of them
    optimizer_fp16_values: bool = False  # dgc: send values with 16 bits
    optimizer_int32_indices: bool = True  # dgc: send positions with 32 bits; false: 64

    # What differences between workers look like
    spectrum_logging_params: list[str] = field(default_factory=list)  # names of parameters
    spectrum_logging_epochs: list[int] = field(default_factory=list)
    spectrum_logging_worker_pairs: list[Any] = field(default_factory=list)  # [[0, 1], ...]

    # Kept for published drivers; with MPI they have nothing to say
    distributed_backend: str = "mpi"  # only mpi
    rank: int = 0  # MPI knows it
    distributed_init_file: str | None = None  # MPI needs none


# Keys that may change when a run goes on.
_FREE_TO_CHANGE = (
    "checkpoint_interval",
    "cuda_aware",
    "data_dir",
    "device",
    "download",
    "log_verbosity",
    "num_epochs",
    "overwrite",
    "rank",
    "resume",
    "tensorboard",
)

config: DictConfig = OmegaConf.structured(Config)
output_dir: str | None = None  # None: a new dated folder under output/


# --- Hooks: drivers put their own in place; called on process 0 ----------------------------------


def log_metric(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
    """A measurement. values: value, epoch, bits and messages (sent by worker 0), seconds."""
    if _output is not None:
        _output.write(name, values, tags)


def log_info(info: Mapping[str, Any]) -> None:
    """Facts about the run, such as {"state.progress": 0.5}; kept in OUTPUT_DIR/info.json."""
    if _output is not None:
        _output.add_info(info)


def log_runtime(label: str, mean: float, std: float, instances: int) -> None:
    """Seconds a phase took, over its `instances` so far. The rows phase_seconds have the sums."""


# What the default hooks write to, on process 0 while main() runs.
_output: Output | None = None


# --- The run -------------------------------------------------------------------------------------


class Diverged(Stopped):
    """A worker's loss, or what its model is measured by, is no longer a finite number."""


def main(arguments: list[str] | None = None) -> None:
    """Train as `config` says, after `arguments` (key=value, --config, --output-dir) changed it.

    Raises BadInput, in all processes, if something asked for cannot be done; Diverged if a
    worker's loss becomes infinite or NaN; errors.Interrupted when a signal has ended the run.
    """
    global _output, output_dir
    who = processes()
    if arguments is not None:
        output_dir = who.agree(lambda: _read(arguments)) or output_dir
    run = who.agree(lambda: _Run(config, who))
    run.load_data()
    try:
        run.take_up(output_dir)
        opened = partial(Output, output_dir, run.config, run.config.resume, run.offset)
        _output = who.agree(lambda: opened() if who.rank == 0 else None)
        run.checkpoints = Checkpoints(
            Path(who.broadcast(str(_output.folder) if _output is not None else "")), who
        )
        if _output is not None:
            log_info(run.facts())
            if run.config.log_verbosity > 0:
                print(configuration.changed(run.config, Config))
        run.train()
        if _output is not None:
            _report(_output.folder)
    finally:
        if _output is not None:
            _output.close()
        _output = None


class Learning(Protocol):
    """A learning algorithm: algorithms.DPSGD, aggregation.CentralizedSGD, ddp.DDPHook."""

    def step(self, compute_gradient: Callable[[], V]) -> V:
        """One step with what `compute_gradient` adds to parameters.grad; returns its result."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on; tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        ...


Position = tuple[int, int, dict[str, Tensor]]  # epoch, step in it, sums of metrics over its steps


class _Run:
    """Everything between a checked configuration and the rows it yields."""

    def __init__(self, asked: DictConfig, who: Processes):
        """Checks what can be checked without data. Raises ValueError."""
        c = self.config = checked(asked, who)
        self.who = who
        self.topology = topologies.make(
            c.topology, c.n_workers, seed=c.seed, options=c.topology_options
        )
        self.device = choose_device(c.device, who.local_rank)
        stage = {"on": False, "off": True, "auto": None}[c.cuda_aware]
        self.network = Network(self.topology, who, self.device, stage)
        self.clock = Clock()
        self.network.measure = self.clock
        self.step = 0  # since the start
        self.offset = 0  # bytes of metrics.jsonl that belong to the steps so far
        self.seconds = 0.0  # since the start, without what was before an interruption and is lost
        self.position: Position = (0, 0, {})
        self.schedules: list[Callable[[float], None]] = []  # told the epoch before each step
        self.checkpoints: Checkpoints | None = None  # where to save
        self.next_check = 0  # the step after which processes ask each other for signals
        self.last_check = 0, time.perf_counter()

    def load_data(self) -> None:
        """The task, its data, and a model for each hosted worker. Raises BadInput."""
        c = self.config
        self.task = self.who.one_by_one(
            lambda: tasks.make(
                c.task,
                n_workers=c.n_workers,
                batch_size=c.batch_size,
                seed=c.seed,
                decentralized=c.use_decentralized_data,
                shuffled_ratio=c.decentralized_data_shuffled_ratio,
                dirichlet_alpha=c.decentralized_data_dirichlet_alpha,
                reshuffle=c.reshuffle_data,
                data_dir=c.data_dir,
                download=c.download,
                device=self.device,
                task_options=c.task_options,
            )
        )
        self.who.agree(self._build)

    def _build(self) -> None:
        c = self.config
        self.steps_per_epoch = min(
            self.task.steps_per_epoch, c.max_steps_per_epoch or self.task.steps_per_epoch
        )
        self.parameters = Parameters(
            [self.task.model(c.task_architecture, c.seed) for _ in self.network.workers],
            self.device,
        )
        if c.overlapping and self.who.size > 1:
            for model in self.parameters.models:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(lambda _: self.network.progress())
        self.mean_model = Parameters([self.task.model(c.task_architecture, c.seed)], self.device)
        self.evaluation = Evaluation(
            c,
            self.network,
            self.task,
            self.parameters,
            self.mean_model,
            self.steps_per_epoch,
            self._log,
            self._refuse_divergence,
        )
        for name in c.spectrum_logging_params:
            if name not in self.parameters.names:
                names = ", ".join(self.parameters.names)
                raise ValueError(f'spectrum_logging_params: no parameter "{name}" among {names}')
        self.optimizer = LOCAL_OPTIMIZERS[c.local_optimizer](nn.Parameter(self.parameters.x), c)
        # x ← (1 − η λ) x, which torch's optimizer would do to normalization layers too.
        decoupled = c.weight_decay if c.local_optimizer in DECOUPLED else 0.0
        self.decoupled_decay = [
            (self.parameters.x[:, span], decoupled)
            for span in (self.parameters.decay_spans() if decoupled else [])
        ]
        self.algorithm = self._learning(0.0 if decoupled else c.weight_decay)

    def _learning(self, weight_decay: float) -> Learning:
        """The learning algorithm by its name."""
        c = self.config
        if c.optimizer in aggregation.AGGREGATIONS:
            return self._centralized(weight_decay)
        if c.optimizer in ddp.HOOKS:
            return ddp.DDPHook(
                self.network,
                self.parameters,
                self._update,
                hook=c.optimizer,
                **hook_options(c),
                seed=c.seed,
                weight_decay=weight_decay,
                clip=c.gradient_clipping,
            )
        return algorithms.DPSGD(
            self.network,
            self._averaging(),
            self.parameters,
            self._update,
            overlapping=c.overlapping,
            weight_decay=weight_decay,
            clip=c.gradient_clipping,
            local_steps=c.local_steps,
        )

    def _averaging(self) -> algorithms.Averaging:
        c = self.config
        options = averaging_options(c, self.diffusion_rate())
        return algorithms.make(c.optimizer, self.network, self.parameters.layout, options)

    def _centralized(self, weight_decay: float) -> Learning:
        c = self.config
        corrects_momentum = c.optimizer == "dgc"  # which clips too
        aggregate = aggregation.AGGREGATIONS[c.optimizer](
            self.network, self.parameters.layout, centralized_options(c)
        )
        if isinstance(aggregate, dgc.DGCAggregation):
            self.schedules.append(aggregate.at_epoch)
        return aggregation.CentralizedSGD(
            self.network,
            aggregate,
            self.parameters,
            self._update,
            weight_decay=weight_decay,
            clip=None if corrects_momentum else c.gradient_clipping,
            num_batches_per_step=c.optimizer_num_batches_per_step,
        )

    def diffusion_rate(self) -> float:
        """γ as configured, or the best for plain gossip on this topology."""
        asked = self.config.optimizer_diffusion_rate
        if asked == "auto":
            return self.topology.best_diffusion_rate
        return float(asked)

    def facts(self) -> dict[str, Any]:
        """What a reader of the results may want to know of the circumstances."""
        who = self.who
        aware = cuda_aware_mpi() if self.device.type == "cuda" and who.size > 1 else None
        return {
            "processes": who.size,
            "n_workers": self.config.n_workers,
            "threads_per_process": torch.get_num_threads(),
            "device": str(self.device),
            "cuda_aware_mpi": aware,
            "messages_staged_in_host_memory": self.network.stage,
            "diffusion_rate": self.diffusion_rate(),
            "parameters": self.parameters.layout.size,
            "steps_per_epoch": self.steps_per_epoch,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": self.topology.summary(),
        } | self._facts_of_data()

    def _facts_of_data(self) -> dict[str, Any]:
        counts = self.task.label_counts()
        return {} if counts is None else {"label_counts": counts.tolist()}  # [worker][label]

    # --- Training ---

    def train(self) -> None:
        """All epochs that are left, each followed by its rows."""
        c, steps = self.config, self.steps_per_epoch
        self.started = time.perf_counter() - self.seconds
        show = self.who.rank == 0 and c.log_verbosity > 0
        bar = tqdm(
            total=c.num_epochs * steps,
            initial=min(self.step, c.num_epochs * steps),
            disable=not show,
            unit="step",
            mininterval=0.5,
            smoothing=0,
        )
        first, first_step, sums = self.position
        with bar, Signals() as self.signals:
            for epoch in range(first, c.num_epochs):
                self._train_epoch(epoch, first_step, sums, bar)
                score: float | None = None
                if (epoch + 1) % c.evaluation_interval == 0 or epoch + 1 == c.num_epochs:
                    with self.clock("evaluation"):
                        shown, score = self.evaluation(epoch + 1, self.step, sums)
                    bar.set_postfix_str(shown, refresh=False)
                    if c.log_verbosity > 1 and self.who.rank == 0:
                        bar.write(f"epoch {epoch + 1}: {shown}")
                if epoch + 1 in c.spectrum_logging_epochs:
                    self.evaluation.log_spectra(epoch + 1)
                self._log_clock(epoch + 1)
                if self.who.rank == 0:
                    log_info({"state.progress": (epoch + 1) / c.num_epochs})
                first_step, sums = 0, {}
                if (epoch + 1) % c.checkpoint_interval == 0 or epoch + 1 == c.num_epochs:
                    self._save((epoch + 1, 0, {}), score)

    def _train_epoch(self, epoch: int, first_step: int, sums: dict[str, Tensor], bar: tqdm) -> None:
        """An epoch from a step on; adds the batches' metrics to their sums, each [worker]."""
        steps = self.steps_per_epoch
        for step in range(first_step, steps):
            rate = learning_rate(self.config, epoch + (step + 1) / steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            for schedule in self.schedules:
                schedule(epoch + step / steps)
            # Compressing and mixing; what the algorithm calls in between has its own phases.
            with self.clock("averaging"):
                batch_metrics = self.algorithm.step(lambda: self._gradient(epoch, step))  # noqa: B023
            for name, values in batch_metrics.items():
                sums[name] = sums[name] + values if name in sums else values
            self.step += 1
            bar.update()
            if (number := self._asked_to_stop()) is not None:
                self._save((epoch, step + 1, sums))
                name = signal.Signals(number).name
                raise Interrupted(
                    f"stopped by {name} after step {self.step} (epoch {epoch + 1}); "
                    f"the same command with resume=true goes on from there",
                    number,
                )

    def _asked_to_stop(self) -> int | None:
        """The signal that some process received, in all processes at the same step.

        To ask the others costs time: it is done about three times a second, by process 0's clock.
        """
        if self.who.size == 1:
            return self.signals.received
        if self.step < self.next_check:
            return None
        now = time.perf_counter()
        steps = self.step - self.last_check[0]
        per_step = (now - self.last_check[1]) / max(1, steps)
        self.last_check = self.step, now
        asked = self.who.gather((self.signals.received, max(1, int(0.3 / per_step))))
        self.next_check = self.step + asked[0][1]
        return next((number for number, _ in asked if number is not None), None)

    def _gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Add the hosted workers' gradients to parameters.grad; metrics, each [worker]."""
        collected: dict[str, list[Tensor]] = {}
        for worker, model in zip(self.network.workers, self.parameters.models, strict=True):
            try:
                batch_metrics = self._worker_gradient(worker, model, epoch, step)
            except Exception as error:
                error.add_note(f"in worker {worker} at step {self.step} (epoch {epoch + 1})")
                raise
            for name, value in batch_metrics.items():
                collected.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in collected.items()}

    def _worker_gradient(
        self, worker: int, model: nn.Module, epoch: int, step: int
    ) -> dict[str, Tensor]:
        with self.clock("data"):
            batch = self.task.batch(worker, epoch, step)
        with self.clock("gradient"):
            # For layers that draw from torch's generator: the same in any layout of processes.
            torch.manual_seed(randomness.torch_seed(self.config.seed, "layers", worker, self.step))
            loss, batch_metrics = self.task.loss(model, batch)
            self._refuse_divergence(worker, "loss", loss.item(), epoch + 1)
            loss.backward()
        return batch_metrics

    def _refuse_divergence(self, worker: int, what: str, value: float, epoch: int) -> None:
        """Raises Diverged if the value is not finite; epoch counts from 1."""
        if not math.isfinite(value):
            raise Diverged(
                f"diverged: worker {worker}'s {what} is {value} at step {self.step} "
                f"(epoch {epoch}); try a smaller learning_rate or optimizer_diffusion_rate"
            )

    def _update(self, gradient: Tensor) -> None:
        (x,) = self.optimizer.param_groups[0]["params"]
        x.grad = gradient
        with self.clock("update"):
            rate = self.optimizer.param_groups[0]["lr"]
            for part, decay in self.decoupled_decay:
                part.mul_(1 - rate * decay)
            self.optimizer.step()

    # --- Checkpoints ---

    def take_up(self, folder: str | None) -> None:
        """Go on where the run in this folder was, if so configured. Raises BadInput."""
        c, who = self.config, self.who
        if not c.resume:
            return
        if folder is None:
            raise BadInput("resume=true: say with --output-dir which run is to go on")
        found = Checkpoints(Path(folder), who)
        entry = found.describe()
        if entry is None:  # killed before the first checkpoint, or not begun
            who.agree(lambda: self._refuse_another_run_without_checkpoint(Path(folder)))
            return
        who.agree(lambda: self._refuse_another_run(folder, entry["facts"]["config"]))
        self.offset = entry["facts"]["metrics_bytes"]
        state = found.load(self.network.workers)
        who.agree(lambda: self._refuse_another_model(folder, state))
        self._restore(state)

    def _refuse_another_run_without_checkpoint(self, folder: Path) -> None:
        """Its rows would be lost."""
        file = folder / "config.yaml"
        if file.exists():
            saved = OmegaConf.to_container(OmegaConf.load(file))
            assert isinstance(saved, dict)
            self._refuse_another_run(str(folder), {str(key): v for key, v in saved.items()})

    def _refuse_another_run(self, folder: str, saved: Mapping[str, Any]) -> None:
        now = OmegaConf.to_container(self.config)
        assert isinstance(now, dict)
        differing = [
            f"{key}={now.get(key)} (was {saved.get(key)})"
            for key in sorted({*now, *saved})
            if key not in _FREE_TO_CHANGE and now.get(key) != saved.get(key)
        ]
        if differing:
            raise ValueError(
                f"the run in {folder} cannot go on with {', '.join(differing)}; "
                "leave that as it was, or use another --output-dir"
            )

    def _refuse_another_model(self, folder: str, state: Mapping[str, Any]) -> None:
        for name in ("x", "buffers"):
            saved, now = state[name].shape[1], getattr(self.parameters, name).shape[1]
            if saved != now:
                raise ValueError(
                    f"the run in {folder} is of another model: its workers have {saved} numbers "
                    f"({name}), not {now}; use the same data and version of this program"
                )

    def _state(self, position: Position) -> dict[str, Any]:
        """All that the next step depends on; tensors are [worker, ...]."""
        (x,) = self.optimizer.param_groups[0]["params"]
        parameters, (epoch, step, sums) = self.parameters, position
        whole_buffers = [whole_number_buffers(model) for model in parameters.models]
        return {
            "step": self.step,
            "epoch": epoch,
            "step_in_epoch": step,
            "sums": sums,
            "x": parameters.x,
            "buffers": parameters.buffers,
            "whole_number_buffers": {
                name: torch.stack([buffers[name] for buffers in whole_buffers])
                for name in whole_buffers[0]
            },
            "optimizer": {
                name: None if value is None else torch.as_tensor(value)
                for name, value in self.optimizer.state[x].items()
            },
            "algorithm": self.algorithm.state_dict(),
            "network": self.network.state_dict(),
            "carried": _stacked([self.task.carried(model) for model in parameters.models]),
            "seconds": time.perf_counter() - self.started,
            "phases": {
                name: [spent.instances, spent.total, spent.squares]
                for name, spent in self.clock.phases.items()
            },
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        parameters, on = self.parameters, self.device
        self.step = state["step"]
        self.position = state["epoch"], state["step_in_epoch"], _moved(state["sums"], on)
        parameters.x.copy_(state["x"])
        parameters.buffers.copy_(state["buffers"])
        for i, model in enumerate(parameters.models):
            for name, buffer in whole_number_buffers(model).items():
                buffer.copy_(state["whole_number_buffers"][name][i])
            self.task.carry(model, {k: v[i].to(on) for k, v in state["carried"].items()})
        (x,) = self.optimizer.param_groups[0]["params"]
        self.optimizer.state[x].update(_moved(state["optimizer"], on))
        self.algorithm.load_state_dict(_moved(state["algorithm"], on))
        self.network.load_state_dict(state["network"])
        self.seconds = state["seconds"]
        for name, values in state["phases"].items():
            self.clock.phases[name] = PhaseTime(*values)

    def _save(self, position: Position, score: float | None = None) -> None:
        if self.checkpoints is None:
            return
        with self.clock("checkpoint"):
            facts = {
                "config": OmegaConf.to_container(self.config),
                "metrics_bytes": 0 if _output is None else _output.rows.synced_offset(),
            }
            self.checkpoints.save(
                self.step, self.network.workers, self._state(position), facts, score
            )

    # --- Measuring ---

    def _log(self, name: str, value: float, epoch: int, **tags: Any) -> None:
        if self.who.rank == 0:
            values = {
                "value": value,
                "epoch": epoch,
                "bits": int(self.network.bits[0]),
                "messages": int(self.network.messages[0]),
                "seconds": time.perf_counter() - self.started,
            }
            log_metric(name, values, tags)

    def _log_clock(self, epoch: int) -> None:
        for phase, spent in self.clock.phases.items():
            self._log("phase_seconds", spent.total, epoch, phase=phase, instances=spent.instances)
            if self.who.rank == 0:
                log_runtime(phase, spent.mean, spent.deviation, spent.instances)


def whole_number_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A model's buffers of whole numbers, such as batch norm's count of batches."""
    return {name: b for name, b in model.named_buffers() if not b.is_floating_point()}


def _stacked(by_worker: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([of[name] for of in by_worker]) for name in by_worker[0]}


def _moved(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _moved(value, device) for key, value in tree.items()}
    return [_moved(value, device) for value in tree] if isinstance(tree, list) else tree


# --- Before and after ----------------------------------------------------------------------------


def _read(arguments: list[str]) -> str | None:
    description = (__doc__ or "").split("\n\n")[0]
    return configuration.read_command_line(config, arguments, description).output_dir


def _report(folder: Path) -> None:
    rows = metrics.load(folder)
    if rows.empty:  # a driver's log_metric has them
        return
    figure = folder / FIGURE
    figures.figure(rows, figure)
    print(f"\n{tables.summary(rows)}\n\nrows: {folder / metrics.FILE}\nfigure: {figure}")


def command() -> None:
    """Run as a program: main() with the command line; bad input is one sentence, exit code 2."""
    configuration.run_entry_point(main)


if __name__ == "__main__":
    command()
