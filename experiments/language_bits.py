"""A language model in rounds: how few bits does an exchange need?

The setting, the learning rates, the rows with 32 bits and those of all-reduce are those of
experiments/language.py. Here, elements of messages have b bits: of DiLoCo with AdamW and with Muon,
and of PowerGossip of rank 8. Then four times as many steps, and a larger model, where DiLoCo sends
as many bytes as PowerGossip in eight times longer rounds. One seed: three seeds of DiLoCo in
experiments/language.py differ by .003 bits per byte.
"""

from collections.abc import Mapping
from pathlib import Path

from experiments.language import (
    ADAMW,
    ALL_REDUCE,
    EPOCHS,
    GPT,
    MEASURE,
    METHODS,
    ROUND,
    STEPS_PER_EPOCH,
    diverged,
    gpt,
)
from experiments.study import (
    MERGE,
    SEEDS,
    Axes,
    Cases,
    Outcome,
    Outcomes,
    grid,
    lines,
    quality,
    study,
    table,
)
from powergossip.runner.runner import Experiment, Values, sentence_case

TIMES = 4
DILOCO, MUON = "DiLoCo, β = 0.5, μ = 1", "DiLoCo, β = 0.5, Muon"
POWER = "diloco, PowerGossip, rank 8"
CHOSEN: Mapping[str, Values] = {
    DILOCO: METHODS[DILOCO] | {"learning_rate": 0.0003},
    MUON: METHODS[MUON] | {"learning_rate": 0.001},
    POWER: {
        "optimizer": "power-gossip",
        "optimizer_rank": 8,
        "optimizer_num_iterations": 1,
        "learning": "diloco",
        "local_steps": ROUND,
        "learning_rate": 0.0003,
    },
}
BITS: Mapping[str, tuple[int, ...]] = {
    DILOCO: (8, 4, 3, 2),
    MUON: (8, 4, 3, 2),
    POWER: (32, 4),
}
LONG: Values = {"num_epochs": TIMES * EPOCHS, "evaluation_interval": TIMES}
LONGER: Mapping[tuple[str, str], Values] = {
    (f"{ALL_REDUCE}, Muon", "32"): METHODS[f"{ALL_REDUCE}, Muon"] | {"learning_rate": 0.003},
    (MUON, "4"): CHOSEN[MUON] | {"optimizer_bits": 4},
    (MUON, "2"): CHOSEN[MUON] | {"optimizer_bits": 2},
    **{
        (f"{MUON}, rounds of {steps}", "2"): CHOSEN[MUON]
        | {"optimizer_bits": 2, "local_steps": steps}
        for steps in (60, 15)
    },
}
RARE: Mapping[tuple[str, str], Values] = {
    (f"{method}, rounds of 120", "2"): CHOSEN[method] | {"optimizer_bits": 2, "local_steps": 120}
    for method in (DILOCO, MUON)
}
LARGER: Mapping[tuple[str, str], Values] = {
    (POWER, "4"): CHOSEN[POWER] | {"optimizer_bits": 4},
    **{
        (f"{DILOCO}, rounds of {steps}", "2"): CHOSEN[DILOCO]
        | {"optimizer_bits": 2, "local_steps": steps}
        for steps in (120, 240)
    },
}
USUAL, MORE = "the steps of `language`", f"{TIMES} times as many steps"
LARGE = "a GPT of 1,017,216 parameters"
TABLES: Mapping[str, tuple[Values, Mapping[tuple[str, str], Values]]] = {
    USUAL: ({}, RARE),
    MORE: (LONG, LONGER),
    LARGE: (gpt("1m", STEPS_PER_EPOCH // 2), LARGER),  # its sequences are twice as long
}


def experiment() -> Experiment:
    """Cases are (table, method, bits)."""
    values = GPT | ADAMW
    cases: Cases = {}
    for method, bits in BITS.items():
        few = {str(b): {"optimizer_bits": b} for b in bits}
        axes: Axes = {"of": {USUAL: {}}, "method": {method: CHOSEN[method]}, "bits": few}
        cases |= grid(values, axes, SEEDS[:1])
    for name, (more, found) in TABLES.items():
        for (method, b), of_method in found.items():
            axes = {"of": {name: more}, "method": {method: of_method}, "bits": {b: {}}}
            cases |= grid(values, axes, SEEDS[:1])

    def report(outcomes: Outcomes, folder: Path) -> str:
        parts = [f"{values['n_workers']} workers, rounds of {ROUND} steps. {MERGE}"]
        columns = {
            **quality(MEASURE, 3),
            "MB sent per worker": lambda o: _megabytes(o, 0),
            "MB with a merge": lambda o: _megabytes(o, 1),
        }
        for number, name in enumerate(TABLES, 1):
            found = {case[1:]: o for case, o in outcomes.items() if case[0] == name}
            rows = lines(found, ["method", "bits"], columns, diverged=diverged)
            file = folder / f"bits-{number}.csv"
            parts += [f"## {sentence_case(name)}", table(file, rows)]
        return "\n\n".join(parts)

    title = "a language model in rounds: messages of few bits"
    return study(title, cases, report)


def _megabytes(outcome: Outcome, merges: int) -> str:
    return f"{(outcome.bits + merges * outcome.merge) / 8e6:.2f}"
