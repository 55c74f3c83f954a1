"""The connection of the processes of a run, for tensors on one device."""

from functools import cached_property

import torch

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

    @cached_property
    def waits_for_kernels(self) -> bool:
        """True if messages start only when the kernels that use their memory have ended."""
        return self.device.type == "cuda" and not self.stream_ordered
