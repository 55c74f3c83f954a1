"""Which learning rule learns best where the workers' data differ, and for how many bits?

Eight workers have fixed shards of the training data. A method is a pair of an averaging rule and a
learning rule. The learning rate falls to 0 as a cosine: a learning rate above 0 at the end leaves
differences between neighbors in proportion to it. There are three stages:

1. Screening: each method with at most 8 settings, in one or a few epochs. A tenth of the training
   data is held out to compare the settings.
2. Tuning: the 3 best settings of each of the 12 best methods, in all epochs, with the same held-out
   data. Half of these methods send a tenth of D-PSGD's bits or less. All-reduce and D-PSGD are
   tuned in addition.
3. The best setting of each with three other seeds and all training data, evaluated on the test
   data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import learning
from experiments.learning import SEEDS, TUNED, TUNING, VALIDATION_RATIO, count, score
from experiments.runner import Experiment, Results, Run, sentence_case
from powergossip.runs import figures
from powergossip.runs.metrics import last_values
from powergossip.runs.tables import markdown, spread

if TYPE_CHECKING:
    from pandas import DataFrame

TRIED = 8  # settings of a method in the first stage, at most
FINALISTS = 12  # methods in the second stage, besides the references
FEWER_BITS = 9.95  # times fewer than D-PSGD in half of them: 10.0 in the table

Values = dict[str, Any]
Pairs = Sequence[tuple[float, float]]  # (momentum, learning rate), the most promising first


@dataclass(frozen=True)
class Averaging:
    """Values of an averaging rule, and the diffusion rates to try. None: its default."""

    values: Values
    gammas: Sequence[float | None] = (None,)


@dataclass(frozen=True)
class Rule:
    """The averaging rules that a learning rule is tried with, and its settings.

    averaging     # names in AVERAGING
    power_gammas  # diffusion rates to try over PowerGossip, if not those in AVERAGING
    further       # values to try without public copies
    power_further # the same over PowerGossip, if not those
    """

    averaging: Sequence[str]
    pairs: Pairs
    power_gammas: Sequence[float | None] | None = None
    further: Sequence[Values] = ({},)
    power_further: Sequence[Values] | None = None


@dataclass(frozen=True)
class Method:
    """A pair of an averaging rule and a learning rule.

    averaging  # the name in tables
    learning   # the value of the key
    values     # of train.py
    settings   # values of train.py to try in the first stage
    """

    averaging: str
    learning: str
    values: Values
    settings: Sequence[Values]

    @property
    def name(self) -> str:
        return f"{self.averaging}, {self.learning}"


POWER = {k: f"PowerGossip, {count(k, 'iteration')}" for k in (1, 4, 8, 10, 11, 16, 22)}
UNBIASED = "CHOCO, QSGD 64 levels, unbiased"
AVERAGING: dict[str, Averaging] = {
    "plain": Averaging({"optimizer": "dpsgd"}),
    **{
        name: Averaging(
            {"optimizer": "power-gossip", "optimizer_num_iterations": k},
            (1.0, 1.308),  # the second is the best of plain gossip on a ring of 8
        )
        for k, name in POWER.items()
    },
    "CHOCO, sign": Averaging(learning.METHODS["CHOCO, sign"], (1.0, 0.3)),
    "CHOCO, top 1 %": Averaging(learning.METHODS["CHOCO, top 1 %"], (0.1, 0.03)),
    UNBIASED: Averaging(
        learning.METHODS["CHOCO, QSGD 4 levels"]
        | {"optimizer_levels": 64, "optimizer_unbiased": True},
        (None,),  # by the sizes of tensors
    ),
}
_ANTISYMMETRIC = ("plain", *(POWER[k] for k in (1, 4, 8, 16)))
_COPIES = ("CHOCO, sign", "CHOCO, top 1 %")

_USUAL: Pairs = (
    (0.9, 0.02),
    (0.9, 0.05),
    (0.9, 0.01),
    (0.0, 0.1),
    (0.9, 0.03),
    (0.9, 0.1),
    (0.0, 0.2),
    (0.0, 0.4),
)
_TRACKING: Pairs = ((0.9, 0.02), (0.9, 0.05), (0.9, 0.01), (0.0, 0.1))
# Tracking is more stable with messages after the local update. Public copies need the overlap.
_OVERLAPPING: Sequence[Values] = ({"overlapping": False}, {"overlapping": True})

# Key `learning` → rule. A message of D-PSGD, quasi-global momentum and exact diffusion has half the
# size of the others'. With 10 or 11 iterations of PowerGossip it has a tenth of D-PSGD's bits.
RULES: dict[str, Rule] = {
    "dpsgd": Rule((*_ANTISYMMETRIC, POWER[10], *_COPIES), _USUAL),
    "quasi-global-momentum": Rule(
        (*_ANTISYMMETRIC, POWER[10], POWER[11], *_COPIES),
        ((0.9, 0.03), (0.9, 0.02), (0.9, 0.05), (0.9, 0.01), (0.9, 0.1)),
    ),
    "gradient-tracking": Rule((*_ANTISYMMETRIC, *_COPIES), _TRACKING, (None,), _OVERLAPPING),
    "momentum-tracking": Rule(_ANTISYMMETRIC, _TRACKING, (None,), _OVERLAPPING),
    "k-gt": Rule(
        _ANTISYMMETRIC,
        ((0.9, 0.01), (0.0, 0.1), (0.9, 0.02), (0.0, 0.05)),
        (None,),
        [{"local_steps": 1}, {"local_steps": 5}],
    ),
    # The learning rate is the length of a step.
    "gt-nsgd": Rule(
        (*_ANTISYMMETRIC, *_COPIES),
        ((0.9, 0.1), (0.9, 0.03), (0.9, 0.3), (0.9, 0.01)),
        (None,),
        _OVERLAPPING,
    ),
    "exact-diffusion": Rule(
        (*_ANTISYMMETRIC, POWER[10], POWER[11], UNBIASED),
        _USUAL,
        (1.0,),
        power_further=[{"learning_options": {"dual_rate": theta}} for theta in (0.1, 0.3)],
    ),
    # BEER has no momentum, and that of MoTEF does not lengthen steps.
    "beer": Rule(_COPIES, ((0.0, 0.1), (0.0, 0.05), (0.0, 0.2), (0.0, 0.02))),
    "motef": Rule(_COPIES, ((0.9, 0.1), (0.9, 0.05), (0.9, 0.2), (0.9, 0.02))),
}
RELAY = "relay-sgd"
TREES = ("chain", "binary-tree", "double-binary-tree")  # of RelaySGD
COMPRESSED_RELAYS: dict[str, Values] = {
    "3 bits": {"optimizer_compressor": "rounding", "optimizer_levels": 3},
    "sign": {"optimizer_compressor": "sign-and-norm"},
}
TIME_VARYING = ("one-peer-exponential", "base-graph")


def _method(
    averaging: str, rule: str, values: Values, pairs: Pairs, further: Sequence[Values] = ({},)
) -> Method:
    """A method whose settings are the first pairs, each with everything in `further`."""
    settings = [
        {"momentum": momentum, "learning_rate": rate, **more}
        for (momentum, rate), more in product(pairs[: TRIED // len(further)], further)
    ]
    return Method(averaging, rule, {**values, "learning": rule}, settings)


def _pair(name: str, key: str, label: str = "", **values: Any) -> Method:
    """A learning rule over an averaging rule, on a ring. The label names further values."""
    rule, averaging = RULES[key], AVERAGING[name]
    own = rule.power_gammas if name in POWER.values() else None
    gammas: list[Values] = [
        {} if gamma is None else {"optimizer_diffusion_rate": gamma}
        for gamma in own or averaging.gammas
    ]
    others: Sequence[Values] = ({},) if name.startswith("CHOCO") else rule.further
    if name in POWER.values() and rule.power_further is not None:
        others = rule.power_further
    further = [gamma | more for gamma, more in product(gammas, others)]
    return _method(f"{name}{label}", key, averaging.values | values, rule.pairs, further)


def _on(topology: str, optimizer: str) -> Values:
    return {"optimizer": optimizer, "topology": topology}


PLAIN = "plain, dpsgd"
REFERENCES = ("all-reduce, dpsgd", PLAIN)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _method("all-reduce", "dpsgd", {"optimizer": "all-reduce"}, _USUAL),
        *(_pair(name, key) for key, rule in RULES.items() for name in rule.averaging),
        *(
            _pair(name, key, ", mixed", decentralized_data_placement="mixed")
            for name, key in (("plain", "dpsgd"), (POWER[10], "quasi-global-momentum"))
        ),
        *(
            _method(f"{averaging}, {topology}", "dpsgd", _on(topology, optimizer), _USUAL)
            for topology in TIME_VARYING
            for averaging, optimizer in (("plain", "dpsgd"), ("push-sum", "push-sum"))
        ),
        # One neighbor a step and twice the iterations: the bits of 11 iterations on the ring.
        _method(
            f"{POWER[22]}, round-robin",
            "quasi-global-momentum",
            _on("round-robin", "power-gossip") | {"optimizer_num_iterations": 22},
            RULES["quasi-global-momentum"].pairs,
            [{}, {"nesterov": True}],
        ),
        *(
            _method(f"relay, {topology}", RELAY, _on(topology, "dpsgd"), _USUAL)
            for topology in TREES
        ),
        *(
            _method(
                f"compressed relay, {name}, {topology}",
                RELAY,
                _on(topology, "choco") | more,
                _USUAL,
            )
            for topology in ("chain", "binary-tree")
            for name, more in COMPRESSED_RELAYS.items()
        ),
    )
}
# Methods for other partitions and tasks, by the results on sorted data.
SOME: tuple[str, ...] = (
    *REFERENCES,
    "plain, quasi-global-momentum",
    f"relay, binary-tree, {RELAY}",
    f"compressed relay, 3 bits, binary-tree, {RELAY}",
    f"{POWER[16]}, k-gt",
    f"{POWER[8]}, quasi-global-momentum",
)
MORE: tuple[str, ...] = (
    *SOME,
    f"relay, double-binary-tree, {RELAY}",
    f"{POWER[11]}, quasi-global-momentum",
    f"{POWER[22]}, round-robin, quasi-global-momentum",
)


def experiment(
    title: str,
    values: Values,
    methods: Sequence[str] = tuple(METHODS),
    measure: str = "accuracy",
    scale: float = 1.0,
    screening_epochs: int = 1,
) -> Experiment:
    """An experiment of three stages, see the module.

    methods           # names in METHODS, those of REFERENCES among them
    measure           # of the mean model: accuracy, where larger is better, or perplexity
    scale             # of all learning rates
    screening_epochs  # of the first stage
    """
    values = {key: value for key, value in values.items() if key != "lr_schedule_milestones"}
    values["lr_schedule"] = "cosine"

    def screening() -> dict[str, list[Run]]:
        short = TUNING | {"num_epochs": screening_epochs}
        return {
            name: [
                _run(name, values, _scaled(setting, scale), short)
                for setting in METHODS[name].settings
            ]
            for name in methods
        }

    def tuning(results: Results) -> dict[str, list[Run]]:
        tried = screening()
        return {
            name: [
                _run(name, values, _setting(name, run), TUNING)
                for run in _best(tried[name], results, measure)[:TUNED]
            ]
            for name in _finalists(tried, results, measure)
        }

    def final(results: Results) -> dict[str, list[Run]]:
        runs = {}
        for name, tried in tuning(results).items():
            setting = _setting(name, _best(tried, results, measure)[0])
            runs[name] = [_run(name, values, setting, {"seed": seed}) for seed in SEEDS]
        return runs

    def report(results: Results, folder: Path) -> str:
        runs = final(results)
        _figure(runs, results, measure, folder / "figure.svg")
        best = {name: _best(tried, results, measure)[0] for name, tried in screening().items()}
        return "\n\n".join(
            [
                f"{sentence_case(title)}.",
                _note(values, methods, screening_epochs),
                _table(runs, results, measure),
                f"![{measure} against megabytes](figure.svg)",
                f"{sentence_case(measure)} of the mean model on held-out data after "
                f"{_epochs(screening_epochs)}, with the best setting of each method:",
                f"{_screening_table(best, results, measure)}\n",
            ]
        )

    def flat(runs: Mapping[str, Sequence[Run]]) -> list[Run]:
        return [run for of_method in runs.values() for run in of_method]

    stages = [
        lambda results: flat(screening()),
        lambda results: flat(tuning(results)),
        lambda results: flat(final(results)),
    ]
    return Experiment(title, stages, report)


# --- Runs ----------------------------------------------------------------------------------------


def _run(name: str, values: Values, setting: Values, further: Values) -> Run:
    """A run of a method. `further` takes precedence over the other values."""
    method = METHODS[name]
    labels = {"averaging": method.averaging, "learning": method.learning, **setting}
    return Run("train", {**values, **method.values, **setting, **further}, labels)


def _scaled(setting: Values, scale: float) -> Values:
    """The setting with `scale` times its learning rate, rounded to six digits."""
    return {**setting, "learning_rate": float(f"{setting['learning_rate'] * scale:.6g}")}


def _setting(name: str, run: Run) -> Values:
    return {key: run.values[key] for key in METHODS[name].settings[0]}


def _best(runs: Sequence[Run], results: Results, measure: str) -> list[Run]:
    """The runs that did not diverge, best first by held-out data. If all did, the first."""
    scores = {run.identity: score(results(run), measure, "valid_avg") for run in runs}
    ended = [run for run in runs if scores[run.identity] > float("-inf")]
    return sorted(ended, key=lambda run: -scores[run.identity]) or list(runs[:1])


def _finalists(tried: Mapping[str, Sequence[Run]], results: Results, measure: str) -> list[str]:
    """The references and the best others, half of them with FEWER_BITS, in the order of `tried`."""
    best = {name: _best(runs, results, measure)[0] for name, runs in tried.items()}
    scores = {name: score(results(run), measure, "valid_avg") for name, run in best.items()}
    plain = _bits(best[PLAIN], results)
    others = [name for name in tried if name not in REFERENCES and scores[name] > float("-inf")]
    others.sort(key=lambda name: -scores[name])
    few = [name for name in others if FEWER_BITS * _bits(best[name], results) <= plain]
    many = [name for name in others if name not in few]
    half = FINALISTS // 2
    going = {
        *REFERENCES,
        *few[: max(half, FINALISTS - len(many))],
        *many[: max(half, FINALISTS - len(few))],
    }
    return [name for name in tried if name in going]


def _bits(run: Run, results: Results) -> float:
    """Bits sent by a worker in a run, mean over the workers. The rows have those of worker 0."""
    sent = float(results(run)["bits"].max())
    if run.values["learning"] != RELAY:
        return sent
    from powergossip import topologies

    n = run.values["n_workers"]
    trees = topologies.make(run.values["topology"], n).trees or ()
    of_worker_0 = sum(0 in edge for tree in trees for edge in tree) / len(trees)
    return sent * 2 * (n - 1) / n / of_worker_0


# --- Report --------------------------------------------------------------------------------------


def _epochs(number: int) -> str:
    return "one epoch" if number == 1 else count(number, "epoch")


def _note(values: Values, methods: Sequence[str], screening_epochs: int) -> str:
    """How settings were chosen."""
    tuned = "the others" if len(methods) <= FINALISTS + len(REFERENCES) else "the best"
    text = (
        f"Mean ± standard deviation of {count(len(SEEDS), 'seed')}. Each method was tried with at "
        f"most {TRIED} settings in {_epochs(screening_epochs)}. All-reduce, D-PSGD (plain, dpsgd) "
        f"and {tuned} had {TUNED} settings in {count(values['num_epochs'], 'epoch')}, of which the "
        f"best is here. Settings were compared on {VALIDATION_RATIO:.0%} of the training data, "
        "held out, with a seed of their own. The learning rate falls to 0 as a cosine. MB sent are "
        "the mean of the workers in a run."
    )
    if any(", mixed, " in name for name in methods):
        text += " Mixed: neighbors have different labels (`decentralized_data_placement=mixed`)."
    return text


def _table(runs: Mapping[str, Sequence[Run]], results: Results, measure: str) -> str:
    """A Markdown table: mean ± standard deviation over the seeds."""
    factor, unit, worst_of = _units(measure)
    plain = _mean_bits(runs[PLAIN], results)
    header = [
        "averaging",
        "learning rule",
        f"{measure}, mean model",
        "worst worker",
        "consensus distance",
        "MB sent per worker",
        "less than D-PSGD",
        "learning rate",
        "momentum",
        "γ",
        "further",
    ]
    lines = []
    for name, of_seeds in runs.items():
        method, values = METHODS[name], of_seeds[0].values
        line = [method.averaging, method.learning]
        rows = [results(run) for run in of_seeds]
        diverged = sum(_diverged(r, measure) for r in rows)
        if diverged:
            line += [f"{diverged} of {len(rows)} diverged", *[""] * 4]
        else:
            means = [float(last_values(r, measure, split="test_avg").iloc[0]) for r in rows]
            worst = [float(worst_of(last_values(r, measure, split="test"))) for r in rows]
            distances = [last_values(r, "consensus_distance", type="params_only") for r in rows]
            bits = _mean_bits(of_seeds, results)
            line += [
                f"{spread([factor * value for value in means])}{unit}",
                f"{spread([factor * value for value in worst])}{unit}",
                f"{sum(float(d.iloc[0]) for d in distances) / len(distances):.3g}",
                f"{bits / 8e6:.1f}",
                f"{plain / bits:.1f}×",
            ]
        gamma = values.get("optimizer_diffusion_rate", "")
        rate, momentum = f"{values['learning_rate']:g}", f"{values['momentum']:g}"
        lines.append([*line, rate, momentum, str(gamma), _further(values)])
    return markdown(header, lines)


def _further(values: Mapping[str, Any]) -> str:
    """Settings without a column of their own."""
    steps = values.get("local_steps", 1)
    theta = values.get("learning_options", {}).get("dual_rate")
    found = [count(steps, "local step")] if steps > 1 else []
    found += [] if theta is None else [f"dual rate {theta}"]
    found += [] if values.get("overlapping", True) else ["not overlapping"]
    return ", ".join(found)


def _screening_table(best: Mapping[str, Run], results: Results, measure: str) -> str:
    """Averaging rules × learning rules."""
    factor, _, _ = _units(measure)
    of = {(METHODS[name].averaging, METHODS[name].learning): run for name, run in best.items()}
    rules = list(dict.fromkeys(rule for _, rule in of))

    def cell(averaging: str, rule: str) -> str:
        if (averaging, rule) not in of:
            return ""
        value = score(results(of[averaging, rule]), measure, "valid_avg")
        return "diverged" if value == float("-inf") else f"{factor * abs(value):.1f}"

    return markdown(
        ["averaging", *rules],
        [
            [averaging, *(cell(averaging, rule) for rule in rules)]
            for averaging in dict.fromkeys(averaging for averaging, _ in of)
        ],
    )


def _figure(runs: Mapping[str, Sequence[Run]], results: Results, measure: str, path: Path) -> None:
    """Draw the measure by megabytes sent: a point for each method, with the range of its seeds."""
    factor, unit, _ = _units(measure)
    points = {}
    for name, of_seeds in runs.items():
        rows = [results(run) for run in of_seeds]
        if not any(_diverged(r, measure) for r in rows):
            reached = [float(last_values(r, measure, split="test_avg").iloc[0]) for r in rows]
            points[name] = (
                _mean_bits(of_seeds, results) / 8e6,
                [factor * value for value in reached],
            )
    y = f"test {measure}, mean model" + (f",{unit}" if unit else "")
    figures.scatter(points, path, "megabytes sent by a worker", y, log_y=measure == "perplexity")


def _units(measure: str) -> tuple[float, str, Any]:
    """Factor, unit, and the function that selects the worst worker."""
    return (100.0, " %", min) if measure == "accuracy" else (1.0, "", max)


def _diverged(rows: "DataFrame", measure: str) -> bool:
    return score(rows, measure, "test_avg") == float("-inf")


def _mean_bits(runs: Sequence[Run], results: Results) -> float:
    return sum(_bits(run, results) for run in runs) / len(runs)
