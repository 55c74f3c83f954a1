"""Rows of the user by name, package.module:name: the same as rows that a script registers."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import gossip_run
import train
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.algorithms.learning import LEARNING
from powergossip.benchmark import entry_runs
from powergossip.benchmark.tasks import TASKS
from powergossip.compressors import COMPRESSORS
from powergossip.errors import BadInput
from powergossip.optimizers import GossipOptimizer
from powergossip.runs import metrics
from powergossip.topologies import TOPOLOGIES
from powergossip.training import recorder
from tests.harness.training import reproducible

TINY = ["n_workers=4", "task_architecture=MLP", "max_steps_per_epoch=3", "log_verbosity=0"]
ROWS = """
from dataclasses import dataclass

import networkx as nx
import torch

from powergossip import compressors, topologies
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.learning import GossipRule
from powergossip.network import Gather, ToAll


class Own:
    def __init__(self, network, layout, *, weight=0.5):
        self.weight = weight

    def step(self, x):
        received = yield ToAll(x)
        x.lerp_(received[:, 0], self.weight)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Fails(Own):
    def step(self, x):
        yield ToAll(x)
        raise ValueError("no step")  # line of the step


class Unfinished(Own):
    def __init__(self, network, layout):
        self.weight = network.weightings  # line of the constructor


class Half(Aggregation):
    def __init__(self, network, layout, *, scale=1.0):
        self.scale = scale

    def step(self, gradient, mean):
        message = (self.scale * gradient).half()
        received = yield Gather(list(message))
        mean.copy_(torch.stack(received).float().mean(0) / self.scale)
        gradient.sub_(message / self.scale)


@dataclass
class Scaled:
    factor: float = 1.0

    def stable_rate(self, rows, columns):
        return 1.0

    def fields(self, rows, columns):
        return (compressors.Field(torch.float16, rows * columns),)

    def compress(self, v, stream):
        return (self.factor * v.flatten(-2),)

    def decompress(self, fields, out, stream):
        out.flatten(-2).add_(fields[0])


class Damped(GossipRule):
    def update(self, u):
        self._x.add_(u, alpha=0.5)


class Silent(Own):
    def step(self, x):
        return x


class Bare(Own):
    def step(self, x):
        yield x


def wheel(n_workers, seed):
    return topologies.undirected("wheel", nx.wheel_graph(n_workers))


