"""Trial steps of rows that a script has added: mistakes end a run before data are loaded."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from powergossip import compressors
from powergossip import registry_options as options
from powergossip.algorithms import AVERAGING, learning, trials
from powergossip.algorithms.aggregation import AGGREGATIONS, Aggregation
from powergossip.algorithms.learning import LEARNING, GossipRule, Kind, Variable
from powergossip.compressors import COMPRESSORS
from powergossip.network import Gather, Mean, Network, Processes, ToAll
from powergossip.runs import configuration
from powergossip.topologies import make
from powergossip.training.config import Settings
from powergossip.training.config_checks import checked
from powergossip.training.methods import check_method

ALONE = Processes()
LEAK = "mine: a worker learns of another one without a message"
Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST", 40)


def settings(**keys: Any) -> Settings:
    config = configuration.structured(train.Config)
    for key, value in ({"n_workers": 4} | keys).items():
        config[key] = value
    return checked(config, ALONE)


def try_row(
    registry: dict[str, Any],
    row: Any,
    monkeypatch: pytest.MonkeyPatch,
    topology: str = "ring",
    n: int = 4,
) -> None:
    """The checks of a configuration with this row, before data are loaded."""
    of_gradients = registry is AGGREGATIONS
    made = (lambda network, layout: row()) if of_gradients else row
    monkeypatch.setitem(registry, "mine", made)
    if registry is COMPRESSORS:
        keys = {"optimizer": "choco", "optimizer_compressor": "mine"}
    elif registry is LEARNING:
        keys = {"optimizer": "dpsgd", "learning": "mine"}
    else:
        keys = {"optimizer": "mine"}
    c = settings(topology=topology, n_workers=n, **keys)
    check_method(c, Network(make(topology, n), ALONE))


class Averages:
    """x_i ← the mean of the neighbors' x. `names`: attributes in the state."""

    names: tuple[str, ...] = ()
    steps = 0

    def __init__(self, network: Any, layout: Any) -> None:
        self.weight = random.random() * np.random.random()
        self.before: Tensor | None = None

    def step(self, x: Tensor) -> Any:
        x.copy_((yield ToAll(x)).mean(1))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Rarely(Averages):
    names = ("steps",)

    def step(self, x: Tensor) -> Any:
        self.steps += 1
        if self.steps % 20 == 0:
            x.copy_((yield ToAll(x)).mean(1))


class WithoutState:
    __init__, step = Averages.__init__, Averages.step


class WithoutLoad(Averages):
    load_state_dict: Any = property()  # hasattr is false


def own_random() -> float:
    """A number that no seed determines."""
    own = torch.Generator()
    own.seed()
    return float(torch.rand((), generator=own))


def rows(base: type, *steps: tuple[Step, str | None]) -> list[Any]:
    """A class with each step, and the expected sentence."""
    return [(type("Mine", (base,), {"step": step}), sentence) for step, sentence in steps]


def silent(self: Any, *tensors: Tensor) -> Any:
    tensors[-1].copy_(tensors[0] * 0.5)
    return
    yield


AVERAGES = [
    (Averages, None),
    (Rarely, None),
    (WithoutState, "optimizer=mine has no state_dict; checkpoints need it"),
    (WithoutLoad, "optimizer=mine has no load_state_dict; checkpoints need it"),
    *rows(
        Averages,
        (lambda self, x: x.lerp_((yield ToAll(x)).mean(1), float(torch.rand(()))), None),
        (lambda self, x: x.lerp_((yield ToAll(x)).mean(1), own_random()), None),
        (lambda self, x: (yield ToAll(x)).mean(1), "optimizer=mine does not change x; a step"),
        (lambda self, x: (yield x), "yielded Tensor; use ToAll, ToEach, Mean or Gather"),
        (lambda self, x: (yield ToAll(x[0])), r"ToAll of a tensor \(1024,\): use one of shape"),
        (lambda self, x: (yield Mean(x[0])), r"Mean of a tensor \(1024,\): use one of shape"),
        (lambda self, x: x.mul_(0.5), "optimizer=mine: step returned Tensor; use a generator"),
        (silent, "optimizer=mine sends no messages; a step yields them"),
        (lambda self, x: x.lerp_(x.roll(1, 0), 0.5) + (yield ToAll(x)).mean(1), LEAK),
        (
            lambda self, x: x.lerp_(x.roll(1, 0), 0.1 * float((yield ToAll(x)).any())),
            LEAK,
        ),
        (lambda self, x: x.mul_(self.weight).lerp_((yield ToAll(x))[:, 0] * 0 + x[0], 0.5), LEAK),
    ),
]


