"""Drawings and spectra of the topologies, made from the topologies themselves.

    python -m docs.drawings

draws the figures of topologies.md again. A test compares the tables of pages with `tables`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import networkx as nx
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

import topologies
from experiments.results import smaller
from powergossip.topologies import Round, Topology

WORKERS = 16
OWN_SIZE = {"social-network": 32}  # a data set: its number of workers is fixed
UNDIRECTED = list(topologies.UNDIRECTED)
DIRECTED = ["unidirectional-ring", "exponential", "equi-static"]
TIME_VARYING = {  # number of workers in the drawing
    "one-peer-exponential": 8,
    "one-peer-equi": 8,
    "base-graph": 6,
    "random-matching": 8,
    "round-robin": 8,
    "epidemic": 8,
}
ROUNDS = 4  # drawn, of each time-varying topology
COLOR = "#3b6ea5"
GREY = "#767676"  # on light and dark pages
FIGURES = Path(__file__).parent / "figures"


def write(folder: Path) -> None:
    """Write SVG drawings into a folder."""
    parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, str] = {**dict.fromkeys(parts, GREY), "svg.fonttype": "none"}
    matplotlib.rcParams.update({**style, "svg.hashsalt": "topologies"})
    undirected = [_make(name) for name in UNDIRECTED]
    _graphs(undirected, folder / "undirected.svg", columns=3)
    _graphs([_make(name) for name in DIRECTED], folder / "directed.svg", columns=3)
    time_varying = [topologies.make(name, n) for name, n in TIME_VARYING.items()]
    _rounds(time_varying, folder / "time-varying.svg")
    _spectra(undirected, folder / "spectra.svg")


def tables() -> list[str]:
    """The tables of topologies.md."""
    without_spectrum = [_make(name) for name in (*DIRECTED, *TIME_VARYING)]
    spectra = _spectra_table([_make(name) for name in UNDIRECTED])
    return [_weights_table(), spectra, _periods_table(without_spectrum)]


def _make(name: str) -> Topology:
    return topologies.make(name, OWN_SIZE.get(name, WORKERS))


def _circle(workers: range) -> dict[int, np.ndarray]:
    graph: nx.Graph[int] = nx.empty_graph(workers)
    return dict(nx.circular_layout(graph))


def _positions(topology: Topology) -> dict[int, np.ndarray]:
    """worker → point: on a circle, or where the graph has a usual shape, in that."""
    name, n = topology.name, topology.n_workers
    if name == "star":
        return {0: np.zeros(2), **_circle(range(1, n))}
    if name == "chain":
        # In rows, forth and back.
        side = int(np.ceil(np.sqrt(n)))
        return {
            i: np.array([i % side if i // side % 2 == 0 else side - 1 - i % side, -(i // side)])
            for i in range(n)
        }
    if name == "torus":
        side = int(np.sqrt(n))
        points = {}
        for i in range(n):
            # The torus from above, a little turned, so that no two workers coincide.
            along, around = 2 * np.pi * np.array([i // side, i % side]) / side + 0.5
            radius, angle = 1 + 0.45 * np.cos(around), along + 0.25 * np.sin(around)
            points[i] = radius * np.array([np.cos(angle), np.sin(angle)])
        return points
    if name == "binary-tree":
        level = [i.bit_length() for i in range(n)]
        return {
            i: np.array([(i + 0.5) / 2 ** (level[i] - 1) - 1 if i else 0.5, -level[i]])
            for i in range(n)
        }
    if name in ("hypercube", "social-network", "random-regular"):
        graph: nx.Graph[int] = nx.Graph(map(tuple, topology.edges.tolist()))
        return dict(nx.kamada_kawai_layout(graph))
    return _circle(range(n))


def _draw(axes: Axes, round_: Round, positions: dict[int, np.ndarray], title: str) -> None:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(round_.n_workers))
    receivers, senders = round_.weights.nonzero()
    graph.add_edges_from(zip(senders.tolist(), receivers.tolist(), strict=True))
    shown = graph.to_undirected() if round_.symmetric else graph
    nx.draw_networkx(
        shown,
        positions,
        ax=axes,
        node_size=70,
        node_color=COLOR,
        edge_color="#888888",
        width=0.9,
        arrows=True,
        arrowstyle="-" if round_.symmetric else "-|>",
        arrowsize=7,
        font_size=5,
        font_color="white",
    )
    axes.set_title(title, fontsize=8)
    axes.set_axis_off()
    axes.margins(0.12)
    axes.set_aspect("equal" if "tree" not in title else "auto")


def _graphs(chosen: Sequence[Topology], path: Path, columns: int) -> None:
    rows = -(-len(chosen) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(1.6 * columns, 1.7 * rows), squeeze=False, layout="constrained"
    )
    for axes, topology in zip(grid.flat, chosen, strict=False):
        _draw(axes, topology.rounds[0], _positions(topology), topology.name)
    for axes in grid.flat[len(chosen) :]:
        axes.set_axis_off()
    _save(figure, path)


def _rounds(chosen: Sequence[Topology], path: Path) -> None:
    figure, grid = pyplot.subplots(
        len(chosen), ROUNDS, figsize=(4.8, 1.5 * len(chosen)), squeeze=False, layout="constrained"
    )
    for row, topology in zip(grid, chosen, strict=True):
        for t, axes in enumerate(row):
            if t < topology.period:
                title = f"{topology.name}\nround 0" if t == 0 else f"round {t}"
                _draw(axes, topology.round(t), _positions(topology), title)
            else:
                axes.set_axis_off()
    _save(figure, path)


def _spectra(chosen: Sequence[Topology], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(4.8, 3.2), layout="constrained")
    for line, topology in enumerate(reversed(chosen)):
        values = topology.eigenvalues[1:]
        axes.plot(values, [line] * len(values), "|", color=COLOR, markersize=11)
    axes.set_yticks(range(len(chosen)), [t.name for t in reversed(chosen)], fontsize=8)
    axes.set_xlabel("non-zero eigenvalues of I − W", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def _save(figure: pyplot.Figure, path: Path) -> None:
    figure.savefig(path, transparent=True)
    path.write_text(smaller(path.read_text()))
    pyplot.close(figure)


def _spectra_table(chosen: Sequence[Topology]) -> str:
    lines = [
        "| topology | workers | edges | $\\lambda_2$ | $\\lambda_{\\max}$ | $\\gamma^*$ "
        "| $2/\\lambda_{\\max}$ | factor at $\\gamma^*$ | at $\\gamma = 1$ | Chebyshev |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for t in chosen:
        best = t.best_diffusion_rate
        values = [
            t.spectral_gap,
            t.largest_eigenvalue,
            best,
            t.largest_diffusion_rate,
            t.contraction(best),
            t.contraction(1.0),
            t.chebyshev_contraction,
        ]
        cells = [t.name, str(t.n_workers), str(len(t.edges)), *(f"{v + 0.0:.4f}" for v in values)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _weights_table() -> str:
    lines = [
        "| topology | workers | " + " | ".join(f"`{w}`" for w in topologies.WEIGHTS) + " |",
        "| --- | --- |" + " --- |" * len(topologies.WEIGHTS),
    ]
    for name in UNDIRECTED:
        n = OWN_SIZE.get(name, WORKERS)
        chosen = [topologies.make(name, n, options={"weights": w}) for w in topologies.WEIGHTS]
        cells = [name, str(n), *(f"{t.contraction(1.0) + 0.0:.4f}" for t in chosen)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _periods_table(chosen: Sequence[Topology]) -> str:
    lines = [
        "| topology | workers | rounds in a period | factor of a round, γ = 1 |",
        "| --- | --- | --- | --- |",
    ]
    for t in chosen:
        if t.row_stochastic:
            factor = "the mean may move"
        elif t.averages_exactly:
            factor = "exact mean after each period"
        else:
            factor = f"{t.contraction(1.0):.4f}"
        lines.append(f"| {t.name} | {t.n_workers} | {t.period} | {factor} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(FIGURES)
