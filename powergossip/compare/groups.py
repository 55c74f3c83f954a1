"""Groups of runs whose configurations are equal up to the seed, and their table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from powergossip import formatting
from powergossip.compare.runs import PERCENT, Metric, Run, Warn
from powergossip.errors import BadInput
from powergossip.runs import summaries
from powergossip.runs.files import OF_COMMAND

if TYPE_CHECKING:
    from pandas import DataFrame

SEED = "seed"
# The seed, and keys that change neither the results nor the times of a run.
WITHOUT_EFFECT = {
    SEED,
    *OF_COMMAND,
    "spectrum_logging_epochs",
    "spectrum_logging_params",
    "spectrum_logging_worker_pairs",
    "ticket",
    "ticket_options",
}
OPTIONS = ("optimizer_", "compression_", "hyperparameter_", "theta_", "moniqua_")  # of one method
LONGEST_LABEL = 60  # characters
DIVERGED = " (diverged)"  # behind a label


@dataclass(eq=False)
class Group:
    """Runs whose configurations are equal up to the seed.

    Attributes:
        runs: Runs of the group. The complete ones count, or all if none is complete.
        metric: The metric that is compared.
        differs: The keys that differ from other groups, with their values; without those it lacks.
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

    @property
    def diverged(self) -> bool:
        """True if no run is complete, and one diverged."""
        return any(run.diverged for run in self.counted)

    def final(self, column: str) -> list[float]:
        """The last value of each counted run that has rows."""
        return [float(curve[column].iloc[-1]) for curve in self.curves if len(curve)]

    def best(self, column: str) -> list[float]:
        """The value of each counted run that has rows at its best epoch."""
        found = []
        for curve in filter(len, self.curves):
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

        The rows are the epochs that all counted runs share, or all epochs if they share none.
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
        """A short label for each group, all different: what differs, or the names of all."""
        labels, names = ([getattr(of, key) for of in self.groups] for key in ("label", "name"))
        if len(set(labels)) < len(labels) or set(labels) & set(names):
            labels = names
        return [
            f"{label} ({labels[:i].count(label) + 1})" if labels.count(label) > 1 else label
            for i, label in enumerate(labels)
        ]

    def bands(self) -> "dict[str, DataFrame]":
        """Return the curves of the figure by label, see Group.band. Those that diverged say so."""
        return {
            f"{label}{DIVERGED * group.diverged}": group.band()
            for label, group in zip(self.labels(), self.groups, strict=True)
        }

    def logarithmic(self) -> bool:
        """True if the logarithms of the metric are shown."""
        if self.metric.name in PERCENT:
            return False
        values = [value for group in self.groups for curve in group.curves
                  for value in curve["value"] if math.isfinite(value)]  # fmt: skip
        return bool(values) and min(values) > 0 and max(values) >= 100 * min(values)

    def table(self) -> list[list[str]]:
        """Return the cells, [line][cell], the header first: name, keys that differ, results.

        Empty columns are left out.
        """
        places = 2 if self.metric.name in PERCENT else None
        several = any(len(group.runs) > 1 for group in self.groups)
        complete = all(group.state == "complete" for group in self.groups)
        results = ["final", "worst worker", "best", "its worst worker", "MB sent", "seconds"]
        lines = [
            [
                group.name,
                *(_text(group.differs[key]) if key in group.differs else "" for key in self.keys),
                "diverged" if group.diverged else _cell(group.final("value"), places),
                "" if group.diverged else _cell(group.final("worst"), places),
                _cell(group.best("value"), places),
                _cell(group.best("worst"), places),
                _cell(group.largest("bits")),
                _cell(group.largest("seconds")),
                str(len(group.counted)) if several else "",
                "" if complete else group.state,
            ]
            for group in self.groups
        ]
        header = ["run", *self.keys, *results, "runs", "state"]
        return formatting.without_empty_columns([header, *lines])

    def note(self) -> str:
        """The meaning of the columns, in a sentence or two."""
        several = any(len(group.runs) > 1 for group in self.groups)
        of = ""
        if self.metric.split is not None:
            counted = [run for group in self.groups for run in group.counted]
            shows_mean = [run.has_mean_model(self.metric) for run in counted if len(run.rows)]
            of = " of the mean model" if any(shows_mean) else ", mean over workers"
            if any(shows_mean) and not all(shows_mean):
                of += ", or mean over workers in runs that did not evaluate it"
        sent = "MB are those that worker 0 has sent."
        merge = max(
            summaries.merge_bits(run.rows) for group in self.groups for run in group.counted
        )
        if merge > 0:
            sent += f" A merge to the mean model adds {merge / 8e6:.3g} MB where models differ."
        return (
            f"{self.title}{of}.{' Mean ± standard deviation over seeds.' if several else ''} {sent}"
        )


def sections(
    runs: Sequence[Run],
    metric: str | None = None,
    split: str = "test",
    warn: Warn = lambda text: None,
) -> list[Section]:
    """Group runs by metric, and then by configuration.

    Runs without such rows are skipped with a warning, except those that diverged before.

    Args:
        metric: Name of the metric. None: the main one of each run, so that different tasks get
            separate sections.

    Raises:
        BadInput: If no run has such rows.
    """
    by_metric: dict[Metric, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.rows.empty):  # those that diverged at once are last
        name = metric or run.recorded_metric.get("name")
        found = name and run.metric(name, split)
        if run.rows.empty:
            found = next((other for other in by_metric if name in (None, other.name)), None)
        if found:
            by_metric.setdefault(found, []).append(run)
        else:
            named = f" {name}" if name else ""
            warn(f"{run.name} has no rows{named} of split {split}; left out")
    if not by_metric and all(run.rows.empty for run in runs):
        raise BadInput("all of these runs diverged in their first epoch; give one that did not")
    if not by_metric:
        names = sorted({str(name) for run in runs for name in run.rows["name"].unique()})
        splits = sorted({str(s) for run in runs if "split" in run.rows
                         for s in run.rows["split"].dropna().unique()})  # fmt: skip
        raise BadInput(
            f"--metric={metric or 'main'} --split={split}: no run has such rows; their rows "
            f"are {', '.join(names)}, of split {', '.join(splits) or 'none'}"
        )
    return [_section(found, members, warn) for found, members in by_metric.items()]


def _section(metric: Metric, runs: Sequence[Run], warn: Warn) -> Section:
    by_config: dict[str, list[Run]] = {}
    machines: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = json.dumps(_effective(run.config), sort_keys=True, default=str)
        machine = run.info.get("run"), run.config.get(SEED), key  # of a run with a ticket
        if machine[0] and (first := machines.setdefault(machine, run)) is not run:
            warn(f"{run.name} is another machine of the run in {first.name}; left out")
            continue
        by_config.setdefault(key, []).append(run)
    groups = [Group(members, metric) for members in by_config.values()]
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
        # An option that only some methods have differs if it does between those.
        holders = [config for config in every if key in config or not key.startswith(OPTIONS)]
        if len({_text(config.get(key)) for config in holders}) > 1:
            for group, config in zip(groups, every, strict=True):
                if key in config:
                    group.differs[key] = config[key]
    return Section(metric, groups)


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that tell groups apart. The index of a GPU does not."""
    kept = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
    if "device" in kept:
        kept["device"] = str(kept["device"]).partition(":")[0]
    return kept


# --- Cells ----------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """A value of the configuration as on the command line, without quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str).replace('"', "")


def _cell(values: Sequence[float], places: int | None = None) -> str:
    """A value, or mean ± standard deviation of several. "" without a value."""
    if all(math.isnan(value) for value in values):
        return ""
    return formatting.spread(values, places)
