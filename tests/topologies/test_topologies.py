"""Laws of mixing matrices and their spectra, for every topology in the registry."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from powergossip import topologies
from powergossip.topologies import (
    TOPOLOGIES,
    UNDIRECTED,
    Round,
    Topology,
    make,
    matchings,
    spectra,
    undirected,
)

VARYING = {
    "one-peer-exponential",
    "one-peer-equi",
    "base-graph",
    "random-matching",
    "epidemic",
    "round-robin",
}
DIRECTED = {
    "unidirectional-ring",
    "exponential",
    "equi-static",
    "one-peer-exponential",
    "one-peer-equi",
    "epidemic",
}
SIZES = (1, 2, 3, 4, 5, 8, 16, 32)


def accepts(name: str, n_workers: int) -> bool:
    if name == "social-network":
        return n_workers == 32
    return name != "hypercube" or n_workers & (n_workers - 1) == 0


def registered(name: str) -> Iterator[Topology]:
    """A topology of the registry with each number of workers."""
    return (make(name, n, seed=3) for n in SIZES if accepts(name, n))


def matrices(topology: Topology) -> list[np.ndarray]:
    """W of every round of the period."""
    return [r.matrix().toarray() for r in topology.rounds]


def steps_together(topology: Topology, diffusion_rate: float, steps: int) -> np.ndarray:
    """The product of the matrices of this number of steps of plain gossip."""
    product = np.eye(topology.n_workers)
    for W in (matrices(topology) * steps)[:steps]:
        product = (1 - diffusion_rate) * product + diffusion_rate * W @ product
    return product


def distance_kept(topology: Topology, diffusion_rate: float, steps: int) -> float:
    """The worst-case factor of this number of steps on the distance to the mean."""
    product = steps_together(topology, diffusion_rate, steps)
    return float(np.linalg.norm(product - product.mean(axis=0), 2))


@st.composite
def connected_graphs(draw: st.DrawFn) -> nx.Graph:
    """A random tree with random further edges, and nodes in any order."""
    n = draw(st.integers(2, 12))
    graph = nx.empty_graph(draw(st.permutations(range(n))))
    graph.add_edges_from((i, draw(st.integers(0, i - 1))) for i in range(1, n))
    worker = st.integers(0, n - 1)
    graph.add_edges_from(draw(st.lists(st.tuples(worker, worker), max_size=20)))
    return graph


# Laws over the registry


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_registered_topologies_mix(name: str) -> None:
    for topology in registered(name):
        n = topology.n_workers
        assert topology.name == name
        assert topology.period == len(topology.rounds)
        assert topology.period == 1 or name in VARYING
        assert topology.row_stochastic == (name == "epidemic")
        for t, W in enumerate(matrices(topology)):
            assert topology.round(t + topology.period) is topology.rounds[t]
            assert W.shape == (n, n)
            assert (W >= 0).all()
            assert (np.diag(W) > 0).all()
            np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
            if not topology.row_stochastic:
                np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
        assert topology.symmetric == all(np.allclose(W, W.T) for W in matrices(topology))
        assert topology.symmetric or name in DIRECTED
        averaged = np.linalg.matrix_power(steps_together(topology, 1.0, topology.period), 20_000)
        wanted = averaged.mean(axis=0) if topology.row_stochastic else 1 / n
        np.testing.assert_allclose(averaged, np.broadcast_to(wanted, (n, n)), atol=1e-9)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_sources_and_targets_are_the_rows_and_columns(name: str) -> None:
    for topology in registered(name):
        n = topology.n_workers
        heard: list[set[int]] = [set() for _ in range(n)]
        for r in topology.rounds:
            W = r.matrix().toarray()
            np.fill_diagonal(W, 0)
            for i in range(n):
                assert r.sources(i) == [(j, W[i, j]) for j in range(n) if W[i, j] > 0]
                assert r.targets(i) == [(j, W[j, i]) for j in range(n) if W[j, i] > 0]
                heard[i].update(j for j, _ in r.sources(i))
        assert topology.degrees.tolist() == [len(of) for of in heard]
        pairs = {(min(i, j), max(i, j)) for i in range(n) for j in heard[i]}
        assert [tuple(pair) for pair in topology.edges.tolist()] == sorted(pairs)
        assert topology.union.shape == (n, n)
        assert topology.union.indices.tolist() == [j for of in heard for j in sorted(of)]
        assert set(topology.union.data.tolist()) <= {1.0}
        first = topology.summary().splitlines()[0]
        assert first.startswith(f"{name}: {n} worker")
        assert (f"{topology.period} rounds" in first) == (topology.period > 1)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_step_contracts_as_predicted(name: str) -> None:
    for topology in registered(name):
        for rate in (0.5, 1.0):
            kept = distance_kept(topology, rate, topology.period)
            assert kept == pytest.approx(topology.contraction(rate) ** topology.period, abs=1e-9)


def test_a_summary_in_full() -> None:
    assert make("chain", 8).summary().splitlines() == [
        "chain: 8 workers, 7 edges",
        "  neighbors per worker           1 to 2",
        "  diameter                       7 hops",
        "  spectral gap of I - W          0.050747   (largest eigenvalue 1.28259)",
        "  best diffusion rate            1.500000   (plain gossip diverges above 1.559349)",
        "  contraction per step           0.923880 at that rate, 0.949253 at rate 1",
        "  Chebyshev bound                0.668179",
    ]
    for name, n, parts in (
        ("exponential", 8, ["20 edges, directed", "0.500000 at rate 1"]),
        ("base-graph", 6, ["7 edges, 4 rounds", "0 to 1 per round, 2 to 3 in all"]),
        ("base-graph", 6, ["averages exactly after its period of 4 rounds"]),
        ("one-peer-exponential", 3, ["2 rounds, directed", "0.500000 at rate 1, the mean of"]),
        ("epidemic", 8, ["row-stochastic"]),
        ("round-robin", 3000, ["not computed"]),
    ):
        assert all(part in make(name, n).summary() for part in parts), name


@pytest.mark.parametrize(
    "name",
    [
        *("watts-strogatz", "random-regular", "equi-static", "random-matching"),
        *("one-peer-equi", "epidemic", "round-robin"),
    ],
)
def test_random_graphs_depend_on_the_seed_only(name: str) -> None:
    options: dict[str, object] = {"graph": "random-regular"} if name == "round-robin" else {}
    drawn = [make(name, 32, seed=seed, options=options) for seed in (0, 0, 1)]
    first, again, other = [[r.weights.indices.tolist() for r in t.rounds] for t in drawn]
    assert first == again != other


# Which graph it is


@pytest.mark.parametrize(
    ("name", "n", "degrees"),
    [
        ("ring", 8, [2] * 8),
        ("ring", 2, [1, 1]),
        ("chain", 4, [1, 2, 2, 1]),
        ("star", 4, [3, 1, 1, 1]),
        ("fully-connected", 5, [4] * 5),
        ("torus", 7, [2] * 7),
        ("torus", 6, [3] * 6),
        ("binary-tree", 8, [1, 3, 3, 3, 1, 1, 1, 1]),
        ("double-binary-tree", 8, [2, 4, 3, 4, 4, 3, 4, 2]),
        ("exponential", 6, [3] * 6),
        ("equi-static", 9, [4] * 9),
        ("random-regular", 3, [2] * 3),
    ],
)
def test_degrees(name: str, n: int, degrees: list[int]) -> None:
    assert make(name, n).degrees.tolist() == degrees


def test_neighbors() -> None:
    """The torus of eight is 2 × 4. Neighbors in a hypercube differ in one bit."""
    lattice = make("watts-strogatz", 10, options={"degree": 6, "rewiring": 0})
    assert [j for j, _ in lattice.round(0).sources(0)] == [1, 2, 3, 7, 8, 9]
    peers = make("one-peer-exponential", 6)
    assert [r.sources(0) for r in peers.rounds] == [[(5, 0.5)], [(4, 0.5)], [(2, 0.5)]]
    assert peers.round(5).targets(0) == [(4, 0.5)]
    assert make("unidirectional-ring", 4).round(0).sources(0) == [(3, 0.5)]
    assert make("unidirectional-ring", 4).round(0).targets(0) == [(1, 0.5)]
    assert make("exponential", 8).round(0).sources(0) == [(4, 0.25), (6, 0.25), (7, 0.25)]
    assert make("exponential", 8).round(0).targets(0) == [(1, 0.25), (2, 0.25), (4, 0.25)]
    torus: nx.Graph = nx.Graph(make("torus", 8).edges.tolist())
    assert nx.is_isomorphic(torus, nx.grid_2d_graph(2, 4, periodic=True))
    assert [j for j, _ in make("torus", 8).round(0).sources(0)] == [1, 3, 4]
    cube = make("hypercube", 16).edges.tolist()
    assert all((a ^ b).bit_count() == 1 for a, b in cube)
    assert len(cube) == 32


# Spectra. Numbers: ALGORITHMS.md, facts to test against.


@pytest.mark.parametrize(
    ("name", "n", "rate", "contraction"),
    [
        ("ring", 4, 1.0, 1 / 3),
        ("ring", 16, 1.4450, 0.92667),
        ("torus", 16, 1.0, 0.6),
        ("fully-connected", 8, 1.0, 0.0),
        ("ring", 1, 1.0, 0.0),
    ],
)
def test_best_diffusion_rates(name: str, n: int, rate: float, contraction: float) -> None:
    topology = make(name, n)
    best = topology.best_diffusion_rate
    assert best == pytest.approx(rate, abs=5e-5)
    assert topology.contraction(best) == pytest.approx(contraction, abs=5e-6)


def test_known_spectra() -> None:
    ring = make("ring", 8)
    np.testing.assert_allclose(
        ring.eigenvalues,
        2 / 3 * (1 - np.cos(2 * np.pi * np.array([0, 1, 1, 2, 2, 3, 3, 4]) / 8)),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        ring.distinct_eigenvalues, [0.1953, 0.6667, 1.1381, 1.3333], atol=5e-5
    )
    assert ring.best_diffusion_rate == pytest.approx(6 / (6 - math.sqrt(2)))
    assert ring.contraction() == pytest.approx(0.804738, abs=5e-7)
    assert ring.chebyshev_contraction == pytest.approx(0.446463, abs=5e-7)
    assert make("ring", 16).chebyshev_contraction == pytest.approx(0.673514, abs=5e-7)
    metropolis = make("social-network", 32)
    assert metropolis.spectral_gap == pytest.approx(0.0821, abs=5e-5)
    assert metropolis.largest_eigenvalue == pytest.approx(1.4343, abs=5e-5)
    assert len(metropolis.edges) == 89
    assert make("unidirectional-ring", 8).contraction() == pytest.approx(math.cos(math.pi / 8))
    assert make("exponential", 8).contraction() == pytest.approx(0.5)


def test_uniform_weights() -> None:
    star = undirected("star", nx.star_graph(3), weights=topologies.uniform)
    W = [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0, 0], [0.25, 0, 0.75, 0], [0.25, 0, 0, 0.75]]
    np.testing.assert_allclose(star.round(0).matrix().toarray(), W)


@pytest.mark.parametrize("name", [name for name in UNDIRECTED if accepts(name, 8)])
def test_plain_gossip_converges_below_the_largest_rate_and_diverges_above(name: str) -> None:
    topology = make(name, 8, seed=3)
    largest = topology.largest_diffusion_rate
    assert largest == pytest.approx(2 / max(np.linalg.eigvalsh(np.eye(8) - matrices(topology)[0])))
    assert topology.best_diffusion_rate < largest
    assert distance_kept(topology, 0.99 * largest, 2000) < 1e-3
    assert distance_kept(topology, 1.01 * largest, 2000) > 1e3


def test_the_largest_rates_of_directed_and_time_varying_graphs() -> None:
    """The statements of docs/topologies.md. None of these graphs has a λ_max.

    Directed: 2 Re μ/|μ|² over the eigenvalues μ of I − W, which is less than the bound of the
    symmetric part (W + Wᵀ)/2. Pairs that average: 2. Otherwise the smallest bound of a round is
    safe, but not sharp.
    """

    def converges(topology: Topology, rate: float) -> bool:
        period = steps_together(topology, rate, topology.period)
        return bool(abs(np.linalg.eigvals(period - 1 / topology.n_workers)).max() < 1)

    def limit_is(name: str, n: int, rate: float) -> bool:
        topology = make(name, n, seed=3)
        return converges(topology, 0.999 * rate) and not converges(topology, 1.001 * rate)

    for n, expected in ((5, None), (6, 12 / 7), (8, 1.6930)):
        (W,) = matrices(make("exponential", n))
        eigenvalues = 1 - np.linalg.eigvals(W)
        mu = eigenvalues[abs(eigenvalues) > 1e-9]
        limit = min(2 * mu.real / abs(mu) ** 2)
        assert expected is None or limit == pytest.approx(expected, abs=1e-4)
        assert limit_is("exponential", n, limit)
    (W,) = matrices(make("exponential", 6))
    assert 2 / np.linalg.eigvalsh(np.eye(6) - (W + W.T) / 2)[-1] == pytest.approx(16 / 9)
    for name in ("unidirectional-ring", "one-peer-exponential", "random-matching", "round-robin"):
        assert limit_is(name, 8, 2.0)

    base = make("base-graph", 5)
    bounds = [2 / np.linalg.eigvalsh(np.eye(5) - W)[-1] for W in matrices(base)]
    assert min(bounds) == pytest.approx(1.25)
    assert converges(base, 1.25)
    assert converges(base, 1.55)
    assert not converges(base, 1.65)
    spectrum = "largest_diffusion_rate best_diffusion_rate eigenvalues chebyshev_contraction"
    for name in DIRECTED | VARYING:
        kind = "changes from round to round" if name in VARYING else "is directed"
        for of_symmetric in spectrum.split():
            with pytest.raises(ValueError, match=f'"{name}" {kind}'):
                getattr(make(name, 8), of_symmetric)


@pytest.mark.long
@given(connected_graphs())
@settings(max_examples=30, deadline=None)
def test_every_connected_graph_averages(graph: nx.Graph) -> None:
    topology = undirected("drawn", graph)
    n = topology.n_workers
    for i in range(n):
        sources = {j for j, _ in topology.round(0).sources(i)}
        assert sources == set(graph[i]) - {i}
        for j, weight in topology.round(0).sources(i):
            assert weight == pytest.approx(1 / (1 + topology.degrees[[i, j]].max()))
    W = topology.round(0).matrix().toarray()
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
    assert 0 < topology.spectral_gap <= topology.largest_eigenvalue < 2
    np.testing.assert_allclose(np.linalg.matrix_power(W, 2**14), 1 / n, atol=1e-9)
    for rate in (1.0, topology.best_diffusion_rate):
        measured = distance_kept(topology, rate, 3) ** (1 / 3)
        assert measured == pytest.approx(topology.contraction(rate), abs=1e-5)
    best = topology.contraction(topology.best_diffusion_rate)
    assert topology.chebyshev_contraction <= best + 1e-12
    assert all(best <= topology.contraction(rate) + 1e-12 for rate in (0.3, 0.9, 1.0, 1.4))


@pytest.mark.long
@pytest.mark.parametrize(("name", "n"), [("ring", 2400), ("binary-tree", 2100), ("star", 2050)])
def test_large_spectra_equal_dense_ones(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make(name, n // 8)
    dense = small.spectral_gap, small.largest_eigenvalue
    monkeypatch.setattr(spectra, "DENSE", 1)
    sparse = make(name, n // 8)
    assert sparse.spectral_gap == pytest.approx(dense[0], rel=1e-6)
    assert sparse.largest_eigenvalue == pytest.approx(dense[1], rel=1e-6)
    if name == "ring":
        gap = 2 / 3 * (1 - math.cos(2 * math.pi / n))
        assert make(name, n).spectral_gap == pytest.approx(gap, rel=1e-4)
        assert make(name, n).largest_eigenvalue == pytest.approx(4 / 3, rel=1e-6)
    with pytest.raises(ValueError, match=f"{n // 8} workers"):
        _ = sparse.eigenvalues


@pytest.mark.long
def test_ten_thousand_workers_take_seconds() -> None:
    topology = make("random-regular", 10_000)
    # Friedman's theorem: the adjacency matrix' second eigenvalue is near 2√3.
    assert topology.spectral_gap == pytest.approx((4 - 2 * math.sqrt(3)) / 5, rel=0.02)
    assert make("epidemic", 10_000).n_workers == 10_000


# Topologies that change from round to round


def talks(topology: Topology) -> np.ndarray:
    """How often i hears j in a period: [worker, worker]."""
    return np.sum([r.weights.toarray() > 0 for r in topology.rounds], axis=0)


@pytest.mark.parametrize("name", ["random-matching", "round-robin", "base-graph"])
def test_a_worker_talks_to_one_other_at_most(name: str) -> None:
    for topology in registered(name):
        for r in topology.rounds:
            heard = np.diff(r.weights.indptr)
            assert heard.max() <= 1
            if name != "base-graph":
                assert (r.weights.data == 0.5).all()
            if name == "random-matching":
                assert (heard == 0).sum() == topology.n_workers % 2


@pytest.mark.long
def test_random_rounds_are_uniform() -> None:
    """Each pair of workers is as frequent as any other."""
    for n in (5, 6):  # of five workers each is idle as often as with any other
        often = talks(make("random-matching", n, seed=1, options={"period": 400}))
        pairs = often[~np.eye(n, dtype=bool)]
        assert np.abs(pairs - 400 / 5).max() < 5 * math.sqrt(400 / 5 * 4 / 5)
    for s in (1, 3):
        often = talks(make("epidemic", 5, seed=1, options={"s": s, "period": 400}))
        share, pairs = s / 4, often[~np.eye(5, dtype=bool)]
        assert np.abs(pairs - 400 * share).max() < 5 * math.sqrt(400 * share * (1 - share))


def test_random_rounds_are_drawn_until_they_connect() -> None:
    # Two matchings of eight workers are one ring with probability 48/105; Topology rejects others.
    rings = [make("random-matching", 8, seed=seed, options={"period": 2}) for seed in range(12)]
    assert {len(ring.edges) for ring in rings} == {8}
    for seed in range(4):
        assert make("epidemic", 6, seed=seed, options={"s": 1, "period": 2}).period == 2


def test_one_peer_exponential_is_exact_for_powers_of_two() -> None:
    for n in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32):
        topology = make("one-peer-exponential", n)
        assert topology.period == math.ceil(math.log2(n))
        assert topology.averages_exactly == (n & (n - 1) == 0)


@pytest.mark.long
@pytest.mark.parametrize("k", range(1, 6))
def test_base_graphs_average_any_number_exactly(k: int) -> None:
    for n in range(1, 33):
        topology = make("base-graph", n, options={"k": k})
        assert topology.symmetric
        np.testing.assert_allclose(
            steps_together(topology, 1.0, topology.period), 1 / n, atol=1e-12
        )
        assert max(np.diff(r.weights.indptr).max() for r in topology.rounds) <= k
        assert topology.period <= 2 * math.log(n, k + 1) + 2


def test_rounds_of_base_graphs() -> None:
    expected = {
        1: {3: 3, 5: 5, 6: 4, 7: 5, 8: 3, 9: 7, 12: 5, 15: 7, 25: 9},
        2: {12: 3, 15: 4, 17: 5, 30: 5},
        3: {16: 2},
        4: {22: 4, 25: 2},  # 22: the simple graph; factored it takes 5
        5: {12: 2},
    }
    for k, rounds in expected.items():
        assert {n: make("base-graph", n, options={"k": k}).period for n in rounds} == rounds


def test_remaining_workers_of_a_base_graph_average_in_groups() -> None:
    """Step 2 of Takezawa et al. (2023), algorithm 2, where k + 1 does not divide their number."""

    def neighbors(n: int, k: int, t: int) -> list[list[int]]:
        r = make("base-graph", n, options={"k": k}).round(t)
        return [[j for j, _ in r.sources(i)] for i in range(n)]

    # 5 = 4 + 1, k = 3: worker 4 is paired with 0, and three workers remain.
    assert neighbors(5, 3, 1) == [[4], [2, 3], [1, 3], [1, 2], [0]]
    # 13 = 9 + 3 + 1, k = 2: of workers 0 … 8, four are paired, three and two remain. Then one of
    # workers 9, 10, 11 is paired and two remain, while 0 … 8 average along the axes of 3 × 3.
    pairs = [[9], [10], [11], [12]]
    assert neighbors(13, 2, 2) == [*pairs, [5, 6], [4, 6], [4, 5], [8], [7], [0], [1], [2], [3]]
    triples = [[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4], [7, 8], [6, 8], [6, 7]]
    assert neighbors(13, 2, 3) == [*triples, [12], [11], [10], [9]]
    weights = make("base-graph", 13, options={"k": 2}).round(2).weights
    assert weights[4, 5] == pytest.approx(1 / 3)
    assert weights[7, 8] == pytest.approx(1 / 2)
    assert weights[0, 9] == pytest.approx(9 / 13)


@pytest.mark.parametrize(("n", "s"), [(2, None), (8, None), (8, 1), (8, 7)])
def test_epidemics_send_to_s_and_average_what_arrives(n: int, s: int | None) -> None:
    topology = make("epidemic", n, seed=2, options={"s": s})
    for r in topology.rounds:
        assert [len(r.targets(j)) for j in range(n)] == [s or min(2, n - 1)] * n
        for i in range(n):
            assert {weight for _, weight in r.sources(i)} <= {1 / (1 + len(r.sources(i)))}
    assert topology.averages_exactly == (n == 2 or s == 7)


@pytest.mark.parametrize("n", range(3, 9))
def test_matchings_have_every_edge_once(n: int) -> None:
    """Of crowded graphs, where a color free at both ends is rare."""
    matches_every_edge_once(make("fully-connected", n))
    matches_every_edge_once(make("fully-connected", 2 * n + 1))
    for seed in range(3):
        graph = nx.gnp_random_graph(2 * n, 0.7, seed=seed)
        graph.add_edges_from(nx.path_graph(2 * n).edges())
        matches_every_edge_once(undirected("crowded", graph))
        sides = nx.bipartite.random_graph(n, n, 0.7, seed=seed)
        sides.add_edges_from((i, n + i) for i in range(n))
        sides.add_edges_from((i, n + i - 1) for i in range(1, n))
        matches_every_edge_once(undirected("two sides", sides))


def matches_every_edge_once(static: Topology) -> None:
    topology = Topology("matchings", matchings(static))
    assert (talks(topology) == (static.round(0).weights.toarray() > 0)).all()
    for r in topology.rounds:
        assert np.diff(r.weights.indptr).max() == 1
        assert (r.weights.data == 0.5).all()
    largest = static.degrees.max()
    bipartite = nx.is_bipartite(nx.Graph(static.edges.tolist()))
    assert largest <= topology.period <= (largest if bipartite else largest + 1)


def test_round_robin_takes_any_graph(tmp_path: Path) -> None:
    assert [r.sources(0) for r in make("round-robin", 4).rounds] == [[(1, 0.5)], [(3, 0.5)]]
    torus = make("round-robin", 16, options={"graph": "torus"})
    assert torus.period == 4
    assert torus.edges.tolist() == make("torus", 16).edges.tolist()
    path = write(tmp_path, "a.edgelist", "Zoe Ada\nBea Zoe\n")
    topology = make("round-robin", 3, options={"graph": path})
    assert f"matchings of {path}; workers are the sorted names" in topology.summary()


@pytest.mark.parametrize(
    ("name", "n"), [*((name, 48) for name in sorted(VARYING)), ("one-peer-exponential", 64)]
)
def test_large_periods_equal_dense_ones(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = make(name, n)
    kept, exact = dense.contraction() ** dense.period, dense.averages_exactly
    monkeypatch.setattr(spectra, "DENSE", 1)
    sparse = make(name, n)
    assert sparse.contraction() ** dense.period == pytest.approx(kept, rel=1e-4, abs=1e-12)
    assert sparse.averages_exactly == exact
    assert exact == (name == "base-graph" or (name == "one-peer-exponential" and n == 64))


# Rounds


def matching(n: int, pairs: list[tuple[int, int]]) -> Round:
    weights = np.zeros((n, n))
    for i, j in pairs:
        weights[i, j] = weights[j, i] = 0.5
    return Round(csr_array(weights))


def test_rounds_must_connect_all_workers() -> None:
    rounds = (matching(4, [(0, 1), (2, 3)]), matching(4, [(0, 2), (1, 3)]))
    assert len(Topology("square", rounds).edges) == 4
    with pytest.raises(ValueError, match=r'"half" is not connected: .* 2 components, workers 2, 3'):
        Topology("half", rounds[:1])
    rows = [[0, 0, 0], [0.5, 0, 0], [0, 0.5, 0]]
    with pytest.raises(
        ValueError, match=r'"one way" is not strongly connected: .* edges in the other direction'
    ):
        Topology("one way", (Round(csr_array(np.array(rows))),), row_stochastic=True)


def test_row_stochastic_rounds_must_be_marked() -> None:
    weights = csr_array(np.array([[0, 0.5, 0], [0, 0, 0.5], [0.25, 0, 0]]))
    with pytest.raises(ValueError, match="not doubly stochastic in round 1"):
        Topology("epidemic", (*make("ring", 3).rounds, Round(weights)))
    topology = Topology("epidemic", (Round(weights),), row_stochastic=True)
    W = topology.round(0).matrix().toarray()
    np.testing.assert_allclose(W.sum(axis=1), 1)
    beside_mean = (np.eye(3) - 1 / 3) @ W @ (np.eye(3) - 1 / 3)
    assert topology.contraction() == pytest.approx(np.linalg.norm(beside_mean, 2))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[0, -0.1], [-0.1, 0]], "negative"),
        ([[0, math.nan], [0.5, 0]], "not a number"),
        ([[0, 0.7, 0.7], [0.5, 0, 0], [0.5, 0, 0]], r"worker 0's .* 1\.4"),
        ([[0.5, 0.5], [0.5, 0.5]], "worker 0 is its own neighbor"),
        ([[0, 0.5, 0.5]], "square, not 1 × 3"),
    ],
)
def test_bad_weights_are_rejected(weights: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Round(csr_array(np.array(weights)))


def test_a_round_leaves_its_arguments_alone() -> None:
    weights = csr_array(
        (np.array([0.2, 0.0, 0.3]), np.array([2, 1, 1]), np.array([0, 3, 3, 3])), shape=(3, 3)
    )
    r = Round(weights)
    assert weights.indices.tolist() == [2, 1, 1]
    assert r.sources(0) == [(1, 0.3), (2, 0.2)]


def test_nodes_with_names_are_workers_in_their_order() -> None:
    """Also names that are integers, unless they are the indices of workers."""
    for edges in ([("c", "a"), ("a", "b")], [(7, 3), (3, 5)], [(2, 1), (1, 3)]):
        topology = undirected("drawn", nx.Graph(edges))
        assert [len(topology.round(0).sources(i)) for i in range(3)] == [1, 2, 1]
    topology = undirected("drawn", nx.Graph([(2, 0), (0, 1)]))
    assert [len(topology.round(0).sources(i)) for i in range(3)] == [2, 1, 1]
    for graph, words in (
        (nx.DiGraph([(0, 1), (1, 0)]), "is directed: use an undirected graph"),
        (nx.Graph([(0, 1), (2, 2)]), "is not connected"),
        (nx.Graph(), "has no workers"),
    ):
        with pytest.raises(ValueError, match=f'topology "drawn" {words}'):
            undirected("drawn", graph)


# Files


@pytest.mark.parametrize(
    ("write", "suffix"),
    [
        (nx.write_edgelist, ".edgelist"),
        (nx.write_edgelist, ""),
        (nx.write_adjlist, ".adjlist"),
        (nx.write_adjlist, ".txt"),
    ],
)
@given(graph=connected_graphs())
@settings(max_examples=8, deadline=None)
def test_files_of_edges_come_back(
    graph: nx.Graph, write: Any, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    path = tmp_path_factory.mktemp("graph") / f"graph{suffix}"
    write(graph, path)
    same_as(make(str(path), len(graph)), undirected("drawn", graph))


def same_as(found: Topology, wanted: Topology) -> None:
    assert abs(found.round(0).weights - wanted.round(0).weights).sum() == 0
    assert not found.note


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_may_have_comments_and_stand_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "friends", "# who talks\n0 1 # often\n\n1\t2\r\n")
    monkeypatch.chdir(tmp_path)
    assert make("friends", 3).edges.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.edgelist", "0 1\n1 0\n2 1\n"),
        ("a.txt", "0 1 {'color': 'red'}\n1 2 {}\n"),
        ("a.txt", "\ufeff0 1\n1 2\n"),
        ("a.adjlist", "0 1\n1 0 2\n2 1\n"),
        ("a.edges", "3\n0 1\n1 0\n1 2\n2 1\n"),  # of decentralizepy
        ("a.adj", "3\n1\n0 2\n1\n"),
        ("a.edgelist", "3\n0 1 0.5\n1 2 0.5\n"),
        ("a.txt", "source target\n0 1\n1 2\n"),
        ("out.konect", "% sym unweighted\n% 2 3 3\n1 2\n2 3\n"),
        ("a.graph", "% METIS\n3 2\n2\n1 3\n2\n"),
        ("a.gml", 'graph [\nnode [\nid 0\nlabel "A b"\n]\nnode [\nid 1\n]\nnode [\nid 2\n]\n'
                  "edge [\nsource 1\ntarget 0\nspeed 2.5\n]\nedge [\nsource 1\ntarget 2\n]\n]\n"),
        ("a.net", "*Vertices 3\n1 \"0\"\n2 \"1\"\n3 \"2\"\n*Edges\n1 2\n2 3\n"),
        ("a.mtx", "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 3\n2 1\n3 2\n3 3\n"),
    ],
)  # fmt: skip
def test_files_in_other_forms(tmp_path: Path, name: str, text: str) -> None:
    assert make(write(tmp_path, name, text), 3).edges.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("suffix", ["gml", "graphml", "gexf"])
def test_files_of_networkx_come_back(suffix: str, tmp_path: Path) -> None:
    path, graph = tmp_path / f"a.{suffix}", nx.cycle_graph(4, create_using=nx.DiGraph)
    getattr(nx, f"write_{suffix}")(graph, path)
    same_as(make(str(path), 4), make("ring", 4))
    found = make(str(path), 4, options={"directed": True})
    same_as(found, make("unidirectional-ring", 4))


def test_workers_are_the_sorted_names_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.edgelist", "Zoe Ada\nBea Zoe\n")
    topology = make(path, 3)
    assert topology.edges.tolist() == [[0, 2], [1, 2]]
    assert "0 is Ada, 1 is Bea, 2 is Zoe" in topology.summary()
    topology = make(write(tmp_path, "b.edgelist", "10 9\n9 2\n"), 3)
    assert topology.edges.tolist() == [[0, 1], [1, 2]]
    assert topology.note.endswith(": 0 is 2, 1 is 9, 2 is 10")


@pytest.mark.parametrize(
    ("name", "text", "n", "message"),
    [
        ("a.edgelist", "0 1\n1 3\n", 4, "^n_workers=4: use 3; .*a.edgelist .*worker 2"),
        ("a.edgelist", "5 10\n10 2000000000\n", 4, "^n_workers=4: use 3; .* has 3 workers$"),
        ("a.edgelist", "0 1\n\n0 1 2 3\n", 4, 'line 3: "0 1 2 3" is not an edge'),
        ("a.adjlist", "0 1\n1 (2)\n", 3, 'line 2: "\\(2\\)" is not the name of a worker'),
        ("a.edgelist", "0 1 1\n1 2 0.5\n", 3, "line 2: the weight 0.5 differs from 1"),
        ("a.txt", "0 1 {'weight': 1}\n1 2 {'a': 1, 'weight': -2}\n", 3, "line 2: the weight -2"),
        ("a.edgelist", "0 1\n1 1\n", 2, "line 2: worker 1 is listed as its own neighbor"),
        ("a.edgelist", "b a\n\nc a\nb a\n", 3, "line 4: the edge b a is also in line 1"),
        ("a.txt", "# nothing\n", 2, "a.txt holds no edges"),
        ("a.adjlist", "7\n0 1\n1 2\n", 4, "worker 7 has no neighbor; use two workers"),
        ("a.txt", "0.0e+00 1.0e+00\n1.0e+00 0.0e+00\n", 2, 'line 1: "0.0e.00" .* two workers'),
        ("a.txt", "0 1 0 1\n1 0 1 0\n0 1 0 1\n1 0 1 0\n", 4, "line 1: worker 0 .* two workers"),
        ("a.txt", "*Vertices 2\n*Edges\n1 2\n", 2, "line 1: .*Vertices.* or .*\\.net"),
        ("a.gml", "graph [", 2, "a.gml cannot be read"),
    ],
)
def test_bad_files_are_rejected(tmp_path: Path, name: str, text: str, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(write(tmp_path, name, text), n)
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match="picture cannot be read: it is not text"):
        make(str(tmp_path / "picture"), 4)


# Trees, for relays


@pytest.mark.parametrize("name", ["chain", "star", "binary-tree", "double-binary-tree"])
def test_trees_span_the_graph_with_its_edges(name: str) -> None:
    """But for the one in the middle of an odd number, a worker is a leaf in one of two trees."""
    for n in (1, 2, 3, 7, 8, 33):
        topology = make(name, n)
        trees = topology.trees
        assert trees is not None
        assert len(trees) == (0 if n == 1 else 2 if name == "double-binary-tree" else 1)
        edges = {(i, j) for i, j in topology.edges.tolist()}
        degrees = []
        for tree in trees:
            graph = nx.Graph(tree)
            assert nx.is_tree(graph)
            assert sorted(graph) == list(range(n))
            assert list(tree) == sorted(tree)
            degrees.append(dict(graph.degree))
        assert n == 1 or set().union(*trees) == edges
        for i in range(n) if len(trees) == 2 else ():
            assert max(degree[i] for degree in degrees) <= 3
            middle = 2 * i == n - 1
            assert min(degree[i] for degree in degrees) == (2 if middle else 1)
            assert degrees[0][i] == degrees[1][n - 1 - i]


def test_trees_are_checked() -> None:
    ring = make("ring", 4).rounds
    assert Topology("ring", ring, trees=(((0, 1), (1, 2), (2, 3)),)).trees is not None
    assert Topology("ring", ring).trees is None
    path = ((0, 1), (1, 2))
    assert undirected("drawn", nx.cycle_graph(3), trees=(path,)).trees == (path,)
    for tree in (
        ((0, 1), (1, 2)),
        ((0, 1), (0, 2), (2, 3)),
        ((0, 1), (1, 2), (1, 2)),
        ((0, 1), (0, 3), (1, 2), (2, 3)),
    ):
        with pytest.raises(ValueError, match='"ring": a tree'):
            Topology("ring", ring, trees=(tree,))
    for name in ("ring", "torus", "exponential", "random-matching"):
        assert make(name, 8).trees is None


# EquiTopo, Song et al. (2022)


@pytest.mark.parametrize("n", [8, 16])
def test_one_random_peer_contracts_by_one_half_for_any_size(n: int) -> None:
    """E‖ΠWx‖² = ½(1 − 1/n)‖Πx‖² over all shifts: a period of n − 1 rounds has each once."""
    topology = make("one-peer-equi", n, options={"period": n - 1})
    shifts = sorted(-r.sources(0)[0][0] % n for r in topology.rounds)
    assert shifts == list(range(1, n))
    mean = sum(W.T @ W for W in matrices(topology)) / (n - 1)
    beside = np.eye(n) - 1 / n
    np.testing.assert_allclose(beside @ mean @ beside, (1 - 1 / n) / 2 * beside, atol=1e-12)


@pytest.mark.parametrize(("n", "degree"), [(8, 4), (64, 8)])
def test_the_best_shifts_contract_as_the_theorem_expects(n: int, degree: int) -> None:
    """Weights of the paper; E‖W − J‖² = O(ln n / degree), and the best sample is below 1."""
    topology = make("equi-static", n, options={"degree": degree})
    W = matrices(topology)[0]
    np.testing.assert_allclose(np.diag(W), 1 / n)
    assert topology.contraction() == pytest.approx(np.linalg.norm(W - 1 / n, 2))
    assert topology.contraction() ** 2 < math.log(n) / degree
    first = make("equi-static", n, seed=1, options={"degree": degree}).contraction()
    assert topology.contraction() == pytest.approx(first, rel=0.25)


# Weights


@pytest.mark.parametrize("weights", topologies.WEIGHTS)
@pytest.mark.parametrize(
    ("name", "n"), [("watts-strogatz", 24), ("social-network", 32), ("star", 6)]
)
def test_weights_are_symmetric_and_doubly_stochastic(name: str, n: int, weights: str) -> None:
    topology = make(name, n, seed=3, options={"weights": weights})
    (W,) = matrices(topology)
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
    assert (W >= 0).all()
    assert topology.edges.tolist() == make(name, n, seed=3).edges.tolist()


@pytest.mark.parametrize(("name", "n"), [("ring", 5), ("fully-connected", 6)])
def test_no_other_constant_is_better_than_the_best(name: str, n: int, tmp_path: Path) -> None:
    constant, plain = make(name, n, options={"weights": "constant"}), make(name, n)
    assert constant.best_diffusion_rate == pytest.approx(1)
    best = plain.contraction(plain.best_diffusion_rate)
    assert constant.contraction() == pytest.approx(best, abs=1e-9)
    path = tmp_path / "a.edgelist"
    nx.write_edgelist(nx.Graph(plain.edges.tolist()), path)
    same_as(make(str(path), n, options={"weights": "constant"}), constant)


def test_equal_fingerprints_are_those_of_equal_graphs() -> None:
    """Up to rounding, which may differ between computers."""
    w = make("watts-strogatz", 8).round(0).weights

    def fingerprint(data: np.ndarray) -> str:
        weights = csr_array((data, w.indices, w.indptr), shape=w.shape)
        return Topology("", (Round(weights),), row_stochastic=True).fingerprint

    rising = np.linspace(0.1, 0.2, w.nnz)
    assert fingerprint(rising) == fingerprint(rising * (1 - 1e-13))
    found = [make(name, 5).fingerprint for name in ("ring", "chain", "star", "exponential")]
    found += [fingerprint(rising), fingerprint(0.99 * rising), fingerprint(rising[::-1])]
    assert len({*found}) == len(found)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda n, seed: make("ring", 7), "returned 7 workers; return a Topology of 8 workers"),
        (lambda n, seed: nx.cycle_graph(n), "returned a Graph"),
        (lambda n, seed: None, "returned a NoneType"),
        (
            lambda n, seed: undirected("mine", nx.gnp_random_graph(n, 0.8)),
            "returned two graphs for one seed; draw random numbers from the seed",
        ),
    ],
)
def test_a_function_of_a_script_makes_a_topology_of_all_workers(
    function: Callable[[int, int], Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOPOLOGIES, "mine", function)
    with pytest.raises(ValueError, match=sentence):
        make("mine", 8)
