"""Loading of samples, by this process or ahead of time by others.

A batch is a function of its `Request` alone. The global generators of Python, NumPy and torch are
seeded for each batch, so that random augmentation does not depend on which process loads it, when,
and what was loaded before.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from powergossip.tasks.named import UserCodeError, seeded, users_code

Pending = Callable[[], Any]  # waits for a batch and returns it


@dataclass(frozen=True)
class Request:
    """A batch to load.

    data     # name of the data set
    samples  # their indices in it
    seed     # of random augmentation, below 2⁶³
    """

    data: str
    samples: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Source:
    """Data sets by name, and the function that makes a batch of a list of samples."""

    datasets: Mapping[str, Dataset[Any]]
    collate: Callable[[list[Any]], Any] = default_collate

    def _is_indexed(self, data: Dataset[Any]) -> bool:
        """Whether a batch is made by an index into tensors."""
        return type(data) is TensorDataset and self.collate is default_collate

    @property
    def in_memory(self) -> bool:
        """Whether no sample needs to be loaded."""
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


class Loader:
    """Loads batches, in the background if `processes` is above 0.

    place      # in errors, such as task=package.module:callable
    ahead      # number of batches in flight that keep the processes busy
    in_memory  # whether no sample needs to be loaded
    """

    def __init__(self, source: Source, place: str, processes: int = 0):
        self._source, self._place, self.in_memory = source, place, source.in_memory
        self._processes = 0 if self.in_memory else processes
        self.ahead = 2 * self._processes
        self._pool: ProcessPoolExecutor | None = None

    def request(self, request: Request) -> Pending:
        """Start to load a batch. Without other processes, it is loaded when it is waited for."""
        if self._processes == 0:
            return partial(self._load, request)
        if self._pool is None:
            # Forked, like the processes of torch's DataLoader on Linux: the data sets need not be
            # pickled, and a driver script is not imported again.
            self._pool = ProcessPoolExecutor(
                self._processes,
                multiprocessing.get_context("fork"),
                _begin,
                (self._source, os.getpid()),
            )
        return partial(self._result, self._pool.submit(_load, request))

    def in_order(self, requests: Iterable[Request]) -> Iterator[Any]:
        """The batches of some requests, with `ahead` of them in flight."""
        pending: deque[Pending] = deque()
        for request in requests:
            pending.append(self.request(request))
            if len(pending) > self.ahead:
                yield pending.popleft()()
        while pending:
            yield pending.popleft()()

    def _load(self, request: Request) -> Any:
        with users_code(self._place):
            return self._source.load(request)

    def _result(self, future: "Future[Any]") -> Any:
        try:
            found = future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"{self._place}: a process that loads data was killed, or its memory in /dev/shm "
                "is too small; try fewer data_processes"
            ) from error
        if isinstance(found, _Failure):
            raise UserCodeError(f"{self._place}, in a process that loads data:\n\n{found.text}")
        return found


# --- In a process that loads data ---


@dataclass(frozen=True)
class _Failure:
    """An error with its traceback as text: some exceptions cannot be pickled."""

    text: str


_source: Source | None = None


def _begin(source: Source, parent: int) -> None:
    """Begin to load data for the process `parent`, and end with it."""
    global _source
    _source = source
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, after its step
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _load(request: Request) -> Any:
    assert _source is not None
    try:
        return _source.load(request)
    except Exception:
        return _Failure(traceback.format_exc())
