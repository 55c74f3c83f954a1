"""The cost of a step: bits, state, CPU time, and seconds that are predicted for a network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from powergossip import prediction, tasks, topologies
from powergossip.benchmark.tasks import (
    LATENCY,
    OPTION,
    PER_BYTE,
    PER_MESSAGE,
    RATES,
    BenchmarkTask,
    Values,
)
from powergossip.network.collectives import all_reduce_cost
from powergossip.parameters import Layout, Parameters
from powergossip.prediction import PredictedMethod, Traffic
from powergossip.topologies import Topology


def graph(setting: Mapping[str, Any], seed: int) -> Topology:
    """The graph of a setting with the values of its task."""
    options = setting.get("topology_options", {})
    return topologies.make(setting["topology"], setting["n_workers"], seed=seed, options=options)


def cost(
    task: BenchmarkTask, values: Values, setting: Values, run: Mapping[str, Any], folder: Path
) -> Values:
    """The cost of a step of a finished run::

    state              bytes of a worker's state beside model and local optimizer
    cpu                seconds of averaging in a step of a worker
    step_seconds       seconds of a step by the links' rate in Mbit/s, predicted
    """
    found: Values = {"state": None, "cpu": None, "step_seconds": {}}
    own = values | setting
    layout = layout_of(task, own)
    if task.is_virtual or run["diverged"]:
        return found
    if not task.is_consensus:
        found["state"] = _state(folder, values["n_workers"])
    method = _method(own)
    fixed, per_neighbor = prediction.cpu_seconds(method, layout, seconds=0.3)
    topology = graph(own, run["seed"])
    degree = sum(r.weights.nnz for r in topology.rounds) / topology.period / topology.n_workers
    found["cpu"] = (fixed + degree * per_neighbor) / method.local_steps
    last = run["evaluations"][-1]
    bits = 8e6 * last["MB"] / last["step"]
    traffic = _scaled(prediction.count(method, layout), topology, method, bits)
    compute = prediction.Compute(task.gradient, fixed, per_neighbor)
    for name, rate in RATES.items():
        cluster = prediction.Cluster(
            topology.n_workers, rate, LATENCY, per_message=PER_MESSAGE, per_byte=PER_BYTE
        )
        step = prediction.step(
            traffic, topology, cluster, compute, method.overlaps, method.local_steps
        )
        found["step_seconds"][name] = step.seconds
    return found


def merge(task: BenchmarkTask, values: Values, runs: Sequence[Mapping[str, Any]]) -> float:
    """Megabytes of a worker in an all-reduce that gives all workers the mean model.

    0 if all models agree at the end of the runs.
    """
    last = [run["evaluations"][-1] for run in runs if run["evaluations"]]
    if task.is_consensus or all(at["worst"] == at["mean"] for at in last):
        return 0.0
    return all_reduce_cost(values["n_workers"], 32 * layout_of(task, values).size)[0] / 8e6


def layout_of(task: BenchmarkTask, values: Values) -> Layout:
    if task.is_consensus:
        return Layout([(values["size"], values["size"])])
    built = tasks.make(
        values["task"],
        n_workers=values["n_workers"],
        batch_size=values["batch_size"],
        seed=1,
        task_options=values["task_options"],
    )
    return Parameters([built.model(values["task_architecture"], 1)]).layout


def _method(values: Values) -> PredictedMethod:
    """The averaging rule or aggregation, with its rounds."""
    return PredictedMethod(
        values["optimizer"],
        {k.removeprefix(OPTION): v for k, v in values.items() if k.startswith(OPTION)},
        values.get("local_steps", 1),
        overlapping=values.get("overlapping"),
    )


def _scaled(traffic: Traffic, topology: Topology, method: PredictedMethod, bits: float) -> Traffic:
    """Messages as long as the run's, whose learning rule may send more variables.

    Args:
        bits: Bits that the worker with most receivers sends in a step.
    """
    n = topology.n_workers
    by_sender = [np.bincount(r.weights.indices, minlength=n) for r in topology.rounds]
    receivers = float(np.mean(by_sender, axis=0).max())
    counted = traffic.bits(n, receivers) / method.local_steps
    factor = bits / counted if counted else 1.0
    return Traffic(
        tuple(
            replace(
                phase,
                neighbor=factor * phase.neighbor,
                reduced=factor * phase.reduced,
                gathered=factor * phase.gathered,
            )
            for phase in traffic.phases
        )
    )


def busiest(folder: Path) -> float:
    """The bits of the worker that has sent the most in a run, relative to worker 0's bits.

    1 for a run that diverged before its first checkpoint.
    """
    if not list((folder / "checkpoints").glob("step-*")):
        return 1.0
    bits = _checkpoint(folder)["network"]["bits"]
    return float(bits.max() / bits[0]) if bits[0] else 1.0


def _state(folder: Path, n_workers: int) -> float:
    """Bytes per worker of the method's state in the last checkpoint."""
    leaves = tree_leaves(_checkpoint(folder)["algorithm"])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) / n_workers


def _checkpoint(folder: Path) -> Values:
    """The last checkpoint of a run."""
    folders = (folder / "checkpoints").glob("step-*")
    (part,) = max(folders, key=lambda of: int(of.name[5:])).glob("part-*.pt")
    return dict(torch.load(part, weights_only=True))
