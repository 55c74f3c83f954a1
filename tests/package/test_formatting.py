"""Numbers and tables as text."""

import math

import pytest

from powergossip import formatting


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bit"), (999, "999 bit"), (999.7, "1 kbit"), (12_345_678, "12.3 Mbit"),
     (5e9, "5 Gbit"), (3e15, "3e+03 Tbit")],
)  # fmt: skip
def test_large_numbers_have_prefixes(number: float, text: str) -> None:
    assert formatting.prefixed(number, "bit") == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([5.0], "5.000"),
        ([9.9996], "10.00"),
        ([123456.7], "123457"),
        ([0.0], "0"),
        ([1.25e-5], "1.25e-05"),
        ([1.0, 2.0, 3.0], "2.000 ± 1.000"),
        ([1.0, 1.0004], "1.00020 ± 0.00028"),
        ([1e-6, 3e-6], "2e-06 ± 1.4e-06"),
        ([1.0, math.inf], "infinite"),
        ([1.0, math.nan], "nan"),
    ],
)
def test_spread_is_the_mean_and_standard_deviation(values: list[float], text: str) -> None:
    assert formatting.spread(values) == text


def test_spread_with_two_places() -> None:
    assert formatting.spread([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert formatting.spread([5.0], 2) == "5.00"


def test_a_number_of_things_is_singular_or_plural() -> None:
    assert formatting.counted(1, "host") == "1 host"
    assert formatting.counted(0, "host") == "0 hosts"
    assert formatting.counted(2, "process", "processes") == "2 processes"


def test_a_markdown_table() -> None:
    lines = formatting.markdown(["method", "bits"], [("plain", 32), ["signs", ""]]).splitlines()
    assert lines == ["| method | bits |", "| --- | --- |", "| plain | 32 |", "| signs |  |"]


def test_ordinals() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 101, 111)
    shown = " ".join(map(formatting.ordinal, numbers))
    assert shown == "1st 2nd 3rd 4th 11th 12th 13th 21st 101st 111th"
