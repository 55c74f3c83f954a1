"""Figures of rows. See powergossip.runs.metrics for the rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from pandas import DataFrame, Series
from powergossip.runs.metrics import select_rows
from powergossip.runs.tables import best_settings, by_setting

# The palette of Okabe & Ito, distinguishable with color vision deficiency. Further curves differ by
# line style.
# The first ones of Okabe & Ito. All are visible on a white and on a black background.
_COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#7F7F7F", "#8E5BD0", "#8A8A00", "#9C5A2D", "#E4394D", "#2FB5B0"),
)
_STYLES = ("-", "--", ":")
_LABEL = 32  # characters in a line of a vertical label, which fit in the height of a panel
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def figure(rows: "DataFrame", path: Path | str, metric: str = "accuracy") -> None:
    """Draw a training run: a metric by epoch and by megabytes sent, and consensus distance.

    The path's suffix sets the format (.png, .pdf, .svg).

    Raises:
        ValueError: If there is nothing to draw.
    """
    scale = 100 if metric == "accuracy" else 1
    mean = select_rows(rows, metric, split="test_avg")
    validation = select_rows(rows, metric, split="valid_avg")
    workers = select_rows(rows, metric, split="test")
    if "worker" not in workers:
        workers = workers.assign(worker=0)
    distance = select_rows(rows, "consensus_distance", type="params_only")

    def accuracy_by_epoch(axes: "Axes") -> None:
        if workers["worker"].nunique() > 1:
            by_epoch = (scale * workers["value"]).groupby(workers["epoch"])
            axes.fill_between(
                *_wide_enough(by_epoch.min(), by_epoch.max()),
                color=_COLORS[0],
                alpha=0.2,
                linewidth=0,
                label=f"all {workers['worker'].nunique()} workers, worst to best",
            )
        first = workers[workers["worker"] == 0]
        _plot(axes, first["epoch"], scale * first["value"], 1, "worker 0")
        _plot(axes, mean["epoch"], scale * mean["value"], 0, "mean model")
        _plot(axes, validation["epoch"], scale * validation["value"], 2, "mean model, validation")

    def accuracy_by_size(axes: "Axes") -> None:
        _plot(axes, mean["bits"] / 8e6, scale * mean["value"], 0, "mean model")
        axes.set_xlim(left=0)

    def consensus(axes: "Axes") -> None:
        _plot(axes, distance["epoch"], distance["value"], 0, "all workers")
        if (distance["value"] > 0).any():
            axes.set_yscale("log")

    by, y = ("Accuracy by", "test accuracy (%)") if scale == 100 else ("By", f"test {metric}")
    by_epoch = accuracy_by_epoch if len(mean) or len(workers) else None
    by_size = accuracy_by_size if mean["bits"].max() > 0 else None
    title = "Distance between the workers"
    _draw(
        path,
        (f"{by} epoch", "epoch", y, by_epoch),
        (f"{by} data sent", "sent by worker 0 (MB)", y, by_size),
        (title, "epoch", "consensus distance", consensus if len(distance) else None),
    )


def side_by_side(
    bands: "Mapping[str, DataFrame]",
    path: Path | str,
    y: str,
    step: str = "epoch",
    log_y: bool = False,
) -> None:
    """Draw a metric by epoch, by megabytes sent and by seconds, with a line for each label.

    The path's suffix sets the format. The axis of megabytes is logarithmic if those at the end
    differ by a factor of 10.

    Args:
        bands: {label: columns epoch, megabytes, seconds, mean and deviation}. A deviation that is
            not NaN gives a band.
        y: Label of the metric.
        step: Unit of the column `epoch`.

    Raises:
        ValueError: If there is nothing to draw.
    """

    sent = {label: band[band["megabytes"] > 0] for label, band in bands.items()}
    last = [band["megabytes"].max() for band in sent.values() if len(band)]
    far_apart = bool(last) and max(last) >= 10 * min(last)

    def draw(bands: "Mapping[str, DataFrame]", column: str, axes: "Axes") -> None:
        for i, (label, band) in enumerate(bands.items()):
            x, mean, deviation = band[column], band["mean"], band["deviation"]
            _plot(axes, x, mean, i, label)
            if len(band) > 1 and deviation.notna().any():
                color = line_style(i)[0]
                low, high = mean - deviation, mean + deviation
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        if column == "megabytes" and far_apart:
            axes.set_xscale("log")

    def panel(column: str, title: str, x: str, bands: "Mapping[str, DataFrame]" = bands) -> "Panel":
        some = any(map(len, bands.values()))
        return title, x, y, partial(draw, bands, column) if some else None

    _draw(
        path,
        panel("epoch", f"By {step}", step),
        panel("megabytes", "By data sent", "sent by worker 0 (MB)", sent),
        panel("seconds", "By time", "seconds"),
        log_y=log_y,
    )


def line_style(index: int) -> tuple[str, str]:
    """The color and the matplotlib style of the index-th line of a figure."""
    return _COLORS[index % len(_COLORS)], _STYLES[index // len(_COLORS) % len(_STYLES)]


def scatter(
    points: Mapping[str, tuple[float, Sequence[float]]],
    path: Path | str,
    x: str,
    y: str,
    log_y: bool = False,
    front: Sequence[str] = (),
    names: Sequence[str] = (),
) -> None:
    """Draw {label: (x, ys)}: the mean of ys as a point, and a bar from the smallest to the largest.

    The horizontal axis is logarithmic, the vertical one with `log_y`. x and y are the labels of the
    axes. A line connects the points of `front`. Labels in `names` have the color and the marker of
    their position there, in all figures.

    Raises:
        ValueError: If there is nothing to draw.
    """

    def draw(axes: "Axes") -> None:
        means = {label: sum(reached) / len(reached) for label, (_, reached) in points.items()}
        along = [points[label][0] for label in front], [means[label] for label in front]
        axes.plot(*along, color="#7F7F7F", linewidth=1, zorder=0)
        order = list(dict.fromkeys((*names, *points)))
        for label, (at, reached) in points.items():
            i, mean = order.index(label), means[label]
            axes.errorbar(
                at,
                mean,
                yerr=[[mean - min(reached)], [max(reached) - mean]],
                color=_COLORS[i % len(_COLORS)],
                marker=_MARKERS[i % len(_MARKERS)],
                linestyle="",
                capsize=3,
                label=_name(label),
            )

    _draw(path, ("", x, y, draw if points else None), width=7.0, log_x=True, log_y=log_y)


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    path: Path | str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw panels side by side, {title: {label: (xs, ys)}}, with the same legend and axis labels.

    Raises:
        ValueError: If there is nothing to draw.
    """
    import pandas as pd

    def draw(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], axes: "Axes") -> None:
        for i, (label, (xs, ys)) in enumerate(lines.items()):
            _plot(axes, pd.Series(list(xs)), pd.Series(list(ys)), i, label)

    drawn = [
        (title, x, y, partial(draw, lines) if lines else None) for title, lines in panels.items()
    ]
    _draw(path, *drawn, width=7.0 if len(panels) == 1 else 4.2, log_x=log_x, log_y=log_y)


