"""Runs side by side: one table and one figure of several output folders.

    powergossip-compare output/a output/b
    powergossip-compare 'output/ring-*' --output output/compared
    powergossip-compare output/* --metric cross_entropy --split valid --output loss.html

The table has the metric at the end of a run and at its best epoch, of the mean model and of the
worst worker, the megabytes that worker 0 has sent, the seconds, and each key of the configuration
that differs. The figure has the metric by epoch, by megabytes and by seconds. Runs whose
configurations are equal up to the seed are one line: mean ± standard deviation.

Runs are those of train.py and of gossip_run.py. Of the latter, each algorithm is a run, at its best
setting, with its error relative to the start. Nothing here imports torch, so that it starts fast.
"""

import argparse
import glob
import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from powergossip.errors import BadInput
from powergossip.runs import figures, metrics, page, tables

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SEED = "seed"
# Keys that change neither the results nor the times of a run.
WITHOUT_EFFECT = {
    "allow_lost_rows",
    "checkpoint",
    "checkpoint_interval",
    "data_dir",
    "distributed_init_file",
    "download",
    "evaluate_only",
    "log_verbosity",
    "overwrite",
    "rank",
    "resume",
    "spectrum_logging_epochs",
    "spectrum_logging_params",
    "spectrum_logging_worker_pairs",
    "tensorboard",
    "trackers",
}
OPTIONS = ("optimizer_", "compression_", "hyperparameter_", "theta_", "moniqua_")  # of one method
PERCENT = ("accuracy", "top5_accuracy")
SMALLER_IS_BETTER = ("entropy", "loss", "perplexity", "error", "distance", "bits", "seconds", "nll")
SPLITS = {"test": "test", "valid": "validation", "train": "training"}  # with their names
WORKERS = {"train": "train_full"}  # the tag of the workers' rows, where it is not the split
FORMATS = {  # suffix of a file → format
    ".txt": "text",
    ".md": "markdown",
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".html": "html",
}
SUFFIXES = {name: suffix for suffix, name in FORMATS.items()}
DEFAULT_FORMATS = ("markdown", "svg", "html")  # of a folder
STEM = "compared"  # of the files in a folder
LONGEST_LABEL = 60  # characters

Warn = Callable[[str], None]


