"""Runs to compare: their files, and the curve of a metric."""

import glob
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powergossip import reading
from powergossip.errors import BadInput
from powergossip.runs import metrics, summaries

if TYPE_CHECKING:
    from pandas import DataFrame, Series

PERCENT = ("accuracy", "top5_accuracy")
# Parts of names, and words of names, of metrics that are better if they are smaller.
SMALLER_IS_BETTER = ("entropy", "loss", "perplexity", "error", "distance", "bits", "seconds", "mse")
SMALLER_WORDS = {"nll", "mae", "mape", "ppl", "bpc", "bpb", "wer", "cer", "ece", "brier", "fid"}
SPLITS = {"test": "test", "valid": "validation", "train": "training"}  # with their names
WORKERS = {"train": "train_full"}  # the tag of the workers' rows, where it is not the split

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Metric:
    """The metric that is compared.

    Attributes:
        name: Name of its rows.
        split: test, valid or train. None for rows without this tag.
        larger: True if larger is better.
        step: Unit of the column `epoch`.
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

    Attributes:
        name: Name of its folder.
        config: Keys with their values.
        info: Contents of info.json.
        rows: Rows of the run, see powergossip.runs.metrics.
        sweep: True if the run is an algorithm of gossip_run.py.
        diverged: True if the run ended for values that are not finite.
    """

    name: str
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    rows: "DataFrame"
    sweep: bool = False
    diverged: bool = False

    @cached_property
    def last(self) -> float:
        """The last epoch, or step of gossip_run.py, that has rows. 0 without rows."""
        return float(self.rows["epoch"].max()) if len(self.rows) else 0.0

    @property
    def complete(self) -> bool:
        return not self.diverged and bool(self.info.get("state.progress", 0) >= 1)

    @property
    def state(self) -> str:
        """The state in words."""
        if self.complete:
            return "complete"
        epochs = self.config.get("num_epochs")
        of = f" of {epochs:g}" if isinstance(epochs, (int, float)) else ""
        unit = "step" if self.sweep else "epoch"
        return f"{'diverged after ' if self.diverged else ''}{unit} {self.last:g}{of}"

    @cached_property
    def recorded_metric(self) -> Mapping[str, Any]:
        """The keys `name` and `larger_is_better` of the metric that tells how good the run is."""
        if self.sweep:
            return {"name": "error", "larger_is_better": False}
        found = self.info.get("metric")
        if isinstance(found, Mapping):
            return found
        names = set(self.rows["name"])  # of a task of the library
        known = {"perplexity": False, "accuracy": True, "cross_entropy": False}
        return next(({"name": n, "larger_is_better": known[n]} for n in known if n in names), {})

    def larger_is_better(self, name: str) -> bool:
        if self.recorded_metric.get("name") == name:
            return bool(self.recorded_metric.get("larger_is_better", True))
        name = name.lower()
        words = {*re.split(r"[^a-z]+", name)}
        return not (words & SMALLER_WORDS or any(part in name for part in SMALLER_IS_BETTER))

    def metric(self, name: str, split: str) -> Metric | None:
        """The metric of this name. None if the run has no such rows."""
        rows = self.rows[self.rows["name"] == name]
        if rows.empty:
            return None
        larger = self.larger_is_better(name)
        tagged = "split" in rows and bool(rows["split"].notna().any())
        metric = Metric(name, split if tagged else None, larger, "step" if self.sweep else "epoch")
        return None if self.curve(metric).empty else metric

    def has_mean_model(self, metric: Metric) -> bool:
        """True if the curve shows the mean model."""
        return not metrics.select_rows(self.rows, metric.name, split=f"{metric.split}_avg").empty

    def curve(self, metric: Metric) -> "DataFrame":
        """Return the columns value, worst, megabytes and seconds, by epoch.

        Args:
            value: Value of the mean model, else the mean over workers.
            worst: Value of the worst worker, NaN if workers have no rows.
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
            split = metric.split
            of_workers = WORKERS.get(split, split)
            workers = metrics.select_rows(self.rows, metric.name, split=of_workers)
            for tag in (f"{split}_avg", of_workers, split):
                if rows.empty:
                    rows = metrics.select_rows(self.rows, metric.name, split=tag)
            if "worker" in workers:
                workers = workers[workers["worker"].notna()]
        scale = 100.0 if metric.name in PERCENT else 1.0
        by_epoch = rows.groupby("epoch")
        worker_values = (scale * workers["value"]).groupby(workers["epoch"])
        return pd.DataFrame(
            {
                "value": scale * by_epoch["value"].mean(),
                "worst": (worker_values.min() if metric.larger else worker_values.max()),
                "megabytes": by_epoch["bits"].max() / 8e6,
                "seconds": by_epoch["seconds"].max(),
            },
            index=by_epoch["value"].mean().index,
        )


def read(folder: Path | str, warn: Warn = lambda text: None) -> list[Run]:
    """Return the runs of an output folder: one of train.py, or one for each algorithm.

    Empty, with a warning, if the folder has no rows, unless the run diverged before the first one.

    Raises:
        BadInput: For a damaged file.
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
    info = _mapping(path / "info.json", json.loads)
    diverged = info.get("state.ending") == "Diverged"
    if rows.empty and not diverged:
        warn(f"{path} has no rows; left out")
        return []
    config = _mapping(path / "config.yaml", reading.value)
    if not config:
        warn(f"{path} has no config.yaml; its keys are unknown")
    if "algorithm" in rows and (rows["name"] == "error").any():
        return _algorithms(str(path), config, info, rows)
    rate = info.get("diffusion_rate")
    if "optimizer_diffusion_rate" in config and rate is not None:  # the one in effect
        config["optimizer_diffusion_rate"] = float(f"{rate:.4g}")
    return [Run(str(path), config, info, rows, diverged=diverged)]


