"""The connection of the processes of a run, and staging of messages through host memory."""

from functools import cached_property

import torch
from torch import Tensor

from powergossip.network.processes import Channel, Processes


class Connection:
    """The processes, and how their messages access the memory of a device.

    Args:
        stage: True if messages between processes are staged through (pinned) host memory. None:
            where tensors are on a GPU and the channel does not accept GPU memory.
    """

    def __init__(
        self,
        processes: Processes,
        device: torch.device,
        stage: bool | None = None,
        channel: Channel | None = None,
    ):
        self.processes, self.device = processes, device
        self._stage, self._given = stage, channel

    @cached_property
    def channel(self) -> Channel | None:
        """The channel between the processes, or None for one process. All ask for it first."""
        if self._given is not None or self.processes.size == 1:
            return self._given
        return self.processes.channel(self.device, None if self._stage is None else not self._stage)

    @cached_property
    def stage(self) -> bool:
        """True if messages between processes pass through host memory."""
        if self._stage is not None:
            return self._stage
        if self.device.type != "cuda":
            return False
        if self.processes.can_be_lost:  # they have no channel, but copy messages themselves
            return True
        return self.channel is not None and not self.channel.direct

    @cached_property
    def stream_ordered(self) -> bool:
        """True if the current stream orders messages with kernels."""
        return self.channel is not None and self.channel.stream_ordered

    def shared(self, tensor: Tensor) -> Tensor:
        """The memory that messages access: that of a tensor, or new memory of the host for it."""
        if not self.stage:
            return tensor
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def wait_for_kernels(self) -> None:
        """Wait for the kernels that use the memory of messages, unless a stream orders both."""
        if self.device.type == "cuda" and not self.stream_ordered:
            torch.cuda.current_stream().synchronize()
