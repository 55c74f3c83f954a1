"""Experiments: from a question to a table and a figure.

python -m experiments list                 the questions
python -m experiments run NAME             run what has not been run
python -m experiments status NAME          what is done, failed, left
python -m experiments report NAME          table (Markdown) and figures
"""

import argparse
import os
import sys
from pathlib import Path

import configuration
from experiments import EXPERIMENTS
from experiments.runner import Experiment, Folder, carry_out
from network import BadInput


def main(arguments: list[str]) -> None:
    """As the command line says. Raises BadInput; exits with 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["list", "run", "status", "report"])
    parser.add_argument("name", nargs="?", help="an experiment")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--dry-run", action="store_true", help="show the commands only")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:<24}{experiment.title}")
        return
    if options.name not in EXPERIMENTS:
        choices = ", ".join(EXPERIMENTS)
        raise BadInput(f'experiment "{options.name}" is unknown; choose from {choices}')
    if options.cores < 1:
        raise BadInput(f"--cores {options.cores}: use 1 or more")
    experiment, folder = EXPERIMENTS[options.name], Folder(options.name)
    if options.command == "status":
        _status(experiment, folder)
    elif options.command == "report":
        _report(options.name, experiment, folder)
    elif options.dry_run:
        for runs in folder.runs(experiment):
            for run in runs:
                print(f"{folder.state(run):<7}{' '.join(run.command)}")
    else:
        with folder.claimed():
            failed = carry_out(experiment, folder, options.cores)
        if failed:
            print(f"{len(failed)} runs failed; run again to try them once more", file=sys.stderr)
            sys.exit(1)
        print(f"done; see: python -m experiments report {options.name}")


def _status(experiment: Experiment, folder: Folder) -> None:
    for number, runs in enumerate(folder.runs(experiment), 1):
        states = [folder.state(run) for run in runs]
        counts = ", ".join(f"{states.count(s)} {s}" for s in ("done", "failed", "begun", "new"))
        print(f"stage {number} of {len(experiment.stages)}: {counts}")
        for run, state in zip(runs, states, strict=True):
            if state == "failed":
                print(f"  failed: {folder.of(run) / 'log.txt'}")


def _report(name: str, experiment: Experiment, folder: Folder) -> None:
    try:
        text = experiment.report(folder.results, folder.path)
    except ValueError as error:
        raise BadInput(f"{error}; run it first: python -m experiments run {name}") from error
    text += f"\n`python -m experiments run {name}`: {folder.provenance(experiment)}\n"
    (folder.path / "report.md").write_text(text)
    print(f"{text}\nwritten to {Path(folder.path) / 'report.md'}")


if __name__ == "__main__":
    configuration.run_entry_point(main)
