"""Asynchronous D-PSGD with and without the second copy of A²CiD², at equal numbers of exchanges.

Sixteen workers on a ring, FashionMNIST, fixed shards with label proportions from a Dirichlet
distribution, on the virtual clock. Each method has the learning rate whose mean model is the best
on held-out training data, in all epochs.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.failing_workers import FAILING
from experiments.runner import Experiment, Results, Run, Values, sentence_case
from experiments.tuned_methods import SEEDS, TUNING, VALIDATION_RATIO, listed, score
from powergossip.formatting import counted, markdown, spread
from powergossip.runs.metrics import last_values

VALUES: Values = FAILING | {
    "optimizer": "dpsgd",
    "overlapping": False,
    "momentum": 0.9,
    "scenario": {"jitter": 0.2},
    "evaluation_interval": 100,  # the last epoch only
    "evaluate_workers": True,
}
METHODS: dict[str, Values] = {
    "D-PSGD": {"gossip": "asynchronous"},
    "A²CiD²": {"gossip": "a2cid2"},
}
RATES = (0.005, 0.01, 0.02, 0.05, 0.1)


def experiment(
    values: Values = VALUES, rates: Sequence[float] = RATES, seeds: Sequence[int] = SEEDS
) -> Experiment:
    """Accuracy and consensus distance: runs that choose the learning rate, and those compared."""
    title = "asynchronous D-PSGD with and without the second copy of A²CiD²"

    def tuning(method: str) -> list[Run]:
        return [
            Run(
                "train",
                {**values, **METHODS[method], "learning_rate": rate, **TUNING},
                {"method": method, "learning_rate": rate},
            )
            for rate in rates
        ]

    def final(results: Results, method: str) -> list[Run]:
        def accuracy(run: Run) -> float:
            return score(results(run), "accuracy", "valid_avg")

        rate = max(tuning(method), key=accuracy).values["learning_rate"]
        return [
            Run(
                "train",
                {**values, **METHODS[method], "learning_rate": rate, "seed": seed},
                {"method": method, "seed": seed},
            )
            for seed in seeds
        ]

    def report(results: Results, folder: Path) -> str:
        note = (
            f"{sentence_case(title)}. Mean ± standard deviation of {counted(len(seeds), 'seed')}, "
            f"after {counted(values['num_epochs'], 'epoch')} of {values['n_workers']} workers on a "
            f"ring, on the virtual clock. Learning rates are the best of {listed(rates)} for the "
            f"mean model on {VALIDATION_RATIO:.0%} of the training data, held out."
        )
        lines = [_line(results, method, final(results, method)) for method in METHODS]
        header = ["method", "accuracy, mean model", "worst worker", "consensus distance"]
        return f"{note}\n\n{markdown([*header, 'messages sent', 'learning rate'], lines)}\n"

    return Experiment(
        title,
        [
            lambda results: [run for method in METHODS for run in tuning(method)],
            lambda results: [run for method in METHODS for run in final(results, method)],
        ],
        report,
    )


def _line(results: Results, method: str, runs: Sequence[Run]) -> list[str]:
    """A line of the table. Messages are those of worker 0."""
    rows = [results(run) for run in runs]
    mean = [100 * score(r, "accuracy", "test_avg") for r in rows]
    worst = [100 * float(last_values(r, "accuracy", split="test").min()) for r in rows]
    distance = [
        float(last_values(r, "consensus_distance", type="params_only").iloc[0]) for r in rows
    ]
    return [
        method,
        f"{spread(mean, 2)} %",
        f"{spread(worst, 2)} %",
        spread(distance, 3),
        f"{sum(float(r['messages'].max()) for r in rows) / len(rows):.0f}",
        f"{runs[0].values['learning_rate']:g}",
    ]
