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

Of a run that has lost workers, the others stay. They also keep their indices if the run goes on
with the same number of workers, and a new worker takes the place of each lost one.

All sums are in double precision and in the order of the workers, and therefore equal to the bit in
all processes and for any layout of processes before and after.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Copies
from powergossip.algorithms.learning import Learning
from powergossip.runs.checkpoints import join, rows_of
from powergossip.state_trees import Tree, map_tensors

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
        before: Number of workers at the start of the run.
        present: The n workers in the checkpoint.
    """

    def __init__(self, before: int, present: Collection[int], start: Start):
        self._start, m, old = start, start.n_workers, sorted(present)
        # Worker → its index in the checkpoint, or None for a new one.
        self._places: dict[int, int | None] = (
            {worker: worker if worker in present else None for worker in range(m)}
            if m == before
            else {worker: old[worker] if worker < len(old) else None for worker in range(m)}
        )
        self._kept, self._conserved = (
            _Rows(self._places, start.workers, len(old)) for _ in range(2)
        )
        self._run_facts: dict[str, Any] = {}
        self._round = 0

    def add(self, workers: range, state: Tree) -> None:
        """Add the next part: the state of these workers."""
        rule, algorithm = self._start.rule, state["algorithm"]
        # Of push-sum, over any learning rule.
        weights = algorithm.get("averaging", {}).get("weights", torch.ones(len(workers), 1))
        kept = {name: state[name] for name in _KEPT}
        kept["algorithm"] = {name: algorithm[name] for name in rule.kept if name in algorithm}
        rule_state = {name: algorithm[name] for name in rule.conserved if name in algorithm}
        self._add(workers, state, kept, {"algorithm": rule_state}, weights)

    def _add(
        self,
        workers: range,
        state: Tree,
        kept: dict[str, Tree],
        conserved: dict[str, Tree],
        weights: Tensor,
    ) -> None:
        self._run_facts = {name: state[name] for name in _OF_RUN}
        self._round = state["network"]["round"]
        counters = {name: state["network"][name] for name in _COUNTERS}
        self._kept.add(workers, {**kept, "network": counters}, torch.ones(len(workers), 1))
        self._conserved.add(workers, {**conserved, "x": state["x"]}, weights)

    def state(self, steps_per_epoch: int) -> dict[str, Any]:
        """The state for Trainer.load_state_dict, once all parts are added.

        Within an epoch, the run resumes at the same fraction of it, rounded down to a step.

        Args:
            steps_per_epoch: Steps of an epoch in the checkpoint.
        """
        run, length = self._run_facts, self._start.steps_per_epoch
        step = int(run["step_in_epoch"] * length // steps_per_epoch)
        kept, conserved = self._kept.values(), self._conserved.values(conserved=True)
        for counter in kept["network"].values():
            for row, worker in enumerate(self._start.workers):
                if self._places[worker] is None:
                    counter[row] = 0
        found = self._parts(kept, conserved, step)
        return {
            **found,
            "x": conserved["x"],
            "epoch": run["epoch"],
            "step_in_epoch": step,
            "step": run["epoch"] * length + step,
            "network": {**found.get("network", {}), "round": self._round, **kept["network"]},
            "seconds": run["seconds"],
            "phases": run["phases"],
        }

    def _parts(self, kept: Tree, conserved: Tree, step: int) -> dict[str, Any]:
        """The state of the parts of a run that begins at this step of an epoch."""
        if isinstance(self._start.rule, Copies):
            self._start.rule.begin_at(self._conserved.mean("x"))
        fresh, ratio = self._start.state(), step / max(self._run_facts["step_in_epoch"], 1)
        return {
            **fresh,
            **{name: kept[name] for name in _KEPT},
            "sums": map_tensors(lambda sums: sums * ratio, kept["sums"]) if step else {},
            "algorithm": {**fresh["algorithm"], **kept["algorithm"], **conserved["algorithm"]},
        }


class _Rows:
    """Rows of the hosted workers of a tree of tensors [worker, ...], and sums over all workers.

    Args:
        places: Worker → its index in the checkpoint, or None for a new one.
        before: Number n of workers in the checkpoint.
    """

    def __init__(self, places: Mapping[int, int | None], hosted: range, before: int):
        self._m, self._hosted = len(places), [places[worker] for worker in hosted]
        self._stay = {place for place in places.values() if place is not None}
        self._leave = len(self._stay) < before
        self._rows: dict[int, Tree] = {}  # of the hosted workers that stay, and the first one
        self._total: Tree = None  # Σ_j w_j x_j
        self._staying: Tree = None  # Σ x_j of those that stay
        self._weight, self._weighted = 0.0, False  # Σ_j w_j, and whether one is not 1

    def add(self, workers: range, tree: Tree, weights: Tensor) -> None:
        """Add rows of the next workers, with weights [worker, 1] in the mean."""
        w = weights.flatten().tolist()
        for row, worker in enumerate(workers):
            if worker in self._hosted or not self._rows:
                own = rows_of(tree, slice(row, row + 1))
                self._rows[worker] = map_tensors(Tensor.clone, own)
        staying = [float(worker in self._stay) for worker in workers]
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
        first, shifts = next(iter(self._rows.values())), self._leave or self._weighted

        def value(place: int | None) -> Tree:
            def of(row: Tensor, total: Tensor, staying: Tensor) -> Tensor:
                if not row.ndim:
                    return row
                mean = total / self._weight
                found = mean[None] if place is None else row.double()
                if conserved and shifts:
                    new = self._m - len(self._stay)
                    found = found + (mean - (staying + new * mean) / self._m)
                return (found if row.is_floating_point() else found.round()).to(row.dtype)

            row = first if place is None else self._rows[place]
            return map_tensors(of, row, self._total, self._staying)

        return join([value(place) for place in self._hosted])


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
