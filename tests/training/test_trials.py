"""Trial steps of rows that a script has added: mistakes end a run before data are loaded."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import train
from powergossip import compressors, options
from powergossip.algorithms import AVERAGING, learning
from powergossip.algorithms.aggregation import AGGREGATIONS, Aggregation
from powergossip.algorithms.learning import LEARNING, GossipRule, Gradient, Kind, Mix, Update
from powergossip.compressors import COMPRESSORS
from powergossip.network import Gather, Mean, Network, Processes, ToAll
from powergossip.runs import configuration
from powergossip.topologies import make
from powergossip.training import trials
from powergossip.training.config import Settings
from powergossip.training.config_checks import checked
from powergossip.training.methods import check_method

ALONE = Processes()
RING = make("ring", 4)


def settings(**keys: Any) -> Settings:
    config = configuration.structured(train.Config)
    for key, value in ({"n_workers": 4} | keys).items():
        config[key] = value
    return checked(config, ALONE)


class InPlace:
    def __init__(self, network: Any, layout: Any) -> None:
        self.before: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def step(self, x: Tensor) -> Any:
        x.copy_((yield ToAll(x)).mean(1))


class Assigned(InPlace):
    def step(self, x: Tensor) -> Any:
        x = (yield ToAll(x)).mean(1)


class WithoutYield(InPlace):
    def step(self, x: Tensor) -> Any:
        x.mul_(0.5)


class WithoutEnd(InPlace):
    def step(self, x: Tensor) -> Any:
        while True:
            received = yield ToAll(x)
            x.lerp_(received.mean(1), 0.5)


class WithoutState:
    __init__, step = InPlace.__init__, InPlace.step


class WithoutLoad(InPlace):
    load_state_dict: Any = property()  # hasattr is false


class Random(InPlace):
    """Draws numbers of torch's generator, as a step of training does."""

    def step(self, x: Tensor) -> Any:
        x.lerp_((yield ToAll(x)).mean(1), float(torch.rand(())))


class RandomByItself(InPlace):
    """Draws numbers that no state can have."""

    def step(self, x: Tensor) -> Any:
        own = torch.Generator()
        own.seed()
        x.lerp_((yield ToAll(x)).mean(1), float(torch.rand((), generator=own)))


class Forgetful(InPlace):
    """x_i ← the mean of the neighbors' x + β (x_i − the last x_i)."""

    def step(self, x: Tensor) -> Any:
        momentum = 0 if self.before is None else x - self.before
        self.before = x.clone()
        x.copy_((yield ToAll(x)).mean(1) + 0.3 * momentum)


class Complete(Forgetful):
    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["before"]


class Differences(InPlace):
    """x_i ← x_i + 0.1 Σ_j (x_j − x_i), which is x_i without neighbors."""

    def step(self, x: Tensor) -> Any:
        x.add_(((yield ToAll(x)) - x[:, None]).sum(1), alpha=0.1)


class ForgetsNumber(InPlace):
    """Messages in every fifth step, and a state that changes in place."""

    number = 0

    def step(self, x: Tensor) -> Any:
        self.number += 1
        self.before = x.clone() if self.before is None else self.before.lerp_(x, 0.5)
        x.lerp_(self.before, 0.1)
        if self.number % 5 == 0:
            x.copy_((yield ToAll(x)).mean(1))

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["before"]


class Rarely(InPlace):
    """Messages in every 20th step only."""

    number = 0

    def step(self, x: Tensor) -> Any:
        self.number += 1
        if self.number % 20 == 0:
            x.copy_((yield ToAll(x)).mean(1))

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Silent(InPlace):
    def step(self, x: Tensor) -> Any:
        x.mul_(0.5)
        return
        yield


class ReadsNeighbors(InPlace):
    """Neighbors are rows of x in one process."""

    def step(self, x: Tensor) -> Any:
        yield ToAll(x[:, :1].clone())
        x.lerp_(x.roll(1, 0), 0.5)


class ReadsFromTheStart(ReadsNeighbors):
    """With a random number of its constructor."""

    def __init__(self, network: Any, layout: Any) -> None:
        self.weight = float(torch.rand(()))

    def step(self, x: Tensor) -> Any:
        yield from super().step(x.mul_(self.weight))


