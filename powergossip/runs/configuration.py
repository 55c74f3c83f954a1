"""From a command line to a configuration, and from an error to one sentence and an exit code.

    python train.py --config FILE.yaml --output-dir DIR --suffix TEXT key=value key.sub=value
    python train.py --config cifar10_resnet20/power-gossip          a preset by its name

`--config` may be repeated. Files come first, in their order, then key=value: later ones win. The
suffix goes to the end of the output folder's name, given or dated.
"""

import argparse
import dataclasses
import difflib
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from powergossip import errors, network, presets
from powergossip.errors import BadInput
from powergossip.runs.output import DATED

# A whole number for a float, or a tuple for a list, is what a user means by it.
warnings.filterwarnings("ignore", message="Implicit conversion from (int to float|tuple to list)")


def read_command_line(config: DictConfig, arguments: Sequence[str], description: str) -> str | None:
    """Change `config` as the command line says; returns --output-dir with --suffix, or None for
    neither. With a suffix alone that is DATED with the suffix, for Output to fill in.

    Raises BadInput for an unknown key, a value of the wrong type, a file that is missing, empty,
    not YAML or that has a key twice, a suffix that is no part of a name. `--help` prints the keys
    with their defaults, and exits.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"keys and their defaults:\n{describe(config)}",
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this and exit")
    parser.add_argument("--config", action="append", default=[], metavar="FILE.yaml")
    parser.add_argument("--output-dir", metavar="DIR")
    parser.add_argument("--suffix", default="", metavar="TEXT")
    parser.add_argument("assignments", nargs="*", metavar="key=value")
    try:
        options, unknown = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise BadInput(str(error)) from error
    if unknown:
        raise BadInput(
            f'option "{unknown[0]}" is unknown; '
            "use --config FILE.yaml, --output-dir DIR, --suffix TEXT, key=value"
        )
    if options.help:
        if network.processes().rank == 0:
            parser.print_help()
        sys.exit(0)
    for file in _config_files(options.config):
        for key, (value, line) in _read_yaml(file).items():
            assign(config, str(key), value, source=f"{file}, line {line}: ")
    for assignment in options.assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise BadInput(f'"{assignment}" is not an assignment; write key=value')
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise BadInput(f"{key}={text}: the value is not YAML ({_problem(error)})") from error
        assign(config, key, value)
    return _output_dir(options.output_dir, options.suffix, config)


def _output_dir(folder: str | None, suffix: str, config: DictConfig) -> str | None:
    """The folder's name with the suffix. Raises BadInput."""
    if not suffix:
        return folder
    if any(character in suffix for character in "/\\\0{}"):
        raise BadInput(f'--suffix "{suffix}": use letters that can be part of a folder\'s name')
    if folder is None and config.get("resume"):
        raise BadInput("resume=true: say with --output-dir which run is to go on")
    return f"{DATED if folder is None else folder.rstrip('/')}{suffix}"


def take_up(config: DictConfig, file: Path) -> None:
    """Give keys that have their defaults the values in a run's config.yaml."""
    defaults = OmegaConf.structured(_schema(config))
    for key, (value, line) in _read_yaml(str(file)).items():
        if key in defaults and config[key] == defaults[key]:
            assign(config, str(key), value, source=f"{file}, line {line}: ")


def changed(config: DictConfig, kind: type[Any] | None = None) -> str:
    """YAML, a line `key: value` for each key that has not its default: read back as a file, these
    lines make the same configuration of the defaults.

    kind: the config class; needed if `config` was made of a plain mapping
    """
    kind = kind or _schema(config)
    defaults = OmegaConf.to_container(OmegaConf.structured(kind))
    values = OmegaConf.to_container(config)
    assert isinstance(defaults, dict)
    assert isinstance(values, dict)
    lines = [
        # One entry as a mapping {key: value} on one line, without its braces.
        yaml.dump({key: value}, Dumper=_Dumper, default_flow_style=True, width=math.inf)
        .strip()
        .removeprefix("{")
        .removesuffix("}")
        for key, value in values.items()
        if value != defaults.get(key) or type(value) is not type(defaults.get(key))
    ]
    return "\n".join(lines)


