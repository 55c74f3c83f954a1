"""Lost messages of rules without exchanges by edges: push-sum, RelaySGD."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip.network.conversation import Conversation, Message, ToEach, mapped
from powergossip.network.edges import Edges

Lost = Callable[[int, int, int], bool]  # (source, destination, step)


class Losses:
    """Loses messages of conversations, in one process that hosts all workers.

    Args:
        lost: Function of source, destination and step that returns whether a message is lost.
        repeat: If True, the last message received replaces a lost one. Otherwise it becomes 0.
    """

    def __init__(self, lost: Lost, repeat: bool = False):
        self._lost, self._repeat = lost, repeat
        self._last: dict[str, Tensor] = {}  # index of the message → [worker, neighbor, ...]

    def __call__(self, conversation: Conversation, edges: Edges, step: int) -> Conversation:
        """The same conversation with losses, on the edges of this step."""
        index = itertools.count()

        def lossy(messages: tuple[Message, ...], answers: tuple[Any, ...]) -> tuple[Any, ...]:
            own = ((isinstance(m, ToEach) and m.edges) or edges for m in messages)
            pairs = zip(own, answers, strict=True)
            return tuple(self._kept(used, step, answer, str(next(index))) for used, answer in pairs)

        return mapped(conversation, lossy)

    def _kept(self, edges: Edges, step: int, tensor: Tensor, index: str) -> Tensor:
        sources = edges.neighbors
        gone = torch.zeros(sources.shape, dtype=torch.bool, device=tensor.device)
        for worker, slot in np.argwhere(sources >= 0).tolist():
            gone[worker, slot] = self._lost(int(sources[worker, slot]), worker, step)
        before = self._last.get(index)
        other = torch.zeros_like(tensor) if before is None else before
        kept = torch.where(gone.view(*gone.shape, *[1] * (tensor.ndim - 2)), other, tensor)
        if self._repeat:
            self._last[index] = kept.clone()
        return kept

    def state_dict(self) -> dict[str, Tensor]:
        """The last messages received [worker, neighbor, ...], with `repeat`."""
        return dict(self._last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._last = dict(state)
