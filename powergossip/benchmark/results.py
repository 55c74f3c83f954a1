"""Files of results: NAME.json, with the tiers that an entry has been run in.

{"name": …, "source": …,
 "tiers": {"quick": {TASK: {"version", "data", "tried", "setting", "runs", "made", …}}}}
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from powergossip.atomic_files import write_atomically
from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import TASKS
from powergossip.errors import BadInput

OF_LIBRARY = Path(__file__).parent / "results"


def save(entry: Entry, tier: str, tasks: Mapping[str, Any], folder: Path) -> Path:
    """Write the results of a tier into the entry's file, and return its path.

    Results of other tiers and tasks are kept if the same source produced them. Runs of another
    source are in their folders.
    """
    path = folder / f"{entry.name}.json"
    content: dict[str, Any] = {"name": entry.name, "source": entry.source, "tiers": {}}
    if path.exists():
        before = read(path)
        if before["source"] == entry.source:
            content["tiers"] = before["tiers"]
    found = {**content["tiers"].get(tier, {}), **tasks}
    content["tiers"][tier] = {name: found[name] for name in TASKS if name in found}
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
        ok = isinstance(found["source"], str) and isinstance(found["name"], str)
        ok = ok and all(isinstance(of_tier, dict) for of_tier in found["tiers"].values())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        ok = False
    if not ok:
        raise BadInput(f"{path} is no file of results; `run` writes them")
    if found["name"] != path.stem:
        name = found["name"]
        raise BadInput(f"{path} has results of {name}; use {name}.json as its name")
    return dict(found)


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
