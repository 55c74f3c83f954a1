"""The time of a training step with exchanges by edges, in multiples of one without.

    mpirun -np 8 python -m benchmarks.linked_step optimizer=power-gossip
    mpirun -np 8 --with-ft ulfm python -m benchmarks.linked_step on_worker_loss=continue

The arguments are keys of train.py. The output is one JSON line. All times are milliseconds a step,
medians of rounds where these take turns:

    step_ms    a step that all processes take together: gossip=synchronous
    linked_ms  a step with the given `gossip` or `on_worker_loss`, by default gossip=bounded with
               max_delay=0, which waits for all exchanges
    ratio      the median over rounds of linked_ms in multiples of step_ms

Neither has evaluations. The processes wait for each other after each round only.
"""

import json
from statistics import median

import train
from benchmarks.timing import in_turns
from powergossip.network import processes
from powergossip.runs import configuration
from powergossip.training.asynchronous.execution import AcrossProcesses
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer

ROUNDS, SECONDS = 15, 15.0
STEPS = 10  # between two measurements of the time


def main(arguments: list[str]) -> None:
    """Measure the configuration of the arguments; print one line."""
    comm = processes()
    with comm.agreed():
        configuration.read_command_line(train.config, arguments, __doc__ or "")
        given = train.config
        if given.gossip == "synchronous" and given.on_worker_loss == "end":
            given.gossip, given.max_delay = "bounded", 0
        c = checked(given, comm)
        given.gossip, given.max_delay, given.on_worker_loss = "synchronous", None, "end"
        together = checked(given, comm)
    linked, plain = Trainer(c, comm), Trainer(together, comm)
    execution, taken = linked.execution, 0
    assert isinstance(execution, AcrossProcesses)

    def steps_together() -> None:
        for _ in range(STEPS):
            plain.execution.step += 1
            plain.parameters.grad.zero_()
            plain.execution.rule.start()
            plain.execution.gradient(0, plain.step % plain.steps_per_epoch)
            plain.execution.rule.finish()

    def steps_linked() -> None:
        nonlocal taken
        taken += STEPS
        execution.clock.run(taken)

    times = in_turns(
        {"step": steps_together, "linked": steps_linked},
        ROUNDS,
        SECONDS,
        comm,
        plain.network.device,
    )
    if comm.rank == 0:
        step, of_linked = ([t / STEPS for t in of] for of in times.values())
        ratios = [b / a for a, b in zip(step, of_linked, strict=True)]
        print(
            json.dumps(
                {
                    "task": c.task,
                    "model": c.task_architecture,
                    "optimizer": c.optimizer,
                    "gossip": c.gossip,
                    "on_worker_loss": c.on_worker_loss,
                    "batch_size": c.batch_size,
                    "processes": comm.size,
                    "step_ms": round(median(step), 3),
                    "linked_ms": round(median(of_linked), 3),
                    "ratio": round(median(ratios), 3),
                }
            )
        )


if __name__ == "__main__":
    configuration.run_entry_point(main)
