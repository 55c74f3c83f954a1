"""Resuming a run of exchanges by edges between processes, with lost or other workers.

The workers in the checkpoint keep their models and their local optimizers, see
powergossip.training.resizing. Edges begin anew.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from powergossip.state_trees import Tree
from powergossip.training.asynchronous.workers import from_bytes
from powergossip.training.resizing import Conversion, Start

_OF_MODELS = ("buffers", "whole_number_buffers", "carried")


class Restart(Conversion):
    """The state of the hosted workers of m, whose exchanges begin anew."""

    def __init__(self, before: int, present: Collection[int], start: Start):
        super().__init__(before, present, start)
        self._locals: dict[int, Any] = {}  # worker before → local optimizer

    def add(self, workers: range, state: Mapping[str, Any]) -> None:
        kept = {name: state[name] for name in _OF_MODELS}
        self._add(workers, state, kept, {}, torch.ones(len(workers), 1))
        for file, worker in zip(state["events"]["events"], workers, strict=True):
            self._locals[worker] = from_bytes(file, torch.device("cpu"))["worker"]["local"]

    def _parts(self, kept: Tree, conserved: Tree, step: int) -> dict[str, Any]:
        places = {w: place for w, place in self._places.items() if place is not None}
        begin = self._run_facts["epoch"] * self._start.steps_per_epoch + step
        found = {worker: self._locals[place] for worker, place in places.items()}
        return {
            **{name: kept[name] for name in _OF_MODELS},
            "batched_gradients": False,
            "sums": {},
            "events": {"begin": begin, "locals": found},
        }

    def evaluated(self) -> dict[str, Any]:
        """The state for an evaluation of the workers in the checkpoint."""
        return {**self.state(1), **self._run_facts, "alive": sorted(self._locals)}
