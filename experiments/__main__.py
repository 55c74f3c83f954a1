"""Experiments: from a question to a table and a figure.

python -m experiments list                     list the experiments
python -m experiments run NAME                 carry out the missing runs
python -m experiments status [NAME]            count completed, failed and missing runs
python -m experiments report NAME              make the page, its tables (CSV) and pictures
python -m experiments report NAME --publish    also copy them to docs/results

--launcher mpirun or torchrun: on this machine, process: all workers in one process,
slurm: a job per run
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from experiments import EXPERIMENTS, PAPERS, results
from powergossip import checks, command_line
from powergossip.errors import BadInput
from powergossip.runner.launchers import LAUNCHERS
from powergossip.runner.runner import (
    Experiment,
    Folder,
    Run,
    Terminated,
    carry_out,
    sentence_case,
)


def main(arguments: Sequence[str]) -> None:
    """Carry out a command line. Raises BadInput; exits with 1 if a run failed."""
    parser = command_line.parser("python -m experiments", __doc__ or "")
    parser.add_argument("command", choices=["list", "run", "status", "report"])
    parser.add_argument("name", nargs="?", help="an experiment")
    parser.add_argument(
        "--cores", type=int, help="cores for concurrent runs; with Slurm: concurrent jobs"
    )
    parser.add_argument("--launcher", default="mpirun", help=", ".join(LAUNCHERS))
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--publish", action="store_true", help="copy the report to docs/results")
    options = command_line.parsed(parser, arguments)
    if options.command == "list":
        _list()
        return
    try:
        _check(options)
    except checks.BadValue as error:
        raise BadInput(str(error)) from error
    if options.name is None:
        _status_of_all()
        return
    experiment, folder = EXPERIMENTS[options.name], Folder(options.name)
    if options.command == "status":
        print_status(experiment, folder)
    elif options.command == "report":
        _report(options.name, experiment, folder)
        if options.publish:
            results.publish(options.name, folder.path)
            print(f"copied to {results.PUBLISHED / options.name}")
    elif options.dry_run:
        for runs in folder.runs(experiment):
            for run in runs:
                print(f"{folder.state(run):<7}{shlex.join(run.command)}")
    else:
        try:
            with folder.claimed():
                failed = carry_out(experiment, folder, options.cores, options.launcher)
        except Terminated:
            sys.exit(128 + signal.SIGTERM)
        if failed:
            print(f"{len(failed)} runs failed; run again to repeat them", file=sys.stderr)
            sys.exit(1)
        print(f"done; see: python -m experiments report {options.name}")


def _list() -> None:
    """The experiments by paper."""
    width = max(map(len, EXPERIMENTS)) + 2
    of_papers = {*chain.from_iterable(PAPERS.values())}
    others = tuple(name for name in EXPERIMENTS if name not in of_papers)
    for title, names in {**PAPERS, "Questions of this project": others}.items():
        print(f"{title}:")
        for name in names:
            print(f"  {name:<{width}}{EXPERIMENTS[name].title}")


def _check(options: argparse.Namespace) -> None:
    """Raise BadValue for arguments that are not accepted."""
    if options.name is not None:
        checks.one_of("experiment", options.name, EXPERIMENTS)
    elif options.command != "status":
        raise BadInput(f"{options.command} needs the name of an experiment; list shows them")
    if options.cores is not None:
        checks.at_least_one("--cores", options.cores)
    checks.one_of("--launcher", options.launcher, LAUNCHERS)
    if options.publish:
        ok = options.command == "report"
        checks.check("command", options.command, ok, "report with --publish")
    if options.dry_run:
        ok = options.command == "run"
        checks.check("command", options.command, ok, "run with --dry-run")


def _status_of_all() -> None:
    width = max(map(len, EXPERIMENTS)) + 2
    for name, experiment in EXPERIMENTS.items():
        folder = Folder(name)
        stages = list(folder.runs(experiment))
        states = _states(folder, chain.from_iterable(stages))
        more = ", more after these" if len(stages) < len(experiment.stages) else ""
        print(f"{name:<{width}}{_counted(states)}{more}")


def _states(folder: Folder, runs: Iterable[Run]) -> list[str]:
    return [folder.state(run) for run in runs]


def _counted(states: Sequence[str]) -> str:
    counts = {state: states.count(state) for state in ("done", "failed", "begun", "new")}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def print_status(experiment: Experiment, folder: Folder) -> None:
    for number, runs in enumerate(folder.runs(experiment), 1):
        states = _states(folder, runs)
        print(f"stage {number} of {len(experiment.stages)}: {_counted(states)}")
        for run, state in zip(runs, states, strict=True):
            if state == "failed":
                print(f"  failed: {folder.of(run) / 'log.txt'}")


def _report(name: str, experiment: Experiment, folder: Folder) -> None:
    try:
        text = experiment.report(folder.results, folder.path)
    except ValueError as error:
        raise BadInput(f"{error}; run it first: python -m experiments run {name}") from error
    made = f"`python -m experiments run {name}`: {folder.provenance(experiment)}"
    text = f"# {sentence_case(experiment.title)}\n\n{text}\n\n{made}\n"
    (folder.path / results.REPORT).write_text(text)
    print(
        f"{results.with_tables(text, folder.path)}\nwritten to {Path(folder.path) / results.REPORT}"
    )


if __name__ == "__main__":
    command_line.run(main)
