"""`task_options`: the options of single tasks, and their validation.

The options of a model, and their defaults, are the keyword-only parameters of its builder.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powergossip.registry_options import colon_hint
from powergossip.user_functions import Named


@dataclass(frozen=True)
class Accepted:
    """The accepted values of an option."""

    accepts: Callable[[Any], bool]
    accepted: str  # in words


def one_of(choices: Iterable[str]) -> Accepted:
    names = list(choices)
    return Accepted(lambda value: value in names, " or ".join(names))


TEXT = Accepted(lambda value: isinstance(value, str) and value != "", "a text that is not empty")
FLAG = Accepted(lambda value: type(value) is bool, "true or false")
COUNT = Accepted(lambda value: type(value) is int and value >= 1, "a whole number, 1 or more")
FRACTION = Accepted(
    lambda value: type(value) in (int, float) and 0 <= value < 1, "a number from 0 to below 1"
)


def _all(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """True for a list of finite numbers that are all accepted."""
    return lambda values: (
        isinstance(values, Sequence)
        and all(
            type(value) in (int, float) and math.isfinite(value) and accepts(value)
            for value in values
        )
    )


NUMBERS = Accepted(_all(lambda value: True), "a list of numbers")
POSITIVE_NUMBERS = Accepted(_all(lambda value: value > 0), "a list of numbers above 0")


def check(
    task: str,
    options: Mapping[str, Any],
    known: Mapping[str, Accepted],
    architecture: Named | None = None,
    replaced: Collection[str] = (),
) -> None:
    """Raise ValueError for unknown options of a task and for values that are not accepted.

    Args:
        architecture: Architecture of the user. Its parameters take the place of the options in
            `replaced`.
    """
    if architecture is not None:
        known = {key: kind for key, kind in known.items() if key not in replaced}
    names = list(dict.fromkeys([*known, *(architecture.parameters if architecture else ())]))
    unknown = sorted(set(options) - set(names))
    if unknown:
        quoted = ", ".join(f'"{key}"' for key in unknown)
        choices = f"choose from {', '.join(names)}" if names else "it has none"
        choices += colon_hint(unknown)
        raise ValueError(f'task "{task}" has no option {quoted}; {choices}')
    for key, value in options.items():
        if key in known and not known[key].accepts(value):
            raise ValueError(f"task_options.{key}={value}: use {known[key].accepted}")


def defaults(build: Callable[..., Any]) -> dict[str, Any]:
    """The options of a model, and their defaults."""
    return {
        key: parameter.default
        for key, parameter in inspect.signature(build).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
