"""Edge coloring: no two edges of a worker have the same color."""

import numpy as np
from scipy.sparse import csr_array


def is_bipartite(adjacency: csr_array) -> bool:
    import networkx as nx  # takes a tenth of a second

    return bool(nx.is_bipartite(nx.from_scipy_sparse_array(adjacency)))


class _Coloring:
    """A partial edge coloring: no two edges of a worker have the same color.

    Attributes:
        neighbor: Neighbor at the other end of u's edge of a color, neighbor[u][color].
        free: Colors that no edge of u has, as bits of the integer free[u].
    """

    def __init__(self, n_workers: int, colors: int):
        self.neighbor: list[dict[int, int]] = [{} for _ in range(n_workers)]
        self.free = [(1 << colors) - 1] * n_workers

    def put(self, u: int, v: int, color: int) -> None:
        for end, other in ((u, v), (v, u)):
            self.neighbor[end][color] = other
            self.free[end] ^= 1 << color

    def remove(self, u: int, v: int, color: int) -> None:
        for end in (u, v):
            del self.neighbor[end][color]
            self.free[end] ^= 1 << color

    def swap(self, u: int, a: int, b: int) -> None:
        """Exchange colors a and b on the path of those colors that starts with a at u."""
        path = []
        following: int | None = u
        while following is not None:
            path.append(following)
            following = self.neighbor[following].get(b if len(path) % 2 == 0 else a)
        for worker in path:
            of = self.neighbor[worker]
            swapped = {d: of.pop(c) for c, d in ((a, b), (b, a)) if c in of}
            of.update(swapped)
            if len(swapped) == 1:  # an end
                self.free[worker] ^= 1 << a | 1 << b


def edge_colors(n_workers: int, edges: np.ndarray, bipartite: bool) -> np.ndarray:
    """Color the edges [edge, 2] such that adjacent edges differ: int64 [edge].

    Edges are colored one by one, with a color that is free at both ends. Without one, other edges
    are recolored first: usually few of them, in the worst case all. The colors are 0 … Δ − 1 if the
    graph is bipartite (Kőnig 1916, doi:10.1007/BF01456961), else 0 … Δ (Misra & Gries 1992,
    doi:10.1016/0020-0190(92)90041-S), where Δ is the largest degree.
    """
    largest = int(np.bincount(edges.ravel(), minlength=n_workers).max())
    coloring = _Coloring(n_workers, largest if bipartite else largest + 1)
    for u, v in edges.tolist():
        common = coloring.free[u] & coloring.free[v]
        if common:
            coloring.put(u, v, _lowest(common))
        elif bipartite:
            a, b = _lowest(coloring.free[u]), _lowest(coloring.free[v])
            coloring.swap(v, a, b)  # the path enters u's side by edges of color a: never u
            coloring.put(u, v, a)
        else:
            _put_with_fan(coloring, u, v)
    color = [{v: c for c, v in of.items()} for of in coloring.neighbor]
    return np.array([color[u][v] for u, v in edges.tolist()], dtype=np.int64)


def _put_with_fan(coloring: _Coloring, u: int, v: int) -> None:
    """Color the edge (u, v) if its ends have no free color in common.

    Neighbors v = f_0, f_1, … of u form a fan if the color of (u, f_i+1) is free at f_i. Each edge
    of a fan can pass its color on to the one before. The last edge then takes a new color.
    """
    free, neighbor = coloring.free, coloring.neighbor[u]
    fan = [v]
    while not free[u] & free[fan[-1]]:
        d = _lowest(free[fan[-1]])
        if neighbor[d] in fan:
            # d is free at the fan's end and at the vertex before `neighbor[d]`. The swap makes it
            # free at u and leaves it free at one of these two at least.
            before = fan.index(neighbor[d]) - 1
            coloring.swap(u, d, _lowest(free[u]))
            if free[fan[before]] >> d & 1:
                fan = fan[: before + 1]
            break
        fan.append(neighbor[d])
    new = _lowest(free[u] & free[fan[-1]])
    color = {w: c for c, w in neighbor.items()}
    passed_on = [color[w] for w in fan[1:]]
    for w, c in zip(fan[1:], passed_on, strict=True):
        coloring.remove(u, w, c)
    for w, c in zip(fan, [*passed_on, new], strict=True):
        coloring.put(u, w, c)


def _lowest(bits: int) -> int:
    """Index of the lowest bit that is 1."""
    return (bits & -bits).bit_length() - 1
