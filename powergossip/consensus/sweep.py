"""Gossip of many settings at once, and a row for each measurement.

Axes: setting (of one algorithm's grid), worker (hosted by this process), D elements of a worker's
matrix. Symbols: x_i worker i's matrix, x̄_0 the mean of all workers' starting matrices.
"""

import math
import platform
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from powergossip import algorithms, checks, compressors, kernels, topologies
from powergossip.algorithms import trials
from powergossip.algorithms.rates import AUTO
from powergossip.checks import BadValue
from powergossip.consensus.config_checks import checked
from powergossip.consensus.data import DATA, Matrices
from powergossip.consensus.grids import Setting, grid, num_steps
from powergossip.consensus.methods import ALGORITHMS
from powergossip.network import Network, Processes, choose_device
from powergossip.network import hosted_workers as hosted
from powergossip.network.processes import OF_FILES
from powergossip.parameters import Layout
from powergossip.runs.clock import Clock, PhaseTime
from powergossip.runs.metrics import Hooks, Row
from powergossip.state_trees import map_tensors
from powergossip.user_functions import one_sentence

# Elements of x in a batch of settings, by type of device. x and the state of an algorithm then fit
# in the caches of a CPU, and take about 2 GiB on a GPU.
BATCH_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}

_IN_CACHES = 2**16  # elements that are copied to double precision at a time
_DIVERGED = 100.0  # times the error at the start


