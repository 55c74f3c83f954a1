"""Configurations from command lines, and exit codes from errors.

Command lines::

    python train.py --config FILE.yaml --output-dir DIR key=value key.sub=value
    python train.py --config cifar10_resnet20/power-gossip          a preset by its name

`--config` may be repeated. Files come first, in their order, then key=value: later ones win.
"""

import argparse
import dataclasses
import difflib
import functools
import gc
import hashlib
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import or_
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from powergossip import __version__, command_line, errors, exits, launcher, reading
from powergossip.errors import BadInput
from powergossip.runs import assignments
from powergossip.runs.assignments import OPTION, Assignment
from powergossip.runs.files import CONFIG_FILE
from powergossip.runs.key_help import Help, defaults_of, every_key, schema, shown_value

if TYPE_CHECKING:
    from powergossip.network import Processes

METHODS = ("optimizer", f"{OPTION}compressor", "algorithm")  # keys that choose these options
# Keys of a process or its host. All others have one value in a run.
OF_PROCESS = {
    *("data_dir", "data_processes", "device", "download", "log_verbosity", "rank"),
    *("ticket", "ticket_options"),
}

# An integer for a float, or a tuple for a list, is accepted on purpose.
warnings.filterwarnings("ignore", message="Implicit conversion from (int to float|tuple to list)")


class CommandLine(NamedTuple):
    """The result of `read_command_line`.

    Attributes:
        output_dir: --output-dir, or None.
        explicit: Keys given for this run, on the command line or in a hand-written file, not in a
            saved configuration.
    """

    output_dir: str | None
    explicit: list[str]


def read_command_line(
    config: DictConfig, arguments: Sequence[str], description: str, shown: Help = every_key
) -> CommandLine:
    """Change `config` as specified on the command line. Return the output folder and explicit keys.

    Where the configuration has a key `resume` or `evaluate_only` that is true afterwards, keys that
    are not given keep the values of the run in the output folder, from its config.yaml.

    `--help` prints the options and the text of `shown`, and exits. `--help NAME` prints that text
    alone.

    Raises:
        BadInput: For an unknown key, a value of the wrong type, a file that is missing, empty, not
            YAML or has a key twice. `config` then stays as it is.
    """
    options = _parse(config, [*map(str, arguments)], description, shown)
    asked = [
        *(
            assignment
            for file in assignments.config_files(options.config)
            for assignment in assignments.of_file(config, file)
        ),
        *map(assignments.of_argument, options.assignments),
    ]
    after = _after(config, asked)
    resume = any(key in config and after[key] for key in ("resume", "evaluate_only"))
    folder = options.output_dir
    if folder == "":
        raise BadInput('--output-dir "": use the name of a folder')
    if resume and folder and (Path(folder) / CONFIG_FILE).exists():
        asked = [*assignments.of_saved_run(config, Path(folder)), *asked]
        _after(config, asked)
    _apply(config, asked)
    explicit = {a.name: a.explicit for a in asked}  # the last one counts
    return CommandLine(folder, [key for key in explicit if explicit[key] and key in config])


