"""Deep learning on a graph of workers: configuration, `main()`, and hooks.

    mpirun -np 8 python train.py                          eight processes, one worker each
    python train.py n_workers=8 optimizer=all-reduce      one process hosts all eight

As a driver:

    import train
    train.config["topology"] = "torus"
    train.log_metric = my_function     # called on process 0, with what is described at its default
    train.main()

Nothing happens at import. `python train.py --help` lists the keys.
"""

import math
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

import algorithms
import compressors
import configuration
import metrics
import randomness
import runs
import tasks
import topologies
from network import Network, Processes, Stopped, choose_device, cuda_aware_mpi, processes
from network import hosted_workers as hosted
from parameters import Parameters


@dataclass
class Config:
    """Every key, its type and default. What stands behind # is what --help shows."""

    # The run
    n_workers: int | None = None  # workers in all; null: one for each process
    seed: int = 1
    num_epochs: int = 40
    device: str = "auto"  # auto, cpu, cuda or cuda:NUMBER; auto spreads processes over the GPUs
    cuda_aware: str = "auto"  # give GPU memory to MPI? auto asks the MPI library; on, off
    overwrite: bool = False  # allow an output folder that holds a run, which is then lost
    log_verbosity: int = 1  # 0: only the end; 1: a progress bar; 2: and a line for each epoch
    tensorboard: bool = False  # write events for TensorBoard beside metrics.jsonl
    evaluation_interval: int = 1  # epochs between evaluations; the last epoch has one anyway
    evaluate_average_model: bool = True  # evaluate the mean of all workers' models

    # Data and model
    task: str = "Digits"
    task_architecture: str = "CNN"
    batch_size: int = 16  # per worker
    data_dir: str | None = None  # folder with the task's files; null: the usual places
    download: bool = True  # fetch data that is in none of these places
    reshuffle_data: bool = True  # deal the data out anew each epoch; false: workers keep theirs
    use_decentralized_data: bool = False  # sort the data by label before giving each worker a part
    decentralized_data_shuffled_ratio: float = 0.0  # share of the sorted data that is mixed back

    # The local optimizer: SGD with Nesterov momentum
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0001  # not on normalization layers
    lr_schedule_milestones: list[Any] = field(  # [[epoch, factor], ...]: from then on times factor
        default_factory=lambda: [[30.0, 0.1]]
    )
    distributed_lr_warmup_epoch: float = 5.0  # length of the linear warm-up; 0: none
    distributed_lr_warmup_factor: float = 1.0  # the warm-up ends at learning_rate times this

    # Averaging
    optimizer: str = "power-gossip"  # all-reduce, dpsgd, power-gossip, choco, deepsqueeze, moniqua
    topology: str = "ring"  # a name, or the path of an edge list or adjacency file
    topology_options: dict[str, Any] = field(default_factory=dict)  # such as {degree: 4}
    optimizer_diffusion_rate: float | int | str = 1.0  # a number; auto: the best for plain gossip
    optimizer_rank: int = 1  # of power-gossip's messages
    optimizer_num_iterations: int = 2  # of power iteration, a step
    optimizer_warm_start: bool = True  # begin with the last step's directions; false: random ones
    optimizer_round_weights: bool = False  # round directions to their signs
    optimizer_compressor: str = "sign-and-norm"  # of choco and deepsqueeze; see compressors.py
    optimizer_keep_ratio: float = 0.01  # share of the numbers that top-k and random-k send
    optimizer_levels: int = 4  # of qsgd
    optimizer_theta: float = 0.25  # moniqua: bound on the differences of neighbors' numbers
    overlapping: bool = True  # gossip while the gradient is computed; false: after the update

    # What differences between workers look like
    spectrum_logging_params: list[str] = field(default_factory=list)  # names of parameters
    spectrum_logging_epochs: list[int] = field(default_factory=list)
    spectrum_logging_worker_pairs: list[Any] = field(default_factory=list)  # [[0, 1], ...]

    # Kept for published drivers; with MPI they have nothing to say
    distributed_backend: str = "mpi"  # only mpi
    rank: int = 0  # MPI knows it
    distributed_init_file: str | None = None  # MPI needs none


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
_output: runs.Output | None = None


# --- The run -------------------------------------------------------------------------------------


class Diverged(Stopped):
    """A worker's loss, or what its model is measured by, is no longer a finite number."""


