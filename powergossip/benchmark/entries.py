"""Entries: a name, a file with code, and settings for each task.

A file of a user is a Python module, whose name is the entry's. It registers methods in the
registries, and has::

    SETTINGS  list of settings, mappings of keys of train.py and of optimizer_X for each option X of
              the method; or a mapping from the names of tasks and groups of tasks to such lists
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from powergossip.benchmark import library
from powergossip.benchmark.tasks import (
    FULL,
    GROUPS,
    TASKS,
    TRIES,
    BenchmarkTask,
    Values,
)
from powergossip.errors import BadInput
from powergossip.user_functions import where

DPSGD = "dpsgd"  # averaging without a learning rule
MODULE = "benchmark_entry"  # name of a user's file as a module
ALL = "all"  # in place of the name of a task, all tasks without their own list


@dataclass(frozen=True)
class Entry:
    """A method with its settings.

    Attributes:
        source: Text of the user's file. "" for an entry of the library.
        settings: Settings of each task that the method takes part in, in the order of their trials.
    """

    name: str
    source: str
    settings: Mapping[str, Sequence[Values]]

    @property
    def code(self) -> str:
        """A hash of the file."""
        hashed = hashlib.sha256(self.source.encode()).hexdigest()[:12]
        return f"sha256-{hashed}" if self.source else "library"


def find(text: str) -> Entry:
    """The entry of a library's method by its name, or of a file NAME.py.

    Raises:
        BadInput: If there is no such entry, or if its settings are not accepted.
    """
    path = Path(text)
    if text in library.ENTRIES:
        return _entry(text, "", library.ENTRIES[text])
    if path.suffix != ".py":
        raise BadInput(
            f'method "{text}" is unknown; give the path of a file, such as my_method.py, or one of '
            f"{', '.join(library.ENTRIES)}"
        )
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise BadInput(f"{path} cannot be read: {reason}") from error
    return from_source(content, path)


def from_source(source: str, path: Path) -> Entry:
    """The entry of a user's file with this text, which is executed. Raises BadInput."""
    module = ModuleType(MODULE)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # for dataclasses and pickle
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except SystemExit as error:
        raise BadInput(f"{path} ends the program; use a module without that") from error
    except Exception as error:
        raise BadInput(f"{where(error) or path}: {type(error).__name__}: {error}") from error
    settings = getattr(module, "SETTINGS", None)
    if not settings:
        raise BadInput(f"{path} has no SETTINGS; use a list of settings, or one for each task")
    if not re.fullmatch(r"[\w-]{1,60}", path.stem):
        raise BadInput(f'{path}: use 1 to 60 letters, digits, "-" and "_" as its name')
    if path.stem in library.ENTRIES:
        raise BadInput(f"{path} has the name of an entry of the library; use another one")
    return _entry(path.stem, source, settings)


def _entry(name: str, source: str, given: Any) -> Entry:
    """Distribute the settings over the tasks. Raises BadInput."""
    known = (*TASKS, *GROUPS, ALL)
    by_name = given if isinstance(given, Mapping) else {ALL: given}
    for key in by_name:
        if key not in known:
            raise BadInput(f'SETTINGS has "{key}"; use {", ".join(known)}')
    found = {}
    for task in TASKS.values():
        chosen = next((k for k in (task.name, task.group, ALL) if k in by_name), None)
        settings = _settings(task, by_name[chosen], chosen == ALL) if chosen else []
        if settings:
            found[task.name] = settings
    if not found:
        raise BadInput("SETTINGS has no setting of any task")
    return Entry(name, source, found)


def _settings(task: BenchmarkTask, given: Any, for_all: bool) -> list[Values]:
    """Check the settings of a task. From the settings of all tasks, consensus takes the keys it
    has."""
    ok = isinstance(given, Sequence) and all(
        isinstance(s, Mapping) and isinstance(s.get("optimizer"), str) for s in given
    )
    if not ok:
        raise BadInput(
            f"SETTINGS of {task.name}: {given!r}; use a list of mappings, each with the key "
            f'"optimizer"'
        )
    settings: list[Values] = []
    for setting in given:
        for key in setting:
            if not (task.accepts(key) or (for_all and task.is_consensus)):
                raise BadInput(
                    f"SETTINGS of {task.name}: the key {key} is unknown or belongs to the task; "
                    f"settings have the keys of the method, its graph and its local optimizer"
                )
        if for_all and task.is_consensus and setting.get("learning", DPSGD) != DPSGD:
            continue  # a learning rule
        kept = {k: v for k, v in setting.items() if task.accepts(k)}
        try:
            kept = json.loads(json.dumps(kept, allow_nan=False))
        except (TypeError, ValueError) as error:
            accepted = "texts, finite numbers, lists and mappings"
            raise BadInput(f"SETTINGS of {task.name}: {kept}: {error}; use {accepted}") from error
        if kept not in settings:
            settings.append(kept)
    if len(settings) > TRIES[FULL]:
        raise BadInput(
            f"SETTINGS of {task.name} has {len(settings)} settings; use {TRIES[FULL]} or fewer, "
            f"the same number for all entries"
        )
    return settings
