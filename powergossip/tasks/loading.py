"""Loading of samples, by this process or ahead of time by others.

A batch is a function of its `Request` alone. The global generators of Python, NumPy and torch are
seeded for each batch, so that random augmentation depends neither on the process that loads it, nor
on earlier batches.
"""

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
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
    cancel: Callable[[], None] = lambda: None


class Loader:
    """Loads batches, in the background if `processes` is above 0.

    Args:
        place: Name of the task in errors, such as task=package.module:callable.

    Attributes:
        ahead: Number of batches in flight that keep the processes busy.
        in_memory: True if no sample needs to be loaded.
    """

    def __init__(self, source: SampleSource, place: str, processes: int = 0):
        self._source, self._place, self.in_memory = source, place, source.in_memory
        self._n_processes = 0 if self.in_memory else processes
        self.ahead = 2 * self._n_processes
        self._processes: list[_Process] = []
        self._requests = 0

    def request(self, request: Request) -> Pending:
        """Start to load a batch. Without other processes, it is loaded when it is waited for."""
        if self._n_processes == 0:
            return Pending(partial(self._load, request))
        if not self._processes:
            self._processes = [_Process(self._source) for _ in range(self._n_processes)]
        process = self._processes[self._requests % self._n_processes]
        self._requests += 1
        index = process.send(request)
        return Pending(partial(self._result, process, index), partial(process.cancel, index))

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
        for process in self._processes:
            process.end()
        self._processes = []

    def _load(self, request: Request) -> Any:
        with users_code(self._place):
            return self._source.load(request)

    def _result(self, process: "_Process", index: int) -> Any:
        try:
            found = process.result(index)
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"{self._place}: a process that loads data was killed, or its memory in /dev/shm "
                "is too small; try fewer data_processes"
            ) from error
        if isinstance(found, _Failure):
            raise UserCodeError(f"{self._place}, in a process that loads data:\n\n{found.text}")
        return found


class _Process:
    """A process that loads batches in the order of the requests. It ends with this object.

    It is forked, like the workers of torch's DataLoader on Linux: the data sets need not be
    pickled, and a driver script is not imported again.

    Attributes:
        end: Function that ends it now.
    """

    def __init__(self, source: SampleSource):
        context = multiprocessing.get_context("fork")
        self._connection, other_end = context.Pipe()
        process = context.Process(target=_serve, args=(source, other_end, os.getpid()), daemon=True)
        process.start()
        other_end.close()
        self._sent = self._received = 0
        self._results: dict[int, Any] = {}
        self._canceled: set[int] = set()
        # At exit, before multiprocessing waits for its processes, which ignore SIGTERM.
        self.end = Finalize(self, _end, (process,), exitpriority=10)

    def send(self, request: Request) -> int:
        """Send a request. Returns its index, for the other methods."""
        self._connection.send(request)
        self._sent += 1
        return self._sent - 1

    def result(self, index: int) -> Any:
        """The batch of a request. Raises EOFError or OSError if the process has ended."""
        while self._received <= index:
            found = self._connection.recv()
            if self._received not in self._canceled:
                self._results[self._received] = found
            self._canceled.discard(self._received)
            self._received += 1
        return self._results.pop(index)

    def cancel(self, index: int) -> None:
        """Discard the batch of a request."""
        if index < self._received:
            del self._results[index]
        else:
            self._canceled.add(index)


def _end(process: Any) -> None:
    process.kill()
    process.join()


# --- In a process that loads data ---


@dataclass(frozen=True)
class _Failure:
    """An error with its traceback as text: some exceptions cannot be pickled."""

    text: str


def _serve(source: SampleSource, connection: Connection, parent: int) -> None:
    """Load the requested batches for the process `parent`, until that ends."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, after its step
    # The thread empties the connection at all times, so that the parent never waits to send.
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, connection, parent), daemon=True).start()
    while True:
        request = requests.get()
        try:
            connection.send(source.load(request))
        except Exception:
            connection.send(_Failure(traceback.format_exc()))


def _receive(requests: "queue.SimpleQueue[Request]", connection: Connection, parent: int) -> None:
    """Receive requests, and end this process after its parent."""
    try:
        while os.getppid() == parent:
            if connection.poll(0.5):
                requests.put(connection.recv())
    finally:
        os._exit(1)
