"""How well does each method learn, and for how many bits?

Every method gets the same budget: the same model, data, epochs and batches, and the same grid of
learning rates and diffusion rates, tried with a seed of its own for a part of the epochs; the best
setting is then run with three other seeds. All-reduce has no diffusion rate. Moniqua's bound θ
goes with the size of the updates, and is tried at two values.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runner import Experiment, Results, Run
from powergossip.runs import figures

if TYPE_CHECKING:
    from pandas import DataFrame

SEEDS = (1, 2, 3)
TUNING_SEED = 11
STEP = ("data", "gradient", "averaging", "communication", "update")  # phases of a step
DIFFUSION_RATES = (1.0, 0.3, 0.1, 0.03)

Values = dict[str, Any]

_COMMON: Values = {
    "n_workers": 8,
    "topology": "ring",
    "distributed_lr_warmup_epoch": 0.0,
    "evaluation_interval": 100,  # the last epoch only
    "checkpoint_interval": 100,
}
FASHION_MNIST: Values = {
    **_COMMON,
    "task": "FashionMNIST",
    "task_architecture": "CNN",
    "num_epochs": 5,
    "batch_size": 32,
    "lr_schedule_milestones": [[4, 0.1]],
}
TOPICS_LSTM: Values = {
    **_COMMON,
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
    """measure: accuracy (of the mean model, the larger the better) or perplexity."""

    def tuning(results: Results) -> list[Run]:
        return [run for runs in grids().values() for run in runs]

    def grids() -> dict[str, list[Run]]:
        return {method: _grid(values, method, rates, tuning_epochs) for method in METHODS}

    def final(results: Results) -> list[Run]:
        return [run for runs in chosen(results).values() for run in runs]

    def chosen(results: Results) -> dict[str, list[Run]]:
        by_method = {}
        for method, runs in grids().items():
            best = max(runs, key=lambda run: _score(results(run), measure))
            by_method[method] = [
                Run(
                    "train",
                    {**best.values, "num_epochs": values["num_epochs"], "seed": seed}
                    | {"lr_schedule_milestones": values["lr_schedule_milestones"]},
                    {"method": method, "seed": seed},
                )
                for seed in SEEDS
            ]
        return by_method

    def report(results: Results, folder: Path) -> str:
        runs = chosen(results)
        tried = "the same learning rates and diffusion rates γ were tried for each method"
        note = f"{tried}, in one run of {_count(tuning_epochs, 'epoch')} with another seed."
        return compared(title, runs, results, folder, measure, note)

    return Experiment(title, [tuning, final], report)


def _grid(values: Values, method: str, rates: Sequence[float], epochs: int) -> list[Run]:
    """So many epochs each, the last half of them at a tenth of the learning rate."""
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
        short = {"num_epochs": epochs, "lr_schedule_milestones": [[epochs / 2, 0.1]]}
        runs.append(
            Run(
                "train",
                {**values, **METHODS[method], **setting, **short, "seed": TUNING_SEED},
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
    """A report on the methods' runs, one for each seed: a table, and a figure against bits."""
    rows = {method: [results(run) for run in of_seeds] for method, of_seeds in runs.items()}
    settings = {method: of_seeds[0].values for method, of_seeds in runs.items()}
    _figure(rows, measure, folder / "figure.svg")
    table = _table(rows, settings, measure)
    (seeds,) = {len(of_seeds) for of_seeds in runs.values()}
    above = (
        f"{title[0].upper()}{title[1:]}.\n\nMean ± standard deviation of {_count(seeds, 'seed')}; "
        f"{note} Seconds are those of a run, evaluation included; megabytes those that a worker "
        "sends in it."
    )
    return f"{above}\n\n{table}\n\n![{measure} against megabytes](figure.svg)\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _score(rows: "DataFrame", measure: str) -> float:
    """The larger, the better; a run that diverged is the worst."""
    value = last(rows, measure, "test_avg")
    if value.empty or not value.notna().all():
        return float("-inf")
    return float(value.iloc[0]) * (-1 if measure == "perplexity" else 1)


def _table(
    rows: Mapping[str, list["DataFrame"]], settings: Mapping[str, Mapping[str, Any]], measure: str
) -> str:
    """A Markdown table: mean ± standard deviation over the seeds."""
    percent = 100 if measure == "accuracy" else 1
    unit = " %" if measure == "accuracy" else ""
    plain = sum(float(r["bits"].max()) for r in rows["D-PSGD"])
    lines = [
        f"| method | {measure}, mean model | worst worker | MB sent per worker | less than D-PSGD "
        "| seconds | learning rate | γ |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, of_seeds in rows.items():
        worst_is = min if measure == "accuracy" else max
        if any(_score(r, measure) == float("-inf") for r in of_seeds):
            lines.append(f"| {method} | diverged | | | | | | |")
            continue
        mean = [percent * float(last(r, measure, "test_avg").iloc[0]) for r in of_seeds]
        worst = [percent * float(worst_is(last(r, measure, "test"))) for r in of_seeds]
        bits = sum(float(r["bits"].max()) for r in of_seeds)
        seconds = sum(float(r["seconds"].max()) for r in of_seeds) / len(of_seeds)
        setting = settings[method]
        gossips = setting["optimizer"] != "all-reduce"
        gamma = setting.get("optimizer_diffusion_rate", "") if gossips else ""
        if "optimizer_theta" in setting:
            gamma = f"{gamma}, θ {setting['optimizer_theta']}"
        lines.append(
            f"| {method} | {spread(mean)}{unit} | {spread(worst)}{unit} "
            f"| {bits / len(of_seeds) / 8e6:.1f} | {plain / bits:.1f}× | {seconds:.0f} "
            f"| {_learning_rate(setting)} | {gamma} |"
        )
    return "\n".join(lines)


def _learning_rate(setting: Mapping[str, Any]) -> str:
    """After the warm-up, if there is one."""
    factor = setting.get("distributed_lr_warmup_factor", 1)
    return f"{setting['learning_rate'] * factor:.3g}"


def last(rows: "DataFrame", name: str, split: str) -> Any:
    """The values at the last epoch that has such rows; none for a run that diverged early."""
    return last_of(rows, name, split=split)


def last_of(rows: "DataFrame", name: str, **tags: str) -> Any:
    """`last`, for rows told by other tags."""
    chosen = rows[rows["name"] == name]
    for tag, value in tags.items():
        chosen = chosen[chosen[tag] == value] if tag in chosen else chosen[:0]
    return chosen[chosen["epoch"] == chosen["epoch"].max()]["value"]


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, or that one of them is infinite."""
    mean = sum(values) / len(values)
    if not isfinite(mean):
        return "infinite"
    deviation = (sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)) ** 0.5
    return f"{mean:.2f} ± {deviation:.2f}"


def _figure(rows: Mapping[str, list["DataFrame"]], measure: str, path: Path) -> None:
    """What each method reached against what it sent: a point with its spread over the seeds."""
    points = {}
    for method, of_seeds in rows.items():
        reached = [float(v) for r in of_seeds for v in last(r, measure, "test_avg")]
        if len(reached) == len(of_seeds):
            bits = sum(float(r["bits"].max()) for r in of_seeds) / len(of_seeds)
            points[method] = bits / 8e6, [100 * v if measure == "accuracy" else v for v in reached]
    x, y = "megabytes sent by a worker", f"test {measure}, mean model"
    if measure == "accuracy":
        figures.scatter(points, path, x, f"{y}, %")
    else:
        figures.scatter(points, path, x, y, log_y=True)