def _algorithms(
    name: str, config: Mapping[str, Any], info: Mapping[str, Any], rows: "DataFrame"
) -> list[Run]:
    """Each algorithm of gossip_run.py at its best setting, with errors relative to the start."""
    runs = []
    for algorithm, best in summaries.best_settings(summaries.by_setting(rows)).items():
        errors = best[best["name"] == "error"]
        start = errors["value"].iloc[0] or 1.0
        runs.append(
            Run(
                name,
                {**config, "algorithm": algorithm},
                info,
                errors.assign(value=errors["value"] / start),
                sweep=True,
                diverged=summaries.has_diverged(best),
            )
        )
    return runs


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The contents of a file, {} without it. Raises BadInput if it is damaged."""
    try:
        found = parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is damaged ({str(error).splitlines()[0]})") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} is damaged (not a mapping)")
    return {str(key): value for key, value in found.items()}


def folders(arguments: Sequence[str], warn: Warn = lambda text: None) -> list[Path]:
    """Return the folders of runs that arguments name, each once: paths, or patterns such as `a/*`.

    Other existing paths are skipped with a warning, so that a shell may expand patterns.

    Raises:
        BadInput: For a path that does not exist, a pattern without a run, or if no folder has a
            run.
    """
    found: dict[Path, Path] = {}
    for argument in arguments:
        if glob.has_magic(argument) and not Path(argument).exists():
            runs = [path for path in map(Path, sorted(glob.glob(argument, recursive=True)))
                    if is_run(path)]  # fmt: skip
            if not runs:
                raise BadInput(f"{argument}: no folder of a run matches this pattern")
        elif not Path(argument).exists():
            raise BadInput(f"{argument} does not exist; give folders of runs")
        elif is_run(Path(argument)):
            runs = [Path(argument)]
        else:
            runs = []
            warn(_no_run(Path(argument)))
        found.update({path.resolve(): path for path in runs if path.resolve() not in found})
    if not found:
        raise BadInput(f"{', '.join(arguments)}: no run; give folders that have {metrics.FILE}")
    return list(found.values())


def is_run(path: Path) -> bool:
    return (path / metrics.FILE).is_file()


def _no_run(path: Path) -> str:
    inside = path.is_dir() and any(map(is_run, path.iterdir()))
    hint = f" (its subfolders are: '{path}/*')" if inside else ""
    return f"{path} is no run{hint}; left out"
