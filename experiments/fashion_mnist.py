"""How much accuracy does compression cost? PowerGossip, D-PSGD and all-reduce on FashionMNIST.

    python experiments/fashion_mnist.py                    run what has not been run, then report
    python experiments/fashion_mnist.py num_epochs=2       any key of train.config, for all methods

A ring of 8 workers, one MPI process each; the same small CNN, number of epochs, batch size and
learning rate for every method; three seeds. Runs lie in output/fashion_mnist/METHOD-seed-SEED; one
that is complete is not run again. The table is Markdown; the figure compares the first seeds.
"""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import metrics

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path("output/fashion_mnist")
SEEDS = (1, 2, 3)
COMMON = [
    "task=FashionMNIST",
    "task_architecture=CNN",
    "topology=ring",
    "num_epochs=5",
    "batch_size=32",
    "learning_rate=0.05",
    "distributed_lr_warmup_epoch=0",
    "lr_schedule_milestones=[[4, 0.1]]",
    "log_verbosity=1",
]
METHODS = {
    "all-reduce": ["optimizer=all-reduce"],
    "D-PSGD": ["optimizer=dpsgd"],
    "PowerGossip, 1 iteration": ["optimizer=power-gossip", "optimizer_num_iterations=1"],
    "PowerGossip, 2 iterations": ["optimizer=power-gossip", "optimizer_num_iterations=2"],
}


def main(overrides: list[str]) -> None:
    """Run, then print the table and write the figure."""
    runs: dict[str, list[DataFrame]] = {}
    for method, settings in METHODS.items():
        for seed in SEEDS:
            folder = OUTPUT / f"{method.replace(', ', '-').replace(' ', '-')}-seed-{seed}"
            arguments = [*COMMON, *settings, f"seed={seed}", *overrides]
            if not _is_complete(folder, arguments):
                print(f"{method}, seed {seed}", flush=True)
                program = ["mpirun", "-np", "8", sys.executable, str(ROOT / "train.py")]
                into = ["overwrite=true", "--output-dir", str(folder)]
                subprocess.run([*program, *arguments, *into], check=True)
                (folder / "arguments").write_text("\n".join(arguments))
            runs.setdefault(method, []).append(metrics.load(folder))
    print(table(runs))
    metrics.compare({method: rows[0] for method, rows in runs.items()}, OUTPUT / "figure.svg")
    print(f"\nfigure: {OUTPUT / 'figure.svg'}")


def table(runs: dict[str, list["DataFrame"]]) -> str:
    """A Markdown table: mean ± standard deviation over the seeds of what each method reached."""
    lines = [
        "| method | mean model | worst worker | MB sent per worker | less than D-PSGD |",
        "| --- | --- | --- | --- | --- |",
    ]
    dpsgd = sum(_bits(rows) for rows in runs["D-PSGD"])
    for method, of_seeds in runs.items():
        mean = [100 * _last(rows, split="test_avg").iloc[0] for rows in of_seeds]
        worst = [100 * _last(rows, split="test").min() for rows in of_seeds]
        bits = sum(_bits(rows) for rows in of_seeds)
        lines.append(
            f"| {method} | {_spread(mean)} | {_spread(worst)} "
            f"| {bits / len(of_seeds) / 8e6:.1f} | {dpsgd / bits:.1f}× |"
        )
    return "\n".join(lines)


def _last(rows: "DataFrame", split: str) -> "Series[float]":
    """The test accuracies at the last epoch."""
    accuracy = rows[(rows["name"] == "accuracy") & (rows["split"] == split)]
    return accuracy[accuracy["epoch"] == accuracy["epoch"].max()]["value"]


def _bits(rows: "DataFrame") -> int:
    return int(rows["bits"].max())


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    deviation = (sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)) ** 0.5
    return f"{mean:.2f} ± {deviation:.2f} %"


def _is_complete(folder: Path, arguments: list[str]) -> bool:
    """Whether this folder holds a finished run with these arguments."""
    done = folder / "arguments"
    return done.exists() and done.read_text() == "\n".join(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
