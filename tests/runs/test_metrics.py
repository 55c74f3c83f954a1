"""Laws of rows, which survive killed processes, and of the tables and figures made from them."""

import itertools
import math
import os
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from powergossip.runs import figures, metrics, summaries
from powergossip.runs.metrics import FILE, MetricsLog


def values(value: float, epoch: float = 1, bits: int = 8_000_000) -> dict[str, float | int]:
    return {"value": value, "epoch": epoch, "bits": bits, "messages": 200, "seconds": 2.5 * epoch}


def write_run(folder: Path, epochs: int, n_workers: int = 4) -> pd.DataFrame:
    """Rows as training writes them; accuracy grows by 10 % an epoch, 8 Mbit are sent in each."""
    log = MetricsLog(folder / FILE)

    def row(name: str, value: float, epoch: int, **tags: Any) -> None:
        log.write(name, values(value, epoch, 8_000_000 * epoch), tags)

    for epoch in range(1, epochs + 1):
        for worker in range(n_workers):
            row("accuracy", 0.1 * epoch + 0.01 * worker, epoch, split="test", worker=worker)
        row("accuracy", 0.1 * epoch + 0.05, epoch, split="test_avg")
        row("accuracy", 0.1 * epoch + 0.02, epoch, split="valid_avg")
        row("accuracy", 0.99, epoch, split="train")
        row("cross_entropy", 2 / epoch, epoch, split="test_avg")
        row("cross_entropy", 9, epoch, split="train")
        row("consensus_distance", 10.0**-epoch, epoch, type="params_only")
        row("consensus_distance", 7, epoch, type="full_state_vector")
        row("uncompressed_gossip_bits", 2e8 * epoch, epoch)
        row("phase_seconds", 1.5 * epoch, epoch, phase="gradient")
        row("phase_seconds", 0.5 * epoch, epoch, phase="gossip")
    log.close()
    return metrics.load(folder)


# Writing and loading


def test_rows_are_loaded_as_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / FILE)
    log.write("accuracy", values(0.5), {"split": "test", "worker": 0})
    log.write("loss", values(math.nan, epoch=2), {"label": "é\n"})
    log.write("loss", values(math.inf, epoch=3), {"path": Path("x")})
    log.write("loss", {**values(0), "value": np.float32(0.25), "bits": torch.tensor(3)}, {})  # type: ignore[dict-item]
    rows = metrics.load(tmp_path)
    assert rows.columns[:6].tolist() == ["name", "value", "epoch", "bits", "messages", "seconds"]
    assert rows["name"].tolist() == ["accuracy", "loss", "loss", "loss"]
    np.testing.assert_array_equal(rows["value"], [0.5, math.nan, math.inf, 0.25])
    assert rows["bits"].tolist() == [8_000_000, 8_000_000, 8_000_000, 3]
    assert rows["bits"].dtype == rows["messages"].dtype == np.int64
    assert rows["value"].dtype == rows["seconds"].dtype == rows["worker"].dtype == np.float64
    assert rows["worker"].iloc[0] == 0
    assert rows["worker"].isna().tolist() == [False, True, True, True]
    assert rows["label"].iloc[1] == "é\n"
    assert rows["path"].iloc[2] == "x"


def test_a_tag_cannot_hide_a_value(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / FILE)
    with pytest.raises(ValueError, match=r'loss.*"epoch"'):
        log.write("loss", values(1), {"epoch": 3})
    assert log.offset() == 0


def test_every_row_is_in_the_file_at_once_behind_those_before(tmp_path: Path) -> None:
    for first in (0, 2):
        log = MetricsLog(tmp_path / FILE)
        for k in (first, first + 1):
            log.write("loss", values(k), {})
            assert metrics.load(tmp_path)["value"].tolist() == list(range(k + 1))
            assert log.offset() == (tmp_path / FILE).stat().st_size
        log.close()


