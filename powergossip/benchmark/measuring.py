"""Bits of a run: of its busiest worker, and of a merge to the mean model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from powergossip import tasks, topologies
from powergossip.benchmark.tasks import BenchmarkTask, Values
from powergossip.network.collectives import all_reduce_cost
from powergossip.parameters import Parameters
from powergossip.topologies import Topology


def graph(setting: Mapping[str, Any], seed: int) -> Topology:
    """The graph of a setting with the values of its task."""
    options = setting.get("topology_options", {})
    return topologies.make(setting["topology"], setting["n_workers"], seed=seed, options=options)


def merge(task: BenchmarkTask, values: Values, runs: Sequence[Mapping[str, Any]]) -> float:
    """Megabytes of a worker in an all-reduce that gives all workers the mean model.

    0 if all models agree at the end of the runs.
    """
    last = [run["evaluations"][-1] for run in runs if run["evaluations"]]
    if task.is_consensus or all(at["worst"] == at["mean"] for at in last):
        return 0.0
    built = tasks.make(
        values["task"],
        n_workers=values["n_workers"],
        batch_size=values["batch_size"],
        seed=1,
        task_options=values["task_options"],
    )
    size = Parameters([built.model(values["task_architecture"], 1)]).layout.size
    return all_reduce_cost(values["n_workers"], 32 * size)[0] / 8e6


def busiest(folder: Path) -> float:
    """The bits of the worker that has sent the most in a run, relative to worker 0's bits.

    1 for a run that diverged before its first checkpoint.
    """
    folders = list((folder / "checkpoints").glob("step-*"))
    if not folders:
        return 1.0
    (part,) = max(folders, key=lambda of: int(of.name[5:])).glob("part-*.pt")
    bits = torch.load(part, weights_only=True)["network"]["bits"]
    return float(bits.max() / bits[0]) if bits[0] else 1.0
