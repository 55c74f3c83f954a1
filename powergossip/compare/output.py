"""Tables of a comparison as text, and files: tables in Markdown, figures."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

from powergossip import formatting
from powergossip.compare.groups import DIVERGED, Section
from powergossip.runs import figures

SUFFIXES = (".md", ".svg", ".png", ".pdf")  # of files: tables, figures
STEM = "compared"  # of the files in a folder


def text(found: Sequence[Section], width: float = math.inf) -> str:
    """Return the tables as plain text. Columns beyond the width follow below."""
    return "\n\n".join(
        f"{section.note()}\n\n{formatting.plain(section.table(), width)}" for section in found
    )


def markdown(found: Sequence[Section], figure_files: Sequence[str] = ()) -> str:
    """Return the tables in Markdown, with links to the figures."""
    parts = []
    for i, section in enumerate(found):
        header, *lines = section.table()
        escaped = [
            [html.escape(cell, quote=False).replace("|", "\\|") for cell in line] for line in lines
        ]
        part = f"{section.note()}\n\n{formatting.markdown(header, escaped)}"
        if i < len(figure_files):
            part += f"\n\n![{section.title}]({figure_files[i]})"
        parts.append(part)
    return "\n\n".join(parts) + "\n"


def write(found: Sequence[Section], path: Path, linked: Sequence[str] = ()) -> list[Path]:
    """Write a file in the format of its suffix.

    Returns the files: figures of several metrics have one each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".md":
        path.write_text(markdown(found, linked))
        return [path]
    files = _figure_files(found, path)
    for section, file in zip(found, files, strict=True):
        figures.side_by_side(
            section.bands(),
            file,
            section.metric.label,
            step=section.metric.step,
            log_y=section.logarithmic(),
            ending=DIVERGED,
        )
    return files


def _figure_files(found: Sequence[Section], path: Path) -> list[Path]:
    if len(found) == 1:
        return [path]
    names = [section.metric.name for section in found]
    return [
        path.with_stem(f"{path.stem}-{name}{'' if names.count(name) == 1 else i + 1}")
        for i, name in enumerate(names)
    ]
