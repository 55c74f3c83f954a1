"""The configuration keys of gossip_run.py: as asked for, and as a run has them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from powergossip.runs.assignments import OPTION


@dataclass
class Config:
    """All configuration keys. The trailing comments are the --help text."""

    # The run
    n_workers: int | None = None  # total number of workers (null: one per process)
    seed: int = 42  # all random numbers follow from it
    num_steps: Any = None  # steps of all algorithms, or {ALGORITHM: steps, others: steps}
    #   (null: 5000, but 500 for uncompressed, push_sum, chebyshev, finite_time: they agree by then)
    device: str = "auto"  # auto, cpu, cuda or cuda:INDEX (auto assigns GPUs to processes in turn)
    distributed_backend: str = "auto"  # mpi, gloo or nccl (auto: the launcher's)
    overwrite: bool = False  # delete an existing run in the output folder
    log_verbosity: int = 1  # 0: only the result, 1: a progress bar, 2: also a line per setting
    tensorboard: bool = False  # also write events for TensorBoard

    # Data and topology
    data_type: str = "random"  # random, offset, sparse, log-normal, low-rank, faces, lfw
    matrix_size: int = 100  # rows and columns, except for images (faces, lfw)
    data_dir: str | None = None  # folder of the faces (null: scikit-learn's own folder)
    topology: str = "ring"  # a name, or the path of an edge list or adjacency file
    topology_options: dict[str, Any] = field(default_factory=dict)  # such as {degree: 4}, and for
    #   static undirected graphs {weights: metropolis} or constant

    # Algorithms
    algorithm: Any = "power_gossip"  # a name of gossip_run.ALGORITHMS, a list of names, all, or
    #   package.module:name, an averaging rule or a compressor, with its options optimizer_X
    compression_rank: int = 1  # rank r of power_gossip and svd; top-k and random-k keep
    #   r (m + k) / 4 of m k elements. Bits at 100 x 100, r = 1: power_gossip 3200, svd 6400, top-k
    #   2400, random-k 1600
    compression_num_iterations: int = 1  # power iterations of power_gossip per step
    compression_levels: int = 4  # levels of qsgd above zero

    # Logarithmic grids
    hyperparameter_num_samples: int | None = None  # number of diffusion rates (null: 20, but 1 for
    #   power_gossip and uncompressed unless hyperparameter_range_min is specified)
    hyperparameter_range_min: float | None = None  # smallest diffusion rate (null: 1e-4, but
    #   range_max for power_gossip and uncompressed unless num_samples is specified)
    hyperparameter_range_max: float = 1.308  # the best one for plain gossip on a ring of 8
    diffusion_rate: float | int | str | None = None  # one rate in place of the grid, or auto for
    #   power_gossip and uncompressed: the best one for plain gossip on this topology
    theta_num_samples: int = 20  # moniqua: number of bounds on the differences between neighbors
    theta_range_min: float = 0.1  # moniqua: the smallest bound
    theta_range_max: float = 10.0  # moniqua: the largest bound
    moniqua_num_samples: int | None = None  # moniqua: number of diffusion rates, each with every
    #   theta (null: hyperparameter_num_samples)


@dataclass
class Settings(Config):
    """The checked configuration of a sweep, see config_checks.checked."""

    n_workers: int = 1
    algorithm: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # X → value of optimizer_X

    def as_dict(self) -> dict[str, Any]:
        """The values by key, in the order of config.yaml."""
        values = asdict(self)
        return values | {f"{OPTION}{name}": v for name, v in values.pop("options").items()}
