"""Why is a low rank enough? Singular values of the difference of two neighbors' models.

References:
    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, which shows those of an LSTM.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import tuned_methods
from experiments.study import Outcomes, grid, study, table
from powergossip import presets
from powergossip.runner.runner import Experiment
from powergossip.runs import figures
from powergossip.runs.metrics import last_values, select_rows

if TYPE_CHECKING:
    from pandas import DataFrame

BASE = "wikitext2_lstm"
PUBLISHED = {"PowerGossip, 32 iterations": "power-gossip-32-iterations"}
SMALL = {"D-PSGD": "dpsgd", "PowerGossip, 8 iterations": "power-gossip-8-iterations"}


def published() -> Experiment:
    """The LSTM of 3 × 650 units on WikiText-2, ring of 16, as in choco_lstm_spectrum.py."""
    values = {
        method: presets.values(f"{BASE}/{name}") | {"evaluate_average_model": False, "seed": 10}
        for method, name in PUBLISHED.items()
    }
    return experiment(
        "singular values of neighbors' differences as an LSTM learns WikiText-2",
        values,
        (1, 50, 65, 89),
        ("encoder.weight", "rnn.weight_ih_l1"),
        pairs=((0, 1), (4, 5), (8, 9)),
        processes=16,
    )


def small() -> Experiment:
    """One layer of 128 units on Python's reference texts, ring of 8."""
    values = {
        method: tuned_methods.TOPICS_LSTM
        | {"learning_rate": 10.0, "optimizer_diffusion_rate": 1.0}
        | {key: v for key, v in presets.values(f"{BASE}/{name}").items() if "optimizer" in key}
        for method, name in SMALL.items()
    }
    return experiment(
        "singular values of neighbors' differences, small: an LSTM on Python's reference texts",
        values,
        (1, 2, 3, 5),
        ("encoder.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"),
    )


def experiment(
    title: str,
    values: Mapping[str, Mapping[str, Any]],
    epochs: Sequence[int],
    parameters: Sequence[str],
    pairs: Sequence[tuple[int, int]] = ((0, 1),),
    processes: int = 1,
) -> Experiment:
    logging: dict[str, Any] = {
        "spectrum_logging_epochs": list(epochs),
        "spectrum_logging_params": list(parameters),
        "spectrum_logging_worker_pairs": [list(pair) for pair in pairs],
    }
    methods = {method: {**v, **logging} for method, v in values.items()}
    cases = grid({"seed": 1}, {"method": methods}, processes=processes)

    def report(outcomes: Outcomes, folder: Path) -> str:
        header = [
            "method",
            "parameter",
            "singular values",
            "fraction of the squares: the largest",
            "the largest 8",
            "final consensus distance",
        ]
        lines: dict[tuple[int, int], list[list[str]]] = {pair: [] for pair in pairs}
        panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for (method,), outcome in outcomes.items():
            (rows,) = outcome.rows
            distance = last_values(rows, "consensus_distance", type="params_only").iloc[0]
            for pair in pairs:
                for parameter in parameters:
                    values = _values(rows, parameter, epochs[-1], pair)
                    squares = [v**2 for v in values]
                    parts = [f"{sum(squares[:count]) / sum(squares):.0%}" for count in (1, 8)]
                    cells = [method, parameter, str(len(values)), *parts, f"{distance:.3g}"]
                    lines[pair].append(cells)
                of_pair = f", workers {pair[0]} and {pair[1]}" if len(pairs) > 1 else ""
                panels[f"{method}: {parameters[1]}{of_pair}"] = {
                    f"epoch {epoch}": _curve(_values(rows, parameters[1], epoch, pair))
                    for epoch in epochs
                }
        x = "index of the singular value"
        figures.curves(panels, folder / "figure.svg", x, "singular value", log_y=True)
        parts = ["![singular values by index](figure.svg)"]
        for i, j in pairs:
            found = table(folder / f"workers-{i}-{j}.csv", [header, *lines[i, j]])
            parts += [f"Workers {i} and {j}, epoch {epochs[-1]}:", found]
        return "\n\n".join(parts)

    return study(title, cases, report)


def _values(rows: "DataFrame", parameter: str, epoch: int, pair: tuple[int, int]) -> list[float]:
    """Singular values of the difference of two workers, largest first."""
    spectra = select_rows(rows, "spectrum", parameter=parameter, workers=f"{pair[0]}-{pair[1]}")
    chosen = spectra[spectra["epoch"] == epoch]
    if chosen.empty:
        raise ValueError(f"no spectrum of {parameter} of workers {pair} at epoch {epoch}")
    return [float(v) for v in chosen.sort_values("index")["value"]]


def _curve(values: list[float]) -> tuple[list[float], list[float]]:
    return [float(i) for i in range(1, len(values) + 1)], values
