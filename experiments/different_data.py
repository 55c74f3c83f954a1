"""Which learning rule learns best where the workers' data differ, and for how many bits?

Eight workers have fixed shards of the training data. A method is a pair of an averaging rule and a
learning rule. The learning rate falls to 0 as a cosine: a learning rate above 0 at the end leaves
differences between neighbors in proportion to it. There are three stages:

1. The same learning rates for each method, in a part of the epochs. A tenth of the training data is
   held out to compare them.
2. The best of them and the next smaller one in all epochs, on the same data: some methods are
   unstable later with the largest rate that is good at first.
3. The better one with three other seeds and all training data, evaluated on the test data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.study import (
    MERGE,
    RELAY,
    SEEDS,
    VALIDATION_RATIO,
    Case,
    Outcome,
    Outcomes,
    draw_by_size,
    lines,
    quality,
    table,
    traffic,
    tuned,
)
from experiments.tuned_methods import listed
from powergossip.formatting import counted
from powergossip.runner.runner import Experiment, Values

RATES = (0.0125, 0.025, 0.05, 0.1)
MOMENTUM = 0.9


# (Name of the averaging rule in tables, key of the learning rule): further values.
ALL_REDUCE, PLAIN = ("all-reduce", "dpsgd"), ("plain", "dpsgd")
_PLAIN: Values = {"optimizer": "dpsgd"}
_POWER: Values = {"optimizer": "power-gossip"}
_ROUNDING: Values = {
    "optimizer": "choco",
    "optimizer_compressor": "rounding",
    "optimizer_levels": 3,
}
# A message of K-GT is twice as large as that of quasi-global momentum, with the same iterations.
SOME: Mapping[Case, Values] = {
    ALL_REDUCE: {"optimizer": "all-reduce"},
    PLAIN: _PLAIN,
    ("plain", "quasi-global-momentum"): _PLAIN,
    ("PowerGossip, 8 iterations", "quasi-global-momentum"): _POWER
    | {"optimizer_num_iterations": 8},
    ("PowerGossip, 16 iterations", "k-gt"): _POWER | {"optimizer_num_iterations": 16},
    ("double binary tree", RELAY): _PLAIN | {"topology": "double-binary-tree"},
    ("binary tree, 3 bits", RELAY): _ROUNDING | {"topology": "binary-tree"},
}
MORE: Mapping[Case, Values] = {
    **SOME,
    ("plain", "gradient-tracking"): _PLAIN,
    ("plain", "exact-diffusion"): _PLAIN,
    ("chain", RELAY): _PLAIN | {"topology": "chain"},
    ("binary tree", RELAY): _PLAIN | {"topology": "binary-tree"},
}


def experiment(
    title: str,
    values: Values,
    methods: Mapping[Case, Values] = SOME,
    measure: str = "accuracy",
    rates: Sequence[float] = RATES,
    tuning_epochs: int = 2,
) -> Experiment:
    """An experiment of three stages, see the module.

    Args:
        methods: Pairs to compare, `PLAIN` among them.
        measure: Measure of the mean model: accuracy, where larger is better, or perplexity.
        rates: Learning rates, ascending.
        tuning_epochs: Epochs of the first stage.
    """
    values = {key: value for key, value in values.items() if key != "lr_schedule_milestones"}
    values |= {"lr_schedule": "cosine", "momentum": MOMENTUM}

    def promoted(ranked: list[Values]) -> list[Values]:
        at = rates.index(ranked[0]["learning_rate"])
        return [{"learning_rate": rate} for rate in rates[max(0, at - 1) : at + 1]]

    def report(outcomes: Outcomes, folder: Path) -> str:
        draw_by_size(outcomes, measure, folder / "figure.svg")
        note = (
            f"Mean ± standard deviation of {len(SEEDS)} seeds. "
            f"Each method has momentum {MOMENTUM:g} and the best of the learning rates "
            f"{listed(rates)}: they are compared after {counted(tuning_epochs, 'epoch')}, then the "
            f"best and the next smaller one after {values['num_epochs']} epochs, on "
            f"{VALIDATION_RATIO:.0%} of the training data, held out, with their own seed. In "
            "a run, the learning rate falls to 0 as a cosine. MB sent are the mean of the workers "
            f"in a run. {MERGE}"
        )
        found = lines(
            outcomes,
            ["averaging", "learning rule"],
            {
                **quality(measure),
                "consensus distance": _distance,
                **traffic(outcomes[PLAIN]),
            },
            {"learning rate": lambda o: f"{o.values['learning_rate']:g}"},
            lambda o: o.divergence(measure),
        )
        return f"{note}\n\n![{measure} against megabytes](figure.svg)\n\n" + table(
            folder / "table.csv", found
        )

    return tuned(
        title,
        values,
        ["averaging", "learning"],
        {case: {**of_method, "learning": case[1]} for case, of_method in methods.items()},
        {case: [{"learning_rate": rate} for rate in rates] for case in methods},
        {"num_epochs": tuning_epochs},
        promoted,
        measure,
        report,
    )


def _distance(outcome: Outcome) -> str:
    distances = outcome.last("consensus_distance", type="params_only")
    return f"{sum(distances) / len(distances):.3g}"