class _Typed(DictConfig):
    """A configuration, and its copies, where a bad assignment raises BadInput with one
    sentence."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Typed":
        found = super().__deepcopy__(memo)
        object.__setattr__(found, "__class__", _Typed)
        return found  # type: ignore[return-value]

    def __setitem__(self, key: Any, value: Any) -> None:
        value = _without_numpy(value)
        with _errors_of_assignment(self, key, value), _new_options(self, str(key)):
            super().__setitem__(key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        value = _without_numpy(value)
        with _errors_of_assignment(self, key, value), _new_options(self, key):
            super().__setattr__(key, value)


def _new_options(config: DictConfig, key: str) -> AbstractContextManager[object]:
    """A context in which a key may be added that is an option of a row of the user."""
    own = key.startswith(OPTION) and "." not in key and _has_own_row(schema(config), config)
    return open_dict(config) if own else nullcontext()


def _has_own_row(kind: type[Any], values: Mapping[Any, Any]) -> bool:
    """True if a method or its compressor is not of the library: package.module:name, or a row of a
    driver. Its options are not known before the import."""
    library = getattr(kind, "library", None)
    return any(
        ":" in str(value) or (library is not None and f"{key}={value}" not in library)
        for key in METHODS
        if (value := values.get(key)) is not None
    )


def _without_numpy(value: Any) -> Any:
    """Convert values of numpy, as from np.arange and np.logspace in a sweep, to Python's. Values in
    lists and dictionaries, too."""
    if type(value) is dict:
        return {key: _without_numpy(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return [_without_numpy(entry) for entry in value]
    return value.tolist() if type(value).__module__ == "numpy" else value


@contextmanager
def _errors_of_assignment(config: DictConfig, key: Any, value: Any) -> Iterator[None]:
    try:
        with warnings.catch_warnings():  # "2" for 2 and a path for a text are accepted
            warnings.filterwarnings("ignore", message="Implicit conversion from ")
            yield
    except OmegaConfBaseException as error:
        text = f"{key}={shown_value(value)}: {error}".splitlines()[0]
        try:
            assign(OmegaConf.structured(schema(config)), str(key), value)
        except BadInput as sentence:
            text = str(sentence)
        raise BadInput(text) from None


def structured(kind: type[Any]) -> DictConfig:
    """Return a configuration with the keys and defaults of a dataclass.

    An assignment of an unknown key or a value of the wrong type raises BadInput.
    """
    exits.end_with_sentences()
    return _Typed(kind)


def driver_config(config: Any, kind: type[Any]) -> DictConfig:
    """Return a copy of a module's `config`, which a driver may have replaced by a mapping.

    Raises:
        BadInput: For something else, an unknown key or a value of the wrong type.
    """
    if isinstance(config, DictConfig) and OmegaConf.get_type(config) is kind:
        return config.copy()
    if not isinstance(config, Mapping):
        raise BadInput(f"config={config!r}: use a mapping from keys to values")
    found = structured(kind)
    values: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    for key in sorted(values, key=lambda key: key not in found):
        found[key] = values[key]
    return found


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the plain values by key, with resolved references. Raises BadInput for a bad one."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # a reference such as ${seed} to an unknown key
        raise BadInput(str(error).replace("\n    full_key", ", key").splitlines()[0]) from error
    return dict(values)


@dataclass(frozen=True)
class Request:
    """A configuration as it was asked for.

    Attributes:
        config: The configuration, not yet checked.
        folder: Name of the requested output folder, or None.
        explicit: Keys that were given for this run, see `CommandLine`.
        wrong: The error of a request that cannot be read. All processes have to learn of it.
    """

    config: DictConfig
    folder: str | None
    explicit: list[str]
    wrong: Exception | None

    def check(self, processes: "Processes") -> None:
        """Raise BadInput, in all processes, for a request that is wrong or differs between them."""
        with processes.agreed():
            if self.wrong is not None:
                raise self.wrong
        values = {"version": version(), **plain(self.config)}
        if not processes.has_own_files:
            values["--output-dir"] = self.folder
        check_same(processes, values)


@functools.cache
def version() -> str:
    """The version of this package, with a hash of its source."""
    source = hashlib.sha256()
    for file in sorted(Path(errors.__file__).parent.rglob("*.py")):
        source.update(file.read_bytes())
    return f"{__version__}-{source.hexdigest()[:8]}"


def check_same(processes: "Processes", values: Mapping[str, Any]) -> None:
    """Raise BadInput in all processes unless all keys but `OF_PROCESS` have the same values."""
    processes.check_same({k: str(value) for k, value in values.items() if k not in OF_PROCESS})


def request(
    config: Any,
    kind: type[Any],
    arguments: Sequence[str] | None,
    output_dir: Any,
    description: str,
    shown: Help = every_key,
) -> Request:
    """Read a driver's `config` and `output_dir`, and the arguments of a command line, if any.

    They stay as they are. Exits after --help, see `read_command_line`. Imports nothing heavy.

    Raises:
        BadInput: For a request that cannot be read, if no launcher has started this process.
    """
    asked, folder, explicit = structured(kind), None, list[str]()
    wrong: Exception | None = None
    try:
        asked = driver_config(config, kind)
        folder = path_of_driver(output_dir)
        if arguments is not None:
            found = read_command_line(asked, list(arguments), description, shown)
            folder, explicit = found.output_dir or folder, found.explicit
        try:
            plain(asked)
        except BadInput:
            asked = structured(kind)  # without values that cannot be read
            raise
    except (ValueError, OSError) as error:
        if not launcher.has_started_this() and not exits.are_several():
            raise
        wrong = error
    return Request(asked, folder, explicit, wrong)


def _parse(
    config: DictConfig, arguments: Sequence[str], description: str, shown: Help
) -> argparse.Namespace:
    """Options and assignments of a command line, as text. Raises BadInput; exits after --help."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28, width=100
        ),
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
    )
    group = parser.add_argument_group("options")
    for names, text, given in (
        (("assignments",), "keys with their values", {"nargs": "*", "metavar": "key=value"}),
        (
            ("--config",),
            "settings from a file, or a preset by its name; may be repeated",
            {"action": "append", "default": [], "metavar": "FILE.yaml"},
        ),
        (
            ("--output-dir",),
            "folder of the run, with {date} for its date; by default output/{date}",
            {"metavar": "DIR"},
        ),
        (("-h", "--help"), "show this and exit", {"nargs": "?", "const": "", "metavar": "NAME"}),
    ):
        group.add_argument(*names, help=text, **given)
    try:
        options, unknown = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise BadInput(str(error)) from error
    if unknown:
        raise _unknown_option(config, unknown[0], arguments)
    if options.help is not None:
        parser.epilog = shown(config, options.help)
        if exits.is_first():
            print(parser.epilog if options.help else parser.format_help().rstrip())
        sys.exit(0)
    return options


