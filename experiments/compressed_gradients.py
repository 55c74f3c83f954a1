"""How much accuracy, bits and time does averaging compressed gradients cost?

All methods use the settings of all-reduce: learning rate, momentum, epochs, batches. There are
eight processes with one worker each, as PyTorch's hooks require. The hooks follow PyTorch's
guidance: they start after 10 % of the steps or the warm-up, and the batched one has rank 1. Deep
Gradient Compression reaches its keep ratio after a warm-up of a fifth of the epochs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, Results, Run, Values
from experiments.tuned_methods import STEP
from powergossip.formatting import markdown, spread
from powergossip.runs.metrics import last_values

if TYPE_CHECKING:
    from pandas import DataFrame

SEEDS = (1, 2, 3)
PROCESSES = 8


_COMMON: Values = {
    "evaluation_interval": 100,  # the last epoch only
    "checkpoint_interval": 100,
}
TASKS: dict[str, Values] = {
    "Digits": {"task": "Digits", "batch_size": 16, "num_epochs": 40, "learning_rate": 0.05},
    "FashionMNIST": {
        "task": "FashionMNIST",
        "batch_size": 32,
        "num_epochs": 5,
        "learning_rate": 0.1,
        "distributed_lr_warmup_epoch": 0.0,
        "lr_schedule_milestones": [[4, 0.1]],
    },
}
METHODS: dict[str, Values] = {
    "all-reduce": {"optimizer": "all-reduce"},
    "PowerSGD, rank 1": {"optimizer": "powersgd", "optimizer_rank": 1},
    "PowerSGD, rank 2": {"optimizer": "powersgd", "optimizer_rank": 2},
    "PyTorch's hook, rank 1": {"optimizer": "ddp-powersgd", "optimizer_rank": 1},
    "PyTorch's hook, rank 2": {"optimizer": "ddp-powersgd", "optimizer_rank": 2},
    "PyTorch's batched hook, rank 1": {"optimizer": "ddp-batched-powersgd", "optimizer_rank": 1},
    "DGC, 1 %": {"optimizer": "dgc", "optimizer_keep_ratio": 0.01},
    "EF-SGD, sign": {"optimizer": "ef-sgd", "optimizer_compressor": "sign-and-norm"},
    "EF-SGD, top 1 %": {
        "optimizer": "ef-sgd",
        "optimizer_compressor": "top-k",
        "optimizer_keep_ratio": 0.01,
    },
    "EF-SGD, random block, rank 2": {
        "optimizer": "ef-sgd",
        "optimizer_compressor": "random-block",
        "optimizer_rank": 2,
    },
}


def experiment() -> Experiment:
    """The runs of all tasks, methods and seeds, and a table for each task."""
    return Experiment(
        "the cost of averaging compressed gradients, on Digits and FashionMNIST",
        [lambda results: [r for task in TASKS for rs in _runs(task).values() for r in rs]],
        report,
    )


def _runs(task: str) -> dict[str, list[Run]]:
    epochs = TASKS[task]["num_epochs"]
    return {
        method: [
            Run(
                "train",
                {**_COMMON, **TASKS[task], **values, "seed": seed}
                | ({"optimizer_warmup_epochs": epochs // 5} if "dgc" in values.values() else {}),
                {"task": task, "method": method, "seed": seed},
                PROCESSES,
            )
            for seed in SEEDS
        ]
        for method, values in METHODS.items()
    }


def report(results: Results, folder: Path) -> str:
    """A Markdown table for each task: mean ± standard deviation over the seeds."""
    parts = [
        f"The cost of averaging compressed gradients: {PROCESSES} processes, one worker each, all "
        "methods with the settings of all-reduce. Mean ± standard deviation of "
        f"{len(SEEDS)} seeds. PyTorch's hooks compress after 10 % of the steps, or after the "
        "warm-up. The time of a step excludes evaluation; all processes share the cores of this "
        "machine.\n"
    ]
    for task, values in TASKS.items():
        rows = {method: [results(run) for run in runs] for method, runs in _runs(task).items()}
        parts.append(
            f"### {task}, {values['num_epochs']} epochs, batch {values['batch_size']}\n\n"
            f"{_table(rows)}\n"
        )
    return "\n".join(parts)


def _table(rows: Mapping[str, Sequence["DataFrame"]]) -> str:
    plain = sum(_bits(r) for r in rows["all-reduce"]) / len(rows["all-reduce"])
    header = ["method", "accuracy", "MB sent per worker", "less than all-reduce", "ms per step"]
    lines: list[list[str]] = []
    for method, of_seeds in rows.items():
        reached = [last_values(r, "accuracy", split="test_avg") for r in of_seeds]
        accuracies = [100 * float(values.iloc[0]) for values in reached if not values.empty]
        ended = [r for r, values in zip(of_seeds, reached, strict=True) if not values.empty]
        diverged = len(of_seeds) - len(ended)
        if not ended:
            lines.append([method, "diverged", "", "", ""])
            continue
        accuracy = f"{spread(accuracies, 2)} %"
        if diverged:
            accuracy += f" ({diverged} of {len(of_seeds)} diverged)"
        bits = sum(_bits(r) for r in ended) / len(ended)
        milliseconds = sum(map(_milliseconds, ended)) / len(ended)
        lines.append(
            [
                method,
                accuracy,
                f"{bits / 8e6:.2f}",
                f"{plain / bits:.1f}×",
                f"{milliseconds:.1f}",
            ]
        )
    return markdown(header, lines)


def _bits(rows: "DataFrame") -> float:
    return float(rows["bits"].max())


def _milliseconds(rows: "DataFrame") -> float:
    """Time of a step without evaluation and checkpoints. A step has one gradient per worker."""
    phases = rows[rows["name"] == "phase_seconds"]
    end = phases[phases["epoch"] == phases["epoch"].max()]
    steps = float(end[end["phase"] == "gradient"]["instances"].iloc[0])
    return 1e3 * float(end[end["phase"].isin(STEP)]["value"].sum()) / steps
