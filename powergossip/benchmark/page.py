"""Tables and figures of a comparison."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from powergossip import formatting
from powergossip.benchmark import library
from powergossip.benchmark.comparison import Line, front, lines, pair
from powergossip.benchmark.tasks import RATES, TASKS, TIERS, BenchmarkTask
from powergossip.runs import figures

Entries = Sequence[Mapping[str, Any]]
Table = list[list[str]]

NAME = "benchmark"  # of the file


def text(entries: Entries, tier: str, tasks: Sequence[str] | None, chosen: str | None) -> str:
    """The tables as plain text: of each task, and of `chosen` beside each of the others."""
    parts = []
    for task in _of(tasks):
        found, others = lines(task, tier, entries)
        own = next((line for line in found if line.name == chosen), None)
        if chosen and own is None and chosen not in others:
            continue  # it takes no part in the task
        tables = [formatting.plain(table(found))] if found else []
        if own is not None and len(found) > 1:
            tables.append(formatting.plain(pairs(own, found)))
        if others:
            tables.append(
                f"  not compared, with other data or another version: {', '.join(others)}"
            )
        if tables:
            parts += [f"{_title(task)}, {tier}", *tables]
    return (
        "\n\n".join(parts) + "\n"
        if parts
        else f"there are no results of the tier {tier}; use --tier, or run\n"
    )


def write(entries: Entries, folder: Path, tasks: Sequence[str] | None = None) -> list[Path]:
    """Write benchmark.md, and a figure for each task and tier."""
    folder.mkdir(parents=True, exist_ok=True)
    written, sections = [], []
    for tier in TIERS:
        by_task = {task.name: lines(task, tier, entries)[0] for task in _of(tasks)}
        if not any(by_task.values()):
            continue
        sections.append(f"### Tier {tier}\n\n{_markdown(overview(by_task))}")
        for name, found in by_task.items():
            if not found:
                continue
            figure = folder / f"{name}-{tier}.svg"
            title, shown = _title(TASKS[name]), f"#### {_title(TASKS[name])}\n\n"
            shown += _markdown(table(found))
            if draw(found, figure):
                written.append(figure)
                shown += f"\n\n![{title}: quality by megabytes sent]({figure.name})"
            sections.append(shown)
    page = folder / f"{NAME}.md"
    page.write_text("\n\n".join(sections) + "\n")
    return [page, *written]


def overview(by_task: Mapping[str, Sequence[Line]]) -> Table:
    """The quality of each entry on each task, entries by their mean rank."""
    columns = {name: found for name, found in by_task.items() if found}
    ranks: dict[str, list[float]] = {}
    for found in columns.values():
        for rank, line in enumerate(found):
            ranks.setdefault(line.name, []).append(rank / max(1, len(found) - 1))
    cells = {
        (line.name, name): _seed_spread(line, "mean") for name, of in columns.items() for line in of
    }
    order = sorted(ranks, key=lambda name: sum(ranks[name]) / len(ranks[name]))
    header = ["entry", *(name.replace("_", " ") for name in columns)]
    return [header, *([name, *(cells.get((name, c), "") for c in columns)] for name in order)]


def table(found: Sequence[Line]) -> Table:
    """The measures of a task's entries, without empty columns."""
    task = found[0].task
    measure = task.measure
    target = f"{measure.factor * found[0].target:g}"
    columns: dict[str, Callable[[Line], str]] = {
        measure.title: lambda line: _seed_spread(line, "mean"),
        "worst worker": lambda line: _seed_spread(line, "worst"),
        "better · noise · worse": lambda line: _record(line, found),
        "MB sent": lambda line: _number(line.last("MB")),
        "MB with a merge": lambda line: _number(line.megabytes),
        f"MB to {target}": lambda line: _bounded(line, line.to_target("MB")),
    }
    if task.is_virtual:
        columns[f"virtual s to {target}"] = partial(_seconds, "")
    else:
        for rate in RATES:
            columns[f"s to {target}, {rate} Mbit/s"] = partial(_seconds, rate)
    columns["state, MB"] = lambda line: _single(line.found.get("state"), 1e-6)
    columns["averaging, CPU ms"] = lambda line: _single(line.found.get("cpu"), 1e3)
    rows = [[line.name, *(cell(line) for cell in columns.values())] for line in found]
    return formatting.without_empty_columns([["entry", *columns], *rows])


