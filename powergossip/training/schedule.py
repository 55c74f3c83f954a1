"""The learning rate of a step. Defaults of tasks: tasks/task_defaults.py."""

import math

from powergossip.training.config import Settings


def learning_rate(c: Settings, epoch: float) -> float:
    """The learning rate at a fractional epoch. A step uses the rate at its end.

    It changes linearly from learning_rate to learning_rate · distributed_lr_warmup_factor during
    the first distributed_lr_warmup_epoch epochs. Then it is multiplied by `factor` from each
    milestone (epoch, factor) on. With lr_schedule=cosine it falls to 0 instead, as half a period of
    a cosine::

        η(e) = η(w) · (1 + cos(π (e − w) / (num_epochs − w))) / 2        w = warm-up epochs

    With the default factor of 1 there is no warm-up: w = 0.

    References:
        - Goyal et al. (2017), arXiv:1706.02677, § 2.2, for the warm-up.
        - Loshchilov & Hutter (2017), arXiv:1608.03983, eq. 5, for the cosine.
    """
    rate = c.learning_rate
    warmup = c.distributed_lr_warmup_epoch if c.distributed_lr_warmup_factor != 1 else 0.0
    if warmup > 0:
        fraction = min(epoch / warmup, 1.0)
        rate *= 1 + (c.distributed_lr_warmup_factor - 1) * fraction
    if c.lr_schedule == "cosine":
        after = max(0.0, epoch - warmup)
        length = max(c.num_epochs - warmup, after)
        return float(rate * (1 + math.cos(math.pi * after / length)) / 2) if after else float(rate)
    for milestone, factor in c.lr_schedule_milestones:
        if epoch >= milestone:
            rate *= factor
    return float(rate)
