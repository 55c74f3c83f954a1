"""A case of the fuzz harness on the virtual clock, and the invariants of its run.

At any step:

- The weights of the workers alive are symmetric and doubly stochastic, and connect them.
- Both ends of an edge have mirrored state after the same exchanges.
- The sum of all variables, without local updates, and of exchanges that one end has not applied yet
  is conserved while members stay and no message is lost at one end. With gossip=a2cid2, variables
  are x + x̃.

At the end: rows of all epochs and workers. A run that is stopped and resumed has the same
bits.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGTERM, raise_signal
from typing import Any
from unittest import mock

import networkx as nx
import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

import train
from powergossip import topologies
from powergossip.errors import Diverged, Interrupted
from powergossip.events.members import Members, dead
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.worker import Worker
from powergossip.network import processes
from powergossip.runs.checkpoints import Checkpoints
from powergossip.training.asynchronous import OnVirtualClock
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.exchanging import matrix, settled, sum_of_unapplied
from tests.harness.fuzz_cases import Case, Fault, require
from tests.harness.training import recording

ROUNDING = 3e-5  # of sums in single precision, relative to the largest element


def run(case: Case) -> str:
    """Run a case. Returns its outcome: complete, diverged, or rejected for a key. Raises Fault."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows: list[dict[str, Any]] = []
        try:
            whole = _built(case, rows)
        except ValueError as error:
            require(len(str(error).splitlines()) == 1, f"rejected in one sentence, not {error!r}")
            key = str(error).partition("=")[0].partition(".")[0]
            require(key in OmegaConf.structured(train.Config), f"a key is rejected: {error}")
            return f"rejected for {key}"
        try:
            with _watched(case, whole):
                whole.train()
        except Diverged:
            return "diverged"
        _check_rows(case, whole, rows)
        _check_resume(case, whole, rows, folder)
    return "complete"


def _built(case: Case, rows: list[dict[str, Any]], **changes: Any) -> Trainer:
    """A run that adds its rows to a list."""
    resume_from = changes.pop("resume_from", None)
    values: Any = OmegaConf.merge(OmegaConf.structured(train.Config), case.train, changes)
    config = checked(values, processes())
    return Trainer(config, processes(), recording(rows), resume_from=resume_from)


# --- During the run ---


@contextmanager
def _watched(case: Case, run: Trainer) -> Iterator[None]:
    """Check the invariants after each step of a run."""
    if not isinstance(run.execution, OnVirtualClock):
        yield
        return
    clock = run.execution.clock
    assert isinstance(clock, VirtualClock)
    moved = _Moved()
    laws = _Laws(case, clock, moved)
    step = run.execution.train_step

    def checked_step(epoch: int, index: int) -> dict[str, Tensor]:
        metrics = step(epoch, index)
        laws()
        return metrics

    with ExitStack() as stack:
        for name in ("begin", "compute", "finish"):
            method = moved.by(getattr(Worker, name), name == "compute")
            stack.enter_context(mock.patch.object(Worker, name, method))
        stack.enter_context(mock.patch.object(run.execution, "train_step", checked_step))
        yield


class _Moved:
    """The sum of what workers change by themselves: total [D'']."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0

    def by(self, method: Callable[[Worker], None], updates: bool) -> Callable[[Worker], None]:
        """A method of a worker, of which this is informed. updates: whether x is updated then."""

        def watched(worker: Worker) -> None:
            before = settled(worker)
            method(worker)
            self.total = self.total + (settled(worker, updates) - before)

        return watched


class _Laws:
    """The invariants of a clock at the end of a step."""

    def __init__(self, case: Case, clock: VirtualClock, moved: _Moved):
        self._clock, self._moved = clock, moved
        values = case.train
        topology = topologies.make(values["topology"], values["n_workers"], seed=values["seed"])
        self._members = Members(topology)
        loss = values["scenario"].get("loss", {})
        self._lossless = loss.get("fraction", 0) == 0 or loss["ends"] == "both"
        self._view: Any = None
        self._sum: Tensor | None = None
        self._largest = 1.0

    def __call__(self) -> None:
        workers = self._clock.workers
        for view in {worker.view for worker in workers.values()}:
            self._check_weights(view)
        if not self._lossless:
            return
        for i, worker in workers.items():
            forgotten = getattr(worker.rule, "duals", {}).keys() <= worker.edges.keys()
            require(forgotten, f"worker {i} has forgotten the duals of lost edges")
            for j in worker.edges:
                if i < j and j in workers and i in workers[j].edges:
                    self._check_mirrored(i, j)
        self._check_sum()

    def _check_weights(self, view: Any) -> None:
        weights = self._members.weights(view)
        W = matrix(weights)
        require(bool((W == W.T).all() and (W >= -1e-12).all()), f"W {W} is symmetric, ≥ 0")
        require(bool(np.allclose(W.sum(1), 1)), f"rows of W {W} sum to 1")
        graph = nx.Graph((i, j) for i, row in weights.items() for j, w in row.items() if w > 0)
        graph.add_nodes_from(weights)
        require(nx.is_connected(graph), f"{weights} connects the workers alive")

    def _check_mirrored(self, i: int, j: int) -> None:
        a, b = self._clock.workers[i].edges[j], self._clock.workers[j].edges[i]
        if (a.k, a.incarnation, a.own is None) != (b.k, b.incarnation, b.own is None):
            return
        mirrored = {"own": "other", "other": "own"}
        mine = a.end.state_dict()
        other = {mirrored.get(key, key): value for key, value in b.end.state_dict().items()}
        require(_same(mine, other), f"edge {i}–{j} has mirrored state after exchange {a.k}")
        duals: list[Any] = [
            getattr(self._clock.workers[x].rule, "duals", {}).get(y) for x, y in ((i, j), (j, i))
        ]
        if any(dual is not None for dual in duals):
            opposite = None not in duals and torch.equal(duals[0], -duals[1])
            require(opposite, f"duals of edge {i}–{j} are opposite after exchange {a.k}")

    def _check_sum(self) -> None:
        """At a quiet point: the workers know each other's state."""
        workers, everybody = self._clock.workers, range(self._members.n_workers)
        views = {worker.view for worker in workers.values()}
        view = views.pop()
        if views or set(workers) != set(everybody) - dead(view):
            return
        variables = [settled(worker) for worker in workers.values()]
        self._largest = max(self._largest, *(float(x.abs().max()) for x in variables))
        unapplied = sum_of_unapplied(self._clock, settled)
        total = sum(variables) + unapplied - self._moved.total
        if view != self._view:
            self._view, self._sum = view, total
        assert self._sum is not None
        change = float((total - self._sum).abs().max())
        require(change <= ROUNDING * self._largest, f"the sum is conserved, not {change:.2g} off")


