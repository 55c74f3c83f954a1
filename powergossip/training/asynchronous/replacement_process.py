"""Runs whose processes exchange by links, and may go on without some of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from powergossip import exits, ulfm
from powergossip.errors import BadInput, Stopped
from powergossip.exits import report
from powergossip.network import Processes, hosted_workers, launch
from powergossip.network.resilient import spawning
from powergossip.network.resilient.links import Links
from powergossip.training.config import Settings

T = TypeVar("T")


def make_links(c: Settings, processes: Processes) -> Links:
    """The links of a run. All processes call it."""
    hosted = hosted_workers(c.n_workers, processes.size)
    homes = [worker // hosted for worker in range(c.n_workers)]
    communicator: Any = getattr(processes, "communicator")  # noqa: B009 of MPI, as checked
    timeout = c.worker_timeout if ulfm.enabled() else float("inf")
    links = Links(communicator, homes, timeout)
    if c.survives:
        links.end_alone()
    return links


class Replacement:
    """A process that replaces a lost one, before it joins the others.

    Attributes:
        config, folder: Configuration and folder of the run.
        facts: Facts that are equal in all processes of the run.
        links: Links to the others.
    """

    def __init__(self) -> None:
        assignment = spawning.assignment()
        assert assignment is not None
        config, folder, self.facts = assignment.run
        self.config, self.folder = Settings.of(config), Path(folder)
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
