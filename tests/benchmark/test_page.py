"""Tables and figures of the benchmark."""

from pathlib import Path
from typing import Any

import pytest

from powergossip.benchmark import page
from powergossip.benchmark.tasks import QUICK
from tests.harness.benchmarking import entry_of, line, result


def test_a_figure_has_the_means_of_entries_that_sent_messages_and_did_not_diverge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis of megabytes is logarithmic."""
    drawn: list[Any] = []
    monkeypatch.setattr(page.figures, "scatter", lambda *_, **more: drawn.append((_[0], more)))
    own, other = line(0.8, 0.9), line(0.7, 0.7, name="dear")
    for i, run in enumerate(own.runs):
        run["evaluations"][-1]["MB"] = 4.0 * i
    without = [line(1.0, 1.0, name="gone", diverged=[2]), line(0.7, name="silent", mb=0.0)]
    assert page.draw([own, other, *without], tmp_path)
    ((points, more),) = drawn
    assert points == {"a": (2.0, [80.0, 90.0]), "dear": (10.0, [70.0, 70.0])}
    assert more["front"] == ["a"]
    assert more["names"][:2] == ["all-reduce", "d-psgd"], "colors of the library's entries"
    for alone in without:
        assert not page.draw([alone], tmp_path)


def test_differences_and_margins_have_the_unit_of_the_measure() -> None:
    """t(0.975, 2) = 4.303: differences of 1, 2 and 3 % are 2 ± 2.48 %."""
    own, other = line(0.51, 0.52, 0.53), line(0.5, 0.5, 0.5, name="b")
    assert page.pairs(own, [other])[1] == ["b", "+2.00 ± 2.48", "noise", "1"]
    for run in other.found["runs"]:
        run["seed"] += 10
    assert page.pairs(own, [other])[1] == ["b", "other seeds", "noise", "1"]


def test_only_an_entry_with_others_stands_beside_them() -> None:
    both = [entry_of("a", result(0.5)), entry_of("b", result(0.6))]
    assert ["beside" in page.text(both[:n], QUICK, None, "a") for n in (1, 2)] == [False, True]


def test_a_rank_is_one_among_the_entries_of_its_task() -> None:
    """The last of two is behind the third of five."""
    two = [line(0.9, name="other"), line(0.8, name="last")]
    five = [line(0.5, name=name) for name in ("1", "2", "third", "4", "5")]
    order = [row[0] for row in page.overview({"text_same": two, "text_topics": five})]
    assert order.index("third") < order.index("last")


@pytest.mark.parametrize("number", [1e-3, 0.012345, 1.0, 99.96, 999.4, 999.6, 1000.4, 123456.7])
def test_numbers_have_three_digits_and_no_exponent(number: float) -> None:
    header, row = page.table([line(0.5, mb=number)])
    shown = row[header.index("MB sent")]
    assert "e" not in shown
    assert float(shown) == pytest.approx(number, rel=5e-3)
