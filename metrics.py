"""A run writes rows; tables and figures are functions of a DataFrame of them.

A row is what was measured at one moment: `name` ("accuracy"), `value`, `epoch` (fractions count
within one), `bits` and `messages` (sent by worker 0 since the start), `seconds` (since the start),
and tags that tell it from rows of the same name, e.g. split="test_avg". Rows lie in
OUTPUT_DIR/metrics.jsonl, one JSON object a line. What the functions here look for:

| name                     | tags                 | value                                          |
| ------------------------ | -------------------- | ---------------------------------------------- |
| accuracy, cross_entropy  | split=test_avg       | of the mean model, on test data; a share, nats |
| accuracy                 | split=test, worker=i | of worker i's model                            |
| consensus_distance       | type=params_only     | how far the workers are from their mean        |
| uncompressed_gossip_bits |                      | what plain gossip would have sent by now       |
| phase_seconds            | phase=...            | spent in that phase since the start            |
| error                    | algorithm=..., also  | mean squared distance of the workers to the    |
|                          | diffusion_rate=...,  | mean of their starts; epoch is the step        |
|                          | theta=...            |                                                |
| diverged                 | as error             | the step at which a setting was given up       |

pandas, matplotlib and TensorBoard are imported where they are used: a training process that only
writes rows starts without them.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame, Series

FILE = "metrics.jsonl"
_COLUMNS = ("name", "value", "epoch", "bits", "messages", "seconds")

# Okabe & Ito's palette, which colorblind people can tell apart; line styles tell the rest.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


class MetricsLog:
    """The file a run writes its rows to, one JSON object a line.

    A row is handed to the operating system before `write` returns, so that a killed process loses
    at most the row it was writing. `fresh` empties the file; otherwise rows are added, after a last
    line that was cut off has been removed.
    """

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path = Path(path)
        if fresh:
            self.path.write_bytes(b"")
        elif self.path.exists():
            _cut_half_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, name: str, values: Mapping[str, float | int], tags: Mapping[str, Any]) -> None:
        """Add a row. `values`: value, epoch, bits, messages, seconds; `tags`: anything JSON knows.

        NaN and infinity are written as Python's json does. ValueError if a tag is named like a
        value.
        """
        taken = sorted(set(tags) & {"name", *values})
        if taken:
            raise ValueError(f'metric "{name}": a tag cannot be named "{taken[0]}"')
        row = json.dumps({"name": name, **values, **tags}, default=_plain, ensure_ascii=False)
        left = row.encode() + b"\n"
        while left:  # a disk that is almost full takes a part, and then says why not more
            left = left[self._file.write(left) :]

    @property
    def offset(self) -> int:
        """Bytes in the file, for a checkpoint to return to."""
        return os.fstat(self._file.fileno()).st_size

    def synced_offset(self) -> int:
        """`offset`, once all rows are on the disk."""
        os.fsync(self._file.fileno())
        return self.offset

    def truncate(self, offset: int) -> None:
        """Forget the rows written since `offset` was read. ValueError if the file is shorter."""
        if offset > self.offset:
            raise ValueError(
                f"{self.path} has {self.offset} bytes, but the checkpoint was made when it had "
                f"{offset}: it is not the file of this run"
            )
        self._file.truncate(offset)

    def close(self) -> None:
        self._file.close()


class TensorBoardLog:
    """The same rows as TensorBoard scalars, in `output_dir`.

    A scalar is named by the row's name and tags, accuracy/split-test/worker-0; TensorBoard's steps
    are whole numbers, so step is 1000 · epoch. ValueError if TensorBoard is not installed.
    """

    def __init__(self, output_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard=true needs TensorBoard, which is not installed: pip install "
                "tensorboard, or set tensorboard=false"
            ) from error
        self._writer = SummaryWriter(str(output_dir))

    def write(self, name: str, values: Mapping[str, float | int], tags: Mapping[str, Any]) -> None:
        """Add a row's `value` at its `epoch`."""
        scalar = "/".join([name, *(f"{key}-{value}" for key, value in tags.items())])
        step = round(1000 * values.get("epoch", 0))
        self._writer.add_scalar(scalar, values["value"], step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def load(output_dir: Path | str) -> "DataFrame":
    """The rows of a run, in the order written; name, value, epoch, bits, messages, seconds first.

    A tag that a row does not have is NaN. A last line that was cut off is left out; any other line
    that is not a row is left out with a warning that names it. ValueError without such a file.
    """
    import pandas as pd

    path = Path(output_dir) / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"{output_dir} holds no run: {path} cannot be read ({error.strerror})"
        ) from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was cut off
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            warnings.warn(f"{path}, line {number} is not a row; left out", stacklevel=2)
    frame = pd.DataFrame(rows)
    missing = [column for column in _COLUMNS if column not in frame]
    frame[missing] = float("nan")
    return frame[[*_COLUMNS, *(column for column in frame if column not in _COLUMNS)]]