def _unknown_option(config: DictConfig, option: str, arguments: Sequence[str]) -> BadInput:
    """The error of an option that does not exist, such as a key with dashes before it."""
    name, equals, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    hint = "use --config FILE.yaml, --output-dir DIR, key=value"
    if meant := [name] if name in config else _close(name, map(str, config)):
        after = [*arguments, ""][arguments.index(option) + 1]
        value = value if equals else after if after[:1] != "-" and "=" not in after else ""
        hint = f"write {meant[0]}={value or '…'}"
    return BadInput(f'option "{option}" is unknown; {hint}')


def _after(config: DictConfig, asked: Iterable[Assignment]) -> DictConfig:
    """A copy of the configuration with the assignments. Raises BadInput."""
    copy = config.copy()
    _apply(copy, asked)
    return copy


def _apply(config: DictConfig, asked: Iterable[Assignment]) -> None:
    """Make the assignments, options of a row of the user after the row. Raises BadInput.

    A saved configuration of such a row may have options that another method lacks.
    """
    for assignment in sorted(asked, key=lambda a: a.name not in config):
        key = assignment.name
        lost = key not in config and key.startswith(OPTION) and not assignment.explicit
        if not lost or _has_own_row(schema(config), config):
            assign(config, assignment.key, assignment.value, assignment.place)


def path_of_driver(folder: Any) -> str | None:
    """`output_dir` as a driver script set it. Raises BadInput unless it is a path, or None."""
    if folder is None or isinstance(folder, str | PathLike):
        return None if folder is None else str(folder)
    raise BadInput(f"output_dir={folder!r}: use the path of a folder, or None for a new one")


