"""How fast a graph averages."""

import math
from dataclasses import dataclass

from powergossip.topologies import Topology

FACTOR = 10.0  # by which the distance between the workers falls


@dataclass(frozen=True)
class Consensus:
    """Plain gossip at diffusion rate 1, without compression and without learning.

    Attributes:
        contraction: Factor of a step on the distance to the mean. 0 if it averages exactly, NaN if
            it takes too long to compute.
        rounds: Number of steps until the distance has fallen by the factor 10.
    """

    contraction: float
    rounds: float


AT_ONCE = Consensus(0.0, 1.0)  # of methods whose workers always agree


def consensus(topology: Topology) -> Consensus:
    """Return the speed of averaging. A period that averages exactly takes its number of rounds."""
    if topology.n_workers == 1:
        return AT_ONCE
    try:
        contraction = topology.contraction(1.0)
    except ValueError:
        return Consensus(math.nan, math.nan)
    if contraction**topology.period < 1e-12:
        return Consensus(0.0, topology.period)
    if contraction >= 1:
        return Consensus(contraction, math.inf)
    return Consensus(contraction, max(1.0, math.log(FACTOR) / -math.log(contraction)))
