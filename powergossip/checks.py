"""Checks of values, with one grammar: KEY=VALUE: use ACCEPTED."""

from collections.abc import Callable
from typing import Any


def require(config: Any, key: str, ok: Callable[[Any], bool], accepted: str) -> None:
    """Raise ValueError, "key=value: use ACCEPTED", unless config[key] is ok."""
    if not ok(config[key]):
        raise ValueError(f"{key}={config[key]}: use {accepted}")


def at_least_one(name: str, value: int) -> None:
    """Raise ValueError for a value below 1."""
    if value < 1:
        raise ValueError(f"{name}={value}: use 1 or more")
