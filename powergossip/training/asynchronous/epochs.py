"""Epochs of the processes that are left, of a run that may lose some."""

from collections.abc import Callable, Iterator
from typing import Any

from powergossip.network.resilient.workers import Links
from powergossip.parameters import Parameters
from powergossip.runs.clock import Clock
from powergossip.training.asynchronous.execution import EventTraining
from powergossip.training.asynchronous.replacements import Moment, Replacements
from powergossip.training.ending import Agreement


class LinkedEpochs:
    """Lets the workers of all processes train epoch after epoch. All processes call its methods.

    agreement  # of the processes on signals and values that are not finite
    measure    # seconds by phase
    """

    def __init__(
        self,
        links: Links,
        events: EventTraining,
        parameters: Parameters,
        agreement: Agreement,
        measure: Clock,
    ):
        self._links, self._events, self._parameters = links, events, parameters
        self._agreement, self._measure = agreement, measure
        self._replacements: Replacements | None = None
        self._joins, self._notes = False, list[str]()

    def replace_lost(self, run: Any, seconds: Callable[[], float]) -> Replacements:
        """Replace lost processes from now on, see Replacements."""
        self._replacements = Replacements(self._links, self._events, run, seconds)
        return self._replacements

    def join(self) -> Moment:
        """Join the others, as a new process, after `replace_lost` and before `stages`."""
        assert self._replacements is not None
        self._joins = True
        return self._replacements.join()

    def stages(
        self, epoch: int, received: Callable[[], int | None]
    ) -> Iterator[tuple[int, int | None]]:
        """Train an epoch, in stages between which all processes meet.

        received  # a signal that this process received

        Yields the steps since the start of the run, and a signal that some process received.
        Raises Diverged, in all processes.
        """
        per_epoch = self._events.steps_per_epoch
        first, end = epoch * per_epoch, (epoch + 1) * per_epoch
        step, complete = first, False

        def asked() -> bool:
            return received() is not None or self._agreement.has_noted or self._are_wanted

        while not complete:
            if self._replacements is not None and not self._joins:
                with self._measure("replacements"):
                    self._notes += self._replacements.replace(epoch, step)
            self._joins = False
            with self._measure("averaging"):
                complete = self._events.run_linked(end, asked)
            taken = self._links.group.gather(self._events.steps_between(first, end))
            step = end if complete else first + min(taken)
            self._agreement.note_norms(self._links.workers, self._parameters.x, step, epoch + 1)
            yield step, self._agreement.agree(received())

    @property
    def _are_wanted(self) -> bool:
        return self._replacements is not None and self._replacements.wanted

    @property
    def replaced(self) -> list[dict[str, float]]:
        """See Replacements."""
        return [] if self._replacements is None else self._replacements.replaced

    def take_notes(self) -> list[str]:
        """Sentences about replacements since the last call."""
        taken, self._notes = self._notes, []
        return taken
