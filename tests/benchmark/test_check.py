"""Checks of files of results: what is complete."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from powergossip.benchmark import entries, page, submissions
from powergossip.benchmark.comparison import lines, pair
from powergossip.benchmark.tasks import QUICK, TASKS
from powergossip.errors import BadInput
from tests.harness.benchmarking import entry_of, line, result

IMAGES, TEXT = "fashion_mnist_same", "text_same"


def complete(*means: float, **more: Any) -> dict[str, Any]:
    """Results of which a check finds nothing, with three means."""
    return result(*means, **{"tried": [{"setting": {}, "score": 0.5}], **more})


def file_of(**tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an entry, by tier and task."""
    return {"name": "a", "source": "", "tiers": tiers}


OF_JSON = ("1e999", "9" * 400, "[" * 10**5)  # in quotes, until they are written


def variants(tree: Any) -> Iterator[Any]:
    """A tree with another value in each place."""
    odd: list[Any] = [None, {}, [], "a", 5, True, *OF_JSON]
    places = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(places):
        copy = {**tree} if isinstance(tree, dict) else [*tree]
        inner = variants(value) if isinstance(value, dict | list) else ()
        for other in (*odd, *inner):
            copy[key] = other
            yield copy


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
        submissions.problems(found)


# --- Tiers and tasks ------------------------------------------------------------------------------


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
    wrong = complete(0.5, value, 0.7, version=TASKS[task].version)
    (found,) = submissions.problems(file_of(quick={task: wrong}))
    name = TASKS[task].measure.name
    assert re.fullmatch(rf"{task}, quick: {name} \S+, not \S+ to \S+", found)


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
        ({"version": 0}, ["version 0 of the task, now 1"]),
        ({"version": 2}, ["version 2 of the task, now 1"]),
    ],
)
def test_what_the_results_of_a_task_have(changed: dict[str, Any], wrong: list[str]) -> None:
    found = file_of(quick={TEXT: {**complete(0.5, 0.5, 0.5), **changed}})
    assert submissions.problems(found) == [f"{TEXT}, quick: {text}" for text in wrong]


def test_the_full_tier_tries_more_settings() -> None:
    quick, full = ({TEXT: complete(0.5, 0.5, 0.5, tried=settings(*[0.5] * n))} for n in (4, 8))
    assert submissions.problems(file_of(quick=quick, full=full)) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.pop("source"),
        lambda found: found.update(source=None),
        lambda found: found.update(name="a b"),
        lambda found: found.update(name="../a"),
        lambda found: found.update(tiers=[]),
    ],
)
def test_a_file_has_a_name_a_source_and_tiers(
    damage: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    entry = entries.Entry("a", "source", {})
    path, _ = submissions.save(entry, QUICK, {IMAGES: complete(0.5, 0.6, 0.7)}, tmp_path)
    content = submissions.read(path)
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput):
        submissions.read(path)


# --- Lines and pairs ------------------------------------------------------------------------------


def test_results_of_other_versions_do_not_decide_which_data_are_the_usual_ones() -> None:
    old = [entry_of(name, result(0.5, version=0, data="e")) for name in "ab"]
    current = entry_of("c", result(0.5))
    found, others = lines(TASKS[IMAGES], QUICK, [*old, current])
    assert [line.name for line in found] == ["c"]
    assert others == ["a", "b"]
    assert lines(TASKS[IMAGES], QUICK, old) == ([], ["a", "b"])
    page.text(old, QUICK, None, None)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [([1], [1, 2], "noise"), ([1, 2, 3], [2], "noise"), ([1], [], "worse"), ([], [1], "better")],
)
def test_a_pair_that_diverges_is_noise(first: list[int], second: list[int], verdict: str) -> None:
    """However many of its runs do."""
    own, other = (line(0.5, 0.5, 0.5, diverged=diverged) for diverged in (first, second))
    assert pair(own, other).verdict == verdict
