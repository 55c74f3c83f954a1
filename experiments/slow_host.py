"""The cost of one slow host: steps per second of the fast hosts, and the time to a perplexity.

environment/emulated_cluster.py makes four hosts of this machine, with a worker on each, on a ring
with links of a limited rate. Gradients of the last host take 4 times as long as those of the
others: experiments/slow_gradients.py computes them and sleeps for the rest of their time. Four
hosts on two cores thus compute as if each had its own processor, as long as the machine is
otherwise idle.

Process 0, which is a neighbor of the slow host, measures. Evaluations do not count.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.compression_pays import HOSTS, MODEL
from experiments.study import (
    Curve,
    Outcome,
    Outcomes,
    by_seconds,
    grid,
    lines,
    study,
    table,
    time_to,
)
from experiments.tuned_methods import METHODS as GOSSIP
from experiments.tuned_methods import TOPICS_LSTM
from powergossip.runner.runner import Experiment, Values
from powergossip.runs import figures
from powergossip.runs.metrics import select_rows

if TYPE_CHECKING:
    from pandas import DataFrame

FAST, SLOWER = 0.1, 4  # seconds of a gradient, and how many times longer the slow host takes
RATE = "100mbit"
VALUES: Values = MODEL | {
    "pace": [FAST] * (HOSTS - 1) + [FAST * SLOWER],
    "task_options": TOPICS_LSTM["task_options"] | {"hidden_size": 64},
    "overlapping": True,
    "num_epochs": 6,
    "max_steps_per_epoch": 40,
    "lr_schedule_milestones": [],
    "evaluate_workers": False,
}
METHODS = {method: GOSSIP[method] for method in ("D-PSGD", "PowerGossip, 2 iterations")}
POLICIES: dict[str, Values] = {
    "synchronous": {},
    "bounded, 1": {"gossip": "bounded", "max_delay": 1},
    "asynchronous": {"gossip": "asynchronous"},
}


def experiment() -> Experiment:
    """One run for each method and policy, each on all cores."""
    cases = grid(
        VALUES,
        {"method": METHODS, "gossip": POLICIES},
        entry="experiments/slow_gradients",
        processes=HOSTS,
        rate=RATE,
    )
    title = "what a slow host costs: an LSTM on four hosts, one of them 4 times slower"
    return study(title, cases, _report)


def _report(outcomes: Outcomes, folder: Path) -> str:
    def curve(outcome: Outcome) -> Curve:
        return by_seconds(outcome, "perplexity")

    panels = {
        method: {policy: curve(outcomes[method, policy]) for policy in POLICIES}
        for method in METHODS
    }
    target = max(min(curve[1]) for panel in panels.values() for curve in panel.values())

    def seconds(outcome: Outcome) -> float:
        return time_to(target, *curve(outcome))

    def steps(outcome: Outcome) -> float:
        """Steps of process 0 per second, without evaluations, after the first epoch."""
        gradients = select_rows(outcome.rows[0], "phase_seconds", phase="gradient")["instances"]
        times, _ = curve(outcome)
        return float(gradients.iloc[-1] - gradients.iloc[0]) / (times[-1] - times[0])

    def synchronous(outcome: Outcome) -> Outcome:
        return outcomes[outcome.runs[0].labels["method"], "synchronous"]

    found = lines(
        outcomes,
        ["method", "gossip"],
        {
            "steps per second of a fast host": lambda o: f"{steps(o):.2f}",
            "of synchronous": lambda o: f"{steps(o) / steps(synchronous(o)):.2f}×",
            f"time to a perplexity of {target:.1f}": lambda o: f"{seconds(o):.1f} s",
            "faster than synchronous": lambda o: f"{seconds(synchronous(o)) / seconds(o):.2f}×",
            "final perplexity": lambda o: f"{curve(o)[1][-1]:.1f}",
            "computing a gradient": lambda o: f"{1e3 * _seconds_of_gradient(o.rows[0]):.0f} ms",
        },
    )
    x, y = "seconds, without evaluations", "perplexity of the mean model"
    figures.curves(panels, folder / "figure.svg", x, y, log_y=True)
    pace = VALUES["pace"]
    return "\n\n".join(
        [
            f"{HOSTS} hosts on a ring, links of {RATE}, an LSTM, Python's "
            f"reference texts, one seed. A gradient takes {min(pace):g} s on the fast hosts and "
            f"{max(pace):g} s on the slow one: it is computed, and the host sleeps for the rest. "
            "The last column is the mean time of the computation, which is to be smaller. The "
            f"target is the perplexity that all reach. Workers take "
            f"{VALUES['num_epochs'] * VALUES['max_steps_per_epoch']} steps on average.",
            "![perplexity against time](figure.svg)",
            table(folder / "table.csv", found),
        ]
    )


def _seconds_of_gradient(rows: "DataFrame") -> float:
    """The mean time in which process 0 computes a gradient, without the sleep after it."""
    last = select_rows(rows, "phase_seconds", phase="gradient").iloc[-1]
    return float(last["value"] / last["instances"])
