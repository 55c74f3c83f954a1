"""A language model in rounds: what closes the gap to all-reduce in every step?

The setting is that of experiments/language.py, with the learning rates of its first stage. There,
batches are small and tokens few. Here are four times as many steps, batches four times as large,
and a larger model, with one seed. And, on both partitions of the data, corrections of the gradient
at a rate that averages their noise over many rounds, beside none.
"""

from collections.abc import Mapping
from pathlib import Path

from experiments.language import (
    ADAMW,
    ALL_REDUCE,
    DATA,
    EPOCHS,
    GPT,
    MEASURE,
    METHODS,
    POWER,
    ROUND,
    STEPS_PER_EPOCH,
    compared,
    diverged,
    gpt,
)
from experiments.study import (
    MERGE,
    SEEDS,
    Axes,
    Cases,
    Outcomes,
    grid,
    lines,
    megabytes,
    quality,
    study,
    table,
)
from powergossip.runner.runner import Experiment, Values, sentence_case

TIMES = 4
DILOCO = "DiLoCo, β = 0.5, μ = 1"
CHOSEN: Mapping[str, Values] = {
    ALL_REDUCE: METHODS[ALL_REDUCE] | {"learning_rate": 0.001},
    DILOCO: METHODS[DILOCO] | {"learning_rate": 0.0003},
    POWER: METHODS[POWER] | {"learning_rate": 0.0003},
}
LARGER: Mapping[str, Values] = {
    f"{TIMES} times as many steps": {"num_epochs": TIMES * EPOCHS, "evaluation_interval": TIMES},
    f"batches {TIMES} times as large": {"batch_size": TIMES * GPT["batch_size"]},
    # Its sequences are twice as long.
    "a GPT of 1,017,216 parameters": gpt("1m", STEPS_PER_EPOCH // 2),
}
NONE, SLOW = "none", "α = 0.1"


def _corrected(method: Values) -> Values:
    options = method.get("learning_options", {})
    slow = {"gradient_correction": True, "correction_rate": 0.1}
    return {**method, "learning_options": {**options, **slow}}


def experiment() -> Experiment:
    """Cases are (variant, method), or (data, method, correction) with all seeds."""
    title = "a language model in rounds: more steps, larger batches, a larger model, corrections"
    values = GPT | ADAMW
    rounds = {method: CHOSEN[method] for method in (DILOCO, POWER)}
    cases: Cases = {}
    for data, of_data in DATA.items():
        for method, given in rounds.items():
            both = {NONE: given, SLOW: _corrected(given)}
            axes: Axes = {"data": {data: of_data}, "method": {method: {}}, "correction": both}
            cases |= grid(values, axes, SEEDS)
    cases |= grid(values | {"seed": SEEDS[0]}, {"of": LARGER, "method": CHOSEN})

    def report(outcomes: Outcomes, folder: Path) -> str:
        parts = [f"{values['n_workers']} workers, rounds of {ROUND} steps. {MERGE}"]
        for number, variant in enumerate(LARGER, 1):
            found = {(case[1],): o for case, o in outcomes.items() if case[0] == variant}
            rows = lines(found, ["method"], compared(found[ALL_REDUCE,]))
            file = folder / f"larger-{number}.csv"
            parts += [f"## {sentence_case(variant)}", table(file, rows)]
        corrections = lines(
            {case: o for case, o in outcomes.items() if case[0] in DATA},
            ["data", "method", "correction"],
            quality(MEASURE, 3) | megabytes(),
            diverged=diverged,
        )
        parts += [
            "## Corrections",
            "The steps and batches of `language`. Mean ± standard deviation of "
            f"{len(SEEDS)} seeds.",
            table(folder / "corrections.csv", corrections),
        ]
        return "\n\n".join(parts)

    return study(title, cases, report)
