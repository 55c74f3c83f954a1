"""Files of results: NAME.json, with the tiers that an entry has been run in.

{"name": …, "source": …,
 "tiers": {"quick": {"tasks": {TASK: {"version", "data", "tried", "setting", "runs", …}},
                     "made": versions and machine}}}
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import SEEDS, TASKS, TIERS, TRIES
from powergossip.errors import BadInput
from powergossip.runs.atomic_files import write_atomically

OF_LIBRARY = Path(__file__).parent / "submissions"


def save(
    entry: Entry, tier: str, tasks: Mapping[str, Any], made: Mapping[str, Any], folder: Path
) -> Path:
    """Write the results of a tier into the entry's file, and return its path.

    Results of other tiers, and of other tasks, are kept if they are those of the same source.
    """
    path, tiers = folder / f"{entry.name}.json", {}
    if path.exists():
        before = read(path)
        if before["source"] == entry.source:
            tiers = before["tiers"]
    kept = tiers.get(tier, {}).get("tasks", {})
    merged = {name: ({**kept, **tasks})[name] for name in TASKS if name in {**kept, **tasks}}
    tiers[tier] = {"tasks": merged, "made": dict(made)}
    content = {"name": entry.name, "source": entry.source, "tiers": tiers}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(_rounded(content), allow_nan=False) + "\n")
    return path


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
        found = json.loads(path.read_text())
        if not isinstance(found["source"], str) or not isinstance(found["name"], str):
            raise ValueError
        for tier in found["tiers"].values():
            for of_task in tier["tasks"].values():
                _ = of_task["version"], of_task["data"], of_task["runs"], of_task["setting"]
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path} is no file of results; `run` writes them") from error
    return dict(found)


def read_all(folders: list[Path]) -> list[dict[str, Any]]:
    """The results in some folders. Of two files of a name, the one in the last folder counts."""
    found = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            content = read(path)
            found[content["name"]] = content
    return list(found.values())


def problems(found: Mapping[str, Any]) -> list[str]:
    """What keeps a file from being complete. [] if it is."""
    missing = []
    tiers = found["tiers"]
    for tier in tiers:
        if tier not in TIERS:
            missing.append(f"the tier {tier} is unknown; use {', '.join(TIERS)}")
            continue
        for name, of_task in tiers[tier]["tasks"].items():
            where = f"{name}, {tier}"
            if name not in TASKS:
                missing.append(f"the task {name} is unknown")
                continue
            if of_task["version"] != TASKS[name].version:
                missing.append(
                    f"{where}: version {of_task['version']} of the task, now {TASKS[name].version}"
                )
            if len(of_task["tried"]) > TRIES[tier]:
                missing.append(f"{where}: {len(of_task['tried'])} settings, {TRIES[tier]} at most")
            if of_task["setting"] not in [tried["setting"] for tried in of_task["tried"]]:
                missing.append(f"{where}: the setting is none of those that were tried")
            if tuple(run["seed"] for run in of_task["runs"]) != SEEDS:
                missing.append(f"{where}: the seeds are not {', '.join(map(str, SEEDS))}")
            if any(not run["diverged"] and not run["evaluations"] for run in of_task["runs"]):
                missing.append(f"{where}: a run has no evaluation")
    if "quick" not in tiers:
        missing.append("the tier quick is missing")
    return missing
