"""Functions of the user, by name: package.module:callable. Their import, arguments and errors.

A wrong name and an error in the module are a ValueError with one sentence. An error in the
user's functions keeps its traceback.
"""

import difflib
import functools
import importlib
import inspect
import os
import random
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch

from powergossip.checks import BadValue
from powergossip.errors import BadInput

_MOST_NAMES = 5  # in an error
# Folders whose files are not the user's.
_OTHERS = {
    Path(__file__).parent,
    *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
}


class UserCodeError(RuntimeError):
    """A ValueError or OSError in the user's code, or any error of it in another process.

    The text or the cause has the traceback. Without this type, the two would count as bad input,
    which is reported without a traceback.
    """


@contextmanager
def users_code(place: str) -> Iterator[None]:
    """Run code of the user. Its exceptions keep their traceback and name the place.

    BadInput passes unchanged: a sentence that the user's code raises for a bad option.
    """
    try:
        yield
    except BadInput:
        raise
    except (ValueError, OSError) as error:
        raise UserCodeError(f"{place}: {type(error).__name__}: {error}") from error
    except Exception as error:
        error.add_note(f"in {place}")
        raise


def where(error: BaseException) -> str:
    """FILE, line N of the user's code at which an error was raised, or ""."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    for file, line in reversed(frames):
        if not file.startswith("<") and not _OTHERS & {*Path(file).parents}:
            return f"{file.removeprefix(os.getcwd() + os.sep)}, line {line}"
    return ""


@contextmanager
def one_sentence(place: str) -> Iterator[None]:
    """Run code of the user. Its exceptions become a ValueError that names the line.

    BadInput and BadValue stay, and so do exceptions outside of the user's code.
    """
    try:
        yield
    except (BadInput, BadValue):
        raise
    except Exception as error:
        line = where(error)
        if not line:
            raise
        told = error.msg if isinstance(error, SyntaxError) else str(error)
        text = told.partition("\n")[0]
        raise ValueError(f"{place} fails in {line}: {type(error).__name__}: {text}") from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU), and restore them afterwards.

    Args:
        seed: Seed below 2⁶³ of the CPU's generators. torch.manual_seed would also seed the GPU's.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def is_name(value: str | None) -> bool:
    """True if this is meant as package.module:callable."""
    return value is not None and ":" in value


@dataclass(frozen=True)
class Named:
    """A function or class of the user.

    Attributes:
        label: Name in errors, such as task=package.module:callable.
        name: package.module:callable.
        function: The function or class.
    """

    label: str
    name: str
    function: Callable[..., Any]

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that can be given by name. Raises ValueError if they are not known."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.label} has no signature that Python can read; wrap it in a function"
            ) from error
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {name: p for name, p in signature.parameters.items() if p.kind in kinds}

    def __call__(self, options: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
        """Call the function with the options and offered values that its parameters name.

        An option takes precedence over an offered value. Raises ValueError for a parameter that has
        neither, nor a default.
        """
        values = {**offered, **options}
        arguments = {name: values[name] for name in self.parameters if name in values}
        for name, parameter in self.parameters.items():
            if parameter.default is parameter.empty and name not in arguments:
                raise ValueError(
                    f'{self.label}: its parameter "{name}" has no default; '
                    f"give task_options.{name}=VALUE"
                )
        with users_code(self.label):
            return self.function(**arguments)


def find(key: str, name: str) -> Named:
    """Import the callable that a key names. The current folder is searched too.

    Raises ValueError unless there is such a module with such a callable, and for an error of the
    module, with its line.
    """
    label = f"{key}={name}"
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        path = PurePath(module_name).with_suffix("")
        module_name = path.name if {"/", ".."} & {*path.parts} else ".".join(path.parts)
        raise ValueError(f"{label}: use package.module:callable, such as {module_name}:{attribute}")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ValueError(f"{label}: use package.module:callable")
    module = _imported(module_name, label)
    try:
        found = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        own = [
            n
            for n, v in vars(module).items()
            if not n.startswith("_") and callable(v) and getattr(v, "__module__", "") == module_name
        ]
        names = difflib.get_close_matches(attribute, own, n=3) or own[:_MOST_NAMES]
        hint = f"use {' or '.join(names)}" if names else "it has no functions or classes"
        raise ValueError(f"{label}: {module_name} has no {attribute}; {hint}") from None
    if not callable(found):
        raise ValueError(
            f"{label}: {attribute} is not callable ({type(found).__name__}); "
            "use a function or a class"
        )
    return Named(label, name, found)


def _imported(name: str, label: str) -> ModuleType:
    """The module of this name, from the current folder or sys.path."""
    folder = os.getcwd()
    if not {folder, ""} & {*sys.path}:
        sys.path.insert(0, folder)  # as for `python -m`
    importlib.invalidate_caches()  # a file may have been written a moment ago
    try:
        with one_sentence(label):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # an import in the user's module
        raise ValueError(
            f"{label}: there is no module {error.name} in {folder} and on Python's path; "
            "start in its folder, or add that to PYTHONPATH"
        ) from None