class Aggregates(Aggregation):
    names: tuple[str, ...] = ()
    last: Any = 0.0
    steps = 0
    state_dict, load_state_dict = Averages.state_dict, Averages.load_state_dict

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_((yield Mean(gradient)))
        gradient.zero_()


class Scheduled(Aggregates):
    def at_epoch(self, epoch: float) -> None:
        self.epoch = epoch

    def at_learning_rate(self, *rates: float) -> None:
        self.rate = rates[0]

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        yield from super().step(gradient, mean)
        mean.mul_(self.rate * (1 + self.epoch))


class RarelyFilled(Aggregates):
    names = ("steps",)

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        self.steps += 1
        if self.steps % 20:
            mean.zero_()
        else:
            yield from super().step(gradient, mean)


def stacked(pieces: Any) -> Tensor:
    return torch.stack(pieces).mean(0)


AGGREGATES = [
    (Aggregates, None),
    (Scheduled, None),
    (RarelyFilled, None),
    *rows(
        Aggregates,
        (lambda self, g, mean: mean.copy_(stacked((yield Gather(list(g.clone()))))), None),
        (lambda self, g, mean: (yield Mean(g)), "optimizer=mine does not change mean"),
        (silent, "optimizer=mine sends no messages; a step yields them"),
        (lambda self, g, mean: mean.copy_((yield Mean(g)) * 0 + g.mean(0)), LEAK),
        (lambda self, g, mean: (yield Gather(list(g[:, 0]))), "Gather of a piece of shape"),
        (lambda self, g, mean: (yield Gather([g[0]])), "Gather of 1 pieces: use one for each"),
    ),
]


class NotFlat(compressors.Identity):
    def compress(self, v: Tensor, stream: Any) -> tuple[Tensor, ...]:
        return (v,)


class OneField(compressors.Identity):
    def fields(self, rows: int, columns: int) -> Any:
        return compressors.Field(torch.float32, rows * columns)


class TwoKinds(compressors.Identity):
    def fields(self, rows: int, columns: int) -> Any:
        kinds = compressors.Levels(-1, 2, 2), compressors.Levels(-1, 1, 3)
        return tuple(compressors.Field(kind, rows * columns) for kind in kinds)


class AssignedOut(compressors.Identity):
    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        out = out.flatten(-2) + fields[0]


COMPRESSES = [
    (AssignedOut, "optimizer=choco with compressor=mine does not change x"),
    (NotFlat, r"NotFlat.compress returned shape \(4, 1, 32, 32\) for field 0; use"),
    (OneField, r"OneField.fields returned Field\(.*\); use a tuple of Fields"),
    (TwoKinds, r"TwoKinds.fields returned Levels\(.*; use one kind of Levels"),
]


class Rule(GossipRule):
    """D-PSGD with an anchor, x_i at the start. Messages in every `period`-th step."""

    kinds = frozenset(Kind)
    state: ClassVar[Any] = {"anchor": Variable.RESET, "steps": Variable.RESET}
    period = 1

    def __init__(self, workers: Any, *, local_steps: int = 1) -> None:
        super().__init__(workers)
        self._anchor, self._steps = self._x.clone(), 0
        self._period = max(self.period, local_steps)

    @property
    def exchanging(self) -> bool:
        return (self._steps + 1) % self._period == 0

    def settle(self) -> None:
        self._x.lerp_(self._anchor.lerp_(self._x, 0.1), 0.1)
        self._steps += 1


class Seldom(Rule):
    period = 30


class Never(Rule):
    period = 10**6


class LacksVariable(Rule):
    state: ClassVar[Any] = {"other": Variable.KEPT}


class Method(Rule):
    def exchanging(self) -> bool:  # type: ignore[override]
        return False


class ReadsGradients(Rule):
    def direct(self, g: Tensor) -> None:
        g.copy_(g.mean(0).expand_as(g))


class LeaksAtTheEndOfARound(Rule):
    def settle(self) -> None:
        if self.exchanging:
            self._x.lerp_(self._x.roll(1, 0), 0.1)
        super().settle()


