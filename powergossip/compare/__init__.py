"""Runs side by side: one table and one figure of several output folders::

    runs.py          a run, its files, the curve of a metric
    groups.py        groups of seeds, what differs between them, the cells of the table
    output.py        text, Markdown, figures
    command_line.py  powergossip-compare

Nothing here imports torch, so that it starts fast.
"""

from powergossip.compare.command_line import command, main
from powergossip.compare.groups import Group, Section, sections
from powergossip.compare.output import markdown, text, write
from powergossip.compare.runs import Metric, Run, folders, read

__all__ = [
    "Group",
    "Metric",
    "Run",
    "Section",
    "command",
    "folders",
    "main",
    "markdown",
    "read",
    "sections",
    "text",
    "write",
]
