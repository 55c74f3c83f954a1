"""Files of a comparison: tables as text and Markdown, figures."""

import html
from collections.abc import Sequence
from pathlib import Path

from powergossip import formatting
from powergossip.compare.groups import DIVERGED, Section
from powergossip.runs import figures

FORMATS = {  # suffix of a file → format
    ".txt": "text",
    ".md": "markdown",
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
}
STEM = "compared"  # of the files in a folder


def text(found: Sequence[Section], width: int | None = None) -> str:
    """Return the tables as plain text. Where one is wider than `width`, it becomes two."""
    parts = []
    for section in found:
        whole = formatting.plain(section.table())
        if width is not None and section.keys and max(map(len, whole.splitlines())) > width:
            names = section.names()
            results = [[name, *c] for name, c in zip(names, section.results(), strict=True)]
            settings = [[name, *c] for name, c in zip(names, section.settings(), strict=True)]
            whole = f"{formatting.plain(results)}\n\n{formatting.plain(settings)}"
        parts.append(f"{section.note()}\n\n{whole}")
    return "\n\n".join(parts)


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


def write(
    found: Sequence[Section], path: Path, form: str, linked: Sequence[str] = ()
) -> list[Path]:
    """Write a file of this format. Returns the files: figures of several metrics have one each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "text":
        path.write_text(text(found) + "\n")
    elif form == "markdown":
        path.write_text(markdown(found, linked))
    else:
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
    return [path]


def _figure_files(found: Sequence[Section], path: Path) -> list[Path]:
    if len(found) == 1:
        return [path]
    names = [section.metric.name for section in found]
    return [
        path.with_stem(f"{path.stem}-{name}{'' if names.count(name) == 1 else i + 1}")
        for i, name in enumerate(names)
    ]
