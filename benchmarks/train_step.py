"""The time of a training step, and how much of the averaging the gradient hides.

    mpirun -np 8 python -m benchmarks.train_step task=FashionMNIST batch_size=128

The arguments are keys of train.py. The output is one JSON line. All times are milliseconds a step,
medians of rounds where these take turns:

    data_ms         fetching the batches of the hosted workers
    compute_ms      batches, gradients and local update, without averaging
    averaging_ms    a step of averaging alone: compressing, messages, mixing
    sequential_ms   a step of training with overlapping=false
    overlapping_ms  a step of training with overlapping=true: messages in flight meanwhile
    gradient_ms     batches and gradients of one process, while the others sleep
    bound_ms        the sum of the gradients' times of all processes ÷ cores of the host
    ratio           overlapping_ms in multiples of bound_ms

With enough cores, overlapping_ms is close to the larger of compute_ms and averaging_ms. Where
processes share cores and memory, moving a message is computation too, and nothing is hidden.
"""

from collections.abc import Callable
from statistics import median

import train
from benchmarks.timing import alone, in_turns, report
from powergossip import algorithms
from powergossip.algorithms.learning import Workers
from powergossip.network import processes
from powergossip.network.processes import cores
from powergossip.runs import configuration
from powergossip.training.config_checks import checked
from powergossip.training.methods import make_averaging
from powergossip.training.trainer import Trainer

ROUNDS, SECONDS = 15, 15.0
ALONE = 5  # measurements of one process before the others, and after them


def main(arguments: list[str]) -> None:
    """Measure the configuration of the arguments; print one line."""
    comm = processes()
    with comm.agreed():
        configuration.read_command_line(train.config, arguments, __doc__ or "")
        c = checked(train.config, comm)
    trainer, step = Trainer(c, comm), 0
    network, parameters, local = trainer.network, trainer.parameters, trainer.execution.local
    averaging = make_averaging(c, trainer.network, parameters.layout)

    def fetch() -> None:
        for worker in network.workers:
            trainer.task.batch(worker, 0, step % trainer.steps_per_epoch)

    def gradient() -> None:
        nonlocal step
        step += 1
        trainer.execution.gradient(0, step % trainer.steps_per_epoch)

    def compute() -> None:
        parameters.grad.zero_()
        gradient()
        local.step(parameters.grad)

    def average() -> None:
        network.run(averaging.step(parameters.x))

    def training(overlapping: bool) -> Callable[[], None]:
        workers = Workers(network, lambda layout: averaging, parameters, local, c.weight_decay)
        rule = algorithms.DPSGD(workers, overlapping=overlapping)

        def train_step() -> None:
            rule.start()
            gradient()
            rule.finish()

        return train_step

    sequential, overlapping = training(False), training(True)
    for _ in range(20):  # workers that differ, as they do when they learn
        sequential()
    start = parameters.x.clone()
    functions = {
        "data_ms": fetch,
        "compute_ms": compute,
        "averaging_ms": average,
        "sequential_ms": sequential,
        "overlapping_ms": overlapping,
    }
    of_gradient = [alone(gradient, comm, trainer.network.device) for _ in range(ALONE)]
    times = in_turns(
        functions,
        ROUNDS,
        SECONDS,
        comm,
        trainer.network.device,
        before=lambda: parameters.x.copy_(start),
    )
    of_gradient += [alone(gradient, comm, trainer.network.device) for _ in range(ALONE)]
    gradient_ms = median(of_gradient)
    bound_ms = gradient_ms * comm.local_size / min(comm.local_size, len(cores()))
    medians = {name: round(median(of_function), 3) for name, of_function in times.items()}
    report(
        comm,
        task=c.task,
        model=c.task_architecture,
        optimizer=c.optimizer,
        batch_size=c.batch_size,
        n_workers=c.n_workers,
        processes=comm.size,
        **medians,
        gradient_ms=round(gradient_ms, 3),
        bound_ms=round(bound_ms, 3),
        ratio=round(medians["overlapping_ms"] / bound_ms, 3),
        data_share=round(medians["data_ms"] / medians["sequential_ms"], 4),
        averaging_share=round(1 - medians["compute_ms"] / medians["sequential_ms"], 4),
    )


if __name__ == "__main__":
    configuration.run_entry_point(main)
