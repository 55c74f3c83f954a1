"""Places in a run, and what is known there."""

from typing import NamedTuple

from torch import Tensor


class Position(NamedTuple):
    """A place in a run.

    Attributes:
        step: Step in the epoch.
        sums: Sums of metrics over the steps of the epoch so far, each [worker].
    """

    epoch: int = 0
    step: int = 0
    sums: dict[str, Tensor] = {}  # noqa: RUF012 replaced, never changed


class Moment(NamedTuple):
    """A moment between steps at which all processes know the same.

    Attributes:
        position: Position at which a run that ends now resumes.
        signal: Signal that some process has received, or None.
    """

    position: Position
    signal: int | None = None
