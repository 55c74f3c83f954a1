"""Experiments: from a question to a table and a figure.

python -m experiments list                 the questions
python -m experiments run NAME             run what has not been run
python -m experiments status [NAME]        what is done, failed, left
python -m experiments report NAME          table (Markdown) and figures
python -m experiments report NAME --publish    and put them into RESULTS.md

--launcher mpirun: here; process: all workers of a run in one process; slurm: a job for each run.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from experiments import EXPERIMENTS, results
from experiments.launchers import LAUNCHERS
from experiments.runner import Experiment, Folder, Run, carry_out
from powergossip.errors import BadInput

JOBS = 64  # of Slurm at a time


def main(arguments: list[str]) -> None:
    """As the command line says. Raises BadInput; exits with 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["list", "run", "status", "report"])
    parser.add_argument("name", nargs="?", help="an experiment")
    parser.add_argument("--cores", type=int, help="to use at a time; of Slurm: jobs at a time")
    parser.add_argument("--launcher", default="mpirun", help=", ".join(LAUNCHERS))
    parser.add_argument("--dry-run", action="store_true", help="show the commands only")
    parser.add_argument("--publish", action="store_true", help="put the report into RESULTS.md")
    options = parser.parse_args(arguments)
    if options.command == "list":
        width = max(map(len, EXPERIMENTS)) + 2
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:<{width}}{experiment.title}")
        return
    if options.name not in EXPERIMENTS and (options.name or options.command != "status"):
        found = f'experiment "{options.name}" is unknown' if options.name else "no experiment named"
        raise BadInput(f"{found}; choose from {', '.join(EXPERIMENTS)}")
    if options.cores is not None and options.cores < 1:
        raise BadInput(f"--cores {options.cores}: use 1 or more")
    if options.launcher not in LAUNCHERS:
        choices = ", ".join(LAUNCHERS)
        raise BadInput(f'launcher "{options.launcher}" is unknown; choose from {choices}')
    if options.publish and options.command != "report":
        raise BadInput(f"--publish goes with report, not with {options.command}")
    if options.dry_run and options.command != "run":
        raise BadInput(f"--dry-run goes with run, not with {options.command}")
    if options.name is None:
        _status_of_all()
        return
    cores = options.cores or (JOBS if options.launcher == "slurm" else os.cpu_count() or 1)
    experiment, folder = EXPERIMENTS[options.name], Folder(options.name)
    if options.command == "status":
        _status(experiment, folder)
    elif options.command == "report":
        _report(options.name, experiment, folder)
        if options.publish:
            results.publish(options.name, folder.path)
            print(f"and put into {results.RESULTS}")
    elif options.dry_run:
        for runs in folder.runs(experiment):
            for run in runs:
                print(f"{folder.state(run):<7}{' '.join(run.command)}")
    else:
        with folder.claimed():
            failed = carry_out(experiment, folder, cores, options.launcher)
        _tell_others(experiment, folder)
        if failed:
            print(f"{len(failed)} runs failed; run again to try them once more", file=sys.stderr)
            sys.exit(1)
        print(f"done; see: python -m experiments report {options.name}")


def _status_of_all() -> None:
    width = max(map(len, EXPERIMENTS)) + 2
    for name, experiment in EXPERIMENTS.items():
        folder = Folder(name)
        stages = list(folder.runs(experiment))
        states = _states(folder, chain.from_iterable(stages))
        more = ", more when these are done" if len(stages) < len(experiment.stages) else ""
        print(f"{name:<{width}}{_counted(states)}{more}")


def _states(folder: Folder, runs: Iterable[Run]) -> list[str]:
    return [folder.state(run) for run in runs]


def _counted(states: Sequence[str]) -> str:
    counts = {state: states.count(state) for state in ("done", "failed", "begun", "new")}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _status(experiment: Experiment, folder: Folder) -> None:
    for number, runs in enumerate(folder.runs(experiment), 1):
        states = _states(folder, runs)
        print(f"stage {number} of {len(experiment.stages)}: {_counted(states)}")
        for run, state in zip(runs, states, strict=True):
            if state == "failed":
                print(f"  failed: {folder.of(run) / 'log.txt'}")
    _tell_others(experiment, folder)


def _tell_others(experiment: Experiment, folder: Folder) -> None:
    others = folder.others(experiment)
    if others:
        print("kept, but not used, since the experiment has no such run now:")
    for path, differing in others:
        print(f"  {path}: {', '.join(differing)}")


def _report(name: str, experiment: Experiment, folder: Folder) -> None:
    try:
        text = experiment.report(folder.results, folder.path)
    except ValueError as error:
        raise BadInput(f"{error}; run it first: python -m experiments run {name}") from error
    text += f"\n`python -m experiments run {name}`: {folder.provenance(experiment)}\n"
    (folder.path / results.REPORT).write_text(text)
    print(f"{text}\nwritten to {Path(folder.path) / results.REPORT}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
