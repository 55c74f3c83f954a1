"""The interfaces of averaging algorithms and of compressed gradients, and helpers of several. See
algorithms/__init__.py."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from powergossip import checks
from powergossip.network import Conversation, Network

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


class Averaging(Protocol):
    """Moves the workers' x towards their mean."""

    def step(self, x: Tensor) -> Conversation:
        """One step, in place on x [worker, D].

        Buffers and views are kept for the memory of x: pass the same tensor in every step.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that the next step depends on besides x. Tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        ...


class Aggregation:
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

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the gradient: [worker, ...]."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""


@runtime_checkable
class Incremental(Averaging, Protocol):
    """An averaging rule x ← x + Δ(x) that computes Δ by itself, with errors relative to Δ.

    Sums of Δ over many steps then have rounding errors of Δ, not of x.
    """

    kind: Kind

    def increment(self, x: Tensor, out: Tensor) -> Conversation:
        """out ← Δ(x), both [worker, D]. x stays as it is. Takes the place of a step."""
        ...


def incremental(averaging: Averaging) -> Incremental:
    """The same rule, which must have increments."""
    assert isinstance(averaging, Incremental)
    return averaging


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
