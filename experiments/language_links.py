"""Seconds until a language model is good: links of 10 and 100 Mbit/s, and a slow host.

environment/emulated_cluster.py makes four hosts of this machine, with two workers on each, and
experiments/slow_gradients.py makes a gradient take the same time on each host, or 4 times as long
on the last one. The seconds of a step are the median over some rounds. Learning does not depend on
the links, and is therefore run once, in one process. The time to a target is the number of steps to
it, times the seconds of a step.

Two runs are made completely on the hosts. One checks this product. In the other one, nobody waits
for the slow host, so that learning depends on the times.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from experiments.language import (
    ADAMW,
    ALL_REDUCE,
    EPOCHS,
    GPT,
    MEASURE,
    METHODS,
    POWER,
    ROUND,
    STEPS_PER_EPOCH,
)
from experiments.prediction import averaging_seconds
from experiments.study import (
    Axes,
    Cases,
    Curve,
    Outcomes,
    Table,
    by_seconds,
    elapsed,
    grid,
    measured_once,
    study,
    table,
    time_to,
)
from powergossip.runner.runner import Experiment, Values
from powergossip.runs import figures

if TYPE_CHECKING:
    from pandas import DataFrame

    from powergossip.prediction import PredictedMethod

HOSTS = 4
PACE, SLOWER = 0.03, 4  # seconds of a worker's gradient, and how many times longer on a slow host
EVEN: Values = {"pace": [PACE] * GPT["n_workers"]}
UNEVEN: Values = {"pace": [PACE] * (GPT["n_workers"] - 2) + [PACE * SLOWER] * 2}
PLACES: Mapping[str, tuple[str, Values]] = {
    "10 Mbit/s": ("10mbit", EVEN),
    "100 Mbit/s": ("100mbit", EVEN),
    "100 Mbit/s, a slow host": ("100mbit", UNEVEN),
}
DILOCO, RING = "DiLoCo, β = 0.5, μ = 1", "diloco, ring"
# With the best learning rates of the first stage of `language`
OF_ROUNDS = {m: METHODS[m] | {"learning_rate": 0.0003} for m in (DILOCO, RING, POWER)}
CHOSEN: Mapping[str, Values] = {
    ALL_REDUCE: METHODS[ALL_REDUCE] | {"learning_rate": 0.001},
    **OF_ROUNDS,
    **{f"{m}, overlapping": OF_ROUNDS[m] | {"overlapping": True} for m in (RING, POWER)},
}
CHECKED = (f"{POWER}, overlapping", "10 Mbit/s")  # by a whole run
ALONE = (f"{RING}, asynchronous", "100 Mbit/s, a slow host")
LEARNING: Values = {"num_epochs": EPOCHS, "seed": 1}
SAMPLES = 6  # epochs of a timed run, the first of which is a warm-up
TIMING: Values = LEARNING | {
    "num_epochs": SAMPLES,
    "max_steps_per_epoch": ROUND,
    "evaluation_interval": SAMPLES,
    "evaluate_average_model": False,
}


def experiment() -> Experiment:
    """Learning in one process, timed rounds at each place, and two whole runs on the hosts."""

    def on_hosts(methods: Mapping[str, Values], place: str, of_run: Values, **more: Any) -> Cases:
        rate, pace = PLACES[place]
        axes: Axes = {"method": methods, "place": {place: pace}, **more}
        entry = "experiments/slow_gradients"
        return grid(GPT | ADAMW | of_run, axes, entry=entry, processes=HOSTS, rate=rate)

    cases = grid(GPT | ADAMW | LEARNING, {"method": CHOSEN})
    for place in PLACES:
        cases |= on_hosts(CHOSEN, place, TIMING)
    whole = {
        CHECKED: CHOSEN[CHECKED[0]],
        ALONE: CHOSEN[RING] | {"gossip": "asynchronous"},
    }
    for (method, place), of_method in whole.items():
        cases |= on_hosts({method: of_method}, place, LEARNING, run={"whole": {}})
    title = "seconds to a target in bits per byte: a GPT on four hosts, slow links, a slow host"
    return study(title, cases, report)


def report(outcomes: Outcomes, folder: Path) -> str:
    """A table of steps, one of times to the target, the whole runs, and a figure."""
    steps: dict[str, Curve] = {}
    for method in CHOSEN:
        epochs, values = outcomes[method,].curve(MEASURE)
        steps[method] = [STEPS_PER_EPOCH * float(epoch) for epoch in epochs], values
    measured = {
        (method, place): _seconds_of_step(outcomes[method, place].rows[0])
        for method in CHOSEN
        for place in PLACES
    }
    predicted = predict(folder)
    whole = {case[:2]: by_seconds(o, MEASURE) for case, o in outcomes.items() if len(case) > 2}
    reached = [*(curve[1] for curve in steps.values()), *(curve[1] for curve in whole.values())]
    target = max(min(curve) for curve in reached)
    to_target = {method: time_to(target, *curve) for method, curve in steps.items()}
    panels = {
        place: {
            method: ([n * measured[method, place] for n in curve[0]], curve[1])
            for method, curve in steps.items()
        }
        for place in PLACES
    }
    panels[ALONE[1]] = {**panels[ALONE[1]], ALONE[0]: whole[ALONE]}
    x, y = "seconds, without evaluations", "bits per byte of the mean model"
    figures.curves(panels, folder / "figure.svg", x, y, log_x=True)

    def step(method: str, place: str) -> str:
        return f"{1e3 * measured[method, place]:.0f} ({1e3 * predicted[method, place]:.0f})"

    def seconds(method: str, place: str) -> str:
        return f"{to_target[method] * measured[method, place]:.0f}"

    needed = ["steps to it", *(f"{steps_to_it:.0f}" for steps_to_it in to_target.values())]
    times = [[line[0], n, *line[1:]] for line, n in zip(_table(seconds), needed, strict=True)]
    product = to_target[CHECKED[0]] * measured[CHECKED]
    checked, alone = (time_to(target, *whole[case]) for case in (CHECKED, ALONE))
    return "\n\n".join(
        [
            f"{HOSTS} hosts, {GPT['n_workers']} workers on a ring, a GPT of 164,288 parameters, "
            f"rounds of {ROUND} steps, one seed. A worker's gradient takes "
            f"{1e3 * PACE:g} ms, on the slow host {1e3 * PACE * SLOWER:g} ms, and a host computes "
            "those of its two workers in turn.",
            "Milliseconds of a step, and in brackets the prediction of `powergossip-predict`. That "
            "is for a process per worker. Here a process has two, whose tensors are added before "
            "an all-reduce, which is therefore faster:",
            table(folder / "steps.csv", _table(step)),
            f"Seconds to {target:.2f} bits per byte of the mean model, which all reach:",
            table(folder / "seconds.csv", times),
            "![bits per byte against seconds](figure.svg)",
            f"Whole runs on the hosts: {CHECKED[0]}, links of {CHECKED[1]}, {checked:.0f} s "
            f"to the target, where steps × seconds of a step are {product:.0f} s. {ALONE[0]}, "
            f"links of {ALONE[1]}, where nobody waits: {alone:.0f} s.",
        ]
    )


def predict(folder: Path) -> Mapping[tuple[str, str], float]:
    """Predicted seconds of a step. The CPU time of averaging is measured by the first report and
    kept in averaging.json."""
    from powergossip import prediction, topologies
    from powergossip.prediction.command_line import PER_BYTE, PER_MESSAGE, duration, rate

    layout = prediction.layout(GPT["task_architecture"])
    methods = {method: _predicted(method) for method in CHOSEN}
    averaging = measured_once(folder / "averaging.json", lambda: averaging_seconds(methods, layout))
    topology = topologies.make(GPT["topology"], GPT["n_workers"])
    found = {}
    for place, (link, pace) in PLACES.items():
        cluster = prediction.Cluster(
            HOSTS,
            rate("rate", link),
            cores=1,
            per_message=duration("", PER_MESSAGE),
            per_byte=duration("", PER_BYTE),
        )
        for name, method in methods.items():
            compute = prediction.Compute(max(pace["pace"]), *averaging[name])
            traffic = prediction.count(method, layout)
            step = prediction.step(
                traffic, topology, cluster, compute, method.overlaps, method.interval
            )
            found[name, place] = step.seconds
    return found


def _predicted(method: str) -> "PredictedMethod":
    from powergossip.prediction import PredictedMethod

    values = CHOSEN[method]
    name = "all-reduce" if method == ALL_REDUCE else values["optimizer"]
    iterations = values.get("optimizer_num_iterations")
    return PredictedMethod(
        name,
        {"num_iterations": iterations} if iterations else {},
        local_steps=values.get("local_steps", 1),
        overlapping=values.get("overlapping"),
    )


def _table(cell: Callable[[str, str], str]) -> Table:
    """A line for each method, with a column for each place."""
    found = [[method, *(cell(method, place) for place in PLACES)] for method in CHOSEN]
    return [["method", *PLACES], *found]


def _seconds_of_step(rows: "DataFrame") -> float:
    """The median over the epochs after the first."""
    ended = elapsed(rows)
    seconds = [ended[epoch] - ended[epoch - 1] for epoch in range(2, SAMPLES + 1)]
    return median(seconds) / ROUND
