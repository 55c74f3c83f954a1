"""The start of a run: its configuration, its processes, and the folder that it resumes."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from powergossip.errors import BadInput
from powergossip.network import Processes, launch, processes
from powergossip.runs.clock import Clock
from powergossip.runs.configuration import Request
from powergossip.runs.metrics import Hooks
from powergossip.runs.output import run_to_resume
from powergossip.training.config import Settings
from powergossip.training.config_checks import checked
from powergossip.training.construction import make_network
from powergossip.training.definition import definition
from powergossip.training.methods import check_method
from powergossip.training.trainer import Trainer


@dataclass(frozen=True)
class NewRun:
    """A run that is about to begin.

    Attributes:
        config: Checked configuration, with the defaults of its task and method.
        processes: The connected processes.
        name: Name of the requested output folder, or None.
        resumed: Folder of the run to resume or to evaluate, or None.
    """

    config: Settings
    processes: Processes
    name: str | None = None
    resumed: Path | None = None

    def trainer(self, hooks: Hooks) -> Trainer:
        """The trainer of the run. All processes call it. Raises BadInput."""
        return Trainer(self.config, self.processes, hooks, resume_from=self.resumed)

    @property
    def evaluated(self) -> Path:
        """The folder whose checkpoint is evaluated."""
        assert self.resumed is not None, "evaluate_only needs a folder"
        return self.resumed

    def command(self, program: str, folder: Path) -> str:
        """The command that resumes the run."""
        if self.processes.has_own_files:
            start = launch.command(self.processes)
        else:
            start = f"{launch.command(self.processes)} {shlex.quote(os.path.relpath(program))}"
        return f"{start} --output-dir {shlex.quote(str(folder))} resume=true"


def begin(request: Request) -> NewRun:
    """Connect the processes and check the requested configuration.

    Raises:
        BadInput: In all processes, for a request that cannot be carried out.
    """
    asked, name = request.config, request.folder
    if asked.ticket is None and "ticket" in request.explicit:
        raise BadInput("ticket= is empty; use new, a ticket, or the name of a run, or leave it out")
    if asked.evaluate_only and asked.ticket is not None:
        raise BadInput("evaluate_only=true: use no ticket, and the checkpoints of all machines")
    if asked.ticket == "new":  # before other machines are asked to join
        planned = Processes.on_machines(asked.n_workers or 1)
        with planned.agreed():
            c = checked(asked, planned, request.explicit)
            check_method(c, make_network(c, planned, Clock()))
    found = processes(
        asked.distributed_backend,
        asked.distributed_init_file,
        asked.rank,
        asked.n_workers or 1,
        asked.ticket,
        asked.ticket_options,
        definition(asked) if asked.ticket is not None else "",
    )
    asked.ticket = None  # a secret, which no file of the run has
    found.set_threads()
    request.check(found)
    with found.agreed():
        settings = checked(asked, found, request.explicit)
    resumed = None
    with found.agreed():
        if found.writes:
            key = "evaluate_only" if settings.evaluate_only else "resume"
            resumed = run_to_resume(name, getattr(settings, key), key)
    if found.has_own_files:
        starts = {"resumed runs": resumed is not None}
        found.check_same(
            starts,
            "{key}: use the same in all processes (process 0 {first}, process {process} {other})",
        )
    else:
        resumed = found.broadcast(resumed)
    return NewRun(settings, found, name, resumed)
