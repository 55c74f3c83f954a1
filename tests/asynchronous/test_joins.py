"""Workers that take the place of lost ones: on the virtual clock, and in new processes."""

import hashlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import topologies
from powergossip.events import event_log
from powergossip.events.event_log import Entry
from powergossip.network.resilient import spawning
from powergossip.network.resilient.links import LOST
from powergossip.runs import metrics
from tests.harness.asynchronous import METHODS, ULFM_REPLACING, failing, on_virtual_clock
from tests.harness.exchanging import averaging_clock, learning_clock, start
from tests.harness.quadratics import Quadratics

# In new processes.


@pytest.mark.parametrize(
    ("method", "gossip", "again"),
    [
        ("plain", "synchronous", False),
        pytest.param("power", "asynchronous", True, marks=pytest.mark.slow),
        pytest.param("duals", "bounded", True, marks=pytest.mark.slow),
        pytest.param("tracking", "synchronous", True, marks=pytest.mark.slow),
        pytest.param("accelerated", "a2cid2", True, marks=pytest.mark.slow),
    ],
)
def test_new_processes_take_the_place_of_lost_ones(method, gossip, again, tmp_path):
    folder = tmp_path / "run"
    with_statistics = {"task_architecture": "tests.harness.asynchronous:normalized"}
    methods = {
        **METHODS,
        "accelerated": {"optimizer": "dpsgd", "topology": "chain"},
        "plain": METHODS["plain"] | with_statistics,
    }
    values = {**methods[method], "gossip": gossip, "num_epochs": 6, "record_order": True}
    values |= {"on_worker_loss": "replace", "checkpoint_interval": 1}
    plan: dict[str, Any] = {"error": {"0": 5}, "wait": [8]}
    if again:
        values["num_epochs"] = 12
        plan = {"kill": {"0": 5}, "wait": list(range(8, 48)), "again": 3}
    rows = failing(plan, folder, options=ULFM_REPLACING, **values)
    assert sorted(row["worker"] for row in rows) == [0, 1, 2, 3]
    counts = workers_by_epoch(folder)
    assert counts[-1] == 4
    assert min(counts) == 3
    info = json.loads((folder / "info.json").read_text())
    assert [of_worker["worker"] for of_worker in info["replaced"]] == [0] * (1 + again)
    index = json.loads((folder / "checkpoints" / "index.json").read_text())
    parts = [part["workers"] for part in index["last"]["parts"]]
    assert sorted(parts) == [[0, 1], [1, 2], [2, 3], [3, 4]]

    kept = {k: v for k, v in values.items() if k not in ("record_order", "on_worker_loss")}
    replayed = on_virtual_clock(**kept, scenario={"replay": str(folder / "order.jsonl")})
    for row in rows:
        x = replayed.parameters.x[row["worker"]]
        assert hashlib.sha256(x.numpy().tobytes()).hexdigest() == row["digest"]
        if row["worker"] != 0:  # those of a new process begin with 0
            assert replayed.network.bits[row["worker"]] == row["bits"]


@pytest.mark.slow
def test_a_run_with_replacements_resumes_and_replaces_again(tmp_path):
    folder = tmp_path / "run"
    values: dict[str, Any] = {"on_worker_loss": "replace", "optimizer": "choco", "num_epochs": 3}
    failing({"kill": {"1": 3}, "wait": [6]}, folder, options=ULFM_REPLACING, **values)
    values |= {"num_epochs": 6, "resume": True}
    rows = failing({"kill": {"1": 15}, "wait": [18]}, folder, options=ULFM_REPLACING, **values)
    assert sorted(row["worker"] for row in rows) == [0, 1, 2, 3]
    counts = workers_by_epoch(folder)
    assert counts[2] == counts[-1] == 4
    assert min(counts[3:]) == 3


@pytest.mark.parametrize(
    ("early", "wait"), [pytest.param("kill", [7, 9, 11], marks=pytest.mark.slow), ("hang", [])]
)
def test_a_run_goes_on_and_ends_without_replacements_that_do_not_join(early, wait, tmp_path):
    plan = {"kill": {"2": 5}, "early": early, "wait": wait}
    values: dict[str, Any] = {"on_worker_loss": "replace", "optimizer": "dpsgd", "num_epochs": 6}
    rows = failing(plan, tmp_path / "run", code=LOST, options=ULFM_REPLACING, **values)
    assert sorted(row["worker"] for row in rows) == [0, 1, 3]
    assert workers_by_epoch(tmp_path / "run")[-1] == 3


def workers_by_epoch(folder: Path) -> list[float]:
    rows = metrics.load(folder)
    return list(rows[rows["name"] == "workers"]["value"])


# On the virtual clock.

JOIN = {"deaths": [{"worker": 3, "at": 200.25}], "joins": [{"worker": 3, "at": 240.25}]}


