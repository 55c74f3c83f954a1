"""How does the time of a step grow with the number of workers?

Computed by the cost model of powergossip.prediction for 8 to 10,000 workers on hosts of their own,
and for three networks. Nothing is run on them. The model has been compared with measurements on 2
to 8 hosts only (experiment `prediction`).

A worker has one core. Its gradient and the CPU time of its averaging are measured on this machine,
the former with random images. The time to a target is that of the rounds in which plain gossip on
the graph reduces the distance between the workers tenfold: a lower bound for compressed methods,
and no statement about accuracy.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from experiments.prediction import averaging_seconds, known
from experiments.study import Outcomes, measured_once, study, table
from powergossip.runner.runner import Experiment
from powergossip.runs import figures

WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2500, 5000, 10_000)
SHOWN = (8, 64, 1024, 10_000)  # in the table
NETWORKS = {  # bits per second, seconds from a host to another
    "10 Mbit/s, 20 ms": (10e6, 20e-3),
    "1 Gbit/s, 0.1 ms": (1e9, 1e-4),
    "100 Gbit/s, 10 µs": (100e9, 1e-5),
}
GRAPHS = ("ring", "torus", "exponential", "one-peer-exponential", "base-graph")
METHODS = ("all-reduce", "D-PSGD", "PowerSGD, rank 2", "PowerGossip, 2 iterations", "CHOCO, sign")
MODEL, BATCH, ROUNDS = "ResNet20", 32, 5  # gradients measured
PER_MESSAGE, PER_BYTE = 5e-6, 1e-10  # CPU seconds, those of a fast library


def experiment() -> Experiment:
    """No runs: a report of the cost model."""
    title = "steps per second and time to a target for 8 to 10,000 workers, by the cost model"
    return study(title, {}, report)


Curves = dict[str, dict[str, tuple[list[float], list[float]]]]  # network → line → (n, values)


def report(outcomes: Outcomes, folder: Path, workers: tuple[int, ...] = WORKERS) -> str:
    """A table for each network, and a picture of steps per second."""
    costs = _costs(folder)
    speed, target = curves(costs, workers)
    path, y = folder / "figure.svg", "steps per second"
    figures.curves(speed, path, "workers", y, log_x=True, log_y=True)
    shown = [n for n in workers if n in SHOWN]
    parts = [
        f"{MODEL}, {1e3 * costs['gradient'][0]:.3g} ms for a gradient of {BATCH} images, a worker "
        "on a host, by the cost model. Steps per second, and in brackets the seconds until plain "
        "gossip has reduced the distance between the workers tenfold.",
        "![steps per second by workers](figure.svg)",
    ]
    for number, network in enumerate(speed, 1):
        lines = [
            [line, *(_cell(speed[network][line], target[network][line], n) for n in shown)]
            for line in speed[network]
        ]
        header = ["method and graph", *(f"n = {n:,}" for n in shown)]
        parts += [f"{network}:", table(folder / f"network-{number}.csv", [header, *lines])]
    return "\n\n".join(parts)


def curves(
    costs: Mapping[str, tuple[float, ...]], workers: tuple[int, ...]
) -> tuple[Curves, Curves]:
    """Steps per second, and seconds to a tenth of the distance, by network and by method and graph.

    Args:
        costs: CPU seconds by method, see `_costs`.
    """
    from powergossip import prediction, topologies

    layout = prediction.layout(MODEL)
    traffic = {m: prediction.count(prediction.METHODS[m], layout) for m in METHODS}
    speed: Curves = {network: {} for network in NETWORKS}
    target: Curves = {network: {} for network in NETWORKS}
    for n in workers:
        graphs = {name: topologies.make(name, n) for name in GRAPHS}
        agreement = {name: prediction.rounds(graph) for name, graph in graphs.items()}
        for m in METHODS:
            method = prediction.METHODS[m]
            compute = prediction.Compute(costs["gradient"][0], *costs[m])
            for name in GRAPHS if method.gossips else GRAPHS[:1]:
                if method.rejects(graphs[name]):
                    continue
                label = f"{m}, {name}" if method.gossips else m
                rounds = agreement[name] if method.gossips else 1.0
                for network, (rate, latency) in NETWORKS.items():
                    cluster = prediction.Cluster(
                        n, rate, latency, per_message=PER_MESSAGE, per_byte=PER_BYTE
                    )
                    seconds = prediction.step(
                        traffic[m], graphs[name], cluster, compute, method.overlaps
                    ).seconds
                    for panel, value in ((speed, 1 / seconds), (target, rounds * seconds)):
                        xs, ys = panel[network].setdefault(label, ([], []))
                        xs.append(float(n))
                        ys.append(value)
    return speed, target


def _costs(folder: Path) -> dict[str, tuple[float, ...]]:
    """CPU seconds of the gradient, and of averaging by method. Measured by the first report and
    kept in costs.json."""
    from powergossip import prediction

    return measured_once(
        folder / "costs.json",
        lambda: {
            "gradient": (_gradient(),),
            **averaging_seconds(known(METHODS), prediction.layout(MODEL)),
        },
    )


def _gradient() -> float:
    """CPU seconds of a gradient of random images: the least of several."""
    import torch
    from torch.nn import functional

    from powergossip.tasks import models

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    model, least = models.ResNet20((3, 32, 32), 10), float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        functional.cross_entropy(model(images), labels).backward()
        least = min(least, time.process_time() - began)
    return least


def _cell(
    speed: tuple[list[float], list[float]], target: tuple[list[float], list[float]], n: int
) -> str:
    """A cell of the table: a line at n workers."""
    at = speed[0].index(n) if n in speed[0] else None
    return "" if at is None else f"{speed[1][at]:.3g} ({target[1][at]:.3g})"
