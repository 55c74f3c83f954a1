"""The published settings: experiments/configs/BASE.yaml, and BASE/METHOD.yaml on top of it."""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "configs"


def preset(base: str, method: str | None = None) -> dict[str, Any]:
    """The keys that they set."""
    files = [FOLDER / f"{base}.yaml", *([FOLDER / base / f"{method}.yaml"] if method else [])]
    values: dict[str, Any] = {}
    for file in files:
        values |= yaml.safe_load(file.read_text("utf-8"))
    return values
