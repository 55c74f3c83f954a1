"""Files of results: NAME.json, with the tiers that an entry has been run in.

{"name": …, "source": …,
 "tiers": {"quick": {TASK: {"version", "data", "tried", "setting", "runs", "made", …}}}}
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from powergossip.atomic_files import write_atomically
from powergossip.benchmark import entries
from powergossip.benchmark.comparison import LEVEL, Line, deviation, difference, quantile, same_data
from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import SEEDS, TASKS, TIERS, TRIES, BenchmarkTask
from powergossip.errors import BadInput

MEGABYTES = 0.02  # relative difference of repetitions whose messages depend on the data
CAP = 3  # tolerances, of the value of one run
EARLIER = 3  # evaluations by which a repetition agrees earlier or later
OF_LIBRARY = Path(__file__).parent / "submissions"


def save(entry: Entry, tier: str, tasks: Mapping[str, Any], folder: Path) -> tuple[Path, str]:
    """Write the results of a tier into the entry's file. Returns its path, and a note or "".

    Results of other tiers and tasks are kept if the same source produced them. A file of another
    source is renamed.
    """
    path, note = folder / f"{entry.name}.json", ""
    content: dict[str, Any] = {"name": entry.name, "source": entry.source, "tiers": {}}
    if path.exists():
        before = read(path)
        if before["source"] == entry.source:
            content["tiers"] = before["tiers"]
        else:
            kept = next(p for p in _before(path) if not p.exists())
            path.replace(kept)
            note = f"{path.name} had results of other code, which are now in {kept}"
    found = {**content["tiers"].get(tier, {}), **tasks}
    content["tiers"][tier] = {name: found[name] for name in TASKS if name in found}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(_rounded(content), allow_nan=False) + "\n")
    return path, note


def _before(path: Path) -> Iterator[Path]:
    """Names for earlier results: NAME.json.before, NAME.json.before2, …"""
    yield path.with_suffix(".json.before")
    for number in itertools.count(2):
        yield path.with_suffix(f".json.before{number}")


def _rounded(value: Any) -> Any:
    """Numbers with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def read(path: Path) -> dict[str, Any]:
    """A file of results. Raises BadInput."""
    try:
        found = json.loads(
            path.read_text(), parse_constant=_finite, parse_float=_finite, parse_int=_finite
        )
        for results in found["tiers"].values():
            for name, result in results.items():
                _check_results(name, result)
        ok = isinstance(found["source"], str) and isinstance(found["name"], str)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        ok = False
    if not ok:
        raise BadInput(f"{path} is no file of results; `run` writes them")
    entries.check_name(found["name"])
    return dict(found)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return int(text) if text.lstrip("-").isdecimal() else value


def _check_results(name: str, result: Mapping[str, Any]) -> None:
    """Raise one of several errors for results of a task that lack something."""
    _ = result["version"] + 0, result["data"] + ""
    _ = result["setting"].items(), result["made"].items()
    _ = [(tried["setting"].items(), _optional(tried["score"])) for tried in result["tried"]]
    _ = [_optional(result.get(key)) for key in ("state", "cpu", "merge")]
    _ = [seconds + 0 for seconds in result["step_seconds"].values()]
    keys = ["step", "mean", "worst", "MB"]
    keys += ["seconds"] if name in TASKS and TASKS[name].is_virtual else []
    if not result["runs"]:
        raise ValueError
    for run in result["runs"]:
        _ = run["seed"] + 0
        if not run["diverged"] and not run["evaluations"]:
            raise ValueError
        for evaluation in run["evaluations"]:
            _ = [evaluation[key] + 0 for key in keys]


def _optional(number: Any) -> Any:
    """A number or None. Raises TypeError for something else."""
    return None if number is None else number + 0


