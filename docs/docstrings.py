"""Docstrings are plain text. Sphinx expects reStructuredText.

`to_rst` keeps paragraphs and lists as text, in which `code` stands in backticks, and shows indented
blocks and aligned columns as they are written. arXiv and doi numbers become links.
"""

import re
from itertools import groupby
from typing import Any

_COLUMNS = re.compile(r"\S {2,}\S")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?=\w)[^*]+(?<=[\w.!?)\]])\1(?![\w*])")
_SOURCE = re.compile(r"arXiv:(?P<arxiv>\d{4}\.\d{4,5})|doi:(?P<doi>10\.[^\s,;)]*[^\s,;:.)])")


def to_rst(text: str) -> str:
    """Return reStructuredText that looks like the docstring. `text` is without its indentation."""
    blocks = re.split(r"\n(?:[ \t]*\n)+", text.strip("\n"))
    parts = [part for block in blocks for part in _parts(block)]
    joined: list[tuple[bool, str]] = []
    for literal, part in parts:
        if literal and joined and joined[-1][0]:
            joined[-1] = (True, f"{joined[-1][1]}\n\n{part}")
        else:
            joined.append((literal, part))
    return "\n\n".join(_literal(part) if literal else part for literal, part in joined) + "\n"


def _parts(block: str) -> list[tuple[bool, str]]:
    """(literal?, text) of a block without empty lines: it may begin with text and end indented."""
    lines = block.split("\n")
    if _ITEM.match(lines[0]):
        items = [_prose(item) for item in re.split(r"\n(?=(?:[-*]|\d+\.) )", block)]
        return [(False, "\n\n".join(items))]
    if _is_table(lines):
        return [(True, block)]
    found: list[tuple[bool, str]] = []
    for indented, group in groupby(lines, key=lambda line: line.startswith("  ")):
        part = "\n".join(group)
        if indented and found and _SOURCE.search(part):
            indented, part = False, part.strip()  # the source of a formula, on a line of its own
        found.append((indented, part if indented else _prose(part)))
    return found


def _is_table(lines: list[str]) -> bool:
    """Whether the lines are aligned columns. A gap in one of several lines is one in a sentence."""
    rows = [bool(_COLUMNS.search(line)) for line in lines if not line.startswith(" ")]
    return len(lines) > 1 and all(rows[:1]) and sum(rows) > len(rows) / 2


def _literal(text: str) -> str:
    lines = text.split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "::\n\n" + "\n".join(f"   {line[margin:]}".rstrip() for line in lines)


def _prose(text: str) -> str:
    """Text with its markup escaped, `code` as code, and sources as links."""
    parts = _CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part.strip('`')}``"
        else:
            mark = re.match(r"[-*] ", part) if i == 0 else None
            start = mark.end() if mark else 0
            parts[i] = part[:start] + _links(part[start:])
        if i and not parts[i - 1].endswith((" ", "\n")):
            parts[i] = "\\ " + parts[i]  # markup ends where text follows without a space
    return "".join(parts)


def _links(text: str) -> str:
    done, position = "", 0
    for found in _SOURCE.finditer(text):
        address = (
            f"https://arxiv.org/abs/{found['arxiv']}"
            if found["arxiv"]
            else f"https://doi.org/{found['doi']}"
        )
        done += _escape(text[position : found.start()])
        done += f"`{_escape(found[0])} <{address}>`__\\ "
        position = found.end()
    return done + _escape(text[position:])


def _escape(text: str) -> str:
    text = re.sub(r" {3,}", " · ", text)
    done, position = "", 0
    for found in _EMPHASIS.finditer(text):
        done += _escape_marks(text[position : found.start()]) + found[0]
        position = found.end()
    return done + _escape_marks(text[position:])


def _escape_marks(text: str) -> str:
    return re.sub(r"([\\*|`]|_(?=\W|$))", r"\\\1", text)


def process(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Sphinx calls this for each docstring, and takes the lines as they are then."""
    lines[:] = to_rst("\n".join(lines)).split("\n")
