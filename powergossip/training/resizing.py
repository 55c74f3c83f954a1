"""Elastic resume: a checkpoint of n workers starts a run of m workers.

Workers i < min(n, m) keep their models, their local optimizers, and the state that their learning
rule declares as their own. Everything that belongs to edges, neighbors or the topology begins as at
the start of a run: directions, duals, tracked variables, relayed sums, the weights of push-sum. The
sums of duals and of tracked variables are then 0. Public copies begin at the mean model, which all
processes compute from the checkpoint. (From 0, they would need many messages to follow the models,
and meanwhile move them apart.)

More workers, m > n: the new ones begin with the mean of all n models, and with the mean of the
moments of their local optimizers. Adam's bias correction has one step count for all workers of a
run. With moments of 0 and a large count, the first steps of a new worker would be too long.

Fewer workers, m < n: the models that stay are shifted by the same vector, so that their mean is
the mean of all n models before::

    x_i ← x_i + x̄ − (1/m) Σ_{j<m} x_j               x̄ = Σ_{j<n} w_j x_j / Σ_{j<n} w_j

The mean model is the result of the updates of all workers, while a single model is a noisy one:
without the shift, part of the updates of departing workers would be lost. The weights w_j are
push-sum's, which conserves Σ w_j x_j, and begin as 1 again. For all other methods they are 1.
Residuals of compressed gradients are shifted in the same way, since they are updates still to come.
Running statistics and moments are not, because some of them must not become negative.

All sums are in double precision and in the order of the workers, and therefore equal to the bit in
all processes and for any layout of processes before and after.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Copies
from powergossip.algorithms.learning import Learning
from powergossip.runs.checkpoints import join, rows_of
from powergossip.trees import Tree, map_tensors

# Entries of a Trainer's state that a worker keeps.
_KEPT = ("buffers", "whole_number_buffers", "optimizer", "sums")
_OF_RUN = ("epoch", "step_in_epoch", "step", "seconds", "phases")  # no rows of workers
_COUNTERS = ("bits", "messages")  # of the network, 0 for new workers


@dataclass(frozen=True)
class Start:
    """The start of a run of m workers, in one of its processes.

    Attributes:
        workers: Workers that the process hosts.
        state: Function that returns the state of its Trainer, before the first step.
        rule: Its learning rule, also before the first step.
    """

    n_workers: int
    workers: range
    steps_per_epoch: int
    state: Callable[[], dict[str, Any]]
    rule: Learning


def sentence(before: int, now: int) -> str:
    """A sentence on the change of the number of workers, for the start of the run."""
    if now > before:
        models = "new workers begin with the mean model"
    else:
        models = f"their models are shifted to the mean of all {before}"
    return f"n_workers={now}, before {before}: {models}"


class Conversion:
    """Converts a checkpoint of n workers to the state of the hosted workers of m, part by part.

    Args:
        before: Number n of workers.
    """

    def __init__(self, before: int, start: Start):
        self._start, self._n = start, before
        self._old = len(_staying(start.workers, before))
        self._kept, self._conserved = (_Rows(before, start) for _ in range(2))
        self._run_facts: dict[str, Any] = {}
        self._round = 0

    def add(self, workers: range, state: Tree) -> None:
        """Add the next part: the state of these workers."""
        self._run_facts = {name: state[name] for name in _OF_RUN}
        self._round = state["network"]["round"]
        rule, algorithm = self._start.rule, state["algorithm"]
        # Of push-sum, over any learning rule.
        weights = algorithm.get("averaging", {}).get("weights", torch.ones(len(workers), 1))
        kept = {name: state[name] for name in _KEPT}
        kept["network"] = {name: state["network"][name] for name in _COUNTERS}
        kept["algorithm"] = {name: algorithm[name] for name in rule.kept if name in algorithm}
        rule_state = {name: algorithm[name] for name in rule.conserved if name in algorithm}
        conserved = {"x": state["x"], "algorithm": rule_state}
        self._kept.add(workers, kept, torch.ones(len(workers), 1))
        self._conserved.add(workers, conserved, weights)

    def state(self, steps_per_epoch: int) -> dict[str, Any]:
        """The state for Trainer.load_state_dict, once all parts are added.

        Within an epoch, the run resumes at the same fraction of it, rounded down to a step.

        Args:
            steps_per_epoch: Steps of an epoch in the checkpoint.
        """
        run, length = self._run_facts, self._start.steps_per_epoch
        kept, conserved = self._kept.values(), self._conserved.values(conserved=True)
        step = int(run["step_in_epoch"] * length // steps_per_epoch)
        if isinstance(self._start.rule, Copies):
            self._start.rule.begin_at(self._conserved.mean("x"))
        fresh = self._start.state()
        for counter in kept["network"].values():
            counter[self._old :] = 0
        ratio = step / max(run["step_in_epoch"], 1)
        return {
            **fresh,
            **{name: kept[name] for name in _KEPT},
            "x": conserved["x"],
            "epoch": run["epoch"],
            "step_in_epoch": step,
            "step": run["epoch"] * length + step,
            "sums": map_tensors(lambda sums: sums * ratio, kept["sums"]) if step else {},
            "algorithm": {**fresh["algorithm"], **kept["algorithm"], **conserved["algorithm"]},
            "network": {**fresh["network"], "round": self._round, **kept["network"]},
            "seconds": run["seconds"],
            "phases": run["phases"],
        }


class _Rows:
    """Rows of the hosted workers of a tree of tensors [worker, ...], and sums over all workers."""

    def __init__(self, before: int, start: Start):
        self._n, self._m = before, start.n_workers
        self._bounds = start.workers.start, start.workers.stop
        self._new = len(start.workers) - len(_staying(start.workers, before))
        self._rows: list[Tree] = []
        self._total: Tree = None  # Σ_{j<n} w_j x_j
        self._staying: Tree = None  # Σ_{j<min(n, m)} x_j
        self._weight, self._weighted = 0.0, False  # Σ_j w_j, and whether one is not 1

    def add(self, workers: range, tree: Tree, weights: Tensor) -> None:
        """Add rows of the next workers, with weights [worker, 1] in the mean."""
        w = weights.flatten().tolist()
        first, stop = (min(max(i - workers.start, 0), len(workers)) for i in self._bounds)
        rows = rows_of(tree, slice(first, stop))
        self._rows.append(map_tensors(Tensor.clone, rows))
        staying = [float(worker < self._m) for worker in workers]
        self._total = _added(self._total, tree, w)
        self._staying = _added(self._staying, tree, staying)
        self._weight += sum(w)
        self._weighted = self._weighted or any(weight != 1 for weight in w)

    def mean(self, name: str) -> Tensor:
        """The mean of a tensor over the n workers: float64 [...]."""
        mean: Tensor = self._total[name] / self._weight
        return mean

    def values(self, conserved: bool = False) -> Tree:
        """The rows of the hosted workers of m: kept ones, and the mean for new workers.

        Args:
            conserved: True if all rows are shifted, so that their mean is the one before.
        """
        rows = join(self._rows)

        def extended(row: Tensor, total: Tensor, staying: Tensor) -> Tensor:
            if not row.ndim:
                return row
            mean = total / self._weight
            found = torch.cat([row.double(), mean.expand(self._new, *mean.shape)])
            if conserved and (self._m < self._n or self._weighted):
                found += mean - (staying + max(self._m - self._n, 0) * mean) / self._m
            return found.to(row.dtype) if row.is_floating_point() else found.round().to(row.dtype)

        return map_tensors(extended, rows, self._total, self._staying)


def _staying(workers: range, before: int) -> range:
    """The workers of this range that were there before."""
    return range(workers.start, max(workers.start, min(workers.stop, before)))


def _added(total: Tree, tree: Tree, weights: list[float]) -> Tree:
    """total + Σ_j w_j x_j over the rows j of the tree, one after the other, in double precision."""

    def add(rows: Tensor, before: Tensor | None = None) -> Tensor:
        if not rows.ndim:
            return rows
        found = torch.zeros(rows.shape[1:], dtype=torch.float64) if before is None else before
        for row, weight in zip(rows, weights, strict=True):
            if weight:
                found = found + row.double() * weight
        return found

    return map_tensors(add, tree) if total is None else map_tensors(add, tree, total)
