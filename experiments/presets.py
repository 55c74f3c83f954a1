"""The values of the presets, for experiments that run or vary them."""

from typing import Any

import yaml

from powergossip import presets


def preset(base: str, method: str | None = None) -> dict[str, Any]:
    """The keys that a preset sets, and their values."""
    values: dict[str, Any] = {}
    for file in presets.files(f"{base}/{method}" if method else base):
        values |= yaml.safe_load(file.read_text("utf-8"))
    return values