def consensus_figure(rows: "DataFrame", path: Path | str) -> None:
    """Draw the errors of gossip_run.py by step and by bits, for each algorithm's best setting.

    An axis is logarithmic, without its values ≤ 0, unless all values are ≤ 0.

    Raises:
        ValueError: If no rows are named error.
    """
    best = {
        algorithm: group[group["name"] == "error"]
        for algorithm, group in best_settings(by_setting(rows)).items()
    }

    def some_positive(column: str) -> bool:
        return any((group[column] > 0).any() for group in best.values())

    def error(axes: "Axes", against: str, scale: float) -> None:
        logarithmic = [column for column in (against, "value") if some_positive(column)]
        for i, (algorithm, group) in enumerate(best.items()):
            shown = group[(group[logarithmic] > 0).all(axis=1)]
            _plot(axes, shown[against] / scale, shown["value"], i, algorithm)
        if against in logarithmic:
            axes.set_xscale("log")
        if "value" in logarithmic:
            axes.set_yscale("log")

    by_step, y = partial(error, against="epoch", scale=1), "squared distance to the mean"
    by_size = partial(error, against="bits", scale=1e6) if some_positive("bits") else None
    _draw(
        path,
        ("Error by step", "step", y, by_step),
        ("Error by data sent", "sent by worker 0 (Mbit)", y, by_size),
    )


