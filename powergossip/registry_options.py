"""Options of a method: the parameters of its constructor or builder that have a default.

A row of a registry is a class or a function. The registry gives its required parameters, which are
positional: the network and the layout, for instance. The parameters with a default are the row's
options, under the names that configurations and command lines use. No other list of them exists.

A row with a parameter such as `compressor` and with `**compressor_options` chooses from another
registry. Its options then include the options of the chosen row. A class whose constructor has
`**base_options` has the options of its base class, too.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from powergossip import checks, user_functions

Builder = Callable[..., Any]
Registry = Mapping[str, Builder]


def import_row(
    registry: dict[str, Any], key: str, name: object, given: Sequence[str], *methods: str
) -> None:
    """Add the row package.module:name, unless there is a row of this name. Other names, and None,
    change nothing.

    Args:
        registry: Registry of the row.
        key: Key or argument that has the name, for errors.
        given: Names of the positional arguments of the row.
        methods: Methods that the row needs if it is a class.

    Raises:
        ValueError: If the name refers to nothing, the import fails, or it is no such row.
    """
    if not isinstance(name, str) or not user_functions.is_name(name) or name in registry:
        return
    row = user_functions.find(key, name).function
    try:
        inspect.signature(row).bind(*given)
    except (TypeError, ValueError) as error:
        arguments = f"called with {', '.join(given) or 'no arguments'}"
        accepted = f"a class or function that can be {arguments} ({error})"
        raise checks.BadValue(key, name, accepted) from error
    for method in methods:
        ok = not isinstance(row, type) or hasattr(row, method)
        checks.check(key, name, ok, f"a class with the methods {', '.join(methods)}")
    registry[name] = row


def find(registry: Registry, kind: str, name: object) -> Builder:
    """Return the row of that name. Raises ValueError that lists the names."""
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f'{kind} "{name}" is unknown; choose from {", ".join(sorted(registry))}')
    return registry[name]


def are_of_library(*rows: Any) -> bool:
    """True if these classes or functions are from this package, not from a script, also with values
    bound by `functools.partial`. None is ignored.
    """
    homes = (str(getattr(row, "func", row).__module__) for row in rows if row is not None)
    return all(home.partition(".")[0] == __name__.partition(".")[0] for home in homes)


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
    if isinstance(row, type) and any(p.name == "base_options" for p in own):
        found = parameters(row.__bases__[0]) | found
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


def check(
    name: str, given: Mapping[str, Any], known: Mapping[str, inspect.Parameter], prefix: str = ""
) -> dict[str, Any]:
    """Return the given options, with numbers of numpy as Python's.

    Args:
        name: Name of the options' owner, for errors.
        known: Option → parameter. A value has the annotated type, or else the type of the
            default.
        prefix: Prefix of the options in errors.

    Raises:
        ValueError: For an unknown option, and BadValue for a value of another type.
    """
    found = {option: checks.plain(value) for option, value in given.items()}
    for option, value in found.items():
        key = f"{prefix}{option}"
        if option not in known:
            accepted = ", ".join(f"{prefix}{name}" for name in known)
            accepted = f"use {accepted}" if known else "it has none"
            accepted += colon_hint([option])
            raise ValueError(f"{key}={value}: {name} has no such option; {accepted}")
        check_type(key, value, known[option])
    return found


_TYPES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    NoneType: "None",
    Sequence: "a list",
}


def check_type(name: str, value: Any, parameter: inspect.Parameter) -> None:
    """Raise BadValue for a value that has not the type of a parameter, or is NaN.

    Annotations that are not types or unions of types accept every value.
    """
    kind = parameter.annotation
    if kind is parameter.empty and parameter.default is not None:
        kind = type(parameter.default)
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    accepted = [get_origin(kind) or kind for kind in kinds]
    if not all(isinstance(kind, type) for kind in accepted) or {Any, parameter.empty} & {*accepted}:
        return
    ok = isinstance(value, (*accepted, int) if float in accepted else tuple(accepted))
    ok = ok and (bool in accepted or not isinstance(value, bool))
    ok = ok and not (isinstance(value, float) and value != value)
    shown = [kind for kind in accepted if kind.__name__ not in ("Callable", "Tensor")]
    words = [_TYPES.get(kind, f"a {kind.__name__}") for kind in shown]
    checks.check(name, repr(value), ok, " or ".join(words))


def colon_hint(names: Iterable[str]) -> str:
    """A hint for names such as `degree:2`, which are keys without a value in YAML."""
    return " (YAML needs a space after the colon)" if any(":" in name for name in names) else ""
