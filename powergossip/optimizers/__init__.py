"""Optimizers for your own training loop, one worker per process.

- GossipOptimizer: gossip after the step of any torch optimizer.
- GossipState, gossip_hook: gossip as a communication hook of DistributedDataParallel.
- PowerSGD, Config, Aggregator, optimizer_step: low-rank compressed gradients.
- DGC, DGCConfig, DGCSGD: sparse gradients with momentum, see optimizers.dgc.
- ErrorFeedback, ErrorFeedbackConfig: any compressor, see optimizers.error_feedback.
- SignSGD, SignSGDConfig: majority vote on signs, see optimizers.sign_sgd.
"""

from powergossip.algorithms.dgc import DGCConfig as DGCConfig
from powergossip.algorithms.error_feedback import ErrorFeedbackConfig as ErrorFeedbackConfig
from powergossip.algorithms.power_sgd import PowerSGDConfig as Config
from powergossip.algorithms.sign_sgd import SignSGDConfig as SignSGDConfig
from powergossip.optimizers.dgc import DGC, DGCSGD
from powergossip.optimizers.error_feedback import ErrorFeedback
from powergossip.optimizers.gossip import GossipOptimizer
from powergossip.optimizers.gossip_hook import GossipState, gossip_hook
from powergossip.optimizers.gradients import Aggregator, optimizer_step
from powergossip.optimizers.power_sgd import PowerSGD
from powergossip.optimizers.sign_sgd import SignSGD

__all__ = [
    "DGC",
    "DGCSGD",
    "Aggregator",
    "Config",
    "DGCConfig",
    "ErrorFeedback",
    "ErrorFeedbackConfig",
    "GossipOptimizer",
    "GossipState",
    "PowerSGD",
    "SignSGD",
    "SignSGDConfig",
    "gossip_hook",
    "optimizer_step",
]
