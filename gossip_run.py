"""Consensus on a graph of workers: how fast their matrices come to agree, and for how many bits.

    python gossip_run.py n_workers=8                      one process hosts all eight
    mpirun -np 8 python gossip_run.py                     eight processes, one worker each
    python gossip_run.py n_workers=8 algorithm=[sign_choco,power_gossip] num_steps=1000
    python gossip_run.py n_workers=8 algorithm=all        every algorithm, over its grid of settings

As a driver:

    import gossip_run
    gossip_run.config["topology"] = "torus"
    gossip_run.log_metric = my_function    # called on process 0, with what is described there
    gossip_run.main()

The experiment is that of Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425. Nothing happens at
import. `python gossip_run.py --help` lists the keys.

An algorithm of your own: its class and row in algorithms/ (a compressor's: in compressors/) and
a row in ALGORITHMS here; starting data of your own: a row in DATA.

Axes: worker (hosted here), setting (of one algorithm's grid), D numbers of a worker's matrix.
Symbols: x_i worker i's matrix; x̄_0 the mean of all workers' at the start; γ the diffusion rate.
"""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from powergossip import algorithms, checks, compressors, topologies
from powergossip.network import Network, Processes, choose_device, processes
from powergossip.network import hosted_workers as hosted
from powergossip.parameters import Layout
from powergossip.runs import configuration, figures, metrics, tables
from powergossip.runs.clock import Clock
from powergossip.runs.output import FIGURE, Output, plain_copy


@dataclass
class Config:
    """Every key, its type and default. What stands behind # is what --help shows."""

    # The run
    n_workers: int | None = None  # workers in all; null: one for each process
    seed: int = 42
    num_steps: int = 5000  # at most 500 of them for uncompressed, chebyshev and finite_time
    device: str = "auto"  # auto, cpu, cuda or cuda:NUMBER; auto spreads processes over the GPUs
    overwrite: bool = False  # allow an output folder that holds a run, which is then lost
    log_verbosity: int = 1  # 0: only the end; 1: a progress bar; 2: and a line for each setting
    tensorboard: bool = False  # write events for TensorBoard beside metrics.jsonl

    # What is averaged, and between whom
    data_type: str = "random"  # random, offset, sparse, log-normal, low-rank, faces, lfw
    matrix_size: int = 100  # rows and columns; images (faces, lfw) have their own
    data_dir: str | None = None  # folder for the faces; null: scikit-learn's own
    topology: str = "ring"  # a name, or the path of an edge list or adjacency file
    topology_options: dict[str, Any] = field(default_factory=dict)  # such as {degree: 4}

    # How
    algorithm: Any = "power_gossip"  # a name, a list of names, or all; see gossip_run.ALGORITHMS
    compression_rank: int = 1  # of power_gossip and svd; top-k and random-k send as much as it
    compression_num_iterations: int = 1  # of power_gossip's power iteration, a step
    compression_levels: int = 4  # of qsgd

    # Grids, logarithmic. Algorithms without a grid run at hyperparameter_range_max.
    hyperparameter_num_samples: int = 20  # diffusion rates
    hyperparameter_range_min: float = 1e-4
    hyperparameter_range_max: float = 1.308
    diffusion_rate: float | int | str | None = None  # in place of all these; auto: best for gossip
    theta_num_samples: int = 10  # of moniqua: bounds on the differences of neighbors' numbers
    theta_range_min: float = 0.1
    theta_range_max: float = 10.0
    moniqua_num_samples: int = 10  # diffusion rates of moniqua, each with every theta


config: DictConfig = OmegaConf.structured(Config)
output_dir: str | None = None  # None: a new dated folder under output/


# --- Hooks: drivers put their own in place; called on process 0 ----------------------------------


