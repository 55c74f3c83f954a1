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
from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import SEEDS, TASKS, TIERS, TRIES, BenchmarkTask
from powergossip.errors import BadInput

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
    _ = [_optional(result.get(key)) for key in ("state", "cpu")]
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


def problems(found: Mapping[str, Any]) -> list[str]:
    """The errors of a file, as sentences."""
    missing = []
    for tier, results in found["tiers"].items():
        if tier not in TIERS:
            missing.append(f"the tier {tier} is unknown; use {', '.join(TIERS)}")
            continue
        for name, result in results.items():
            if name in TASKS:
                wrong = _problems(TASKS[name], tier, result)
                missing += [f"{name}, {tier}: {text}" for text in wrong]
            else:
                missing.append(f"the task {name} is unknown")
    return missing


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