# --- Runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """The metric that is compared.

    name    # of its rows
    split   # test, valid or train; None for rows without this tag
    larger  # whether larger is better
    step    # the unit of the column `epoch`
    """

    name: str
    split: str | None
    larger: bool
    step: str = "epoch"

    @property
    def label(self) -> str:
        words = self.name.replace("_", " ")
        if self.step == "step":
            words = "error relative to the start"
        of = "" if self.split is None else f"{SPLITS.get(self.split, self.split)} "
        return f"{of}{words}{' (%)' if self.name in PERCENT else ''}"

    def best(self, values: "Series") -> Any:
        """The index of the best value."""
        return values.idxmax() if self.larger else values.idxmin()


@dataclass(frozen=True, eq=False)
class Run:
    """The files of a run.

    name      # its folder
    config    # its keys with their values
    info      # the contents of info.json
    rows      # see powergossip.runs.metrics
    sweep     # whether it is an algorithm of gossip_run.py
    diverged  # whether it ended for values that are not finite
    """

    name: str
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    rows: "DataFrame"
    sweep: bool = False
    diverged: bool = False

    @cached_property
    def last(self) -> float:
        """The last epoch, or step of gossip_run.py, that has rows."""
        return float(self.rows["epoch"].max())

    @cached_property
    def total(self) -> float:
        """The number of epochs, or of steps, of the complete run. NaN if it is unknown."""
        progress = self.info.get("state.progress")
        if self.sweep:
            return self.last if progress is None or progress >= 1 else math.nan
        epochs = self.config.get("num_epochs")
        return float(epochs) if isinstance(epochs, (int, float)) else math.nan

    @property
    def complete(self) -> bool:
        if self.diverged:
            return False
        progress = self.info.get("state.progress")
        return bool(progress >= 1) if progress is not None else self.last >= self.total

    @property
    def state(self) -> str:
        """The state in words."""
        if self.complete:
            return "complete"
        of = "" if math.isnan(self.total) else f" of {self.total:g}"
        unit = "step" if self.sweep else "epoch"
        return f"{'diverged after ' if self.diverged else ''}{unit} {self.last:g}{of}"

    def main_metric(self) -> str | None:
        """The name of the metric that tells how good the run is.

        The one recorded in info.json. Otherwise perplexity, which only language models have, before
        accuracy, before cross entropy, before others. None without rows that have the tag split.
        """
        if self.sweep:
            return "error"
        recorded = self.info.get("metric")
        if isinstance(recorded, Mapping) and "name" in recorded:
            return str(recorded["name"])
        if "split" in self.rows:
            names = list(dict.fromkeys(self.rows["name"][self.rows["split"].notna()]))
            for name in ("perplexity", "accuracy", "cross_entropy", *names):
                if name in names:
                    return name
        return None

    def larger_is_better(self, name: str) -> bool:
        recorded = self.info.get("metric")
        if isinstance(recorded, Mapping) and recorded.get("name") == name:
            return bool(recorded.get("larger_is_better", True))
        return not any(word in name for word in SMALLER_IS_BETTER)

    def metric(self, name: str, split: str, larger: bool | None) -> Metric | None:
        """The metric of this name. None if the run has no such rows."""
        rows = self.rows[self.rows["name"] == name]
        if rows.empty:
            return None
        if larger is None:
            larger = self.larger_is_better(name)
        tagged = "split" in rows and bool(rows["split"].notna().any())
        metric = Metric(name, split if tagged else None, larger, "step" if self.sweep else "epoch")
        return None if self.curve(metric).empty else metric

    def curve(self, metric: Metric) -> "DataFrame":
        """Return the columns value, worst, megabytes and seconds, by epoch.

        value  # of the mean model, else the mean over workers
        worst  # of the worst worker, NaN if workers have no rows
        """
        import pandas as pd

        rows, workers = self.rows[:0], self.rows[:0]
        if metric.split is None:
            rows = metrics.select_rows(self.rows, metric.name)
            if "type" in rows and (rows["type"] == "params_only").any():  # consensus distance
                rows = rows[rows["type"] == "params_only"]
            if rows["epoch"].duplicated().any():
                raise BadInput(
                    f"--metric={metric.name}: {self.name} has several such rows for an epoch; use "
                    "a metric with one, or with the tag split"
                )
        else:
            workers = metrics.select_rows(
                self.rows, metric.name, split=WORKERS.get(metric.split, metric.split)
            )
            for found in (
                metrics.select_rows(self.rows, metric.name, split=f"{metric.split}_avg"),
                workers,
                metrics.select_rows(self.rows, metric.name, split=metric.split),
            ):
                if rows.empty:
                    rows = found
            if "worker" in workers:
                workers = workers[workers["worker"].notna()]
        scale = 100.0 if metric.name in PERCENT else 1.0
        by_epoch = rows.groupby("epoch")
        of_workers = (scale * workers["value"]).groupby(workers["epoch"])
        return pd.DataFrame(
            {
                "value": scale * by_epoch["value"].mean(),
                "worst": (of_workers.min() if metric.larger else of_workers.max()),
                "megabytes": by_epoch["bits"].max() / 8e6,
                "seconds": by_epoch["seconds"].max(),
            },
            index=by_epoch["value"].mean().index,
        )


def read(folder: Path | str, warn: Warn = lambda text: None) -> list[Run]:
    """Return the runs of an output folder: one of train.py, or one for each algorithm.

    Empty, with a warning, if the folder has no rows. Raises BadInput for a damaged file.
    """
    path = Path(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            rows = metrics.load(path)
        except ValueError as error:
            raise BadInput(str(error)) from error
    for warning in caught:
        warn(str(warning.message))
    if rows.empty:
        warn(f"{path} has no rows; left out")
        return []
    config = _mapping(path / "config.yaml", yaml.safe_load)
    info = _mapping(path / "info.json", json.loads)
    if "algorithm" in rows and (rows["name"] == "error").any():
        return _algorithms(str(path), config, info, rows)
    diverged = info.get("state.ending") == "Diverged"
    return [Run(str(path), config, info, rows, diverged=diverged)]


def _algorithms(
    name: str, config: Mapping[str, Any], info: Mapping[str, Any], rows: "DataFrame"
) -> list[Run]:
    """Each algorithm of gossip_run.py at its best setting, with errors relative to the start."""
    runs = []
    for algorithm, best in tables.best_settings(tables.by_setting(rows)).items():
        errors = best[best["name"] == "error"]
        start = errors["value"].iloc[0] or 1.0
        runs.append(
            Run(
                name,
                {**config, "algorithm": algorithm},
                info,
                errors.assign(value=errors["value"] / start),
                sweep=True,
                diverged=tables.has_diverged(best),
            )
        )
    return runs


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The contents of a file, {} without it. Raises BadInput if it is damaged."""
    try:
        found = parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInput(f"{path} is damaged ({str(error).splitlines()[0]})") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} is damaged (not a mapping)")
    return {str(key): value for key, value in found.items()}