def summary(rows: "DataFrame") -> str:
    """The table at the end of a training run: accuracy, bits, time. Plain text.

    Each line shows the last epoch that has its rows; a line whose rows are missing is left out.
    Megabytes are 10⁶ bytes.
    """
    lines: list[tuple[str, str]] = []
    mean = _last(rows, "accuracy", split="test_avg")["value"]
    if len(mean):
        lines.append(("test accuracy, mean model", f"{mean.iloc[-1]:.2%}"))
    workers = _last(rows, "accuracy", split="test")["value"]
    if len(workers) == 1:
        lines.append(("test accuracy, one worker", f"{workers.iloc[0]:.2%}"))
    elif len(workers):
        spread = f"{workers.mean():.2%} (worst {workers.min():.2%}, best {workers.max():.2%})"
        lines.append((f"test accuracy, mean of {len(workers)} workers", spread))
    for split, of in (("test_avg", "mean model"), ("test", "workers")):
        entropy = _last(rows, "cross_entropy", split=split)["value"]
        if len(entropy):
            lines.append((f"test cross entropy, {of}", f"{entropy.mean():.4f}"))
            break
    consensus = _last(rows, "consensus_distance", type="params_only")["value"]
    if len(consensus):
        lines.append(("consensus distance", f"{consensus.iloc[-1]:.3g}"))

    bits = rows["bits"].max()
    if bits >= 0:
        lines.append(("sent by worker 0", f"{_human(bits, 'bit')} = {_human(bits / 8, 'B')}"))
    plain = _last(rows, "uncompressed_gossip_bits")
    if len(plain) and plain["bits"].iloc[-1] > 0:
        ratio = plain["value"].iloc[-1] / plain["bits"].iloc[-1]
        lines.append(("", f"{ratio:.1f} times fewer bits than uncompressed gossip"))
    if rows["messages"].max() >= 0:
        lines.append(("", f"{rows['messages'].max():,.0f} messages"))

    seconds = rows["seconds"].max()
    if seconds >= 0:
        lines.append(("time", f"{seconds:.1f} s"))
    phases = _last(rows, "phase_seconds")
    if len(phases) and "phase" in phases:
        for phase, spent in phases.groupby("phase", sort=False)["value"].last().items():
            share = f" ({spent / seconds:.0%})" if seconds > 0 else ""
            lines.append((f"    {phase}", f"{spent:.1f} s{share}"))

    if not lines:
        return "The run has no rows."
    last = rows["epoch"].max()
    title = [f"After {last:g} epoch{'' if last == 1 else 's'}"] if last >= 0 else []
    width = max(len(label) for label, _ in lines)
    return "\n".join([*title, *(f"  {label:<{width}}   {value}" for label, value in lines)])


