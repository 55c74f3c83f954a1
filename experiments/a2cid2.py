"""Asynchronous D-PSGD with and without the second copy of A²CiD², at equal numbers of exchanges.

Sixteen workers on a ring, FashionMNIST, fixed shards with label proportions from a Dirichlet
distribution, on the virtual clock. Each method has the learning rate whose mean model is the best
on held-out training data, in all epochs.
"""

from pathlib import Path

from experiments.failing_workers import FAILING
from experiments.study import (
    SEEDS,
    VALIDATION_RATIO,
    Columns,
    Outcomes,
    lines,
    quality,
    table,
    tuned,
)
from experiments.tuned_methods import listed
from powergossip.formatting import spread
from powergossip.runner.runner import Experiment, Values

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


def experiment() -> Experiment:
    """Accuracy and consensus distance: runs that choose the learning rate, and those compared."""
    methods = {(name,): of_method for name, of_method in METHODS.items()}
    settings: list[Values] = [{"learning_rate": rate} for rate in RATES]
    return tuned(
        "asynchronous D-PSGD with and without the second copy of A²CiD²",
        VALUES,
        ["method"],
        methods,
        dict.fromkeys(methods, settings),
        few_epochs={},
        promoted=lambda ranked: ranked[:1],
        measure="accuracy",
        report=_report,
    )


def _report(outcomes: Outcomes, folder: Path) -> str:
    note = (
        f"Mean ± standard deviation of {len(SEEDS)} seeds, after {VALUES['num_epochs']} epochs of "
        f"{VALUES['n_workers']} workers on a ring, on the virtual clock. Learning rates are the "
        f"best of {listed(RATES)} for the mean model on {VALIDATION_RATIO:.0%} of the training "
        "data, held out."
    )
    columns: Columns = {
        **quality("accuracy"),
        "consensus distance": lambda o: spread(o.last("consensus_distance", type="params_only"), 3),
        "messages sent": lambda o: f"{o.largest('messages'):.0f}",  # by worker 0
        "learning rate": lambda o: f"{o.values['learning_rate']:g}",
    }
    return f"{note}\n\n{table(folder / 'table.csv', lines(outcomes, ['method'], columns))}"
