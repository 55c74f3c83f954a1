"""The workers that are alive, in place of all of them, for evaluation."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from powergossip.network import Network, Processes
from powergossip.parameters import Parameters


class AliveWorkers:
    """The workers of one process that are present, in place of a Network, for evaluation.

    present  # their indices
    """

    def __init__(self, network: Network, present: Callable[[], Sequence[int]]):
        self._network, self._present = network, present
        self.device, self.bits_to_all = network.device, network.bits_to_all

    @property
    def processes(self) -> Processes:
        return self._network.processes

    @property
    def present(self) -> Sequence[int]:
        return self._present()

    @property
    def workers(self) -> Sequence[int]:
        return self._present()

    @property
    def hosted(self) -> int:
        return len(self._present())

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of tensor [worker present, ...]."""
        if len(tensor) == self._network.hosted:
            return self._network.mean(tensor)
        return tensor.double().mean(0).to(tensor.dtype)

    def start_mean(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that returns `mean(tensor)`."""
        return partial(self.mean, tensor)

    def gather(self, values: Tensor) -> Tensor:
        """values [worker present, ...]."""
        return values.detach().cpu()


class PresentParameters:
    """Parameters of the workers that are present, in place of all, for evaluation."""

    def __init__(self, parameters: Parameters, present: Callable[[], Sequence[int]]):
        self._parameters, self._present = parameters, present
        self.names, self.layout = parameters.names, parameters.layout

    @property
    def models(self) -> list[nn.Module]:
        return [self._parameters.models[i] for i in self._present()]

    @property
    def x(self) -> Tensor:
        return self._of(self._parameters.x)

    @property
    def buffers(self) -> Tensor:
        return self._of(self._parameters.buffers)

    def _of(self, tensor: Tensor) -> Tensor:
        present = list(self._present())
        return tensor if len(present) == len(tensor) else tensor[present]
