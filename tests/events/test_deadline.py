"""Laws of the deadline of an edge."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powergossip.events.deadline import FLOOR, LAST, Deadline

durations = st.lists(st.floats(0, 100), min_size=1, max_size=2 * LAST)


def deadline(seconds: list[float]) -> float:
    found = Deadline()
    for duration in seconds:
        found.record(duration)
    return found.seconds


def test_without_an_exchange_it_is_infinite() -> None:
    assert deadline([]) == math.inf


@given(durations)
def test_it_is_the_median_and_six_spreads_of_the_last_64(seconds: list[float]) -> None:
    last = np.array(seconds[-LAST:])
    spread = np.median(abs(last - np.median(last)))
    assert deadline(seconds) == pytest.approx(max(FLOOR, np.median(last) + 6 * spread))