# Title, labels of x and y, and the function that draws, or None for a panel that is left out.
Panel = tuple[str, str, str, "Callable[[Axes], None] | None"]


def _draw(
    path: Path | str,
    *panels: Panel,
    width: float = 4.2,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw panels side by side, with a legend below, and write the file.

    Args:
        width: Inches of a panel.
    """
    from math import ceil
    from textwrap import fill

    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    drawn = [(title, x, y, draw) for title, x, y, draw in panels if draw is not None]
    if not drawn:
        raise ValueError(f"nothing to draw in {path}: none of its rows is there")
    layout = ConstrainedLayoutEngine(wspace=0.06)
    across = len(drawn)
    figure = Figure(figsize=(0.6 + width * across, 3.9), layout=layout)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, across, squeeze=False).ravel()
    for axes, (title, x, y, draw) in zip(all_axes, drawn, strict=True):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(x)
        axes.set_ylabel(fill(y, _LABEL).replace("$", r"\$"))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                _label_decades(axis)
        if x == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
            first, last = axes.dataLim.intervalx
            if 0 <= last - first < 0.5:  # −∞ without lines
                axes.set_xlim(first - 0.5, last + 0.5)
    legends = [axes.get_legend_handles_labels() for axes in all_axes]
    lines, names = max(legends, key=lambda found: len(found[1]))  # lines may be absent in a panel
    longest = 6 + max(map(len, names), default=0)  # characters, with the line before the name
    fitting = int(12 * (0.6 + width * across) / longest)  # about 12 characters in an inch
    beside = max(1, min(len(names), max(3, 2 * across), fitting))
    figure.legend(lines, names, loc="outside lower center", ncols=beside, frameon=False)
    more = max(0, ceil(len(names) / beside) - 4)  # rows of a long legend, 0.2 inches each
    figure.set_figheight(figure.get_figheight() + 0.2 * more)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=150)


def _label_decades(axis: "Axis") -> None:
    """Label the decades of a logarithmic axis, also 2 and 5 if there are few, and over less than
    0.7 decades equidistant numbers.

    matplotlib labels all of 2 … 9 over one decade, on top of each other.
    """
    from math import log10

    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = axis.get_data_interval()
    decades = log10(high / low) if 0 < low < high else 0.0
    if decades >= 2:
        axis.set_major_locator(LogLocator(10, numticks=8))
    elif decades >= 0.7:
        axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0), numticks=12))
    else:
        axis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
        axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    if decades < 6:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _plot(axes: "Axes", x: "Series", y: "Series", index: int, label: str) -> None:
    """Draw a line in the index-th color and style, with markers if there are few points."""
    if not len(x):
        return
    color, style = line_style(index)
    marker = "o" if len(x) <= 25 else ""
    axes.plot(x, y, color=color, linestyle=style, marker=marker, markersize=4, label=_name(label))


def _name(label: str) -> str:
    """The name of a line as it is: without TeX, and also one that matplotlib leaves out."""
    return label.replace("$", r"\$").replace("_", "\N{ZERO WIDTH SPACE}_", label.startswith("_"))


def _wide_enough(low: "Series", high: "Series") -> tuple["Series", "Series", "Series"]:
    """(x, low, high) of a band. A band of a single epoch is widened to be visible."""
    import pandas as pd

    if len(low) > 1:
        return low.index.to_series(), low, high
    x = pd.Series([low.index[0] - 0.02, low.index[0] + 0.02])
    return x, pd.Series([low.iloc[0]] * 2), pd.Series([high.iloc[0]] * 2)
