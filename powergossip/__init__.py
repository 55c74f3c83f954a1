"""Decentralized deep learning with compressed communication.

The names below are the public API. They are imported on first use, so that `import powergossip`
costs nothing::

    GossipOptimizer, PowerSGD, DGC   for your own training loop
    Network, ToAll, ToEach, Mean, Gather
                                     workers, and the messages between them
    Layout, Parameters               the flat buffer [worker, D] and its views
    Trainer                          a training run, as train.py makes it
    algorithms, compressors, topologies, tasks
                                     registries and their classes
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powergossip import algorithms, compressors, tasks, topologies
    from powergossip.network import Gather, Mean, Network, ToAll, ToEach
    from powergossip.optimizers import DGC, GossipOptimizer, PowerSGD
    from powergossip.parameters import Layout, Parameters
    from powergossip.training.trainer import Trainer

__version__ = "1.0.0"

# A thread of GNU's OpenMP polls for milliseconds before it sleeps, on the core that the thread it
# waits for needs if cores are shared: a training step then takes ten times as long. With this it
# polls for microseconds. OpenMP reads it when torch is loaded. Other OpenMP libraries ignore it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__all__ = [
    "DGC",
    "Gather",
    "GossipOptimizer",
    "Layout",
    "Mean",
    "Network",
    "Parameters",
    "PowerSGD",
    "ToAll",
    "ToEach",
    "Trainer",
    "algorithms",
    "compressors",
    "tasks",
    "topologies",
]

_HOMES = ("network", "optimizers", "parameters", "training.trainer")  # of names other than modules


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.islower():
        return import_module(f"{__name__}.{name}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if name in vars(home))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
