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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.study import (
    RELAY,
    SEEDS,
    VALIDATION_RATIO,
    Outcome,
    Outcomes,
    draw_by_size,
    lines,
    quality,
    size,
    table,
    tuned,
)
from experiments.tuned_methods import listed
from powergossip.formatting import counted
from powergossip.runner.runner import Experiment, Values

RATES = (0.0125, 0.025, 0.05, 0.1)
MOMENTUM = 0.9


@dataclass(frozen=True, eq=False)
class Pair:
    """A pair of an averaging rule and a learning rule.

    Attributes:
        averaging: Name of the averaging rule in tables.
        learning: Value of the key for the learning rule.
        values: Values for keys of train.py.
    """

    averaging: str
    learning: str
    values: Values

    @property
    def name(self) -> str:
        return ", ".join(self.case)

    @property
    def case(self) -> tuple[str, str]:
        return self.averaging, self.learning


ALL_REDUCE = Pair("all-reduce", "dpsgd", {"optimizer": "all-reduce"})
PLAIN = Pair("plain", "dpsgd", {"optimizer": "dpsgd"})
# A message of K-GT is twice as large as that of quasi-global momentum, with the same iterations.
SOME = (
    ALL_REDUCE,
    PLAIN,
    Pair("plain", "quasi-global-momentum", {"optimizer": "dpsgd"}),
    Pair(
        "PowerGossip, 8 iterations",
        "quasi-global-momentum",
        {"optimizer": "power-gossip", "optimizer_num_iterations": 8},
    ),
    Pair(
        "PowerGossip, 16 iterations",
        "k-gt",
        {"optimizer": "power-gossip", "optimizer_num_iterations": 16},
    ),
    Pair("double binary tree", RELAY, {"optimizer": "dpsgd", "topology": "double-binary-tree"}),
    Pair(
        "binary tree, 3 bits",
        RELAY,
        {
            "optimizer": "choco",
            "optimizer_compressor": "rounding",
            "optimizer_levels": 3,
            "topology": "binary-tree",
        },
    ),
)
MORE = (
    *SOME,
    Pair("plain", "gradient-tracking", {"optimizer": "dpsgd"}),
    Pair("plain", "exact-diffusion", {"optimizer": "dpsgd"}),
    Pair("chain", RELAY, {"optimizer": "dpsgd", "topology": "chain"}),
    Pair("binary tree", RELAY, {"optimizer": "dpsgd", "topology": "binary-tree"}),
)


def experiment(
    title: str,
    values: Values,
    methods: Sequence[Pair] = SOME,
    measure: str = "accuracy",
    rates: Sequence[float] = RATES,
    tuning_epochs: int = 2,
    seeds: Sequence[int] = SEEDS,
) -> Experiment:
    """An experiment of three stages, see the module.

    Args:
        methods: Pairs to compare, PLAIN among them.
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
            f"Mean ± standard deviation of {counted(len(seeds), 'seed')}. "
            f"Each method has momentum {MOMENTUM:g} and the best of the learning rates "
            f"{listed(rates)}: they are compared after {counted(tuning_epochs, 'epoch')}, then the "
            f"best and the next smaller one after {values['num_epochs']} epochs, on "
            f"{VALIDATION_RATIO:.0%} of the training data, held out, with a seed of their own. In "
            "a run, the learning rate falls to 0 as a cosine. MB sent are the mean of the workers "
            "in a run."
        )
        found = lines(
            outcomes,
            ["averaging", "learning rule"],
            {
                **quality(measure),
                "consensus distance": _distance,
                **size(outcomes[PLAIN.case]),
            },
            {"learning rate": lambda o: f"{o.values['learning_rate']:g}"},
            lambda o: f"{n} of {len(o.runs)} diverged" if (n := o.diverged(measure)) else "",
        )
        return f"{note}\n\n![{measure} against megabytes](figure.svg)\n\n" + table(
            folder / "table.csv", found
        )

    return tuned(
        title,
        values,
        ["averaging", "learning"],
        {method.case: {**method.values, "learning": method.learning} for method in methods},
        {method.case: [{"learning_rate": rate} for rate in rates] for method in methods},
        {"num_epochs": tuning_epochs},
        promoted,
        measure,
        seeds,
        report,
    )


def _distance(outcome: Outcome) -> str:
    distances = outcome.last("consensus_distance", type="params_only")
    return f"{sum(distances) / len(distances):.3g}"
