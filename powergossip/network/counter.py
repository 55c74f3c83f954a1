"""Sums of the bits and messages that workers send.

The bits of one message are `Transport.bits`, in neighbor_transport.py and collectives.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class Counter:
    """Counts since the start of the run.

    Args:
        rows: Number of workers. With several copies of them, of workers of all copies.

    Attributes:
        bits, messages: Counts of each row, int64 [row].
    """

    def __init__(self, rows: int):
        self.bits = np.zeros(rows, dtype=np.int64)
        self.messages = np.zeros(rows, dtype=np.int64)

    def add(self, row: int | slice, bits: int | np.ndarray, messages: int | np.ndarray = 1) -> None:
        """Count messages of one worker, or with a slice the messages of each."""
        self.bits[row] += bits
        self.messages[row] += messages

    def state_dict(self) -> dict[str, Any]:
        """The counts, by worker."""
        return {
            "bits": torch.from_numpy(self.bits.copy()),
            "messages": torch.from_numpy(self.messages.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, on any device."""
        self.bits[:] = state["bits"].cpu().numpy()
        self.messages[:] = state["messages"].cpu().numpy()
