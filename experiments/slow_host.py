"""The cost of one slow host: steps per second of the fast hosts, and the time to a perplexity.

environment/emulated_cluster.py makes four hosts of this machine, with a worker on each, on a ring
with links of a limited rate. Gradients of the last host take 4 times as long as those of the
others: experiments/slow_gradients.py computes them and sleeps for the rest of their time. Four
hosts on two cores thus compute as if each had its own processor, as long as the machine is
otherwise idle.

Process 0, which is a neighbor of the slow host, measures. Evaluations do not count.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import tuned_methods
from experiments.compression_pays import HOSTS, MODEL
from experiments.runner import Experiment, Results, Run, Values
from powergossip.formatting import markdown
from powergossip.runs import figures

if TYPE_CHECKING:
    from pandas import DataFrame

Case = tuple[str, str]  # method, gossip

FAST, SLOWER = 0.1, 4  # seconds of a gradient, and how many times longer the slow host takes
RATE = "100mbit"
VALUES: Values = MODEL | {
    "pace": [FAST] * (HOSTS - 1) + [FAST * SLOWER],
    "task_options": tuned_methods.TOPICS_LSTM["task_options"] | {"hidden_size": 64},
    "overlapping": True,
    "num_epochs": 6,
    "max_steps_per_epoch": 40,
    "lr_schedule_milestones": [],
    "evaluate_workers": False,
}
METHODS: dict[str, Values] = {
    "D-PSGD": {"optimizer": "dpsgd"},
    "PowerGossip, 2 iterations": {"optimizer": "power-gossip", "optimizer_num_iterations": 2},
}
POLICIES: dict[str, Values] = {
    "synchronous": {},
    "bounded, 1": {"gossip": "bounded", "max_delay": 1},
    "asynchronous": {"gossip": "asynchronous"},
}


def experiment(values: Values = VALUES, rate: str = RATE) -> Experiment:
    """One run for each method and policy, each on all cores.

    Args:
        rate: Rate of the links. "": no emulated hosts.
    """
    runs = {
        (method, policy): Run(
            "experiments/paced",
            {**values, **of_method, **of_policy},
            {"method": method, "gossip": policy},
            HOSTS,
            rate,
        )
        for method, of_method in METHODS.items()
        for policy, of_policy in POLICIES.items()
    }

    def report(results: Results, folder: Path) -> str:
        return _report({case: results(run) for case, run in runs.items()}, values, rate, folder)

    title = "what a slow host costs: an LSTM on four hosts, one of them 4 times slower"
    return Experiment(title, [lambda results: list(runs.values())], report)


def _report(rows: Mapping[Case, "DataFrame"], values: Values, rate: str, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    curves = {case: _curve(of_case) for case, of_case in rows.items()}
    target = max(min(perplexities) for _, perplexities in curves.values())
    lines = []
    for (method, policy), (_, perplexities) in curves.items():
        seconds = time_to(target, *curves[method, policy])
        before = time_to(target, *curves[method, "synchronous"])
        steps = _rate_of_steps(rows[method, policy])
        lines.append(
            [
                method,
                policy,
                f"{steps:.2f}",
                f"{steps / _rate_of_steps(rows[method, 'synchronous']):.2f}×",
                f"{seconds:.1f} s",
                f"{before / seconds:.2f}×",
                f"{perplexities[-1]:.1f}",
                f"{1e3 * _seconds_of_gradient(rows[method, policy]):.0f} ms",
            ]
        )
    header = [
        "method",
        "gossip",
        "steps per second of a fast host",
        "of synchronous",
        f"time to a perplexity of {target:.1f}",
        "faster than synchronous",
        "final perplexity",
        "computing a gradient",
    ]
    panels = {method: {policy: curves[method, policy] for policy in POLICIES} for method in METHODS}
    figures.curves(
        panels,
        folder / "figure.svg",
        "seconds, without evaluations",
        "perplexity of the mean model",
        log_y=True,
    )
    pace = values["pace"]
    return "\n\n".join(
        [
            f"{HOSTS} hosts on a ring, links of {rate or 'this machine'}, an LSTM, Python's "
            f"reference texts, one seed. A gradient takes {min(pace):g} s on the fast hosts and "
            f"{max(pace):g} s on the slow one: it is computed, and the host sleeps for the rest. "
            "The last column is the mean time of the computation, which is to be smaller. The "
            f"target is the perplexity that all reach. Workers take "
            f"{values['num_epochs'] * values['max_steps_per_epoch']} steps on average.",
            markdown(header, lines),
            "![perplexity against time](figure.svg)\n",
        ]
    )


def _curve(rows: "DataFrame") -> tuple[list[float], list[float]]:
    """Seconds without evaluations, and perplexities of the mean model, by epoch."""
    found = rows[(rows["name"] == "perplexity") & (rows["split"] == "test_avg")]
    evaluating = _phase(rows, "evaluation").set_index("epoch")
    ended = evaluating["seconds"] - evaluating["value"]
    return [float(ended[epoch]) for epoch in found["epoch"]], [float(v) for v in found["value"]]


def time_to(target: float, seconds: list[float], perplexities: list[float]) -> float:
    """Seconds until the perplexity is at most `target`, interpolated linearly."""
    for index, value in enumerate(perplexities):
        if value <= target:
            if index == 0:
                return seconds[0]
            before, earlier = perplexities[index - 1], seconds[index - 1]
            fraction = (before - target) / (before - value)
            return earlier + fraction * (seconds[index] - earlier)
    raise ValueError(f"no perplexity of {target}")


def _rate_of_steps(rows: "DataFrame") -> float:
    """Steps of process 0 per second, without evaluations, after the first epoch."""
    gradients = _phase(rows, "gradient")["instances"].tolist()
    seconds = _curve(rows)[0]
    return float(gradients[-1] - gradients[0]) / (seconds[-1] - seconds[0])


def _seconds_of_gradient(rows: "DataFrame") -> float:
    """The mean time in which process 0 computes a gradient, without the sleep after it."""
    last = _phase(rows, "gradient").iloc[-1]
    return float(last["value"] / last["instances"])


def _phase(rows: "DataFrame", phase: str) -> "DataFrame":
    return rows[(rows["name"] == "phase_seconds") & (rows["phase"] == phase)]
