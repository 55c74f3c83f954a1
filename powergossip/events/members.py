"""The workers that are alive, as one of them knows it, and the weights of the edges between them.

A view has a version for each of the n workers. It counts deaths and replacements: a worker is alive
while its version is even. Views travel with messages. The union of two views is the larger version
of each worker.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import pairwise

from powergossip.topologies import Topology

View = tuple[int, ...]  # [worker]
Weights = Mapping[int, Mapping[int, float]]  # i → j → w_ij, of edges between workers alive


def union(first: View, second: View) -> View:
    """The larger version of each worker."""
    return first if first == second else tuple(map(max, first, second))


def dead(view: View) -> frozenset[int]:
    """The workers that are dead in a view."""
    return frozenset(worker for worker, version in enumerate(view) if version % 2)


class Members:
    """Weights of the edges between the workers that are alive, a function of the dead ones.

    The weight of an exchange follows from the union of the views in its two messages, and is
    therefore the same at both ends.

    Args:
        topology: A static and undirected topology.

    Raises:
        ValueError: For a directed or time-varying topology.
    """

    def __init__(self, topology: Topology):
        if topology.period > 1 or not topology.symmetric:
            kind = "time-varying" if topology.period > 1 else "directed"
            raise ValueError(
                f"topology={topology.name}: use an undirected static topology, such as ring, where "
                f"exchanges may be late or workers may be lost; this one is {kind}"
            )
        matrix = topology.round(0).weights.tocoo()
        self.n_workers = topology.n_workers
        first: dict[int, dict[int, float]] = {i: {} for i in range(self.n_workers)}
        for i, j, w in zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data, strict=True):
            if i < j:  # the same bits at both ends
                first[i][j] = first[j][i] = float(w)
        first = {i: dict(sorted(row.items())) for i, row in first.items()}
        self.first = first  # w_ij of the topology
        self._after = lru_cache(maxsize=1024)(partial(without, first))

    @property
    def start(self) -> View:
        """The view at the start: everybody is alive."""
        return (0,) * self.n_workers

    def weights(self, view: View) -> Weights:
        """w_ij between the workers that are alive in a view."""
        return self._after(dead(view))

    def weight(self, i: int, j: int, view: View) -> float:
        """w_ij in a view: 0 without an edge."""
        return self.weights(view).get(i, {}).get(j, 0.0)


def without(weights: Weights, removed: Iterable[int]) -> dict[int, dict[int, float]]:
    """The weights w_ij after the removal of workers, with spare edges that connect the others.

    Workers are removed one after the other, in ascending order. The weight of an edge of the
    removed worker v returns to its other end, which thereby has w_kv to spare. The neighbors
    a_1 < … < a_m of v are connected as a chain a_1 – a_2 – … – a_m. An edge of the chain has the
    smaller of the spare weights of its ends, half of it for m ≥ 3, where a worker may have two
    such edges. It is added to the weight of an edge that exists.

    W stays symmetric and doubly stochastic, no w_ii becomes smaller, and a connected graph stays
    connected.
    """
    left = {i: dict(row) for i, row in weights.items()}
    for v in sorted(removed):
        spare = left.pop(v)
        neighbors = sorted(spare)
        for a in neighbors:
            del left[a][v]
        part = 0.5 if len(neighbors) > 2 else 1.0
        for a, b in pairwise(neighbors):
            more = part * min(spare[a], spare[b])
            left[a][b] = left[b][a] = left[a].get(b, 0.0) + more
    return {i: dict(sorted(row.items())) for i, row in left.items()}


def raised(versions: View, index: int) -> View:
    """The versions with the next one of a worker."""
    return tuple(v + (i == index) for i, v in enumerate(versions))
