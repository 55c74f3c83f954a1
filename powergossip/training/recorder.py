"""The record of a run: its output folder, written by one of the processes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from powergossip.errors import CannotWrite, Dropped, Interrupted, PeerLost, Stopped
from powergossip.formatting import prefixed
from powergossip.runs import configuration, figures, metrics, output, summaries
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.files import FIGURE, SAMPLE
from powergossip.runs.metrics import Hooks, Row
from powergossip.runs.output import COMPLETE, Output
from powergossip.training import resizing
from powergossip.training.config import Config
from powergossip.training.ending import complete_without
from powergossip.training.resuming import check_rest
from powergossip.training.start import NewRun
from powergossip.training.trainer import Trainer

_now: "Recorder | None" = None  # of the run in progress


def write_row(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
    """Write a row of the run in progress, in the process that writes."""
    if _now is not None and _now.output is not None:
        _now.output.write(name, values, tags)


def write_facts(facts: Mapping[str, Any]) -> None:
    """Write facts about the run in progress, in the process that writes."""
    if _now is not None and _now.output is not None:
        _now.output.add_info(facts)


class Recorder:
    """Writes the output folder of a run: on process 0, or on the next survivor if that is lost.

    Args:
        run: The run that begins.
        given: The hooks of the entry point.
        program: File of the entry point, for the command that resumes the run.

    Attributes:
        hooks: Hooks for a writer that takes over, too.
        folder: Folder of the run, in all processes, within `recording`.
    """

    def __init__(self, run: NewRun, given: Hooks, program: str):
        self._run, self._program = run, program
        self.hooks = replace(given, take_over=self._take_over)
        self.folder = Path()
        self._rows_were_lost = False
        self.output: Output | None = None  # in the process that writes

    @contextmanager
    def recording(self, trainer: Trainer) -> Iterator[None]:
        """A block that trains the run in its folder. At its end both are closed.

        Raises BadInput, in all processes, if the folder cannot be written.
        """
        global _now
        _now, ending = self, None
        try:
            self._open(trainer)
            yield
            missing = trainer.execution.missing
            if missing and trainer.processes.is_first:
                print(complete_without(missing, trainer.config.n_workers))
        except Dropped:
            self.output = None  # others write to the folder
            raise
        except Interrupted as error:
            ending = type(error).__name__
            command = self._run.command(self._program, self.folder)
            raise Interrupted(f"{error}; resume with: {command}", error.signal) from None
        except BaseException as error:
            ending = type(error).__name__
            if isinstance(error, PeerLost) and trainer.processes.has_own_files:
                command = self._run.command(self._program, self.folder)
                raise PeerLost(f"{error}; resume on all machines, here with: {command}") from None
            raise
        finally:
            trainer.close()
            if self.output is not None:
                self.output.close(ending)
            _now = self.output = None

    def _open(self, trainer: Trainer) -> None:
        """Begin or resume the folder of the run. All processes call it."""
        c, run, processes = trainer.config, self._run, trainer.processes
        self._bits_before = int(trainer.network.bits.sum())
        with processes.agreed():
            check_rest(c, trainer.step, trainer.position[:2], trainer.workers_before)
            if processes.writes:
                offset = None if run.resumed is None else trainer.metrics_bytes
                allowed, index = c.allow_lost_rows, processes.index
                self.output = Output(run.name, c.as_dict(), offset, allowed, index)
                if trainer.restored is not None:
                    kept = Checkpoints(self.output.folder, processes)
                    kept.return_to(trainer.restored, c.checkpoint)
        own = None if self.output is None else (self.output.folder, self.output.lost_rows)
        found = own if processes.has_own_files else processes.broadcast(own)
        if found is None:
            text = "the process that prepares the output folder was lost before the first step"
            raise Stopped(text)
        self.folder, self._rows_were_lost = found
        if self.output is not None:
            self.hooks.log_info(trainer.facts())
            _print_start(trainer, run.resumed)

    def train(self, trainer: Trainer) -> None:
        """Train the run, with checkpoints in its folder, and report it. All processes call it."""
        saved = Checkpoints(self.folder, trainer.processes)
        trainer.train(saved, self._offset, self._rows_were_lost)
        trainer.end(lambda: self._report(trainer))

    def _offset(self) -> int:
        """The bytes of metrics.jsonl that are on the disk."""
        if self.output is None:
            return metrics.complete_bytes(self.folder / metrics.FILE)
        return self.output.rows.offset()

    def _report(self, trainer: Trainer) -> None:
        """Draw the figure and print the table, in the process that writes. The run is complete."""
        if self.output is not None:
            c, virtual = trainer.config, trainer.execution.time_is_virtual
            sender = trainer.network.workers[0]
            report(self.folder, c.log_verbosity, trainer.metric, virtual, sender)
            _show_sample(trainer, self.folder / SAMPLE)
            _show_defect(trainer)
            self._show_traffic(trainer)
            if trainer.processes.can_be_lost:
                self.hooks.log_info({"lost_workers": trainer.execution.missing})
            self.output.close(COMPLETE)
        self.output = None

    def _show_traffic(self, trainer: Trainer) -> None:
        """Print what this machine has sent in all, beside the bytes that are counted."""
        payload, packets = self._run.processes.traffic
        if payload:
            counted = (int(trainer.network.bits.sum()) - self._bits_before) / 8
            print(
                f"sent by this machine: {prefixed(counted, 'B')} that are counted, "
                f"{prefixed(payload, 'B')} with agreements and evaluations, "
                f"{prefixed(packets, 'B')} with QUIC (+{100 * (packets / payload - 1):.1f} %)"
            )

    def _take_over(self, rows: Sequence[Row], process: int) -> None:
        """Go on with the output of a process that was lost."""
        self.output = output.take_over(self.folder, self._run.config.as_dict(), rows, process)


def _print_start(trainer: Trainer, resumed: Path | None) -> None:
    """Print the settings that are not defaults, and the state of a resumed run."""
    settings = trainer.config
    if trainer.is_complete:
        print(
            f"the run in {resumed} was complete: {settings.num_epochs} epochs; "
            "a larger num_epochs prolongs it"
        )
    elif settings.log_verbosity > 0:
        print(configuration.changed(settings.as_dict(), Config), flush=True)
        if resumed is not None and not trainer.execution.is_away:
            print(f"resumed after step {trainer.step} of {trainer.total_steps}")
            if trainer.workers_before != settings.n_workers:
                print(resizing.sentence(trainer.workers_before, settings.n_workers))


def report(folder: Path, verbosity: int, metric: str, time_is_virtual: bool, sender: int) -> None:
    """Draw the figure and print the table, unless a driver's log_metric has the rows."""
    try:
        rows = metrics.load(folder)
    except ValueError as error:  # removed during the run
        raise CannotWrite(str(error)) from error
    if rows.empty:
        if verbosity > 0:
            print(f"complete; no rows in {folder / metrics.FILE}, since log_metric was replaced")
        return
    figure = folder / FIGURE
    try:
        figures.figure(rows, figure, metric, sender)
    except OSError as error:
        raise CannotWrite(f"{figure}: {error.strerror or error}; rows are kept") from error
    table = summaries.summary(rows, time_is_virtual, sender)
    print(f"\n{table}\n\nrows: {folder / metrics.FILE}\nfigure: {figure}")


