"""Epochs of the processes that are left, of a run that may lose some."""

from collections.abc import Callable, Iterator

from torch import Tensor

from powergossip.network.links import Links
from powergossip.parameters import Parameters
from powergossip.runs.clock import Clock
from powergossip.training.agreement import Agreement
from powergossip.training.event_training import EventTraining


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

    def stages(
        self, epoch: int, received: Callable[[], int | None]
    ) -> Iterator[tuple[int, int | None]]:
        """Train an epoch, in stages at whose ends all processes meet.

        received  # a signal that this process received

        Yields the steps since the start of the run, and a signal that some process received.
        Raises Diverged, in all processes.
        """
        per_epoch = self._events.steps_per_epoch
        first, end = epoch * per_epoch, (epoch + 1) * per_epoch
        complete = False
        while not complete:
            with self._measure("averaging"):
                complete = self._events.run_linked(
                    end, lambda: received() is not None or self._agreement.has_noted
                )
            taken = self._links.group.gather(self._events.steps_between(first, end))
            step = end if complete else first + min(taken)
            self._agreement.note_norms(self._links.workers, self._parameters.x, step, epoch + 1)
            yield step, self._agreement.settle(received())

    def take_sums(self) -> dict[str, Tensor]:
        """The sums of metrics over the last epoch, each [worker]."""
        means = self._events.take_metrics()
        return {name: values * self._events.steps_per_epoch for name, values in means.items()}
