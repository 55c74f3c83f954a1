"""How well does each method learn, and for how many bits?

Every method has the same budget: model, data, epochs, batches, and a grid of learning rates and
diffusion rates. There are three stages:

1. The grid, in a part of the epochs. A tenth of the training data is held out to compare models.
2. The 3 best settings of each method in all epochs, with the same held-out data.
3. The best setting with three other seeds and all training data, evaluated on the test data.

All-reduce has no diffusion rate. Moniqua has a further dimension in its grid, two values of the
bound θ, since θ depends on the size of the updates.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runner import Experiment, Results, Run, Values, sentence_case
from powergossip.formatting import counted, markdown, spread
from powergossip.runs import figures
from powergossip.runs.metrics import last_values

if TYPE_CHECKING:
    from pandas import DataFrame

SEEDS = (1, 2, 3)
TUNING_SEED = 11
VALIDATION_RATIO = 0.1  # fraction of the training data held out in the runs of the grid
STEP = ("data", "gradient", "averaging", "communication", "update")  # phases of a step
# Of runs that choose a setting. They do not see the test data.
TUNING: dict[str, Any] = {
    "validation_ratio": VALIDATION_RATIO,
    "seed": TUNING_SEED,
    "evaluate_workers": False,
    "evaluate_test_data": False,
}
DIFFUSION_RATES = (1.0, 0.3, 0.1, 0.03, 0.01)
TUNED = 3  # settings of a method in the second stage


COMMON: Values = {
    "n_workers": 8,
    "topology": "ring",
    "distributed_lr_warmup_epoch": 0.0,
    "evaluation_interval": 100,  # the last epoch only
    "checkpoint_interval": 100,
    "drop_last": True,  # batches of the same size
}
DIGITS: Values = {
    **COMMON,
    "task": "Digits",
    "task_architecture": "MLP",
    "num_epochs": 20,
    "batch_size": 16,
    "lr_schedule_milestones": [[15, 0.1]],
}
FASHION_MNIST: Values = {
    **COMMON,
    "task": "FashionMNIST",
    "task_architecture": "CNN",
    "num_epochs": 5,
    "batch_size": 32,
    "lr_schedule_milestones": [[4, 0.1]],
}
TOPICS_LSTM: Values = {
    **COMMON,
    "task": "LSTM",
    "task_architecture": "LSTM",
    "task_options": {"hidden_size": 128, "num_layers": 1, "dropout": 0.2, "sequence_length": 20},
    "num_epochs": 5,
    "batch_size": 8,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "gradient_clipping": 0.4,
    "lr_schedule_milestones": [[4, 0.1]],
}


def _compressed(optimizer: str, compressor: str, **more: Any) -> Values:
    return {"optimizer": optimizer, "optimizer_compressor": compressor, **more}


METHODS: dict[str, Values] = {
    "all-reduce": {"optimizer": "all-reduce"},
    "D-PSGD": {"optimizer": "dpsgd"},
    "PowerGossip, 1 iteration": {"optimizer": "power-gossip", "optimizer_num_iterations": 1},
    "PowerGossip, 2 iterations": {"optimizer": "power-gossip", "optimizer_num_iterations": 2},
    "CHOCO, sign": _compressed("choco", "sign-and-norm"),
    "CHOCO, top 1 %": _compressed("choco", "top-k", optimizer_keep_ratio=0.01),
    "CHOCO, random 1 %": _compressed("choco", "random-k", optimizer_keep_ratio=0.01),
    "CHOCO, SVD rank 1": _compressed("choco", "svd", optimizer_rank=1),
    "CHOCO, QSGD 4 levels": _compressed("choco", "qsgd", optimizer_levels=4),
    "DeepSqueeze, sign": _compressed("deepsqueeze", "sign-and-norm"),
    "DeepSqueeze, top 10 %": _compressed("deepsqueeze", "top-k", optimizer_keep_ratio=0.1),
    "Moniqua, 2 bits": {"optimizer": "moniqua"},
}
THETAS = (0.25, 1.0)  # Moniqua's


def experiment(
    title: str,
    values: Values,
    measure: str = "accuracy",
    rates: Sequence[float] = (0.05, 0.1),
    tuning_epochs: int = 2,
) -> Experiment:
    """An experiment of three stages, see the module.

    Args:
        measure: Measure of the mean model: accuracy, where larger is better, or perplexity.
        tuning_epochs: Epochs of the first stage.
    """

    def grids(results: Results) -> dict[str, list[Run]]:
        return {method: grid(values, method, rates, tuning_epochs) for method in METHODS}

    def tuning(results: Results) -> dict[str, list[Run]]:
        return {
            method: [
                Run(
                    "train",
                    {**values, **METHODS[method], **_setting(run), **TUNING},
                    {"method": method, **_setting(run)},
                )
                for run in best(runs, results)[:TUNED]
            ]
            for method, runs in grids(results).items()
        }

    def final(results: Results) -> dict[str, list[Run]]:
        return {
            method: [
                Run(
                    "train",
                    {**values, **METHODS[method], **_setting(best(runs, results)[0]), **of_seed},
                    {"method": method, **of_seed},
                )
                for of_seed in ({"seed": seed} for seed in SEEDS)
            ]
            for method, runs in tuning(results).items()
        }

    def best(runs: Sequence[Run], results: Results) -> list[Run]:
        return sorted(runs, key=lambda run: score(results(run), measure, "valid_avg"), reverse=True)

    def flat(stage: Callable[[Results], dict[str, list[Run]]]) -> Callable[[Results], list[Run]]:
        return lambda results: [run for runs in stage(results).values() for run in runs]

    def report(results: Results, folder: Path) -> str:
        runs = final(results)
        note = (
            f"each method was tuned on the same grid of learning rates ({listed(rates)}) and "
            f"diffusion rates γ ({listed(DIFFUSION_RATES)}), with one run of "
            f"{counted(tuning_epochs, 'epoch')} each, and the {TUNED} best of them in all "
            f"{values['num_epochs']} epochs, with another seed, on {VALIDATION_RATIO:.0%} of the "
            f"training data, held out."
        )
        return compared(title, runs, results, folder, measure, note)

    return Experiment(title, [flat(grids), flat(tuning), flat(final)], report)


def _setting(run: Run) -> Values:
    """The values that were tried."""
    return {key: run.values[key] for key in run.labels if key in run.values}


def grid(values: Values, method: str, rates: Sequence[float], epochs: int) -> list[Run]:
    """The runs of the grid. The second half of the epochs has a tenth of the learning rate."""
    averages_fully = METHODS[method]["optimizer"] == "all-reduce"
    thetas: Sequence[float | None] = [None]
    if METHODS[method]["optimizer"] == "moniqua":
        thetas = THETAS
    runs = []
    for rate, gamma, theta in product(
        rates, DIFFUSION_RATES[:1] if averages_fully else DIFFUSION_RATES, thetas
    ):
        setting: Values = {"learning_rate": rate}
        if not averages_fully:
            setting["optimizer_diffusion_rate"] = gamma
        if theta is not None:
            setting["optimizer_theta"] = theta
        short = {
            "num_epochs": epochs,
            "lr_schedule_milestones": [[epochs / 2, 0.1]],
        }
        runs.append(
            Run(
                "train",
                {**values, **METHODS[method], **setting, **short, **TUNING},
                {"method": method, **setting},
            )
        )
    return runs


def compared(
    title: str,
    runs: Mapping[str, Sequence[Run]],
    results: Results,
    folder: Path,
    measure: str,
    note: str,
) -> str:
    """Return the report on the runs of each method, one per seed: a table and a figure.

    The table has a column with the number of seeds if it is not the same for all methods, and one
    with seconds if the runs have several processes: others may share the machine.
    """
    rows = {method: [results(run) for run in of_seeds] for method, of_seeds in runs.items()}
    settings = {method: of_seeds[0].values for method, of_seeds in runs.items()}
    _figure(rows, measure, folder / "figure.svg")
    timed = all(run.processes > 1 for of_seeds in runs.values() for run in of_seeds)
    table = _table(rows, settings, measure, timed)
    numbers = {len(of_seeds) for of_seeds in runs.values()}
    seeds = counted(max(numbers), "seed") if len(numbers) == 1 else "the seeds"
    above = (
        f"{sentence_case(title)}.\n\nMean ± standard deviation of {seeds}; "
        f"{note} MB sent are those of one worker in a run."
        + (" The time is that of a run with evaluation." if timed else "")
    )
    return f"{above}\n\n{table}\n\n![{measure} against megabytes](figure.svg)\n"


def listed(numbers: Sequence[float]) -> str:
    """Numbers as text, with commas."""
    return ", ".join(f"{number:g}" for number in numbers)


def score(rows: "DataFrame", measure: str, split: str) -> float:
    """The measure, negated if smaller is better; −∞ for a run that diverged."""
    value = last_values(rows, measure, split=split)
    if value.empty or not value.notna().all():
        return float("-inf")
    return float(value.iloc[0]) * (-1 if measure == "perplexity" else 1)


def _table(
    rows: Mapping[str, list["DataFrame"]],
    settings: Mapping[str, Mapping[str, Any]],
    measure: str,
    timed: bool,
) -> str:
    """A Markdown table: mean ± standard deviation over the seeds."""
    percent = 100 if measure == "accuracy" else 1
    unit = " %" if measure == "accuracy" else ""
    plain = _mean_bits(rows["D-PSGD"])
    counted = len({len(of_seeds) for of_seeds in rows.values()}) > 1
    header = [
        "method",
        f"{measure}, mean model",
        "worst worker",
        "MB sent per worker",
        "less than D-PSGD",
        *(["seconds"] if timed else []),
        "learning rate",
        "γ",
        *(["seeds"] if counted else []),
    ]
    lines: list[list[str]] = []
    for method, of_seeds in rows.items():
        worst_is = min if measure == "accuracy" else max
        if any(score(r, measure, "test_avg") == float("-inf") for r in of_seeds):
            lines.append([method, "diverged", *[""] * (len(header) - 2)])
            continue
        mean = [
            percent * float(last_values(r, measure, split="test_avg").iloc[0]) for r in of_seeds
        ]
        worst = [percent * float(worst_is(last_values(r, measure, split="test"))) for r in of_seeds]
        bits = _mean_bits(of_seeds)
        seconds = sum(float(r["seconds"].max()) for r in of_seeds) / len(of_seeds)
        setting = settings[method]
        gossips = setting["optimizer"] != "all-reduce"
        gamma = setting.get("optimizer_diffusion_rate", "") if gossips else ""
        if "optimizer_theta" in setting:
            gamma = f"{gamma}, θ {setting['optimizer_theta']}"
        lines.append(
            [
                method,
                f"{spread(mean, 2)}{unit}",
                f"{spread(worst, 2)}{unit}",
                f"{bits / 8e6:.1f}",
                f"{plain / bits:.1f}×",
                *([f"{seconds:.0f}"] if timed else []),
                _learning_rate(setting),
                str(gamma),
                *([str(len(of_seeds))] if counted else []),
            ]
        )
    return markdown(header, lines)


def _mean_bits(of_seeds: Sequence["DataFrame"]) -> float:
    """Bits sent by worker 0 in a run, mean over the seeds."""
    return sum(float(rows["bits"].max()) for rows in of_seeds) / len(of_seeds)


def _learning_rate(setting: Mapping[str, Any]) -> str:
    """The learning rate after the warm-up."""
    factor = setting.get("distributed_lr_warmup_factor", 1)
    return f"{setting['learning_rate'] * factor:.3g}"


def _figure(rows: Mapping[str, list["DataFrame"]], measure: str, path: Path) -> None:
    """Draw the measure by megabytes sent: a point for each method, with the range of its seeds."""
    points = {}
    for method, of_seeds in rows.items():
        reached = [float(v) for r in of_seeds for v in last_values(r, measure, split="test_avg")]
        if len(reached) == len(of_seeds):
            points[method] = (
                _mean_bits(of_seeds) / 8e6,
                [100 * v if measure == "accuracy" else v for v in reached],
            )
    x, y = "megabytes sent by a worker", f"test {measure}, mean model"
    if measure == "accuracy":
        figures.scatter(points, path, x, f"{y}, %")
    else:
        figures.scatter(points, path, x, y, log_y=True)