def _show_defect(trainer: Trainer) -> None:
    """Print the sentence about workers that do not agree or have not learned, if it is so."""
    if trainer.evaluation.defect:
        print(f"\nwarning: {trainer.evaluation.defect}")


def _show_sample(trainer: Trainer, path: Path | None = None) -> None:
    """Print the sample of the task, if it has one, and write it to a file."""
    text = trainer.sample()
    if text is None:
        return
    print(f"\nsample of the mean model:\n\n{text}\n")
    try:
        if path is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path}: {error.strerror or error}; rows are kept") from error


def evaluate(run: NewRun, hooks: Hooks) -> None:
    """Evaluate a checkpoint of the run in a folder, and print the table.

    The rows are for the hooks. The folder stays as it is.
    """
    rows: list[dict[str, Any]] = []

    def metric(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
        rows.append({"name": name, **values, **tags})
        hooks.log_metric(name, values, tags)

    trainer = run.trainer(replace(hooks, log_metric=metric))
    trainer.evaluate()
    trainer.close()
    if run.processes.writes:
        print(
            f"The {run.config.checkpoint} checkpoint of {run.evaluated}, after step {trainer.step}"
        )
        print(summaries.summary(metrics.frame(rows), trainer.execution.time_is_virtual))
        _show_sample(trainer)
        _show_defect(trainer)
