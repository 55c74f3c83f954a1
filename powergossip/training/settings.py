"""What the keys of train.Config mean to the parts of a run, and which values they may have."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig

from powergossip import algorithms, checks, compressors
from powergossip.algorithms import aggregation, ddp, dgc, power_sgd
from powergossip.network import Processes
from powergossip.network import hosted_workers as hosted
from powergossip.runs.output import plain_copy
from powergossip.training.local_optimizers import LOCAL_OPTIMIZERS

V = TypeVar("V")


def checked(asked: DictConfig, who: Processes) -> Any:
    """A copy of the configuration with its blanks filled in. ValueError for impossible values."""
    c = plain_copy(asked)  # no checks in the hot path
    c.n_workers = who.size if c.n_workers is None else c.n_workers
    hosted(c.n_workers, who.size)

    demand = partial(checks.require, c)
    for key in (
        "num_epochs",
        "batch_size",
        "checkpoint_interval",
        "evaluation_interval",
        "local_steps",
        "optimizer_rank",
        "optimizer_num_iterations",
        "optimizer_num_batches_per_step",
        "recalibration_batches",
    ):
        demand(key, lambda v: v >= 1, "1 or more")
    for key in ("seed", "rank", "log_verbosity"):
        demand(key, lambda v: v >= 0, "0 or more")
    demand("max_steps_per_epoch", lambda v: v is None or v >= 1, "1 or more, or null for all")
    demand("learning_rate", lambda v: v > 0 and math.isfinite(v), "a number above 0")
    demand("distributed_lr_warmup_factor", lambda v: v > 0 and math.isfinite(v), "a number above 0")
    demand("distributed_lr_warmup_epoch", lambda v: v >= 0, "a number of epochs, or 0 for none")
    for key in ("adam_beta1", "adam_beta2"):
        demand(key, lambda v: 0 <= v < 1, "a number from 0 to below 1")
    demand("adam_epsilon", lambda v: v > 0 and math.isfinite(v), "a number above 0")
    demand(
        "gradient_clipping",
        lambda v: v is None or (v > 0 and math.isfinite(v)),
        "a number above 0, or null",
    )
    demand(
        "mean_model_statistics",
        lambda v: v in ("averaged", "recalibrated"),
        "averaged or recalibrated",
    )
    choices = ", ".join(LOCAL_OPTIMIZERS)
    demand("local_optimizer", lambda v: v in LOCAL_OPTIMIZERS, f"one of {choices}")
    demand("momentum", lambda v: 0 <= v < 1, "a number from 0 to below 1")
    demand("weight_decay", lambda v: v >= 0 and math.isfinite(v), "0 or more")
    demand("decentralized_data_shuffled_ratio", lambda v: 0 <= v <= 1, "a share from 0 to 1")
    demand("cuda_aware", lambda v: v in ("auto", "on", "off"), "auto, on or off")
    demand("distributed_backend", lambda v: v == "mpi", "mpi, the only one")
    demand(
        "optimizer_diffusion_rate",
        lambda v: v == "auto" or (not isinstance(v, str) and v > 0 and math.isfinite(v)),
        "a number above 0, or auto",
    )
    demand(
        "lr_schedule_milestones",
        lambda v: all(_numbers(pair, 2) and pair[0] >= 0 and pair[1] > 0 for pair in v),
        "a list of [epoch, factor], such as [[150, 0.1], [225, 0.1]]",
    )
    demand(
        "spectrum_logging_worker_pairs",
        lambda v: all(
            _numbers(pair, 2) and all(isinstance(n, int) and n in range(c.n_workers) for n in pair)
            for pair in v
        ),
        f"a list of pairs of workers, 0 to {c.n_workers - 1}",
    )
    optimizers = [*algorithms.AVERAGING, *aggregation.AGGREGATIONS, *ddp.HOOKS]
    if c.optimizer not in optimizers:
        choices = ", ".join(optimizers)
        raise ValueError(f'optimizer "{c.optimizer}" is unknown; choose from {choices}')
    if c.optimizer not in algorithms.AVERAGING and c.local_steps > 1:
        raise ValueError(
            f"local_steps={c.local_steps} is for gossip; {c.optimizer} goes with local_steps=1 "
            "(and powersgd and dgc with optimizer_num_batches_per_step)"
        )
    if c.optimizer in aggregation.AGGREGATIONS:
        centralized_options(c)
    if c.optimizer in ddp.HOOKS:
        ddp.check(hosted=hosted(c.n_workers, who.size), **hook_options(c))
    if c.optimizer == "dgc" and c.local_optimizer != "sgd":
        raise ValueError(
            f"local_optimizer={c.local_optimizer}: dgc corrects the momentum of sgd; use sgd"
        )
    return c


def averaging_options(c: Any, diffusion_rate: float) -> algorithms.Options:
    """What the keys say of averaging algorithms; the diffusion rate as a number."""
    svd_rank = c.optimizer_rank if c.optimizer_compressor == "svd" else None
    return algorithms.Options(
        diffusion_rate=diffusion_rate,
        rank=c.optimizer_rank,
        num_iterations=c.optimizer_num_iterations,
        warm_start=c.optimizer_warm_start,
        round_weights=c.optimizer_round_weights,
        compressor=c.optimizer_compressor,
        compressor_options=compressors.Options(
            keep_ratio=c.optimizer_keep_ratio, rank=svd_rank, levels=c.optimizer_levels
        ),
        theta=c.optimizer_theta,
        seed=c.seed,
    )


def hook_options(c: Any) -> dict[str, Any]:
    """What the keys say of PyTorch's hooks."""
    return {
        "rank": c.optimizer_rank,
        "start_iteration": c.optimizer_start_iteration,
        "error_feedback": c.optimizer_error_feedback,
        "warm_start": c.optimizer_warm_start,
        "min_compression_rate": c.optimizer_min_compression_rate,
    }


def centralized_options(c: Any) -> aggregation.Options:
    """What the keys say of gradient aggregations. Raises ValueError that names the key."""

    def of_keys(make: Callable[..., V], **keys: str) -> V:
        try:
            return make(**{name: c[key] for name, key in keys.items()})
        except ValueError as error:  # which begins with NAME=value
            name, equals, rest = str(error).partition("=")
            raise ValueError(f"{keys.get(name, name)}{equals}{rest}") from error

    c = {
        **c,
        "nesterov": c.nesterov and c.momentum > 0,
        "optimizer_warmup_ratios": c.optimizer_warmup_ratios or None,
    }
    return aggregation.Options(
        of_keys(
            power_sgd.Config,
            rank="optimizer_rank",
            min_compression_rate="optimizer_min_compression_rate",
            num_iters_per_step="optimizer_num_iterations",
            start_compressing_after_num_steps="optimizer_start_compressing_after",
            seed="seed",
        ),
        of_keys(
            dgc.Config,
            compress_ratio="optimizer_keep_ratio",
            sample_ratio="optimizer_sample_ratio",
            max_adaptation_iterations="optimizer_max_adaptation_iterations",
            momentum="momentum",
            nesterov="nesterov",
            momentum_masking="optimizer_momentum_masking",
            clip="gradient_clipping",
            warmup_epochs="optimizer_warmup_epochs",
            warmup_ratios="optimizer_warmup_ratios",
            fp16_values="optimizer_fp16_values",
            int32_indices="optimizer_int32_indices",
            seed="seed",
        ),
    )


def _numbers(values: Any, count: int) -> bool:
    """Whether this is a list of so many numbers."""
    try:
        return len(values) == count and all(math.isfinite(value) for value in values)
    except TypeError:
        return False
