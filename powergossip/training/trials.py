"""Trial steps of the rows that a script has added, before data are loaded.

A step that returns no messages, or assigns to x or the mean in place of changing them, would train
without communication.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from powergossip import algorithms, options
from powergossip.algorithms import Averaging, aggregation
from powergossip.algorithms.aggregation import Aggregation
from powergossip.compressors import COMPRESSORS
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology
from powergossip.training.config import Settings

STEPS = 10
SIZE = 4  # rows and columns of the only matrix


def are_needed(c: Settings) -> bool:
    """Whether the method or its compressor is none of the library."""
    rows = {**algorithms.AVERAGING, **aggregation.AGGREGATIONS}
    chosen = [rows.get(c.optimizer), COMPRESSORS.get(c.options.get("compressor", ""))]
    return not all(options.is_of_library(getattr(row, "func", row)) for row in chosen if row)


def try_averaging(
    c: Settings, topology: Topology, make: Callable[[Network, Layout], Averaging]
) -> None:
    """Make steps with matrices of normal numbers, all workers in this process.

    Raises ValueError if x stays as it is, and the errors of the steps.
    """
    network, layout, x = _start(topology)
    rule, before = make(network, layout), x.clone()
    for _ in range(STEPS):
        network.run(rule.step(x))
    if topology.n_workers > 1 and torch.equal(x, before):
        raise ValueError(f"{_name(c)} does not change x; a step changes it in place")


def try_aggregation(
    c: Settings, topology: Topology, make: Callable[[Network, Layout], Aggregation]
) -> None:
    """The same for an aggregation. Raises ValueError if the mean stays as it is."""
    network, layout, gradient = _start(topology)
    rule, mean = make(network, layout), torch.zeros_like(gradient)
    rule.at_epoch(0.0)
    rule.at_learning_rate(c.learning_rate)
    network.run(rule.step(gradient, mean))
    if not mean.any():
        raise ValueError(f"{_name(c)} does not change mean; a step fills it in place")


def _start(topology: Topology) -> tuple[Network, Layout, Tensor]:
    layout = Layout([(SIZE, SIZE)])
    random = torch.Generator().manual_seed(0)
    x = torch.randn(topology.n_workers, layout.size, generator=random)
    return Network(topology, Processes()), layout, x


def _name(c: Settings) -> str:
    compressor = c.options.get("compressor")
    return f"optimizer={c.optimizer}" + (f" with compressor={compressor}" if compressor else "")
