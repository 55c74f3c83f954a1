"""The interfaces of averaging algorithms and of compressed gradients, and helpers of several. See
algorithms/__init__.py."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from powergossip import checks
from powergossip.network import Conversation, Network
from powergossip.parameters import Layout
from powergossip.state_trees import Stateful

Rate = float | Tensor  # one value, or one for each hosted worker: [worker]


class Kind(Enum):
    """Properties of an averaging rule that learning rules rely on. Each accepts some kinds.

    Attributes:
        ANTISYMMETRIC: x_i changes by Σ_j u_ij with u_ij = −u_ji, computed from the same bits.
        LINEAR: x_i changes by Σ_j w_ij (x_j − x_i), with a doubly stochastic W that is not
            symmetric.
        UNBIASED_COPIES: x_i changes by Σ_j γ w_ij (x̂_j − x̂_i), with public copies that follow x by
            an unbiased compressor.
        BIASED_COPIES: The same with a biased compressor.
        WEIGHTED: x_i changes by a column-stochastic matrix and weights, see Weighted.
        OTHER: Everything else.
    """

    ANTISYMMETRIC = "antisymmetric exchanges"
    LINEAR = "uncompressed gossip on a directed graph"
    UNBIASED_COPIES = "public copies with an unbiased compressor"
    BIASED_COPIES = "public copies with a biased compressor"
    WEIGHTED = "weights"
    OTHER = "other"


class Averaging(Stateful, Protocol):
    """Moves the workers' x towards their mean. Its state is without x."""

    def step(self, x: Tensor) -> Conversation:
        """One step, in place on x [worker, D].

        Buffers and views are kept for the memory of x: pass the same tensor in every step.
        """
        ...


class Saved:
    """An object whose state is in its attributes.

    Attributes:
        saved: Entry of the state → attribute: a tensor [worker, ...], a number or list, an object
            with its own state, or None, which is left out.
        saved_layout: Layout of tensors that may be divided over processes.
    """

    saved: ClassVar[Mapping[str, str]] = {}
    saved_layout: "Layout | None" = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides its arguments."""
        values = {name: getattr(self, own) for name, own in self.saved.items()}
        return {name: self._as_saved(v) for name, v in values.items() if v is not None}

    def _as_saved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            copy = value.clone()
            return copy if self.saved_layout is None else self.saved_layout.saved(copy)
        return value.state_dict() if hasattr(value, "state_dict") else value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        for name, attribute in self.saved.items():
            own, found = getattr(self, attribute), state.get(name)
            if hasattr(own, "load_state_dict"):
                own.load_state_dict(found or {})  # an empty one may be left out
            elif own is not None and not isinstance(own, Tensor):
                setattr(self, attribute, state[name])
            elif own is not None and self.saved_layout is not None:
                self.saved_layout.load(own, found)
            else:
                shape, given = (None if t is None else list(t.shape) for t in (own, found))
                if shape != given:
                    raise ValueError(
                        f"the state has {name} of shape {given} [worker, ...], not {shape}; use "
                        "the same model and options"
                    )
                if own is not None:
                    own.copy_(state[name])


class Aggregation(Saved):
    """Approximates the mean gradient. The residual of each worker is part of the next step.

    Gradients are without weight decay, which is added to the mean. Derive your own class from this
    one: then `step` suffices if it has no state.

    Attributes:
        owns_momentum: True if it applies momentum itself, and the local optimizer has none.
        momentum, nesterov: That momentum, as in torch.optim.SGD. The weight decay has the same
            momentum, in a buffer of the learning rule.
        clips: True if it clips gradients itself.
    """

    owns_momentum = nesterov = clips = False
    momentum = 0.0

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Reduce gradient [worker, D] to its residual, and fill mean [worker, D], equal in all."""
        raise NotImplementedError

    def at_epoch(self, epoch: float) -> None:
        """Follow schedules. Called before each step with the fractional epoch."""

    def at_learning_rate(self, *rates: float) -> None:
        """Set the learning rate of the next step: one for all tensors, or one for each, in the
        order of layout.shapes."""


@runtime_checkable
class Incremental(Averaging, Protocol):
    """An averaging rule x ← x + Δ(x) that computes Δ by itself, with errors relative to Δ.

    Sums of Δ over many steps then have rounding errors of Δ, not of x.
    """

    kind: Kind

    def increment(self, x: Tensor, out: Tensor) -> Conversation:
        """out ← Δ(x), both [worker, D]. x stays as it is. Takes the place of a step."""
        ...


def kind_of(averaging: Averaging) -> Kind:
    """The kind of an averaging rule: OTHER unless it has another one."""
    if isinstance(averaging, Weighted):
        return Kind.WEIGHTED
    kind = getattr(averaging, "kind", None)
    return kind if isinstance(kind, Kind) else Kind.OTHER


@runtime_checkable
class Copies(Protocol):
    """Averaging with public copies of the workers' x, or learning over it."""

    def begin_at(self, point: Tensor) -> None:
        """Begin with copies equal to point [D], which is near all x, in place of 0."""
        ...


def begin_at(averaging: Averaging, point: Tensor) -> None:
    """Begin with public copies equal to point [D], if the rule has copies."""
    if isinstance(averaging, Copies):
        averaging.begin_at(point)


@runtime_checkable
class Weighted(Protocol):
    """An averaging algorithm of x̂_i = w_i x_i. The weights w_i are state."""

    def scale(self, u: Tensor) -> None:
        """u_i ← u_i / w_i, in place on a local update u [worker, D]: x̂_i then moves by u_i."""
        ...


class Stateless:
    """An algorithm without memory: the next step depends on x only."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {sorted(state)}")


def column(network: Network, name: str, value: Rate | str, instead_of_auto: str = "") -> Tensor:
    """One value, or one for each hosted worker, as [worker, 1].

    Raises BadValue unless it is a number above 0. For a string such as "auto" the text ends with
    `instead_of_auto`.
    """
    if isinstance(value, str):
        raise checks.BadValue(name, value, f"a number above 0{instead_of_auto}")
    values = torch.as_tensor(value, dtype=network.dtype).reshape(-1, 1)
    for element in values.flatten().tolist():
        checks.check(name, f"{element:g}", 0 < element < float("inf"), "a number above 0")
    return values.to(network.device).expand(network.rows, 1)
