"""The keys of methods' options. Derived from their rows: see derive_keys.py.

No import of a method is needed to show them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

PREFIX = "optimizer_"
# Title of methods → key → default in train.py, and meaning
Groups = dict[str, dict[str, tuple[Any, str]]]


@dataclass
class MethodKeys:
    """Keys optimizer_X, for the option X of a method. null: the default of the method."""

    # Derived
    optimizer_diffusion_rate: float | int | str | None = None
    optimizer_rank: int | None = None
    optimizer_num_iterations: int | None = None
    optimizer_warm_start: bool | None = None
    optimizer_round_weights: bool | None = None
    optimizer_compressor: str | None = None
    optimizer_copy_rate: float | None = None
    optimizer_theta: float | None = None
    optimizer_running_sums: bool | None = None
    optimizer_keep_ratio: float | None = None
    optimizer_min_compression_rate: float | None = None
    optimizer_start_compressing_after: int | None = None
    optimizer_error_feedback: bool | None = None
    optimizer_num_batches_per_step: int | None = None
    optimizer_sample_ratio: float | None = None
    optimizer_strided_sample: bool | None = None
    optimizer_compress_upper_bound: float | None = None
    optimizer_compress_lower_bound: float | None = None
    optimizer_max_adaptation_iterations: int | None = None
    optimizer_resample: bool | None = None
    optimizer_momentum_masking: bool | None = None
    optimizer_clip_by: str | None = None
    optimizer_warmup_epochs: int | None = None
    optimizer_warmup_ratios: Any = None
    optimizer_fp16_values: bool | None = None
    optimizer_int32_indices: bool | None = None
    optimizer_momentum_before_compression: bool | None = None
    optimizer_rescale_error: bool | None = None
    optimizer_per_tensor: bool | None = None
    optimizer_outer_rate: float | None = None
    optimizer_error_decay: float | None = None
    optimizer_mean_over: str | None = None
    optimizer_kept: int | None = None
    optimizer_chunk: int | None = None
    optimizer_bits: int | None = None
    optimizer_start_iteration: int | str | None = None
    optimizer_orthogonalization_epsilon: float | None = None
    optimizer_batch_tensors_with_same_shape: bool | None = None
    optimizer_compression_stats_logging_frequency: int | None = None
    optimizer_bucket_cap_mb: float | None = None
    optimizer_levels: int | None = None
    optimizer_unbiased: bool | None = None
    groups: ClassVar[Groups] = {
        "optimizer=dpsgd": {
            "optimizer_diffusion_rate": (
                1.0,
                'diffusion rate γ, or "auto": the best one on this topology',
            ),
        },
        "optimizer=power-gossip": {
            "optimizer_diffusion_rate": (
                1.0,
                'diffusion rate γ, or "auto": the best one of plain gossip on this topology, 2/(λ_2 + λ_max). Above 2/λ_max there is a warning: V may grow, and at a high rank it does',
            ),
            "optimizer_rank": (
                1,
                "rank r of the messages, at most the smaller side of a matrix",
            ),
            "optimizer_num_iterations": (
                2,
                "iterations of power iteration in a step",
            ),
            "optimizer_warm_start": (
                True,
                "reuse the last step's directions. Otherwise they are resampled",
            ),
            "optimizer_round_weights": (
                False,
                "round directions to their signs, at rank 1",
            ),
        },
        "optimizer=choco": {
            "optimizer_diffusion_rate": (
                None,
                "diffusion rate γ. By default it follows from the compressor, the tensors and the topology",
            ),
            "optimizer_compressor": (
                "sign-and-norm",
                "name of the compressor: identity, qsgd, random-block, random-k, rounding, sign-and-norm, svd, top-k",
            ),
            "optimizer_copy_rate": (
                1.0,
                "rate at which public copies follow the parameters. By default that of the compressor, less than 1 for an unbiased one",
            ),
        },
        "optimizer=deepsqueeze": {
            "optimizer_diffusion_rate": (
                None,
                "diffusion rate γ. By default it follows from the compressor, the tensors and the topology",
            ),
            "optimizer_compressor": (
                "sign-and-norm",
                "name of the compressor: identity, qsgd, random-block, random-k, rounding, sign-and-norm, svd, top-k",
            ),
        },
        "optimizer=moniqua": {
            "optimizer_theta": (
                0.25,
                "bound θ on the differences between neighbors",
            ),
            "optimizer_diffusion_rate": (
                0.1,
                "diffusion rate γ",
            ),
        },
        "optimizer=push-sum": {
            "optimizer_running_sums": (
                False,
                "send the sums of all messages so far, so that the next message makes up for a lost one",
            ),
        },
        "optimizer=sparta": {
            "optimizer_keep_ratio": (
                0.005,
                "fraction p of the elements",
            ),
            "optimizer_diffusion_rate": (
                1.0,
                "diffusion rate γ",
            ),
        },
        "optimizer=powersgd": {
            "optimizer_rank": (
                1,
                "rank of the approximation in each half-iteration, at most the smaller side of a matrix",
            ),
            "optimizer_min_compression_rate": (
                2.0,
                "tensors that would be compressed by this factor or less are all-reduced whole",
            ),
            "optimizer_num_iterations": (
                2,
                "half-iterations of power iteration in a step",
            ),
            "optimizer_start_compressing_after": (
                0,
                "steps of plain all-reduce at the beginning",
            ),
            "optimizer_warm_start": (
                True,
                "begin a step with the last factors of the step before. Otherwise the first directions are resampled",
            ),
            "optimizer_error_feedback": (
                True,
                "add a worker's error to its next gradient. Otherwise it is lost",
            ),
            "optimizer_num_batches_per_step": (
                1,
                "batches whose mean gradient g_i is compressed. Nothing is sent in between",
            ),
        },
        "optimizer=dgc": {
            "optimizer_keep_ratio": (
                0.01,
                "fraction of each tensor's elements that is sent after the warm-up. A ratio r above 1 stands for the fraction 1/r",
            ),
            "optimizer_sample_ratio": (
                0.01,
                "fraction of a tensor that is sampled for the threshold, at least",
            ),
            "optimizer_strided_sample": (
                True,
                "sample at equal distances from a random start. Otherwise uniformly",
            ),
            "optimizer_compress_upper_bound": (
                1.0,
                "where more elements than this times the target exceed the threshold, the largest are sent. Otherwise the first in memory; 1: the largest always",
            ),
            "optimizer_compress_lower_bound": (
                0.8,
                "while fewer elements than this times the target exceed the threshold, it is multiplied by this",
            ),
            "optimizer_max_adaptation_iterations": (
                10,
                "corrections of the threshold, at most",
            ),
            "optimizer_resample": (
                True,
                "select the largest elements of a surplus. Otherwise the threshold is multiplied by optimizer_compress_upper_bound",
            ),
            "optimizer_momentum_masking": (
                True,
                "clear the momentum of sent elements",
            ),
            "optimizer_clip_by": (
                "gradient",
                "kind of clipping at c. gradient: a worker's gradient has a norm of √n · c at most, for n workers. norm, value: each tensor has a norm, or elements, of c at most. global-norm: each tensor is multiplied by c over the root mean square of its norm in all workers, if that is larger. global-value: its elements are limited to that root mean square, without c",
            ),
            "optimizer_warmup_epochs": (
                0,
                "epochs before optimizer_keep_ratio applies",
            ),
            "optimizer_warmup_ratios": (
                None,
                "fraction in each of these epochs, or a number c for c, c², c³, … down to optimizer_keep_ratio. By default the fraction falls evenly",
            ),
            "optimizer_fp16_values": (
                False,
                "send values with 16 bits. Otherwise in the precision of the gradient",
            ),
            "optimizer_int32_indices": (
                True,
                "send positions with 32 bits. Otherwise with 64",
            ),
            "optimizer_num_batches_per_step": (
                1,
                "batches whose mean gradient g_i is compressed. Nothing is sent in between",
            ),
        },
        "optimizer=ef-sgd": {
            "optimizer_compressor": (
                "sign-and-norm",
                "name of the compressor: identity, qsgd, random-block, random-k, rounding, sign-and-norm, svd, top-k",
            ),
            "optimizer_momentum_before_compression": (
                False,
                "compress the momentum of each worker. Otherwise the mean has the momentum of the local optimizer",
            ),
            "optimizer_rescale_error": (
                True,
                "keep the error in units of the update when the learning rate changes",
            ),
            "optimizer_error_feedback": (
                True,
                "add a worker's error to its next gradient. Otherwise it is lost",
            ),
            "optimizer_min_compression_rate": (
                1.0,
                "tensors that would be compressed by this factor or less are all-reduced whole",
            ),
            "optimizer_per_tensor": (
                True,
                "compress each tensor by itself. Otherwise all are one vector",
            ),
            "optimizer_num_batches_per_step": (
                1,
                "batches whose mean gradient g_i is compressed. Nothing is sent in between",
            ),
        },
        "optimizer=signsgd": {
            "optimizer_num_batches_per_step": (
                1,
                "batches whose mean gradient g_i is compressed. Nothing is sent in between",
            ),
        },
        "optimizer=sparse-loco": {
            "optimizer_outer_rate": (
                1.0,
                "rate α of the mean displacement",
            ),
            "optimizer_error_decay": (
                0.95,
                "decay β of the errors",
            ),
            "optimizer_mean_over": (
                "all",
                "workers in the mean of an element: all, or senders, those with a value for it",
            ),
            "optimizer_kept": (
                64,
                "largest values of a chunk that are sent",
            ),
            "optimizer_chunk": (
                64,
                "largest number of rows and of columns of a chunk",
            ),
            "optimizer_bits": (
                2,
                "bits of a value, 1 to 8, or 32 for floats",
            ),
        },
        "optimizer=demo": {
            "optimizer_error_decay": (
                0.999,
                "decay β of the momenta",
            ),
            "optimizer_mean_over": (
                "all",
                "workers in the mean of a component: all, or senders, those with a value for it",
            ),
            "optimizer_kept": (
                32,
                "largest values of a chunk that are sent",
            ),
            "optimizer_chunk": (
                64,
                "largest number of rows and of columns of a chunk",
            ),
            "optimizer_num_batches_per_step": (
                1,
                "batches whose mean gradient g_i is compressed. Nothing is sent in between",
            ),
        },
        "optimizer=ddp-powersgd or ddp-batched-powersgd": {
            "optimizer_rank": (
                1,
                "rank of the approximation, at most the smaller side of a matrix. Try 1, 2, 4, … The batched hook is for rank 1 only, where ddp-powersgd is preferable, too",
            ),
            "optimizer_start_iteration": (
                "auto",
                "first compressed step, and all-reduce before it. auto: after 10 % of the steps planned at the start, and no less than the warm-up or 2. Increase it until the accuracy is right",
            ),
            "optimizer_error_feedback": (
                True,
                "add a worker's error to its next gradient. Otherwise it is lost",
            ),
            "optimizer_warm_start": (
                True,
                "reuse the last step's directions. Otherwise they are resampled",
            ),
            "optimizer_min_compression_rate": (
                2.0,
                "tensors that would be compressed by this factor or less are all-reduced whole",
            ),
            "optimizer_orthogonalization_epsilon": (
                1e-08,
                "number added to the norm of a direction at rank 1 and 2, and in half precision. At higher ranks PyTorch uses a QR factorization without it. 0, PyTorch's default: a gradient of zeros gives NaN",
            ),
            "optimizer_batch_tensors_with_same_shape": (
                False,
                "compress all matrices of a shape in a bucket in one product",
            ),
            "optimizer_compression_stats_logging_frequency": (
                10000,
                "steps between two lines of statistics in PyTorch's log (level INFO)",
            ),
            "optimizer_bucket_cap_mb": (
                None,
                "size of DDP's buckets in MiB. By default 1 for the first bucket and 25 for others",
            ),
        },
        "optimizer_compressor=qsgd": {
            "optimizer_levels": (
                4,
                "levels s above zero. A message has 4 bits an element with 4 to 7",
            ),
            "optimizer_unbiased": (
                False,
                "leave out the scaling to a contraction",
            ),
        },
        "optimizer_compressor=random-block or random-k": {
            "optimizer_keep_ratio": (
                0.01,
                "fraction of a matrix' entries that is kept",
            ),
            "optimizer_rank": (
                None,
                "keep r (m + k) entries of an m × k matrix instead, for the rank r",
            ),
        },
        "optimizer_compressor=rounding": {
            "optimizer_levels": (
                4,
                "levels s above zero. A message has 3 bits an element with 3, 4 bits up to 7",
            ),
        },
        "optimizer_compressor=svd": {
            "optimizer_rank": (
                1,
                "rank r of the approximation, at most the smaller side of a matrix",
            ),
        },
        "optimizer_compressor=top-k": {
            "optimizer_keep_ratio": (
                0.01,
                "fraction of a matrix' entries that is kept",
            ),
            "optimizer_rank": (
                None,
                "keep r (m + k)/4 entries of an m × k matrix instead, for the rank r",
            ),
        },
    }
