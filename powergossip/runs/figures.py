"""Figures of rows. See powergossip.runs.metrics for the rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from pandas import DataFrame, Series
from powergossip.runs.metrics import select_rows
from powergossip.runs.summaries import best_settings, by_setting

# The first ones are of Okabe & Ito, distinguishable with color vision deficiency. All are visible
# on a white and on a black background. Further curves differ by line style.
_COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#7F7F7F", "#8E5BD0", "#8A8A00", "#9C5A2D", "#E4394D", "#2FB5B0"),
)
_STYLES = ("-", "--", ":")
_LABEL = 32  # characters in a line of a vertical label, which fit in the height of a panel
# Of points: as legible as possible on both backgrounds.
_OF_POINTS = (
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#8E5BD0",
    "#C2559B",
    "#8A7A00",
    "#9C5A2D",
    "#3D8F9E",
)
_GREY = "#767676"  # of text and axes, with equal contrast to white and to black
_WIDTH, _HEIGHT = 4.6, 3.1  # inches of a panel, of which a telephone shows 80 %


def figure(rows: "DataFrame", path: Path | str, metric: str = "accuracy", sender: int = 0) -> None:
    """Draw a training run: a metric by epoch and by megabytes sent, and consensus distance.

    `sender` is the worker that has sent them.

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
                by_epoch.min().index,
                by_epoch.min(),
                by_epoch.max(),
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
        (f"{by} data sent", f"sent by worker {sender} (MB)", y, by_size),
        (title, "epoch", "consensus distance", consensus if len(distance) else None),
    )