def takes_one(x):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """A function that writes rows of this name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(recorder, "report", lambda *_: None)  # a table and a figure
    for driven, kind in ((train, train.Config), (gossip_run, gossip_run.Config)):
        monkeypatch.setattr(driven, "config", OmegaConf.structured(kind))

    def write(name: str, source: str = ROWS) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)
    for name in [name for name in gossip_run.ALGORITHMS if ":" in name]:
        del gossip_run.ALGORITHMS[name]


def rows_of(*keys: str, folder: str = "out") -> list[dict[str, Any]]:
    train.main([*TINY, *keys, "--output-dir", folder, "overwrite=true"])
    return reproducible(metrics.load(folder))


@pytest.mark.parametrize(
    ("key", "registry", "row", "others"),
    [
        ("optimizer", AVERAGING, "Own", "optimizer_weight=0.3"),
        ("optimizer", AGGREGATIONS, "Half", "optimizer_scale=8"),
        ("optimizer_compressor", COMPRESSORS, "Scaled", "optimizer_factor=0.5 optimizer=choco"),
        ("learning", LEARNING, "Damped", "optimizer=dpsgd"),
        ("topology", TOPOLOGIES, "wheel", "optimizer=dpsgd"),
    ],
)
def test_a_named_row_trains_as_a_registered_one(
    module: Callable[..., str], key: str, registry: dict[str, Any], row: str, others: str
) -> None:
    """The options of both have keys, in any order, also in a file and after a resume."""
    name = f"{module('rows_of_mine')}:{row}"
    named = rows_of(*others.split(), f"{key}={name}", "num_epochs=1")
    registry["mine"] = registry[name]
    assert registry["mine"].__module__ == "rows_of_mine"
    assert rows_of(f"{key}=mine", *others.split(), "num_epochs=1", folder="registered") == named
    saved: Any = OmegaConf.load("out/config.yaml")
    for setting in others.split():
        option, _, value = setting.partition("=")
        assert str(saved[option]) in (value, f"{value}.0")
    if registry is AVERAGING:
        train.main(["--output-dir", "out", "resume=true", "num_epochs=2", "overwrite=false"])
        resumed = reproducible(metrics.load("out"))
        assert resumed == rows_of("--config", "out/config.yaml", folder="again")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("optimizer=rows:Absent", "rows has no Absent; use "),
        ("optimizer=absent_rows:Own", "there is no module absent_rows"),
        ("optimizer=rows.py:Own", "use package.module:callable, such as rows:Own"),
        ("optimizer=rows:takes_one", "a class or function that can be called with network, layout"),
        ("optimizer=rows:Scaled", "called with network, layout"),
        ("optimizer=choco optimizer_compressor=rows:Own", "called with no arguments"),
        ("optimizer=choco optimizer_compressor=pathlib:PurePath", "with the methods fields"),
        ("learning=rows:takes_one", "use a class derived from GossipRule"),
        ("topology=rows:takes_one", "called with n_workers, seed"),
        ("optimizer=rows:Own optimizer_wieght=1", "no such option.* optimizer_weight"),
        ("optimizer=rows:Own optimizer_weight=a", "optimizer_weight='?a'?: use a number"),
        ("optimizer=rows:Fails", "trial step .*rows.py, line 31: ValueError: no step"),
        ("optimizer=rows:Unfinished", "rows.py, line 36: AttributeError: .*weightings"),
        ("optimizer=rows:wheel", "optimizer=rows:wheel fails in rows.py, line 8.: TypeError"),
        ("optimizer=rows:Own weight=1", "did you mean .* or optimizer_weight\\?"),
    ],
)
def test_a_wrong_row_is_one_sentence(module: Callable[..., str], keys: str, told: str) -> None:
    module("rows")
    with pytest.raises(BadInput, match=told):
        train.main([*TINY, *keys.split()])


def test_gossip_runs_named_rows(module: Callable[..., str]) -> None:
    """An averaging rule has its own options. A compressor is one of CHOCO-Gossip."""
    name = module("rows_of_gossip")
    keys = ["n_workers=4", "matrix_size=4", "num_steps=20", "log_verbosity=0"]
    algorithms = f"algorithm=[{name}:Own,{name}:Scaled]"
    options = ["optimizer_weight=0.4", "hyperparameter_num_samples=2"]
    folder = gossip_run.main([*keys, algorithms, *options, f"topology={name}:wheel"])
    rows = metrics.load(folder)
    assert set(rows["algorithm"]) == {f"{name}:Own", f"{name}:Scaled"}
    of_rule = rows[(rows["algorithm"] == f"{name}:Own") & (rows["name"] == "error")]["value"]
    assert of_rule.iloc[-1] < of_rule.iloc[0] * 0.9
    assert OmegaConf.load(folder / "config.yaml").optimizer_weight == 0.4
    with pytest.raises(BadInput, match="optimizer_wieght=1: use an option of the algorithm"):
        gossip_run.main([*keys, algorithms, "optimizer_wieght=1"])
    with pytest.raises(BadInput, match="use an averaging rule or a compressor"):
        gossip_run.main([*keys, f"algorithm={name}:Half"])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("Silent", "=rows:Silent: step returned Tensor; use a generator"),
        ("Bare", "=rows:Bare, in a trial .*rows.py, line 79: TypeError: a step yielded Tensor"),
        ("Fails", "=rows:Fails, in a trial .*rows.py, line 31: ValueError: no step"),
    ],
)
def test_a_broken_rule_is_one_sentence_everywhere(
    module: Callable[..., str], row: str, told: str
) -> None:
    """For an optimizer also in one process, where the rule has nothing to do."""
    name = f"{module('rows')}:{row}"
    with pytest.raises(BadInput, match=f"optimizer{told}"):
        train.main([*TINY, f"optimizer={name}"])
    with pytest.raises(BadInput, match=f"algorithm{told}"):
        gossip_run.main(["n_workers=4", f"algorithm={name}"])
    local = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(BadInput, match=f"method{told}"):
        GossipOptimizer(local, name)


def test_optimizers_and_the_benchmark_have_named_rows(module: Callable[..., str]) -> None:
    name = module("rows_of_loops")
    local = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="averages nothing in a single process"):
        method = GossipOptimizer(local, f"{name}:Own", weight=0.3).method
    assert (method.averaging, method.options) == (f"{name}:Own", {"weight": 0.3})
    setting = {"optimizer": f"{name}:Own", "optimizer_weight": 0.3, "topology": f"{name}:wheel"}
    for task in ("consensus_random", "fashion_mnist_same"):
        entry_runs.check(TASKS[task], "quick", setting)
