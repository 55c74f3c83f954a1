"""Training by exchanges of edges: messages may be late, and workers lost, joined or replaced.

Modules::

    execution.py            OnVirtualClock, AcrossProcesses
    workers.py              the workers of a process: models, learning rules, gradients, state
    method.py               accepted configurations
    replacement_process.py  a process that replaces a lost one; messages between workers
    rows.py                 rows whose writer may be lost
    replacements.py         replacement of lost processes in a running job
    resuming.py             resuming with lost or other workers
"""

from pathlib import Path

from powergossip.events import scenario
from powergossip.events.order import read
from powergossip.events.replay import Replay
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.wall_clock import WallClock
from powergossip.network.resilient.links import Links
from powergossip.training.alive_workers import AliveWorkers
from powergossip.training.asynchronous.execution import AcrossProcesses, OnVirtualClock
from powergossip.training.asynchronous.workers import EdgeWorkers
from powergossip.training.config import Settings
from powergossip.training.execution import Computation
from powergossip.training.methods import averaging_options


def make(
    c: Settings, computation: Computation, links: Links | None, joins: bool
) -> OnVirtualClock | AcrossProcesses:
    """The execution of a configuration by edges: across processes where there are links.

    Args:
        joins: Whether this process replaces a lost one.
    """
    network, parameters, gradients, agreement, clock, steps_per_epoch = computation
    options = averaging_options(c, network.topology, parameters.layout)
    workers = EdgeWorkers(c, options, network, parameters, gradients.of_worker, steps_per_epoch)
    if links is not None:
        together = c.gossip == "synchronous"
        wall = WallClock(
            links, workers.make, workers.compute, together, c.survives, clock, network.counter
        )
        return AcrossProcesses(
            AliveWorkers(network, parameters, lambda: wall.everybody),
            network,
            links,
            workers,
            wall,
            agreement,
            clock,
            records=c.record_order,
            replaces=c if c.replaces else None,
            joins=joins,
        )
    drawn = scenario.read(c.scenario or {}, c.n_workers, c.seed)
    virtual: VirtualClock | Replay
    if drawn.replay is not None:
        entries = read(Path(drawn.replay))
        virtual = Replay(
            entries,
            steps_per_epoch,
            [parameters.x, parameters.buffers],
            workers.make,
            workers.compute,
            network.counter,
        )
    else:
        virtual = VirtualClock(
            drawn,
            [parameters.x, parameters.buffers],
            workers.make,
            workers.compute,
            c.record_order,
            network.counter,
        )
    return OnVirtualClock(
        AliveWorkers(network, parameters, lambda: virtual.alive),
        network,
        workers,
        virtual,
        agreement,
        clock,
        records=c.record_order,
    )
