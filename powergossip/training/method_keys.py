"""The keys optimizer_X of train.py, for the option X of a method, and the defaults of tasks.

They are read in the sources of the registries and their rows: types and defaults in parameters or
the fields of a dataclass (see powergossip.registry_options), meanings in the section Args of their
docstrings. An import of the rows would import torch. Tests compare what is read with the imported
rows.
"""

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

PREFIX = "optimizer_"
HOOKS = ("ddp-powersgd", "ddp-batched-powersgd")  # of ddp_hooks, by their names
# Options that a method calls by another name than the key: the published names of its class.
ALIASES: dict[str, dict[str, str]] = {
    "powersgd": {
        "num_iterations": "num_iters_per_step",
        "start_compressing_after": "start_compressing_after_num_steps",
    },
    "dgc": {
        "keep_ratio": "compress_ratio",
        "max_adaptation_iterations": "max_adaptation_iters",
        "warmup_ratios": "warmup_coeff",
    },
}
# Defaults of train.py that differ from the defaults of the method's constructor, by key.
DEFAULTS: dict[str, dict[str, Any]] = {
    # Both factors in each step, and compression from the first one on: the method of the paper.
    "powersgd": {"num_iterations": 2, "start_compressing_after": 0},
    "dgc": {"keep_ratio": 0.01, "compress_upper_bound": 1.0, "int32_indices": True},
    **{name: {"start_iteration": "auto"} for name in HOOKS},
}
# Options that have their own key, without the prefix. See config_checks.shared_keys.
OWN_KEYS = {
    "seed": "seed",
    "momentum": "momentum",
    "nesterov": "nesterov",
    "clip": "gradient_clipping",
    "weight_decay": "weight_decay",
}
# Options of learning.CentralizedSGD, which makes a learning rule of an aggregation of gradients.
OF_RULE = {"num_batches_per_step": 1}

_PACKAGE = Path(__file__).parents[1]
_OF_COMPRESSOR = {"choco": {"copy_rate": 1.0}}  # defaults that follow from the default compressor
_OTHERS = {"Callable": Callable, "Sequence": Sequence}


class Option(NamedTuple):
    """The types, the default and the meaning of an option or a key."""

    kinds: set[Any]
    default: Any
    text: str


Options = dict[str, Option]


def methods() -> dict[str, Options]:
    """Return title → key → option, of all methods and compressors."""
    aggregation = names("powergossip.algorithms.aggregation")
    config = aggregation.ErrorFeedbackConfig.options
    of_rule = names("powergossip.algorithms.learning").CentralizedSGD.options
    compressors = names("powergossip.compressors").COMPRESSORS
    found = {}
    for name, row in _rows().items():
        own = {**row.options} if isinstance(row, Definition) else {}
        if name in aggregation.AGGREGATIONS.keys() - aggregation.OF_LOCAL_STEPS:
            own = {option: own[option] for option in own if option not in OF_RULE}
            own |= {option: of_rule[option] for option in OF_RULE}
        if name == "ef-sgd":
            own = {o: own[o]._replace(text=own[o].text or config[o].text) for o in own}
        if "compressor" in own:
            text = f"{own['compressor'].text.rstrip('.')}: {', '.join(compressors)}"
            own["compressor"] = own["compressor"]._replace(text=text)
        found[f"optimizer={name}"] = _keys(name, own)
    for name, row in compressors.items():
        found[f"{PREFIX}compressor={name}"] = _keys("", row.options)
    return found


def _rows() -> dict[str, Any]:
    """The methods by name."""
    averaging = names("powergossip.algorithms.registry").AVERAGING
    hooks = dict.fromkeys(HOOKS, names("powergossip.algorithms.ddp_hooks").DDPHook)
    return averaging | names("powergossip.algorithms.aggregation").AGGREGATIONS | hooks


def summaries() -> dict[str, str]:
    """Return method or compressor → the first paragraph of its docstring."""
    rows = _rows() | names("powergossip.compressors").COMPRESSORS
    return {name: row.summary for name, row in rows.items() if isinstance(row, Definition)}


def _keys(method: str, own: Options) -> Options:
    """The options by key. Their texts have the names of keys, and begin as comments do."""
    keys = {option: key for key, option in ALIASES.get(method, {}).items()}
    found = {keys.get(name, name): option for name, option in own.items() if name not in OWN_KEYS}
    for key, default in (DEFAULTS.get(method, {}) | _OF_COMPRESSOR.get(method, {})).items():
        kinds = found[key].kinds | {type(default)}
        found[key] = found[key]._replace(kinds=kinds, default=default)

    def named(word: re.Match[str]) -> str:
        key = keys.get(word[0], word[0])
        return OWN_KEYS.get(key, f"{PREFIX}{key}" if key in found else word[0])

    for key, option in found.items():
        text = re.sub(r"((\.) See|, see) `[^`]*`\.$|\.$", "", option.text)
        text = re.sub(r"\b\w+_\w+\b", named, text[:1].lower() + text[1:])
        found[key] = option._replace(text=text)
    return {f"{PREFIX}{key}": option for key, option in found.items()}


def types(titled: dict[str, Options]) -> dict[str, Any]:
    """Return key → its type in a configuration: the union of the types in all methods, and None.

    Tensors and functions cannot be given.
    """
    found: dict[str, set[Any]] = {}
    for own in titled.values():
        for key, option in own.items():
            kinds = {k for k in option.kinds if not str(k).startswith("collections.abc.Callable")}
            found[key] = found.get(key, {NoneType}) | kinds
    for kinds in found.values():
        if {float, str} <= kinds:
            kinds.add(int)  # OmegaConf converts no int to such a union
    plain = {bool, float, int, str, NoneType}
    return {key: reduce(or_, kinds) if kinds <= plain else Any for key, kinds in found.items()}


