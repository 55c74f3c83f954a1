"""Checks of values, with one grammar for all errors: KEY=VALUE: use ACCEPTED."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

SMALLEST, LARGEST = 1.1754944e-38, 3.4028234e38  # normal numbers in single precision


class BadValue(ValueError):
    """A value that is not accepted. The text is "NAME=VALUE: use ACCEPTED".

    Args:
        name: Name of the parameter, or of the configuration key.
        value: The rejected value.
        accepted: Description of the accepted values, such as "1 or more".
    """

    def __init__(self, name: str, value: object, accepted: str):
        super().__init__(name, value, accepted)
        self.name, self.value, self.accepted = name, value, accepted

    def __str__(self) -> str:
        return f"{self.name}={self.value}: use {self.accepted}"

    def renamed(self, name: str) -> "BadValue":
        """Return the same error for another name: `optimizer_rank` for `rank`, for instance."""
        return BadValue(name, self.value, self.accepted)


def plain(value: Any) -> Any:
    """A number of numpy as Python's, a path as a string, which states can have. Others stay."""
    if isinstance(value, Path):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def check(name: str, value: object, ok: bool, accepted: str) -> None:
    """Raise BadValue unless ok."""
    if not ok:
        raise BadValue(name, value, accepted)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether the value is a number, and neither infinite nor NaN."""
    return _is_number(value) and math.isfinite(value)


def at_least(name: str, value: Any, minimum: float) -> None:
    """Raise BadValue unless value ≥ minimum."""
    check(name, value, _is_number(value) and value >= minimum, f"{minimum} or more")


def at_least_one(name: str, value: Any) -> None:
    """Raise BadValue unless value ≥ 1."""
    at_least(name, value, 1)


def not_negative(name: str, value: Any) -> None:
    """Raise BadValue unless value ≥ 0."""
    at_least(name, value, 0)


def positive(name: str, value: Any) -> None:
    """Raise BadValue unless the value is finite and > 0."""
    check(name, value, is_finite(value) and value > 0, "a number above 0")


def between(name: str, value: Any, minimum: float, maximum: float) -> None:
    """Raise BadValue unless minimum ≤ value ≤ maximum."""
    ok = _is_number(value) and minimum <= value <= maximum
    check(name, value, ok, f"a number from {minimum} to {maximum}")


def fraction(name: str, value: Any) -> None:
    """Raise BadValue unless 0 ≤ value ≤ 1."""
    between(name, value, 0, 1)


def below_one(name: str, value: Any) -> None:
    """Raise BadValue unless 0 ≤ value < 1."""
    ok = _is_number(value) and 0 <= value < 1
    check(name, value, ok, "a number from 0 to below 1")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise BadValue unless the value is one of the choices."""
    known = list(choices)
    listed = " or ".join(filter(None, [", ".join(known[:-1]), *known[-1:]]))
    check(name, value, value in known, listed)


def level(name: str, value: Any) -> None:
    """Raise BadValue unless the value is 0, 1 or 2, a level of output."""
    check(name, value, value in (0, 1, 2), "0, 1 or 2")


def representable(name: str, value: Any) -> None:
    """Raise BadValue for a number that tensors in single precision or of int64 cannot hold.

    Lists and mappings are searched, and entries of a mapping are called NAME.KEY.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            representable(f"{name}.{key}" if name else str(key), entry)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for entry in value:
            representable(name, entry)
    elif isinstance(value, int):
        check(name, value, abs(value) < 2**63, "a number below 2^63")
    elif isinstance(value, float) and value and math.isfinite(value):
        ok = SMALLEST <= abs(value) <= LARGEST
        check(name, value, ok, f"0, or a number from {SMALLEST:.2g} to {LARGEST:.2g}")


def all_of(test: Callable[..., None], values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Apply a check of this module to several entries of `values`, by name."""
    for name in names:
        test(name, values[name])