def figure(rows: "DataFrame", path: Path | str) -> None:
    """Draw a training run: accuracy against epochs and against what was sent, consensus distance.

    The path's suffix tells the format (.png, .pdf, .svg). ValueError if there is nothing to draw.
    """
    mean = _select(rows, "accuracy", split="test_avg")
    workers = _select(rows, "accuracy", split="test")
    if "worker" not in workers:
        workers = workers.assign(worker=0)
    distance = _select(rows, "consensus_distance", type="params_only")

    def accuracy_by_epoch(axes: "Axes") -> None:
        if workers["worker"].nunique() > 1:
            by_epoch = (100 * workers["value"]).groupby(workers["epoch"])
            axes.fill_between(
                *_wide_enough(by_epoch.min(), by_epoch.max()),
                color=_COLORS[0],
                alpha=0.2,
                linewidth=0,
                label=f"all {workers['worker'].nunique()} workers, worst to best",
            )
        first = workers[workers["worker"] == 0]
        _plot(axes, first["epoch"], 100 * first["value"], 1, "worker 0")
        _plot(axes, mean["epoch"], 100 * mean["value"], 0, "mean model")

    def accuracy_by_size(axes: "Axes") -> None:
        _plot(axes, mean["bits"] / 8e6, 100 * mean["value"], 0, "mean model")
        axes.set_xlim(left=0)

    def consensus(axes: "Axes") -> None:
        _plot(axes, distance["epoch"], distance["value"], 0, "all workers")
        if (distance["value"] > 0).any():
            axes.set_yscale("log")

    _draw(
        path,
        {
            "accuracy": accuracy_by_epoch if len(mean) or len(workers) else None,
            "size": accuracy_by_size if mean["bits"].max() > 0 else None,
            "consensus": consensus if len(distance) else None,
        },
    )


def compare(runs: Mapping[str, "DataFrame"], path: Path | str) -> None:
    """Draw several training runs, by label, over each other: the mean model's accuracy against
    epochs and against what was sent (logarithmic), and the consensus distance.

    ValueError if there is nothing to draw.
    """
    means = {label: _select(rows, "accuracy", split="test_avg") for label, rows in runs.items()}
    distances = {
        label: _select(rows, "consensus_distance", type="params_only")
        for label, rows in runs.items()
    }

    def accuracy_by_epoch(axes: "Axes") -> None:
        for i, (label, mean) in enumerate(means.items()):
            _plot(axes, mean["epoch"], 100 * mean["value"], i, label)

    def accuracy_by_size(axes: "Axes") -> None:
        for i, (label, mean) in enumerate(means.items()):
            sent = mean[mean["bits"] > 0]
            _plot(axes, sent["bits"] / 8e6, 100 * sent["value"], i, label)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")

    def consensus(axes: "Axes") -> None:
        for i, (label, distance) in enumerate(distances.items()):
            apart = distance[distance["value"] > 0]
            _plot(axes, apart["epoch"], apart["value"], i, label)
        axes.set_yscale("log")

    some_sent = any(mean["bits"].max() > 0 for mean in means.values())
    some_apart = any((distance["value"] > 0).any() for distance in distances.values())
    _draw(
        path,
        {
            "accuracy": accuracy_by_epoch if any(map(len, means.values())) else None,
            "size": accuracy_by_size if some_sent else None,
            "consensus": consensus if some_apart else None,
        },
    )


