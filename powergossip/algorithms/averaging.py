"""The interface of averaging algorithms, and helpers of several. See algorithms/__init__.py."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from powergossip import checks
from powergossip.network import Conversation, Network

Rate = float | Tensor  # one value, or one for each hosted worker: [worker]


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
    values = torch.as_tensor(value, dtype=torch.float32, device=network.device).reshape(-1, 1)
    for element in values.flatten().tolist():
        checks.check(name, f"{element:g}", 0 < element < float("inf"), "a number above 0")
    return values.expand(network.rows, 1)