def pairs(own: Line, found: Sequence[Line]) -> Table:
    """An entry beside each of the others: mean difference over seeds, interval, verdict, and its
    megabytes with a merge as a multiple of theirs."""
    rows = [[f"{own.name} beside", "difference", "verdict", "× MB with a merge"]]
    for line in found:
        if line is own:
            continue
        of = pair(own, line)
        factor, places = own.task.measure.factor, own.task.measure.places
        difference = (
            "diverged"
            if own.diverged or line.diverged
            else "other seeds"
            if math.isnan(of.difference)
            else f"{factor * of.difference:+.{places}f} ± {factor * of.margin:.{places}f}"
        )
        rows.append([line.name, difference, of.verdict, _multiple(own.megabytes, line.megabytes)])
    return rows


def _multiple(of: Sequence[float], than: Sequence[float]) -> str:
    """The mean of values as a multiple of the mean of others."""
    if not of or not any(than):
        return ""
    return f"{sum(of) / len(of) * len(than) / sum(than):.3g}"


def draw(found: Sequence[Line], path: Path) -> bool:
    """Draw quality by megabytes with a merge, and the front: the entries that none beats in both.

    Returns whether there is something to draw.
    """
    kept = [line for line in found if not line.diverged]
    factor = found[0].task.measure.factor
    cost = {line.name: sum(line.megabytes) / len(line.runs) for line in kept}
    points = {
        line.name: (cost[line.name], [factor * value for value in line.last("mean")])
        for line in kept
        if cost[line.name] > 0
    }
    if not points:
        return False
    best = [line.name for line in front(kept, cost) if line.name in points]
    measure = found[0].task.measure.title
    across = "megabytes sent by the busiest worker, with a merge"
    names = list(library.ENTRIES)
    figures.scatter(points, path, across, measure, front=best, names=names)
    return True


def _of(names: Sequence[str] | None) -> list[BenchmarkTask]:
    return [task for task in TASKS.values() if names is None or task.name in names]


def _title(task: BenchmarkTask) -> str:
    return f"{task.title[:1].upper()}{task.title[1:]} ({task.name})"


def _seed_spread(line: Line, key: str) -> str:
    if line.diverged:
        return f"{line.diverged} of {len(line.found['runs'])} diverged"
    measure = line.task.measure
    return formatting.spread([measure.factor * v for v in line.last(key)], measure.places)


def _record(line: Line, found: Sequence[Line]) -> str:
    verdicts = [pair(line, other).verdict for other in found if other is not line]
    return " · ".join(str(verdicts.count(name)) for name in ("better", "noise", "worse"))


def _number(values: Sequence[float]) -> str:
    """The mean with three digits. "never" if one is infinite."""
    if not values or any(math.isnan(value) for value in values):
        return ""
    mean = sum(values) / len(values)
    return "never" if math.isinf(mean) else f"{mean:.3g}" if mean < 999.5 else f"{mean:.0f}"


def _seconds(rate: str, line: Line) -> str:
    return _bounded(line, line.seconds_to_target(rate))


def _bounded(line: Line, values: Sequence[float]) -> str:
    """The mean, as an upper bound where it is one."""
    text = _number(values)
    return f"≤ {text}" if line.is_bound and text not in ("", "never") else text


def _single(value: float | None, factor: float) -> str:
    return "" if value is None else _number([factor * value])


def _markdown(rows: Table) -> str:
    return f'<div class="sortable">\n\n{formatting.markdown(rows[0], rows[1:])}\n\n</div>'
