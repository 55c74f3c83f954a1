"""Averaging alone in a process, for tests of its laws."""

from typing import Any

import networkx as nx
import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from powergossip import topologies
from powergossip.algorithms import CONSENSUS_ONLY, Averaging
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Round, Topology

ALONE = Processes()
SHAPES = [(4, 3), (6, 5), (3,), (4, 3), (2, 2, 3), (1, 7), ()]
POWER_GOSSIP: list[dict[str, Any]] = [
    {},
    dict(rank=2, num_iterations=2),
    dict(rank=3),
    dict(warm_start=False),
    dict(round_weights=True, num_iterations=3),
    dict(bits=6),
    dict(round_weights=True, warm_start=False),
]
UNDIRECTED = ["ring", "star", "chain", "torus", "fully-connected", "binary-tree"]
Case = tuple[str, dict[str, Any]]


COMPRESSORS: list[tuple[str, float, dict[str, Any]]] = [  # with rates of choco
    ("sign-and-norm", 0.3, {}),
    ("top-k", 0.3, {"keep_ratio": 0.4}),
    ("random-k", 0.2, {"keep_ratio": 0.4}),
    ("random-block", 0.2, {"keep_ratio": 0.4}),
    ("svd", 0.3, {}),
    ("qsgd", 0.3, {"levels": 16}),
    ("rounding", 0.3, {}),
    ("identity", 1.0, {}),
]
COMPRESSED: list[Case] = [
    *(
        (
            name,
            {
                "compressor": compressor,
                "diffusion_rate": rate * (factor if rate < 1 else 1),
                **more,
            },
        )
        for name, factor in (("choco", 1.0), ("deepsqueeze", 0.3))
        for compressor, rate, more in COMPRESSORS
    ),
    ("moniqua", {"theta": 6.0, "diffusion_rate": 0.1}),
]


EVERY: list[Case] = [
    ("all-reduce", {}),
    ("all-reduce", dict(bits=3)),
    ("dpsgd", {}),
    ("push-sum", {}),
    ("push-sum", dict(running_sums=True)),
    ("sparta", dict(keep_ratio=0.3)),
    *(("power-gossip", options) for options in POWER_GOSSIP),
    *COMPRESSED,
    *((name, {}) for name in CONSENSUS_ONLY),
]


def graph(name: str, n: int) -> Topology:
    """A topology by its name, or one whose workers differ in their numbers of neighbors:

    tail      # a clique of half of the workers, and a chain of the others
    directed  # a cycle of all workers and one of those with even indices. Columns sum to 1
    """
    if name == "tail":
        return topologies.undirected(name, nx.lollipop_graph(n - n // 2, n // 2))
    if name == "directed":
        weights = np.zeros((n, n))
        for worker in range(n):
            weights[worker, worker - 1] = 1 / 3
        for worker in range(0, n, 2):
            weights[worker, worker - 2] = 1 / 3
        return Topology(name, (Round(csr_array(weights)),))
    return topologies.make(name, n)


def alone(topology: str, n: int) -> Network:
    return Network(graph(topology, n), ALONE)


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


def label(value: object) -> str | None:
    """The name of a case in pytest. None: pytest names it."""
    if not isinstance(value, dict):
        return None
    if "compressor" in value:
        return str(value["compressor"])
    return "-".join(f"{k}={v}" for k, v in value.items()) or "default"
