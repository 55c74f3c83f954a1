"""Topologies: networkx graph → mixing matrix → the neighbors of each worker in each round.

**W[i, j] is the weight with which worker i averages the message of worker j**, and w_ii = 1 − Σ_j
w_ij is the weight of i's model. Row i thus lists the workers that i receives from, and column j the
workers that j sends to. W is doubly stochastic: every row and every column sums to 1, which
conserves the mean of the workers. Topologies with `row_stochastic` set are the exception: random
rounds, and directed graphs from files whose in- and out-degrees differ.

A `Topology` is a sequence of rounds that repeats. A static graph has one round. `make` builds a
topology from its name in `TOPOLOGIES`, in registry.py, or from a file.

Undirected static topologies have the option `weights`, a row of `WEIGHTS`.

The spectrum of a static undirected topology is the spectrum of I − W. Its non-zero
eigenvalues λ_2 ≤ … ≤ λ_max determine the speed of averaging (Xiao & Boyd 2004,
doi:10.1016/j.sysconle.2004.02.022). For several rounds the measure is the contraction of the
distance to the mean over a whole period. Some periods average exactly.

Axes: worker, edge, group, member, block. Matrices over the workers are [receiver, sender].
"""

from powergossip.topologies.graph_files import from_file
from powergossip.topologies.registry import TOPOLOGIES as TOPOLOGIES
from powergossip.topologies.registry import is_graph as is_graph
from powergossip.topologies.registry import make as make
from powergossip.topologies.registry import name_of as name_of
from powergossip.topologies.static import (
    UNDIRECTED,
    binary_tree,
    chain,
    double_binary_tree,
    equi_static,
    exponential,
    fully_connected,
    hypercube,
    random_regular,
    ring,
    social_network,
    star,
    torus,
    undirected,
    unidirectional_ring,
    watts_strogatz,
)
from powergossip.topologies.time_varying import (
    base_graph,
    epidemic,
    matchings,
    one_peer_equi,
    one_peer_exponential,
    random_matching,
    round_robin,
)
from powergossip.topologies.topology import Round, Topology, Tree
from powergossip.topologies.weights import (
    WEIGHTS,
    Weights,
    best_constant,
    metropolis_hastings,
    uniform,
)

__all__ = [
    "TOPOLOGIES",
    "UNDIRECTED",
    "WEIGHTS",
    "Round",
    "Topology",
    "Tree",
    "Weights",
    "base_graph",
    "best_constant",
    "binary_tree",
    "chain",
    "double_binary_tree",
    "epidemic",
    "equi_static",
    "exponential",
    "from_file",
    "fully_connected",
    "hypercube",
    "make",
    "matchings",
    "metropolis_hastings",
    "one_peer_equi",
    "one_peer_exponential",
    "random_matching",
    "random_regular",
    "ring",
    "round_robin",
    "social_network",
    "star",
    "torus",
    "undirected",
    "unidirectional_ring",
    "uniform",
    "watts_strogatz",
]