def log_metric(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
    """A measurement: "error", (1/n) Σ_i ‖x_i − x̄_0‖²; or "diverged", at which step.

    values: value, epoch (the step), bits and messages (sent by worker 0), seconds. tags: algorithm,
    and of an algorithm with a grid its diffusion_rate and theta, as strings.
    """
    if _output is not None:
        _output.write(name, values, tags)


def log_info(info: Mapping[str, Any]) -> None:
    """Facts about the run, such as {"state.progress": 0.5}; kept in OUTPUT_DIR/info.json."""
    if _output is not None:
        _output.add_info(info)


def log_runtime(label: str, mean: float, std: float, instances: int) -> None:
    """Seconds a step took with all settings that shared it; the label is the algorithm's name."""


# What the default hooks write to, on process 0 while main() runs.
_output: Output | None = None


# --- What can be chosen by name ------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """An algorithm as this experiment uses it."""

    averaging: str  # a row of algorithms.AVERAGING or algorithms.CONSENSUS_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)  # of algorithms.Options
    grid: tuple[str, ...] = ()  # what is swept: diffusion_rate, theta
    max_steps: int | None = None


# As published: methods of the family of plain gossip have agreed to rounding by then.
_SOON_DONE = 500
_RATE = ("diffusion_rate",)

ALGORITHMS: dict[str, Method] = {
    "uncompressed": Method("dpsgd", max_steps=_SOON_DONE),
    "power_gossip": Method("power-gossip"),
    "power_gossip_random": Method("power-gossip", {"warm_start": False}),
    "power_gossip_signs": Method("power-gossip", {"round_weights": True}),
    "power_gossip_random_signs": Method(
        "power-gossip", {"warm_start": False, "round_weights": True}
    ),
    "sign_choco": Method("choco", {"compressor": "sign-and-norm"}, _RATE),
    "topk_choco": Method("choco", {"compressor": "top-k"}, _RATE),
    "randomk_choco": Method("choco", {"compressor": "random-k"}, _RATE),
    "svd_choco": Method("choco", {"compressor": "svd"}, _RATE),
    "qsgd_choco": Method("choco", {"compressor": "qsgd"}, _RATE),
    "fp_choco": Method("choco", {"compressor": "identity"}, _RATE),
    "sign_deepsqueeze": Method("deepsqueeze", {"compressor": "sign-and-norm"}, _RATE),
    "topk_deepsqueeze": Method("deepsqueeze", {"compressor": "top-k"}, _RATE),
    "moniqua": Method("moniqua", grid=("diffusion_rate", "theta")),
    "chebyshev": Method("chebyshev", max_steps=_SOON_DONE),
    "finite_time": Method("finite-time", max_steps=_SOON_DONE),
}

Matrices = Callable[[int], Tensor]  # worker → its matrix, float32 [row, column]


def _random(c: Any) -> Matrices:
    """Of N(0, 1). Worker i's is what torch.manual_seed(seed + i); torch.randn(size, size) gives."""

    def matrix(worker: int) -> Tensor:
        generator = torch.Generator().manual_seed(c.seed + worker)
        return torch.randn(c.matrix_size, c.matrix_size, generator=generator)

    return matrix


def _offset(c: Any) -> Matrices:
    """Random, with i added to worker i's: the workers differ most by a matrix of rank 1."""
    random = _random(c)
    return lambda worker: random(worker) + worker


def _sparse(c: Any) -> Matrices:
    """Zeros, with a 1 at worker i's position i."""
    numbers = c.matrix_size**2
    if c.n_workers > numbers:
        raise ValueError(
            f"data_type=sparse puts worker i's 1 at position i, but matrix_size={c.matrix_size} "
            f"has {numbers} positions for n_workers={c.n_workers}; use a larger matrix_size"
        )

    def matrix(worker: int) -> Tensor:
        flat = torch.zeros(numbers)
        flat[worker] = 1
        return flat.view(c.matrix_size, c.matrix_size)

    return matrix


def _log_normal(c: Any) -> Matrices:
    """exp of random: a few large entries."""
    random = _random(c)
    return lambda worker: random(worker).exp()


def _low_rank(c: Any) -> Matrices:
    """Random singular vectors, singular values k^−2 for k = 1, 2, …"""

    def matrix(worker: int) -> Tensor:
        generator = torch.Generator().manual_seed(c.seed + worker)
        u, v = torch.linalg.qr(torch.randn(2, c.matrix_size, c.matrix_size, generator=generator)).Q
        return u * torch.arange(1.0, c.matrix_size + 1) ** -2 @ v.mT

    return matrix


def _faces(c: Any) -> Matrices:
    """Worker i's is the i-th of the shuffled Olivetti faces, 64 × 64, from scikit-learn."""
    from sklearn.datasets import fetch_olivetti_faces

    try:
        found = fetch_olivetti_faces(
            data_home=c.data_dir,
            shuffle=True,
            random_state=np.random.RandomState(0),
            n_retries=1,
            delay=0.1,
        )
    except OSError as error:
        raise ValueError(
            f"data_type=faces: the Olivetti faces cannot be fetched ({error}); use data_dir=FOLDER "
            f"with scikit-learn's olivetti_py3.pkz, or data_type=lfw or random"
        ) from error
    return _images(c, found.images)


def _lfw(c: Any) -> Matrices:
    """Worker i's is the i-th of 200 small photographs that scikit-image ships, 25 × 25.

    The first 100 are of faces (from Labeled Faces in the Wild), the others of something else.
    """
    try:
        from skimage.data import lfw_subset
    except ImportError as error:
        raise ValueError(
            "data_type=lfw needs scikit-image, which is not installed: pip install scikit-image, "
            "or use another data_type"
        ) from error
    return _images(c, lfw_subset())


def _images(c: Any, images: np.ndarray) -> Matrices:
    """images [image, row, column]. ValueError if there are too few, or of another matrix_size."""
    count, size, _ = images.shape
    if c.n_workers > count:
        raise ValueError(f"data_type={c.data_type} has {count} images; use n_workers ≤ {count}")
    if c.matrix_size not in (size, Config.matrix_size):  # the default was not asked for
        raise ValueError(
            f"matrix_size={c.matrix_size}: data_type={c.data_type} has images of {size} × {size}; "
            f"use matrix_size={size}, or leave it out"
        )
    return lambda worker: torch.from_numpy(images[worker]).float()


# Each takes the configuration, and raises ValueError for what it cannot serve.
DATA: dict[str, Callable[[Any], Matrices]] = {
    "random": _random,
    "offset": _offset,
    "sparse": _sparse,
    "log-normal": _log_normal,
    "low-rank": _low_rank,
    "faces": _faces,
    "lfw": _lfw,
}


# --- The run -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Gossip as `config` says, after `arguments` (key=value, --config, --output-dir) changed it.

    Raises BadInput, in all processes, if something asked for cannot be done.
    """
    global _output, output_dir
    who = processes()
    if arguments is not None:
        output_dir = who.agree(lambda: _read(arguments)) or output_dir
    run = who.agree(lambda: _Run(config, who))
    run.load_data()
    try:
        _output = who.agree(lambda: Output(output_dir, run.config) if who.rank == 0 else None)
        if _output is not None:
            log_info(run.facts())
            if run.config.log_verbosity > 0:
                print(configuration.changed(run.config, Config))
        run.sweep()
        if _output is not None:
            _report(_output.folder)
    finally:
        if _output is not None:
            _output.close()
        _output = None


Setting = dict[str, float]  # what an algorithm's grid chooses

# Settings share their steps in batches of so many numbers, all rows of x together. With an
# algorithm's other tensors that is, on a CPU, what its caches hold; on a GPU, about 2 GiB.
_TOGETHER = {"cpu": 2**18, "cuda": 2**26}

_DIVERGED = 100.0  # times the error of the start


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
        self.settings = {name: self._settings(ALGORITHMS[name]) for name in c.algorithm}
        self._refuse_impossible()

    def _settings(self, method: Method) -> list[Setting]:
        """The grid of an algorithm; for one without, the one setting."""
        c = self.config
        low, high = c.hyperparameter_range_min, c.hyperparameter_range_max
        if c.diffusion_rate is not None:
            rates = [self.diffusion_rate()]
        elif not method.grid:
            rates = [high]
        else:
            both = "theta" in method.grid
            count = c.moniqua_num_samples if both else c.hyperparameter_num_samples
            rates = np.geomspace(low, high, count).tolist()
        thetas = np.geomspace(c.theta_range_min, c.theta_range_max, c.theta_num_samples).tolist()
        values = {"diffusion_rate": rates, "theta": thetas}
        names = ["diffusion_rate", *(name for name in method.grid if name != "diffusion_rate")]
        return [
            dict(zip(names, chosen, strict=True))
            for chosen in product(*(values[name] for name in names))
        ]

    def diffusion_rate(self) -> float:
        """γ as configured, or the best for plain gossip on this topology."""
        asked = self.config.diffusion_rate
        if asked != "auto":
            return float(asked)
        try:
            return self.topology.best_diffusion_rate
        except ValueError as error:
            raise ValueError(f"diffusion_rate=auto: {error}") from error

    def _refuse_impossible(self) -> None:
        """ValueError for an algorithm that cannot run on this topology or with these options."""
        network = Network(self.topology, self.who, self.device)
        has_spectrum = self.topology.symmetric and self.topology.period == 1
        for name, settings in self.settings.items():
            method, rank = ALGORITHMS[name], self.config.compression_rank
            if method.averaging in algorithms.CONSENSUS_ONLY and not has_spectrum:
                raise ValueError(
                    f"algorithm={name} follows from the spectrum of I - W, which "
                    f'topology "{self.topology.name}" has not, being directed or time-varying; '
                    f"use a static undirected one, such as ring"
                )
            if method.options.get("round_weights") and rank != 1:
                raise ValueError(
                    f"compression_rank={rank}: {name} rounds a single direction; use 1"
                )
            try:
                self.averaging(name, settings[:1], network, Layout([(2, 2)]))
            except ValueError as error:
                raise ValueError(f"algorithm={name}: {error}") from error

    def load_data(self) -> None:
        """The starting matrices. Raises BadInput."""
        who, c = self.who, self.config
        matrices = who.one_by_one(lambda: DATA[c.data_type](c))
        self.start = who.agree(lambda: self._start(matrices))  # [worker, D]
        sums = [part.sum(0, dtype=torch.float64) for part in _in_blocks(self.start)]
        total = who.sum(torch.stack(sums).sum(0).cpu().numpy())
        self.mean = torch.from_numpy(total / c.n_workers).to(self.device)  # x̄_0 [D], float64

    def _start(self, matrices: Matrices) -> Tensor:
        """Of the hosted workers: [worker, D]. ValueError for what is no finite number."""
        c = self.config
        count = hosted(c.n_workers, self.who.size)
        first = self.who.rank * count
        x = torch.empty(0)
        for index in range(count):
            matrix = matrices(first + index)
            if not matrix.isfinite().all():
                raise ValueError(
                    f"data_type={c.data_type}: worker {first + index}'s starting data hold NaN or "
                    f"infinity; use finite numbers"
                )
            if index == 0:
                x = torch.empty(count, matrix.numel())
                self.layout = Layout([matrix.shape])
                c.matrix_size = matrix.shape[0]
            x[index] = matrix.flatten()
        return x.to(self.device)

    def facts(self) -> dict[str, Any]:
        """What a reader of the results may want to know of the circumstances."""
        return {
            "processes": self.who.size,
            "n_workers": self.config.n_workers,
            "threads_per_process": torch.get_num_threads(),
            "device": str(self.device),
            "matrix": list(self.layout.shapes[0]),
            "settings": {name: len(settings) for name, settings in self.settings.items()},
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": self.topology.summary(),
        }

    # --- Gossiping ---

    def num_steps(self, name: str) -> int:
        """Of an algorithm by name."""
        limit = ALGORITHMS[name].max_steps
        return min(self.config.num_steps, limit or self.config.num_steps)

    def sweep(self) -> None:
        """All settings of all algorithms."""
        self.started = time.perf_counter()
        self.done = 0
        self.steps_of_all = sum(
            len(settings) * self.num_steps(name) for name, settings in self.settings.items()
        )
        show = self.who.rank == 0 and self.config.log_verbosity > 0
        with tqdm(
            total=self.steps_of_all, disable=not show, unit="step", mininterval=0.5, smoothing=0
        ) as bar:
            for name, settings in self.settings.items():
                bar.set_description(name, refresh=False)
                clock = Clock()
                size = max(1, _TOGETHER[self.device.type] // self.start.numel())
                for first in range(0, len(settings), size):
                    self._gossip(name, settings[first : first + size], clock, bar)
                spent = clock.phases[name]
                if self.who.rank == 0:
                    log_runtime(name, spent.mean, spent.deviation, spent.instances)

    def _gossip(self, name: str, settings: list[Setting], clock: Clock, bar: tqdm) -> None:
        """Settings of one algorithm, all at once: each has copies of all workers."""
        batch, last = _Batch(self, name, settings), self.num_steps(name)
        for step in range(last + 1):
            if is_logged(step) or step == last:
                before = len(batch.settings)
                batch.measure(step)
                self._progress(bar, (before - len(batch.settings)) * (last - step))
                if self.who.rank == 0:
                    log_info({"state.progress": self.done / self.steps_of_all})
                if not batch.settings:
                    return
            if step < last:
                with clock(name):
                    batch.step()
                self._progress(bar, len(batch.settings))

    def _progress(self, bar: tqdm, steps: int) -> None:
        self.done += steps
        bar.update(steps)

    def averaging(
        self, name: str, settings: Sequence[Setting], network: Network, layout: Layout
    ) -> algorithms.Averaging:
        """The algorithm with one setting for each copy of the network."""
        c = self.config
        chosen: dict[str, Any] = {
            key: torch.tensor([s[key] for s in settings]).repeat_interleave(network.hosted)
            for key in settings[0]
        }
        rank, numbers = c.compression_rank, layout.size
        kept = compressors.TopK(rank=rank).kept(*layout.shapes[0])
        options = algorithms.Options(
            rank=rank,
            num_iterations=c.compression_num_iterations,
            compressor_options=compressors.Options(
                keep_ratio=kept / numbers, rank=rank, levels=c.compression_levels
            ),
            seed=c.seed,
            **chosen,
            **ALGORITHMS[name].options,
        )
        return algorithms.make(ALGORITHMS[name].averaging, network, layout, options)

    def log(self, name: str, step: int, value: float, sent: tuple[int, int], tags: Any) -> None:
        """A row, on process 0."""
        if self.who.rank == 0:
            bits, messages = sent
            values = {
                "value": value,
                "epoch": step,
                "bits": bits,
                "messages": messages,
                "seconds": time.perf_counter() - self.started,
            }
            log_metric(name, values, tags)
            ended = name == "diverged" or step == self.num_steps(tags["algorithm"])
            if ended and self.config.log_verbosity > 1:
                setting = ", ".join(f"{key} {value}" for key, value in tags.items())
                tqdm.write(f"{setting}: {name} {value:.4g} at step {step}")


class _Batch:
    """Settings of one algorithm under way together, with a copy of all workers for each.

    settings  # those that have not diverged
    x         # [setting · worker, D]
    """

    def __init__(self, run: _Run, name: str, settings: list[Setting]):
        self.settings, self.x = settings, run.start.repeat(len(settings), 1)
        self._run, self._name = run, name
        self._sent = 0, 0  # bits and messages of worker 0, in the networks before this one
        self._network, self._averaging = self._build()
        # Where all workers agree from the start, what their numbers are tells what is large.
        start, size = self._errors()[0].item(), run.mean.square().sum().item()
        self._limit = _DIVERGED * (start if start > 1e-9 * size else size)

    def _build(self) -> tuple[Network, algorithms.Averaging]:
        run = self._run
        network = Network(run.topology, run.who, run.device, copies=len(self.settings))
        return network, run.averaging(self._name, self.settings, network, run.layout)

    def step(self) -> None:
        self._network.run(self._averaging.step(self.x))

    def measure(self, step: int) -> None:
        """A row for each setting; those that have diverged are then taken out."""
        run, errors = self._run, self._errors()
        fine = (errors <= self._limit).tolist()  # NaN is not
        for setting, error, converges in zip(self.settings, errors.tolist(), fine, strict=True):
            name, value = ("error", error) if converges else ("diverged", step)
            run.log(name, step, value, self._sent_by_worker_0(), self._tags(setting))
        if not all(fine):
            self._keep([index for index, converges in enumerate(fine) if converges])

    def _errors(self) -> Tensor:
        """(1/n) Σ_i ‖x_i − x̄_0‖²: float64 [setting], the same to the bit in all processes."""
        mean = self._run.mean
        squares = torch.cat([(part - mean).square_().sum(1) for part in _in_blocks(self.x)])
        return self._network.gather(squares).view(len(self.settings), -1).mean(1)

    def _sent_by_worker_0(self) -> tuple[int, int]:
        """Bits and messages since the start, in any one setting."""
        bits, messages = self._sent
        return bits + int(self._network.bits[0]), messages + int(self._network.messages[0])

    def _tags(self, setting: Setting) -> dict[str, str]:
        grid = ALGORITHMS[self._name].grid
        return {"algorithm": self._name, **{key: str(setting[key]) for key in grid}}

    def _keep(self, kept: list[int]) -> None:
        """Go on with these settings, from where they are; the others cost no more time."""
        network, state = self._network, self._averaging.state_dict()
        self.settings = [self.settings[index] for index in kept]
        if not kept:
            return
        copies = torch.arange(network.rows, device=network.device).view(network.copies, -1)
        rows = copies[kept].flatten()
        self.x = self.x[rows]
        self._sent = self._sent_by_worker_0()
        self._network, self._averaging = self._build()
        self._network.round = network.round
        self._averaging.load_state_dict(_rows_of(state, rows))


def is_logged(step: int) -> bool:
    """Whether a step's errors become rows: 0 to 9, 10 to 90 by 10, then by 100 (and the last)."""
    return step % (1 if step < 10 else 10 if step < 100 else 100) == 0


def _in_blocks(x: Tensor) -> Sequence[Tensor]:
    """x [row, D] in pieces of some rows: double precision of all at once would take its memory."""
    return x.split(max(1, 2**19 // x.shape[1]))


def _rows_of(state: Any, rows: Tensor) -> Any:
    """A state_dict, the tensors of which are [worker, ...], of some workers only."""
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, Mapping):
        return {key: _rows_of(value, rows) for key, value in state.items()}
    return [_rows_of(value, rows) for value in state] if isinstance(state, list) else state


# --- Before and after ----------------------------------------------------------------------------


def _read(arguments: list[str]) -> str | None:
    description = (__doc__ or "").split("\n\n")[0]
    return configuration.read_command_line(config, arguments, description).output_dir


def checked(asked: DictConfig, who: Processes) -> Any:
    """A copy of the configuration with its blanks filled in. ValueError for impossible values."""
    c = plain_copy(asked)
    c.n_workers = who.size if c.n_workers is None else c.n_workers
    hosted(c.n_workers, who.size)
    demand = partial(checks.require, c)

    def positive(value: Any) -> bool:
        return not isinstance(value, str) and 0 < value < math.inf

    for key in (
        "num_steps",
        "matrix_size",
        "compression_rank",
        "compression_num_iterations",
        "hyperparameter_num_samples",
        "theta_num_samples",
        "moniqua_num_samples",
    ):
        demand(key, lambda v: v >= 1, "1 or more")
    demand("compression_levels", lambda v: 1 <= v <= 127, "a number from 1 to 127")
    for key in ("seed", "log_verbosity"):
        demand(key, lambda v: v >= 0, "0 or more")
    for what in ("hyperparameter", "theta"):
        low, high = f"{what}_range_min", f"{what}_range_max"
        for key in (low, high):
            demand(key, positive, "a number above 0")
        demand(low, lambda v: v <= c[high], f"at most {high}={c[high]}")  # noqa: B023
    demand(
        "diffusion_rate",
        lambda v: v is None or v == "auto" or positive(v),
        "a number above 0, auto, or null for the grid",
    )
    names = [c.algorithm] if isinstance(c.algorithm, str) else c.algorithm
    if not isinstance(names, ListConfig | list) or not names:
        raise ValueError(f"algorithm={c.algorithm}: use a name, a list of names, or all")
    if "all" in names:
        names = list(ALGORITHMS)
    for key, chosen, known in (
        ("algorithm", names, ALGORITHMS),
        ("data_type", [c.data_type], DATA),
    ):
        for name in chosen:
            if name not in known:
                raise ValueError(f'{key} "{name}" is unknown; choose from {", ".join(known)}')
    c.algorithm = list(dict.fromkeys(names))
    return c


def _report(folder: Path) -> None:
    rows = metrics.load(folder)
    if "error" not in set(rows["name"]):  # a driver's log_metric has them
        return
    figure = folder / FIGURE
    figures.consensus_figure(rows, figure)
    table = tables.consensus_summary(rows)
    print(f"\n{table}\n\nrows: {folder / metrics.FILE}\nfigure: {figure}")


def command() -> None:
    """Run as a program: main() with the command line; bad input is one sentence, exit code 2."""
    configuration.run_entry_point(main)


if __name__ == "__main__":
    command()
