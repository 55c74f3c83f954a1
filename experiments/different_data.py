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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runner import Experiment, Results, Run, Values, sentence_case
from experiments.tuned_methods import SEEDS, TUNING, VALIDATION_RATIO, listed, score
from powergossip.formatting import counted, markdown, spread
from powergossip.runs import figures
from powergossip.runs.metrics import last_values

if TYPE_CHECKING:
    from pandas import DataFrame

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
        return f"{self.averaging}, {self.learning}"


RELAY = "relay-sgd"
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

    def run(method: Pair, rate: float, further: Values) -> Run:
        of_method = {**method.values, "learning": method.learning, "learning_rate": rate}
        labels = {"averaging": method.averaging, "learning": method.learning}
        return Run("train", {**values, **of_method, **further}, labels)

    short = TUNING | {"num_epochs": tuning_epochs}
    tuning = {method: [run(method, rate, short) for rate in rates] for method in methods}

    def best(tried: Sequence[Run], results: Results) -> float:
        found = max(tried, key=lambda of: score(results(of), measure, "valid_avg"))
        return float(found.values["learning_rate"])

    def in_all_epochs(results: Results) -> dict[Pair, list[Run]]:
        found = {}
        for method, tried in tuning.items():
            at = rates.index(best(tried, results))
            found[method] = [run(method, r, TUNING) for r in rates[max(0, at - 1) : at + 1]]
        return found

    def final(results: Results) -> dict[Pair, list[Run]]:
        return {
            method: [run(method, best(tried, results), {"seed": seed}) for seed in seeds]
            for method, tried in in_all_epochs(results).items()
        }

    def report(results: Results, folder: Path) -> str:
        runs = final(results)
        _figure(runs, results, measure, folder / "figure.svg")
        note = (
            f"{sentence_case(title)}.\n\n"
            f"Mean ± standard deviation of {counted(len(seeds), 'seed')}. "
            f"Each method has momentum {MOMENTUM:g} and the best of the learning rates "
            f"{listed(rates)}: they are compared after {counted(tuning_epochs, 'epoch')}, then the "
            f"best and the next smaller one after {values['num_epochs']} epochs, on "
            f"{VALIDATION_RATIO:.0%} of the training data, held out, with a seed of their own. In "
            "a run, the learning rate falls to 0 as a cosine. MB sent are the mean of the workers "
            "in a run."
        )
        table = _table(runs, results, measure)
        return f"{note}\n\n{table}\n\n![{measure} against megabytes](figure.svg)\n"

    stages = [
        lambda results: [tried for of_method in tuning.values() for tried in of_method],
        lambda results: [tried for two in in_all_epochs(results).values() for tried in two],
        lambda results: [of_seed for of_seeds in final(results).values() for of_seed in of_seeds],
    ]
    return Experiment(title, stages, report)


def _bits(runs: Sequence[Run], results: Results) -> float:
    """Bits sent by a worker in a run, mean over the workers and runs. Rows have worker 0's."""
    sent = sum(float(results(run)["bits"].max()) for run in runs) / len(runs)
    values = runs[0].values
    if values["learning"] != RELAY:
        return sent
    from powergossip import topologies

    n = values["n_workers"]
    trees = topologies.make(values["topology"], n).trees or ()
    of_worker_0 = sum(0 in edge for tree in trees for edge in tree) / len(trees)
    return sent * 2 * (n - 1) / n / of_worker_0


def _table(runs: Mapping[Pair, Sequence[Run]], results: Results, measure: str) -> str:
    """A Markdown table: mean ± standard deviation over the seeds."""
    factor, unit, worst_of = _units(measure)
    plain = _bits(runs[PLAIN], results)
    header = [
        "averaging",
        "learning rule",
        f"{measure}, mean model",
        "worst worker",
        "consensus distance",
        "MB sent per worker",
        "less than D-PSGD",
        "learning rate",
    ]
    lines = []
    for method, of_seeds in runs.items():
        line = [method.averaging, method.learning]
        rows = [results(run) for run in of_seeds]
        diverged = sum(_diverged(r, measure) for r in rows)
        if diverged:
            line += [f"{diverged} of {len(rows)} diverged", *[""] * 4]
        else:
            means = [float(last_values(r, measure, split="test_avg").iloc[0]) for r in rows]
            worst = [float(worst_of(last_values(r, measure, split="test"))) for r in rows]
            distances = [last_values(r, "consensus_distance", type="params_only") for r in rows]
            bits = _bits(of_seeds, results)
            line += [
                f"{spread([factor * value for value in means], 2)}{unit}",
                f"{spread([factor * value for value in worst], 2)}{unit}",
                f"{sum(float(d.iloc[0]) for d in distances) / len(distances):.3g}",
                f"{bits / 8e6:.1f}",
                f"{plain / bits:.1f}×",
            ]
        lines.append([*line, f"{of_seeds[0].values['learning_rate']:g}"])
    return markdown(header, lines)


def _figure(runs: Mapping[Pair, Sequence[Run]], results: Results, measure: str, path: Path) -> None:
    """Draw the measure by megabytes sent: a point for each method, with the range of its seeds."""
    factor, unit, _ = _units(measure)
    points = {}
    for method, of_seeds in runs.items():
        rows = [results(run) for run in of_seeds]
        if not any(_diverged(r, measure) for r in rows):
            reached = [float(last_values(r, measure, split="test_avg").iloc[0]) for r in rows]
            points[method.name] = (
                _bits(of_seeds, results) / 8e6,
                [factor * value for value in reached],
            )
    y = f"test {measure}, mean model" + (f",{unit}" if unit else "")
    figures.scatter(points, path, "megabytes sent by a worker", y, log_y=measure == "perplexity")


def _units(measure: str) -> tuple[float, str, Any]:
    """Factor, unit, and the function that selects the worst worker."""
    return (100.0, " %", min) if measure == "accuracy" else (1.0, "", max)


def _diverged(rows: "DataFrame", measure: str) -> bool:
    return score(rows, measure, "test_avg") == float("-inf")
