"""The time of plain gossip of many workers in one process, beside products of matrices.

    python -m benchmarks.consensus_step

A step of PlainGossip, `W @ x` by scipy (CSR), and by torch (dense, up to 64 workers), in turns in
one thread: medians of rounds.
"""

from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.timing import in_turns
from powergossip import algorithms, topologies
from powergossip.network import Network, Processes

CASES = (  # workers, elements of a worker, topology
    (8, 100 * 100, "ring"),
    (64, 100 * 100, "torus"),
    (1024, 100 * 100, "ring"),
    (64, 100 * 100, "fully-connected"),
    (16, 272_474, "fully-connected"),
)
ROUNDS, SECONDS = 7, 2.0


def steps(n: int, size: int, topology: str) -> dict[str, Callable[[], object]]:
    """Name → a step. Those with a matrix have a result in new memory."""
    network = Network(topologies.make(topology, n), Processes())
    x, rule = torch.randn(n, size), algorithms.PlainGossip(network)
    W = network.topology.rounds[0].matrix().astype(np.float32)
    found: dict[str, Callable[[], object]] = {
        "gossip": lambda: network.run(rule.step(x)),
        "scipy": lambda: W @ x.numpy(),
    }
    if n <= 64:
        dense = torch.from_numpy(W.toarray())
        found["dense"] = lambda: dense @ x
    return found


def main() -> None:
    torch.set_num_threads(1)
    for case in CASES:
        found = steps(*case)
        times = in_turns(found, ROUNDS, SECONDS, Processes(), torch.device("cpu"))
        cells = (f"{name} {median(ms):.3g} ms" for name, ms in times.items())
        print(*case, *cells, sep=", ")


if __name__ == "__main__":
    main()