def groups(titled: dict[str, Options]) -> dict[str, dict[str, tuple[Any, str]]]:
    """Return title → key → default, and meaning. Methods with equal options are one."""
    found: dict[str, dict[str, tuple[Any, str]]] = {}
    for title, own in titled.items():
        entries = {key: (option.default, option.text) for key, option in own.items()}
        same = next((other for other, given in found.items() if given == entries), None)
        if same:
            del found[same]
        if entries:
            found[f"{same} or {title.partition('=')[2]}" if same else title] = entries
    return found


def task_defaults() -> str:
    """Return the keys that depend on the task, as key=value in a paragraph for each task."""
    tasks = names("powergossip.tasks.task_defaults")
    lines = ["defaults of each task:"]
    for name, different in tasks.DEFAULTS.items():
        values = (tasks.GENERAL_DEFAULTS | different).items()
        text = " ".join([f"  {name}:", *(f"{key}={as_written(value)}" for key, value in values)])
        lines += textwrap.wrap(text, 100, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def as_written(value: Any) -> str:
    """A value as it is written on the command line, without spaces."""
    return json.dumps(value, separators=(",", ":")).strip('"')


# --- Sources -------------------------------------------------------------------------------------


class Names(dict[str, Any]):
    """The names of a module of this package, with the values that they have in its source.

    A name is evaluated when it is first used. Functions and classes are their definitions. From
    other packages there are types only.
    """

    def __init__(self, module: str):
        self._texts: dict[str, str] = {}  # of the statements that define or import a name
        file = _PACKAGE.parent.joinpath(*module.split("."))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        for text in re.split(r"\n(?=[\w@])", file.read_text(encoding="utf-8")):
            imported = text.partition(" import ")[2] if text.startswith("from ") else ""
            found = re.findall(r"\w+", imported) or re.findall(r"^(?:class |def )?(\w+)", text)
            self._texts |= dict.fromkeys(found, text)

    def __missing__(self, name: str) -> Any:
        first, home, *_ = (text := self._texts[name]).split(maxsplit=2)
        if first in ("class", "def"):
            self[name] = Definition(self, text)
        elif first != "from":
            self[name] = eval(text.partition(" = ")[2], {}, self)
        elif not home.startswith(_PACKAGE.name):
            self[name] = _OTHERS.get(name)
        else:
            of_home = names(home)
            self[name] = of_home[name] if name in of_home._texts else names(f"{home}.{name}")
        return self[name]

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def value(self, expression: Any) -> Any:
        """The value of an expression in the module."""
        if isinstance(expression, ast.Constant):
            return expression.value
        return eval(compile(ast.Expression(expression), "", "eval"), {}, self)


names = cache(Names)


@dataclass(eq=False)
class Definition:
    """A function, class or dataclass in the source of a module."""

    home: Names
    text: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *parts: "Definition", **given: Any) -> "Definition":
        """Return a row that a function builds. It has the options of the last argument."""
        return replace(parts[-1], given=given)

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, in one line."""
        text = re.search(r'r?"""(.*?)(?:::)?(?:\n\n|""")', self.text, re.DOTALL)
        return " ".join(text[1].split()) if text else ""

    @cached_property
    def options(self) -> Options:
        """The parameters with a default, or the fields, by name, and the inherited ones."""
        # To parse the bodies of a class takes more time than all the rest.
        head = re.split(r"\n    (?:def |@)", self.text, maxsplit=1)[0]
        init = re.search(r"\n    def __init__\(.*?\)(?: -> None)?:\n", self.text, re.DOTALL)
        node: Any = ast.parse(f"{head}{init[0]}        ..." if init else head).body[0]
        found: Options = {}
        for base in reversed(getattr(node, "bases", [])):
            kind = self.home.value(base)
            found |= kind.options if isinstance(kind, Definition) else {}
        texts = {name: option.text for name, option in found.items()}
        texts |= described(ast.get_docstring(node) or "")
        function = node.body[-1] if init else node
        if isinstance(function, ast.FunctionDef):
            args = function.args
            if args.kwarg is None or args.kwarg.arg != "base_options":
                found = {}
            places = [
                *zip(args.args[-len(args.defaults) :], args.defaults, strict=False),
                *zip(args.kwonlyargs, args.kw_defaults, strict=True),
            ]
            declared: list[Any] = [
                (p.arg, p.annotation, default) for p, default in places if default
            ]
        else:
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            declared = [(ast.unparse(line.target), line.annotation, line.value) for line in fields]
        for name, annotation, default in declared:
            if not ast.unparse(annotation).startswith("ClassVar"):
                kind, value = self.home.value(annotation), default and self.home.value(default)
                kinds = {*get_args(kind)} or {kind}
                found[name] = Option(kinds, self.given.get(name, value), "")
        return {name: option._replace(text=texts.get(name, "")) for name, option in found.items()}


def described(docstring: str) -> dict[str, str]:
    """Return parameter → its entry in the section Args of a docstring, in one line."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", f"{docstring}\n", re.MULTILINE)
    parts = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], (" ".join(p.split()) for p in parts[2::2]), strict=True))
