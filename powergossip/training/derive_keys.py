"""The keys of methods' options, and the defaults of tasks: method_keys.py, from the signatures and
docstrings of the methods' rows, and task_defaults.py.

After a row of a registry has changed, the files are written again by::

    python -m powergossip.training.derive_keys

`--help` thus shows them without an import of torch. Tests compare the files with the rows.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from powergossip import algorithms, compressors, options, tasks
from powergossip.algorithms import aggregation, learning, torch_powersgd
from powergossip.training import method_keys, task_defaults
from powergossip.training.config_checks import (
    ALIASES,
    DEFAULTS,
    OWN_KEYS,
    as_written,
    option_defaults,
)
from powergossip.training.method_keys import PREFIX, Groups

# Further objects whose docstrings describe the options of a method.
_DESCRIPTIONS: dict[str, tuple[Any, ...]] = {
    **{
        name: (learning.CentralizedSGD,)
        for name in {*aggregation.AGGREGATIONS} - aggregation.OF_LOCAL_STEPS
    },
    "ef-sgd": (learning.CentralizedSGD, aggregation.ErrorFeedbackConfig),
}
_NAMES = {float: "float", int: "int", str: "str", bool: "bool"}  # in the order of a union
_DERIVED = "    # Derived\n"


def _methods() -> dict[str, options.Builder]:
    hooks: dict[str, options.Builder] = dict.fromkeys(torch_powersgd.HOOKS, torch_powersgd.DDPHook)
    return {**algorithms.AVERAGING, **aggregation.AGGREGATIONS, **hooks}


def described(*sources: Any) -> dict[str, str]:
    """Return parameter → its entry in the section Args of a docstring, in one line."""
    found: dict[str, str] = {}
    for source in sources:
        text = f"{inspect.getdoc(source) or ''}\n"
        section = re.search(r"^Args:\n((?:    .*\n|\n)*)", text, re.MULTILINE)
        parts = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.MULTILINE)
        found |= dict(zip(parts[1::2], (" ".join(p.split()) for p in parts[2::2]), strict=True))
    return found


def groups() -> Groups:
    """Return title → key → default in train.py, and meaning. Methods with equal options are one."""
    found: Groups = {}
    for name, row in _methods().items():
        keys = {option: key for key, option in ALIASES.get(name, {}).items()}
        texts = described(row, *_DESCRIPTIONS.get(name, ()))
        texts = {keys.get(option, option): text for option, text in texts.items()}
        _add(found, f"optimizer={name}", option_defaults(name), texts, keys)
    for name, row in compressors.COMPRESSORS.items():
        texts = described(*reversed(inspect.getmro(row)))  # type: ignore[arg-type] # a class
        _add(found, f"{PREFIX}compressor={name}", options.defaults(row), texts, {})
    return found


def _add(
    found: Groups,
    title: str,
    defaults: Mapping[str, Any],
    texts: Mapping[str, str],
    keys: Mapping[str, str],
) -> None:
    """Add the options of a method, unless it has none, with their names as keys in the texts."""

    def named(word: re.Match[str]) -> str:
        key = keys.get(word[0], word[0])
        return OWN_KEYS.get(key, f"{PREFIX}{key}" if key in defaults else word[0])

    entries = {}
    for key, default in defaults.items():
        text = re.sub(r"((\.) See|, see) `[^`]*`\.$|\.$", "", texts[key])
        text = text[0].lower() + text[1:]  # as the comments of other keys
        if key == "compressor":
            text += f": {', '.join(compressors.COMPRESSORS)}"
        entries[f"{PREFIX}{key}"] = default, re.sub(r"\b\w+_\w+\b", named, text)
    same = next((other for other, given in found.items() if given == entries), title)
    if same != title:
        del found[same]
        title = f"{same} or {title.partition('=')[2]}"
    if entries:
        found[title] = entries


def types() -> dict[str, str]:
    """Return key → its type in a configuration: the union of those of all methods, and None."""
    found: dict[str, set[Any]] = {}
    every = {**_methods(), **compressors.COMPRESSORS}
    for name, row in every.items():
        keys = {option: key for key, option in ALIASES.get(name, {}).items()}
        own = options.parameters(row)
        defaults = option_defaults(name) if name in _methods() else options.defaults(row)
        for key, default in defaults.items():
            kinds = found.setdefault(key, set())
            parameter = own.get(next((o for o, k in keys.items() if k == key), key))
            if parameter is not None:
                kinds |= set(get_args(parameter.annotation)) or {parameter.annotation}
            kinds |= {type(default)} if key in DEFAULTS.get(name, {}) or not parameter else set()
    return {f"{PREFIX}{key}": _union(kinds) for key, kinds in found.items()}


def _union(kinds: set[Any]) -> str:
    """The annotation of a key. Tensors and functions cannot be given."""
    kinds = {kind for kind in kinds if kind not in (Tensor, type(None)) and not _is_function(kind)}
    if not kinds <= set(_NAMES):
        return "Any"
    kinds |= {int} if {float, str} <= kinds else set()  # OmegaConf converts no int to such a union
    return " | ".join([*(name for kind, name in _NAMES.items() if kind in kinds), "None"])


def _is_function(kind: Any) -> bool:
    return str(kind).startswith("collections.abc.Callable")


def source() -> str:
    """Return the text of method_keys.py, as it should be."""
    head = Path(method_keys.__file__).read_text().partition(_DERIVED)[0]
    fields = [f"    {key}: {kind} = None" for key, kind in types().items()]
    table = ["    groups: ClassVar[Groups] = {"]
    for title, entries in groups().items():
        table.append(f"        {_literal(title)}: {{")
        for key, (default, text) in entries.items():
            table.append(f"            {_literal(key)}: (")
            table.append(f"                {_literal(default)},")
            table.append(f"                {_literal(text)},")
            table.append("            ),")
        table.append("        },")
    return head + _DERIVED + "\n".join([*fields, *table, "    }"]) + "\n"


def _literal(value: Any) -> str:
    if not isinstance(value, str) or ('"' in value and "'" not in value):
        return repr(value)  # with the quotes that the formatter prefers
    return json.dumps(value, ensure_ascii=False)


def of_tasks() -> str:
    """Return the keys that depend on the task, as key=value in a paragraph for each task."""
    paragraphs = []
    for name in tasks.TASKS:
        values = [f"{key}={as_written(value)}" for key, value in tasks.defaults(name).items()]
        paragraphs.append(
            textwrap.fill(
                " ".join([f"{name}:", *values]),
                width=100,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(paragraphs)


if __name__ == "__main__":
    Path(method_keys.__file__).write_text(source())
    head = Path(task_defaults.__file__).read_text().partition(" = ")[0]
    Path(task_defaults.__file__).write_text(f'{head} = """\\\n{of_tasks()}\n"""\n')
