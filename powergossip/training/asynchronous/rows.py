"""The rows of a run whose writer may be lost."""

from collections.abc import Callable
from typing import Any

from powergossip.network import Network
from powergossip.runs.metrics import Hooks, Row
from powergossip.training.measurements import Rows

_KEPT = 2  # evaluated epochs


class SharedRows(Rows):
    """Rows that all processes know. If process 0 is lost, the first surviving one takes over. It
    has the rows of the last epochs. Some of them may not have been written. Bits and messages then
    count its own first worker.
    """

    def __init__(self, hooks: Hooks, network: Network, seconds: Callable[[], float]):
        super().__init__(hooks, network, seconds)
        self._writes = self.are_written
        self._latest: dict[int, list[Row]] = {}  # by epoch

    def __call__(self, name: str, value: float, epoch: int, **tags: Any) -> None:
        values = self._values(value, epoch)
        if self.are_written:
            self._network.processes.check_present()
        self.take_over()
        self._latest.setdefault(epoch, []).append((name, values, tags))
        while len(self._latest) > _KEPT:
            del self._latest[min(self._latest)]
        if self.are_written:
            self._hooks.log_metric(name, values, tags)

    def take_over(self) -> None:
        if self.are_written and not self._writes:
            self._writes = True
            latest = [row for rows in self._latest.values() for row in rows]
            self._hooks.take_over(latest, self._network.processes.index)
