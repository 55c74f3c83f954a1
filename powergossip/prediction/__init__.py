"""A model of the time of a training step on a network that is not at hand::

    fake_network.py  one worker of n, with messages to nobody: exact counts, measured CPU time
    traffic.py       the messages of a step of a method, and its CPU time
    model.py         seconds of a step on a cluster: the equations
    consensus.py     how fast a graph averages
    shapes.py        tensors of a model
    command_line.py  powergossip-predict

Axes: worker, host. Rates are bits per second, times are seconds.
"""

from powergossip.prediction.command_line import command, main
from powergossip.prediction.consensus import rounds
from powergossip.prediction.model import Cluster, Compute, Step, step
from powergossip.prediction.shapes import layout, of_size
from powergossip.prediction.traffic import (
    METHODS,
    Phase,
    PredictedMethod,
    Traffic,
    count,
    cpu_seconds,
)

__all__ = [
    "METHODS",
    "Cluster",
    "Compute",
    "Phase",
    "PredictedMethod",
    "Step",
    "Traffic",
    "command",
    "count",
    "cpu_seconds",
    "layout",
    "main",
    "of_size",
    "rounds",
    "step",
]