def test_a_row_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path) -> None:
    """The system writes a part of it first."""
    log = MetricsLog(tmp_path / FILE)
    log.write("loss", values(1), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.offset() + 10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            log.write("loss", values(2), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert metrics.load(tmp_path)["value"].tolist() == [1]


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / FILE)
    for k in range(3):
        log.write("loss", values(k), {})
    size = log.offset()
    log.close()
    for cut in (1, 5, 40):
        os.truncate(tmp_path / FILE, size - cut)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert metrics.load(tmp_path)["value"].tolist() == [0, 1]


@pytest.mark.parametrize("broken", [b'{"name": "lo', b"\x00\x00", b"\xff", b"3", b""])
def test_broken_lines_are_named(tmp_path: Path, broken: bytes) -> None:
    log = MetricsLog(tmp_path / FILE)
    log.write("loss", values(0), {})
    with (tmp_path / FILE).open("ab") as file:
        file.write(broken + b"\n")
    log.write("loss", values(2), {})
    with pytest.warns(UserWarning, match=rf"{re.escape(FILE)}, line 2 "):
        rows = metrics.load(tmp_path)
    assert rows["value"].tolist() == [0, 2]


def test_a_folder_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.metrics\.jsonl"):
        metrics.load(tmp_path / "nowhere")


def test_a_run_without_rows(tmp_path: Path) -> None:
    MetricsLog(tmp_path / FILE).close()
    rows = metrics.load(tmp_path)
    assert len(rows) == 0
    assert rows.columns.tolist() == ["name", "value", "epoch", "bits", "messages", "seconds"]
    assert summaries.summary(rows) == "The run has no rows."
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.figure(rows, tmp_path / "run.png")


# Table


def test_the_table_shows_the_last_epoch(tmp_path: Path) -> None:
    """Of a metric that is measured less often, its last value."""
    rows = write_run(tmp_path, epochs=3)
    late = (rows["name"] == "accuracy") & (rows["epoch"] == 3)
    assert "test accuracy, mean model          25.00%" in summaries.summary(rows[~late])
    assert summaries.summary(rows).splitlines() == [
        "After 3 epochs",
        "  test accuracy, mean model          35.00%",
        "  validation accuracy, mean model    32.00%",
        "  test accuracy, mean of 4 workers   31.50% (worst 30.00%, best 33.00%)",
        "  test cross entropy, mean model     0.6667",
        "  consensus distance                 0.001",
        "  sent by worker 0                   24 Mbit = 3 MB",
        "                                     25.0 times fewer bits than uncompressed gossip",
        "                                     200 messages",
        "  time                               7.5 s",
        "      gradient                       4.5 s (60%)",
        "      gossip                         1.5 s (20%)",
        "      other                          1.5 s (20%)",
    ]


def test_lines_without_rows_are_left_out(tmp_path: Path) -> None:
    rows = write_run(tmp_path, epochs=1, n_workers=1)
    parts = {
        "accuracy": ["test accuracy, mean model", "test accuracy, one worker"],
        "cross_entropy": ["test cross entropy"],
        "consensus_distance": ["consensus distance"],
        "uncompressed_gossip_bits": ["times fewer"],
        "phase_seconds": ["gradient", "gossip  "],
    }
    for name, labels in parts.items():
        assert all(label in summaries.summary(rows) for label in labels)
        shorter = summaries.summary(rows[rows["name"] != name])
        assert not any(label in shorter for label in labels)
        assert "After 1 epoch\n" in shorter
    assert "sent by" not in summaries.summary(rows.assign(bits=math.nan))
    untagged = rows[["name", "value", "epoch", "bits", "messages", "seconds"]]
    assert "accuracy" not in summaries.summary(untagged)


def test_phases_of_a_run_on_the_virtual_clock_are_fractions_of_real_seconds(tmp_path: Path) -> None:
    rows = write_run(tmp_path, epochs=1).assign(seconds=1e6)
    text = summaries.summary(rows, time_is_virtual=True)
    assert "virtual time" in text
    assert "1000000.0 s\n" in text
    shares = [int(share) for share in re.findall(r"s \((\d+)%\)", text)]
    assert len(shares) >= 2
    assert abs(sum(shares) - 100) <= len(shares), "rounded"
    assert "other" not in text


# Figures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures, which are not saved: their lines are read from matplotlib's objects."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: found.append(self))
    return found


def test_figures_are_files_and_do_without_some_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change no rows. pyplot, which changes the backend of a program, is not used."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    rows = write_run(tmp_path, epochs=2)
    before = rows.copy()
    figures.figure(rows, tmp_path / "run.pdf")
    assert (tmp_path / "run.pdf").stat().st_size > 5000
    figures.figure(rows[rows["name"] != "accuracy"], tmp_path / "a.png")
    fewer = rows[rows["name"] != "consensus_distance"].assign(bits=0)
    figures.figure(fewer, tmp_path / "b.png")
    figures.figure(rows.drop(columns="worker"), tmp_path / "c.png")
    assert all((tmp_path / name).exists() for name in ("a.png", "b.png", "c.png"))
    pd.testing.assert_frame_equal(rows, before)
    assert len({figures.line_style(index)[0] for index in range(12)}) == 12
    assert len({figures.line_style(index) for index in range(36)}) == 36


def test_a_diverged_run_has_a_cross(tmp_path: Path, drawn: list[Figure]) -> None:
    """At its last finite value. Without one it is on the left edge."""
    columns = ("epoch", "megabytes", "seconds", "mean", "deviation")
    band = pd.DataFrame({column: [1.0, 2.0, 3.0] for column in columns})
    bands = {"a!": band.assign(mean=[1.0, 0.5, math.nan]), "b!": band[:0]}
    figures.side_by_side(bands, tmp_path / "x.png", "y", ending="!")
    for axes in drawn[0].axes:
        first, second = (line for line in axes.lines if line.get_marker() == "x")
        assert (x(first).tolist(), first.get_transform()) == ([2.0], axes.transData)
        assert (x(second).tolist(), second.get_transform()) == ([0.0], axes.transAxes)


def test_labels_of_axes_are_within_the_figure(tmp_path: Path, drawn: list[Figure]) -> None:
    columns = ("epoch", "megabytes", "seconds", "mean", "deviation")
    band = pd.DataFrame({column: [1.0, 2.0] for column in columns})
    y = "cross_entropy of the mean model, validation data"
    figures.side_by_side({"a": band}, tmp_path / "x.png", y)
    figures.figure(write_run(tmp_path, epochs=2), tmp_path / "x.png")
    for figure in drawn:
        figure.draw_without_rendering()
        for axes in figure.axes:
            label = axes.yaxis.label.get_window_extent()
            assert 5 < label.y0 < label.y1 < figure.bbox.height - 5


def x(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xdata(), dtype=float)


def y(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=float)


def test_figures_show_the_rows(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = write_run(tmp_path, epochs=3)
    figures.figure(rows, tmp_path / "run.png")
    by_epoch, by_size, consensus = drawn[0].axes
    lines = {line.get_label(): line for line in by_epoch.get_lines()}
    np.testing.assert_allclose(y(lines["mean model"]), [15, 25, 35])
    np.testing.assert_allclose(y(lines["worker 0"]), [10, 20, 30])
    np.testing.assert_allclose(y(lines["mean model, validation"]), [12, 22, 32])
    without = rows[rows["split"] != "valid_avg"]
    assert "validation" not in summaries.summary(without)
    band = by_epoch.collections[0].get_paths()[0].get_extents()
    np.testing.assert_allclose(band.bounds, [1, 10, 2, 23])  # from (1, 10 %) to (3, 33 %)
    np.testing.assert_allclose(x(by_size.get_lines()[0]), [1, 2, 3])
    np.testing.assert_allclose(y(by_size.get_lines()[0]), [15, 25, 35])
    np.testing.assert_allclose(y(consensus.get_lines()[0]), [0.1, 0.01, 0.001])
    assert consensus.get_yscale() == "log"

    figures.figure(rows[rows["epoch"] == 2], tmp_path / "one_epoch.png")
    assert drawn[1].axes[0].get_xlim() == (1.5, 2.5)


@pytest.mark.parametrize(
    "factor", [1.0, 3.0, 1e4, *(pytest.param(f, marks=pytest.mark.slow) for f in (1.1, 12.0, 1e9))]
)
def test_labels_of_logarithmic_axes_do_not_overlap(
    tmp_path: Path, drawn: list[Figure], factor: float
) -> None:
    lines = {"one": ([1.0, 1.0, factor], [1.0, 2.0, 3.0])}
    figures.curves({"": lines}, tmp_path / "x.png", "x", "y", log_x=True)
    axes = drawn[0].axes[0]
    drawn[0].canvas.draw()
    low, high = axes.get_xlim()
    shown = [
        text.get_window_extent()
        for which in ("major", "minor")
        for tick, text in zip(
            axes.get_xticks(minor=which == "minor"), axes.get_xticklabels(which=which), strict=True
        )
        if low <= tick <= high and text.get_text()
    ]
    assert 1 <= len(shown) <= 10
    ordered = sorted(shown, key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(ordered))


# Consensus


def write_sweep(folder: Path) -> pd.DataFrame:
    """Rows as gossip_run.py writes them: one algorithm without a grid, one with three settings, the
    best of which is the second (the first has a smaller error before its end, and the third
    has diverged), one all of whose settings diverged."""
    log = MetricsLog(folder / FILE)

    def setting(errors: list[float], bits: int, diverges: bool = False, **tags: str) -> None:
        for step, error in enumerate(errors):
            log.write("error", values(error, step, bits * step), tags)
        if diverges:
            log.write("diverged", values(len(errors), len(errors), bits * len(errors)), tags)

    setting([8000, 8.1, 7.9, 0.0081, 0.0079, 2e-9], 10_000_000, algorithm="plain")
    setting([8000, 100, 20, 3, 8.5, 9], 40_000, algorithm="signs", diffusion_rate="0.012345678")
    setting([8000, 100, 7.99, 5, 4, 4.25], 40_000, algorithm="signs", diffusion_rate="0.5")
    setting([8000, 1], 40_000, diverges=True, algorithm="signs", diffusion_rate="2.0")
    for theta in ("0.1", "10.0"):
        moniqua = {"algorithm": "modulo", "diffusion_rate": "1.0", "theta": theta}
        setting([8000, 8001], 20_000, diverges=True, **moniqua)
    log.close()
    return metrics.load(folder)


def test_the_table_shows_each_algorithm_at_its_best(tmp_path: Path) -> None:
    rows = write_sweep(tmp_path)
    before = rows.copy()
    assert summaries.consensus_summary(rows).splitlines() == [
        "Best setting of each algorithm. Errors are relative to the start, which is 8000",
        "  algorithm   diffusion rate   theta   per step   to 1e-3      sent   to 1e-6      sent"
        "   final error   diverged",
        "  plain                                 10 Mbit   2 steps   20 Mbit   4 steps   40 Mbit"
        "       2.5e-13     0 of 1",
        "  signs                  0.5            40 kbit   2 steps   80 kbit     never          "
        "      0.000531     1 of 3",
        "  modulo                   1     0.1    20 kbit     never               never          "
        "      diverged     2 of 2",
    ]
    pd.testing.assert_frame_equal(rows, before)
    some = summaries.consensus_summary(rows[rows["algorithm"] == "plain"])
    assert "theta" not in some
    assert "diffusion rate" not in some


def test_the_consensus_figure_shows_the_best_settings(tmp_path: Path, drawn: list[Figure]) -> None:
    figures.consensus_figure(write_sweep(tmp_path), tmp_path / "sweep.png")
    by_step, by_size = drawn[0].axes
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["plain", "signs", "modulo"]
    for axes, step in ((by_step, 1), (by_size, 0.04)):  # Mbit
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        signs = axes.get_lines()[1]
        np.testing.assert_allclose(x(signs), step * np.arange(1, 6), rtol=1e-12)
        np.testing.assert_allclose(y(signs), [100, 7.99, 5, 4, 4.25])


@pytest.mark.parametrize(("start", "last"), [(0, 2), (8000, 0)])
def test_consensus_without_positive_values_has_a_table_and_a_figure(
    start: float, last: int, tmp_path: Path, drawn: list[Figure]
) -> None:
    """One worker: all errors are 0, nothing is sent. Or everything diverged at once."""
    log = MetricsLog(tmp_path / FILE)
    for step in range(last + 1):
        log.write("error", values(start, step, 0), {"algorithm": "plain"})
    log.close()
    rows = metrics.load(tmp_path)
    assert "plain" in summaries.consensus_summary(rows)
    figures.consensus_figure(rows, tmp_path / "x.png")
    drawn[0].draw_without_rendering()
    for function in (summaries.consensus_summary, lambda rows: figures.consensus_figure(rows, "x")):
        with pytest.raises(ValueError, match="no rows"):
            function(rows[:0])


@pytest.mark.parametrize("chosen", [[], ["2", "0"]])
def test_chosen_points_or_the_front_have_colors_and_names(
    chosen: list[str], drawn: list[Figure], tmp_path: Path
) -> None:
    points = {"0": (1.0, [3.0]), "1": (2.0, [2.0]), "2": (3.0, [4.0, 6.0]), "3": (9.0, [1.0])}
    figures.scatter(points, tmp_path / "x.svg", "x", "y", chosen=chosen)
    (axes,) = drawn[0].axes
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    assert list(named) == (chosen or ["0", "2"])
    colors = {name: line[0].get_color() for name, line in named.items()}
    assert len({*colors.values()}) == 2
    line, *of_points = axes.lines  # the front
    assert (x(line).tolist(), y(line).tolist()) == ([1, 3], [3, 5])
    grey = [x(point).tolist() for point in of_points if point.get_color() not in colors.values()]
    assert grey == [[2], [9]]


@pytest.mark.parametrize("name", ["_mine", "mass $m_$", "_$x_{$"])
def test_lines_have_any_name(name: str, drawn: list[Figure], tmp_path: Path) -> None:
    lines = {"": dict.fromkeys((name, "other"), ([1.0], [1.0]))}
    figures.curves(lines, tmp_path / "a.png", "x", "y")
    (legend,) = drawn[0].legends
    assert len(legend.get_texts()) == 2
    drawn[0].draw_without_rendering()
