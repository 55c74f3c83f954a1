"""The topologies, at a glance. The same objects as in `powergossip.topologies`.

The number after a year is the arXiv identifier. The rows of `TOPOLOGIES` are the values of
`topology` in train.py and gossip_run.py, which also accept the path of an edge-list or adjacency
file.

Static, undirected::

    ring                  two neighbors each
    chain                 a ring without one edge
    star                  worker 0 is the only neighbor of every other worker
    fully-connected       every pair of workers
    torus                 a × b grid, closed in both directions
    hypercube             indices that differ in one bit
    binary-tree           worker i's parent is ⌊i/2⌋     Vogels et al. (2021), 2110.04175
    double-binary-tree    two trees, one with reversed indices    Vogels et al. (2021), 2110.04175
    social-network        32 workers                    Davis, Gardner & Gardner (1941)
    watts-strogatz        small world                   Watts & Strogatz (1998)
    random-regular        a random graph of one degree

Static, directed::

    unidirectional-ring   worker i receives from i − 1
    exponential           from i − 1, i − 2, i − 4, …   Ying et al. (2021), 2110.13363
    equi-static           random shifts                 Song et al. (2022), 2210.07881

Time-varying::

    one-peer-exponential  one hop of exponential per round      Assran et al. (2019), 1811.10792
    one-peer-equi         one random shift per round            Song et al. (2022), 2210.07881
    base-graph            exact mean after each period          Takezawa et al. (2023), 2305.11420
    random-matching       random pairs                          Boyd et al. (2006)
    round-robin           the edges of a graph, one matching per round
    epidemic              every worker sends to s random others de Vos et al. (2023), 2310.01972
"""

from powergossip.topologies import *  # noqa: F403
from powergossip.topologies import __all__ as __all__
