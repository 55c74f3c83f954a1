"""What a step of training costs, and how much of the averaging hides behind the gradient.

    mpirun -np 8 python benchmarks/train_step.py task=FashionMNIST batch_size=128

takes the keys of train.py and prints one JSON line. All times are milliseconds a step, medians of
rounds in which these take turns:

    data_ms         fetching the batches of the hosted workers
    compute_ms      batches, gradients and local update, without averaging
    averaging_ms    a step of averaging alone: compressing, messages, mixing
    sequential_ms   a step of training with overlapping=false
    overlapping_ms  a step of training with overlapping=true: messages travel meanwhile

With cores enough, overlapping_ms is close to the larger of compute_ms and averaging_ms; where
processes share cores and memory, there is nothing to hide: moving a message is computing.
"""

import json
from statistics import median
from typing import Any

import train
from benchmarks.timing import in_turns
from powergossip import algorithms
from powergossip.network import processes
from powergossip.runs import configuration

ROUNDS, SECONDS = 15, 15.0


def main(arguments: list[str]) -> None:
    """Measure as the arguments say, print one line."""
    who = processes()
    who.agree(lambda: configuration.read_command_line(train.config, arguments, __doc__ or ""))
    run = who.agree(lambda: train._Run(train.config, who))
    run.load_data()
    c, step = run.config, 0
    averaging = run._averaging()

    def fetch() -> None:
        for worker in run.network.workers:
            run.task.batch(worker, 0, step % run.task.steps_per_epoch)

    def gradient() -> Any:
        nonlocal step
        step += 1
        run.parameters.grad.zero_()
        return run._gradient(0, step % run.task.steps_per_epoch)

    def compute() -> None:
        gradient()
        run._update(run.parameters.grad)

    def average() -> None:
        run.network.run(averaging.step(run.parameters.x))

    def training(overlapping: bool) -> algorithms.DPSGD:
        return algorithms.DPSGD(
            run.network,
            averaging,
            run.parameters,
            run._update,
            overlapping=overlapping,
            weight_decay=c.weight_decay,
        )

    one_by_one, at_once = training(False), training(True)
    for _ in range(20):  # workers that have come apart, as they do when they learn
        one_by_one.step(gradient)
    start = run.parameters.x.clone()
    functions = {
        "data_ms": fetch,
        "compute_ms": compute,
        "averaging_ms": average,
        "sequential_ms": lambda: one_by_one.step(gradient),
        "overlapping_ms": lambda: at_once.step(gradient),
    }
    times = in_turns(
        list(functions.values()),
        ROUNDS,
        SECONDS,
        who,
        run.device,
        before=lambda: run.parameters.x.copy_(start),
    )
    if who.rank == 0:
        medians = {
            name: round(1e3 * median(seconds), 3)
            for name, seconds in zip(functions, times, strict=True)
        }
        print(
            json.dumps(
                {
                    "task": c.task,
                    "model": c.task_architecture,
                    "optimizer": c.optimizer,
                    "batch_size": c.batch_size,
                    "n_workers": c.n_workers,
                    "processes": who.size,
                    **medians,
                    "data_share": round(medians["data_ms"] / medians["sequential_ms"], 4),
                    "averaging_share": round(
                        1 - medians["compute_ms"] / medians["sequential_ms"], 4
                    ),
                }
            )
        )


if __name__ == "__main__":
    configuration.run_entry_point(main)