def _same(first: Any, second: Any) -> bool:
    """Whether nested values have the same bits."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, Mapping):
        return set(first) == set(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


# --- At the end ---


def _check_rows(case: Case, run: Trainer, rows: list[dict[str, Any]]) -> None:
    """Rows of all workers alive at every evaluation, and those of the last epoch."""
    epochs, due = case.train["num_epochs"], set(case.due)
    tested = [row for row in rows if row["name"] == "accuracy"]
    means = [row["epoch"] for row in tested if row["split"] == "test_avg"]
    require(due == {e for e in means if e > 0}, f"rows test_avg of the epochs {due}, not {means}")
    of_workers = {r["worker"] for r in tested if r["split"] == "test" and r["epoch"] == epochs}
    require(
        of_workers == set(run.execution.view.workers),
        f"rows of the workers {run.execution.view.workers} at the end",
    )
    require(run.step == run.total_steps, "the last step is taken")
    if run.execution.view.varies:
        alive = {r["epoch"]: r["value"] for r in rows if r["name"] == "workers"}
        require(set(alive) == due, f"rows of the number of workers in {due}")
        require(alive[epochs] == len(run.execution.view.workers), "rows count the workers alive")


def _check_resume(case: Case, whole: Trainer, rows: list[dict[str, Any]], folder: Path) -> None:
    parts: list[dict[str, Any]] = []
    first = _built(case, parts)
    step = first.execution.train_step

    def stopped(epoch: int, index: int) -> dict[str, Tensor]:
        metrics = step(epoch, index)
        if first.step == min(case.stop_after, first.total_steps):
            raise_signal(SIGTERM)
        return metrics

    with mock.patch.object(first.execution, "train_step", stopped):
        try:
            first.train(Checkpoints(folder, processes()))
        except Interrupted:
            pass
        else:
            raise Fault("a signal stops the run")
    second = _built(case, parts, resume_from=folder)
    second.train()
    _check_same(whole, second, "a resumed run")
    bits = [run.network.bits.tolist() for run in (whole, second)]
    require(bits[0] == bits[1], f"a resumed run sends the same bits, {bits}")
    keep = ("value", "bits", "messages", *(["seconds"] if whole.execution.view.varies else []))
    require(_rows(parts, keep) == _rows(rows, keep), "a resumed run has the same rows")


def _check_same(expected: Trainer, found: Trainer, name: str) -> None:
    alive = expected.execution.view.workers
    require(
        alive == found.execution.view.workers,
        f"{name} has the workers {alive}, not {found.execution.view.workers}",
    )
    x, y = (run.parameters.x[alive] for run in (expected, found))
    require(torch.equal(x, y), f"{name} has the same bits, not {float((x - y).abs().max()):.2g}")


def _rows(rows: list[dict[str, Any]], keep: tuple[str, ...]) -> list[str]:
    """The rows as text, without measurements of time, except of virtual time."""
    tags = ("name", "epoch", "worker", "split", *keep)
    kept = [row for row in rows if row["name"] != "phase_seconds"]
    return [str({key: row[key] for key in tags if key in row}) for row in kept]
