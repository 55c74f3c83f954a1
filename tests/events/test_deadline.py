"""Laws of the deadline of an edge."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powergossip.events.deadline import FLOOR, LAST, Deadline

durations = st.lists(st.floats(0, 100), min_size=1, max_size=2 * LAST)


def deadline(seconds: list[float], floor: float = FLOOR) -> float:
    found = Deadline(floor)
    for duration in seconds:
        found.record(duration)
    return found.seconds


def test_without_an_exchange_it_is_infinite() -> None:
    assert deadline([]) == math.inf


@given(durations)
def test_it_is_the_median_and_six_spreads_of_the_last_64(seconds: list[float]) -> None:
    last = np.array(seconds[-LAST:])
    spread = np.median(abs(last - np.median(last)))
    assert deadline(seconds) == pytest.approx(max(0.05, np.median(last) + 6 * spread))


@given(durations, st.floats(0.1, 10))
def test_it_scales_with_the_durations(seconds: list[float], factor: float) -> None:
    scaled = deadline([factor * duration for duration in seconds], floor=0.0)
    assert scaled == pytest.approx(factor * deadline(seconds, floor=0.0))


@given(st.floats(0, 10), st.integers(0, 31))
def test_a_minority_of_late_exchanges_does_not_move_it(usual: float, late: int) -> None:
    assert deadline([usual] * 33 + [1e6] * late) == max(FLOOR, usual)


def test_it_adapts_to_a_slower_edge() -> None:
    assert deadline([0.1] * LAST + [3.0] * LAST) == 3.0
