"""Optimizers for a training loop of your own, one worker per process.

Three ways to train in parallel:

    GossipOptimizer                   gossip after the step of any torch optimizer
    PowerSGD, Config, optimizer_step  low-rank compressed gradients, with the other names of the
                                      published package: Aggregator, AllReduce, BasicPowerSGD,
                                      BasicConfig
    DGC, DGCConfig, DGCSGD            sparse gradients with momentum, see optimizers.dgc
"""

from powergossip.algorithms.dgc import Config as DGCConfig
from powergossip.algorithms.power_sgd import Config
from powergossip.optimizers.dgc import DGC, DGCSGD
from powergossip.optimizers.gossip import GossipOptimizer
from powergossip.optimizers.power_sgd import (
    Aggregator,
    AllReduce,
    BasicConfig,
    BasicPowerSGD,
    PowerSGD,
    optimizer_step,
)

__all__ = [
    "DGC",
    "DGCSGD",
    "Aggregator",
    "AllReduce",
    "BasicConfig",
    "BasicPowerSGD",
    "Config",
    "DGCConfig",
    "GossipOptimizer",
    "PowerSGD",
    "optimizer_step",
]
