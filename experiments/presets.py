"""Values of presets, for experiments that run or modify them."""

from typing import Any

import yaml

from powergossip import presets


def preset(base: str, method: str | None = None) -> dict[str, Any]:
    """Return the keys that a preset sets, with their values."""
    values: dict[str, Any] = {}
    for file in presets.files(f"{base}/{method}" if method else base):
        values |= yaml.safe_load(file.read_text("utf-8"))
    return values