@pytest.mark.parametrize("topology", ["ring", "torus", "binary-tree"])
@pytest.mark.parametrize("gossip", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("name", ["plain", "power", "sign"])
def test_the_models_of_the_others_do_not_move_at_a_join(name, gossip, topology):
    x = start(16, torch.float32)
    values = {"deaths": {"fraction": 0.3, "from": 2.0, "until": 9.0}, "jitter": 0.2}
    clock = averaging_clock(x, topology, name, gossip, values=values)
    dead = [deaths.worker for deaths in clock.scenario.deaths]
    assert len(dead) > 3
    again = {"joins": [{"worker": w, "at": 10.0 + 0.7 * k} for k, w in enumerate(dead)]}
    clock = averaging_clock(x, topology, name, gossip, values={**values, **again})
    joined = 0
    while joined < len(dead):
        before, alive = x.clone(), set(clock.alive)
        clock.advance()
        for index in set(clock.alive) - alive:
            joined += 1
            others = sorted(alive)
            assert torch.equal(x[others], before[others])
            assert x[index].norm() <= before[others].norm(dim=1).max()
    assert clock.alive == list(range(16))


class Noisy(Quadratics):
    """Quadratics with the same optimum, far from zero, whose gradients have noise."""

    def __init__(self, seed: int):
        super().__init__()
        self.a, self.b = torch.ones_like(self.a), self  # type: ignore[assignment]
        self._generator = torch.Generator().manual_seed(seed)

    def __getitem__(self, worker: int) -> torch.Tensor:
        noise = torch.randn(self.layout.size, dtype=self.x.dtype, generator=self._generator)
        return 50 + noise


@pytest.mark.parametrize("name", ["plain", "power"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_consensus_is_as_before_soon_after_a_join(name, seed):
    problem = Noisy(seed)
    clock = learning_clock(problem, "dpsgd", 0.1, name=name, values=JOIN, seed=seed)

    def distance_at(seconds: float) -> float:
        clock.run_until(seconds)
        x = problem.x[clock.alive]
        return float((x - x.mean(0)).square().sum(1).mean().sqrt())

    before = np.median([distance_at(t + 0.75) for t in range(100, 200)])
    gap = topologies.make("ring", 8).spectral_gap
    distance_at(240.5)
    after = [distance_at(241.75 + t) for t in range(int(3 / gap))]
    assert clock.alive == list(range(8))
    assert min(after) <= before
    later = [distance_at(300.75 + t) for t in range(100)]
    assert np.median(later) == pytest.approx(before, rel=0.2)


# Parts.


def test_a_new_process_runs_the_same_program(tmp_path, monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()
    monkeypatch.setattr(sys, "argv", ["program.py", "a=1"])
    assert spawning.program() == [str(tmp_path / "program.py"), "a=1"]
    main.__spec__ = importlib.machinery.ModuleSpec("package.__main__", None)
    assert spawning.program() == ["-m", "package", "a=1"]
    main.__spec__ = None
    monkeypatch.setattr(sys, "argv", ["-c", "a=1"])
    with pytest.raises(ValueError, match=r"key=value: .*file"):
        spawning.program("key=value")


def test_all_processes_meet_at_the_end_of_an_epoch():
    """Whatever their clocks say. A process that is lost in the next epoch dies after it."""
    late = [Entry(50.0, "begin", 0, -1, -1), Entry(51.0, "epoch", 0, -1, 1)]
    early = [
        Entry(0.0, "begin", 1, -1, -1),
        Entry(0.1, "epoch", 1, -1, 1),
        Entry(0.2, "finish", 1, -1, -1),
        Entry(0.3, "epoch", 1, -1, 2),
    ]
    found = event_log.merged([late, early], lost=[0])
    kinds = [(entry.worker, entry.kind) for entry in found]
    assert kinds[:2] == [(1, "begin"), (0, "begin")]
    assert sorted(kinds[2:5]) == [(0, "die"), (0, "epoch"), (1, "epoch")]
    assert kinds.index((0, "epoch")) < kinds.index((0, "die"))
    assert kinds[5:] == [(1, "finish"), (1, "epoch")]


def test_all_processes_meet_where_a_replacement_joins():
    """Whatever their clocks say."""
    old = [Entry(0.0, "start", 0, 1, 0), Entry(1.0, "begin", 0, -1, -1)]
    other = [
        Entry(50.0, "start", 1, 0, 0),
        Entry(51.0, "learn", 1, 0, 1),
        Entry(52.0, "learn", 1, 0, 2),
        Entry(53.0, "apply", 1, 0, 0),
    ]
    new = [Entry(0.5, "join", 0, -1, 7), Entry(0.6, "start", 0, 1, 0)]
    found = event_log.merged([old, other, new], lost=[])
    kinds = [(entry.worker, entry.kind) for entry in found]
    expected = [(0, "start"), (0, "begin"), (0, "die"), (1, "start"), (1, "learn")]
    assert kinds[:5] == expected
    assert kinds[5] == (0, "join")
    assert kinds.index((0, "start"), 6) < kinds.index((1, "apply"))
    ended = event_log.merged([old, other, new], lost=[0])
    assert ended[-1][1:3] == ("die", 0) or ("die", 0) in [entry[1:3] for entry in ended[6:]]
    before = event_log.merged([[], other, new], lost=[])  # lost before its first event
    assert before[0][1:3] == ("die", 0)


def test_a_replacement_does_not_apply_parts_for_the_lost_worker():
    """Its first exchange with a neighbor has the number of an earlier one."""
    old = [Entry(0.0, "begin", 0, -1, -1)]
    other = [
        Entry(50.0, "start", 1, 0, 0),
        Entry(51.0, "learn", 1, 0, 1),
        Entry(52.0, "learn", 1, 0, 2),
        Entry(53.0, "start", 1, 0, 0),
    ]
    new = [Entry(0.5, "join", 0, -1, 7), Entry(0.6, "apply", 0, 1, 0)]
    found = event_log.merged([old, other, new], lost=[])
    kinds = [(entry.worker, entry.kind) for entry in found]
    assert kinds[-2:] == [(1, "start"), (0, "apply")]
