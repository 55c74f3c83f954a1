"""Runs whose processes exchange by links, and may go on without some of them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from powergossip.errors import BadInput, Stopped
from powergossip.network import Network, Processes, exits, hosted_workers, launch, report
from powergossip.network.resilient import spawning, ulfm
from powergossip.network.resilient.spawning import Assignment
from powergossip.network.resilient.workers import Links
from powergossip.training.asynchronous.execution import event_driven, survives

T = TypeVar("T")


def make_links(c: Any, processes: Processes) -> Links | None:
    """The links of a run, or None where its processes take their steps together. All call it."""
    if not event_driven(c) or c.evaluate_only or processes.size == 1:
        return None
    hosted = hosted_workers(c.n_workers, processes.size)
    homes = [worker // hosted for worker in range(c.n_workers)]
    communicator: Any = getattr(processes, "communicator")  # noqa: B009 of MPI, as checked
    timeout = c.worker_timeout if ulfm.enabled() else float("inf")
    links = Links(communicator, homes, timeout)
    if survives(c):
        links.end_alone()
    return links


class Replacement:
    """A process that replaces a lost one, before it joins the others.

    config, folder  # of the run
    links           # to be given to the trainer
    """

    def __init__(self, assignment: Assignment):
        config, folder = assignment.run
        self.config, self.folder = OmegaConf.create(config), Path(folder)
        self.links = Links.join(assignment)
        launch.adopt(self.links.group)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(assignment.threads)
        self.links.end_alone()

    @contextmanager
    def rejected(self) -> Iterator[None]:
        """End this process alone if the block cannot prepare it. The others go on without it."""
        try:
            yield
        except (BadInput, Stopped) as error:
            report(error)
            exits.end_silently()


def replacement() -> Replacement | None:
    """This process as one that replaces a lost one, or None."""
    found = spawning.assignment()
    return None if found is None else Replacement(found)


def finish(links: Links | None, processes: Processes, action: Callable[[], None]) -> None:
    """Call the last action of a run, such as a figure, in one process, and wait for it.

    The first process that is left calls it. If that is lost meanwhile, the next one does.
    """
    if links is None:
        if processes.rank == 0:
            action()
        return
    done = False
    while not done:
        first = links.group.rank == 0
        if first:
            action()
        done = any(links.group.gather(first))
    links.finish()


def sentence(missing: Sequence[int], n_workers: int) -> str:
    """The end of a run that has lost workers."""
    present = sorted(set(range(n_workers)) - set(missing))
    return f"complete with workers {_listed(present)}{without(missing)}"


def without(missing: Sequence[int]) -> str:
    """The end of a sentence, with the lost workers if there are some."""
    return f", without workers {_listed(missing)}, which were lost" if missing else ""


def _listed(workers: Sequence[int]) -> str:
    """Ascending indices as text: 0, 2-5."""
    texts, first = [], 0
    for k, worker in enumerate(workers):
        if k + 1 == len(workers) or workers[k + 1] != worker + 1:
            texts.append(f"{workers[first]}-{worker}" if first < k else str(worker))
            first = k + 1
    return ", ".join(texts)


class LinkedNetwork:
    """The processes that are left, in place of a Network, for evaluation.

    present  # indices of the workers of all of them, after the last collective operation
    """

    def __init__(self, network: Network, links: Links, present: Callable[[], Sequence[int]]):
        self._links, self._present = links, present
        self.device, self.bits_to_all = network.device, network.bits_to_all
        self.workers, self.hosted = network.workers, network.hosted

    @property
    def processes(self) -> Processes:
        return self._links.group

    @property
    def present(self) -> Sequence[int]:
        return self._present()

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of tensor [worker, ...] over the workers of all processes."""
        total = tensor.detach().double().sum(0).cpu().numpy()
        count = np.full(1, len(tensor))
        everyone = self._links.group.gather_arrays(np.concatenate([total.ravel(), count]))
        mean = everyone[:, :-1].sum(0) / everyone[:, -1].sum()
        return torch.from_numpy(mean.reshape(total.shape)).to(tensor)

    def start_mean(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that returns `mean(tensor)`."""
        return partial(self.mean, tensor)

    def gather(self, values: Tensor) -> Tensor:
        """values [worker, ...] of all processes, by worker."""
        everyone = self._links.group.gather_arrays(values.detach().cpu().numpy())
        homes = self._links.homes
        hosted = [[w for w in homes if homes[w] == p] for p in self._links.group.members]
        order = np.argsort(np.concatenate(hosted))  # a replacement has the last index
        return torch.from_numpy(everyone).flatten(0, 1)[order]


def check_begun(place: T | None) -> T:
    """The place of a run. Raises Stopped where the process that prepared it was lost."""
    if place is None:
        raise Stopped("the process that prepares the output folder was lost before the first step")
    return place
