"""How fast a graph averages."""

import math

from powergossip.topologies import Topology
from powergossip.topologies.spectra import EXACT

FACTOR = 10.0  # by which the distance between the workers falls


def rounds(topology: Topology) -> float:
    """Rounds of plain gossip at diffusion rate 1 until the distance has fallen by the factor 10.

    A period that averages exactly takes its number of rounds. NaN: it takes too long to compute.
    """
    try:
        contraction = topology.contraction(1.0)
    except ValueError:
        return math.nan
    if contraction**topology.period < EXACT:
        return topology.period
    return max(1.0, math.log(FACTOR) / -math.log(contraction)) if contraction < 1 else math.inf