def assign(config: DictConfig, key: str, value: Any, source: str = "") -> None:
    """config[key] = value, where key may be dotted. BadInput for an unknown key or a wrong type.

    A list or mapping takes the place of the one before.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(_schema(config))}
    name, *inside = key.split(".")
    kind = kinds.get(name)
    if kind is None or (inside and not str(kind).startswith(("list", "dict"))):
        close = difflib.get_close_matches(key, kinds, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(kinds)}"
        raise BadInput(f'{source}key "{key}" is unknown; {hint}')
    refusal = BadInput(f"{source}{key}={_yaml_value(value)}: use {_type_name(kind)}")
    if kind is bool and isinstance(value, (int, float)) and value not in (0, 1):
        raise refusal  # OmegaConf would take any number for true
    try:
        OmegaConf.update(config, key, value, merge=False)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise refusal from error


def describe(config: DictConfig) -> str:
    """A line for each key: its default and the comment behind it in the config class, which may go
    on in a line that begins with "#   "."""
    kind = _schema(config)
    comments: dict[str, str] = {}
    last = ""
    for line in inspect.getsource(kind).splitlines():
        name, _, rest = line.strip().partition(":")
        if line.strip().startswith("#   ") and last:
            comments[last] += " " + line.strip().removeprefix("#").strip()
        elif "#" in rest:
            comments[name] = rest.split("#", 1)[1].strip()
        last = name if name in comments and "#" in rest else ""
    defaults = OmegaConf.to_container(OmegaConf.structured(kind))
    assert isinstance(defaults, dict)
    return "\n".join(
        f"  {f'{name!s}={_yaml_value(value)}':<44} {comments.get(str(name), '')}".rstrip()
        for name, value in defaults.items()
    )


def run_entry_point(main: Callable[[list[str]], object]) -> None:
    """Call main(arguments) as a program: bad input is one sentence from process 0, exit code 2."""
    try:
        main(sys.argv[1:])
    except BadInput as error:
        if network.processes().rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except errors.Interrupted as error:
        if network.processes().rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(128 + error.signal)
    except errors.Stopped as error:
        if network.processes().size > 1:
            raise  # the others may not know
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


class _Loader(yaml.SafeLoader):
    """YAML as everyone means it: 1e-3 is a number, on and 2024-01-01 are words, and a key stands in
    one place (YAML 1.2, § 3.2.1.3; PyYAML would take the last)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 as PyYAML declares it
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line
            if name in lines:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f'key "{key.value}" is there already, in line {lines[name] + 1}; keep one',
                    key.start_mark,
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would not take for a word."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _config_files(given: Sequence[str]) -> list[str]:
    """The files of `--config`: paths as they are, presets by name as their files, each once."""
    found: list[str] = []
    for name in given:
        if Path(name).is_file():
            found.append(name)
        else:
            of_preset = [str(path) for path in presets.files(name)]
            found.extend([path for path in of_preset if path not in found] or [name])
    return found


def _read_yaml(file: str) -> dict[Any, tuple[Any, int]]:
    """Key → value, and the line (from 1) it stands in. Raises BadInput."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        close = difflib.get_close_matches(file, presets.names(), n=3)
        hint = f"; did you mean the preset {' or '.join(close)}?" if close else ""
        raise BadInput(f"--config {file}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"--config {file} is not a text file") from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise BadInput(f"--config {file} is not YAML: {_problem(error)}") from error
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise BadInput(f"--config {file} {found}; it should hold lines of the form key: value")
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    return {key: (value, lines.get(str(key), 1)) for key, value in content.items()}


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + (getattr(error, "problem", None) or str(error))


def _schema(config: DictConfig) -> type[Any]:
    """The dataclass that the configuration was made of."""
    kind = OmegaConf.get_type(config)
    assert kind is not None
    return kind


def _type_name(kind: Any) -> str:
    known = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a word",
        int | None: "a whole number, or null",
        str | None: "a word, or null",
        float | int | str: "a number or a word",
        float | int | str | None: "a number or a word, or null",
        list[int]: "a list of whole numbers",
        list[str]: "a list of words",
    }
    if kind in known:
        return known[kind]
    return "a list" if str(kind).startswith("list") else "a mapping {name: value, ...}"


def _yaml_value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
