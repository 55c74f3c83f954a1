"""Is my method better? Methods side by side on fixed tasks, each tuned with equally many runs.

    powergossip-benchmark new my_method.py          a file to begin with, which runs as it is
    powergossip-benchmark list                      tasks, tiers and entries
    powergossip-benchmark run my_method.py          all tasks of the quick tier; resumes
    powergossip-benchmark run my_method.py --tier full --launcher slurm
    powergossip-benchmark run d-psgd --task fashion_mnist_sorted
    powergossip-benchmark show                      tables of all entries
    powergossip-benchmark show my_method            and the method beside each of the others

my_method.py registers a method, and has SETTINGS, the settings to try. `new` writes an averaging
rule, or with --kind compressor a compressor.

Results are files NAME.json in output/benchmark, beside the folders of the runs.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from powergossip import command_line
from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import QUICK, SEEDS, TASKS, TIERS, TRIES
from powergossip.errors import BadInput, reason
from powergossip.formatting import plain

OUTPUT = Path("output/benchmark")
LAUNCHERS = ("process", "slurm")
TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("averaging", "compressor")  # the first one by default
COMMANDS: dict[str, set[str]] = {  # and their options
    "new": {"kind"},
    "list": {"tier", "folder"},
    "run": {"tier", "task", "cores", "launcher", "folder"},
    "show": {"tier", "task", "folder", "output"},
}


def main(arguments: Sequence[str]) -> None:
    """Carry out a command line. Raises BadInput; exits with 1 if a run failed."""
    options = _parse(arguments)
    carry_out = {"new": _new, "list": _list, "run": _run, "show": _show}
    try:
        carry_out[options.command](options)
    except OSError as error:
        if error.filename is None:  # of the standard output
            raise
        raise BadInput(reason(error)) from error


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def command() -> None:
    command_line.run(main)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("powergossip-benchmark", __doc__ or "")
    parser.add_argument("command", choices=COMMANDS, help="new, list, run or show")
    parser.add_argument("method", nargs="?", help="a file NAME.py, or an entry's name")
    parser.add_argument("--tier", choices=TIERS, help=f"by default {QUICK}")
    parser.add_argument(
        "--task", action="append", choices=TASKS, help="repeatable; by default all tasks"
    )
    parser.add_argument("--cores", type=int, help="cores for concurrent runs; Slurm: jobs")
    parser.add_argument("--launcher", choices=LAUNCHERS, help=f"by default {LAUNCHERS[0]}")
    parser.add_argument("--folder", type=Path, help=f"folder of runs and results; {OUTPUT}")
    parser.add_argument("--output", type=Path, help="folder of show's page")
    parser.add_argument("--kind", choices=KINDS, help=f"of a new file; by default {KINDS[0]}")
    options = command_line.parsed(parser, arguments)
    given = {k for k, v in vars(options).items() if v is not None} - {"command", "method"}
    for name in sorted(given - COMMANDS[options.command]):
        accepted = ", ".join(f"--{n}" for n in sorted(COMMANDS[options.command]))
        raise BadInput(f"{options.command} has no option --{name}; use {accepted}")
    if options.cores is not None and options.cores < 1:
        raise BadInput(f"--cores={options.cores}: use a whole number of 1 or more")
    if options.command == "run" and options.method is None:
        raise BadInput(f"{options.command} needs a file or the name of an entry")
    if options.command == "new" and Path(options.method or "").suffix != ".py":
        raise BadInput("new needs the name of a file, such as my_method.py")
    if options.command == "list" and options.method is not None:
        raise BadInput(f"list takes no method; use show {options.method}")
    options.tier, options.launcher = options.tier or QUICK, options.launcher or LAUNCHERS[0]
    options.folder = options.folder or OUTPUT
    return options


def _new(options: argparse.Namespace) -> None:
    from powergossip.benchmark import entries

    path, text = Path(options.method), (TEMPLATES / f"{options.kind or KINDS[0]}.py").read_text()
    text = text.replace("my_method.py", str(path)).replace("my_method", path.stem)
    entries.from_source(text, path)  # its name
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise BadInput(f"{path} exists; use another name") from error
    print(f"written: {path}; change it, then: powergossip-benchmark run {shlex.quote(str(path))}")


def _list(options: argparse.Namespace) -> None:
    from powergossip.benchmark import library, results

    width = max(map(len, TASKS)) + 3
    tasks = [
        f"  {task.name:<{width}}{task.title} (version {task.version}; target: "
        f"{task.measure.title} {task.measure.factor * task.targets[options.tier]:g})"
        for task in TASKS.values()
    ]
    tiers = [["tier", "settings tried", "seeds"]]
    tiers += [[tier, str(TRIES[tier]), str(len(SEEDS))] for tier in TIERS]
    done = {
        found["name"]: ", ".join(found["tiers"])
        for found in results.read_all([results.OF_LIBRARY, options.folder], _warn)
    }
    entries = [["entry", "results"]]
    entries += [[name, done.get(name, "")] for name in dict.fromkeys((*library.ENTRIES, *done))]
    print("\n\n".join(["\n".join(tasks), plain(tiers), plain(entries)]))


def _run(options: argparse.Namespace) -> None:
    from powergossip.benchmark import entries, results
    from powergossip.benchmark.campaign import Campaign
    from powergossip.runner.runner import carry_out

    entry = entries.find(options.method)
    method = str(Path(options.method).resolve()) if entry.source else options.method
    own = options.folder / f"{entry.name}.json"
    if own.exists():
        try:
            results.read(own)
        except BadInput as error:
            raise BadInput(f"{error}; move it, so that it is not overwritten") from error
    names = accepting(entry, options.task or list(entry.settings), options.tier)
    campaign = Campaign(entry, method, options.tier, names, options.folder)
    most = max(len(entry.settings[name]) for name in names)
    if most > TRIES[options.tier]:
        print(f"of up to {most} settings of a task, the first {TRIES[options.tier]} are tried")
    with campaign.folder.claimed():
        failed = carry_out(campaign.experiment, campaign.folder, options.cores, options.launcher)
    for run in failed:
        print(f"failed: {campaign.folder.of(run) / 'log.txt'}", file=sys.stderr)
    found = campaign.results()
    if found:
        path = results.save(entry, options.tier, found, options.folder)
        where = "" if options.folder == OUTPUT else f" --folder {shlex.quote(str(options.folder))}"
        show = f"powergossip-benchmark show {entry.name}{where}"
        print(f"results: {path}; beside the others: {show}")
    if failed:
        sys.exit(1)


def accepting(entry: Entry, names: Sequence[str], tier: str) -> list[str]:
    """Those of the tasks that accept the settings of an entry. Prints why others do not.

    Raises BadInput if none does.
    """
    from powergossip.benchmark import entry_runs

    kept, rejected = [], []
    for name in dict.fromkeys(names):
        try:
            if name not in entry.settings:
                tasks = ", ".join(entry.settings)
                raise BadInput(f"{entry.name} has no settings of {name}; use {tasks}")
            for setting in entry.settings[name][: TRIES[tier]]:
                entry_runs.check(TASKS[name], tier, setting)
            kept.append(name)
        except BadInput as error:
            rejected.append(str(error))
    if not kept:
        raise BadInput(rejected[0])
    for sentence in rejected:
        print(f"left out: {sentence}")
    return kept


def _show(options: argparse.Namespace) -> None:
    from powergossip.benchmark import page, results

    found = results.read_all([results.OF_LIBRARY, options.folder], _warn)
    chosen = _name(options.method)
    names = [entry["name"] for entry in found]
    if chosen and chosen not in names:
        raise BadInput(
            f'there are no results of "{chosen}"; run it first, or use {", ".join(names)}'
        )
    tasks = options.task or list(TASKS)
    for entry in found:
        if entry["name"] == chosen and not {*tasks} & {*entry["tiers"].get(options.tier, {})}:
            missing = f"{', '.join(tasks)} in the tier {options.tier}"
            raise BadInput(f"{chosen} has no results of {missing}; run it first")
    width = shutil.get_terminal_size((100, 24)).columns
    print(page.text(found, options.tier, options.task, chosen, width), end="")
    if options.output is not None:
        for path in page.write(found, options.output, options.task, [options.tier], chosen):
            print(f"written: {path}")


def _name(method: str | None) -> str | None:
    """The name of an entry, also from the name of a file."""
    return Path(method).stem if method and method.endswith(".py") else method
