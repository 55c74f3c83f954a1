"""Optimizers for a training loop of your own, one worker per process.

Three ways to train in parallel:

    GossipOptimizer                   gossip after the step of any torch optimizer
    PowerSGD, Config, optimizer_step  low-rank compressed gradients
    DGC, DGCConfig, DGCSGD            sparse gradients with momentum, see optimizers.dgc
"""

from powergossip.algorithms.dgc import Config as DGCConfig
from powergossip.algorithms.power_sgd import Config
from powergossip.optimizers.dgc import DGC, DGCSGD
from powergossip.optimizers.gossip import GossipOptimizer
from powergossip.optimizers.power_sgd import PowerSGD, optimizer_step

__all__ = [
    "DGC",
    "DGCSGD",
    "Config",
    "DGCConfig",
    "GossipOptimizer",
    "PowerSGD",
    "optimizer_step",
]
