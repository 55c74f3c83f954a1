"""Checks of files of results: what is complete, and what a repetition may differ in."""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from powergossip.benchmark import page, submissions
from powergossip.benchmark.comparison import lines, pair
from powergossip.benchmark.tasks import QUICK, TASKS
from powergossip.errors import BadInput
from tests.harness.benchmarking import differing, entry_of, line, result

MEASURES = ["fashion_mnist_same", "text_same", "consensus_random"]  # a task of each
IMAGES, TEXT, _ = MEASURES


def complete(*means: float, **more: Any) -> dict[str, Any]:
    """Results of which a check finds nothing, with three means."""
    return result(*means, **{"tried": [{"setting": {}, "score": 0.5}], **more})


def file_of(**tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an entry, by tier and task."""
    return {"name": "a", "source": "", "tiers": tiers}


OF_JSON = ("1e999", "9" * 400, "[" * 10**5)  # in quotes, until they are written


def variants(tree: Any) -> Iterator[Any]:
    """A tree with another value in each place, or none."""
    odd: list[Any] = [None, {}, [], "a", 5, True, *OF_JSON]
    places = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(places):
        copy = {**tree} if isinstance(tree, dict) else [*tree]
        inner = variants(value) if isinstance(value, dict | list) else ()
        for other in (*odd, *inner):
            copy[key] = other
            yield copy
        yield {k: v for k, v in copy.items() if k != key} if isinstance(copy, dict) else copy[:0]


def test_a_file_of_another_shape_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = file_of(quick={IMAGES: complete(0.5, state=3)})
    for tree in variants(whole):
        text = json.dumps(tree)
        for odd in OF_JSON:
            text = text.replace(f'"{odd}"', odd)
        path.write_text(text)
        try:
            found = submissions.read(path)
        except BadInput:
            continue
        page.text([found], QUICK, None, None)
        submissions.problems(found)
        submissions.problems(found, whole)
        submissions.problems(whole, found)


# --- Tiers and tasks ------------------------------------------------------------------------------


def test_results_are_compared_with_those_of_their_tier() -> None:
    quick, full = ({IMAGES: complete(*means)} for means in [(0.5, 0.6, 0.7), (0.8, 0.81, 0.82)])
    both = file_of(quick=quick, full=full)
    for part in (file_of(quick=quick), file_of(full=full), both):
        assert submissions.problems(both, part) == []
    assert submissions.problems(file_of(quick=quick), both) == []
    worse = file_of(quick=quick, full={IMAGES: complete(0.85, 0.86, 0.87)})
    assert submissions.problems(both, worse) == [
        f"{IMAGES}, full: worse than its repetition by 5.00"
    ]
    of_other_data = file_of(quick=quick, full={IMAGES: complete(0.8, 0.81, 0.82, data="e")})
    assert submissions.problems(both, of_other_data) == [
        f"{IMAGES}, full: other data than in its repetition"
    ]


def test_a_repetition_has_the_code_the_task_and_complete_results() -> None:
    first = file_of(quick={TEXT: complete(0.5, 0.6, 0.7)})
    other_task = file_of(quick={"text_topics": complete(0.5, 0.6, 0.7)})
    assert submissions.problems(first, other_task) == ["no task was repeated"]
    assert submissions.problems(first, {**first, "source": "other"}) == ["the code differs"]
    for again in (complete(0.5, 0.6, 0.7, version=0), complete(0.5)):
        (found, *_) = submissions.problems(first, file_of(quick={TEXT: again}))
        assert found.startswith(f"{TEXT}, quick, in its repetition: ")


def test_matrices_of_consensus_are_equal_though_their_last_bits_differ() -> None:
    first, again = (complete(0.5, 0.6, 0.7, data=data) for data in "de")
    assert differing(first, again, "consensus_random") == []
    assert differing(first, again, IMAGES) == ["other data than in its repetition"]


def test_tiers_and_tasks_are_known_ones() -> None:
    good = complete(0.5, 0.6, 0.7)
    assert submissions.problems(file_of(quick={IMAGES: good, "cifar": good}, tiny={})) == [
        "the task cifar is unknown",
        "the tier tiny is unknown; use quick, full",
    ]


@pytest.mark.parametrize(
    ("task", "value"), [(IMAGES, 99.0), (IMAGES, -0.1), ("consensus_random", -10.1)]
)
def test_values_are_in_the_range_of_their_measure(task: str, value: float) -> None:
    wrong = complete(0.5, value, 0.7)
    (found,) = differing(wrong, wrong, task)
    assert re.fullmatch(rf"{TASKS[task].measure.name} \S+, not \S+ to \S+", found)


# --- What is complete -----------------------------------------------------------------------------


def settings(*scores: float | None) -> list[dict[str, Any]]:
    """Settings with these scores, of which the first one is that of `result`."""
    return [{"setting": {"a": i} if i else {}, "score": score} for i, score in enumerate(scores)]


def runs(*seeds: int, megabytes: Sequence[float] = (5.0, 10.0)) -> list[dict[str, Any]]:
    evaluations = [
        {"step": i, "mean": 0.5, "worst": 0.5, "MB": mb} for i, mb in enumerate(megabytes)
    ]
    return [{"seed": seed, "diverged": False, "evaluations": evaluations} for seed in seeds]


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"tried": settings(None, None)}, []),
        ({"tried": settings(-3.3, None)}, []),
        ({"tried": settings(None, -3.3)}, ["the setting is not the best one that was tried"]),
        ({"tried": settings(*[0.5] * 4)}, []),
        ({"tried": settings(*[0.5] * 5)}, ["5 settings, 4 at most"]),
        ({"runs": runs(1, 2, 3, 3)}, ["the seeds are not 1, 2, 3"]),
        ({"runs": runs(3, 2, 1)}, ["the seeds are not 1, 2, 3"]),
        ({"runs": runs(1, 2, 3, megabytes=(5, 4, 10))}, ["megabytes become fewer"] * 3),
        ({"version": 1}, ["version 1 of the task, now 2"]),
        ({"version": 3}, ["version 3 of the task, now 2"]),
    ],
)
def test_what_the_results_of_a_task_have(changed: dict[str, Any], wrong: list[str]) -> None:
    """The full tier tries twice as many settings."""
    full = complete(0.5, 0.5, 0.5, tried=settings(*[0.5] * 8))
    found = file_of(quick={TEXT: {**complete(0.5, 0.5, 0.5), **changed}}, full={TEXT: full})
    assert submissions.problems(found) == [f"{TEXT}, quick: {text}" for text in wrong]


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found["runs"].clear(),
        lambda found: found["runs"][0]["evaluations"].clear(),
        lambda found: found["runs"][0]["evaluations"][1].pop("worst"),
        lambda found: found["runs"][0]["evaluations"][1].pop("seconds"),
    ],
)
def test_results_of_a_task_have_runs_evaluations_and_their_values(
    damage: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    found = complete(0.5)
    path.write_text(json.dumps(file_of(quick={"fashion_mnist_late": found})))
    submissions.read(path)
    damage(found)
    path.write_text(json.dumps(file_of(quick={"fashion_mnist_late": found})))
    with pytest.raises(BadInput, match=r"is no file of results"):
        submissions.read(path)


# --- What a repetition may differ in --------------------------------------------------------------


@pytest.mark.parametrize("task", MEASURES)
@pytest.mark.parametrize("spread", [0.0, 0.2, 1.0])
def test_a_difference_is_beyond_its_interval_and_the_tolerance(task: str, spread: float) -> None:
    """In tolerances. Each is a limit alone, not their sum."""
    tolerance = TASKS[task].measure.tolerance
    margin = stats.t.ppf(0.975, 2) * spread / math.sqrt(3)
    again = [20.0, 50.0, 80.0]  # far apart, so that no single value differs
    for sign in (-1, 1):
        for part in (0.99, 1.01):
            by = part * max(margin, 1.0)
            own = [a + sign * by + spread * d for a, d in zip(again, (-1, 0, 1), strict=True)]
            first, second = (
                complete(*(tolerance * mean for mean in means)) for means in (own, again)
            )
            found = differing(first, second, task)
            assert len(found) == (part > 1)
            assert all("than its repetition by" in text for text in found)


@pytest.mark.parametrize("task", MEASURES)
@pytest.mark.parametrize(("by", "is_found"), [(0.1, False), (2.5, False), (3.5, True)])
def test_the_value_of_one_run_may_differ_by_three_tolerances(
    task: str, by: float, is_found: bool
) -> None:
    """Also where those of different seeds happen to be equal."""
    again = complete(0.5, 0.5, 0.5)
    own = complete(0.5 + by * TASKS[task].measure.tolerance, 0.5, 0.5)
    found = differing(own, again, task)
    assert len(found) == is_found
    assert all(text.startswith("mean after step 20") for text in found)


def test_the_value_of_one_run_may_differ_by_the_noise_between_seeds() -> None:
    """That of the difference of two runs, at the level of all evaluations together."""
    of_two, evaluations = 2, 2 * 2  # means and worst ones, after two steps
    t = stats.t.ppf(1 - 0.05 / evaluations / of_two, 2)
    deviation = 0.02
    again = complete(0.5 - deviation, 0.5, 0.5 + deviation)
    noise = math.sqrt(2) * t * deviation
    for part in (0.95, 1.05):
        own = complete(0.5 - deviation, 0.5 + part * noise, 0.5 + deviation)
        assert len(differing(own, again)) == (part > 1)


def test_a_forged_value_is_found() -> None:
    good = complete(0.5, 0.51, 0.52)
    forged = copy.deepcopy(good)
    forged["runs"][2]["evaluations"][0].update(worst=0.3)
    (found,) = differing(forged, good)
    assert found.startswith("worst after step 10: [0.1, ")
    assert differing({**good, "state": 8.0}, good) == [
        "a state of 8 bytes, and of 0 in its repetition"
    ]


@pytest.mark.parametrize(
    ("task", "more", "is_found"),
    [
        ("consensus_random", 1, False),
        ("consensus_random", 3, False),
        ("consensus_random", 4, True),
        ("fashion_mnist_same", 1, True),
    ],
)
def test_only_agreement_may_end_some_evaluations_earlier_or_later(
    task: str, more: int, is_found: bool
) -> None:
    first = complete(0.5, 0.6, 0.7)
    longer = copy.deepcopy(first)
    for run in longer["runs"]:
        last = run["evaluations"][-1]
        for i in range(more):
            at = {"step": 20 + 10 * (i + 1), "MB": 10.0 + 5 * (i + 1)}
            run["evaluations"].append({**last, **at})
    wrong = ["evaluations after other steps than those of its repetition"] * is_found
    assert differing(first, longer, task) == wrong
    assert differing(longer, first, task) == wrong


@pytest.mark.parametrize(
    ("own", "again", "wrong"),
    [
        ([1, 2, 3], [1, 2], []),
        ([1, 2], [1, 2, 3], []),
        ([1], [1, 2], []),
        ([1, 2], [1], []),
        ([2, 3], [], ["2 runs diverged, and 0 of its repetition"]),
        ([], [2, 3], ["0 runs diverged, and 2 of its repetition"]),
        ([1, 2, 3], [], ["3 runs diverged, and 0 of its repetition"]),
    ],
)
def test_one_run_more_or_less_may_diverge(
    own: list[int], again: list[int], wrong: list[str]
) -> None:
    """One common run or none has no noise with which its value could be compared."""
    first = complete(0.5, 0.6, 0.7, diverged=own)
    assert differing(first, complete(0.1, 0.2, 0.1, diverged=again)) == wrong


@pytest.mark.parametrize("mb", [0.1, 10.0, 1000.0])
def test_megabytes_differ_by_a_ratio(mb: float) -> None:
    first, close, far = (complete(0.5, 0.6, 0.7, mb=mb * part) for part in (1.0, 1.01, 1.05))
    assert differing(first, close) == differing(close, first) == []
    assert [len(found) for found in (differing(first, far), differing(far, first))] == [1, 1]


def test_another_setting_may_be_chosen_of_the_same_ones() -> None:
    """Its messages and state are others, and its quality is not."""
    tried = settings(0.5, 0.5)
    first = complete(0.5, 0.6, 0.7, tried=tried)
    chosen = {"tried": tried, "setting": {"a": 1}, "state": 8.0, "mb": 5.0}
    assert differing(first, complete(0.501, 0.601, 0.701, **chosen)) == []
    assert differing(first, complete(0.3, 0.4, 0.5, **chosen)) == [
        "better than its repetition by 20.00"
    ]
    other = [*tried[:1], {"setting": {"a": 2}, "score": 0.5}]
    assert differing(first, complete(0.5, 0.6, 0.7, tried=other)) == [
        "other settings were tried than in its repetition"
    ]


# --- Lines and pairs ------------------------------------------------------------------------------


def test_only_results_of_the_same_data_and_version_are_compared() -> None:
    """Those of other versions do not decide which data are the usual ones."""
    old = [entry_of(name, result(1.0, 1.0, 1.0, version=0, data="e")) for name in ("old", "older")]
    all_of_them = [
        entry_of("a", result(0.8, 0.8, 0.8)),
        entry_of("b", result(0.9, 0.9, 0.9)),
        entry_of("other data", result(1.0, 1.0, 1.0, data="e")),
        entry_of("diverged", result(1.0, 1.0, 1.0, diverged=[3])),
        *old,
    ]
    found, others = lines(TASKS[IMAGES], QUICK, all_of_them)
    assert [line.name for line in found] == ["b", "a", "diverged"]
    assert [line.resolution for line in found] == [1e-3] * 3  # of 1,000 test images
    assert others == ["other data", "old", "older"]
    assert lines(TASKS[IMAGES], QUICK, old) == ([], ["old", "older"])
    assert "another version: old, older" in page.text(old, QUICK, None, None)
    of_matrices = [  # whose last bits differ between processors
        entry_of(name, result(-3.0, data=name, version=3), "consensus_random") for name in "ab"
    ]
    assert len(lines(TASKS["consensus_random"], QUICK, of_matrices)[0]) == 2
    shown = page.table(found)
    assert shown[3][1] == "1 of 3 diverged"
    assert [row[3] for row in shown] == [
        "better · noise · worse",
        "2 · 0 · 0",
        "1 · 0 · 1",
        "0 · 0 · 2",
    ]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [([1], [1, 2], "noise"), ([1, 2, 3], [2], "noise"), ([1], [], "worse"), ([], [1], "better")],
)
def test_a_pair_that_diverges_is_noise(first: list[int], second: list[int], verdict: str) -> None:
    """However many of its runs do."""
    own, other = (line(0.5, 0.5, 0.5, diverged=diverged) for diverged in (first, second))
    assert pair(own, other).verdict == verdict
