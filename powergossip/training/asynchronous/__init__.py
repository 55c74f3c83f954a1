"""Training by exchanges of edges: messages may be late, and workers may be lost.

Modules::

    stepping.py   OnVirtualClock, AcrossProcesses
    workers.py    the workers of a process: models, learning rules, gradients, state
    rows.py       rows whose writer may be lost
    resizing.py   resuming with lost or other workers
"""

from typing import Any

from powergossip import ulfm
from powergossip.events import scenario
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.wall_clock import WallClock
from powergossip.network import Processes, hosted_workers
from powergossip.network.resilient.worker_messages import Links
from powergossip.training.asynchronous.stepping import AcrossProcesses, OnVirtualClock
from powergossip.training.asynchronous.workers import EdgeWorkers
from powergossip.training.config import Settings
from powergossip.training.stepping import Computation


def make_links(c: Settings, processes: Processes) -> Links:
    """The links of a run. All processes call it."""
    hosted = hosted_workers(c.n_workers, processes.size)
    homes = [worker // hosted for worker in range(c.n_workers)]
    if processes.transport == "internet":
        links = Links(processes, homes, c.worker_timeout)
    else:
        communicator: Any = getattr(processes, "communicator")  # noqa: B009 of MPI, as checked
        timeout = c.worker_timeout if ulfm.enabled() else float("inf")
        links = Links(communicator, homes, timeout)
    if c.survives:
        links.end_alone()
    return links


def make(run: Computation, links: Links | None) -> OnVirtualClock | AcrossProcesses:
    """The execution of a configuration by edges: across processes where there are links."""
    c, counter = run.config, run.network.counter
    workers = EdgeWorkers(run, c.method.resolved(run.network.topology, run.parameters.layout))
    models = [run.parameters.x, run.parameters.buffers]
    if links is not None:
        together = c.gossip == "synchronous"
        wall = WallClock(
            links, workers.make, workers.compute, together, c.survives, run.clock, counter, models
        )
        return AcrossProcesses(run, links, workers, wall)
    drawn = scenario.read(c.scenario or {}, c.n_workers, c.seed)
    virtual = VirtualClock(drawn, models, workers.make, workers.compute, counter)
    return OnVirtualClock(run, workers, virtual)
