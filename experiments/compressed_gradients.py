"""How much accuracy, bits and time does averaging compressed gradients cost?

All methods use the settings of all-reduce: learning rate, momentum, epochs, batches. There are
eight processes with one worker each, as PyTorch's hooks require. The hooks follow PyTorch's
guidance: they start after 10 % of the steps or the warm-up, and the batched one has rank 1. Deep
Gradient Compression reaches its keep ratio after a warm-up of a fifth of the epochs.
"""

from pathlib import Path

from experiments.study import (
    SEEDS,
    Axes,
    Cases,
    Outcome,
    Outcomes,
    grid,
    lines,
    size,
    study,
    table,
    totals,
)
from powergossip.formatting import spread
from powergossip.runner.runner import Experiment, Values

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
    cases: Cases = {}
    for task, values in TASKS.items():
        warmup = {"optimizer_warmup_epochs": values["num_epochs"] // 5}
        methods = {
            method: of_method | (warmup if of_method["optimizer"] == "dgc" else {})
            for method, of_method in METHODS.items()
        }
        axes: Axes = {"task": {task: values}, "method": methods}
        cases |= grid(_COMMON, axes, SEEDS, processes=PROCESSES)
    title = "the cost of averaging compressed gradients, on Digits and FashionMNIST"
    return study(title, cases, report)


def report(outcomes: Outcomes, folder: Path) -> str:
    """A table for each task: mean ± standard deviation over the seeds."""
    parts = [
        f"{PROCESSES} processes, one worker each, all "
        "methods with the settings of all-reduce. Mean ± standard deviation of "
        f"{len(SEEDS)} seeds. PyTorch's hooks compress after 10 % of the steps, or after the "
        "warm-up. The time of a step excludes evaluation; all processes share the cores of this "
        "machine."
    ]
    for task, values in TASKS.items():
        of_task = {(method,): outcomes[task, method] for method in METHODS}
        found = lines(
            of_task,
            ["method"],
            {
                "accuracy": _accuracy,
                **size(of_task["all-reduce",], "all-reduce", places=2),
                "ms per step": _milliseconds,
            },
            diverged=lambda o: "" if o.ended("accuracy").runs else "diverged",
        )
        parts += [
            f"## {task}, {values['num_epochs']} epochs, batch {values['batch_size']}",
            table(folder / f"{task}.csv", found),
        ]
    return "\n\n".join(parts)


def _accuracy(outcome: Outcome) -> str:
    ended = outcome.ended("accuracy")
    text = f"{spread([100 * a for a in ended.last('accuracy', split='test_avg')], 2)} %"
    diverged = outcome.diverged("accuracy")
    return f"{text} ({diverged} of {len(outcome.runs)} diverged)" if diverged else text


def _milliseconds(outcome: Outcome) -> str:
    """Time of a step in all epochs, without evaluation and checkpoints."""
    ends = [totals(rows).iloc[-1] for rows in outcome.ended("accuracy").rows]
    return f"{1e3 * sum(end['seconds'] / end['steps'] for end in ends) / len(ends):.1f}"