def changed(values: Mapping[str, Any], kind: type[Any]) -> str:
    """Return YAML with a line `key: value` for each key whose value is not the default of `kind`.

    Read as a --config file, these lines give the same configuration. `kind` is the config class.
    """
    defaults = defaults_of(kind)
    lines = [
        # One entry as a mapping {key: value} on one line, without its braces.
        yaml.dump({key: value}, Dumper=reading.Dumper, default_flow_style=True, width=math.inf)
        .strip()
        .removeprefix("{")
        .removesuffix("}")
        for key, value in values.items()
        if value != defaults.get(key) or type(value) is not type(defaults.get(key))
    ]
    return "\n".join(lines)


def assign(config: DictConfig, key: str, value: Any, place: str = "") -> None:
    """Set config[key], where key may be dotted. A list or mapping replaces the previous one.

    Raises BadInput, with a text that begins with `place`, for an unknown key or a wrong type.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(schema(config))}
    name, *inside = key.split(".")
    kind, new = kinds.get(name), _new_options(config, key)
    if kind is None and not isinstance(new, nullcontext):
        kind = Any
    if kind is None or (inside and not str(kind).startswith(("list", "dict"))):
        within = [known for known in kinds if "_" in known and key.endswith(f"_{known}")]
        close = [name] if kind else within or _close(key, kinds)
        own = f"{OPTION}{key}"
        close += [] if kind or isinstance(_new_options(config, own), nullcontext) else [own]
        hint = f"did you mean {' or '.join(close)}?" if close else "--help lists the keys"
        if key.startswith(OPTION) and not within:
            hint += " (an option of a row of your own needs optimizer=package.module:name)"
        raise BadInput(f'{place}key "{key}" is unknown; {hint}')
    wrong_type = BadInput(f"{place}{key}={shown_value(value)}: use {_type_name(kind)}")
    is_bool = kind in (bool, bool | None)
    if is_bool and isinstance(value, (int, float)) and value not in (0, 1):
        raise wrong_type  # OmegaConf takes any number for true
    try:
        with new:
            OmegaConf.update(config, key, value, merge=False)
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        raise wrong_type from error


def _close(key: str, known: Iterable[str]) -> list[str]:
    """Keys that may be meant: by their initials, similar letters, or a word of them."""
    known = list(known)
    initials = [name for name in known if key == "".join(word[0] for word in name.split("_"))]
    word = re.compile(rf"(^|_){re.escape(key)}s?(_|$)")
    words = [name for name in known if word.search(name)]
    return (initials or difflib.get_close_matches(key, known, 3, 0.75) or words)[:3]


def run_entry_point(main: Callable[[list[str]], object]) -> None:
    """Call main(arguments) as a program. Errors of the user become one sentence and an exit code.

    The code is 2 for BadInput and 130 for Ctrl-C. Stopped has its own, for a signal 128 + its
    number.
    """
    command_line.keep_streams()
    try:
        main(sys.argv[1:])
    except (BadInput, errors.Stopped) as error:
        if exits.are_up_to_the_hook(error):
            raise
        _report_once(error)
        sys.exit(exits.exit_code(exits.code_of(error), exits.is_first()))
    except KeyboardInterrupt:
        if exits.are_several():
            raise
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    finally:
        gc.freeze()  # else the end of Python visits all objects of torch


@contextmanager
def imports() -> Iterator[None]:
    """The context of the first import of torch: no garbage collection visits its objects, which
    stay, now or later."""
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def _report_once(error: Exception) -> None:
    """Report an error that all processes have, in the first of them, before the others end: a
    launcher ends all processes when one has failed."""
    if exits.speaks_of(error):
        exits.report(error)
    elif exits.are_several():
        time.sleep(0.3)


def _type_name(kind: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        int | str: "a whole number or a string",
        float | int | str: "a number or a string",
        bool | str: "true, false or a string",
        list[int]: "a list of whole numbers",
        list[str]: "a list of strings",
    }
    if type(None) in get_args(kind):
        other = [part for part in get_args(kind) if part is not type(None)]
        return f"{_type_name(reduce(or_, other))}, or null"
    if kind in names:
        return names[kind]
    return "a list" if str(kind).startswith("list") else "a mapping {name: value, ...}"
