"""Tables and figures of the benchmark."""

import re
from pathlib import Path
from typing import Any

import pytest

from powergossip.benchmark import page, results
from powergossip.benchmark.tasks import FULL, QUICK
from tests.harness.benchmarking import entry_of, line, result


def test_a_figure_has_the_means_of_entries_that_sent_messages_and_did_not_diverge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis of megabytes is logarithmic."""
    drawn: list[Any] = []
    monkeypatch.setattr(page.figures, "scatter", lambda *given: drawn.append(given))
    own, other = line(0.8, 0.9), line(0.7, 0.7, name="dear")
    for i, run in enumerate(own.runs):
        run["evaluations"][-1]["MB"] = 4.0 * i
    without = [line(1.0, 1.0, name="gone", diverged=[2]), line(0.7, name="silent", mb=0.0)]
    assert page.draw([own, other, *without], tmp_path)
    ((points, *_, larger_is_better, chosen),) = drawn
    assert points == {"a": (2.0, [80.0, 90.0]), "dear": (10.0, [70.0, 70.0])}
    assert larger_is_better
    assert chosen == []
    for alone in without:
        assert not page.draw([alone], tmp_path)


def test_differences_and_margins_have_the_unit_of_the_measure() -> None:
    """t(0.975, 2) = 4.303: differences of 1, 2 and 3 % are 2 ± 2.48 %."""
    own, other = line(0.51, 0.52, 0.53), line(0.5, 0.5, 0.5, name="b")
    assert page.pairs(own, [other])[1][3:] == ["+2.00 ± 2.48", "noise"]
    for run in other.found["runs"]:
        run["seed"] += 10
    assert page.pairs(own, [other])[1][3:] == ["other seeds", "noise"]


def test_only_an_entry_with_others_stands_beside_them() -> None:
    both = [entry_of("a", result(0.5)), entry_of("b", result(0.6))]
    assert ["verdict" in page.text(both[:n], QUICK, None, "a") for n in (1, 2)] == [False, True]


def test_an_entry_begins_with_its_ranks_a_verdict_and_its_setting() -> None:
    """Peers have between half and twice its megabytes. Values that were not tried are no edge."""
    tried = [
        {"setting": {"learning_rate": rate, "k": None}, "score": 0} for rate in (0.1, 0.2, 0.4)
    ]
    own = result(0.8, 0.8, 0.8, tried=tried, setting={"learning_rate": 0.4, "k": None})
    entries = [
        entry_of("mine", own),
        entry_of("power-gossip", result(0.7, 0.7, 0.7, mb=20.0)),
        entry_of("dear", result(0.9, 0.9, 0.9, mb=20.1)),
        entry_of("cheap", result(0.6, 0.6, 0.6, mb=4.9)),
        entry_of("gone", result(0.9, 0.9, 0.9, mb=5.0, diverged=[2])),
    ]
    first, second, *_ = page.text(entries, QUICK, None, "mine").split("\n\n")
    assert first.startswith("mine: on the front, ")
    assert "as few bytes, in 1 of 1 task; " in first
    assert "beside power-gossip better in 1, worse in 0, without a clear difference in 0" in first
    assert second == (
        "fashion_mnist_same: 80.00 %, 2nd of 5, for 10 MB; among entries within 2 × of its bytes "
        "1st of 3; better than power-gossip by 10.00 ± 0.10 points. Setting: learning_rate=0.4 of "
        "0.1, 0.2, 0.4, the largest; at the edge of the grid, so that others may be better."
    )
    assert "worse than dear" in page.text(entries, QUICK, None, "power-gossip")
    assert "1 of 3 runs diverged, 5th of 5, for 5 MB" in page.text(entries, QUICK, None, "gone")
    entries[1] = entry_of("power-gossip", result(0.8, 0.8, 0.8, mb=20.0))
    ties = "2nd to 3rd of 5, for 10 MB; .* 1st to 2nd of 3; equal to power-gossip, for 0.5 × its MB"
    assert re.search(ties, " ".join(page.text(entries, QUICK, None, "mine").split()))
    entries[0] = entry_of("mine", result(0.8, diverged=[1]))
    assert "1 of 1 run diverged, 4th of 5; worse" in page.text(entries, QUICK, None, "mine")


@pytest.mark.parametrize("width", [60, 100])
def test_a_text_fits_the_width(width: int) -> None:
    """Also the whole tables of all entries."""
    entries = results.read_all([results.OF_LIBRARY])
    for chosen in (None, "power-gossip-exact-diffusion"):
        shown = page.text(entries, QUICK, ["fashion_mnist_sorted"], chosen, width)
        assert max(map(len, shown.splitlines())) <= width
        assert len(re.findall("^ +power-gossip-exact-diffusion( ←)? ", shown, re.M)) > 1


def test_a_page_has_what_was_asked_for(tmp_path: Path) -> None:
    """The tasks of the entry, in the tier, with the comparison."""
    entries = [entry_of(name, result(0.5)) for name in ("a", "b")]
    entries += [entry_of("c", result(0.5), "text_same")]
    for entry in entries:
        entry["tiers"][FULL] = entry["tiers"][QUICK]
    written = page.write(entries, tmp_path, None, [QUICK], "a")
    assert [path.name for path in written] == ["benchmark.md", "fashion_mnist_same-quick.svg"]
    said = written[0].read_text()
    assert "| verdict |" in said
    assert "a: on the front" in said
    page.write([entry_of("a", result(0.5, diverged=[1]))], tmp_path)
    assert ".svg" not in written[0].read_text()


def test_a_rank_is_one_among_the_entries_of_its_task() -> None:
    """The last of two is behind the third of five. One of few tasks is not first for that."""
    two = [line(0.9, name="other"), line(0.8, name="last")]
    five = [line(0.5, name=name) for name in ("1", "2", "third", "4", "5")]
    order = [row[0] for row in page.overview({"text_same": two, "text_topics": five})]
    assert order.index("third") < order.index("last")
    best, middle, few = (line(q, name=name) for q, name in [(3, "a"), (2, "b"), (1, "few")])
    rows = page.overview({"text_same": [best, middle, few], "text_topics": [best, middle]})
    assert [row[0] for row in rows] == ["entry", "a", "b", "few"]


@pytest.mark.parametrize("number", [1e-3, 0.012345, 1.0, 99.96, 999.4, 999.6, 1000.4, 123456.7])
def test_numbers_have_three_digits_and_no_exponent(number: float) -> None:
    header, row = page.table([line(0.5, mb=number)])
    shown = row[header.index("MB sent")]
    assert "e" not in shown
    assert float(shown) == pytest.approx(number, rel=5e-3)
