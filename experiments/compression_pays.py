"""When does compression pay? Seconds per step on slow and fast links, and the time to a target.

environment/emulated_cluster.py makes four hosts of this machine, with a worker on each, on a ring.
The time of a step is measured on links of each rate and compared with a prediction: the bits that
the method sends, divided by the rate, plus the time of a step on unlimited links. A difference
would indicate uncounted messages or unexplained waiting.

The quality of a model after a number of steps does not depend on the links. Learning is therefore
run once, in one process. The time to a target is the number of steps to the target times the
seconds per step.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from environment import emulated_cluster
from experiments.compressed_gradients import METHODS as GRADIENTS
from experiments.study import Axes, Outcomes, grid, study, table, totals
from experiments.tuned_methods import METHODS as GOSSIP
from powergossip.errors import BadInput
from powergossip.runner.runner import ROOT, Experiment, Run, Values
from powergossip.runs import figures
from powergossip.runs.metrics import select_rows

if TYPE_CHECKING:
    from pandas import DataFrame

HOSTS = 4
RATES = {"10mbit": 10e6, "100mbit": 100e6, "1gbit": 1e9, "none": float("inf")}  # bits per second
LIMITED = [rate for rate in RATES if rate != "none"]
# Payload fraction of a link: frames of 1500 bytes with headers of Ethernet, IP and TCP.
CONTENT = 1448 / 1514
STEPS = 5  # per epoch of a timed run, of which the first of EPOCHS is a warm-up
EPOCHS = 3
TARGET = 1.1  # times the final perplexity of all-reduce


# Python's reference texts, with times of computation and communication that add up.
LSTM: Values = {
    "task": "LSTM",
    "task_architecture": "LSTM",
    "topology": "ring",
    "batch_size": 8,
    "learning_rate": 10.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "gradient_clipping": 0.4,
    "distributed_lr_warmup_epoch": 0.0,
    "overlapping": False,
    "checkpoint_interval": 100,
    "seed": 1,
}
MODEL: Values = LSTM | {
    "task_options": {"hidden_size": 440, "num_layers": 1, "dropout": 0.2, "sequence_length": 20},
    "n_workers": HOSTS,
    "drop_last": True,  # as when the figures were measured
}
METHODS: dict[str, Values] = {
    **{m: GOSSIP[m] for m in ("all-reduce", "D-PSGD", "PowerGossip, 2 iterations")},
    "CHOCO, sign": GOSSIP["CHOCO, sign"] | {"optimizer_diffusion_rate": 0.8},
    **{m: GRADIENTS[m] for m in ("PowerSGD, rank 2", "DGC, 1 %")},
}
LEARNING: Values = {"num_epochs": 6, "lr_schedule_milestones": [[5, 0.1]]}
TIMING: Values = {
    "num_epochs": EPOCHS,
    "max_steps_per_epoch": STEPS,
    "evaluation_interval": 100,
    "evaluate_average_model": False,
    "lr_schedule_milestones": [],
}


EMULATOR = ROOT / "environment" / "emulated_cluster.py"
# Without it, long messages that cross wait for each other, see the emulator.
CROSSING_MESSAGES = "OMPI_MCA_btl_tcp_flags=send"


@dataclass(frozen=True)
class EmulatedRun(Run):
    """A run on a cluster with a host for each process, which the emulator starts.

    Attributes:
        rate: Rate of its links, as an argument of the emulator ("100mbit", "none").
    """

    rate: str = "none"

    @property
    def links(self) -> Mapping[str, str]:
        return {"rate": self.rate}

    @property
    def program(self) -> list[str]:
        emulator = [sys.executable, str(EMULATOR), "--hosts", str(self.processes)]
        return ["env", CROSSING_MESSAGES, *emulator, "--rate", self.rate, "--", *super().program]

    @property
    def launched(self) -> int:
        return 1

    def cores(self, available: int) -> int:
        return available

    def check(self, launcher: str) -> None:
        if launcher != "mpirun":
            raise BadInput(
                f"--launcher={launcher}: use mpirun; these runs emulate a cluster on this machine"
            )
        emulated_cluster.check_machine(sys.executable)


def experiment() -> Experiment:
    """Timed steps at each rate, and learning in one process."""
    cases = grid(MODEL | LEARNING, {"method": METHODS})
    for rate in RATES:
        axes: Axes = {"method": METHODS, "rate": {rate: {}}}
        cases |= grid(MODEL | TIMING, axes, run=EmulatedRun, processes=HOSTS, rate=rate)
    title = "when compression pays: an LSTM on four hosts with links of 10 Mbit/s to no limit"
    return study(title, cases, report)


def report(outcomes: Outcomes, folder: Path) -> str:
    """Two tables and a picture."""
    rows = {case: outcome.rows[0] for case, outcome in outcomes.items()}
    by_epoch = {case: totals(of_case) for case, of_case in rows.items() if len(case) == 2}
    timed = {case: found.iloc[-1] - found.iloc[0] for case, found in by_epoch.items()}
    measured = {case: float(of["seconds"] / of["steps"]) for case, of in timed.items()}
    sent = {m: float(timed[m, "none"]["bits"] / timed[m, "none"]["steps"]) / 8 for m in METHODS}
    parameters = round(sent["D-PSGD"] / 8)  # four bytes each, to two neighbors
    predicted = {
        (method, rate): measured[method, "none"] + 8 * sent[method] / (bits * CONTENT)
        for method in METHODS
        for rate, bits in RATES.items()
    }
    final = {m: outcomes[m,].last("perplexity", split="test_avg")[0] for m in METHODS}
    target = TARGET * final["all-reduce"]
    of_steps = [["method", "MB sent per step", *map(_name, RATES), "D-PSGD's time at 10 Mbit/s"]]
    of_times = [["method", "final perplexity", "steps to the target", *map(_name, RATES)]]
    for m in METHODS:
        cells = [f"{measured[m, rate]:.3g} ({predicted[m, rate]:.3g})" for rate in LIMITED]
        cells.append(f"{measured[m, 'none']:.3g}")
        slower = measured["D-PSGD", "10mbit"] / measured[m, "10mbit"]
        of_steps.append([m, f"{sent[m] / 1e6:.3g}", *cells, f"{slower:.1f}×"])
        steps = _steps_to(rows[m,], target)
        cells = [f"{steps:.0f}", *(f"{steps * measured[m, rate] / 60:.3g}" for rate in RATES)]
        never = ["never"] * (1 + len(RATES))
        of_times.append([m, f"{final[m]:.1f}", *(cells if steps < float("inf") else never)])
    megabits = [RATES[rate] / 1e6 for rate in LIMITED]
    panels = {
        title: {m: (megabits, [of[m, rate] for rate in LIMITED]) for m in METHODS}
        for title, of in (("Measured", measured), ("Predicted", predicted))
    }
    x = "rate of a link (Mbit/s)"
    figures.curves(panels, folder / "figure.svg", x, "seconds per step", log_x=True, log_y=True)
    return "\n\n".join(
        [
            "Four hosts on a ring, an LSTM of "
            f"{parameters:,} parameters, Python's reference texts. "
            "Seconds per step and, in brackets, the prediction: bytes sent ÷ rate + the time of a "
            "step on unlimited links.",
            table(folder / "steps.csv", of_steps),
            "![seconds per step by rate of the links](figure.svg)",
            f"Minutes to a perplexity of {target:.1f} (all-reduce ends with "
            f"{final['all-reduce']:.1f} after 6 epochs):",
            table(folder / "times.csv", of_times),
        ]
    )


def _steps_to(rows: "DataFrame", target: float) -> float:
    """Steps until the perplexity of the mean model is at most `target`, or infinity."""
    chosen = select_rows(rows, "perplexity", split="test_avg")
    reached = chosen[chosen["value"] <= target]["epoch"]
    if reached.empty:
        return float("inf")
    return float(totals(rows)["steps"][reached.min()]) / HOSTS  # one process computes them all


def _name(rate: str) -> str:
    return "no limit" if rate == "none" else f"{RATES[rate] / 1e6:g} Mbit/s"
