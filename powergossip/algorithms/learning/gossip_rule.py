"""The base of learning rules that exchange messages with neighbors once a step."""

from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Averaging, Kind, begin_at
from powergossip.algorithms.learning.interface import (
    Correction,
    Gradient,
    Mix,
    Request,
    RuleStep,
    Update,
    resumed,
)
from powergossip.network import Exchange, Network
from powergossip.parameters import Layout, Parameters
from powergossip.topologies import Topology

MakeAveraging = Callable[[Layout], Averaging]  # an averaging rule for variables of this layout

WITHOUT_COPIES = frozenset({Kind.ANTISYMMETRIC, Kind.LINEAR})
COPIES = frozenset({Kind.UNBIASED_COPIES, Kind.BIASED_COPIES})
MEAN_PRESERVING = WITHOUT_COPIES | COPIES
ANY = frozenset(Kind) - {Kind.WEIGHTED}


class Local(Protocol):
    """A worker's own optimizer."""

    @property
    def rate(self) -> float:
        """The learning rate η of the next step."""
        ...

    def step(self, gradient: Tensor) -> None:
        """Update x in place with a gradient [worker, D]. A rule uses this or `displacement`."""
        ...

    def displacement(self, direction: Tensor) -> Tensor:
        """u [worker, D]: the optimizer's step along this gradient [worker, D] is x ← x + u.

        The tensor is overwritten by the next call.
        """
        ...


class Workers(NamedTuple):
    """The workers of this process, and what a learning rule has of each.

    Attributes:
        make: Function that makes the averaging rule G for a layout: that of x, or of x beside a
            variable.
        parameters: Parameters of the workers' models: x and the gradients.
        local: Optimizer of the workers, without momentum for rules with owns_momentum.
        weight_decay: Weight decay of the gradients, see Correction.
        clip: Largest norm of a worker's gradient.
    """

    network: Network
    make: MakeAveraging
    parameters: Parameters
    local: Local
    weight_decay: float = 0.0
    clip: float | None = None