def folders(arguments: Sequence[str], warn: Warn = lambda text: None) -> list[Path]:
    """Return the folders of runs that arguments name, each once: paths, or patterns such as a/*.

    Others that exist are left out with a warning, so that a shell may expand patterns. Raises
    BadInput for a path that does not exist, a pattern without a run, or if no folder is left.
    """
    found: dict[Path, Path] = {}
    for argument in arguments:
        if glob.has_magic(argument) and not Path(argument).exists():
            runs = [path for path in map(Path, sorted(glob.glob(argument, recursive=True)))
                    if _is_run(path)]  # fmt: skip
            if not runs:
                raise BadInput(f"{argument}: no folder of a run matches this pattern")
        elif not Path(argument).exists():
            raise BadInput(f"{argument} does not exist; give folders of runs")
        elif _is_run(Path(argument)):
            runs = [Path(argument)]
        else:
            runs = []
            warn(_no_run(Path(argument)))
        found.update({path.resolve(): path for path in runs if path.resolve() not in found})
    if not found:
        raise BadInput(f"{', '.join(arguments)}: no run; give folders that have {metrics.FILE}")
    return list(found.values())


def _is_run(path: Path) -> bool:
    return (path / metrics.FILE).is_file()


def _no_run(path: Path) -> str:
    inside = path.is_dir() and any(map(_is_run, path.iterdir()))
    hint = f" (its subfolders are: '{path}/*')" if inside else ""
    return f"{path} is no run{hint}; left out"


