"""RESULTS.md, the sequence of the published reports.

A published report and its figures are in docs/results/EXPERIMENT, which keeps measurements with
the code that made them. output/ contains reproducible files only.
"""

import re
import shutil
from pathlib import Path

from experiments import EXPERIMENTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "RESULTS.md"
PUBLISHED = ROOT / "docs" / "results"
REPORT = "report.md"

HEAD = """# Results

Made by `python -m experiments report NAME --publish`, which adds or replaces the section of an
experiment. The end of each section has the command that reproduces it, the versions and the
machine. `python -m experiments list` lists all experiments.
"""


def publish(name: str, folder: Path) -> None:
    """Copy an experiment's report and its figures, and rewrite RESULTS.md."""
    own = PUBLISHED / name
    if own.exists():
        shutil.rmtree(own)
    own.mkdir(parents=True)
    text = (folder / REPORT).read_text()
    (own / REPORT).write_text(text)
    for figure in _figures(text):
        shutil.copy(folder / figure, own / figure)
    RESULTS.write_text(assembled())


def assembled() -> str:
    """Return the text of RESULTS.md: the published reports in the order of `EXPERIMENTS`."""
    parts = [HEAD]
    for name in EXPERIMENTS:
        file = PUBLISHED / name / REPORT
        if file.exists():
            text = file.read_text()
            for figure in _figures(text):
                path = (PUBLISHED / name / figure).relative_to(RESULTS.parent)
                text = text.replace(f"]({figure})", f"]({path})")
            parts.append(f"## {name}\n\n{text}")
    return "\n".join(parts)


def _figures(text: str) -> list[str]:
    """The files of a report's figures."""
    return re.findall(r"!\[[^]]*\]\(([^)/]+)\)", text)
