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
Rows = Mapping[tuple[str, str], Values]  # {(method, bits): values}


def _rounds(steps: int, *methods: str) -> dict[tuple[str, str], Values]:
    """Rows of methods with 2 bits, in rounds of so many steps."""
    changes = {"optimizer_bits": 2, "local_steps": steps}
    return {(f"{m}, rounds of {steps}", "2"): CHOSEN[m] | changes for m in methods}


def _bits(method: str, *bits: int) -> dict[tuple[str, str], Values]:
    """Rows of a method with so many bits."""
    return {(method, str(b)): CHOSEN[method] | {"optimizer_bits": b} for b in bits}


FEW = (8, 4, 3, 2)
ALL_REDUCED: Values = METHODS[f"{ALL_REDUCE}, Muon"] | {"learning_rate": 0.003}
# {name of a table: (values of all its runs, its rows)}
TABLES: Mapping[str, tuple[Values, Rows]] = {
    "the steps of `language`": (
        {},
        _bits(DILOCO, *FEW) | _bits(MUON, *FEW) | _bits(POWER, 32, 4) | _rounds(120, DILOCO, MUON),
    ),
    f"{TIMES} times as many steps": (
        {"num_epochs": TIMES * EPOCHS, "evaluation_interval": TIMES},
        {(f"{ALL_REDUCE}, Muon", "32"): ALL_REDUCED}
        | _bits(MUON, 4, 2)
        | _rounds(60, MUON)
        | _rounds(15, MUON),
    ),
    "a GPT of 1,017,216 parameters": (
        gpt("1m", STEPS_PER_EPOCH // 2),  # its sequences are twice as long
        _bits(POWER, 4) | _rounds(120, DILOCO) | _rounds(240, DILOCO),
    ),
}


def experiment() -> Experiment:
    """Cases are (table, method, bits)."""
    values = GPT | ADAMW
    cases: Cases = {}
    for name, (more, found) in TABLES.items():
        for (method, b), of_method in found.items():
            axes: Axes = {"of": {name: more}, "method": {method: of_method}, "bits": {b: {}}}
            cases |= grid(values, axes, SEEDS[:1])

    def report(outcomes: Outcomes, folder: Path) -> str:
        parts = [f"{values['n_workers']} workers, rounds of {ROUND} steps. {MERGE}"]
        columns = quality(MEASURE, 3) | megabytes(2)
        for number, name in enumerate(TABLES, 1):
            found = {case[1:]: o for case, o in outcomes.items() if case[0] == name}
            rows = lines(found, ["method", "bits"], columns, diverged=diverged)
            file = folder / f"bits-{number}.csv"
            parts += [f"## {sentence_case(name)}", table(file, rows)]
        return "\n\n".join(parts)

    title = "a language model in rounds: messages of few bits"
    return study(title, cases, report)
