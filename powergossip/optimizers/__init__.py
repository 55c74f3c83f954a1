"""Optimizers for a training loop of one's own, one worker a process."""

from powergossip.algorithms.power_sgd import Config
from powergossip.optimizers.gossip import GossipOptimizer
from powergossip.optimizers.power_sgd import PowerSGD, optimizer_step

__all__ = ["Config", "GossipOptimizer", "PowerSGD", "optimizer_step"]