def read_all(folders: list[Path], warn: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """The results in some folders. Later ones add tasks to earlier ones of the same entry and
    source.

    Of two sources of an entry, the last one counts. Files without results are skipped with a
    warning.
    """
    found: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            try:
                content = read(path)
                if content["name"] != path.stem:
                    name = content["name"]
                    raise BadInput(f"{path} has results of {name}; use {name}.json as its name")
            except BadInput as error:
                warn(f"left out: {error}")
                continue
            before = found.get(content["name"])
            if before and before["source"] == content["source"]:
                for tier, results in content["tiers"].items():
                    before["tiers"][tier] = {**before["tiers"].get(tier, {}), **results}
            else:
                found[content["name"]] = content
    return list(found.values())


def problems(found: Mapping[str, Any], again: Mapping[str, Any] | None = None) -> list[str]:
    """The errors of a file, as sentences.

    Args:
        again: Results of a repetition, which may differ by noise only.
    """
    missing = []
    tiers, repeated = found["tiers"], common_tasks(found, again) if again else []
    if again:
        missing += ["the code differs"] * (found["source"] != again["source"])
        shared = [tier for tier in tiers if {*tiers[tier]} & {*again["tiers"].get(tier, {})}]
        missing += ["no task was repeated"] * (not shared)
    for tier in tiers:
        if tier not in TIERS:
            missing.append(f"the tier {tier} is unknown; use {', '.join(TIERS)}")
            continue
        for name, result in tiers[tier].items():
            where = f"{name}, {tier}"
            if name not in TASKS:
                missing.append(f"the task {name} is unknown")
                continue
            wrong = _problems(TASKS[name], tier, result)
            missing += [f"{where}: {text}" for text in wrong]
            repetition = (again or {"tiers": {}})["tiers"].get(tier, {}).get(name)
            if repetition and not same_data(TASKS[name], result["data"], repetition["data"]):
                missing.append(f"{where}: other data than in its repetition")
            if again and (tier, name) in repeated:
                pair = result, again["tiers"][tier][name]
                wrong_again = [t for t in _problems(TASKS[name], tier, pair[1]) if t not in wrong]
                missing += [f"{where}, in its repetition: {text}" for text in wrong_again]
                level = 1 - (1 - LEVEL) / len(repeated)  # of all tasks together: LEVEL
                missing += [f"{where}: {t}" for t in _differing(TASKS[name], *pair, level)]
    return missing


def common_tasks(found: Mapping[str, Any], again: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The tiers and tasks with results in both files, of the same data."""
    return [
        (tier, task)
        for tier, tasks in found["tiers"].items()
        for task, result in tasks.items()
        if (repeated := again["tiers"].get(tier, {}).get(task))
        if task in TASKS and same_data(TASKS[task], result["data"], repeated["data"])
    ]


def _differing(
    task: BenchmarkTask, result: Mapping[str, Any], again: Mapping[str, Any], level: float
) -> list[str]:
    """How results differ from their repetition by more than rounding and noise."""
    own, repeated = Line("", task, 0.0, result), Line("", task, 0.0, again)
    measure, wrong = task.measure, []
    mean, margin = difference(own, repeated, level)
    if abs(mean) > max(margin, measure.tolerance):
        by = f"{measure.factor * abs(mean):.{measure.places}f}"
        better = (mean > 0) == measure.larger_is_better
        wrong.append(f"{'better' if better else 'worse'} than its repetition by {by}")
    if abs(own.diverged - repeated.diverged) > 1:
        wrong.append(f"{own.diverged} runs diverged, and {repeated.diverged} of its repetition")
    tried, tried_again = ([t["setting"] for t in found["tried"]] for found in (result, again))
    if tried != tried_again:
        wrong.append("other settings were tried than in its repetition")
    if result["setting"] != again["setting"]:
        return wrong
    if own.runs and repeated.runs:
        then, now = own.megabytes_of_step, repeated.megabytes_of_step
        if not math.isclose(then, now, rel_tol=MEGABYTES):
            wrong.append(f"{then:.4g} MB a step, and {now:.4g} in its repetition")
        wrong += _differing_evaluations(own, repeated, level)
    state, state_again = (float(found.get("state") or 0) for found in (result, again))
    if not math.isclose(state, state_again, rel_tol=1e-3):
        wrong.append(f"a state of {state:g} bytes, and of {state_again:g} in its repetition")
    return wrong


def _differing_evaluations(own: Line, repeated: Line, level: float) -> list[str]:
    """How evaluations of runs with the same setting and seed differ.

    The size of noise is that between the seeds of the repetition.
    """
    by_seed = [
        {run["seed"]: {e["step"]: e for e in run["evaluations"]} for run in line.runs}
        for line in (own, repeated)
    ]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    if not seeds:
        return []
    found = [of[seed] for of in by_seed for seed in seeds]
    steps = sorted(set.intersection(*map(set, found)))
    fewest = max(map(len, found)) - (EARLIER if own.task.is_consensus else 0)
    if len(steps) < max(1, fewest):
        return ["evaluations after other steps than those of its repetition"]
    each = 1 - (1 - level) / len(steps) / 2  # of two values
    for step in steps:
        for key in ("mean", "worst"):
            first, second = ([of[seed][step][key] for seed in seeds] for of in by_seed)
            by = max(abs(a - b) for a, b in zip(first, second, strict=True))
            noise = math.sqrt(2) * quantile(each, len(seeds)) * deviation(second)
            if by > max(CAP * own.task.measure.tolerance, noise):
                return [f"{key} after step {step}: {first}, and {second} in its repetition"]
    return []


def _problems(task: BenchmarkTask, tier: str, result: Mapping[str, Any]) -> list[str]:
    """The errors of the results of a task."""
    missing, tried = [], result["tried"]
    if result["version"] != task.version:
        missing.append(f"version {result['version']} of the task, now {task.version}")
    if len(tried) > TRIES[tier]:
        missing.append(f"{len(tried)} settings, {TRIES[tier]} at most")
    best = [t["setting"] for t in tried if t["score"] == max(_score(t) for t in tried)]
    if result["setting"] not in (best or [t["setting"] for t in tried]):
        missing.append("the setting is not the best one that was tried")
    if tuple(run["seed"] for run in result["runs"]) != SEEDS:
        missing.append(f"the seeds are not {', '.join(map(str, SEEDS))}")
    least, most = task.measure.least, task.measure.most
    for run in result["runs"]:
        sent = [0.0, *(evaluation["MB"] for evaluation in run["evaluations"])]
        if sent != sorted(sent):
            missing.append("megabytes become fewer")
        values = [evaluation[key] for evaluation in run["evaluations"] for key in ("mean", "worst")]
        wrong = [value for value in values if not least <= value <= most]
        missing += [
            f"{task.measure.name} {value:g}, not {least:g} to {most:g}" for value in wrong[:1]
        ]
    return missing


def _score(tried: Mapping[str, Any]) -> float:
    return -math.inf if tried["score"] is None else float(tried["score"])
