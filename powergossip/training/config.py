"""The configuration keys of train.py."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Config:
    """All configuration keys. The trailing comments are the --help text."""

    # The run
    n_workers: int | None = None  # number of workers, by default one for each process
    seed: int = 1
    num_epochs: int | None = None  # null here and below: the task's default
    max_steps_per_epoch: int | None = None  # skip the rest of each epoch
    device: str = "auto"  # auto, cpu, cuda or cuda:INDEX (auto spreads processes over GPUs)
    cuda_aware: str = "auto"  # messages from GPU memory: on, off, or auto (if MPI can, or NCCL)
    overwrite: bool = False  # delete an existing run in the output folder
    resume: bool | str = False  # true: resume the run in the output folder from its last
    #   checkpoint, also with another n_workers. auto: the same, or begin a run if there is none
    allow_lost_rows: bool = False  # resume although rows of metrics.jsonl are lost
    evaluate_only: bool = False  # evaluate a checkpoint of the run in the output folder: no
    #   training, and no file is changed
    checkpoint: str = "last"  # with evaluate_only: last or best
    checkpoint_interval: int = 5  # epochs between checkpoints; the end of a run always has one
    log_verbosity: int = 1  # 0 only the result, 1 a progress bar, 2 also a line for each epoch
    tensorboard: bool = False  # the same as trackers=[tensorboard]
    trackers: list[str] = field(default_factory=list)  # programs that get the rows of metrics.jsonl
    #   too: tensorboard, wandb, mlflow
    evaluation_interval: int = 1  # epochs between evaluations (the last epoch always has one)
    evaluate_average_model: bool = True  # evaluate the mean of all workers' models
    evaluate_workers: bool = True  # evaluate each worker's model
    evaluate_training_data: bool = False  # also evaluate on all training data, not augmented
    evaluate_test_data: bool = True  # false, for tuning: evaluate on validation data only
    mean_model_statistics: str = "averaged"  # batch norm: averaged, or recalibrated on data
    recalibration_batches: int = 10  # per worker

    # Data and model
    task: str = "Digits"  # a name, or a function of your own: package.module:callable
    task_architecture: str | None = None  # the model: a name, or a function of your own. By default
    #   the task's
    task_options: dict[str, Any] = field(default_factory=dict)  # such as {normalization: group}
    batch_size: int | None = None  # per worker, by default the task's
    drop_last: bool | None = None  # leave out the last, smaller batch of an epoch, by default for
    #   non-IID data only
    data_dir: str | None = None  # folder with the task's files, by default the usual places
    download: bool = True  # download data that are in none of these places
    validation_ratio: float = 0.0  # fraction of the training data held out: rows valid, valid_avg
    reshuffle_data: bool = True  # repartition the data every epoch (false: fixed shards)
    use_decentralized_data: bool = False  # non-IID: partition the data sorted by label
    decentralized_data_shuffled_ratio: float = 0.0  # fraction of the sorted data shuffled again
    decentralized_data_dirichlet_alpha: float | None = None  # non-IID: labels ~ Dirichlet(alpha)
    decentralized_data_column: str | None = None  # non-IID: samples with the same value in this
    #   column belong to one worker (of your own data)
    decentralized_data_placement: str = "given"  # which worker has which fixed shard: given, or
    #   mixed, so that neighbors on the topology have different labels
    data_processes: int = 0  # that load samples of your own data, for each process of the run

    # The local optimizer
    local_optimizer: str = "sgd"  # sgd or adamw
    learning_rate: float | None = None  # by default the task's
    momentum: float | None = None  # of sgd, by default the task's
    nesterov: bool = True  # of sgd
    precision: str = "fp32"  # of the loss and its gradient: fp32, or bf16 by torch's autocast.
    #   Parameters, messages and evaluations are in fp32
    torch_compile: bool = False  # compile the model's forward and backward passes in training
    batched_gradients: str = "auto"  # gradients of all workers of a process in one call: on, off,
    #   or auto (16 workers or more, models of the library whose layers are small)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float | None = None  # not on normalization layers, decoupled for adamw. By
    #   default the task's
    gradient_clipping: float | int | str | None = "auto"  # largest norm of a worker's gradient,
    #   null: unlimited, auto: the task's. For dgc see optimizer_clip_by
    lr_schedule: str = "milestones"  # after the warm-up: milestones, or cosine to 0 at the end
    lr_schedule_milestones: list[Any] | None = None  # [[epoch, factor], ...]: multiply from then
    #   on. By default the task's
    distributed_lr_warmup_epoch: float = 5.0  # length of the linear warm-up, 0: none
    distributed_lr_warmup_factor: float | int | str = 1.0  # the warm-up ends at learning_rate times
    #   this, auto: the number of workers

    # The method, and its options. Keys optimizer_X default to null: the default of the method
    optimizer: str = "power-gossip"  # gossip: all-reduce, dpsgd, power-gossip, choco, deepsqueeze,
    #   moniqua, push-sum. Compressed gradients: powersgd, dgc, ef-sgd, signsgd, ddp-powersgd,
    #   ddp-batched-powersgd
    topology: str = "ring"  # a name, or the path of an edge list or adjacency file
    topology_options: dict[str, Any] = field(default_factory=dict)  # such as {degree: 4}. Of static
    #   undirected graphs: {weights: metropolis}, constant or fastest
    overlapping: bool | None = None  # gossip while the gradient is computed, or after the update
    #   (false). By default true, except for gradient-tracking, momentum-tracking and gt-nsgd over
    #   dpsgd and power-gossip
    local_steps: int = 1  # gossip every k-th step
    gossip: str = "synchronous"  # exchanges with neighbors are waited for: synchronous, all of them
    #   before each step is over. bounded: where an edge is more than max_delay exchanges behind.
    #   asynchronous: never. a2cid2: never, and a second copy of the model accelerates averaging, of
    #   dpsgd with sgd (docs/when-workers-fail.md)
    max_delay: int | None = None  # of bounded (1). With exact-diffusion and a2cid2, also the delay
    #   that asynchronous exchanges are expected to have
    on_worker_loss: str = "end"  # of the run. continue: without the workers of a process that has
    #   ended or is stopped. replace: a new process takes its place. Both for mpirun --with-ft ulfm
    #   (docs/when-workers-fail.md)
    worker_timeout: float = 30.0  # seconds without a sign of life until a process counts as lost
    record_order: bool = False  # write the order of events to order.jsonl, which a scenario can
    #   replay. For exchanges that may be late
    scenario: Any = None  # a file with speeds, delays, losses, deaths and joins of workers, for the
    #   virtual clock: one process hosts all workers, and seconds in rows are virtual
    data_of_lost: str = "left"  # the samples of lost workers: left, nobody trains on them, or
    #   redistributed over the others, from the next epoch of each on
    learning: str = "dpsgd"  # the rule of gossip: dpsgd, or for data that differ between workers:
    #   quasi-global-momentum, gradient-tracking, k-gt, momentum-tracking, gt-nsgd,
    #   exact-diffusion, beer, motef (the last two with optimizer=choco), relay-sgd (on trees; with
    #   optimizer=choco, its messages are compressed)
    learning_options: dict[str, Any] = field(default_factory=dict)  # of relay-sgd: {correction: c}
    #   multiplies updates by c, auto: by the factor that relaying slows them down (auto).
    #   Of exact-diffusion: {dual_rate: θ} (1, over power-gossip 0.1), smaller against oscillations
    optimizer_diffusion_rate: float | int | str | None = None  # γ (1, for choco and deepsqueeze by
    #   compressor, tensors and topology, for moniqua 0.1), or auto for dpsgd and power-gossip: the
    #   best for plain gossip on this topology
    optimizer_rank: int | None = None  # power-gossip, powersgd, hooks, svd (1). At most the sides
    #   of a matrix. Hooks: try 1, 2, 4, ...; the batched hook is for rank 1 only, prefer
    #   ddp-powersgd. Values kept of an m x k matrix: top-k r (m + k)/4, random-k and random-block
    #   r (m + k)
    optimizer_num_iterations: int | None = None  # of power iteration per step (2)
    optimizer_warm_start: bool | None = None  # power-gossip, powersgd, hooks: reuse the last step's
    #   directions (true)
    optimizer_round_weights: bool | None = None  # round directions to their signs (false)
    optimizer_compressor: str | None = None  # choco, deepsqueeze, ef-sgd (sign-and-norm)
    optimizer_keep_ratio: float | None = None  # fraction of elements sent: top-k, random-k,
    #   random-block, dgc (0.01). For dgc, r above 1 means 1/r. Published: compress_ratio, 0.001
    optimizer_levels: int | None = None  # qsgd (4, 64 with learning=exact-diffusion),
    #   rounding (4; messages have 3 bits an element with 3, 4 bits with 7)
    optimizer_copy_rate: float | None = None  # choco (1, with unbiased by the sizes of tensors):
    #   how fast public copies follow
    optimizer_unbiased: bool | None = None  # qsgd: without its scaling to a contraction (false)
    optimizer_theta: float | None = None  # moniqua: bound on neighbors' differences (0.25)
    optimizer_running_sums: bool | None = None  # push-sum: messages are sums over all steps (false)
    optimizer_min_compression_rate: float | None = None  # powersgd, hooks (2), ef-sgd (1): tensors
    #   below it are sent uncompressed
    optimizer_start_compressing_after: int | None = None  # powersgd: steps of plain all-reduce (0)
    optimizer_num_batches_per_step: int | None = None  # compressed gradients: batches
    #   accumulated, but not with hooks (1)
    optimizer_start_iteration: int | str | None = None  # hooks: all-reduce before this step. auto:
    #   10 % of the steps planned at the start, and no less than the warm-up or 2. Increase it until
    #   the accuracy is right (auto)
    optimizer_error_feedback: bool | None = None  # powersgd, hooks, ef-sgd: add the error of
    #   compression to the next gradient (true)
    optimizer_orthogonalization_epsilon: float | None = None  # hooks: added to the norm of a
    #   direction at rank 1 and 2; torch's QR at higher ranks ignores it. 0: a gradient of zeros
    #   gives NaN (1e-8)
    optimizer_batch_tensors_with_same_shape: bool | None = None  # hooks: in one product (false)
    optimizer_compression_stats_logging_frequency: int | None = None  # hooks: steps between lines
    #   of torch's log (10000)
    optimizer_bucket_cap_mb: float | None = None  # hooks: size of DDP's buckets in MiB (torch's 25)
    optimizer_momentum_before_compression: bool | None = None  # ef-sgd: compress the momentum of
    #   each worker, in place of momentum after the mean (false)
    optimizer_rescale_error: bool | None = None  # ef-sgd: keep the error in units of the update
    #   when the learning rate changes (true)
    optimizer_per_tensor: bool | None = None  # ef-sgd: compress each tensor by itself (true), or
    #   all as one vector
    optimizer_clip_by: str | None = None  # dgc: the kind of gradient_clipping = c. gradient (the
    #   default): a worker's gradient has a norm of √n · c at most, for n workers. norm, value: each
    #   tensor has a norm, or elements, of c at most. global-norm: each tensor is multiplied by c
    #   over the root mean square of its norm in all workers, if that is larger. global-value: its
    #   elements are limited to that root mean square, without gradient_clipping
    optimizer_sample_ratio: float | None = None  # dgc: fraction sampled for the threshold (0.01)
    optimizer_strided_sample: bool | None = None  # dgc: at equal distances (true), or uniformly
    optimizer_max_adaptation_iterations: int | None = None  # dgc: threshold corrections (10).
    #   Published: max_adaptation_iters
    optimizer_compress_upper_bound: float | None = None  # dgc: where more elements than this times
    #   the target exceed the threshold, the largest are sent, otherwise the first in memory (1: the
    #   largest always). Published: 1.3
    optimizer_compress_lower_bound: float | None = None  # dgc: the threshold is multiplied by this
    #   while fewer elements than this times the target exceed it (0.8)
    optimizer_resample: bool | None = None  # dgc: select the largest elements of a surplus (true),
    #   or multiply the threshold by compress_upper_bound
    optimizer_momentum_masking: bool | None = None  # dgc: clear the momentum of sent values (true)
    optimizer_warmup_epochs: int | None = None  # dgc: epochs in which the fraction falls (0)
    optimizer_warmup_ratios: Any = None  # dgc: the fraction in each of them, or a number c for c,
    #   c², c³, … down to keep_ratio. Published: warmup_coeff
    optimizer_fp16_values: bool | None = None  # dgc: send values with 16 bits (false)
    optimizer_int32_indices: bool | None = None  # dgc: send indices with 32 bits (true), or 64.
    #   Published: 64

    # Differences between workers
    spectrum_logging_params: list[str] = field(default_factory=list)  # names of parameters
    spectrum_logging_epochs: list[int] = field(default_factory=list)
    spectrum_logging_worker_pairs: list[Any] = field(default_factory=list)  # [[0, 1], ...]

    # Connection of the processes
    distributed_backend: str = "auto"  # mpi, gloo or nccl. auto: that of the launcher, torchrun or
    #   mpirun. NCCL needs a GPU for each process
    distributed_init_file: str | None = None  # with gloo or nccl, without a launcher: a new file in
    #   a common folder, in which n_workers processes find each other
    rank: int = 0  # of this process, with distributed_init_file
    all_reduce: str = "own"  # own: the same bits with any backend, native: the library's