def main(arguments: list[str] | None = None) -> None:
    """Train as `config` says, after `arguments` (key=value, --config, --output-dir) changed it.

    Raises BadInput, in all processes, if something asked for cannot be done; Diverged if a
    worker's loss becomes infinite or NaN.
    """
    global _output, output_dir
    who = processes()
    if arguments is not None:
        output_dir = who.agree(lambda: _read(arguments)) or output_dir
    run = who.agree(lambda: _Run(config, who))
    run.load_data()
    try:
        _output = who.agree(lambda: runs.Output(output_dir, run.config) if who.rank == 0 else None)
        if _output is not None:
            log_info(run.facts())
        run.train()
        if _output is not None:
            _report(_output.folder)
    finally:
        if _output is not None:
            _output.close()
        _output = None


class _Run:
    """Everything between a checked configuration and the rows it yields."""

    def __init__(self, asked: DictConfig, who: Processes):
        """Checks what can be checked without data. Raises ValueError."""
        c = self.config = _checked(asked, who)
        self.who = who
        self.topology = topologies.make(
            c.topology, c.n_workers, seed=c.seed, options=c.topology_options
        )
        self.device = choose_device(c.device, who.local_rank)
        stage = {"on": False, "off": True, "auto": None}[c.cuda_aware]
        self.network = Network(self.topology, who, self.device, stage)
        self.clock = runs.Clock()
        self.step = 0  # since the start

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
                reshuffle=c.reshuffle_data,
                data_dir=c.data_dir,
                download=c.download,
                device=self.device,
            )
        )
        self.who.agree(self._build)

    def _build(self) -> None:
        c = self.config
        self.parameters = Parameters(
            [self.task.model(c.task_architecture, c.seed) for _ in self.network.workers],
            self.device,
        )
        self.mean_model = Parameters([self.task.model(c.task_architecture, c.seed)], self.device)
        for name in c.spectrum_logging_params:
            if name not in self.parameters.names:
                names = ", ".join(self.parameters.names)
                raise ValueError(f'spectrum_logging_params: no parameter "{name}" among {names}')
        x = nn.Parameter(self.parameters.x)
        x.grad = self.parameters.grad
        self.optimizer = torch.optim.SGD(
            [x], lr=c.learning_rate, momentum=c.momentum, nesterov=c.momentum > 0, fused=True
        )
        svd_rank = c.optimizer_rank if c.optimizer_compressor == "svd" else None
        options = algorithms.Options(
            diffusion_rate=self.diffusion_rate(),
            rank=c.optimizer_rank,
            num_iterations=c.optimizer_num_iterations,
            warm_start=c.optimizer_warm_start,
            round_weights=c.optimizer_round_weights,
            compressor=c.optimizer_compressor,
            compressor_options=compressors.Options(
                keep_ratio=c.optimizer_keep_ratio, rank=svd_rank, levels=c.optimizer_levels
            ),
            theta=c.optimizer_theta,
            seed=c.seed,
        )
        averaging = algorithms.make(c.optimizer, self.network, self.parameters.layout, options)
        self.algorithm = algorithms.DPSGD(
            self.network,
            averaging,
            self.parameters,
            self._update,
            overlapping=c.overlapping,
            weight_decay=c.weight_decay,
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
            "steps_per_epoch": self.task.steps_per_epoch,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": self.topology.summary(),
        }

    # --- Training ---

    def train(self) -> None:
        """All epochs, each followed by its rows."""
        c, steps = self.config, self.task.steps_per_epoch
        self.started = time.perf_counter()
        show = self.who.rank == 0 and c.log_verbosity > 0
        with tqdm(
            total=c.num_epochs * steps, disable=not show, unit="step", mininterval=0.5, smoothing=0
        ) as bar:
            for epoch in range(c.num_epochs):
                sums = self._train_epoch(epoch, bar)
                if (epoch + 1) % c.evaluation_interval == 0 or epoch + 1 == c.num_epochs:
                    with self.clock("evaluation"):
                        shown = self._evaluate(epoch + 1, sums)
                    bar.set_postfix_str(shown, refresh=False)
                    if c.log_verbosity > 1 and self.who.rank == 0:
                        bar.write(f"epoch {epoch + 1}: {shown}")
                if epoch + 1 in c.spectrum_logging_epochs:
                    self._log_spectra(epoch + 1)
                self._log_clock(epoch + 1)
                if self.who.rank == 0:
                    log_info({"state.progress": (epoch + 1) / c.num_epochs})

    def _train_epoch(self, epoch: int, bar: tqdm) -> dict[str, Tensor]:
        """One epoch; the sums of the batches' metrics over steps, each [worker]."""
        steps = self.task.steps_per_epoch
        sums: dict[str, Tensor] = {}
        for step in range(steps):
            rate = learning_rate(self.config, epoch + (step + 1) / steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with self.clock("gossip"):  # less what else the algorithm calls in between
                batch_metrics = self.algorithm.step(lambda: self._gradient(epoch, step))  # noqa: B023
            for name, values in batch_metrics.items():
                sums[name] = sums[name] + values if name in sums else values
            self.step += 1
            bar.update()
        return sums

    def _gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Fill parameters.grad with the hosted workers' gradients; metrics, each [worker]."""
        self.parameters.grad.zero_()
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

    def _update(self) -> None:
        with self.clock("update"):
            self.optimizer.step()

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

    def _evaluate(self, epoch: int, sums: Mapping[str, Tensor]) -> str:
        """Rows on the models as they are; what the progress bar says of them."""
        network, steps = self.network, self.task.steps_per_epoch
        for name, total in sums.items():
            mean_of_workers = network.gather(total.double() / steps).mean().item()
            self._log(name, mean_of_workers, epoch, split="train")

        by_worker = _table([self.task.evaluate(model) for model in self.parameters.models])
        for name, hosted_values in by_worker.items():
            for worker, value in zip(network.workers, hosted_values, strict=True):
                # the update of the last step is seen here first
                self._refuse_divergence(worker, f"test {name}", value, epoch)
            values = network.gather(torch.tensor(hosted_values, dtype=torch.float64))
            for worker, value in enumerate(values.tolist()):
                self._log(name, value, epoch, split="test", worker=worker)

        x, buffers = self.parameters.x, self.parameters.buffers
        mean, mean_buffers = network.mean(x), network.mean(buffers)
        squares = {"params_only": (x - mean).double().square().sum(1)}
        squares["full_state_vector"] = squares["params_only"] + (
            buffers - mean_buffers
        ).double().square().sum(1)
        for kind, distances in squares.items():
            rms = network.mean(distances).sqrt().item()
            self._log("consensus_distance", rms, epoch, type=kind)
        shown = f"consensus distance {network.mean(squares['params_only']).sqrt().item():.2g}"

        uncompressed = int(network.bits_to_all(self.parameters.layout.size, self.step)[0])
        self._log("uncompressed_gossip_bits", uncompressed, epoch)
        if self.config.evaluate_average_model:
            self.mean_model.x.copy_(mean)
            self.mean_model.buffers.copy_(mean_buffers)
            part = self.task.evaluate(
                self.mean_model.models[0], part=(self.who.rank, self.who.size)
            )
            names = list(part)
            sums_of_all = self.who.sum(np.array(list(part.values()))).tolist()
            of_mean_model = _table([dict(zip(names, sums_of_all, strict=True))])
            for name, (value,) in of_mean_model.items():
                self._log(name, value, epoch, split="test_avg")
                if name == "accuracy":
                    shown = f"mean model {100 * value:.1f} %, {shown}"
        return shown

    def _log_spectra(self, epoch: int) -> None:
        """Singular values of the difference of two workers' matrices, largest first."""
        layout, names = self.parameters.layout, self.parameters.names
        for parameter in self.config.spectrum_logging_params:
            (span,) = layout.spans([names.index(parameter)])
            shape = layout.shapes[names.index(parameter)]
            everyone = self.network.gather(self.parameters.x[:, span])  # [worker, number]
            for first, second in self.config.spectrum_logging_worker_pairs:
                difference = (everyone[first] - everyone[second]).view(shape[0], -1)
                for index, value in enumerate(torch.linalg.svdvals(difference).tolist()):
                    self._log(
                        "spectrum",
                        value,
                        epoch,
                        index=index,
                        workers=f"{first}-{second}",
                        parameter=parameter,
                    )

    def _log_clock(self, epoch: int) -> None:
        for phase, durations in self.clock.durations.items():
            seconds = np.array(durations)
            self._log("phase_seconds", seconds.sum(), epoch, phase=phase)
            if self.who.rank == 0:
                log_runtime(phase, seconds.mean(), seconds.std(), len(seconds))


def learning_rate(c: Any, epoch: float) -> float:
    """The learning rate at a (fractional) epoch.

    From learning_rate linearly to learning_rate · distributed_lr_warmup_factor during the first
    distributed_lr_warmup_epoch epochs (Goyal et al. 2017, arXiv:1706.02677, § 2.2), and times
    `factor` from each milestone (epoch, factor) on.
    """
    rate = c.learning_rate
    if c.distributed_lr_warmup_epoch > 0:
        share = min(epoch / c.distributed_lr_warmup_epoch, 1.0)
        rate *= 1 + (c.distributed_lr_warmup_factor - 1) * share
    for milestone, factor in c.lr_schedule_milestones:
        if epoch >= milestone:
            rate *= factor
    return float(rate)


def _table(sums: list[dict[str, float]]) -> dict[str, list[float]]:
    """[{metric: sum, "count": samples}, ...] as {metric: [mean, ...]}."""
    names = [name for name in sums[0] if name != "count"]
    return {name: [row[name] / row["count"] for row in sums] for name in names}


# --- Before and after ----------------------------------------------------------------------------


def _read(arguments: list[str]) -> str | None:
    description = (__doc__ or "").split("\n\n")[0]
    return configuration.read_command_line(config, arguments, description)


def _checked(asked: DictConfig, who: Processes) -> Any:
    """A copy of the configuration with its blanks filled in. ValueError for impossible values."""
    c = runs.plain_copy(asked)  # no checks in the hot path
    c.n_workers = who.size if c.n_workers is None else c.n_workers
    hosted(c.n_workers, who.size)

    demand = partial(runs.demand, c)
    for key in (
        "num_epochs",
        "batch_size",
        "evaluation_interval",
        "optimizer_rank",
        "optimizer_num_iterations",
    ):
        demand(key, lambda v: v >= 1, "1 or more")
    for key in ("seed", "rank", "log_verbosity"):
        demand(key, lambda v: v >= 0, "0 or more")
    demand("learning_rate", lambda v: v > 0 and math.isfinite(v), "a number above 0")
    demand("distributed_lr_warmup_factor", lambda v: v > 0 and math.isfinite(v), "a number above 0")
    demand("distributed_lr_warmup_epoch", lambda v: v >= 0, "a number of epochs, or 0 for none")
    demand("momentum", lambda v: 0 <= v < 1, "a number from 0 to below 1")
    demand("weight_decay", lambda v: v >= 0 and math.isfinite(v), "0 or more")
    demand("decentralized_data_shuffled_ratio", lambda v: 0 <= v <= 1, "a share from 0 to 1")
    demand("cuda_aware", lambda v: v in ("auto", "on", "off"), "auto, on or off")
    demand("distributed_backend", lambda v: v == "mpi", "mpi, the only one")
    demand(
        "optimizer_diffusion_rate",
        lambda v: v == "auto" or (not isinstance(v, str) and v > 0 and math.isfinite(v)),
        "a number above 0, or auto",
    )
    demand(
        "lr_schedule_milestones",
        lambda v: all(_numbers(pair, 2) and pair[0] >= 0 and pair[1] > 0 for pair in v),
        "a list of [epoch, factor], such as [[150, 0.1], [225, 0.1]]",
    )
    demand(
        "spectrum_logging_worker_pairs",
        lambda v: all(
            _numbers(pair, 2) and all(isinstance(n, int) and n in range(c.n_workers) for n in pair)
            for pair in v
        ),
        f"a list of pairs of workers, 0 to {c.n_workers - 1}",
    )
    if c.optimizer not in algorithms.AVERAGING:
        choices = ", ".join(algorithms.AVERAGING)
        raise ValueError(f'optimizer "{c.optimizer}" is unknown; choose from {choices}')
    return c


def _numbers(values: Any, count: int) -> bool:
    """Whether this is a list of so many numbers."""
    try:
        return len(values) == count and all(math.isfinite(value) for value in values)
    except TypeError:
        return False


def _report(folder: Path) -> None:
    rows = metrics.load(folder)
    if rows.empty:  # a driver's log_metric has them
        return
    figure = folder / runs.FIGURE
    metrics.figure(rows, figure)
    print(f"\n{metrics.summary(rows)}\n\nrows: {folder / metrics.FILE}\nfigure: {figure}")


if __name__ == "__main__":
    configuration.run_entry_point(main)
