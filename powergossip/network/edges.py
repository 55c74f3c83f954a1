"""The edges of a round, seen by a process, and the rows of messages that they connect."""

import numpy as np

from powergossip import checks
from powergossip.topologies import Round

MOST_SLOTS = 2**30  # of a table of neighbors, 8 bytes each


def _slots_of(topology_round: Round) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All directed edges source → destination of a round, by destination, then source. [edge]

    Returns:
        source, destination, out_slot (index of the edge among those out of its source), in_slot
        (index among those into its destination).
    """
    weights = topology_round.weights  # csr: row = destination, column = source
    source = weights.indices.astype(np.int64)
    destination = np.repeat(np.arange(topology_round.n_workers), np.diff(weights.indptr))
    in_slot = np.arange(len(source)) - weights.indptr[destination]
    by_source = np.lexsort((destination, source))
    first = np.searchsorted(source[by_source], source[by_source])  # edge of the same source
    out_slot = np.empty_like(in_slot)
    out_slot[by_source] = np.arange(len(source)) - first
    return source, destination, out_slot, in_slot


class Edges:
    """The edges of a round that start or end at a worker of this process. numpy arrays.

    A row is a hosted worker of a copy: copy · hosted + index of the worker among the hosted ones.
    Rows of messages are addressed by pairs of arrays (row, slot): out_slot for an outgoing message,
    in_slot for an incoming one. Edges between processes are ordered by process, then in an order
    that both processes share: by copy, destination and in_slot.

    Example: the chain 0 – 1 – 2 – 3 in two processes, seen by the one that hosts workers 0 and 1::

        edge    out_slot  in_slot                  neighbors    [[1, −1], [0, 2]]
        1 → 0   0         0         inside         out_degrees  [1, 2]
        0 → 1   0         0         inside         inside_source (row, out_slot)      (1, 0), (0, 0)
        2 → 1   0         1         incoming       inside_destination (row, in_slot)  (0, 0), (1, 0)
        1 → 2   1         0         outgoing       incoming (1, 1), outgoing (1, 1), with process 1

    Attributes:
        neighbors, weights: Neighbors and their weights [row, in_slot], see Slots.
        out_degrees: Numbers of receivers [row].
        n_in, n_out: Largest in-degree and out-degree of all workers.
        inside_source, inside_destination: The two ends of the edges within this process.
        outgoing, outgoing_process: Edges to other processes, and their ranks.
        incoming, incoming_process: Edges from other processes, and their ranks.
    """

    def __init__(self, topology_round: Round, workers: range, copies: int):
        n, hosted = topology_round.n_workers, len(workers)
        source, destination, out_slot, in_slot = _slots_of(topology_round)
        in_degrees = np.bincount(destination, minlength=n)
        all_out_degrees = np.bincount(source, minlength=n)
        self.n_in = int(in_degrees.max(initial=0))
        self.n_out = int(all_out_degrees.max(initial=0))
        most = MOST_SLOTS // max(1, copies * self.n_in)
        accepted = f"{most} or less in a process with {self.n_in} neighbors of a worker"
        checks.check("n_workers", hosted, hosted <= most, accepted)
        self.out_degrees = np.tile(all_out_degrees[workers.start : workers.stop], copies)

        starts_here = (workers.start <= source) & (source < workers.stop)
        ends_here = (workers.start <= destination) & (destination < workers.stop)
        neighbors = np.full((hosted, self.n_in), -1, dtype=np.int64)
        weights = np.zeros((hosted, self.n_in))
        place = destination[ends_here] - workers.start, in_slot[ends_here]
        neighbors[place] = source[ends_here]
        weights[place] = topology_round.weights.data[ends_here]
        self.neighbors = np.tile(neighbors, (copies, 1))
        self.weights = np.tile(weights, (copies, 1))

        def rows_and_slots(
            chosen: np.ndarray, worker: np.ndarray, slot: np.ndarray, other: np.ndarray
        ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
            """(row, slot) of the chosen edges in all copies, and the process of the other end of
            each, ordered by it."""
            here = worker[chosen] - workers.start
            rows = (here + hosted * np.arange(copies)[:, None]).ravel()
            slots, processes = np.tile(slot[chosen], copies), np.tile(other[chosen], copies)
            processes //= hosted
            order = np.argsort(processes, kind="stable")
            return (rows[order], slots[order]), processes[order]

        inside, leaving, arriving = (
            starts_here & ends_here,
            starts_here & ~ends_here,
            ends_here & ~starts_here,
        )
        ends = (source, out_slot, destination), (destination, in_slot, source)
        self.inside_source, _ = rows_and_slots(inside, *ends[0])
        self.inside_destination, _ = rows_and_slots(inside, *ends[1])
        self.outgoing, self.outgoing_process = rows_and_slots(leaving, *ends[0])
        self.incoming, self.incoming_process = rows_and_slots(arriving, *ends[1])
