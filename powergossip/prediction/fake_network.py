"""One worker of n, alone: its messages reach nobody, and it receives noise.

An algorithm sends the same messages here as among n processes, so that its bits can be counted
exactly, and the CPU time of its steps measured without a network, for any n.
"""

import time

import numpy as np
import torch
from torch import Tensor

from powergossip.network.processes import Channel, Pieces, Processes, Requests


class FakeProcesses(Processes):
    """Process 0 of `size`. The others do not exist."""

    transport = "none"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.noise = Noise()

    def gather_arrays(self, array: np.ndarray) -> np.ndarray:
        """The own array in place of all others."""
        return np.repeat(array[None], self.size, axis=0)

    def channel(self, device: torch.device, direct: bool | None = None) -> Channel:
        return self.noise


class Noise:
    """A channel from which all floating-point numbers arrive as N(0, 1), and other types as 0.

    Attributes:
        seconds: CPU time spent on the noise so far.
    """

    name, direct, stream_ordered = "none", True, False

    def __init__(self) -> None:
        self.seconds = 0.0
        self._values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))

    def requests(self, incoming: Pieces, outgoing: Pieces, tag: int = 0) -> Requests:
        return _Arrival(self, [tensor for _, tensor in incoming])

    def fill(self, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            tensor.zero_()
            return
        for part in tensor.view(-1).split(len(self._values)):
            part.copy_(self._values[: len(part)])


class _Arrival:
    """Requests that are complete at once."""

    def __init__(self, channel: Noise, tensors: list[Tensor]):
        self._channel, self._tensors = channel, tensors

    def start(self) -> None:
        began = time.process_time()
        for tensor in self._tensors:
            self._channel.fill(tensor)
        self._channel.seconds += time.process_time() - began

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass
