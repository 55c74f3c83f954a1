"""What an averaging algorithm is, and what several of them need. See algorithms/__init__.py."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from powergossip.network import Conversation, Network, together
from powergossip.parameters import Layout

V = TypeVar("V")
Rate = float | Tensor  # a number, or one for each hosted worker [worker]


class Averaging(Protocol):
    """Moves the workers' x towards their mean."""

    def step(self, x: Tensor) -> Conversation:
        """One step, in place on x [worker, D]. Call it with the same tensor each time."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on besides x; tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        ...


class Stateless:
    """An algorithm whose next step depends on x only."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {sorted(state)}")


class Remember(Generic[V]):
    """make(tensor), made anew only when the tensor is another one (views cost time in a step)."""

    def __init__(self, make: Callable[[Tensor], V]):
        self._make = make
        self._tensor: Tensor | None = None
        self._made: V

    def __call__(self, tensor: Tensor) -> V:
        if tensor is not self._tensor:
            self._tensor, self._made = tensor, self._make(tensor)
        return self._made


def column(network: Network, name: str, value: Rate) -> Tensor:
    """A number, or one for each worker hosted here, as [worker, 1]. ValueError unless above 0."""
    values = torch.as_tensor(value, dtype=torch.float32, device=network.device).reshape(-1, 1)
    for number in values.flatten().tolist():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name}={number:g}: use a number above 0")
    return values.expand(network.rows, 1)


class MatricesOnly:
    """One averaging algorithm for tensors of two or more dimensions, another for the rest."""

    def __init__(self, layout: Layout, matrices: Averaging, rest: Averaging):
        size = layout.matrices_size
        self._matrices, self._rest = matrices, rest
        self._parts = Remember(lambda x: (x[:, :size], x[:, size:]))

    def step(self, x: Tensor) -> Conversation:
        """Both at the same time."""
        matrices, rest = self._parts(x)
        steps = []
        if matrices.shape[1]:
            steps.append(self._matrices.step(matrices))
        if rest.shape[1]:
            steps.append(self._rest.step(rest))
        yield from together(*steps)

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self._matrices.state_dict(), "rest": self._rest.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._matrices.load_state_dict(state["matrices"])
        self._rest.load_state_dict(state["rest"])
