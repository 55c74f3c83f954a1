"""Resuming a run that has lost workers, or that has another number of them than before.

For exchanges by edges between processes. The workers in the checkpoint keep their models and their
local optimizers. With the same number of workers as at the start of the run they also keep their
indices, and a new worker takes the place of each lost one. Otherwise they are numbered anew. New
workers begin with the mean of all models. If workers leave, the others are shifted as in
powergossip.training.resizing. Edges begin anew.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from powergossip.training.asynchronous.workers import from_bytes
from powergossip.training.resizing import Start
from powergossip.trees import Tree, map_tensors

_COUNTERS = ("bits", "messages")
_OF_MODELS = ("x", "buffers", "whole_number_buffers", "carried")


class Restart:
    """The state of the hosted workers of m, from the parts of a checkpoint.

    Args:
        before: Number of workers at the start of the run.
        start: Start of the run that resumes.
    """

    def __init__(self, before: int, start: Start):
        self._before, self._start = before, start
        self._rows: dict[int, Tree] = {}  # worker before → models
        self._locals: dict[int, Any] = {}  # worker before → local optimizer
        self._of_run: Mapping[str, Any] = {}

    def add(self, workers: range, state: Mapping[str, Any]) -> None:
        """Add the next part: the state of these workers."""
        self._of_run = state
        files = state["events"]["events"]
        for row, worker in enumerate(workers):
            models = {name: state[name] for name in _OF_MODELS}
            models["network"] = {name: state["network"][name] for name in _COUNTERS}
            self._rows[worker] = map_tensors(partial(_row, row), models)
            local = from_bytes(files[row], torch.device("cpu"))["worker"]["local"]
            self._locals[worker] = local

    def state(self, steps_per_epoch: int) -> dict[str, Any]:
        """The state for Trainer.load_state_dict, once all parts are added.

        Args:
            steps_per_epoch: Steps of an epoch in the checkpoint.
        """
        m, run = self._start.n_workers, self._of_run
        places = self._places()
        rows = [self._rows[worker] for worker in sorted(self._rows)]
        x = torch.stack([row["x"].double() for row in rows])
        mean = x.mean(0)
        staying = [place for place in places.values() if place is not None]
        kept = sum(self._rows[worker]["x"].double() for worker in staying)
        shift = mean - (kept + (m - len(staying)) * mean) / m
        models = [self._model(places[worker], rows, mean, shift) for worker in self._start.workers]
        step = int(run["step_in_epoch"] * self._start.steps_per_epoch // steps_per_epoch)
        steps = run["epoch"] * self._start.steps_per_epoch + step
        found = {w: self._locals[p] for w, p in places.items() if p is not None}
        stacked = _stacked(models)
        network = {**stacked["network"], "round": run["network"]["round"]}
        return {
            **stacked,
            "network": network,
            "batched_gradients": False,
            "epoch": run["epoch"],
            "step_in_epoch": step,
            "step": steps,
            "sums": {},
            "events": {"begin": steps, "locals": found},
            "seconds": run["seconds"],
            "phases": run["phases"],
        }

    def evaluated(self) -> dict[str, Any]:
        """The state for an evaluation of the remaining workers, with zeros for the others."""
        assert len(self._start.workers) == self._before
        zeros = map_tensors(torch.zeros_like, next(iter(self._rows.values())))
        models = [self._rows.get(worker, zeros) for worker in range(self._before)]
        run = self._of_run
        of_run = {name: run[name] for name in ("epoch", "step_in_epoch", "step", "seconds")}
        stacked = _stacked(models)
        network = {**stacked["network"], "round": run["network"]["round"]}
        more = {"network": network, "sums": {}, "phases": run["phases"]}
        return {**stacked, **of_run, **more, "alive": sorted(self._rows)}

    def _places(self) -> dict[int, int | None]:
        """Worker → its index in the checkpoint, or None for a new one."""
        m, present = self._start.n_workers, sorted(self._rows)
        if m == self._before:
            return {worker: worker if worker in self._rows else None for worker in range(m)}
        return {worker: present[worker] if worker < len(present) else None for worker in range(m)}

    def _model(self, place: int | None, rows: list[Any], mean: Tensor, shift: Tensor) -> Any:
        model: Any = rows[0] if place is None else self._rows[place]
        x = mean if place is None else model["x"].double() + shift
        found = {**model, "x": x.to(model["x"].dtype)}
        if place is None:
            buffers = torch.stack([row["buffers"].double() for row in rows]).mean(0)
            found["buffers"] = buffers.to(model["buffers"].dtype)
            found["network"] = map_tensors(torch.zeros_like, model["network"])
        return found


def _row(index: int, tensor: Tensor) -> Tensor:
    return tensor[index].clone()


def _stacked(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.stack(trees)
    return {name: _stacked([tree[name] for tree in trees]) for name in first}
