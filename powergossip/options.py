"""Options of a method: the parameters of its constructor or builder that have a default.

A row of a registry is a class or a function. The registry gives its required parameters, which are
positional: the network and the layout, for instance. The parameters with a default are the row's
options, under the names that configurations and command lines use. No other list of them exists.

A row with a parameter such as `compressor` and with `**compressor_options` chooses from another
registry. Its options then include those of the chosen row.

A row whose last required parameter is called `options` gets all options in one object.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from powergossip import checks

Builder = Callable[..., Any]
Registry = Mapping[str, Builder]


def find(registry: Registry, kind: str, name: object) -> Builder:
    """Return the row of that name. Raises ValueError that lists the names."""
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f'{kind} "{name}" is unknown; choose from {", ".join(sorted(registry))}')
    return registry[name]


def is_of_library(row: Any) -> bool:
    """True if a class or function is from this package, not from a script."""
    return str(row.__module__).partition(".")[0] == __name__.partition(".")[0]


def are_of_library(*rows: Any) -> bool:
    """True if these rows are from this package, also with values bound by `functools.partial`. None
    is ignored.
    """
    return all(is_of_library(getattr(row, "func", row)) for row in rows if row is not None)


def parameters(
    row: Builder, given: Mapping[str, Any] | None = None, **registries: Registry
) -> dict[str, inspect.Parameter]:
    """Return option → parameter of a row.

    Args:
        given: Options that may name the choice. Otherwise it is the default.
        **registries: The other registries that its options choose from, by option.

    Raises:
        ValueError: For an unknown choice.
    """
    own = inspect.signature(row).parameters.values()
    found = {p.name: p for p in own if p.default is not p.empty}
    bound = getattr(row, "keywords", {})  # of functools.partial
    if any(p.kind is p.VAR_KEYWORD for p in own):
        for option, registry in registries.items():
            if option in found:
                choice = (given or {}).get(option, found[option].default)
                chosen = parameters(find(registry, option, choice))
                for name in bound.keys() & chosen.keys():
                    chosen[name] = chosen[name].replace(default=bound[name])
                found = {**chosen, **found}
    return found


def defaults(
    row: Builder, given: Mapping[str, Any] | None = None, **registries: Registry
) -> dict[str, Any]:
    """Return option → default of a row; see `parameters`."""
    return {name: p.default for name, p in parameters(row, given, **registries).items()}


def takes_all(row: Builder) -> bool:
    """Whether the row gets all options in one object, as its last required parameter."""
    required = [
        p.name
        for p in inspect.signature(row).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    return bool(required) and required[-1] == "options"


def check(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, with numbers of numpy as Python's.

    Raises ValueError for one that the method `name` does not have.
    """
    for option, value in given.items():
        if option not in known:
            accepted = f"use {', '.join(known)}" if known else "it has none"
            accepted += colon_hint([option])
            raise ValueError(f"{option}={value}: {name} has no such option; {accepted}")
    return {option: checks.plain(value) for option, value in given.items()}


def colon_hint(names: Iterable[str]) -> str:
    """A hint for names such as `degree:2`, which are keys without a value in YAML."""
    return " (YAML needs a space after the colon)" if any(":" in name for name in names) else ""


class Options(SimpleNamespace):
    """Options as attributes: the defaults of all rows of a registry, and on top those given.

    Args:
        given: The given options.
    """

    def __init__(self, registry: Registry, given: Mapping[str, Any]):
        every: dict[str, Any] = {}
        for row in registry.values():
            if not takes_all(row):
                for option, default in defaults(row).items():
                    # None where rows differ: each then takes its own default.
                    every[option] = default if every.get(option, default) == default else None
        for option, value in given.items():
            if option not in every:
                raise TypeError(f"{option}={value!r} is an option of none of {', '.join(registry)}")
        super().__init__(**{**every, **given})
        self.given = dict(given)