# --- Groups ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Group:
    """Runs whose configurations are equal up to the seed.

    runs     # of which the complete ones count, or all if none is complete
    metric   # that is compared
    differs  # the keys that differ from other groups, with their values; without those it lacks
    """

    runs: Sequence[Run]
    metric: Metric
    differs: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config

    @cached_property
    def counted(self) -> Sequence[Run]:
        return [run for run in self.runs if run.complete] or self.runs

    @cached_property
    def curves(self) -> "list[DataFrame]":
        return [run.curve(self.metric) for run in self.counted]

    @property
    def name(self) -> str:
        """The folder of the first run, and the number of others."""
        more = f" +{len(self.runs) - 1}" if len(self.runs) > 1 else ""
        return f"{self.runs[0].name}{more}"

    @property
    def label(self) -> str:
        """The differences from other groups, in short."""
        parts = []
        for key, value in self.differs.items():
            short = next((key.removeprefix(p) for p in OPTIONS if key.startswith(p)), key)
            named = key in ("optimizer", "algorithm", "task", "topology")
            parts.append(_text(value) if named else f"{short.replace('_', ' ')} {_text(value)}")
        text = ", ".join(parts)
        return text if 0 < len(text) <= LONGEST_LABEL else self.name

    @property
    def seeds(self) -> list[Any]:
        return [run.config.get(SEED) for run in self.runs]

    @property
    def state(self) -> str:
        """The states of the runs in words."""
        states = [run.state for run in self.runs]
        if len(set(states)) == 1:
            return states[0]
        complete = states.count("complete")
        others = ", ".join(dict.fromkeys(state for state in states if state != "complete"))
        return f"{complete} of {len(states)} complete, {others}"

    def final(self, column: str) -> list[float]:
        """The last value of each counted run."""
        return [float(curve[column].iloc[-1]) for curve in self.curves]

    def best(self, column: str) -> list[float]:
        """The value of each counted run at its best epoch."""
        found = []
        for curve in self.curves:
            finite = curve["value"].dropna()
            at = curve.index[-1] if finite.empty else self.metric.best(finite)
            found.append(float(curve[column].loc[at]))
        return found

    def largest(self, column: str) -> list[float]:
        """The last megabytes or seconds of each counted run, of all its rows."""
        scale = {"bits": 8e6, "seconds": 1.0}[column]
        return [float(run.rows[column].max() / scale) for run in self.counted]

    def band(self) -> "DataFrame":
        """Return the columns epoch, megabytes, seconds, mean and deviation over the seeds.

        The rows are the epochs that all counted runs have, or all if there are none.
        """
        import pandas as pd

        by_epoch = pd.concat(self.curves).groupby(level=0)
        found = by_epoch[["megabytes", "seconds"]].mean()
        found["mean"] = by_epoch["value"].mean()
        found["deviation"] = by_epoch["value"].std()  # NaN of one run
        common = by_epoch["value"].size() == len(self.curves)
        if common.any():
            found = found[common]
        return found.rename_axis("epoch").reset_index()


@dataclass(eq=False)
class Section:
    """Groups with the same metric: a table and a figure."""

    metric: Metric
    groups: Sequence[Group]

    @cached_property
    def keys(self) -> list[str]:
        """The keys that differ between the groups, in the order of the configurations."""
        return list(dict.fromkeys(key for group in self.groups for key in group.differs))

    @property
    def title(self) -> str:
        return f"{self.metric.label[:1].upper()}{self.metric.label[1:]}"

    def labels(self) -> list[str]:
        """A short label for each group, all different."""
        labels = [group.label for group in self.groups]
        if len(set(labels)) < len(labels):
            labels = [group.name for group in self.groups]
        return [
            f"{label} ({labels[:i].count(label) + 1})" if labels.count(label) > 1 else label
            for i, label in enumerate(labels)
        ]

    def bands(self) -> "dict[str, DataFrame]":
        """Return the curves of the figure by label, see Group.band."""
        return {
            label: group.band() for label, group in zip(self.labels(), self.groups, strict=True)
        }

    def logarithmic(self) -> bool:
        """Whether values of the metric are shown by their logarithms."""
        if self.metric.name in PERCENT:
            return False
        values = [value for group in self.groups for curve in group.curves
                  for value in curve["value"] if math.isfinite(value)]  # fmt: skip
        return bool(values) and min(values) > 0 and max(values) >= 100 * min(values)

    def results(self) -> list[list[str]]:
        """Return the measured cells, [line][cell], the header first. Empty columns are left out."""
        percent, groups = self.metric.name in PERCENT, self.groups

        def column(header: str, values: Callable[[Group], list[float]], two: bool) -> list[str]:
            return [header, *(_spread(values(group), two) for group in groups)]

        columns = [
            column("final", lambda g: g.final("value"), percent),
            column("worst worker", lambda g: g.final("worst"), percent),
            column("best", lambda g: g.best("value"), percent),
            column("its worst worker", lambda g: g.best("worst"), percent),
            column("MB sent", lambda g: g.largest("bits"), False),
            column("seconds", lambda g: g.largest("seconds"), False),
            ["runs", *(str(len(group.counted)) for group in groups)],
            ["state", *(group.state for group in groups)],
        ]
        if all(len(group.runs) == 1 for group in groups):
            columns = [cells for cells in columns if cells[0] != "runs"]
        if all(group.state == "complete" for group in groups):
            columns = [cells for cells in columns if cells[0] != "state"]
        return _lines([cells for cells in columns if any(cells[1:])])

    def settings(self) -> list[list[str]]:
        """Return the cells of the keys that differ, [line][cell], the header first."""
        cells = [
            [_text(group.differs[key]) if key in group.differs else "" for key in self.keys]
            for group in self.groups
        ]
        return [self.keys, *cells]

    def names(self) -> list[str]:
        """Return the cells with the names of runs, the header first."""
        return ["run", *(group.name for group in self.groups)]

    def table(self) -> list[list[str]]:
        """Return all cells, [line][cell], the header first: name, keys that differ, results."""
        parts = zip(self.names(), self.settings(), self.results(), strict=True)
        return [[name, *keys, *cells] for name, keys, cells in parts]

    def note(self) -> str:
        """The meaning of the columns, in a sentence or two."""
        several = any(len(group.runs) > 1 for group in self.groups)
        of = "" if self.metric.split is None else " of the mean model"
        sent = "MB are those that worker 0 has sent."
        return (
            f"{self.title}{of}.{' Mean ± standard deviation over seeds.' if several else ''} {sent}"
        )


