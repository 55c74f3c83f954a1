"""How well does the cost model predict the time of a step?

environment/emulated_cluster.py makes 2, 4 and 8 hosts of this machine, with a worker on each, on a
ring. The time of a step is measured on links of each rate, and compared with the prediction of
powergossip.prediction.
The model is given::

    bytes, messages        counted by running a step of the method alone
    CPU time of averaging  measured with one worker alone, without messages
    CPU time of gradient   of two hosts on unlimited links, so that each process has a core: the
                           least of all methods
    CPU time of a message, and of a byte
                           fitted to the communication of these runs

    slowdown of a core     gradients of as many processes as hosts, without messages, against those
                           of as many processes as cores: processes that take turns on a core find
                           its caches with the data of others

and nothing of the runs that it predicts. All hosts compute with the cores of this machine, which is
part of the model: their CPU times add up.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.compressed_gradients import METHODS as GRADIENTS
from experiments.compression_pays import LSTM
from experiments.study import (
    Axes,
    Cases,
    Outcomes,
    Table,
    grid,
    measured_once,
    step_bits,
    step_phases,
    study,
    table,
)
from experiments.tuned_methods import METHODS as GOSSIP
from powergossip.runner.runner import Experiment, Values

if TYPE_CHECKING:
    from powergossip.parameters import Layout

HOSTS = (2, 4, 8)
RATES = {"10mbit": 10e6, "100mbit": 100e6, "1gbit": 1e9}  # bits per second
LATENCY = {"": 0.0, "20ms": 20e-3}  # seconds
LATE = (4, "100mbit", "20ms")  # hosts, rate and latency of the only runs with one
UNLIMITED, ALONE = "none", 2  # rate and number of hosts of the runs that calibrate
# Steps per epoch of a run, of which the first of EPOCHS is a warm-up. Fast ones need more of them.
STEPS = {"10mbit": 10, "100mbit": 50, "1gbit": 50, "none": 50}
EPOCHS = 3
GOAL = 0.25  # relative error
SECONDS = 0.5  # of a measurement of averaging
OF_GRADIENTS = 3.0  # seconds of a measurement of gradients

barrier: Any = None  # a barrier of the processes that measure gradients

HIDDEN = 64
MODEL: Values = LSTM | {
    "task_options": {
        "hidden_size": HIDDEN,
        "num_layers": 1,
        "dropout": 0.2,
        "sequence_length": 20,
    },
    "lr_schedule_milestones": [],
    "num_epochs": EPOCHS,
    "evaluation_interval": 100,
    "evaluate_average_model": False,
}
# Names as in powergossip.prediction.METHODS
METHODS: dict[str, Values] = {
    **{m: GOSSIP[m] for m in ("all-reduce", "D-PSGD")},
    **{m: GOSSIP[m] for m in ("PowerGossip, 1 iteration", "PowerGossip, 2 iterations")},
    "CHOCO, sign": GOSSIP["CHOCO, sign"],
    # With 1 it diverges, and such numbers are slow.
    "CHOCO, top 1 %": GOSSIP["CHOCO, top 1 %"] | {"optimizer_diffusion_rate": 0.1},
    "PowerSGD, rank 2": GRADIENTS["PowerSGD, rank 2"],
}

Place = tuple[int, str, str]  # hosts, rate, latency
PLACES: list[Place] = [*((hosts, rate, "") for hosts in HOSTS for rate in RATES), LATE]
CALIBRATION: Place = (ALONE, UNLIMITED, "")
Times = Mapping[tuple[str, Place], float]  # by method and place: seconds of a step


def experiment() -> Experiment:
    """Timed steps of each method, number of hosts and rate."""
    cases: Cases = {}
    for place in [CALIBRATION, *PLACES]:
        hosts, rate, latency = place
        axes: Axes = {"method": METHODS, "place": {place: {"n_workers": hosts}}}
        values = MODEL | {"max_steps_per_epoch": STEPS[rate]}
        cases |= grid(values, axes, processes=hosts, rate=rate, latency=latency)
    title = "how well the cost model predicts a step: 2, 4, 8 hosts, 10 Mbit/s to 1 Gbit/s"
    return study(title, cases, report)


def report(outcomes: Outcomes, folder: Path) -> str:
    """A table of measured and predicted times, and one of the largest errors."""
    rows = {case: outcome.rows[0] for case, outcome in outcomes.items()}
    measured = {key: sum(step_phases(r).values()) for key, r in rows.items()}
    alone = {method: step_phases(rows[method, CALIBRATION]) for method in METHODS}
    # D-PSGD sends them, four bytes each, to one neighbor of two.
    parameters = round(step_bits(rows["D-PSGD", CALIBRATION]) / 32)
    predicted, calibration = predict(alone, parameters, folder)
    return "\n\n".join(
        [
            f"Hosts on a ring, one worker each, an LSTM of {parameters:,} parameters, "
            f"{os.cpu_count()} cores for all hosts. Milliseconds of a step, in brackets the "
            "prediction and its ratio to the measurement.",
            table(folder / "steps.csv", _table(measured, predicted)),
            "The largest error of each method, and the fraction of its "
            f"{len(PLACES)} cases within {GOAL:.0%}:",
            table(folder / "errors.csv", _errors(measured, predicted)),
            calibration,
        ]
    )


def predict(
    alone: Mapping[str, Mapping[str, float]], parameters: int, folder: Path
) -> tuple[dict[tuple[str, Place], float], str]:
    """Predicted seconds of a step, and a sentence with the calibration.

    Args:
        alone: {method: {phase: seconds of a step}} of two hosts on unlimited links.
    """
    from powergossip import prediction, topologies

    cores = os.cpu_count() or 1
    layout = _layout(parameters)
    averaging, slowdowns = _averaging(layout, folder), _slowdowns(folder)
    traffic = {m: prediction.count(prediction.METHODS[m], layout) for m in METHODS}
    # Other load only adds to a time.
    gradient = min(sum(alone[m][p] for p in ("data", "gradient", "update")) for m in METHODS)
    compute = {m: prediction.Compute(gradient, *averaging[m]) for m in METHODS}
    per_message, per_byte = _fitted(
        [
            (
                traffic[m].messages(ALONE, 1),
                traffic[m].bits(ALONE, 1) / 8,
                alone[m]["communication"],
            )
            for m in METHODS
        ]
    )
    predicted = {}
    for place in PLACES:
        hosts, rate, latency = place
        cluster = prediction.Cluster(
            hosts,
            RATES[rate],
            LATENCY[latency],
            cores=cores / hosts / slowdowns.get(str(hosts), 1.0),
            per_message=per_message,
            per_byte=per_byte,
        )
        topology = topologies.make("ring", hosts)
        for method in METHODS:
            step = prediction.step(traffic[method], topology, cluster, compute[method])
            predicted[method, place] = step.seconds
    return predicted, (
        f"Calibration: {1e3 * gradient:.3g} ms for a gradient, {1e6 * per_message:.3g} µs for a "
        f"message, {1e9 * per_byte:.3g} ns for a byte."
    )


def _fitted(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """CPU seconds of a message and of a byte: non-negative least squares of relative errors.

    Args:
        rows: Messages, bytes and seconds of communication in a step.
    """
    import numpy as np
    from scipy.optimize import nnls

    table = np.array(rows)
    scaled = table[:, :2] / table[:, 2:]
    (per_message, per_byte), _ = nnls(scaled, np.ones(len(rows)))
    return float(per_message), float(per_byte)


def _averaging(layout: "Layout", folder: Path) -> dict[str, tuple[float, float]]:
    """CPU seconds of averaging by method, see prediction.cpu_seconds. Measured by the first report
    and kept in averaging.json."""
    return measured_once(folder / "averaging.json", lambda: averaging_seconds(layout))


def averaging_seconds(layout: "Layout") -> dict[str, tuple[float, float]]:
    """CPU seconds of averaging by method, of one thread, see prediction.cpu_seconds."""
    import torch

    from powergossip import prediction

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {m: prediction.cpu_seconds(prediction.METHODS[m], layout, SECONDS) for m in METHODS}
    torch.set_num_threads(threads)
    return found


def _slowdowns(folder: Path) -> dict[str, float]:
    """CPU time of a gradient among so many processes, in multiples of that among as many as cores.
    Measured by the first report and kept in slowdown.json."""
    cores = os.cpu_count() or 1
    return measured_once(
        folder / "slowdown.json",
        lambda: {
            str(hosts): gradient_seconds(hosts) / gradient_seconds(cores)
            for hosts in HOSTS
            if hosts > cores
        },
    )


def gradient_seconds(processes: int) -> float:
    """CPU seconds of a gradient, with this many processes at once."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(processes)
    with spawn.Pool(processes, _prepare, (together,)) as pool:
        counts = pool.map(count_gradients, range(processes), chunksize=1)
    return OF_GRADIENTS * min(processes, os.cpu_count() or 1) / sum(counts)