class ReadsWithoutMessages(InPlace):
    """Where all that it receives is zero."""

    def step(self, x: Tensor) -> Any:
        received = yield ToAll(x)
        x.lerp_(received.mean(1) if received.any() else x.roll(1, 0), 0.5)


class TopK(InPlace):
    """The 100 elements of the largest magnitude."""

    def step(self, x: Tensor) -> Any:
        index = x.abs().topk(100).indices
        received = yield ToAll(torch.zeros_like(x).scatter(1, index, x.gather(1, index)))
        x.add_(received.mean(1), alpha=0.1)


class AssignedMean(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean = yield Mean(gradient)  # noqa: F841


class FilledMean(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_((yield Mean(gradient)))
        gradient.zero_()


class PartlyOwn(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        torch.lerp(gradient, (yield Mean(gradient)), 0.5, out=mean)
        gradient.zero_()


class OwnOfTheLast(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_((yield Mean(gradient)))
        mean[-1] = gradient[-1]
        gradient.zero_()


class Scheduled(Aggregation):
    def at_epoch(self, epoch: float) -> None:
        self.epoch = epoch

    def at_learning_rate(self, *rates: float) -> None:
        self.rate = rates[0]

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_((yield Mean(gradient))).mul_(self.rate * (1 + self.epoch))
        gradient.zero_()


class Normalized(Aggregation):
    """It fails where all messages are zero."""

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_((yield Mean(gradient))).mul_(1 / float(mean.norm()))
        gradient.zero_()


class Gathered(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_(torch.stack((yield Gather(list(gradient)))).mean(0))
        gradient.zero_()


class ReadsRows(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        yield Gather(list(gradient[:, :1]))
        mean.copy_(gradient.mean(0).expand_as(mean))
        gradient.zero_()


class ReadsRowsAtRandom(ReadsRows):
    """With a random number of its constructor."""

    def __init__(self) -> None:
        self.weight = float(torch.rand(()))

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        yield from super().step(gradient.mul_(self.weight), mean)


class ReadsRowsOrFails(Aggregation):
    """It fails where all messages are zero."""

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        received = yield Mean(gradient)
        mean.copy_(gradient.mean(0).expand_as(mean)).mul_(1 / float(received.norm()))
        gradient.zero_()


class KeepsToItself(Aggregation):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean.copy_(gradient)
        gradient.zero_()
        return
        yield


class ReadsRowsLater(Aggregation):
    """In the last step of a trial."""

    number = 0

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        self.number += 1
        received = yield Mean(gradient)
        last = trials.STEPS + trials.MORE
        mean.copy_(received if self.number < last else gradient.mean(0).expand_as(mean))
        gradient.zero_()


class RarelyFilled(Aggregation):
    """The mean of the last 20 gradients, in every 20th step."""

    number = 0

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        self.number += 1
        if self.number % 20:
            mean.zero_()
        else:
            mean.copy_((yield Mean(gradient)))
            gradient.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


class ForgetsMomentum(FilledMean):
    momentum: Any = 0.0

    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        yield from super().step(gradient, mean)
        self.momentum = 0.9 * self.momentum + mean
        mean.copy_(self.momentum)


class AssignedOut(compressors.Identity):
    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        out = out.flatten(-2) + fields[0]


class OverwrittenOut(compressors.Identity):
    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        out.flatten(-2).copy_(fields[0])


class KeepsIndices(compressors.Identity):
    """Half of the elements. The receiver cannot know which ones."""

    def fields(self, rows: int, columns: int) -> Any:
        return (compressors.Field(torch.float32, rows * columns // 2),)

    def compress(self, v: Tensor, stream: Any) -> Any:
        self.__dict__["index"] = torch.randperm(v[0, 0].numel())[: v[0, 0].numel() // 2]
        return (v.flatten(-2)[..., self.__dict__["index"]],)

    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        index = self.__dict__.get("index", torch.arange(fields[0].shape[-1]))
        out.flatten(-2).index_add_(-1, index, fields[0])


class FailsElsewhere(KeepsIndices):
    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        out.flatten(-2).index_add_(-1, self.__dict__["index"], fields[0])


class FailsLater(KeepsIndices):
    """It keeps indices from its second message on."""

    def compress(self, v: Tensor, stream: Any) -> Any:
        half, first = v[0, 0].numel() // 2, "first" not in self.__dict__
        self.__dict__["first"] = False
        self.__dict__["index"] = torch.arange(half) + (0 if first else half)
        return (v.flatten(-2)[..., self.__dict__["index"]],)


class AtRandom(compressors.RandomK):
    """Positions of the stream, which differ between steps."""


class Indices(compressors.Identity):
    """Positions of the first elements, for which 8 bits are too few."""

    def __init__(self, dtype: torch.dtype = torch.int16) -> None:
        self.dtype = dtype

    def fields(self, rows: int, columns: int) -> Any:
        kept = rows * columns // 2
        return compressors.Field(self.dtype, kept), compressors.Field(torch.float32, kept)

    def compress(self, v: Tensor, stream: Any) -> Any:
        values, indices = v.flatten(-2).topk(v[0, 0].numel() // 2)
        return indices, values

    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        out.flatten(-2).scatter_add_(-1, fields[0].long(), fields[1])


class IndicesBehind(Indices):
    """The same from −512 on, behind values and an empty field. `later`: a shift in step 2."""

    def __init__(self, dtype: torch.dtype = torch.int16, later: int = 0) -> None:
        super().__init__(dtype)
        self.later, self.calls = later, 0

    def fields(self, rows: int, columns: int) -> Any:
        indices, values = super().fields(rows, columns)
        return values, compressors.Field(torch.int32, 0), indices

    def compress(self, v: Tensor, stream: Any) -> Any:
        indices, values = super().compress(v, stream)
        self.calls += 1
        shift = self.later if self.calls == 3 else 0
        return values, indices[..., :0], indices - 512 + shift

    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        super().decompress(((fields[2].long() + 512) % out[0, 0].numel(), fields[0]), out, stream)


class Ternary(compressors.Identity):
    """Signs of large elements, as levels."""

    def __init__(self, first: int = 0) -> None:
        self.first = first  # of the indices

    def fields(self, rows: int, columns: int) -> Any:
        return (compressors.Field(compressors.Levels(-1, 1, 3), rows * columns),)

    def compress(self, v: Tensor, stream: Any) -> Any:
        return ((v.flatten(-2).clamp(-1, 1).round() + 1 + self.first),)

    def decompress(self, fields: Any, out: Tensor, stream: Any) -> None:
        out.flatten(-2).add_(fields[0])


class Rule(GossipRule):
    """D-PSGD with an anchor, x_i at the start."""

    kinds = frozenset(Kind)
    variables: ClassVar[tuple[str, ...]] = ("anchor",)

    def __init__(self, workers: Any) -> None:
        super().__init__(workers)
        self._averaging = self._make(self._layout)
        self._anchor = self._x.clone()

    def step(self) -> Any:
        self._x.add_((yield Update((yield Gradient()))))
        yield Mix(self._averaging.step(self._x))
        self._x.lerp_(self._anchor.lerp_(self._x, 0.1), 0.1)


class AssignedX(Rule):
    def step(self) -> Any:
        self._x = self._x + (yield Update((yield Gradient())))
        yield Mix(self._averaging.step(self._x))


class AveragesThenAssigns(Rule):
    def step(self) -> Any:
        u = yield Update((yield Gradient(self._averaging.step(self._x))))
        self._x = self._x + u


class ReadsGradients(Rule):
    def step(self) -> Any:
        g = yield Gradient()
        self._x.add_((yield Update(g.mean(0).expand_as(g))))
        yield Mix(self._averaging.step(self._x))


class ReadsGradientsAtRandom(Rule):
    """With a random number of its constructor."""

    def __init__(self, workers: Any) -> None:
        super().__init__(workers)
        self._weight = float(torch.rand(()))

    def step(self) -> Any:
        g = yield Gradient()
        self._x.add_((yield Update(self._weight * g.mean(0).expand_as(g))))
        yield Mix(self._averaging.step(self._x))


class WithoutMix(Rule):
    def step(self) -> Any:
        self._x.add_((yield Update((yield Gradient()))))
        self._averaging.step(self._x)


class ForgetsAnchor(Rule):
    variables: ClassVar[tuple[str, ...]] = ()


class Seldom(Rule):
    """Messages in few steps only."""

    variables: ClassVar[tuple[str, ...]] = ("anchor", "steps")

    def __init__(self, workers: Any) -> None:
        super().__init__(workers)
        self._steps = 0

    def step(self) -> Any:
        self._x.add_((yield Update((yield Gradient()))))
        self._steps += 1
        if self._steps % 100 == 0:
            yield Mix(self._averaging.step(self._x))


@pytest.mark.parametrize(
    ("registry", "row", "sentence"),
    [
        (AVERAGING, InPlace, None),
        (AVERAGING, Complete, None),
        (AVERAGING, Random, None),
        (AVERAGING, RandomByItself, None),
        (AVERAGING, Rarely, None),
        (AVERAGING, TopK, None),
        (AVERAGING, ReadsNeighbors, "optimizer=mine: a worker learns of another one without"),
        (AVERAGING, ReadsFromTheStart, "optimizer=mine: a worker learns of another one without"),
        (AVERAGING, ReadsWithoutMessages, "optimizer=mine: a worker learns of another one"),
        (AVERAGING, Silent, "optimizer=mine sends no messages; a step yields them"),
        (AVERAGING, Assigned, "optimizer=mine does not change x; a step changes it in place"),
        (AVERAGING, WithoutYield, "a step returned NoneType; use a generator"),
        (
            AVERAGING,
            WithoutEnd,
            "a step has yielded 10000 messages; a step of averaging has to end",
        ),
        (AVERAGING, WithoutState, "optimizer=mine has no state_dict; checkpoints need it"),
        (AVERAGING, WithoutLoad, "optimizer=mine has no load_state_dict; checkpoints need it"),
        (AVERAGING, ForgetsNumber, "optimizer=mine goes on differently from a checkpoint"),
        (AVERAGING, Forgetful, "optimizer=mine goes on differently from a checkpoint"),
        (AGGREGATIONS, FilledMean, None),
        (AGGREGATIONS, PartlyOwn, "optimizer=mine fills mean with another one for each worker"),
        (AGGREGATIONS, OwnOfTheLast, "optimizer=mine fills mean with another one for each worker"),
        (AGGREGATIONS, KeepsToItself, "optimizer=mine sends no messages; a step yields them"),
        (AGGREGATIONS, RarelyFilled, None),
        (AGGREGATIONS, Scheduled, None),
        (AGGREGATIONS, Normalized, None),
        (AGGREGATIONS, Gathered, None),
        (AGGREGATIONS, AssignedMean, "optimizer=mine does not change mean"),
        (
            AGGREGATIONS,
            ReadsRows,
            "optimizer=mine: a worker learns of another one without a message",
        ),
        (
            AGGREGATIONS,
            ReadsRowsLater,
            "optimizer=mine: a worker learns of another one without a message",
        ),
        (AGGREGATIONS, ReadsRowsAtRandom, "optimizer=mine: a worker learns of another one"),
        (AGGREGATIONS, ReadsRowsOrFails, "optimizer=mine: a worker learns of another one"),
        (AGGREGATIONS, ForgetsMomentum, "optimizer=mine goes on differently from a checkpoint"),
        (COMPRESSORS, KeepsIndices, "compressor=mine decompresses the same fields differently in"),
        (COMPRESSORS, FailsElsewhere, "compressor=mine decompresses the same fields differently"),
        (COMPRESSORS, FailsLater, "compressor=mine decompresses the same fields differently in"),
        (COMPRESSORS, AtRandom, None),
        (COMPRESSORS, Indices, None),
        (COMPRESSORS, partial(Indices, dtype=torch.uint8), "for field 0, which holds 0 … 255;"),
        (COMPRESSORS, IndicesBehind, None),
        (
            COMPRESSORS,
            partial(IndicesBehind, dtype=torch.int8),
            "for field 2, which holds -128 … 127;",
        ),
        (
            COMPRESSORS,
            partial(IndicesBehind, later=2**15),
            "for field 2, which holds -32768 … 32767;",
        ),
        (
            COMPRESSORS,
            partial(IndicesBehind, dtype=torch.int32, later=-(2**31)),
            "for field 2, which holds -2147483648 … 2147483647;",
        ),
        (COMPRESSORS, Ternary, None),
        (
            COMPRESSORS,
            partial(Ternary, first=-1),
            "returned -1 … 1 for field 0, which holds 0 … 2;",
        ),
        (COMPRESSORS, OverwrittenOut, "compressor=mine assigns to out in decompress; add"),
        (COMPRESSORS, AssignedOut, "optimizer=choco with compressor=mine does not change x"),
        (LEARNING, Rule, None),
        (LEARNING, Seldom, None),
        (LEARNING, AssignedX, "learning=mine does not change x by gradients"),
        (LEARNING, AveragesThenAssigns, "learning=mine does not change x by gradients"),
        (LEARNING, ReadsGradients, "learning=mine: a worker learns of another one without"),
        (LEARNING, ReadsGradientsAtRandom, "learning=mine: a worker learns of another one"),
        (LEARNING, WithoutMix, r"learning=mine sends no messages; yield Mix\(...\)"),
        (LEARNING, ForgetsAnchor, "learning=mine goes on differently from a checkpoint"),
    ],
)
def test_rows_of_a_script_are_tried_before_data_are_loaded(
    registry: dict[str, Any], row: Any, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence) if sentence else nullcontext():
        try_row(registry, row, monkeypatch)


@pytest.mark.parametrize(
    ("registry", "row"), [(AVERAGING, Complete), (AVERAGING, Differences), (LEARNING, Rule)]
)
@pytest.mark.parametrize(("topology", "n"), [("one-peer-exponential", 4), ("ring", 1)])
def test_rows_are_tried_on_the_topology_of_the_run(
    topology: str, n: int, registry: dict[str, Any], row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the steps of a trial, a period of the topology may not be over."""
    try_row(registry, row, monkeypatch, topology, n)


@pytest.mark.parametrize(("n", "least"), [(2, 1), (3, 1), (16, 1), (63, 1), (64, 1), (65, 0.8)])
def test_of_two_workers_each_is_changed_without_the_other(n: int, least: float) -> None:
    sets = torch.stack(list(trials.halves(n)))
    apart = (sets[:, :, None] & ~sets[:, None]).any(0)  # [changed, not changed]
    assert apart.sum() >= least * n * (n - 1)


@pytest.mark.parametrize(("n", "distance"), [(16, 1), (16, 8), (64, 32), (65, 1), (128, 64)])
def test_neighbors_at_any_distance_are_known_by_messages_only(
    n: int, distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distant(InPlace):
        def step(self, x: Tensor) -> Any:
            yield ToAll(x[:, :1].clone())
            x.lerp_(x.roll(distance, 0), 0.5)

    with pytest.raises(ValueError, match="without a message"):
        try_row(AVERAGING, Distant, monkeypatch, "ring", n)


@pytest.mark.parametrize(
    ("registry", "row"), [(AVERAGING, Random), (AGGREGATIONS, FilledMean), (LEARNING, Rule)]
)
def test_a_trial_draws_none_of_the_random_numbers_of_the_run(
    registry: dict[str, Any], row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_rng_state()
    try_row(registry, row, monkeypatch)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_of_a_row_says_that_its_step_was_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(InPlace):
        def step(self, x: Tensor) -> Any:
            yield ToAll(x)
            raise KeyError("nothing")

    with pytest.raises(KeyError) as caught:
        try_row(AVERAGING, Mine, monkeypatch)
    assert "in a trial step, with a matrix 32 × 32" in caught.value.__notes__[0]


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


class WithoutGradient(Rule):
    def step(self) -> Any:
        yield Mix(self._averaging.step(self._x))


class WithoutRequests(Rule):
    def step(self) -> Any:
        self._x.mul_(0.5)


class TwoGradients(Rule):
    def step(self) -> Any:
        yield Gradient()
        self._x.add_((yield Update((yield Gradient()))))


class UpdateOfOne(Rule):
    def step(self) -> Any:
        self._x.add_((yield Update((yield Gradient())[0])))


class Name(Rule):
    variables: ClassVar[Any] = "anchor"


class Scalars(FilledMean):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean[:] = torch.stack((yield Gather(list(gradient[:, 0])))).mean()


class OnePiece(FilledMean):
    def step(self, gradient: Tensor, mean: Tensor) -> Any:
        mean[:] = torch.stack((yield Gather([gradient[0]]))).mean(0)


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


@pytest.mark.parametrize(
    ("registry", "row", "sentence"),
    [
        (
            LEARNING,
            WithoutGradient,
            r"WithoutGradient.step yielded Mix; use g = yield Gradient\(\)",
        ),
        (LEARNING, WithoutRequests, "WithoutRequests.step yielded nothing; use g = yield Gradient"),
        (LEARNING, TwoGradients, r"TwoGradients.step yielded Gradient; use Update\(g\) or Mix"),
        (LEARNING, UpdateOfOne, r"Update of a tensor \(1024,\); use one of shape \(4, 1024\)"),
        (LEARNING, Name, r"Name.variables=anchor: use a tuple: \('anchor',\)"),
        (AGGREGATIONS, Scalars, r"Gather of a piece of shape \(\): use one of shape \(length,\)"),
        (AGGREGATIONS, OnePiece, "Gather of 1 pieces: use one for each of the 4 workers"),
        (
            COMPRESSORS,
            NotFlat,
            r"NotFlat.compress returned shape \(4, 1, 32, 32\) for field 0; use",
        ),
        (COMPRESSORS, OneField, r"OneField.fields returned Field\(.*\); use a tuple of Fields"),
        (COMPRESSORS, TwoKinds, r"TwoKinds.fields returned Levels\(.*; use one kind of Levels"),
    ],
)
def test_a_wrong_row_of_a_script_is_named_in_one_sentence(
    registry: dict[str, Any], row: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=sentence):
        try_row(registry, row, monkeypatch)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"pull": 1, "sign": True, "kind": "a"}, None),
        ({"pull": "abc"}, "learning_options.pull='abc': use a number"),
        ({"pull": True}, "learning_options.pull=True: use a number"),
        ({"sign": 1}, "learning_options.sign=1: use true or false"),
        ({"kind": 1}, "learning_options.kind=1: use a string"),
        ({"several": "auto"}, None),
    ],
)
def test_options_of_a_learning_rule_of_a_script_have_types(
    options: dict[str, Any], accepted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(Rule):
        def __init__(
            self,
            workers: Any,
            *,
            pull: float = 0.5,
            sign: bool = False,
            kind: str = "",
            several: float | str = 1.0,
        ) -> None: ...

    del Mine.__init__.__annotations__["pull"]  # the type is that of the default
    monkeypatch.setitem(LEARNING, "mine", Mine)
    with pytest.raises(ValueError, match=accepted) if accepted else nullcontext():
        settings(optimizer="power-gossip", learning="mine", learning_options=options)


@pytest.mark.parametrize("local_optimizer", ["sgd", "adamw", "muon"])
def test_a_learning_rule_of_a_script_has_any_local_optimizer(
    local_optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEARNING, "mine", Rule)
    c = settings(optimizer="dpsgd", learning="mine", local_optimizer=local_optimizer)
    check_method(c, Network(RING, ALONE))


def test_a_learning_rule_of_a_script_may_have_many_local_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Rule):
        variables: ClassVar[tuple[str, ...]] = ("anchor", "steps")

        def __init__(self, workers: Any, *, local_steps: int = 1) -> None:
            super().__init__(workers)
            self._local_steps, self._steps = local_steps, 0

        def step(self) -> Any:
            self._x.add_((yield Update((yield Gradient()))))
            self._steps += 1
            if self._steps % self._local_steps == 0:
                yield Mix(self._averaging.step(self._x))

    monkeypatch.setitem(LEARNING, "mine", Mine)
    c = settings(optimizer="dpsgd", learning="mine", local_steps=trials.MOST + 1)
    check_method(c, Network(RING, ALONE))


@pytest.mark.parametrize("name", [*AVERAGING, *AGGREGATIONS])
def test_methods_of_the_library_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = settings(optimizer=name)
    monkeypatch.setattr(options, "is_of_library", lambda row: False)
    check_method(c, Network(RING, ALONE))


@pytest.mark.parametrize("name", LEARNING)
def test_learning_rules_of_the_library_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = "dpsgd" if Kind.ANTISYMMETRIC in LEARNING[name].kinds else "choco"
    steps = 4 if "local_steps" in learning.options(name) else 1
    c = settings(topology="chain", optimizer=optimizer, learning=name, local_steps=steps)
    monkeypatch.setattr(options, "is_of_library", lambda row: False)
    check_method(c, Network(make("chain", 4), ALONE))
