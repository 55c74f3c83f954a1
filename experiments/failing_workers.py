"""The cost of late exchanges, lost workers and lost messages, on the virtual clock.

Sixteen workers on a ring, FashionMNIST, fixed shards with label proportions from a Dirichlet
distribution. All methods have the same learning rate and momentum, which are not tuned.

- message_loss: 0, 1 and 10 % of the messages are lost, at one end or at both ends of an exchange.
- late_exchanges: a worker is 4 times slower, and 10 % of the exchanges arrive 4 seconds late.
- churn: a quarter of the workers die during training.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runner import Experiment, Results, Run, Values, sentence_case
from experiments.tuned_methods import FASHION_MNIST, SEEDS
from powergossip.formatting import counted, markdown, spread
from powergossip.runs import figures

if TYPE_CHECKING:
    from pandas import DataFrame


FAILING: Values = FASHION_MNIST | {
    "n_workers": 16,
    "reshuffle_data": False,
    "decentralized_data_dirichlet_alpha": 0.1,
    "evaluation_interval": 1,
    "evaluate_workers": False,
}
# Of the experiment with most runs.
LOSING: Values = FAILING | {
    "num_epochs": 4,
    "lr_schedule_milestones": [[3, 0.1]],
    "evaluation_interval": 100,  # the last epoch only
}
STEPS = 117  # of an epoch, a virtual second each: 60,000/(16 · 32)


def _lost(fraction: float, ends: str) -> str:
    """The name of a column."""
    return f"{100 * fraction:g} %, {'both ends' if ends == 'both' else 'one end'}"


_SLOW: Values = {"momentum": 0.9, "learning_rate": 0.02}
_POWER: Values = {"optimizer": "power-gossip", "optimizer_num_iterations": 8}
METHODS: dict[str, Values] = {
    "D-PSGD": {"optimizer": "dpsgd", **_SLOW},
    "quasi-global momentum": {
        "optimizer": "dpsgd",
        "learning": "quasi-global-momentum",
        **_SLOW,
    },
    "exact diffusion": {"optimizer": "dpsgd", "learning": "exact-diffusion", **_SLOW},
    "gradient tracking": {
        "optimizer": "dpsgd",
        "learning": "gradient-tracking",
        "overlapping": False,
        **_SLOW,
    },
    "CHOCO, sign": {"optimizer": "choco", **_SLOW},
    "PowerGossip, 8 iterations": {**_POWER, **_SLOW},
    "PowerGossip, 8 iterations, random directions": {
        **_POWER,
        "optimizer_warm_start": False,
        **_SLOW,
    },
    "PowerGossip, exact diffusion": {**_POWER, "learning": "exact-diffusion", **_SLOW},
    "push-sum": {"optimizer": "push-sum", **_SLOW},
    "push-sum, running sums": {"optimizer": "push-sum", "optimizer_running_sums": True, **_SLOW},
    "RelaySGD, chain": {
        "optimizer": "dpsgd",
        "learning": "relay-sgd",
        "topology": "chain",
        **_SLOW,
    },
}
FRACTIONS = (0.01, 0.1)
ENDS = ("both", "one")
LOSSES: dict[str, Values | None] = {"0": None} | {
    _lost(fraction, ends): {"fraction": fraction, "ends": ends}
    for fraction in FRACTIONS
    for ends in ENDS
}
LATE: Values = {"speeds": {"0": 0.25}, "late": {"fraction": 0.1, "seconds": 4.0}}
POLICIES: dict[str, Values] = {
    "synchronous": {},
    "bounded, 4": {"gossip": "bounded", "max_delay": 4},
    "asynchronous": {"gossip": "asynchronous"},
}
OF_LATE = ("D-PSGD", "CHOCO, sign", "PowerGossip, 8 iterations", "exact diffusion")
OF_CHURN = ("D-PSGD", "PowerGossip, 8 iterations", "CHOCO, sign", "exact diffusion")
CHURN = {"a quarter dies": 0.25, "nobody dies": 0.0}

Case = tuple[str, str]  # method, and the column or line


def message_loss(values: Values = LOSING, seeds: Sequence[int] = SEEDS[:1]) -> Experiment:
    """Accuracy with lost messages."""
    cases = {
        (method, column): {"scenario": {} if loss is None else {"loss": loss}}
        for method in METHODS
        for column, loss in LOSSES.items()
    }

    def report(results: Results, runs: Mapping[Case, list[Run]], folder: Path) -> str:
        percent = [0.0, *(100 * fraction for fraction in FRACTIONS)]
        panels = {
            method: {
                f"at {ends} end{'s' if ends == 'both' else ''}": (
                    percent,
                    [
                        100 * _mean(_accuracies(results, runs[method, column]))
                        for column in ("0", *(_lost(fraction, ends) for fraction in FRACTIONS))
                    ],
                )
                for ends in ENDS
            }
            for method in METHODS
        }
        figures.curves(
            panels,
            folder / "figure.svg",
            "messages lost (%)",
            "accuracy of the mean model (%)",
            columns=5,
        )
        return _table(results, runs, METHODS, LOSSES)

    title = "accuracy with lost messages, at one end or at both ends of an exchange"
    return _experiment(title, values, cases, seeds, report)


def late_exchanges(
    values: Values = FAILING, seeds: Sequence[int] = SEEDS[:2], late: Values = LATE
) -> Experiment:
    """Accuracy against virtual time with a slow worker and late exchanges."""
    cases = {
        (method, policy): {"scenario": late, **more}
        for method in OF_LATE
        for policy, more in POLICIES.items()
    }

    def report(results: Results, runs: Mapping[Case, list[Run]], folder: Path) -> str:
        panels = {
            method: {
                policy: _curve(results, runs[method, policy], "seconds") for policy in POLICIES
            }
            for method in OF_LATE
        }
        figures.curves(
            panels,
            folder / "figure.svg",
            "virtual seconds",
            "accuracy of the mean model",
            log_x=True,
        )
        seconds = {
            case: f"{_last(results, of_case[0], 'seconds'):.0f} s" for case, of_case in runs.items()
        }
        return _table(results, runs, OF_LATE, POLICIES, seconds)

    title = "accuracy against virtual time: a worker is 4 times slower, 10 % of exchanges are late"
    return _experiment(title, values, cases, seeds, report)


def churn(
    values: Values = FAILING,
    seeds: Sequence[int] = SEEDS,
    first: float = STEPS,
    last: float = 4 * STEPS,
) -> Experiment:
    """Accuracy while a quarter of the workers die between two virtual times."""
    cases: dict[Case, Values] = {}
    for method in OF_CHURN:
        for name, fraction in CHURN.items():
            deaths = {"fraction": fraction, "from": first, "until": last}
            scenario = {"deaths": deaths, "detection": 1.0} if fraction else {}
            cases[method, name] = {"scenario": scenario}

    def report(results: Results, runs: Mapping[Case, list[Run]], folder: Path) -> str:
        panels = {
            method: {name: _curve(results, runs[method, name], "epoch") for name in CHURN}
            for method in OF_CHURN
        }
        (workers, *_), name = runs[OF_CHURN[0], "a quarter dies"], "workers"
        rows = results(workers)
        alive = rows[rows["name"] == name]
        panels["workers alive, first seed"] = {
            name: (alive["epoch"].tolist(), alive["value"].tolist())
        }
        figures.curves(panels, folder / "figure.svg", "epoch", "accuracy of the mean model")
        return _table(results, runs, OF_CHURN, CHURN)

    title = "accuracy while a quarter of the workers die"
    return _experiment(title, values, cases, seeds, report)


Report = Callable[[Results, Mapping[Case, list[Run]], Path], str]


def _experiment(
    title: str, values: Values, cases: Mapping[Case, Values], seeds: Sequence[int], report: Report
) -> Experiment:
    """An experiment of one stage, with a run for each case and seed."""
    runs = {
        case: [
            Run(
                "train",
                {**values, **METHODS[case[0]], **more, "seed": seed},
                {"method": case[0], "case": case[1], "seed": seed},
            )
            for seed in seeds
        ]
        for case, more in cases.items()
    }

    def written(results: Results, folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        several = f"mean ± standard deviation of {counted(len(seeds), 'seed')}"
        note = (
            f"{sentence_case(title)}. Accuracy of the mean model of {values['n_workers']} workers "
            f"after {counted(values['num_epochs'], 'epoch')}, "
            f"{several if len(seeds) > 1 else 'one seed'}, on the virtual clock."
        )
        table = report(results, runs, folder)
        return "\n\n".join([note, table, f"![{title}](figure.svg)\n"])

    return Experiment(
        title, [lambda results: [run for of_case in runs.values() for run in of_case]], written
    )


def _table(
    results: Results,
    runs: Mapping[Case, list[Run]],
    methods: Sequence[str] | Mapping[str, Any],
    columns: Mapping[str, Any],
    further: Mapping[Case, str] | None = None,
) -> str:
    lines = []
    for method in methods:
        line = [method]
        for column in columns:
            found = _accuracies(results, runs[method, column])
            diverged = sum(value is None for value in found)
            kept = [100 * value for value in found if value is not None]
            several = f"{diverged} of {len(found)} diverged" if len(found) > 1 else "diverged"
            cell = several if diverged else f"{spread(kept, 2)} %"
            if further:
                cell += f" ({further[method, column]})"
            line.append(cell)
        lines.append(line)
    return markdown(["method", *columns], lines)


def _accuracies(results: Results, runs: Sequence[Run]) -> list[float | None]:
    """The measure of the mean model at the end, None for a run that diverged."""
    found: list[float | None] = []
    for run in runs:
        rows = _tested(results(run))
        ended = len(rows) and rows["epoch"].max() == run.values["num_epochs"]
        found.append(float(rows["value"].iloc[-1]) if ended else None)
    return found


def _tested(rows: "DataFrame") -> "DataFrame":
    """Rows of evaluations. A run that diverged before the first one has none."""
    if "split" not in rows:
        return rows.iloc[:0]
    return rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]


def _mean(values: Sequence[float | None]) -> float:
    """The mean, 0.1 for a run that diverged: that of a guess."""
    return sum(0.1 if value is None else value for value in values) / len(values)


def _curve(results: Results, runs: Sequence[Run], x: str) -> tuple[list[float], list[float]]:
    """x and accuracies by epoch, means over the seeds."""
    import pandas as pd

    rows = pd.concat([_tested(results(run)) for run in runs])
    means = rows.groupby("epoch")[["seconds", "value"]].mean().reset_index()
    return means[x].tolist(), means["value"].tolist()


def _last(results: Results, run: Run, column: str) -> float:
    return float(results(run)[column].max())
