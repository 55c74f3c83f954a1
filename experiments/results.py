"""Published reports: a page of an experiment, its tables as CSV, and a picture.

They are in docs/results/EXPERIMENT, which keeps measurements with the code that made them. output/
contains reproducible files only. RESULTS.md has the findings.
"""

import csv
import re
import shutil
from pathlib import Path

from powergossip.formatting import plain

PUBLISHED = Path(__file__).resolve().parent.parent / "docs" / "results"
REPORT = "report.md"
TABLE = re.compile(r"(?:^\|.*\n)+\n\[.*?\]\((.*?)\)", re.MULTILINE)


def publish(name: str, folder: Path) -> None:
    """Copy an experiment's page, and the tables and the picture that it links."""
    own = PUBLISHED / name
    if own.exists():
        shutil.rmtree(own)
    own.mkdir(parents=True)
    text = (folder / REPORT).read_text()
    (own / REPORT).write_text(text)
    for file in re.findall(r"\]\(([^)/]+\.(?:csv|svg))\)", text):
        content = (folder / file).read_text()
        (own / file).write_text(smaller(content) if file.endswith(".svg") else content)


def with_tables(text: str, folder: Path) -> str:
    """Return a page with its tables as plain text."""
    return TABLE.sub(lambda found: plain(list(csv.reader((folder / found[1]).open()))), text)


def smaller(svg: str) -> str:
    """Return a picture of matplotlib's without metadata, names of groups and needless decimals."""
    svg = re.sub(r"<metadata>.*?</metadata>|<[!?].*?>", "", svg, flags=re.DOTALL)
    # A marker has its own style, but for the fill.
    svg = re.sub(r'(<use [^>]*) style="fill: ([^;"]*)[^"]*"', r'\1 fill="\2"', svg)
    svg = re.sub(r'(<use [^>]*) style="[^"]*"', r"\1", svg)
    svg = re.sub(r"(font: \S+) [^;\"]*sans-serif", r"\1 DejaVu Sans, Verdana, sans-serif", svg)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    in_tag = r"\d+\.\d+(?=[^<>]*>)"
    svg = re.sub(in_tag, lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")
    svg = re.sub(r"<g>(<[^<>]*/>|<text[^<>]*>[^<>]*</text>)</g>", r"\1", svg)
    return svg.strip().replace("><g", ">\n<g") + "\n"
