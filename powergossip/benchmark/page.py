"""Tables and figures of a comparison."""

import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from powergossip import formatting
from powergossip.benchmark import verdict
from powergossip.benchmark.comparison import Line, lines, pair
from powergossip.benchmark.tasks import TASKS, TIERS, BenchmarkTask
from powergossip.runs import figures

Entries = Sequence[Mapping[str, Any]]
Table = list[list[str]]

# A task, its lines, the one of the chosen entry, and the names of entries that are not compared.
Section = tuple[BenchmarkTask, Sequence[Line], Line | None, Sequence[str]]

NAME = "benchmark"  # of the file
BREADTH = 10  # characters of a line of a table's header
ABOUT = (
    "±: after a measure the standard deviation over the seeds, after a difference half of its 95 % "
    "interval. Differences are {} minus the entry."
)


def text(
    entries: Entries,
    tier: str,
    tasks: Sequence[str] | None,
    chosen: str | None,
    width: float = math.inf,
) -> str:
    """The tables as plain text: of each task, and of `chosen` beside each of the others.

    It begins with the sentences of `chosen`.
    """
    wrap = partial(textwrap.fill, width=int(min(width, 10**6)), subsequent_indent="    ")
    sections, parts = _sections(entries, tier, tasks, chosen), []
    for task, found, own, others in sections:
        parts.append(wrap(f"{_title(task)}, {tier}"))
        parts += [formatting.plain(rows, width) for rows in _tables(found, own)]
        parts += map(wrap, _note(others))
    if not parts:
        return f"there are no results of the tier {tier}; use --tier, or run\n"
    return "\n\n".join([*map(wrap, answer(sections)), *parts]) + "\n"


def answer(sections: Sequence[Section]) -> list[str]:
    """The sentences of the chosen entry: of all tasks, of each of them, and what ± means."""
    compared = [(own, found) for _, found, own, _ in sections if own is not None]
    if not compared:
        return []
    of_each = [
        formatting.visible(f"{verdict.of_task(*of)}. Setting: {verdict.setting(of[0])}.")
        for of in compared
    ]
    return [f"{verdict.of_tasks(compared)}.", *of_each, ABOUT.format(compared[0][0].name)]


def write(
    entries: Entries,
    folder: Path,
    tasks: Sequence[str] | None = None,
    tiers: Sequence[str] = TIERS,
    chosen: str | None = None,
) -> list[Path]:
    """Write benchmark.md, and a figure for each task and tier, with `chosen` beside the others."""
    folder.mkdir(parents=True, exist_ok=True)
    written, parts = [], []
    for tier in tiers:
        sections = _sections(entries, tier, tasks, chosen)
        by_task = {task.name: found for task, found, _, _ in sections}
        if not any(by_task.values()):
            continue
        parts += [f"## Tier {tier}", *answer(sections), _markdown(overview(by_task))]
        for task, found, own, others in sections:
            if not found:
                continue
            figure, title = folder / f"{task.name}-{tier}.svg", _title(task)
            content = []
            if draw(found, figure, own):
                written.append(figure)
                content.append(f"![{title}: quality by megabytes sent]({figure.name})")
            content += [*map(_markdown, _tables(found, own)), *_note(others)]
            head = f"<details{' open' * (own is not None)}>"
            parts += [f"{head}\n<summary>{html.escape(title)}</summary>", *content, "</details>"]
    page = folder / f"{NAME}.md"
    page.write_text("\n\n".join(parts) + "\n")
    return [page, *written]


def _sections(
    entries: Entries, tier: str, tasks: Sequence[str] | None, chosen: str | None
) -> list[Section]:
    """The tasks, with `chosen` those in which it takes part."""
    sections: list[Section] = []
    for task in TASKS.values():
        if tasks is not None and task.name not in tasks:
            continue
        found, others = lines(task, tier, entries)
        own = next((line for line in found if line.name == chosen), None)
        if own is not None or chosen in others or (not chosen and (found or others)):
            sections.append((task, found, own, others))
    return sections


