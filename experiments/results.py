"""RESULTS.md: the reports that were published, one after the other.

A published report and its figures lie in docs/results/EXPERIMENT, so that what was measured is kept
with the code that measured it; output/ is for everything that can be made again.
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

Made by `python -m experiments report NAME --publish`, which adds or replaces an experiment's part.
Under each part stands how to repeat it, and what it was made with. `python -m experiments list`
says what else there is.
"""


def publish(name: str, folder: Path) -> None:
    """Take over an experiment's report, with the figures it shows, and write RESULTS.md anew."""
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
    """The text of RESULTS.md: the published reports in the order of `EXPERIMENTS`."""
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
    """The files that a report shows."""
    return re.findall(r"!\[[^]]*\]\(([^)/]+)\)", text)
