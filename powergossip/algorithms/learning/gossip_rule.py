"""The base of learning rules that exchange messages with neighbors once a step."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Averaging, Incremental, Kind, begin_at
from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.algorithms.learning.interface import Correction
from powergossip.network import Conversation, Exchange, Network
from powergossip.parameters import Layout, Parameters
from powergossip.topologies import Topology

# An averaging rule for variables of this layout, or exchanges of messages that may be late.
MakeAveraging = Callable[[Layout], Any]

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


class Buffers(NamedTuple):
    """Parameters of a learning rule, [worker, D], without weight decay."""

    x: Tensor
    grad: Tensor
    layout: Layout

    def decay_spans(self) -> list[slice]:
        return []


class Workers(NamedTuple):
    """The workers of this process: models, local optimizers, and the averaging rule.

    Attributes:
        make: Function that makes the averaging rule G for a layout: the layout of x, or of x beside
            a variable.
        parameters: Parameters of the workers' models: x and the gradients.
        local: Optimizer of the workers, without momentum for rules with `direct`.
        weight_decay: Weight decay of the gradients, see Correction.
        clip: Largest norm of a worker's gradient.
    """

    network: Network
    make: MakeAveraging
    parameters: Parameters | Buffers
    local: Local
    weight_decay: float = 0.0
    clip: float | None = None

    def norms(self, of: Tensor) -> Tensor:
        """Norms [worker, 1] of variables [worker, D], at least the smallest positive number."""
        return self.parameters.layout.norms(of).clamp_(min=torch.finfo(of.dtype).tiny)


class Variable(Enum):
    """Treatment of a variable of a learning rule when the number of workers changes.

    Attributes:
        RESET: It begins as at the start of a run.
        KEPT: A worker keeps it.
        CONSERVED: Updates still to come, whose mean over the workers stays the same.
        IN_STEP: It is used within a step only. A worker that is saved between two messages of a
            step keeps it. Tensors may be without elements between steps.
    """

    RESET = "reset"
    KEPT = "kept"
    CONSERVED = "conserved"
    IN_STEP = "in step"


class GossipRule:
    """A learning rule over an averaging rule G. A step calls these methods in this order::

        begin()             the step begins
        correct(g)          g ← the corrected gradient, before clipping
        direct(g)           g ← the direction of the local optimizer
        update(u)           x ← x + u: the local optimizer's displacement u, −η g for SGD
        settle()            the step ends

    In steps where the rule is `exchanging`, messages average the variables `mixed()`. If the rule
    is `overlapping`, they are in flight between `begin` and `correct`, otherwise between `update`
    and `settle`. The methods of this class are D-PSGD's. A tensor of a rule is [worker, D].

    There are three drivers. `start` and `finish` serve the flat buffers of the hosted workers,
    GossipOptimizer a torch optimizer, and `events.worker` messages that may be late. In the last
    one, exchanges belong to single edges, and `add` applies the increment of one, at any time.

    Attributes:
        kinds: Kinds of averaging rules that it works with.
        optimizers: Local optimizers that it works with, without momentum if it has `direct`.
        overlaps: Kinds of averaging rules whose messages are in flight during the gradient by
            default. If the constructor has an option `overlapping`, users choose.
        static: True if the topology must be static.
        stateless: True if it keeps no tensors: D-PSGD.
        in_place: True if the local optimizer updates x itself, with its own rounding. Then `update`
            receives None.
        reads_rate: True if it depends on the learning rate of the local optimizer.
        relays: True if it relays along the trees of the topology, in place of averaging.
        one_way: True if its messages are not exchanges. Then they cannot be late.
        undamped: True if its tracked gradients turn the complex eigenvalues of a directed graph
            into growth, where the learning rate times the curvature is large beside γ times an
            eigenvalue.
        variants: Rules of the same name for other local optimizers.
        state: Name → treatment of each variable, a tensor [worker, D] or a number. Its attribute
            has an underscore before the name.
        layout: Layout of the variables in a message.
        overlapping: True if messages are in flight during the gradient.
        turns: Number of times that messages in flight are received, and answered, before the
            gradient is used. The remaining messages are in flight during the next step. None: all
            messages are received.
    """

    kinds: ClassVar[frozenset[Kind]] = MEAN_PRESERVING
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adamw", "muon")
    overlaps: ClassVar[frozenset[Kind]] = frozenset()
    static = stateless = reads_rate = relays = one_way = undamped = False
    variants: ClassVar[tuple[type["GossipRule"], ...]] = ()
    state: ClassVar[Mapping[str, Variable]] = {}

    in_place = overlapping = False
    turns: int | None = None

    def __init__(self, workers: Workers, *, variables: int = 1):
        """variables: number of averaged variables, with x. 0: the rule does its own averaging."""
        if hasattr(self, "step"):
            raise ValueError(
                f"{type(self).__name__}.step: use the methods of GossipRule, such as update, in "
                "place of a generator"
            )
        own, given = f"{type(self).__name__}.state", self.state
        known = isinstance(given, Mapping) and all(isinstance(v, Variable) for v in given.values())
        checks.check(own, given, known, "a mapping from names to Variable")
        if callable(type(self).exchanging):
            raise ValueError(
                f"{type(self).__name__}.exchanging: use a property; a method is true in every step"
            )
        self._network, self._make, self._local = workers.network, workers.make, workers.local
        parameters = workers.parameters
        self._x, self._g, self._layout = parameters.x, parameters.grad, parameters.layout
        self._clip = Correction(parameters, workers.weight_decay, workers.clip)
        self._joint = Joint(self._layout, self._x, max(1, variables))
        self.layout = self._joint.layout
        if variables:
            self._averaging = self._make(self.layout)
        self._increment: Tensor | None = None
        self._exchange: Exchange | None = None  # in flight

    @property
    def x(self) -> Tensor:
        """The models [worker, D]."""
        return self._x

    @property
    def codes(self) -> list[DifferenceCode]:
        """The codes of messages of few bits."""
        of_rounds = getattr(getattr(self, "_averaging", None), "codes", ())
        return [code for codes in of_rounds for code in codes]

    @classmethod
    def directs(cls) -> bool:
        """True if it has its own direction, so that the local optimizer has no momentum."""
        return cls.direct is not GossipRule.direct

    @classmethod
    def corrects(cls) -> bool:
        """True if it corrects the gradient before it is clipped."""
        return cls.correct is not GossipRule.correct

    @classmethod
    def limits_rate(cls) -> bool:
        """True if it is stable up to a diffusion rate that depends on the topology."""
        own: Any = cls.largest_rate
        base: Any = GossipRule.largest_rate
        return own.__func__ is not base.__func__

    @classmethod
    def largest_rate(cls, topology: Topology, options: Mapping[str, Any]) -> float:
        """The diffusion rate from which it is unstable with these options."""
        return math.inf

    # --- A step ---

    @property
    def exchanging(self) -> bool:
        """True if messages are sent in this step."""
        return True

    def begin(self) -> None:
        """Begin a step."""

    def correct(self, g: Tensor) -> None:
        """Correct the gradient [worker, D] before it is clipped, in place."""

    def direct(self, g: Tensor) -> None:
        """g [worker, D] ← the direction of the local optimizer, in place.

        Not called in a step whose gradients overflowed.
        """

    def update(self, u: Tensor | None) -> None:
        """Change x by the displacement u [worker, D] of the local optimizer.

        Args:
            u: 0 in a step whose gradients overflowed. None for a rule with `in_place`.
        """
        if u is not None:
            self._x.add_(u)

    def mixed(self) -> tuple[Tensor, ...]:
        """The variables [worker, D] that messages average, x or another one first.

        They are the rule's own tensors, which averaging changes, unless the rule overrides `add`.
        """
        return (self._x,)

    def variables(self) -> Tensor:
        """The variables `mixed()` as one tensor [worker, D'], with D' elements, in this layout."""
        mixed = self.mixed()
        if len(mixed) != self._joint.count:
            raise ValueError(
                f"{type(self).__name__}.mixed returns {len(mixed)} variables; use "
                f"super().__init__(workers, variables={len(mixed)})"
            )
        return self._joint.load(*mixed)

    def add(self, u: Tensor, edge: int | None = None, agreed: bool = True) -> None:
        """Apply an increment [worker, D'] of `variables`.

        Args:
            u: Σ_j u_ij, or u_ij of one edge. It may be changed.
            edge: Neighbor j for u_ij. None for the sum over the edges.
            agreed: True if both messages have the present view of the worker. If not, variables
                whose sum over all workers is conserved, as in gradient tracking, stay the same.
        """
        x, *others = self.mixed()
        self._joint.add(u, x, *(others if agreed else [()] * len(others)))

    def settle(self) -> None:
        """End a step."""

    def forget(self, edge: int) -> None:
        """Forget the state of the edge with a neighbor, whose state at the other end is lost."""

    def restart(self) -> None:
        """Restart variables with a conserved sum: the worker has learned of a death or a join."""

    def mixing(self) -> Conversation:
        """Average the variables of all workers at once: by increments if it overrides `add`."""
        variables = self.variables()
        if type(self).add is not GossipRule.add:
            if self._increment is None:
                self._increment = torch.zeros_like(variables)
            assert isinstance(self._averaging, Incremental)
            yield from self._averaging.increment(variables, self._increment)
            self.add(self._increment)
            return
        yield from self._averaging.step(variables)
        self._joint.store(*self.mixed())

    def before(self) -> Conversation | None:
        """The messages in flight while gradients are computed, or None."""
        return self.mixing() if self.overlapping and self.exchanging else None

    def after(self) -> Conversation | None:
        """The messages after the local update, or None."""
        return self.mixing() if not self.overlapping and self.exchanging else None

    # --- All hosted workers ---

    def start(self) -> None:
        """Begin a step, and send the messages of `before`. g ← 0."""
        self.begin()
        if (messages := self.before()) is not None:
            self._exchange = self._network.start(messages)
        self._g.zero_()

    def finish(self) -> None:
        """Complete the step with the gradients in `parameters.grad`."""
        if not self.corrects():
            self.clip()
        if self.turns is None:
            self._receive()
        elif self._exchange is not None:
            self._exchange.take_turns(self.turns)
        if self.corrects():
            self.clip()
        self.move()
        if (messages := self.after()) is not None:
            self._network.run(messages)
        self.settle()

    def clip(self) -> None:
        """Correct the gradient and clip it, with weight decay. See Correction."""
        self.correct(self._g)
        self._clip()

    def move(self) -> None:
        """Make the local update with the clipped gradient."""
        self.direct(self._g)
        with self._network.measure("update"):
            u = None if self.in_place else self._local.displacement(self._g)
            if u is None:
                self._local.step(self._g)
        self.update(u)

    def _receive(self) -> None:
        """Finish the messages in flight."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None

    # --- State ---

    def begin_after(self, steps: int) -> None:
        """Begin when other workers have taken this many steps."""

    def begin_at(self, point: Tensor) -> None:
        """See `averaging.Copies`. Other variables than x begin at 0."""
        self._joint.begin_at(self._averaging, point)

    @property
    def kept(self) -> list[str]:
        """See interface.Learning."""
        return [name for name, kind in self.state.items() if kind is Variable.KEPT]

    @property
    def conserved(self) -> list[str]:
        """See interface.Learning."""
        return [name for name, kind in self.state.items() if kind is Variable.CONSERVED]

    def _variable(self, name: str) -> Any:
        if not hasattr(self, f"_{name}"):
            raise ValueError(
                f"{type(self).__name__}.state has {name!r}: use self._{name} for the variable"
            )
        return getattr(self, f"_{name}")

    def variables_dict(self, in_step: bool = True) -> dict[str, Any]:
        """The variables that have elements. in_step: include variables of kind IN_STEP."""
        return {
            name: self._layout.saved(value) if isinstance(value, Tensor) else value
            for name, kind in self.state.items()
            if (in_step or kind is not Variable.IN_STEP)
            and (not isinstance(value := self._variable(name), Tensor) or value.numel())
        }

    def load_variables(self, state: Mapping[str, Any]) -> None:
        """Restore the variables returned by `variables_dict()`."""
        for name, kind in self.state.items():
            own = self._variable(name)
            if kind is not Variable.IN_STEP and isinstance(own, Tensor):
                if own.numel():
                    self._layout.load(own, state[name])
            elif name in state:
                setattr(self, f"_{name}", deepcopy(state[name]))  # tensors are changed in place

    def state_dict(self) -> dict[str, Any]:
        """The variables with elements, and the state of the averaging rule. Between two steps."""
        self._receive()
        return self.variables_dict(False) | {"averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._receive()
        self.load_variables(state)
        self._averaging.load_state_dict(state.get("averaging", {}))  # an empty one may be left out


class Joint:
    """Variables [worker, D] in one buffer [worker, count · D], so that they share messages.

    Their tensors are in the order of `layout`, the layout of all shapes, which keeps matrices of
    one shape adjacent. A single variable is its own buffer.
    """

    def __init__(self, layout: Layout, like: Tensor, variables: int = 2):
        count, self.count = len(layout.shapes), variables
        self.layout = layout.select([*range(count)] * variables) if variables > 1 else layout
        self.buffer = like.new_zeros(len(like), self.layout.size if variables > 1 else 0)
        starts, joint = layout.starts, self.layout.starts
        sizes = [tensor.numel() for tensor in layout.tensors(like[0])]
        # [variable][piece]: its slices of the variable and of the buffer. Adjacent ones are merged.
        self._pieces = [
            _merged(zip(starts, joint[i * count : (i + 1) * count], sizes, strict=True))
            for i in range(variables)
        ]

    def load(self, *variables: Tensor) -> Tensor:
        """buffer ← the variables. Returns it."""
        if self.count == 1:
            return variables[0]
        for variable, pieces in zip(variables, self._pieces, strict=True):
            for own, here in pieces:
                self.buffer[:, here] = variable[:, own]
        return self.buffer

    def store(self, *variables: Tensor) -> None:
        """The variables ← buffer"""
        if self.count == 1:
            return
        for variable, pieces in zip(variables, self._pieces, strict=True):
            for own, here in pieces:
                variable[:, own] = self.buffer[:, here]

    def add(self, joint: Tensor, *variables: Tensor | Sequence[Tensor]) -> None:
        """The variables ← variables + joint, a tensor in the order of the buffer.

        A variable is given as a tensor, or as a sequence of tensors that change alike.
        """
        for variable, pieces in zip(variables, self._pieces, strict=True):
            for each in [variable] if isinstance(variable, Tensor) else variable:
                for own, here in pieces:
                    each[:, own].add_(joint[:, here])

    def split(self, joint: Tensor) -> list[Tensor]:
        """The variables [worker, D] of a tensor in the order of the buffer."""
        if self.count == 1:
            return [joint]
        like = joint[:, : joint.shape[1] // self.count]
        found = [torch.zeros_like(like) for _ in range(self.count)]
        self.add(joint, *found)
        return found

    def begin_at(self, averaging: Averaging, point: Tensor) -> None:
        """See `averaging.Copies`. Other variables than the first begin at 0, it at point [D]."""
        others = [torch.zeros_like(point)[None]] * (self.count - 1)
        begin_at(averaging, self.load(point[None], *others)[0])


def _merged(places: Any) -> list[tuple[slice, slice]]:
    merged: list[list[int]] = []
    for own, here, size in sorted(places):
        if merged and own - merged[-1][0] == here - merged[-1][1] == merged[-1][2]:
            merged[-1][2] += size
        else:
            merged.append([own, here, size])
    return [(slice(own, own + n), slice(here, here + n)) for own, here, n in merged]