def sections(
    runs: Sequence[Run],
    metric: str | None = None,
    split: str = "test",
    larger: bool | None = None,
    by_seed: bool = False,
    warn: Warn = lambda text: None,
) -> list[Section]:
    """Group runs by metric, and then by configuration.

    metric   # None: the main one of each run, so that different tasks get sections of their own
    larger   # whether larger is better. None: as recorded, or by the metric's name
    by_seed  # keep runs that differ in the seed apart

    Runs without such rows are left out with a warning. Raises BadInput if none is left.
    """
    by_metric: dict[Metric, list[Run]] = {}
    for run in runs:
        name = metric or run.main_metric()
        found = name and run.metric(name, split, larger)
        if found:
            by_metric.setdefault(found, []).append(run)
        else:
            warn(f"{run.name} has no rows {name or ''} of split {split}; left out")
    if not by_metric:
        names = sorted({str(name) for run in runs for name in run.rows["name"].unique()})
        splits = sorted({str(s) for run in runs if "split" in run.rows
                         for s in run.rows["split"].dropna().unique()})  # fmt: skip
        raise BadInput(
            f"--metric={metric or 'main'} --split={split}: no run has such rows; their rows "
            f"are {', '.join(names)}, of split {', '.join(splits) or 'none'}"
        )
    return [_section(found, of_it, by_seed, warn) for found, of_it in by_metric.items()]


def _section(metric: Metric, runs: Sequence[Run], by_seed: bool, warn: Warn) -> Section:
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        config = {key: value for key, value in _effective(run.config).items()
                  if key != SEED or by_seed}  # fmt: skip
        key = json.dumps(config, sort_keys=True, default=str)
        by_config.setdefault(f"{key} {run.name if by_seed else ''}", []).append(run)
    groups = [Group(of_it, metric) for of_it in by_config.values()]
    for group in groups:
        seeds = [_text(seed) for seed in group.seeds]
        if len(set(seeds)) < len(seeds):
            equal = ", ".join(run.name for run in group.runs)
            warn(f"the same configuration and seed in some of {equal}")
        if 0 < len(group.counted) < len(group.runs):
            out = ", ".join(f"{run.name} ({run.state})" for run in group.runs if not run.complete)
            warn(f"not part of the mean over seeds: {out}")
    every = [_effective(group.config) for group in groups]
    for key in dict.fromkeys(key for config in every for key in config):
        if key == SEED and not by_seed:
            continue
        # An option that only some methods have differs if it does between those.
        holders = [config for config in every if key in config or not key.startswith(OPTIONS)]
        if len({_text(config.get(key)) for config in holders}) > 1:
            for group, config in zip(groups, every, strict=True):
                if key in config:
                    group.differs[key] = config[key]
    return Section(metric, groups)


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that change results or times. The index of a GPU does neither."""
    kept = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
    if "device" in kept:
        kept["device"] = str(kept["device"]).partition(":")[0]
    return kept


# --- Cells ----------------------------------------------------------------------------------------


def _lines(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(line) for line in zip(*columns, strict=True)]


def _text(value: Any) -> str:
    """A value of the configuration as on the command line, without quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str).replace('"', "")