def side_by_side(
    bands: "Mapping[str, DataFrame]",
    path: Path | str,
    y: str,
    step: str = "epoch",
    log_y: bool = False,
    ending: str = "\n",
) -> None:
    """Draw a metric by epoch, by megabytes sent and by seconds, with a line for each label.

    The path's suffix sets the format. The axis of megabytes is logarithmic if those at the end
    differ by a factor of 10.

    Args:
        bands: {label: columns epoch, megabytes, seconds, mean and deviation}. A deviation that is
            not NaN gives a band.
        y: Label of the metric.
        step: Unit of the column `epoch`.
        ending: Labels that end like this have a cross at their last finite value, or where there
            is none on the left edge.

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
            if label.endswith(ending):
                name = "_" if len(x) else _name(label)  # without points a cross in the legend
                cross: Any = {"marker": "x", "markersize": 9, "linestyle": "", "clip_on": False}
                last = mean[mean.abs() < math.inf].tail(1)
                at: Any = (x[last.index], last) if len(last) else (0, 0.05 * (1 + i % 19))
                cross["transform"] = axes.transData if len(last) else axes.transAxes
                axes.plot(*at, color=line_style(i)[0], label=name, **cross)
            if len(band) > 1 and deviation.notna().any():
                color = line_style(i)[0]
                low, high = mean - deviation, mean + deviation
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        if column == "megabytes" and far_apart:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")

    def panel(column: str, title: str, x: str, bands: "Mapping[str, DataFrame]" = bands) -> "Panel":
        some = any(map(len, bands.values()))
        return title, x, y, partial(draw, bands, column) if some else None

    _draw(
        path,
        panel("epoch", f"By {step}", step),
        panel("megabytes", "By data sent", "sent by worker 0 (MB)", sent),
        panel("seconds", "By time", "seconds"),
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
    larger_is_better: bool = True,
    chosen: Sequence[str] = (),
) -> None:
    """Draw {label: (x, ys)}: the mean of ys as a point, and a bar from the smallest to the largest.

    The horizontal axis is logarithmic, the vertical one with `log_y`. x and y are the labels of the
    axes. A line connects the front: the points that none beats in y with a smaller x. The chosen
    ones, by default the front, have a color and a name in the legend, and the first chosen one is
    larger. The others are grey.

    Raises:
        ValueError: If there is nothing to draw.
    """

    means = {label: sum(reached) / len(reached) for label, (_, reached) in points.items()}
    sign = 1 if larger_is_better else -1
    best = front({label: (points[label][0], sign * mean) for label, mean in means.items()})
    colored = [label for label in chosen if label in points] or best
    colors = dict(zip(colored, _OF_POINTS, strict=False))

    def draw(axes: "Axes") -> None:
        along = [points[label][0] for label in best], [means[label] for label in best]
        axes.plot(*along, color=_GREY, alpha=0.6, linewidth=1, zorder=1)
        for label in dict.fromkeys((*colors, *points)):
            at, reached = points[label]
            mean, own = means[label], label in chosen[:1]
            axes.errorbar(
                at,
                mean,
                yerr=[[mean - min(reached)], [max(reached) - mean]],
                color=colors.get(label, _GREY),
                marker="o",
                markersize=7 if own else 5 if label in colors else 3.5,
                label=_name(label) if label in colors else None,
                linestyle="",
                elinewidth=1,
                alpha=1 if label in colors else 0.6,
                zorder=3 if label in colors else 2,
            )
        axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        axes.margins(0.1)

    _draw(path, ("", x, y, draw if points else None))


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names in {name: (cost, quality)} that none beats in both at once, cheapest first."""
    kept: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        quality = points[name][1]
        if math.isfinite(quality) and (not kept or quality > points[kept[-1]][1]):
            kept.append(name)
    return kept


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    path: Path | str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw panels, {title: {label: (xs, ys)}}, with the same legend and axis labels.

    Raises:
        ValueError: If there is nothing to draw.
    """
    import pandas as pd

    def draw(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], axes: "Axes") -> None:
        for i, (label, (xs, ys)) in enumerate(lines.items()):
            _plot(axes, pd.Series(list(xs)), pd.Series(list(ys)), i, label)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")

    drawn = [
        (title, x, y, partial(draw, lines) if lines else None) for title, lines in panels.items()
    ]
    _draw(path, *drawn)


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


def _draw(path: Path | str, *panels: Panel) -> None:
    """Draw panels one above the other, with a legend below, and write the file.

    The background is transparent, for light and dark pages.
    """
    from textwrap import fill

    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    drawn = [(title, x, y, draw) for title, x, y, draw in panels if draw is not None]
    if not drawn:
        raise ValueError(f"nothing to draw in {path}: none of its rows is there")
    parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**dict.fromkeys(parts, _GREY), "font.size": 9}
    with rc_context({**style, "svg.fonttype": "none"}):  # text stays text
        size = _WIDTH, _HEIGHT * len(drawn)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(hspace=0.05))
        FigureCanvasAgg(figure)
        all_axes = figure.subplots(len(drawn), 1, squeeze=False).ravel()
        for axes, (title, x, y, draw) in zip(all_axes, drawn, strict=True):
            axes.set_title(_name(title or y), fontsize=10, loc="left")
            axes.set_xlabel(x)
            axes.set_ylabel(fill(_name(y), _LABEL) if title else "")
            axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.set_facecolor("none")
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes)
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_scale() == "log":
                    _label_decades(axis)
            if x == "epoch":
                axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
                first, last = axes.dataLim.intervalx
                if 0 <= last - first < 0.5:  # −∞ without lines
                    axes.set_xlim(first - 0.5, last + 0.5)
        legends = [axes.get_legend_handles_labels() for axes in all_axes]
        lines, names = max(legends, key=lambda found: len(found[1]))  # lines may be absent
        if names:
            longest = 6 + max(map(len, names))  # characters, with the line before the name
            beside = max(1, int(13 * _WIDTH / longest))
            figure.legend(lines, names, loc="outside lower center", ncols=beside, frameon=False)
            rows = math.ceil(len(names) / beside)
            figure.set_figheight(figure.get_figheight() + 0.19 * rows)
        figure.savefig(path, dpi=200, transparent=True)


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
    if decades < 6 and low >= 1e-4 and high < 1e6:
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
