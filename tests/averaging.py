"""Averaging alone in a process, for tests of its laws."""

import torch
from torch import Tensor

from powergossip import topologies
from powergossip.algorithms import Averaging, Options
from powergossip.network import Network, Processes
from powergossip.parameters import Layout

ALONE = Processes()
SHAPES = [(4, 3), (6, 5), (3,), (4, 3), (2, 2, 3), (1, 7), ()]
POWER_GOSSIP = [
    Options(),
    Options(rank=2, num_iterations=2),
    Options(rank=3),
    Options(warm_start=False),
    Options(round_weights=True, num_iterations=3),
    Options(round_weights=True, warm_start=False),
]
UNDIRECTED = ["ring", "star", "chain", "torus", "fully-connected", "binary-tree"]


def alone(topology: str, n: int) -> Network:
    return Network(topologies.make(topology, n), ALONE)


def start(n: int, layout: Layout, seed: int = 0) -> Tensor:
    return torch.randn(n, layout.size, generator=torch.Generator().manual_seed(seed))


def steps(network: Network, averaging: Averaging, x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        network.run(averaging.step(x))
    return x


def variance(x: Tensor) -> float:
    """V = Σ_i ‖x_i − x̄‖²"""
    x = x.double()
    return (x - x.mean(0)).square().sum().item()