def scatter(
    points: Mapping[str, tuple[float, Sequence[float]]],
    path: Path | str,
    x: str,
    y: str,
    log_y: bool = False,
) -> None:
    """Draw a point for each label: (x, what several runs reached): their mean and, as a bar, from
    the least to the largest. The horizontal axis is logarithmic, the vertical one if asked; x and y
    name the axes.

    ValueError if there is nothing to draw.
    """

    def draw(axes: "Axes") -> None:
        for i, (label, (at, reached)) in enumerate(points.items()):
            mean = sum(reached) / len(reached)
            axes.errorbar(
                at,
                mean,
                yerr=[[mean - min(reached)], [max(reached) - mean]],
                color=_COLORS[i % len(_COLORS)],
                marker=_MARKERS[i % len(_MARKERS)],
                linestyle="",
                capsize=3,
                label=label,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")

    _draw(path, {"points": draw if points else None}, {"points": ("", x, y)}, width=7.0)


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    path: Path | str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw panels side by side, {title: {label: (xs, ys)}}, with the same labels and axes.

    ValueError if there is nothing to draw.
    """
    import pandas as pd

    def draw(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], axes: "Axes") -> None:
        for i, (label, (xs, ys)) in enumerate(lines.items()):
            _plot(axes, pd.Series(list(xs)), pd.Series(list(ys)), i, label)
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if log_y:
            axes.set_yscale("log")

    _draw(
        path,
        {title: partial(draw, lines) if lines else None for title, lines in panels.items()},
        {title: (title, x, y) for title in panels},
        width=7.0 if len(panels) == 1 else 4.2,
    )


def consensus_summary(rows: "DataFrame") -> str:
    """The table at the end of gossip_run.py, see `consensus_table`. Plain text.

    ValueError without rows named error.
    """
    columns = list(zip(*consensus_table(rows), strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "   ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in zip(*columns, strict=True)
    ]
    start = max(group["value"].iloc[0] for group in _settings(rows).values())
    return "\n".join(
        [
            f"Best setting of each algorithm; the error at the start is {start:.6g}",
            *(f"  {line}".rstrip() for line in lines),
        ]
    )


def consensus_table(rows: "DataFrame") -> list[list[str]]:
    """Each algorithm of gossip_run.py at its best setting, [line][cell], the header first.

    Best is the smallest final error. Steps and bits (sent by worker 0) are those of the first row
    whose error is at most 1e-3, or 1e-6, of the initial one. Columns without content are left out.
    ValueError without rows named error.
    """
    settings = _settings(rows)
    header = ["algorithm", "diffusion rate", "theta", "to 1e-3", "sent", "to 1e-6", "sent"]
    table = [[*header, "final error", "diverged"]]
    for algorithm, best in _best(settings).items():
        line = [algorithm, *(_short(best[key].iloc[0]) for key in ("diffusion_rate", "theta"))]
        errors = best[best["name"] == "error"]
        for target in (1e-3, 1e-6):
            reached = errors[errors["value"] <= target * errors["value"].iloc[0]]
            if len(reached):
                steps, bits = reached.iloc[0][["epoch", "bits"]]
                line += [f"{steps:.0f} steps", _human(bits, "bit")]
            else:
                line += ["never", ""]
        last = "diverged" if _has_diverged(best) else f"{errors['value'].iloc[-1]:.3g}"
        tried = [
            _has_diverged(group) for (name, *_), group in settings.items() if name == algorithm
        ]
        table.append([*line, last, f"{sum(tried)} of {len(tried)}"])
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*columns, strict=True)]


def consensus_figure(rows: "DataFrame", path: Path | str) -> None:
    """Draw gossip_run.py's errors against steps and against bits, each algorithm at its best.

    Axes are logarithmic; what they cannot show is left out, unless it is all there is. ValueError
    without rows named error.
    """
    best = {
        algorithm: group[group["name"] == "error"]
        for algorithm, group in _best(_settings(rows)).items()
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

    _draw(
        path,
        {
            "error by step": lambda axes: error(axes, "epoch", 1),
            "error by size": (lambda axes: error(axes, "bits", 1e6))
            if some_positive("bits")
            else None,
        },
    )


def _settings(rows: "DataFrame") -> "dict[tuple[str, ...], DataFrame]":
    """The rows of gossip_run.py by setting, (algorithm, diffusion_rate, theta), by epoch.

    ValueError if there are none.
    """
    tags = ["algorithm", "diffusion_rate", "theta"]
    chosen = rows[rows["name"].isin(["error", "diverged"])].sort_values("epoch", kind="stable")
    chosen = chosen.reindex(columns=[*_COLUMNS, *tags])
    chosen[tags] = chosen[tags].astype(object).where(chosen[tags].notna(), "")
    settings = {
        tuple(str(tag) for tag in key): group
        for key, group in chosen.groupby(tags, sort=False)
        if (group["name"] == "error").any()
    }
    if not settings:
        raise ValueError("there are no rows of gossip_run.py's error")
    return settings


def _best(settings: "Mapping[tuple[str, ...], DataFrame]") -> "dict[str, DataFrame]":
    """Each algorithm's setting with the smallest final error; diverged ones come last."""

    def rank(group: "DataFrame") -> tuple[bool, float]:
        return _has_diverged(group), group[group["name"] == "error"]["value"].iloc[-1]

    best: dict[str, DataFrame] = {}
    for (algorithm, *_), group in settings.items():
        if algorithm not in best or rank(group) < rank(best[algorithm]):
            best[algorithm] = group
    return best


def _has_diverged(group: "DataFrame") -> bool:
    return bool((group["name"] == "diverged").any())


def _short(number: str) -> str:
    """A number written in full, to four digits."""
    return f"{float(number):.4g}" if number else ""


_LABELS = {  # panel: title, x, y
    "accuracy": ("Accuracy by epoch", "epoch", "test accuracy (%)"),
    "size": ("Accuracy by data sent", "sent by worker 0 (MB)", "test accuracy (%)"),
    "consensus": ("Distance between the workers", "epoch", "consensus distance"),
    "error by step": ("Error by step", "step", "squared distance to the mean"),
    "error by size": (
        "Error by data sent",
        "sent by worker 0 (Mbit)",
        "squared distance to the mean",
    ),
}


def _draw(
    path: Path | str,
    panels: "Mapping[str, Callable[[Axes], None] | None]",
    labels: Mapping[str, tuple[str, str, str]] = _LABELS,
    width: float = 4.2,  # inches, of a panel
) -> None:
    """Draw the panels that are not None side by side into a file, their legend below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    drawn = {panel: draw for panel, draw in panels.items() if draw is not None}
    if not drawn:
        raise ValueError(f"nothing to draw in {path}: there are no rows of what it shows")
    layout = ConstrainedLayoutEngine(wspace=0.06)
    figure = Figure(figsize=(0.6 + width * len(drawn), 3.9), layout=layout)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (panel, draw) in zip(all_axes, drawn.items(), strict=True):
        title, x, y = labels[panel]
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        if x == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
            first, last = axes.dataLim.intervalx
            if last - first < 0.5:
                axes.set_xlim(first - 0.5, last + 0.5)
    lines, names = all_axes[0].get_legend_handles_labels()
    columns = min(len(names), max(3, 2 * len(drawn)))
    figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, dpi=150)


def _plot(axes: "Axes", x: "Series", y: "Series", index: int, label: str) -> None:
    """A line in the index-th color and style, with a mark at each point if there are few."""
    if not len(x):
        return
    style = _STYLES[index // len(_COLORS) % len(_STYLES)]
    marker = "o" if len(x) <= 25 else ""
    color = _COLORS[index % len(_COLORS)]
    axes.plot(x, y, color=color, linestyle=style, marker=marker, markersize=4, label=label)


def _wide_enough(low: "Series", high: "Series") -> tuple["Series", "Series", "Series"]:
    """(x, low, high) of a band that can be seen even if it has one epoch only."""
    import pandas as pd

    if len(low) > 1:
        return low.index.to_series(), low, high
    x = pd.Series([low.index[0] - 0.02, low.index[0] + 0.02])
    return x, pd.Series([low.iloc[0]] * 2), pd.Series([high.iloc[0]] * 2)


def _select(rows: "DataFrame", name: str, **tags: str) -> "DataFrame":
    """The rows of that name and these tags, by epoch."""
    chosen = rows["name"] == name
    for key, value in tags.items():
        chosen = chosen & (rows[key] == value if key in rows else False)
    return rows[chosen].sort_values("epoch", kind="stable")


def _last(rows: "DataFrame", name: str, **tags: str) -> "DataFrame":
    """The rows of that name and these tags, of the last epoch that has any."""
    selected = _select(rows, name, **tags)
    return selected[selected["epoch"] == selected["epoch"].max()]


def _human(number: float, unit: str) -> str:
    """Three digits and a prefix: 12.3 Mbit."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}"


def _plain(value: Any) -> Any:
    """What JSON writes for a tensor's or numpy's number, a path, …"""
    return value.item() if hasattr(value, "item") else str(value)


def _cut_half_line(path: Path) -> None:
    """Remove what follows the last newline: a row whose writing was interrupted."""
    with path.open("rb+") as file:
        contents = file.read()
        file.truncate(contents.rfind(b"\n") + 1)