def _spread(values: Sequence[float], two_decimals: bool) -> str:
    """A value, or mean ± standard deviation of several. "" if there is none."""
    if all(math.isnan(value) for value in values):
        return ""
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return "infinite" if math.isinf(mean) else "nan"
    if len(values) == 1:
        return f"{mean:.2f}" if two_decimals else _four_digits(mean)
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    if two_decimals:
        return f"{mean:.2f} ± {deviation:.2f}"
    if not 1e-3 <= abs(mean) < 1e6:
        return f"{mean:.3g} ± {deviation:.2g}"
    # The deviation has two digits, the mean no less than four.
    decimals = max(_decimals(mean, 4), _decimals(deviation, 2)) if deviation else _decimals(mean, 4)
    decimals = min(decimals, _decimals(mean, 7))
    return f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"


def _decimals(number: float, digits: int) -> int:
    """The number of decimals that show so many digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(number)))) if number else 0


def _four_digits(number: float) -> str:
    if number == 0 or not 1e-3 <= abs(number) < 1e6:
        return f"{number:.4g}"
    return f"{number:.{_decimals(number, 4)}f}"


# --- Output ---------------------------------------------------------------------------------------


def text(found: Sequence[Section], width: int | None = None) -> str:
    """Return the tables as plain text. Where one is wider than `width`, it becomes two."""
    parts = []
    for section in found:
        whole = tables.plain(section.table())
        if width is not None and section.keys and max(map(len, whole.splitlines())) > width:
            names = section.names()
            results = [[name, *c] for name, c in zip(names, section.results(), strict=True)]
            settings = [[name, *c] for name, c in zip(names, section.settings(), strict=True)]
            whole = f"{tables.plain(results)}\n\n{tables.plain(settings)}"
        parts.append(f"{section.note()}\n\n{whole}")
    return "\n\n".join(parts)


def markdown(found: Sequence[Section], figure_files: Sequence[str] = ()) -> str:
    """Return the tables in Markdown, with links to the figures."""
    parts = []
    for i, section in enumerate(found):
        header, *lines = section.table()
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        part = f"{section.note()}\n\n{tables.markdown(header, escaped)}"
        if i < len(figure_files):
            part += f"\n\n![{section.title}]({figure_files[i]})"
        parts.append(part)
    return "\n\n".join(parts) + "\n"


def write(
    found: Sequence[Section], path: Path, form: str, linked: Sequence[str] = ()
) -> list[Path]:
    """Write a file of this format. Returns the files: figures of several metrics have one each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "text":
        path.write_text(text(found) + "\n")
    elif form == "markdown":
        path.write_text(markdown(found, linked))
    elif form == "html":
        page.write(found, path)
    else:
        files = _figure_files(found, path)
        for section, file in zip(found, files, strict=True):
            figures.side_by_side(
                section.bands(),
                file,
                section.metric.label,
                step=section.metric.step,
                log_y=section.logarithmic(),
            )
        return files
    return [path]


def _figure_files(found: Sequence[Section], path: Path) -> list[Path]:
    if len(found) == 1:
        return [path]
    names = [section.metric.name for section in found]
    return [
        path.with_stem(f"{path.stem}-{name}{'' if names.count(name) == 1 else i + 1}")
        for i, name in enumerate(names)
    ]


