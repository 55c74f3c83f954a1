"""What a worker does with its own gradient: torch's optimizers, and the learning rate of a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def learning_rate(c: Any, epoch: float) -> float:
    """The learning rate at a (fractional) epoch.

    From learning_rate linearly to learning_rate · distributed_lr_warmup_factor during the first
    distributed_lr_warmup_epoch epochs (Goyal et al. 2017, arXiv:1706.02677, § 2.2), and times
    `factor` from each milestone (epoch, factor) on.
    """
    rate = c.learning_rate
    if c.distributed_lr_warmup_epoch > 0:
        share = min(epoch / c.distributed_lr_warmup_epoch, 1.0)
        rate *= 1 + (c.distributed_lr_warmup_factor - 1) * share
    for milestone, factor in c.lr_schedule_milestones:
        if epoch >= milestone:
            rate *= factor
    return float(rate)


def _sgd(x: nn.Parameter, c: Any) -> torch.optim.Optimizer:
    momentum = 0.0 if c.optimizer == "dgc" else c.momentum  # which has its own
    return torch.optim.SGD(
        [x],
        lr=c.learning_rate,
        momentum=momentum,
        nesterov=c.nesterov and momentum > 0,
        fused=True,
    )


def _adamw(x: nn.Parameter, c: Any) -> torch.optim.Optimizer:
    """Loshchilov & Hutter (2019), arXiv:1711.05101; its decay is decoupled, see train.py."""
    return torch.optim.AdamW(
        [x],
        lr=c.learning_rate,
        betas=(c.adam_beta1, c.adam_beta2),
        eps=c.adam_epsilon,
        weight_decay=0.0,
        fused=True,
    )


# The names that users choose from; state is elementwise, so one optimizer serves all workers.
LOCAL_OPTIMIZERS: dict[str, Callable[[nn.Parameter, Any], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}
DECOUPLED = ("adamw",)  # weight decay apart from the gradient
