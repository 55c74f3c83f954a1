"""What a step of an averaging algorithm costs, beside the least it could cost.

    mpirun -np 8 python benchmarks/gossip_step.py algorithm=power-gossip model=resnet20 rank=1

prints one JSON line: ms_per_step is the median over rounds; floor_ms is measured in the same run,
in turns with it: a raw non-blocking exchange of the same number of bytes between the same processes
and one pass over the parameters that reads and writes them. ratio = ms_per_step / floor_ms.

No model and no data: only the shapes of a model's parameters, filled with random numbers.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from benchmarks.timing import in_turns
from powergossip import algorithms, compressors, topologies
from powergossip.errors import BadInput
from powergossip.network import Network, choose_device, processes
from powergossip.parameters import Layout
from powergossip.runs import configuration

Shapes = list[tuple[int, ...]]


def resnet20() -> Shapes:
    """3 input channels, 10 classes, projection shortcuts: 272,474 numbers."""

    def convolution(channels: int, inputs: int, size: int = 3) -> Shapes:
        return [(channels, inputs, size, size), (channels,), (channels,)]  # and batch norm

    shapes, inputs = convolution(16, 3), 16
    for channels in (16, 32, 64):
        for _ in range(3):
            shapes += convolution(channels, inputs) + convolution(channels, channels)
            if inputs != channels:
                shapes += convolution(channels, inputs, size=1)
            inputs = channels
    return [*shapes, (10, 64), (10,)]


def lstm() -> Shapes:
    """3 layers of 650, tied, vocabulary of 28,869 (WikiText-2): 28,949,319 numbers."""
    layer: Shapes = [(4 * 650, 650), (4 * 650, 650), (4 * 650,), (4 * 650,)]
    return [(28_869, 650), *layer * 3, (28_869,)]


def matrix100() -> Shapes:
    """The consensus experiments' one matrix."""
    return [(100, 100)]


COMPRESSED = ("choco", "deepsqueeze")  # algorithms that have a compressor
MODELS = {"resnet20": resnet20, "lstm": lstm, "matrix100": matrix100}


@dataclass
class Config:
    algorithm: str = "power-gossip"  # a row of algorithms.AVERAGING
    model: str = "resnet20"  # resnet20, lstm or matrix100
    topology: str = "ring"  # a name of topologies.TOPOLOGIES
    n_workers: int | None = None  # null: one for each process
    rank: int = 1  # of power-gossip
    num_iterations: int = 1  # of power-gossip, a step
    compressor: str = "sign-and-norm"  # of choco and deepsqueeze
    keep_ratio: float = 0.01  # of the compressors top-k and random-k
    diffusion_rate: float = 1.0  # of gossip
    device: str = "auto"  # auto, cpu, cuda or cuda:NUMBER
    rounds: int = 15  # of which the median is taken
    seconds: float = 5.0  # for all rounds together, about


config = OmegaConf.structured(Config)


def main(arguments: list[str]) -> None:
    """Measure as the arguments say, print one line."""
    who = processes()
    who.agree(lambda: configuration.read_command_line(config, arguments, __doc__ or ""))
    c = config
    if c.model not in MODELS:
        raise BadInput(f'model "{c.model}" is unknown; choose from {", ".join(MODELS)}')
    n_workers = who.size if c.n_workers is None else c.n_workers
    device = choose_device(c.device, who.local_rank)
    network = who.agree(lambda: Network(topologies.make(c.topology, n_workers), who, device))
    layout = Layout(MODELS[c.model]())
    averaging = who.agree(lambda: _averaging(network, layout))
    start = torch.randn(network.hosted, layout.size, device=device)
    x = start.clone()

    def step() -> None:
        network.run(averaging.step(x))

    for _ in range(4):  # both sides of power iteration, twice
        step()
    bits_per_step = int(network.bits[0]) // 4
    floor = _floor(network, x, c.algorithm, bits_per_step)
    # Workers that have come to agree take other paths than workers that learn do.
    times = in_turns([step, floor], c.rounds, c.seconds, who, device, before=lambda: x.copy_(start))
    ms_per_step, floor_ms = (1e3 * float(np.median(seconds)) for seconds in times)
    if who.rank == 0:
        print(
            json.dumps(
                {
                    "algorithm": c.algorithm,
                    "model": c.model,
                    "n_workers": n_workers,
                    "processes": who.size,
                    "device": device.type,
                    "rank": c.rank,
                    "compressor": c.compressor if c.algorithm in COMPRESSED else None,
                    "num_iterations": c.num_iterations,
                    "ms_per_step": round(ms_per_step, 4),
                    "floor_ms": round(floor_ms, 4),
                    "ratio": round(ms_per_step / floor_ms, 2),
                    "bits_per_step": bits_per_step,
                }
            )
        )


def _averaging(network: Network, layout: Layout) -> algorithms.Averaging:
    c = config
    svd_rank = c.rank if c.compressor == "svd" else None
    options = algorithms.Options(
        diffusion_rate=c.diffusion_rate,
        rank=c.rank,
        num_iterations=c.num_iterations,
        compressor=c.compressor,
        compressor_options=compressors.Options(keep_ratio=c.keep_ratio, rank=svd_rank),
    )
    return algorithms.make(c.algorithm, network, layout, options)


def _floor(network: Network, x: Tensor, algorithm: str, bits: int) -> Callable[[], None]:
    """The same bytes by the shortest way, and one pass over the parameters."""
    who = network.processes
    if who.communicator is None:
        return lambda: _touch(x)
    from mpi4py import MPI

    if algorithm == "all-reduce":
        total = torch.zeros(x.shape[1])

        def reduce() -> None:
            who.communicator.Allreduce(MPI.IN_PLACE, total.numpy())
            _touch(x)

        return reduce

    neighbors = {
        worker // network.hosted
        for i in network.workers
        for worker, _ in network.topology.round(0).sources(i)
    } - {who.rank}
    size = math.ceil(bits / 8 / max(1, len(neighbors)))
    requests: list[Any] = []
    for process in sorted(neighbors):
        incoming, outgoing = np.zeros(size, np.uint8), np.ones(size, np.uint8)
        requests.append(who.communicator.Recv_init(incoming, process))
        requests.append(who.communicator.Send_init(outgoing, process))

    def exchange() -> None:
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        _touch(x)

    return exchange


def _touch(x: Tensor) -> None:
    """Read and write every number."""
    x.mul_(1.0)


if __name__ == "__main__":
    configuration.run_entry_point(main)
