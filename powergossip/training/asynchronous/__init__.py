"""Training by exchanges of edges: messages may be late, and workers lost, joined or replaced.

Modules::

    execution.py            OnVirtualClock, AcrossProcesses
    workers.py              the workers of a process: models, learning rules, gradients, state
    edge_options.py         accepted configurations
    replacement_process.py  a process that replaces a lost one; messages between workers
    rows.py                 rows whose writer may be lost
    replacements.py         replacement of lost processes in a running job
    resuming.py             resuming with lost or other workers
"""

from pathlib import Path

from powergossip.events import event_log, scenario
from powergossip.events.replay import Replay
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.wall_clock import WallClock
from powergossip.network.resilient.links import Links
from powergossip.training.asynchronous.execution import AcrossProcesses, OnVirtualClock, lines_of
from powergossip.training.asynchronous.workers import EdgeWorkers
from powergossip.training.execution import Computation


def make(run: Computation, links: Links | None, joins: bool) -> OnVirtualClock | AcrossProcesses:
    """The execution of a configuration by edges: across processes where there are links.

    Args:
        joins: Whether this process replaces a lost one.
    """
    c, counter = run.config, run.network.counter
    workers = EdgeWorkers(run, c.method.resolved(run.network.topology, run.parameters.layout))
    if links is not None:
        together = c.gossip == "synchronous"
        wall = WallClock(
            links, workers.make, workers.compute, together, c.survives, run.clock, counter
        )
        return AcrossProcesses(run, links, workers, wall, joins)
    drawn = scenario.read(c.scenario or {}, c.n_workers, c.seed)
    models = [run.parameters.x, run.parameters.buffers]
    virtual: VirtualClock | Replay
    if drawn.replay is not None:
        path = Path(drawn.replay)
        entries = event_log.read(path, complete=True)
        event_log.check(path, entries, lines_of(run), c.num_epochs)
        virtual = Replay(
            entries, run.steps_per_epoch, models, workers.make, workers.compute, counter
        )
    else:
        virtual = VirtualClock(
            drawn, models, workers.make, workers.compute, c.record_order, counter
        )
    return OnVirtualClock(run, workers, virtual)