class GossipRule:
    """A learning rule whose step is a generator of requests, see rule.Gradient, Update and Mix::

        def step(self):
            g = yield Gradient()           the gradients [worker, D]
            u = yield Update(g)            the local optimizer's displacement, −η g for SGD
            x.add_(u)
            yield Mix(G.step(x))           x ← G(x), a step of the averaging rule

    A driver answers the requests: `start` and `finish` for the flat buffers of the hosted workers,
    optimizers.rules for a torch optimizer. x and all variables of rules are [worker, D].

    Attributes:
        kinds: Kinds of averaging rules that it works with.
        static: Whether the topology must be static.
        owns_momentum: Whether it changes g, such as by a momentum that the local optimizer then
            does not have.
        half_precision: Whether a torch optimizer's parameters may be in half precision.
        keeps_slow: Whether x has a momentum or state that also acts with a single worker.
        clips: Whether its step clips the gradient and adds the weight decay, by `_correct`.
        in_place: Whether the local optimizer makes its step on x, with its own rounding.
        rescales: Whether it changes x by the local optimizer's step, see averaging.Weighted.
        optimizers: Local optimizers that it works with.
        overlaps: Whether messages can be in flight while gradients are computed.
        always_overlaps: Whether they always are.
        overlaps_mean: Whether `overlapping` is accepted over all-reduce, which follows the update.
        sequential: Kinds of averaging rules with which messages follow the local update by default,
            not in flight while gradients are computed.
        reads_rate: Whether it depends on the learning rate of the local optimizer.
        needs_norm: Whether it needs a norm over all parameters of a worker.
        for_different_data: Whether it is for workers with different data.
        relays: Whether it relays along the trees of the topology, in place of averaging.
        limits_rate: Whether it is stable up to a diffusion rate that depends on the topology.
        without: Options of the averaging rule that have no effect.
        resumes_with: Options that may be others than those of a saved state.
        variables: Names of its state, tensors [worker, D] and numbers: attributes with an
            underscore before them.
        kept, conserved: Entries of its state, see rule.Learning.
    """

    kinds: ClassVar[frozenset[Kind]] = MEAN_PRESERVING
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adamw", "muon")
    static = owns_momentum = in_place = rescales = reads_rate = needs_norm = relays = False
    half_precision = keeps_slow = limits_rate = clips = False
    overlaps = always_overlaps = overlaps_mean = False
    for_different_data = True
    sequential: ClassVar[frozenset[Kind]] = frozenset()
    without: ClassVar[tuple[str, ...]] = ()
    resumes_with: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()
    conserved: ClassVar[tuple[str, ...]] = ()

    _averaging: Averaging

    def __init__(self, workers: Workers):
        for name in ("variables", "kept", "conserved"):
            value, own = getattr(type(self), name), f"{type(self).__name__}.{name}"
            checks.check(own, value, not isinstance(value, str), f"a tuple: ({value!r},)")
        self._network, self._make, self._local = workers.network, workers.make, workers.local
        parameters = workers.parameters
        self._x, self._g, self._layout = parameters.x, parameters.grad, parameters.layout
        self._correct = Correction(parameters, workers.weight_decay, workers.clip)
        self._step: RuleStep  # the present one
        self._exchange: Exchange | None = None  # in flight
        self._turns: int | None = None  # of these messages in the present step, see Gradient

    @classmethod
    def largest_rate(cls, topology: Topology, options: Mapping[str, Any]) -> float:
        """The diffusion rate from which it is unstable with these options, if it limits_rate."""
        raise NotImplementedError

    def step(self) -> RuleStep:
        """One step, in place on x. Requests the gradients once and the local update once."""
        raise NotImplementedError

    def begin(self) -> tuple[RuleStep, Gradient]:
        """A new step, and its request for the gradients. Raises ValueError if that is not first."""
        step = self.step()
        request = resumed(step) if isinstance(step, GeneratorType) else None
        if not isinstance(request, Gradient):
            raise self.unexpected(request, "g = yield Gradient() first")
        return step, request

    def unexpected(self, request: object, accepted: str) -> ValueError:
        """The error of a request that is not accepted here. None: the step has ended."""
        found = "yielded nothing" if request is None else f"yielded {type(request).__name__}"
        return ValueError(f"{type(self).__name__}.step {found}; use {accepted}")

    def start(self) -> None:
        """Send the messages that may be in flight during the gradient. g ← 0."""
        self._step, request = self.begin()
        if request.meanwhile is not None:
            self._exchange = self._network.start(request.meanwhile)
        self._turns = request.turns
        self._g.zero_()

    def finish(self) -> None:
        """Complete the step with the gradients in `parameters.grad`."""
        if not self.clips:
            self._correct()
        if self._turns is None:
            self._receive()
        elif self._exchange is not None:
            self._exchange.take_turns(self._turns)
        answer: Tensor | None = self._g
        while (request := resumed(self._step, answer)) is not None:
            answer = self._answer(request)

    def _receive(self) -> None:
        """Finish the messages in flight."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None

    def _answer(self, request: Request) -> Tensor | None:
        if isinstance(request, Mix):
            self._network.run(request.conversation)
            return None
        if not isinstance(request, Update):
            raise self.unexpected(request, "Update(g) or Mix(...) after the one Gradient()")
        with self._network.measure("update"):
            return self._updated(request.direction)

    def _updated(self, direction: Any) -> Tensor | None:
        """The local optimizer's displacement, or None if it has made its step on x."""
        try:
            if self.in_place:
                self._local.step(direction)
                return None
            return self._local.displacement(direction)
        except Exception as error:
            is_tensor = isinstance(direction, Tensor)
            if is_tensor and direction.shape == self._x.shape:
                raise
            found = f"a tensor {tuple(direction.shape)}" if is_tensor else type(direction).__name__
            raise ValueError(
                f"{type(self).__name__}.step yielded Update of {found}; use one of shape "
                f"{tuple(self._x.shape)}"
            ) from error

    def begin_after(self, steps: int) -> None:
        """Begin beside parts of the models that have taken this number of steps."""

    def begin_at(self, point: Tensor) -> None:
        """See `averaging.Copies`. Other variables than x begin at 0."""
        begin_at(self._averaging, point)

    def state_dict(self) -> dict[str, Any]:
        """The variables with elements, and the state of the averaging rule."""
        self._receive()
        values = ((name, getattr(self, f"_{name}")) for name in self.variables)
        state = {
            name: self._layout.saved(value) if isinstance(value, Tensor) else value
            for name, value in values
            if not isinstance(value, Tensor) or value.numel()
        }
        return state | {"averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._receive()
        for name in self.variables:
            own = getattr(self, f"_{name}")
            if isinstance(own, Tensor):
                if own.numel():
                    self._layout.load(own, state[name])
            else:
                setattr(self, f"_{name}", state[name])
        self._averaging.load_state_dict(state.get("averaging", {}))  # an empty one may be left out


class Joint:
    """Variables [worker, D] in one buffer [worker, count · D], so that they share messages.

    Their tensors are in the order of `layout`, that of the shapes of all, in which matrices of one
    shape are adjacent.
    """

    def __init__(self, layout: Layout, like: Tensor, variables: int = 2):
        count, self.count = len(layout.shapes), variables
        self.layout = layout.select([*range(count)] * variables)
        self.buffer = like.new_zeros(len(like), self.layout.size)
        starts, joint = layout.starts, self.layout.starts
        sizes = [tensor.numel() for tensor in layout.tensors(like[0])]
        # [variable][piece]: where it is in the variable and in the buffer, merged where adjacent.
        self._pieces = [
            _merged(zip(starts, joint[i * count : (i + 1) * count], sizes, strict=True))
            for i in range(variables)
        ]

    def load(self, *variables: Tensor) -> None:
        """buffer ← the variables"""
        for variable, pieces in zip(variables, self._pieces, strict=True):
            for own, here in pieces:
                self.buffer[:, here] = variable[:, own]

    def store(self, *variables: Tensor) -> None:
        """The variables ← buffer"""
        for variable, pieces in zip(variables, self._pieces, strict=True):
            for own, here in pieces:
                variable[:, own] = self.buffer[:, here]

    def add(self, joint: Tensor, *variables: Tensor) -> None:
        """The variables ← variables + joint, a tensor in the order of the buffer."""
        for variable, pieces in zip(variables, self._pieces, strict=True):
            for own, here in pieces:
                variable[:, own] += joint[:, here]


def _merged(places: Any) -> list[tuple[slice, slice]]:
    merged: list[list[int]] = []
    for own, here, size in sorted(places):
        if merged and own - merged[-1][0] == here - merged[-1][1] == merged[-1][2]:
            merged[-1][2] += size
        else:
            merged.append([own, here, size])
    return [(slice(own, own + n), slice(here, here + n)) for own, here, n in merged]
