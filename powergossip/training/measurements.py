"""Measurements of a run: rows for the hooks of an entry point, and the check for divergence."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.errors import Diverged
from powergossip.network import Network, Processes
from powergossip.runs.clock import Clock, data_fraction
from powergossip.runs.metrics import Hooks


def divergence(worker: int, name: str, value: float, step: int, epoch: int) -> str:
    """The text of Diverged. `epoch` counts from 1."""
    return (
        f"diverged: worker {worker}'s {name} is {value} at step {step} "
        f"(epoch {epoch}); try a smaller learning_rate or optimizer_diffusion_rate"
    )


def check_finite(name: str, values: Tensor, step: int, epoch: int) -> None:
    """Raise Diverged if a value of the n workers [worker], gathered, is infinite or NaN."""
    for worker, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            raise Diverged(divergence(worker, name, value, step, epoch))


class Rows:
    """Adds epoch, bits, messages and seconds to a value, for `Hooks.log_metric`.

    Bits and messages are those sent by the first worker of process 0 until now.
    """

    def __init__(self, hooks: Hooks, network: Network, seconds: Callable[[], float]):
        self._hooks, self._network, self._seconds = hooks, network, seconds

    @property
    def are_written(self) -> bool:
        """True if the hooks of this process receive the rows."""
        return self._network.processes.writes

    def __call__(self, name: str, value: float, epoch: int, **tags: Any) -> None:
        """Log a row on process 0."""
        if self.are_written:
            self._hooks.log_metric(name, self._values(value, epoch), tags)

    def _values(self, value: float, epoch: int) -> dict[str, float]:
        return {
            "value": value,
            "epoch": epoch,
            "bits": int(self._network.bits[0]),
            "messages": int(self._network.messages[0]),
            "seconds": self._seconds(),
        }

    def take_over(self) -> None:
        """Go on with the rows of another process, if this one writes them now."""


def log_skipped(
    rows: Rows, processes: Processes, codes: Sequence[DifferenceCode], epoch: int
) -> None:
    """Log how many blocks of messages of few bits were left out, and of how many, in all processes.

    Without such messages there is no row.
    """
    own = sum(float(code.skipped) for code in codes), sum(float(code.blocks) for code in codes)
    skipped, blocks = map(sum, zip(*processes.gather(own), strict=True))
    if blocks:
        rows("skipped_blocks", skipped, epoch, instances=int(blocks))


def log_phases(rows: Rows, hooks: Hooks, clock: Clock, epoch: int, num_epochs: int) -> None:
    """Log the seconds of each phase so far, and the progress of the run."""
    for phase, spent in clock.phases.items():
        rows("phase_seconds", spent.total, epoch, phase=phase, instances=spent.instances)
        if rows.are_written:
            hooks.log_runtime(phase, spent.mean, spent.deviation, spent.instances)
    if rows.are_written:
        totals = {phase: spent.total for phase, spent in clock.phases.items()}
        hooks.log_info(
            {"state.progress": epoch / num_epochs, "data_fraction": data_fraction(totals)}
        )
