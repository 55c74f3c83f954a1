"""What do few bits cost PowerGossip?

PowerGossip with 32, 8, 6 and 4 bits an element, on images and on texts. The learning rate and γ are
those that were tuned for 32 bits (fashion_mnist, topics_lstm). The runs of a seed have the same
data, initial model and order of batches, so that differences are of pairs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.study import (
    MERGE,
    Axes,
    Cases,
    Columns,
    Outcome,
    Outcomes,
    grid,
    lines,
    quality,
    study,
    table,
    traffic,
)
from experiments.tuned_methods import FASHION_MNIST, METHODS, TOPICS_LSTM
from powergossip.formatting import spread
from powergossip.runner.runner import Experiment, Values

SEEDS = (1, 2, 3, 4, 5)
WHOLE = 32
BITS = (WHOLE, 8, 6, 4)
TASKS: Mapping[str, tuple[Values, str]] = {
    "FashionMNIST": (FASHION_MNIST | {"learning_rate": 0.05}, "accuracy"),
    "texts": (TOPICS_LSTM | {"learning_rate": 20.0}, "perplexity"),
}


def experiment() -> Experiment:
    """Two tasks, five seeds."""
    cases: Cases = {}
    for task, (values, _) in TASKS.items():
        values = values | METHODS["PowerGossip, 2 iterations"] | {"optimizer_diffusion_rate": 1.0}
        axes: Axes = {"task": {task: values}, "bits": {b: {"optimizer_bits": b} for b in BITS}}
        cases |= grid({}, axes, SEEDS)
    return study("PowerGossip with few bits, on images and on texts, 5 seeds", cases, report)


def report(outcomes: Outcomes, folder: Path) -> str:
    """A table for each task."""
    tables = []
    for task, (_, measure) in TASKS.items():
        of_task = {(str(b),): o for (t, b), o in outcomes.items() if t == task}
        whole = of_task[str(WHOLE),]
        columns: Columns = {
            **quality(measure),
            "difference from 32 bits": _paired(whole, measure),
            **traffic(whole, "with 32 bits"),
        }
        found = lines(of_task, ["bits"], columns, diverged=_diverged(measure))
        tables.append(f"## {task}\n\n{table(folder / f'{task.lower()}.csv', found)}")
    above = (
        "PowerGossip, two iterations, ring of 8 workers, 5 epochs. Mean ± standard deviation of 5 "
        "seeds. The difference is of the mean models of the same seed. Learning rate and γ are "
        f"those tuned for 32 bits. MB sent are those of one worker in a run. {MERGE}"
    )
    return "\n\n".join([above, *tables])


def _diverged(measure: str) -> Callable[[Outcome], str]:
    return lambda outcome: outcome.divergence(measure)


def _paired(whole: Outcome, measure: str) -> Callable[[Outcome], str]:
    """The difference of the runs of each seed, in points of the accuracy."""
    factor = 100 if measure == "accuracy" else 1

    def cell(outcome: Outcome) -> str:
        if whole.diverged(measure):
            return ""
        pairs = zip(*(o.last(measure, split="test_avg") for o in (outcome, whole)), strict=True)
        return spread([factor * (ours - theirs) for ours, theirs in pairs], 2)

    return cell
