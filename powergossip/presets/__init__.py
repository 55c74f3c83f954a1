"""Presets: configurations of published experiments, BASE.yaml plus the changes of BASE/METHOD.yaml.

`--config BASE/METHOD` selects a preset, `files` lists its files, and `values` returns its keys.
"""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all presets: BASE, BASE/METHOD, …"""
    return sorted(
        path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")
    )


def files(name: str) -> list[Path]:
    """The files of a preset in the order of reading: BASE.yaml before BASE/METHOD.yaml.

    An unknown name gives [].
    """
    if name not in names():
        return []
    base = name.partition("/")[0]
    return [FOLDER / f"{part}.yaml" for part in dict.fromkeys((base, name))]


def values(name: str) -> dict[str, Any]:
    """The keys that a preset sets, with their values."""
    found = [yaml.safe_load(file.read_text("utf-8")) for file in files(name)]
    return {key: value for of_file in found for key, value in of_file.items()}
