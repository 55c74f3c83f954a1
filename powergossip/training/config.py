"""The configuration keys of train.py: as asked for, and as a run has them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

from powergossip.training import method_keys
from powergossip.training.method_keys import PREFIX

if TYPE_CHECKING:
    from powergossip.algorithms.method import Method


@dataclass
class RunKeys:
    """The keys of all methods. The trailing comments are the --help text."""

    # The run
    n_workers: int | None = None  # number of workers, by default one for each process
    seed: int = 1  # all random numbers of the run follow from it
    num_epochs: int | None = None  # epochs. null, here and below: the task's default
    max_steps_per_epoch: int | None = None  # skip the rest of each epoch
    device: str = "auto"  # auto, cpu, cuda or cuda:INDEX (auto spreads processes over GPUs)
    cuda_aware: str = "auto"  # messages from GPU memory: on, off, or auto (if MPI can, or NCCL)
    overwrite: bool = False  # delete an existing run in the output folder
    resume: bool | str = False  # true: resume the run in the output folder from its last
    #   checkpoint, also with another n_workers. auto: the same, or begin a run if there is none
    allow_lost_rows: bool = False  # resume although rows of metrics.jsonl are lost
    evaluate_only: bool = False  # evaluate a checkpoint of the run in the output folder: no
    #   training, and no file is changed
    checkpoint: str = "last"  # to resume, or to evaluate: last or best
    checkpoint_interval: int = 5  # epochs between checkpoints; the end of a run always has one
    log_verbosity: int = 1  # 0: the result alone, 1: a progress bar, 2: also a line for each epoch
    tensorboard: bool = False  # the same as trackers=[tensorboard]
    trackers: list[str] = field(default_factory=list)  # programs that get the rows of metrics.jsonl
    #   too: tensorboard, wandb
    evaluation_interval: int = 1  # epochs between evaluations (the last epoch always has one)
    evaluate_average_model: bool = True  # evaluate the mean of all workers' models
    evaluate_workers: bool = True  # evaluate each worker's model
    evaluate_training_data: bool = False  # also evaluate on all training data, not augmented
    evaluate_test_data: bool = True  # false, for tuning: evaluate on validation data only
    mean_model_statistics: str = "averaged"  # batch norm statistics of the mean model: averaged, or
    #   recalibrated on data
    recalibration_batches: int = 10  # batches of each worker that recalibrate them
    final_merge: bool = False  # after the last step give all workers the mean of their models, by
    #   an all-reduce that is counted, and recalibrate batch norm's statistics

    # Data and model
    task: str = "Digits"  # Digits, FashionMNIST, Cifar, Cifar100, ImageNet, LSTM, Text, or your own
    #   function: package.module:callable
    task_architecture: str | None = None  # the model: a name, or your own function. By default the
    #   task's
    task_options: dict[str, Any] = field(default_factory=dict)  # such as {normalization: group}
    batch_size: int | None = None  # samples of a worker's batch, by default the task's
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
    #   column of your own data, or the same topic of documents, belong to one worker
    data_processes: int = 0  # processes that load samples of your own data, for each process of the
    #   run

    # The local optimizer
    local_optimizer: str = "sgd"  # sgd, adamw, or muon: hidden matrices by Muon, all other
    #   parameters by AdamW
    learning_rate: float | None = None  # by default the task's
    momentum: float | None = None  # momentum of sgd, by default the task's
    nesterov: bool = True  # Nesterov's momentum in sgd and muon
    precision: str = "fp32"  # precision of the loss and its gradient: fp32, or bf16 by torch's
    #   autocast. Parameters, messages and evaluations are in fp32
    torch_compile: bool = False  # compile the model's forward and backward passes in training
    batched_gradients: str = "auto"  # gradients of all workers of a process in one call: on, off,
    #   or auto (12 workers or more, models of the library whose layers are small)
    adam_beta1: float = 0.9  # decay rate of adamw's mean gradient
    adam_beta2: float = 0.999  # decay rate of adamw's mean square
    adam_epsilon: float = 1e-8  # added to the root of adamw's mean square
    muon_momentum: float = 0.95  # momentum of muon
    muon_steps: int = 5  # steps of the iteration
    muon_precision: str = "bf16"  # precision of the iteration: bf16 or fp32
    muon_scale: str = "match-rms-adamw"  # factor on the step of a matrix: match-rms-adamw
    #   (0.2 times the root of its longer side) or original (the root of rows/columns, at least 1)
    muon_rate: float = 1.0  # learning rate of muon's matrices, in units of learning_rate
    weight_decay: float | None = None  # weight decay except on normalization layers, decoupled for
    #   adamw and muon. By default the task's
    gradient_clipping: float | int | str | None = "auto"  # largest norm of a worker's gradient,
    #   null: unlimited, auto: the task's. With dgc times √n
    lr_schedule: str = "milestones"  # after the warm-up: milestones, or cosine to 0 at the end
    lr_schedule_milestones: list[Any] | None = None  # [[epoch, factor], ...]: multiply from then
    #   on. By default the task's
    distributed_lr_warmup_epoch: float = 5.0  # epochs of the linear warm-up, 0: none
    distributed_lr_warmup_factor: float | int | str = 1.0  # the warm-up ends at learning_rate times
    #   this, auto: the number of workers

    # The method
    optimizer: str = "power-gossip"  # gossip: all-reduce, dpsgd, power-gossip, choco, deepsqueeze,
    #   moniqua, push-sum, sparta. Compressed gradients: powersgd, dgc, ef-sgd, signsgd, demo,
    #   sparse-loco (with local_steps), ddp-powersgd, ddp-batched-powersgd
    topology: str = "ring"  # ring, unidirectional-ring, chain, star, fully-connected, torus,
    #   hypercube, binary-tree, double-binary-tree, exponential, equi-static, social-network,
    #   watts-strogatz, random-regular, or the path of an edge list or adjacency file. Time-varying:
    #   one-peer-exponential, one-peer-equi, base-graph, random-matching, epidemic, round-robin
    topology_options: dict[str, Any] = field(default_factory=dict)  # such as {degree: 4}, and for
    #   static undirected graphs {weights: metropolis} or constant
    overlapping: bool | None = None  # gossip while the gradient is computed, or after the update
    #   (false). By default true where the learning rule can, except for diloco, and for
    #   gradient-tracking, momentum-tracking and gt-nsgd over dpsgd and power-gossip
    local_steps: int = 1  # gossip every k-th step, or average displacements (sparse-loco)
    learning: str = "dpsgd"  # learning rule of gossip: dpsgd, or for data that differ between
    #   workers: quasi-global-momentum, gradient-tracking, k-gt, momentum-tracking, gt-nsgd,
    #   exact-diffusion, beer, motef (the last two with optimizer=choco), relay-sgd (on trees; with
    #   optimizer=choco, its messages are compressed). For language models, with local_steps:
    #   diloco, gasloc, noloco
    learning_options: dict[str, Any] = field(default_factory=dict)  # relay-sgd has {correction: c},
    #   which multiplies updates by c, auto: by the factor that relaying slows them down (auto).
    #   exact-diffusion has {dual_rate: θ} (1, over power-gossip 0.1), smaller against oscillations.
    #   diloco, gasloc and noloco have {outer_rate: μ} (0.7), outer_momentum (0.5; noloco 0.3),
    #   gradient_correction (false) for different data, at a correction_rate (0.1), and fragments
    #   (1); noloco has consensus_rate (μ)

    # Late exchanges and lost workers (docs/when-workers-fail.md)
    gossip: str = "synchronous"  # wait for exchanges with neighbors: synchronous, for all of them
    #   before each step is over. bounded: where an edge is more than max_delay exchanges behind.
    #   asynchronous: never. a2cid2: never, and a second copy of the model accelerates averaging, of
    #   dpsgd with sgd
    max_delay: int | None = None  # exchanges that an edge may be behind with gossip=bounded (1).
    #   With exact-diffusion and a2cid2, also the delay that asynchronous exchanges are expected to
    #   have
    on_worker_loss: str = "end"  # when a process has ended or is stopped: end the run, or continue
    #   without its workers, which needs mpirun --with-ft ulfm, or a ticket
    worker_timeout: float = 30.0  # seconds without a sign of life until a process counts as lost
    scenario: Any = None  # speeds, delays, losses, deaths and joins of workers, for the virtual
    #   clock: a YAML file or a mapping. One process hosts all workers, and seconds in rows are
    #   virtual
    data_of_lost: str = "left"  # the samples of lost workers: left, nobody trains on them, or
    #   redistributed over the others, from the next epoch of each on

    # Differences between workers
    spectrum_logging_params: list[str] = field(default_factory=list)  # names of parameters
    spectrum_logging_epochs: list[int] = field(default_factory=list)  # epochs, counted from 1
    spectrum_logging_worker_pairs: list[Any] = field(default_factory=list)  # [[0, 1], ...]

    # Connection of the processes
    distributed_backend: str = "auto"  # mpi, gloo or nccl. auto: the launcher's, torchrun or
    #   mpirun. NCCL needs a GPU for each process
    distributed_init_file: str | None = None  # a new file in a common folder, in which n_workers
    #   processes find each other, with gloo or nccl and without a launcher
    rank: int = 0  # index of this process, with distributed_init_file
    ticket: str | None = None  # of processes on machines anywhere: new, which prints a ticket for
    #   n_workers machines, or the ticket, or the name of a run that this machine has joined
    ticket_options: dict[str, Any] = field(default_factory=dict)  # of this machine: {port: UDP
    #   port}, and of the first one {addresses: [IP:PORT]} behind a router, {relay: URL} of your
    #   own, or {relay: n0}


_METHODS = method_keys.methods()
# All configuration keys, as a driver or a command line sets them. null: the method's default.
Config: type[RunKeys] = make_dataclass(
    "Config",
    [(key, kind, None) for key, kind in method_keys.types(_METHODS).items()],
    bases=(RunKeys,),
    namespace={
        "__module__": __name__,
        "groups": method_keys.groups(_METHODS),
        "library": frozenset(_METHODS),  # optimizer=NAME and optimizer_compressor=NAME
    },
)


@dataclass
class Settings(RunKeys):
    """The checked configuration of a run: the task's and the method's defaults in place of null.

    Attributes:
        options: Values of the keys optimizer_X, by X, of the method alone. See
            config_checks.checked.
        method: The same under the method's own names, with the options of the learning rule.
    """

    n_workers: int = 1
    num_epochs: int = 1
    batch_size: int = 1
    drop_last: bool = False
    learning_rate: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    gradient_clipping: float | None = None
    lr_schedule_milestones: list[Any] = field(default_factory=list)
    distributed_lr_warmup_factor: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # X → value
    method: "Method" = field(default=None, compare=False)  # type: ignore[assignment] # with checked

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
        """The settings with these values by key, as `as_dict` returns them."""
        options = {k.removeprefix(PREFIX): v for k, v in values.items() if k.startswith(PREFIX)}
        others = {key: value for key, value in values.items() if not key.startswith(PREFIX)}
        return cls(**others, options=options)

    def as_dict(self) -> dict[str, Any]:
        """The values by key, in the order of config.yaml."""
        values = asdict(self)
        options, _ = values.pop("options"), values.pop("method")
        return {**values, **{f"{PREFIX}{name}": value for name, value in options.items()}}

    @property
    def architecture(self) -> str:
        """The name of the model, for a task whose default is known."""
        return self.task_architecture or ""

    @property
    def by_edges(self) -> bool:
        """True if workers exchange with one neighbor at a time, each in its own steps."""
        asked = self.scenario is not None or self.gossip != "synchronous" or self.survives
        return asked and not self.one_way

    @property
    def survives(self) -> bool:
        """True if a run goes on without the processes that it loses."""
        return self.on_worker_loss != "end"

    @property
    def one_way(self) -> str:
        """The name of the rule whose messages are not exchanges, or "". A scenario then has losses
        only."""
        from powergossip.algorithms import AVERAGING, learning

        rows = (self.optimizer, AVERAGING), (self.learning, learning.LEARNING)
        found = (name for name, row in rows if getattr(row.get(name), "one_way", False))
        return next(found, "")
