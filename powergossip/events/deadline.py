"""The deadline of an edge, from the durations of its exchanges."""

import math
from collections import deque
from statistics import median

LAST = 64  # exchanges
FLOOR = 0.05  # seconds
SPREADS = 6


class Deadline:
    """The time that an exchange of one edge may take before its worker goes on without it::

        deadline = max(floor, median + 6 · MAD),    MAD = median |d − median d|

    d are the durations of the last 64 exchanges, late ones included, in seconds. Up to half of
    them may be arbitrarily long and the deadline stays within the range of the others. A missed
    deadline does not lose the exchange, which stays pending.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=LAST)
        self._seconds: float | None = math.inf  # None: to be computed

    def record(self, seconds: float) -> None:
        """Add the duration of an exchange, from its start to the arrival of the other part."""
        assert seconds >= 0
        self._durations.append(seconds)
        self._seconds = None

    @property
    def seconds(self) -> float:
        """The deadline. Infinite before the first exchange."""
        if self._seconds is None:
            middle = median(self._durations)
            spread = median(abs(duration - middle) for duration in self._durations)
            self._seconds = max(FLOOR, middle + SPREADS * spread)
        return self._seconds
