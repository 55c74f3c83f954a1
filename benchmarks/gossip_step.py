"""The time of a step of an averaging algorithm, and a lower bound.

    mpirun -np 8 python -m benchmarks.gossip_step algorithm=power-gossip options.rank=1

prints one JSON line. ms_per_step is the median over rounds. The lower bound, floor_ms, is measured
in the same run, in turns with the steps. It is the time of a raw non-blocking exchange of the same
number of bytes between the same processes, and of one pass over the parameters that reads and
writes them. ratio = ms_per_step / floor_ms.

The workers disagree during these steps, as workers that learn do.

It has neither model nor data, only random tensors with the shapes of a model's parameters.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from powergossip import algorithms, checks, prediction, topologies
from powergossip.network import Network, Processes, choose_device, processes
from powergossip.parameters import Layout
from powergossip.runs import configuration

# The shapes of the parameters.
MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet20": lambda: prediction.layout("ResNet20").shapes,  # 272,474 parameters
    "lstm": lambda: prediction.layout("LSTM").shapes,  # 28,949,319 parameters
    "matrix100": lambda: [(100, 100)],  # of the consensus experiments
}


@dataclass
class GossipStep:
    algorithm: str = "power-gossip"  # a row of algorithms.AVERAGING
    model: str = "resnet20"  # resnet20, lstm or matrix100
    topology: str = "ring"  # a name of topologies.TOPOLOGIES
    n_workers: int | None = None  # null: one per process
    device: str = "auto"  # auto, cpu, cuda or cuda:INDEX
    rounds: int = 15  # number of measurements, whose median is the result
    seconds: float = 5.0  # approximate time of all rounds together
    options: dict[str, Any] = field(default_factory=dict)  # of the algorithm, such as {rank: 4}.
    #   num_iterations is 1 by default


config = OmegaConf.structured(GossipStep)

# Steps after which x is set to its start again. Learning workers do not agree, and workers that
# agree may take other code paths. Two of them agree on a matrix of rank 16 after 16 steps.
BEFORE_THEY_AGREE = 12


def main(arguments: list[str]) -> None:
    """Measure the configuration of the arguments; print one line."""
    c, comm = config, processes()
    with comm.agreed():
        configuration.read_command_line(config, arguments, __doc__ or "")
        checks.one_of("model", c.model, MODELS)
        n_workers = comm.size if c.n_workers is None else c.n_workers
        device = choose_device(c.device, comm.local_rank)
        network = Network(topologies.make(c.topology, n_workers), comm, device)
        layout = Layout(MODELS[c.model]())
        given = dict(c.options)
        options = algorithms.defaults(c.algorithm, given)
        if "num_iterations" in options:
            given = {"num_iterations": 1, **given}
        averaging, options = algorithms.make(c.algorithm, network, layout, **given), options | given
    start = torch.randn(network.hosted, layout.size, device=device)
    x = start.clone()

    def step() -> None:
        network.run(averaging.step(x))

    for t in range(12):
        if t == 8:  # messages of few bits begin with whole ones
            before = int(network.bits[0])
        step()
    bits_per_step = (int(network.bits[0]) - before) // 4  # both sides of power iteration, twice
    bound = _lower_bound(network, x, c.algorithm, bits_per_step)

    start_again = partial(x.copy_, start)
    times = _in_turns([step, bound], c.rounds, c.seconds, comm, device, start_again)
    ms_per_step, floor_ms = map(median, times)
    line = {
        "algorithm": c.algorithm,
        "model": c.model,
        "n_workers": n_workers,
        "processes": comm.size,
        "transport": comm.transport,
        "device": device.type,
        **{name: options.get(name) for name in ("rank", "compressor", "num_iterations")},
        "ms_per_step": round(ms_per_step, 4),
        "floor_ms": round(floor_ms, 4),
        "ratio": round(ms_per_step / floor_ms, 2),
        "bits_per_step": bits_per_step,
    }
    if comm.rank == 0:
        print(json.dumps(line))


def _in_turns(
    functions: Sequence[Callable[[], object]],
    rounds: int,
    seconds: float,
    processes: Processes,
    device: torch.device,
    before: Callable[[], object],
) -> list[list[float]]:
    """Return the milliseconds of a call, [function][round].

    The functions take turns, so that other load on the machine affects all of them. `before` is
    called before each measurement, and again after BEFORE_THEY_AGREE calls, outside of the time. A
    measurement has at most 200 calls.
    """

    def measure(function: Callable[[], object], count: int) -> float:
        elapsed = 0.0
        for first in range(0, count, BEFORE_THEY_AGREE):
            before()
            processes.gather(None)  # start at the same time
            start = time.perf_counter()
            for _ in range(first, min(first + BEFORE_THEY_AGREE, count)):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            processes.gather(None)  # the slowest process counts
            elapsed += time.perf_counter() - start
        return 1e3 * elapsed / count

    counts = []
    for function in functions:
        once = processes.broadcast(measure(function, 3)) / 1e3
        counts.append(min(200, max(1, int(seconds / rounds / len(functions) / once))))
    turns = [list(map(measure, functions, counts)) for _ in range(rounds)]
    return [list(of_function) for of_function in zip(*turns, strict=True)]


def _lower_bound(network: Network, x: Tensor, algorithm: str, bits: int) -> Callable[[], None]:
    """An exchange of the same number of bytes by the transport, without an algorithm, and one pass
    over the parameters."""
    comm, channel = network.processes, network.connection.channel
    if channel is None:
        return lambda: _touch(x)
    neighbors = {
        worker // network.hosted
        for i in network.workers
        for worker, _ in network.topology.round(0).sources(i)
    }
    if algorithm == "all-reduce":
        neighbors = set(range(comm.size))
    neighbors.discard(comm.rank)
    size = math.ceil(bits / 8 / max(1, len(neighbors)))
    incoming, outgoing = (
        [(process, torch.full((size,), value, dtype=torch.uint8)) for process in sorted(neighbors)]
        for value in (0, 1)
    )
    messages = channel.requests(incoming, outgoing)

    def exchange() -> None:
        messages.start()
        messages.wait()
        _touch(x)

    return exchange


def _touch(x: Tensor) -> None:
    """Read and write every element."""
    x.mul_(1.0)


if __name__ == "__main__":
    configuration.run_entry_point(main)
