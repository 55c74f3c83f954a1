"""The workers of a run that are alive, for its evaluation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from powergossip.network import Network, Processes
from powergossip.parameters import Parameters


class AliveWorkers:
    """The models of the workers that are alive, and operations over them. No bits are counted.

    Axis worker: those that this process hosts and that are alive, ascending.

    Args:
        alive: Function that returns the workers of all processes that are alive, ascending. None:
            always all.
    """

    def __init__(
        self,
        network: Network,
        parameters: Parameters,
        alive: Callable[[], Sequence[int]] | None = None,
    ):
        self._network, self._parameters, self._alive = network, parameters, alive
        self.device, self.bits_to_all = network.device, network.bits_to_all
        self.names, self.layout = parameters.names, parameters.layout

    @property
    def processes(self) -> Processes:
        return self._network.processes

    @property
    def varies(self) -> bool:
        """True if workers can be lost, or join."""
        return self._alive is not None

    @property
    def alive(self) -> Sequence[int]:
        """The workers of all processes that are alive, after the last collective operation."""
        return range(self._network.n_workers) if self._alive is None else self._alive()

    @property
    def workers(self) -> Sequence[int]:
        """The workers that this process hosts."""
        alive = set(self.alive)
        return [worker for worker in self._network.workers if worker in alive]

    @property
    def models(self) -> list[nn.Module]:
        return [self._parameters.models[row] for row in self._rows]

    @property
    def x(self) -> Tensor:
        """[worker, D]"""
        return self.alive_rows(self._parameters.x)

    @property
    def buffers(self) -> Tensor:
        """[worker, element]"""
        return self.alive_rows(self._parameters.buffers)

    @property
    def _rows(self) -> list[int]:
        return [worker - self._network.workers.start for worker in self.workers]

    def alive_rows(self, tensor: Tensor) -> Tensor:
        """The rows of tensor [hosted worker, ...] that belong to workers alive."""
        rows = self._rows
        return tensor if len(rows) == len(tensor) else tensor[rows]

    def start_mean(self, tensor: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Start the mean of tensor [worker, ...] over the workers alive, to out [1, ...]. Returns a
        function that waits for it and returns out[0]. All processes call both in the same order."""
        if len(tensor) == self._network.hosted and not self.processes.can_be_lost:
            return self._network.start_mean(tensor, out)
        return lambda: out[0].copy_(self._mean(tensor))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of tensor [worker, ...] over the workers alive: [...]."""
        return self.start_mean(tensor, tensor.new_empty(1, *tensor.shape[1:]))()

    def _mean(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().double().sum(0).cpu().numpy()
        count = np.full(1, len(tensor))
        everyone = self.processes.gather_arrays(np.concatenate([total.ravel(), count]))
        mean = everyone[:, :-1].sum(0) / everyone[:, -1].sum()
        return torch.from_numpy(mean.reshape(total.shape)).to(tensor)

    def gather(self, values: Tensor) -> Tensor:
        """values [worker, ...] of all workers alive, by worker, in all processes."""
        if not self.varies:
            return self._network.gather(values)
        own = self.workers, values.detach().cpu().numpy()
        workers, arrays = zip(*self.processes.gather(own), strict=True)
        order = np.argsort(np.concatenate(workers))
        return torch.from_numpy(np.concatenate(arrays)[order])