def _tables(found: Sequence[Line], own: Line | None) -> list[Table]:
    """The tables of a task: all entries, and `own` beside each of the others."""
    if not found:
        return []
    beside = [pairs(own, found)] if own and len(found) > 1 else []
    return [table(found, own), *beside]


def overview(by_task: Mapping[str, Sequence[Line]]) -> Table:
    """The mean quality of each entry on each task, consensus last. Entries by their mean rank."""
    columns = {name: found for name, found in by_task.items() if found}
    columns = dict(sorted(columns.items(), key=lambda of: of[1][0].task.is_consensus))
    ranks: dict[str, list[float]] = {}
    for found in columns.values():
        for rank, line in enumerate(found):
            ranks.setdefault(line.name, []).append(rank / max(1, len(found) - 1))
    cells = {
        (line.name, name): line.task.measure.shown(sum(line.last("mean")) / len(line.runs))
        if not line.diverged
        else "diverged"
        for name, of in columns.items()
        for line in of
    }
    order = sorted(ranks, key=lambda name: sum(ranks[name]) / len(ranks[name]))
    header = ["entry", *(name.replace("_", " ") for name in columns)]
    return [header, *([name, *(cells.get((name, c), "") for c in columns)] for name in order)]


def table(found: Sequence[Line], own: Line | None = None) -> Table:
    """The measures of a task's entries, without empty columns. `own` is marked."""
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
        header = f"virtual s to {target}"
        columns[header] = lambda line: _bounded(line, line.to_target("seconds"))
    rows = [[_marked(line, own), *(cell(line) for cell in columns.values())] for line in found]
    return formatting.without_empty_columns([["entry", *columns], *rows])


def pairs(own: Line, found: Sequence[Line]) -> Table:
    """An entry beside each of the others: the mean difference over seeds, its interval, and the
    verdict on `own`."""
    measure = own.task.measure
    rows = [["entry", measure.title, "MB with a merge", "difference, 95 %", "verdict"]]
    for line in found:
        of = pair(own, line)
        difference = (
            "diverged"
            if own.diverged or line.diverged
            else "other seeds"
            if math.isnan(of.difference)
            else f"{measure.shown(of.difference, '+')} ± {measure.shown(of.margin)}"
        )
        cells = [_marked(line, own), _seed_spread(line, "mean"), _number(line.megabytes)]
        rows.append([*cells, *(["", ""] if line is own else [difference, of.verdict])])
    return rows


def _marked(line: Line, own: Line | None) -> str:
    return f"{line.name} ←" if line is own else line.name


def _note(others: Sequence[str]) -> list[str]:
    """A note on the entries that the tables of a task leave out, if there are any."""
    text = f"Not compared, with other data or another version: {', '.join(others)}."
    return [text] if others else []


def draw(found: Sequence[Line], path: Path, own: Line | None = None) -> bool:
    """Draw quality by megabytes with a merge. An entry of its own and its rivals have colors.

    Returns whether there is something to draw.
    """
    measure = found[0].task.measure
    points = {
        line.name: (line.cost, [measure.factor * value for value in line.last("mean")])
        for line in found
        if not line.diverged and line.cost > 0
    }
    if not points:
        return False
    across = "megabytes sent by the busiest worker, with a merge"
    chosen = [line.name for line in (own, *verdict.rivals(own, found))] if own else []
    figures.scatter(points, path, across, measure.title, False, measure.larger_is_better, chosen)
    return True


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
    return "never" if math.isinf(mean) else formatting.short(mean)


def _bounded(line: Line, values: Sequence[float]) -> str:
    """The mean, as an upper bound where it is one."""
    text = _number(values)
    return f"≤ {text}" if line.is_bound and text not in ("", "never") else text


def _markdown(rows: Table) -> str:
    """A table whose cells do not break. Its headers do, so that it is narrow."""
    header = [textwrap.fill(cell, BREADTH).replace("\n", "<br>") for cell in rows[0]]
    content = formatting.markdown(header, rows[1:])
    return f'<div style="white-space: nowrap">\n\n{content}\n\n</div>'
