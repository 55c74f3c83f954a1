"""Runs side by side: one table and one figure of several output folders.

    powergossip-compare output/a output/b
    powergossip-compare 'output/ring-*' --output output/compared
    powergossip-compare output/* --metric cross_entropy --split valid --output loss.svg

The table has the metric at the end of a run and at its best epoch, of the mean model and of the
worst worker, the megabytes that worker 0 has sent, the seconds, and each key of the configuration
that differs. The figure has the metric by epoch, by megabytes and by seconds. Runs whose
configurations are equal up to the seed are one line: mean ± standard deviation.

It compares runs of train.py and gossip_run.py. Each algorithm of gossip_run.py is a run, at its
best setting, with its error relative to the start.
"""

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from powergossip import command_line
from powergossip.compare.groups import sections
from powergossip.compare.output import STEM, SUFFIXES, text, write
from powergossip.compare.runs import SPLITS, folders, is_run, read
from powergossip.errors import BadInput
from powergossip.formatting import visible


def main(arguments: Sequence[str]) -> None:
    """Compare runs as on the command line. Raises BadInput before anything is written."""
    options = _parse(arguments)

    def warn(text: str) -> None:
        print(f"note: {visible(text)}", file=sys.stderr)

    targets = _targets(options.output)
    runs = []
    found_folders = folders(options.runs, warn)
    for folder in found_folders:
        try:
            runs += read(folder, warn)
        except BadInput as error:
            if len(found_folders) == 1:
                raise
            warn(f"{error}; left out")
    if not runs:
        raise BadInput(
            "none of these runs has rows to compare; give runs that have finished an epoch"
        )
    found = sections(runs, options.metric, options.split, warn)
    print(text(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf))
    written: list[Path] = []
    try:
        for path in targets:
            written += write(found, path, [file.name for file in written])
    except OSError as error:
        raise BadInput(f"--output={options.output}: {error.strerror or error}") from error
    print("".join(f"\n{file}" for file in written), end="\n" if written else "")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line. Raises BadInput; exits after --help."""
    parser = command_line.parser("powergossip-compare", __doc__ or "")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="output folders, or quoted patterns such as 'a/*'")
    add("--metric", metavar="NAME", help="name of rows, by default the main metric of the task")
    add("--split", default="test", choices=SPLITS, help="data of the metric (test)")
    formats = ", ".join(SUFFIXES)
    add("--output", metavar="PATH", help=f"a file ({formats}) or a folder for files")
    options = command_line.parsed(parser, arguments)
    if not options.runs:
        raise BadInput("give one or more folders of runs, such as output/*")
    return options


def _targets(output: str | None) -> list[Path]:
    """The files to write, figures first, which a table links to. Raises BadInput."""
    if output is None:
        return []
    path = Path(output)
    if path.suffix.lower() in SUFFIXES:
        if path.is_dir():
            raise BadInput(f"--output={output} is a folder; give the name of a file")
        return [path]
    other = path.suffix[1:].isalpha() and not path.exists()  # ring-0.1 is a folder
    if other or (path.exists() and not path.is_dir()):
        raise BadInput(f"--output={output}: use a folder, or a file that ends in "
                       f"{', '.join(SUFFIXES)}")  # fmt: skip
    if is_run(path):
        raise BadInput(f"--output={output} is a run; give another folder")
    return [path / f"{STEM}.svg", path / f"{STEM}.md"]


def command() -> None:
    """Run as a program. Bad input is one sentence, exit code 2."""
    command_line.run(main)
