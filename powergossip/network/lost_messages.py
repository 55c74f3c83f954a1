"""Lost messages of rules without exchanges by edges: push-sum, RelaySGD."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip.network.edges import Edges
from powergossip.network.message_types import Conversation, ToEach

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
        received, index = None, 0
        while True:
            try:
                messages = conversation.send(received)
            except StopIteration:
                return
            answer = yield messages
            several = isinstance(messages, tuple)
            kept = []
            for message, tensor in zip(
                messages if several else (messages,), answer if several else (answer,), strict=True
            ):
                own = message.edges if isinstance(message, ToEach) else None
                kept.append(self._of(own or edges, step, tensor, str(index)))
                index += 1
            received = tuple(kept) if several else kept[0]

    def _of(self, edges: Edges, step: int, tensor: Tensor, index: str) -> Tensor:
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