def _prepare(together: Any) -> None:
    global barrier
    barrier = together


def count_gradients(_: int) -> int:
    """The number of gradients of a process in OF_GRADIENTS seconds."""
    import torch

    from powergossip import tasks

    torch.set_num_threads(1)
    given = {key: MODEL[key] for key in ("batch_size", "seed", "task_options")}
    task = tasks.make(MODEL["task"], n_workers=max(HOSTS), **given)
    model, batch = task.model(MODEL["task_architecture"], MODEL["seed"]), task.batch(0, 0, 0)
    for _warm_up in range(5):
        task.loss(model, batch)[0].backward()
    barrier.wait()
    end, count = time.monotonic() + OF_GRADIENTS, 0
    while time.monotonic() < end:
        task.loss(model, batch)[0].backward()
        count += 1
    return count


def _layout(parameters: int) -> "Layout":
    """The tensors of the LSTM with this number of parameters: the vocabulary follows from it."""
    from powergossip.parameters import Layout

    gates = 4 * HIDDEN
    inner = [(gates, HIDDEN), (gates, HIDDEN), (gates,), (gates,)]
    words = (parameters - 2 * gates * HIDDEN - 2 * gates) // (HIDDEN + 1)
    return Layout([(words, HIDDEN), *inner, (words,)])


def _table(measured: Times, predicted: Times) -> Table:
    def cell(method: str, place: Place) -> str:
        seen, expected = measured[method, place], predicted[method, place]
        return f"{1e3 * seen:.3g} ({1e3 * expected:.3g}, {expected / seen:.2f})"

    header = ["method", "hosts", *(f"{bits / 1e6:g} Mbit/s" for bits in RATES.values())]
    hosts, rate, latency = LATE
    header.append(f"{RATES[rate] / 1e6:g} Mbit/s, {1e3 * LATENCY[latency]:g} ms")
    lines = [
        [
            method,
            str(n),
            *(cell(method, (n, r, "")) for r in RATES),
            cell(method, LATE) if n == hosts else "",
        ]
        for method in METHODS
        for n in HOSTS
    ]
    return [header, *lines]


def _errors(measured: Times, predicted: Times) -> Table:
    lines = [["method", "largest error", f"within {GOAL:.0%}"]]
    for method in METHODS:
        ratios = [predicted[method, place] / measured[method, place] for place in PLACES]
        within = sum(abs(ratio - 1) <= GOAL for ratio in ratios)
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        lines.append([method, f"{worst - 1:+.0%}", f"{within} of {len(ratios)}"])
    return lines