class Copies(Rule):
    def mixed(self) -> tuple[Tensor, ...]:
        return (self._x.clone(),)


class Names(Rule):
    state: ClassVar[Any] = ("anchor",)


class AssignedX(Rule):
    def update(self, u: Tensor | None) -> None:
        assert u is not None
        self._x = self._x + u


class Generates(Rule):
    def step(self) -> Any:
        yield self._averaging.step(self._x)


LEARNS = [
    (Rule, None),
    (Seldom, None),
    (Never, "learning=mine sends no messages; a step yields them"),
    (LacksVariable, "LacksVariable.state has 'other': use self._other for the variable"),
    (Method, "Method.exchanging: use a property; a method is true in every step"),
    (partial(Rule, local_steps=2), "learning=mine is the row .*; use a class derived from Goss"),
    (ReadsGradients, LEAK),
    (AssignedX, "learning=mine does not change x by gradients"),
    (Copies, "learning=mine does not use the messages that it receives; mixed returns"),
    (Names, r"Names.state=\('anchor',\): use a mapping from names to Variable"),
    (Generates, "Generates.step: use the methods of GossipRule, such as update"),
]


@pytest.mark.parametrize(
    ("registry", "row", "sentence"),
    [
        (registry, *case)
        for registry, cases in (
            (AVERAGING, AVERAGES),
            (AGGREGATIONS, AGGREGATES),
            (COMPRESSORS, COMPRESSES),
            (LEARNING, LEARNS),
        )
        for case in cases
    ],
)
def test_rows_of_a_script_are_tried_before_data_are_loaded(
    registry: dict[str, Any], row: Any, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without random numbers of the run."""
    before = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError), match=sentence) if sentence else nullcontext():
        try_row(registry, row, monkeypatch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("registry", "row"), [(AVERAGING, Averages), (LEARNING, Rule)])
@pytest.mark.parametrize(("topology", "n"), [("one-peer-exponential", 4), ("ring", 1)])
def test_rows_are_tried_on_the_topology_of_the_run(
    topology: str, n: int, registry: dict[str, Any], row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the steps of a trial, a period of the topology may not be over."""
    try_row(registry, row, monkeypatch, topology, n)


@pytest.mark.long
@pytest.mark.parametrize(("local_optimizer", "local_steps"), [("adamw", 41), ("muon", 1)])
def test_a_learning_rule_of_a_script_has_any_local_optimizer_and_many_local_steps(
    local_optimizer: str, local_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEARNING, "mine", Rule)
    keys = {"local_optimizer": local_optimizer, "local_steps": local_steps}
    c = settings(optimizer="dpsgd", learning="mine", **keys)
    assert local_steps == 1 or local_steps > trials.MOST
    check_method(c, Network(make("ring", 4), ALONE))
    monkeypatch.setitem(LEARNING, "mine", LeaksAtTheEndOfARound)
    with pytest.raises(ValueError, match=LEAK):
        check_method(c, Network(make("ring", 4), ALONE))


def test_a_learning_rule_works_over_messages_that_a_process_decodes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LEARNING, "mine", Rule)
    c = settings(optimizer="all-reduce", optimizer_bits=4, learning="mine")
    check_method(c, Network(make("ring", 4), ALONE))


def test_a_learning_rule_is_tried_before_exchanges_by_edges_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LEARNING, "mine", Copies)
    scenario = {"seconds_per_step": 0.1}
    c = settings(optimizer="dpsgd", learning="mine", gossip="asynchronous", scenario=scenario)
    assert c.by_edges
    with pytest.raises(ValueError, match="does not use the messages"):
        check_method(c, Network(make("ring", 4), ALONE))


@pytest.mark.parametrize("name", [*AVERAGING, *AGGREGATIONS, *LEARNING])
def test_methods_of_the_library_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"optimizer": name}
    topology = "ring"
    if name in LEARNING:
        optimizer = "dpsgd" if Kind.ANTISYMMETRIC in LEARNING[name].kinds else "choco"
        steps = 4 if "local_steps" in learning.options(name) else 1
        keys = {"optimizer": optimizer, "learning": name, "local_steps": steps}
        topology = "chain"
    c = settings(topology=topology, **keys)
    monkeypatch.setattr(options, "are_of_library", lambda *rows: not any(rows))
    check_method(c, Network(make(topology, 4), ALONE))