def main(arguments: Sequence[str]) -> None:
    """Compare runs as on the command line. Raises BadInput before anything is written."""
    options = _parse(arguments)

    def warn(text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    targets = _targets(options.output, options.format)
    if any(form == "html" for _, form in targets) and not page.available():
        if "html" in options.format or not _is_folder(options.output):
            raise BadInput("the format html needs the package plotly; pip install plotly")
        warn("no HTML page, since the package plotly is missing; pip install plotly")
        targets = [(path, form) for path, form in targets if form != "html"]
    runs = [run for folder in folders(options.runs, warn) for run in read(folder, warn)]
    if not runs:
        raise BadInput("none of these runs has rows; give runs that have finished an epoch")
    larger = {None: None, "larger": True, "smaller": False}[options.better]
    found = sections(runs, options.metric, options.split, larger, options.by_seed, warn)
    if options.format == ["markdown"] and not targets:
        print(markdown(found), end="")
    else:
        wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(text(found, wide))
    try:
        _write_all(found, targets)
    except OSError as error:
        raise BadInput(f"--output={options.output}: {error.strerror or error}") from error


def _write_all(found: Sequence[Section], targets: Sequence[tuple[Path, str]]) -> None:
    """Write the files, figures first, and print their names."""
    written: list[Path] = []
    for path, form in sorted(targets, key=lambda target: target[1] not in ("svg", "png", "pdf")):
        linked = [file.name for file in written if file.suffix in (".svg", ".png")]
        written += write(found, path, form, linked[: len(found)])
    if written:
        print()
    for file in written:
        print(file)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line. Raises BadInput; exits after --help."""
    parser = argparse.ArgumentParser(
        prog="powergossip-compare",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(__doc__ or "").partition("\n\n")[2],
        exit_on_error=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="output folders, or quoted patterns such as 'a/*'")
    add("--metric", metavar="NAME", help="name of rows, by default the main metric of the task")
    add("--split", default="test", choices=SPLITS, help="data of the metric (test)")
    add("--better", choices=("larger", "smaller"), help="direction of the metric, if it is unusual")
    add("--by-seed", action="store_true", help="keep runs that differ in the seed apart")
    add("--output", metavar="PATH", help=f"a file ({', '.join(FORMATS)}) or a folder for files")
    add("--format", action="append", default=[], metavar="FORMAT",
        help=f"of the files in a folder: {', '.join(SUFFIXES)}, comma-separated "
             f"({','.join(DEFAULT_FORMATS)})")  # fmt: skip
    try:
        options, unknown = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise BadInput(str(error)) from error
    if unknown:
        raise BadInput(f"{unknown[0]} is unknown; --help lists the options")
    if not options.runs:
        raise BadInput("give one or more folders of runs, such as output/*")
    options.format = [name for names in options.format for name in names.split(",")]
    for name in options.format:
        if name not in SUFFIXES:
            raise BadInput(f"--format={name}: use {', '.join(SUFFIXES)}")
    return options


def _is_folder(output: str) -> bool:
    return Path(output).suffix not in FORMATS


def _targets(output: str | None, formats: Sequence[str]) -> list[tuple[Path, str]]:
    """The files to write, with their formats. Raises BadInput."""
    if output is None:
        if set(formats) - {"text", "markdown"}:
            raise BadInput(f"--format={','.join(formats)}: give a folder or file with --output")
        return []
    path = Path(output)
    if not _is_folder(output):
        form = FORMATS[path.suffix]
        if formats and formats != [form]:
            raise BadInput(
                f"--format={','.join(formats)}: the file {output} has the format {form}; "
                "give a folder with --output"
            )
        if path.is_dir():
            raise BadInput(f"--output={output} is a folder; give the name of a file")
        return [(path, form)]
    if path.exists() and not path.is_dir():
        raise BadInput(f"--output={output}: use a folder, or a file that ends in "
                       f"{', '.join(FORMATS)}")  # fmt: skip
    if _is_run(path):
        raise BadInput(f"--output={output} is a run; give another folder")
    chosen = formats or DEFAULT_FORMATS
    return [(path / f"{STEM}{SUFFIXES[form]}", form) for form in dict.fromkeys(chosen)]


def command() -> None:
    """Run as a program. Bad input is one sentence, exit code 2."""
    try:
        main(sys.argv[1:])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command()
