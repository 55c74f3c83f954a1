"""How well does each method learn, and for how many bits?

Every method has the same budget: model, data, epochs, batches, and a grid of learning rates and
diffusion rates. There are three stages:

1. The grid, in a part of the epochs. A tenth of the training data is held out to compare models.
2. The 3 best settings of each method in all epochs, with the same held-out data.
3. The best setting with three other seeds and all training data, evaluated on the test data.

All-reduce has no diffusion rate. Moniqua has a further dimension in its grid, two values of the
bound θ, since θ depends on the size of the updates.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.study import (
    MERGE,
    VALIDATION_RATIO,
    Columns,
    Outcome,
    Outcomes,
    draw_by_size,
    lines,
    quality,
    table,
    traffic,
    tuned,
)
from powergossip.formatting import counted
from powergossip.runner.runner import Experiment, Values

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
FEW_BITS: dict[str, Values] = {
    **{
        f"PowerGossip, {bits} bits": METHODS["PowerGossip, 2 iterations"] | {"optimizer_bits": bits}
        for bits in (8, 6, 4)
    },
    **{
        f"all-reduce, {bits} bits": METHODS["all-reduce"] | {"optimizer_bits": bits}
        for bits in (4, 2)
    },
}
THETAS = (0.25, 1.0)  # Moniqua's


def experiment(
    title: str,
    values: Values,
    measure: str = "accuracy",
    rates: Sequence[float] = (0.05, 0.1),
    tuning_epochs: int = 2,
    methods: Mapping[str, Values] = METHODS,
) -> Experiment:
    """An experiment of three stages, see the module.

    Args:
        measure: Measure of the mean model: accuracy, where larger is better, or perplexity.
        tuning_epochs: Epochs of the first stage.
    """
    note = (
        f"each method was tuned on the same grid of learning rates ({listed(rates)}) and "
        f"diffusion rates γ ({listed(DIFFUSION_RATES)}), with one run of "
        f"{counted(tuning_epochs, 'epoch')} each, and the {TUNED} best of them in all "
        f"{values['num_epochs']} epochs, with another seed, on {VALIDATION_RATIO:.0%} of the "
        f"training data, held out."
    )
    return tuned(
        title,
        values,
        ["method"],
        {(method,): of_method for method, of_method in methods.items()},
        {(method,): settings(of_method, rates) for method, of_method in methods.items()},
        # The second half of these epochs has a tenth of the learning rate.
        {"num_epochs": tuning_epochs, "lr_schedule_milestones": [[tuning_epochs / 2, 0.1]]},
        lambda ranked: ranked[:TUNED],
        measure,
        lambda outcomes, folder: compared(outcomes, folder, measure, note),
    )


def settings(of_method: Values, rates: Sequence[float]) -> list[Values]:
    """The grid of a method."""
    axes: dict[str, Sequence[float]] = {"learning_rate": rates}
    if of_method["optimizer"] != "all-reduce":
        axes["optimizer_diffusion_rate"] = DIFFUSION_RATES
    if of_method["optimizer"] == "moniqua":
        axes["optimizer_theta"] = THETAS
    return [dict(zip(axes, setting, strict=True)) for setting in product(*axes.values())]


def compared(outcomes: Outcomes, folder: Path, measure: str, note: str) -> str:
    """Return the report on methods, D-PSGD among them: a table and a figure.

    The table has a column with the number of seeds if it is not the same for all methods, and one
    with seconds if the runs have several processes: others may share the machine.
    """
    draw_by_size(outcomes, measure, folder / "figure.svg")
    timed = all(run.processes > 1 for outcome in outcomes.values() for run in outcome.runs)
    numbers = {len(outcome.runs) for outcome in outcomes.values()}
    columns: Columns = {
        **quality(measure),
        **traffic(outcomes["D-PSGD",]),
        **({"seconds": lambda o: f"{o.largest('seconds'):.0f}"} if timed else {}),
        "learning rate": lambda o: _learning_rate(o.values),
        "γ": _diffusion_rate,
        **({"seeds": lambda o: str(len(o.runs))} if len(numbers) > 1 else {}),
    }
    found = lines(
        outcomes,
        ["method"],
        columns,
        diverged=lambda o: "diverged" if o.diverged(measure) else "",
    )
    seeds = counted(max(numbers), "seed") if len(numbers) == 1 else "the seeds"
    above = (
        f"Mean ± standard deviation of {seeds}; "
        f"{note} MB sent are those of one worker in a run. {MERGE}"
        + (" The time is that of a run with evaluation." if timed else "")
    )
    picture = f"![{measure} against megabytes](figure.svg)"
    return "\n\n".join([above, picture, table(folder / "table.csv", found)])


def listed(numbers: Sequence[float]) -> str:
    """Numbers as text, with commas."""
    return ", ".join(f"{number:g}" for number in numbers)


def _learning_rate(setting: Mapping[str, Any]) -> str:
    """The learning rate after the warm-up."""
    factor = setting.get("distributed_lr_warmup_factor", 1)
    return f"{setting['learning_rate'] * factor:.3g}"


def _diffusion_rate(outcome: Outcome) -> str:
    """The diffusion rate and Moniqua's bound, of methods that have them."""
    setting = outcome.values
    if setting["optimizer"] == "all-reduce":
        return ""
    gamma = str(setting.get("optimizer_diffusion_rate", ""))
    return f"{gamma}, θ {setting['optimizer_theta']}" if "optimizer_theta" in setting else gamma
