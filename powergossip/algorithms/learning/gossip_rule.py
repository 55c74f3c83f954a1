"""The base of learning rules that exchange messages with neighbors once a step."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Averaging, Kind, begin_at
from powergossip.algorithms.learning.rule import Correction
from powergossip.network import Conversation, Exchange, Network
from powergossip.parameters import Layout, Parameters

MakeAveraging = Callable[[Layout], Averaging]  # an averaging rule for variables of this layout

WITHOUT_COPIES = frozenset({Kind.ANTISYMMETRIC, Kind.LINEAR})
COPIES = frozenset({Kind.UNBIASED_COPIES, Kind.BIASED_COPIES})
MEAN_PRESERVING = WITHOUT_COPIES | COPIES
ANY = frozenset(Kind)


class Local(Protocol):
    """A worker's own optimizer."""

    @property
    def rate(self) -> float:
        """The learning rate η of the next step."""
        ...

    def displacement(self, direction: Tensor) -> Tensor:
        """u [worker, D]: the optimizer's step along this gradient [worker, D] is x ← x + u.

        The tensor is overwritten by the next call.
        """
        ...


class GossipRule:
    """A step: messages of the last step's variables, gradient, direction, local update, messages.

        during()         a conversation while gradients are computed
        direct(g)        g ← the direction of the local optimizer
        move(u)          change x by the optimizer's displacement u; a conversation
        settle()         after the last message

    A rule overrides those that it needs. `start` and `finish` call them, see rule.Learning.
    x, g and all variables of rules are [worker, D], and G is a step of the averaging rule.

    network       # of the workers
    make          # makes the averaging rule G for a layout: that of x, or of x beside a variable
    parameters    # of the hosted workers' models: x and the gradients
    local         # the workers' own optimizer, without momentum for rules with owns_momentum
    weight_decay, clip
                  # of the gradients, see Correction

    Attributes of a rule:

    kinds             # of averaging rules that it works with
    static            # whether the topology must be static
    owns_momentum     # whether it applies momentum itself, so that the local optimizer has none
    optimizers        # local optimizers that it works with
    overlaps          # whether messages can be in flight while gradients are computed
    always_overlaps   # whether they always are
    sequential        # kinds of averaging rules with which messages follow the local update by
                      # default, not in flight while gradients are computed
    reads_rate        # whether it depends on the learning rate of the local optimizer
    needs_norm        # whether it needs a norm over all parameters of a worker
    relays            # whether it relays along the trees of the topology, in place of averaging
    without           # options of the averaging rule that have no effect
    variables         # names of its state [worker, D]: attributes with an underscore before them
    kept, conserved   # entries of its state, see rule.Learning
    """

    kinds: ClassVar[frozenset[Kind]] = MEAN_PRESERVING
    static: ClassVar[bool] = False
    owns_momentum: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adamw")
    overlaps: ClassVar[bool] = False
    always_overlaps: ClassVar[bool] = False
    sequential: ClassVar[frozenset[Kind]] = frozenset()
    reads_rate: ClassVar[bool] = False
    needs_norm: ClassVar[bool] = False
    relays: ClassVar[bool] = False
    without: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()
    conserved: ClassVar[tuple[str, ...]] = ()

    _averaging: Averaging

    def __init__(
        self,
        network: Network,
        make: MakeAveraging,
        parameters: Parameters,
        local: Local,
        *,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ):
        self._network, self._make, self._local = network, make, local
        self._x, self._g, self._layout = parameters.x, parameters.grad, parameters.layout
        self._correct = Correction(parameters, weight_decay, clip)
        self._exchange: Exchange | None = None

    def start(self) -> None:
        """Send the messages that may be in flight during the gradient. g ← 0."""
        conversation = self.during()
        if conversation is not None:
            self._exchange = self._network.start(conversation)
        self._g.zero_()

    def finish(self) -> None:
        """Complete the step with the gradients in `parameters.grad`."""
        self._correct()
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None
        self.direct(self._g)
        conversation = self.move(self._local.displacement(self._g))
        if conversation is not None:
            self._network.run(conversation)
        self.settle()

    def during(self) -> Conversation | None:
        """A conversation while gradients are computed."""
        return None

    def direct(self, g: Tensor) -> None:
        """Replace the gradients g [worker, D] by the directions of the local optimizer."""

    def move(self, u: Tensor) -> Conversation | None:
        """Change x by the displacement u [worker, D], and mix."""
        raise NotImplementedError

    def settle(self) -> None:
        """Follow the last message of a step."""

    def begin_at(self, point: Tensor) -> None:
        """See `averaging.Copies`. Other variables than x begin at 0."""
        begin_at(self._averaging, point)

    def state_dict(self) -> dict[str, Any]:
        """The variables [worker, D], and the state of the averaging rule."""
        state = {name: getattr(self, f"_{name}") for name in self.variables}
        return state | {"averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        for name in self.variables:
            getattr(self, f"_{name}").copy_(state[name])
        self._averaging.load_state_dict(state["averaging"])


class Joint:
    """Two variables [worker, D] in one buffer [worker, 2 D], so that they share messages.

    The tensors of both are in the order of `layout`, that of the shapes of both, in which matrices
    of one shape are adjacent.
    """

    def __init__(self, layout: Layout, like: Tensor):
        count = len(layout.shapes)
        self.layout = Layout([*layout.shapes, *layout.shapes])
        self.buffer = torch.zeros(len(like), 2 * layout.size, dtype=like.dtype, device=like.device)
        starts, joint = layout.starts, self.layout.starts
        sizes = [tensor.numel() for tensor in layout.tensors(like[0])]
        # [variable][piece]: where it is in the variable and in the buffer, merged where adjacent.
        self._pieces = [
            _merged(zip(starts, joint[first : first + count], sizes, strict=True))
            for first in (0, count)
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
