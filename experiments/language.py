"""How few bits does a language model need, on the same data and on different topics?

Eight workers train a GPT of 164,288 parameters on the documentation of Linux, byte by byte, in
rounds of 30 local steps. All methods see equally many tokens. There are two stages:

1. Each method with three learning rates, in a quarter of the steps. A tenth of the documents is
   held out to compare them.
2. For each partition of the data, `ALWAYS` and the best of the others, with their best rate, in all
   steps, with three other seeds and all training documents. They are evaluated on the test
   documents. On the same data, there are also `VARIANTS` of a few methods, with one seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.study import (
    MERGE,
    SEEDS,
    TUNING,
    VALIDATION_RATIO,
    Case,
    Cases,
    Columns,
    Curve,
    Outcome,
    Outcomes,
    crossed,
    lines,
    quality,
    score,
    study,
    table,
    traffic,
)
from experiments.tuned_methods import listed
from powergossip import presets
from powergossip.runner.runner import Experiment, Run, Values, sentence_case
from powergossip.runs import figures

MEASURE = "bits_per_byte"
ROUND = 30  # local steps of a round
OTHER_ROUNDS = (10, 120)
STEPS_PER_EPOCH = 240
EPOCHS, FIRST_EPOCHS = 8, 2  # of the second and the first stage
# At the start of the warm-up, whose end has ten times as much
RATES = (0.0003, 0.001, 0.003)
FIRST, FINAL = "first stage", "final"
OTHERS = 4  # methods of the second stage beside ALWAYS

_OF_ADAMW = ("local_optimizer", "adam_beta2")
ADAMW: Values = {key: presets.values("gpt/160k")[key] for key in _OF_ADAMW}


def gpt(size: str, steps_per_epoch: int) -> Values:
    """Values of a run with a preset of this size, all but those of the local optimizer."""
    values = {key: v for key, v in presets.values(f"gpt/{size}").items() if key not in _OF_ADAMW}
    data = {"dataset": "linux-doc", "evaluation_tokens": 32768}
    return {
        **values,
        "task_options": values["task_options"] | data,
        "n_workers": 8,
        "topology": "ring",
        "batch_size": 2,  # small, for many rounds
        "max_steps_per_epoch": steps_per_epoch,
        "num_epochs": EPOCHS,
        "checkpoint_interval": 100,
    }


GPT = gpt("160k", STEPS_PER_EPOCH)
SAME = "same data"
DATA: Mapping[str, Values] = {
    SAME: {},
    "different folders": {"decentralized_data_column": "topic"},
}
# Without an average over rounds. See language_larger for a slower one.
CORRECTED: Values = {"learning_options": {"gradient_correction": True, "correction_rate": 1.0}}
MUON: Values = {**ADAMW, "local_optimizer": "muon"}
MATCHINGS: Values = {"topology": "random-matching"}


def _rounds(optimizer: str, learning: str = "diloco", **more: Any) -> Values:
    return {"optimizer": optimizer, "learning": learning, "local_steps": ROUND, **more}


def _power(iterations: int) -> Values:
    return _rounds("power-gossip", optimizer_num_iterations=iterations)


ALL_REDUCE = "all-reduce in every step"
_EVERY_STEP: Values = {"optimizer": "ef-sgd", "optimizer_compressor": "identity"}
DILOCO = "DiLoCo, β = 0.9"
POWER = "diloco, PowerGossip, 8 iterations"
POWER_CORRECTED = f"{POWER}, corrected"
METHODS: Mapping[str, Values] = {
    ALL_REDUCE: _EVERY_STEP,
    f"{ALL_REDUCE}, Muon": _EVERY_STEP | MUON,
    DILOCO: _rounds("all-reduce", learning_options={"outer_momentum": 0.9}),
    "DiLoCo, β = 0.5": _rounds("all-reduce"),
    "DiLoCo, β = 0.5, μ = 1": _rounds("all-reduce", learning_options={"outer_rate": 1.0}),
    "DiLoCo, β = 0.5, corrected": _rounds("all-reduce") | CORRECTED,
    "DiLoCo, β = 0.5, Muon": _rounds("all-reduce") | MUON,
    "D-PSGD, ring": _rounds("dpsgd", "dpsgd"),
    "LoDAdaC: CHOCO with sign, ring": _rounds("choco", "dpsgd"),
    "diloco, ring": _rounds("dpsgd"),
    "diloco, random matchings": _rounds("dpsgd") | MATCHINGS,
    "gasloc, ring": _rounds("dpsgd", "gasloc"),
    "noloco, random matchings": _rounds("dpsgd", "noloco") | MATCHINGS,
    "SparseLoCo": {"optimizer": "sparse-loco", "local_steps": ROUND},
    "DeMo": {"optimizer": "demo", "local_optimizer": "sgd"},
    "diloco, PowerGossip, 4 iterations": _power(4),
    POWER: _power(8),
    "diloco, PowerGossip, 16 iterations": _power(16),
    "diloco, PowerGossip, 4 iterations, corrected": _power(4) | CORRECTED,
    POWER_CORRECTED: _power(8) | CORRECTED,
    f"{POWER}, Muon": _power(8) | MUON,
}
ALWAYS = (ALL_REDUCE, DILOCO, POWER, POWER_CORRECTED)
VARIANTS: Mapping[str, tuple[Sequence[str], Values]] = {
    **{f"rounds of {n} steps": ((DILOCO, POWER), {"local_steps": n}) for n in OTHER_ROUNDS},
}


def experiment() -> Experiment:
    """An experiment of two stages, see the module. Cases are (data, method, stage or variant)."""

    def run(case: Case, rate: float, further: Values) -> Run:
        data, method, _ = case
        optimizer = {} if "local_optimizer" in METHODS[method] else ADAMW
        values = GPT | optimizer | METHODS[method] | DATA[data] | {"learning_rate": rate} | further
        return Run("train", values, dict(zip(("data", "method", "of"), case, strict=True)))

    first_stage = TUNING | {"num_epochs": FIRST_EPOCHS, "evaluation_interval": FIRST_EPOCHS}
    all_steps = {"num_epochs": EPOCHS, "evaluation_interval": 1}
    first = [(data, method, FIRST) for data in DATA for method in METHODS]

    def second(outcomes: Outcomes) -> Cases:
        scores = {
            case: [score(rows, MEASURE, "valid_avg") for rows in outcome.rows]
            for case, outcome in outcomes.items()
        }
        best = {case: of_case.index(max(of_case)) for case, of_case in scores.items()}
        cases = {case: [outcomes[case].runs[index]] for case, index in best.items()}
        for data in DATA:
            ranked = sorted(METHODS, key=lambda method: max(scores[data, method, FIRST]))
            chosen = [method for method in ranked if method not in ALWAYS][-OTHERS:]
            for method in METHODS:
                if method in (*ALWAYS, *chosen):
                    case, rate = (data, method, FINAL), RATES[best[data, method, FIRST]]
                    cases[case] = [run(case, rate, all_steps | {"seed": seed}) for seed in SEEDS]
        for variant, (some, further) in VARIANTS.items():
            for method in some:
                case, rate = (SAME, method, variant), RATES[best[SAME, method, FIRST]]
                cases[case] = [run(case, rate, all_steps | further | {"seed": SEEDS[0]})]
        return cases

    title = "a language model in rounds of local steps: bits per byte and bits sent"
    cases = {case: [run(case, rate, first_stage) for rate in RATES] for case in first}
    return study(title, cases, _report, second)


def _report(outcomes: Outcomes, folder: Path) -> str:
    steps, of_epoch = EPOCHS * STEPS_PER_EPOCH, GPT["n_workers"] * GPT["batch_size"]
    tokens = steps * of_epoch * GPT["task_options"]["sequence_length"]
    parts = [
        f"{GPT['n_workers']} workers, {steps} steps with {tokens / 1e6:.1f} million "
        f"tokens in total, rounds of {ROUND} steps. Mean ± standard "
        f"deviation of {len(SEEDS)} seeds. The learning rate at the end of the warm-up "
        f"is the best of {listed([10 * rate for rate in RATES])} after "
        f"{FIRST_EPOCHS * STEPS_PER_EPOCH} steps, on {VALIDATION_RATIO:.0%} of the documents, held "
        f"out, with its own seed. {MERGE}",
        "![bits per byte against megabytes](figure.svg)",
    ]
    plain = {data: outcomes[data, ALL_REDUCE, FINAL] for data in DATA}
    curves: dict[str, dict[str, Curve]] = {}
    for data in DATA:
        of_data = {(m,): o for (d, m, of), o in outcomes.items() if (d, of) == (data, FINAL)}
        file = folder / f"{data.replace(' ', '-')}.csv"
        parts += [f"## {sentence_case(data)}", _table(file, of_data, plain[data])]
        for (method,), outcome in of_data.items():
            bits, values = outcome.curve(MEASURE, "bits")
            curves.setdefault(data, {})[method] = [b / 8e6 for b in bits], values
    parts += ["## Other rounds", "The same data, one seed."]
    for variant, (chosen, _) in VARIANTS.items():
        of_variant = {(method,): outcomes[SAME, method, variant] for method in chosen}
        file = folder / f"{variant.replace(' ', '-')}.csv"
        parts += [f"{sentence_case(variant)}:", _table(file, of_variant, plain[SAME])]
    figures.curves(
        curves,
        folder / "figure.svg",
        "sent by a worker before a merge (MB)",
        "bits per byte",
        log_x=True,
    )
    screened = {(m, data): o for (data, m, of), o in outcomes.items() if of == FIRST}
    parts += [
        "## First stage",
        "Bits per byte of the held-out documents, with the best learning rate.",
        table(folder / "first-stage.csv", crossed(screened, "method", _held_out)),
    ]
    return "\n\n".join(parts)


def _table(file: Path, outcomes: Outcomes, plain: Outcome) -> str:
    rates: Columns = {"learning rate": _rate}
    return table(file, lines(outcomes, ["method"], compared(plain), rates, diverged))


def _rate(outcome: Outcome) -> str:
    """The learning rate at the end of the warm-up."""
    return f"{outcome.values['distributed_lr_warmup_factor'] * outcome.values['learning_rate']:g}"


def diverged(outcome: Outcome) -> str:
    return outcome.divergence(MEASURE)


def compared(plain: Outcome) -> Columns:
    """Columns of the bits per byte and the megabytes, beside those of all-reduce."""
    mean = plain.mean(MEASURE)
    return {
        **quality(MEASURE, 3),
        "more than all-reduce": lambda o: f"{100 * (o.mean(MEASURE) / mean - 1):.1f} %",
        **traffic(plain, "all-reduce"),
    }


def _held_out(outcome: Outcome) -> str:
    if outcome.diverged(MEASURE, "valid_avg"):
        return "diverged"
    return f"{outcome.last(MEASURE, split='valid_avg')[0]:.3f} ({_rate(outcome)})"
