"""Loading of samples, by this process or ahead of time by others.

A batch is a function of its `Request` alone. The global generators of Python, NumPy and torch are
seeded for each batch, so that random augmentation depends neither on the process that loads it, nor
on earlier batches.
"""

import ctypes
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from powergossip.user_functions import UserCodeError, seeded, users_code


@dataclass(frozen=True)
class Request:
    """A batch to load.

    Attributes:
        data: Name of the data set.
        samples: Indices of the samples in it.
        seed: Seed of random augmentation, below 2⁶³.
    """

    data: str
    samples: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class SampleSource:
    """Data sets by name, and the function that makes a batch of a list of samples."""

    datasets: Mapping[str, Dataset[Any]]
    collate: Callable[[list[Any]], Any] = default_collate

    def _is_indexed(self, data: Dataset[Any]) -> bool:
        """True if a batch is made by an index into tensors."""
        return type(data) is TensorDataset and self.collate is default_collate

    @property
    def in_memory(self) -> bool:
        """True if no sample needs to be loaded."""
        return all(self._is_indexed(data) for data in self.datasets.values())

    def load(self, request: Request) -> Any:
        """The batch, on the CPU unless the data set has other tensors."""
        data, samples = self.datasets[request.data], list(request.samples)
        if self._is_indexed(data):
            assert isinstance(data, TensorDataset)
            index = torch.tensor(samples)  # the same batch, without an object for each sample
            return tuple(tensor[index] for tensor in data.tensors)
        with seeded(request.seed):
            several = getattr(data, "__getitems__", None)  # as torch's DataLoader does
            return self.collate(several(samples) if several else [data[i] for i in samples])


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. It reaches a GPU from pinned memory: the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Pending:
    """A batch that is being loaded: either `wait` for it and return it, or `cancel` it."""

    wait: Callable[[], Any]
    cancel: Callable[[], Any] = lambda: None


class _Process(ForkProcess):
    """A process that a broken pool ends by SIGKILL, since it ignores SIGTERM."""

    terminate = ForkProcess.kill


class _Context(ForkContext):
    Process = _Process


class Loader:
    """Loads batches, in the background if `processes` is above 0.

    The processes are forked, like the workers of torch's DataLoader on Linux: the data sets need
    not be pickled, and a driver script is not imported again.

    Args:
        place: Name of the task in errors, such as task=package.module:callable.

    Attributes:
        ahead: Number of batches in flight that keep the processes busy.
    """

    def __init__(self, source: SampleSource, place: str, processes: int = 0):
        self._source, self._place = source, place
        self._n_processes = 0 if source.in_memory else processes
        self.ahead = 2 * self._n_processes
        self._pool: ProcessPoolExecutor | None = None

    def request(self, request: Request) -> Pending:
        """Start to load a batch. Without other processes, it is loaded when it is waited for."""
        if self._n_processes == 0:
            return Pending(partial(self._load, request))
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._n_processes,
                _Context(),
                _begin,
                (self._source, os.getpid()),
            )
        future = self._pool.submit(_load, request)
        return Pending(partial(self._result, future), future.cancel)

    def in_order(self, requests: Iterable[Request]) -> Iterator[Any]:
        """The batches of some requests, with `ahead` of them in flight."""
        pending: deque[Pending] = deque()
        for request in requests:
            pending.append(self.request(request))
            if len(pending) > self.ahead:
                yield pending.popleft().wait()
        while pending:
            yield pending.popleft().wait()

    def close(self) -> None:
        """End the processes. The next request starts others."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def _load(self, request: Request) -> Any:
        with users_code(self._place):
            return self._source.load(request)

    def _result(self, future: "Future[Any]") -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"{self._place}: a process that loads data was killed, or its memory in /dev/shm "
                "is too small; try fewer data_processes"
            ) from error
        except Exception as error:
            raise UserCodeError(
                f"{self._place}, in a process that loads data:\n\n{error}"
            ) from error


# --- In a process that loads data ---

PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends
_sources: list[SampleSource] = []


def _begin(source: SampleSource, parent: int) -> None:
    """Keep the data sets. This process ends with its parent `parent`, and not before."""
    _sources.append(source)
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, after its step
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _load(request: Request) -> Any:
    """The batch. Raises RuntimeError with the traceback as text: some errors cannot be pickled."""
    try:
        return _sources[-1].load(request)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None