class Sweep:
    """All settings of the configured algorithms, from the same starting matrices.

    batch_elements limits the size of x for the settings that are run concurrently. None gives
    BATCH_ELEMENTS. All processes construct a sweep at the same time, and call `run` at the same
    time.

    Args:
        config: Checked configuration, with n_workers, the list of algorithms, and the true
            matrix_size.

    Attributes:
        topology: Topology of the configuration.
        settings: Settings of each algorithm's grid.
        layout: Layout of a worker's matrix.
        start: Starting matrices [worker, D].
        mean: x̄_0 [D], float64.

    Raises:
        BadInput: In all processes, for a configuration that cannot be run.
    """

    def __init__(self, config: DictConfig, processes: Processes, batch_elements: int | None = None):
        self.processes = processes
        with processes.agreed():
            c = self.config = checked(config, processes)
            self.topology = topologies.make(
                c.topology, c.n_workers, seed=c.seed, options=c.topology_options
            )
            self.device = choose_device(c.device, processes.local_rank)
            self.settings = {name: grid(c, ALGORITHMS[name], self.topology) for name in c.algorithm}
            self._check_algorithms()
        if processes.size > 1:
            processes.check_same({"the graphs": self.topology.fingerprint}, OF_FILES)
        self._kernels = kernels.name(kernels.load_for(processes, self.device))
        matrices = processes.one_by_one(lambda: DATA[c.data_type](c))
        with processes.agreed():
            self.start, self.layout = self._starting_matrices(matrices)
            checks.between("compression_rank", c.compression_rank, 1, min(self.layout.shapes[0]))
        c.matrix_size = self.layout.shapes[0][0]
        sums = [part.sum(0, dtype=torch.float64) for part in _in_blocks(self.start)]
        total = processes.sum(torch.stack(sums).sum(0).cpu().numpy())
        self.mean = torch.from_numpy(total / c.n_workers).to(self.device)
        elements = batch_elements or BATCH_ELEMENTS[self.device.type]
        self._settings_per_batch = max(1, elements // self.start.numel())

    def _check_algorithms(self) -> None:
        """Raise ValueError for an algorithm that cannot run on this topology or with this rank."""
        network = Network(self.topology, self.processes, self.device)
        has_spectrum = self.topology.symmetric and self.topology.period == 1
        for name, settings in self.settings.items():
            method, rank = ALGORITHMS[name], self.config.compression_rank
            if method.averaging in algorithms.CONSENSUS_ONLY and not has_spectrum:
                raise BadValue(
                    "topology",
                    self.topology.name,
                    f"a static undirected topology, such as ring, for algorithm={name}, which is "
                    f"computed from the spectrum of I - W",
                )
            if method.options.get("round_weights") and rank != 1:
                raise BadValue(
                    "compression_rank", rank, f"1 for {name}, which rounds a single direction"
                )
            # With the largest rate, so that the only warning about a rate comes before the run.
            largest = max(settings, key=lambda setting: setting["diffusion_rate"])
            rate: Any = {"diffusion_rate": AUTO} if self.config.diffusion_rate == AUTO else {}
            try:
                with one_sentence("its constructor"):
                    make: Any = partial(self.averaging, name, [largest], **rate)
                    make(network, Layout([(2, 2)]))
            except ValueError as error:
                raise ValueError(f"algorithm={name}: {error}") from error
            if trials.are_needed(method.averaging, method.options):
                trials.try_averaging(f"algorithm={name}", self.topology, make)

    def _starting_matrices(self, matrices: Matrices) -> tuple[Tensor, Layout]:
        """[worker, D] of the hosted workers. Raises ValueError for NaN and infinity."""
        c = self.config
        count = hosted(c.n_workers, self.processes.size)
        first = self.processes.rank * count
        rows = []
        for worker in range(first, first + count):
            matrix = matrices(worker)
            if not matrix.isfinite().all():
                raise BadValue(
                    "data_type",
                    c.data_type,
                    f"finite starting matrices: worker {worker}'s contains NaN or infinity",
                )
            rows.append(matrix)
        layout = Layout([rows[0].shape])
        return torch.stack([matrix.flatten() for matrix in rows]).to(self.device), layout

    def facts(self) -> dict[str, Any]:
        """Return metadata of the run: layout of processes, grid sizes, versions, topology."""
        return {
            "processes": self.processes.size,
            "n_workers": self.config.n_workers,
            "threads_per_process": torch.get_num_threads(),
            "device": str(self.device),
            "kernels": self._kernels,
            "matrix": list(self.layout.shapes[0]),
            "settings": {name: len(settings) for name, settings in self.settings.items()},
            "python": platform.python_version(),
            "torch": torch.__version__,
            "topology": self.topology.summary(),
        }

    def tags(self, name: str, setting: Setting) -> dict[str, str]:
        """The tags of the rows of an algorithm's setting."""
        method = ALGORITHMS[name]
        swept = method.needs_grid or len(self.settings[name]) > 1
        grid = method.grid if swept else ()
        return {"algorithm": name, **{key: str(setting[key]) for key in grid}}

    def num_steps(self, name: str) -> int:
        """Return the number of steps of an algorithm."""
        return num_steps(self.config, name)

    @property
    def total_steps(self) -> int:
        """Steps of all settings of all algorithms together."""
        return sum(len(settings) * self.num_steps(name) for name, settings in self.settings.items())

    def run(self, hooks: Hooks) -> None:
        """Gossip with all settings of all algorithms."""
        log = _Log(self, hooks)
        for name, settings in self.settings.items():
            clock = Clock()
            for first in range(0, len(settings), self._settings_per_batch):
                self._gossip(name, settings[first : first + self._settings_per_batch], clock, log)
            log.runtime(name, clock.phases[name])

    def _gossip(self, name: str, settings: list[Setting], clock: Clock, log: "_Log") -> None:
        """Gossip with several settings of one algorithm concurrently."""
        batch, last = MatrixBatch(self, name, settings), self.num_steps(name)
        for step in range(last + 1):
            if is_logged(step) or step == last:
                before = len(batch.settings)
                log.rows(batch.measure(step))
                diverged = before - len(batch.settings)
                log.progress(name, diverged * (last - step))
                log.fraction()
                if not batch.settings:
                    return
            if step < last:
                with clock(name):
                    batch.step()
                log.progress(name, len(batch.settings))

    def averaging(
        self,
        name: str,
        settings: Sequence[Setting],
        network: Network,
        layout: Layout,
        **options: Any,
    ) -> algorithms.Averaging:
        """Build an algorithm for several settings, one for each of the network's copies.

        `options` have precedence.
        """
        values: dict[str, Any] = {
            option: torch.tensor(
                [s[option] for s in settings], dtype=torch.float32
            ).repeat_interleave(network.hosted)
            for option in settings[0]
        }
        method = ALGORITHMS[name].method(self.options(layout) | options)
        grid = ALGORITHMS[name].grid
        own = {k: v for k, v in values.items() if k in grid and k not in options}
        return method.averaging_rule(network, layout, **own)

    def options(self, layout: Layout) -> dict[str, Any]:
        """Values of options that all settings have in common."""
        c, rank = self.config, self.config.compression_rank
        kept = compressors.TopK(rank=rank).kept(*layout.shapes[0])  # entries of top-k and random-k
        return {
            "rank": rank,
            "num_iterations": c.compression_num_iterations,
            "keep_ratio": kept / layout.size,
            "levels": c.compression_levels,
            "seed": c.seed,
        }


class _Log:
    """Calls the hooks on process 0, with the elapsed time and the progress."""

    def __init__(self, sweep: Sweep, hooks: Hooks):
        self._hooks = hooks if sweep.processes.rank == 0 else Hooks()
        self._total_steps = sweep.total_steps
        self._steps = 0
        self._began = time.perf_counter()
        self._logged = -math.inf  # seconds at which the progress was logged

    def rows(self, rows: Sequence[Row]) -> None:
        for name, values, tags in rows:
            seconds = time.perf_counter() - self._began
            self._hooks.log_metric(name, {**values, "seconds": seconds}, tags)

    def fraction(self) -> None:
        """At most once a second, and at the end: info.json is written anew each time."""
        now = time.perf_counter()
        if now >= self._logged + 1 or self._steps == self._total_steps:
            self._hooks.log_info({"state.progress": self._steps / self._total_steps})
            self._logged = now

    def progress(self, name: str, steps: int) -> None:
        self._steps += steps
        self._hooks.progress(name, steps)

    def runtime(self, name: str, elapsed: PhaseTime) -> None:
        self._hooks.log_runtime(name, elapsed.mean, elapsed.deviation, elapsed.instances)


class MatrixBatch:
    """Several settings of one algorithm that step together, each with a copy of all workers.

    Args:
        settings: Settings that have not diverged.

    Attributes:
        x: Matrices [setting · worker, D].
    """

    def __init__(self, sweep: Sweep, name: str, settings: list[Setting]):
        self.settings, self.x = settings, sweep.start.repeat(len(settings), 1)
        self._sweep, self._name = sweep, name
        self._sent = 0, 0  # bits and messages of worker 0 in the networks before this one
        self._block = sweep.mean.new_empty(_in_blocks(self.x, _IN_CACHES)[0].shape)
        self._network, self._averaging = self._build()
        # If all workers agree at the start, the limit follows from the size of the mean.
        start, size = self._errors()[0].item(), sweep.mean.square().sum().item()
        self._limit = _DIVERGED * (start if start > 1e-9 * size else size)

    def _build(self) -> tuple[Network, algorithms.Averaging]:
        sweep = self._sweep
        network = Network(sweep.topology, sweep.processes, sweep.device, copies=len(self.settings))
        return network, sweep.averaging(self._name, self.settings, network, sweep.layout)

    def step(self) -> None:
        """One step of gossip in all settings."""
        self._network.run(self._averaging.step(self.x))

    def measure(self, step: int) -> list[Row]:
        """Measure each setting, then remove settings that have diverged. Rows are without time."""
        errors = self._errors()
        converges = (errors <= self._limit).tolist()  # False for NaN
        bits, messages = self._sent_by_worker_0()
        sent = {"epoch": step, "bits": bits, "messages": messages}
        rows: list[Row] = [
            (
                "error" if fine else "diverged",
                {"value": error if fine else step, **sent},
                self._sweep.tags(self._name, setting),
            )
            for setting, error, fine in zip(self.settings, errors.tolist(), converges, strict=True)
        ]
        if not all(converges):
            self._keep([index for index, fine in enumerate(converges) if fine])
        return rows

    def _errors(self) -> Tensor:
        """(1/n) Σ_i ‖x_i − x̄_0‖²: float64 [setting], the same to the bit in all processes."""
        copies = (self._block[: len(part)].copy_(part) for part in _in_blocks(self.x, _IN_CACHES))
        squares = torch.cat([copy.sub_(self._sweep.mean).square_().sum(1) for copy in copies])
        return self._network.gather(squares).view(len(self.settings), -1).mean(1)

    def _sent_by_worker_0(self) -> tuple[int, int]:
        """Bits and messages since the start, in one setting: equal in all of them."""
        bits, messages = self._sent
        return bits + int(self._network.bits[0]), messages + int(self._network.messages[0])

    def _keep(self, kept: list[int]) -> None:
        """Continue with these settings only."""
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
        self._averaging.load_state_dict(map_tensors(lambda tensor: tensor[rows], state))


def is_logged(step: int) -> bool:
    """Return whether a step's errors become rows: 0 to 9, 10 to 90 by 10, then each 100th."""
    return step % (1 if step < 10 else 10 if step < 100 else 100) == 0


def _in_blocks(x: Tensor, elements: int = 2**19) -> Sequence[Tensor]:
    """x [row, D] in blocks of rows, to limit the memory of double precision copies."""
    return x.split(max(1, elements // x.shape[1]))
