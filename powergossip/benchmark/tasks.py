"""The tasks: data, model, steps, and what an entry may tune.

A change of anything here that changes a result raises the task's `version`. Results of different
versions, tiers or data are not compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]  # of the keys of train.py

QUICK, FULL = "quick", "full"
TIERS = (QUICK, FULL)
TUNING_SEED, SEEDS = 11, (1, 2, 3)
RESULT, TUNING, FINAL = "result.json", "tuning", "final"  # file and stages of runs
TRIES: Mapping[str, int] = {QUICK: 4, FULL: 8}  # settings that an entry may try

# Keys of train.py that a setting may have: the method, the graph and the local optimizer.
TUNABLE = {
    *("optimizer", "learning", "learning_options", "local_steps", "overlapping"),
    *("gossip", "max_delay", "topology", "topology_options"),
    *("local_optimizer", "learning_rate", "momentum", "nesterov", "weight_decay"),
    *("gradient_clipping", "distributed_lr_warmup_epoch", "distributed_lr_warmup_factor"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
    *("muon_momentum", "muon_steps", "muon_precision", "muon_scale", "muon_rate"),
}
OPTION = "optimizer_"  # and the options of a method
OF_GRAPH = {"topology", "topology_options"}


@dataclass(frozen=True)
class Measure:
    """A measure of a model.

    Attributes:
        factor: Factor of the numbers that are shown.
    """

    name: str
    title: str
    larger_is_better: bool
    factor: float = 1.0
    places: int = 3

    @property
    def sign(self) -> int:
        """1 if larger is better, else −1."""
        return 1 if self.larger_is_better else -1

    def shown(self, value: float, sign: str = "") -> str:
        return f"{self.factor * value:{sign}.{self.places}f}"


ACCURACY = Measure("accuracy", "accuracy, %", True, factor=100.0, places=2)
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", False)
ERROR = Measure("error", "log₁₀ of the error", False, places=2)


@dataclass(frozen=True)
class BenchmarkTask:
    """A task.

    Attributes:
        group: Name under which the settings of several tasks may be given.
        targets: Value of the measure, by tier, whose first occurrence gives the megabytes and
            virtual seconds to a target.
        values: Keys of train.py; for consensus n_workers, matrices, size and steps.
        tiers: Further ones by tier.
    """

    name: str
    title: str
    group: str
    version: int
    measure: Measure
    targets: Mapping[str, float]
    values: Values
    tiers: Mapping[str, Values]

    @property
    def is_consensus(self) -> bool:
        return self.group == CONSENSUS

    @property
    def is_virtual(self) -> bool:
        """True if the virtual clock counts the seconds."""
        return "scenario" in self.values

    def values_of(self, tier: str) -> Values:
        return {**self.values, **self.tiers[tier]}

    def accepts(self, key: object) -> bool:
        """True if a setting may have this key."""
        keys = {"optimizer", *OF_GRAPH} if self.is_consensus else TUNABLE
        return key in keys or str(key).startswith(OPTION)


CONSENSUS, FASHION_MNIST, TEXT = "consensus", "fashion_mnist", "text"
GROUPS = (CONSENSUS, FASHION_MNIST, TEXT)


def _consensus(name: str, title: str, matrices: str) -> BenchmarkTask:
    return BenchmarkTask(
        name,
        title,
        CONSENSUS,
        3,
        ERROR,
        dict.fromkeys(TIERS, -3.0),
        {"n_workers": 8, "matrices": matrices, "size": 100, "topology": "ring"},
        {QUICK: {"steps": 1000}, FULL: {"steps": 5000}},
    )


_IMAGES: Values = {
    "task": "powergossip.benchmark.data:fashion_mnist",
    "task_architecture": "CNN",
    "batch_size": 32,
    "n_workers": 8,
    "topology": "ring",
    "learning_rate": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.0001,
    "distributed_lr_warmup_epoch": 0.0,
    "drop_last": True,
    "num_epochs": 4,
    "lr_schedule_milestones": [[3, 0.1]],
}


def _images(name: str, title: str, targets: tuple[float, float], **more: Any) -> BenchmarkTask:
    n = more.get("n_workers", 8)
    batch = 256 // n  # of all workers: 256 images
    return BenchmarkTask(
        name,
        title,
        FASHION_MNIST,
        2,
        ACCURACY,
        dict(zip(TIERS, targets, strict=True)),
        {**_IMAGES, "batch_size": batch, **more},
        {
            QUICK: {"task_options": {"images": 10_000, "test_images": 1_000}},
            FULL: {"task_options": {"images": 60_000, "test_images": 10_000}},
        },
    )


def _text(name: str, title: str, **more: Any) -> BenchmarkTask:
    return BenchmarkTask(
        name,
        title,
        TEXT,
        2,
        BITS_PER_BYTE,
        {QUICK: 3.7, FULL: 3.2},
        {
            "task": "Text",
            "task_architecture": "GPT",
            "n_workers": 8,
            "topology": "ring",
            "local_optimizer": "adamw",
            "adam_beta2": 0.95,
            "learning_rate": 0.003,
            "distributed_lr_warmup_epoch": 0.5,
            "lr_schedule": "cosine",
            "lr_schedule_milestones": [],
            "weight_decay": 0.1,
            "gradient_clipping": 1.0,
            "num_epochs": 4,
            "batch_size": 4,
            **more,
        },
        {
            QUICK: {"max_steps_per_epoch": 40, "task_options": _gpt(32, 2, 2, 64, 8192)},
            FULL: {"max_steps_per_epoch": 120, "task_options": _gpt(64, 3, 4, 128, 32768)},
        },
    )


def _gpt(hidden: int, layers: int, heads: int, length: int, evaluated: int) -> Values:
    return {
        "tokenizer": "bytes",
        "sequence_length": length,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "evaluation_tokens": evaluated,
    }


_LATE: Values = {
    "seconds_per_step": 1.0,
    "speeds": {3: 0.25},
    "loss": {"fraction": 0.1, "ends": "both"},
}

TASKS: dict[str, BenchmarkTask] = {
    task.name: task
    for task in [
        _consensus("consensus_random", "agreement on random matrices, 100 × 100", "random"),
        _consensus(
            "consensus_low_rank", "agreement on matrices of singular values k⁻²", "low-rank"
        ),
        _images("fashion_mnist_same", "FashionMNIST, the same data", (0.80, 0.88)),
        _images(
            "fashion_mnist_sorted",
            "FashionMNIST, one or two labels for each worker",
            (0.60, 0.75),
            use_decentralized_data=True,
        ),
        _images(
            "fashion_mnist_dirichlet",
            "FashionMNIST, labels from a Dirichlet distribution, α = 0.1",
            (0.70, 0.82),
            decentralized_data_dirichlet_alpha=0.1,
        ),
        _images(
            "fashion_mnist_16",
            "FashionMNIST, 16 workers, the same data",
            (0.80, 0.88),
            n_workers=16,
        ),
        _images(
            "fashion_mnist_late",
            "FashionMNIST, a worker 4 times slower, 10 % of exchanges lost",
            (0.80, 0.88),
            scenario=_LATE,
        ),
        _text("text_same", "a GPT on Python's sources, the same data"),
        _text(
            "text_topics",
            "a GPT on Python's sources, other packages for each worker",
            decentralized_data_column="topic",
        ),
    ]
}
