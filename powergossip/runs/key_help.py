"""The help of a configuration: its keys, with their defaults and the comments in its class."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

Groups = dict[str, dict[str, tuple[Any, str]]]  # title → key → default and meaning
Help = Callable[[DictConfig, str], str]  # the text of --help NAME, "" without a name


def every_key(config: DictConfig, name: str = "") -> str:
    """Return the help with the lines of the keys about a name, or else ("", "all") of all keys."""
    about = "" if name in ("", "all") else keys_about(config, name)
    return about or f"keys and their defaults:\n{describe(config)}"


def describe(config: DictConfig) -> str:
    """Return the lines of all keys, each with its default and its comment in the class."""
    return described(key_groups(config))


def keys_about(config: DictConfig, name: str) -> str:
    """Return the lines of the keys that begin with a key, or have a word in their meaning."""
    keys = {key: entry for group in key_groups(config).values() for key, entry in group.items()}
    word = re.compile(rf"(?<![a-z0-9-]){re.escape(name)}(?![a-z0-9-])")
    found = [key for key in keys if name in keys and key.startswith(name)]
    found = found or [key for key in keys if word.search(f"{key} {keys[key][1]}")]
    return described({"": {key: keys[key] for key in found}})


def described(groups: Groups, width: int = 44) -> str:
    """Return the lines of keys below their titles. Comments begin in column `width`."""
    lines: list[str] = []
    for title, entries in groups.items():
        lines += ["", f"{title}:"] if title else []
        lines += [_described(key, *entry, width) for key, entry in entries.items()]
    return "\n".join(lines).removeprefix("\n")


def key_groups(config: DictConfig) -> Groups:
    """Return title → key → default and comment in the class.

    A comment may continue in lines that begin with "#   ". One above a key is a title. A class
    may have an attribute `groups` with the groups of its keys instead.
    """
    found: Groups = {}
    for kind in reversed(schema(config).__mro__):
        if dataclasses.is_dataclass(kind):
            found |= kind.__dict__.get("groups") or _groups(kind, defaults_of(schema(config)))
    return found


def _groups(kind: type[Any], defaults: Mapping[Any, Any]) -> Groups:
    """Title → key → default and comment, of the keys that a class declares."""
    groups: Groups = {}
    title = last = ""
    for line in map(str.strip, inspect.getsource(kind).splitlines()):
        name, _, rest = line.partition(":")
        if line.startswith("#   ") and last:
            default, comment = groups[title][last]
            more = line.removeprefix("#").strip()
            groups[title][last] = default, f"{comment} {more}"
        elif line.startswith("# "):
            title, last = line.removeprefix("# "), ""
        elif name in kind.__annotations__:
            _, mark, comment = rest.partition("#")
            groups.setdefault(title, {})[name] = defaults[name], comment.strip()
            last = name if mark else ""
        else:
            last = ""
    return groups


def _described(key: str, default: Any, comment: str, width: int) -> str:
    """A key with its default, and beside it the comment, in lines of 100 characters."""
    given = f"  {key}={shown_value(default)}"
    lines = textwrap.wrap(comment, 100 - width, break_on_hyphens=False) or [""]
    if len(given) < width - 1:
        given = f"{given:<{width}}{lines.pop(0)}".rstrip()
    return "\n".join([given, *(" " * width + line for line in lines)])


_DEFAULTS: dict[type[Any], dict[Any, Any]] = {}


def defaults_of(kind: type[Any]) -> Mapping[Any, Any]:
    """The defaults of a dataclass, as plain values that are not changed. Computed once."""
    if kind not in _DEFAULTS:
        _DEFAULTS[kind] = dataclasses.asdict(kind())
    return _DEFAULTS[kind]


def schema(config: DictConfig) -> type[Any]:
    """The config class, a dataclass."""
    kind = OmegaConf.get_type(config)
    assert kind is not None
    return kind


def shown_value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
