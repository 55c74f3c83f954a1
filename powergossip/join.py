"""Train on machines anywhere:  powergossip-join new --workers 4 --config FILE.yaml

The first machine prints a ticket and waits for the others:

    powergossip-join new --workers N [--config FILE.yaml] [key=value ...]   on the first machine
    powergossip-join TICKET [--output-dir DIR] [key=value ...]              on each of the others

All other arguments are those of train.py, such as on_worker_loss=continue on the first machine, and
"ticket_options={port: 41000}" on any. A machine that joins gets the settings of the run from the
first one and prints them. It accepts no settings that may be code or files of its own, unless they
are given here: --allow VALUE. Keys of one machine such as device and data_dir are its own.

Each machine has all rows of the run in its own output folder, and the checkpoints of its own
worker. After an interruption, every machine starts again with the name of the run, its folder and
resume=true: first the first one, then the others.

    powergossip-join NAME --output-dir DIR resume=true

The machines can measure the links between them first, those of the topology's edges. They then
train with the same ticket.

    powergossip-join new --workers N --check                  and the command that it prints
    powergossip-join NAME --workers N [key=value ...]         and powergossip-join NAME elsewhere

With on_worker_loss=continue, the others go on without a machine that has left. The same command on
it, with the name of the run, enters the run again. A machine that was silent for too long, such as
one without a network, does so by itself: for an hour, it looks for the others.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from powergossip import exits
from powergossip.errors import BadInput, Dropped, Stopped
from powergossip.runs import configuration

_LONGEST = 3600.0  # seconds for which a machine that was silent looks for the others


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """Run with these arguments. Returns the folder of the run on this machine, None for --check."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or {"-h", "--help"} & set(given):
        print(__doc__)
        sys.exit(0)
    ticket, rest = given[0], given[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--output-dir")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--return", action="store_true", dest="returns")  # see _come_back
    try:
        options, rest = parser.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise BadInput(str(error)) from error
    if ticket == "new" and options.workers is None:
        raise BadInput("new: use --workers N, the number of machines, with it")
    options.own = rest
    rest = [*rest, f"ticket={ticket}"]
    if options.workers is not None:
        if options.workers < 2:
            raise BadInput(f"--workers {options.workers}: use at least 2, one for each machine")
        if any(word.startswith("n_workers=") for word in rest):
            raise BadInput("n_workers: leave it out; --workers is the number of machines")
        rest.append(f"n_workers={options.workers}")

    import train

    with configuration.imports():
        from powergossip.network.internet import link_check, meeting
        from powergossip.training.definition import settings, shown
    options_of_ticket = meeting.Options.of(_settings(rest).ticket_options)
    asked, definition = None, None
    if ticket != "new":
        patience = _LONGEST if options.returns else 0.0
        asked = meeting.ask(ticket, options_of_ticket, patience=patience)
        definition = asked.definition
    if options.check or definition == link_check.DEFINITION:
        if definition not in (None, link_check.DEFINITION):
            raise BadInput("--check: use it on the first machine, before the run")
        _check(rest)
        return None
    if asked is not None and definition is not None:
        name = asked.ticket.name
        try:
            found = settings(definition, options.allow)
        except BadInput:
            asked.leave()
            raise
        print(f"run {name}, defined by the first machine:\n{shown(found)}\n", flush=True)
        for key, value in found.items():
            train.config[key] = value
        if asked.node.is_away:
            rest = ["resume=auto", *rest]
        options.output_dir = options.output_dir or str(Path("output") / name)
    rest += ["--output-dir", options.output_dir] if options.output_dir else []
    try:
        return train.main(rest)
    except Stopped as error:
        if type(error) in (Dropped, Stopped):
            _come_back(error, options)
        raise


def _check(arguments: Sequence[str]) -> None:
    """Meet the other machines and measure the links of all edges."""
    from powergossip import topologies
    from powergossip.network import processes
    from powergossip.network.internet import link_check

    c = _settings(arguments)
    size, definition = c.n_workers or 1, link_check.DEFINITION
    found: Any = processes(
        ticket=c.ticket, size=size, ticket_options=c.ticket_options, definition=definition
    )
    with found.agreed():
        made = topologies.make(c.topology, found.size, seed=c.seed, options=c.topology_options)
    link_check.check(found, [(i, j) for i, j in made.edges.tolist()])


def _come_back(error: Stopped, options: argparse.Namespace) -> None:
    """Begin this program anew, to enter the run again: the others go on without this machine."""
    from powergossip.network import processes

    exits.report(error)
    sys.stdout.flush()
    name = getattr(processes(), "name")  # noqa: B009 of machines with a ticket
    words = [name, "--return", "--output-dir", options.output_dir or str(Path("output") / name)]
    words += [word for value in options.allow for word in ("--allow", value)]
    os.execv(sys.executable, [sys.executable, "-m", "powergossip.join", *words, *options.own])


def _settings(arguments: Sequence[str]) -> DictConfig:
    """The keys of a command line."""
    from powergossip.training.config import Config

    config = configuration.structured(Config)
    configuration.read_command_line(config, list(arguments), "")
    return config


def command() -> None:
    """Run as a program; bad input is one sentence, exit code 2."""
    configuration.run_entry_point(main)


if __name__ == "__main__":
    command()
