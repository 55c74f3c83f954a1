"""The definition of a run, which the first machine of a ticket sends to the others as a text.

A definition comes from the network. A machine takes from it only keys of the run, with values that
are neither code nor files.
"""

import json
import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from omegaconf import DictConfig

from powergossip.errors import BadInput
from powergossip.runs import configuration
from powergossip.runs.configuration import OF_PROCESS
from powergossip.training.config import Config

# Keys of each machine: those of its process, its files and programs, and its launcher.
OWN = OF_PROCESS | {
    *("allow_lost_rows", "overwrite", "evaluate_only", "trackers", "tensorboard", "scenario"),
    *("distributed_backend", "distributed_init_file"),
}
_WORD = re.compile(r"[\w+-][\w.+-]*", re.ASCII)  # no path, function, or reference ${…}


def definition(asked: DictConfig) -> str:
    """The settings of a run that are not defaults, as JSON. Keys of each machine are left out."""
    default = configuration.plain(configuration.structured(Config))
    values = configuration.plain(asked)
    return json.dumps(
        {
            key: value
            for key, value in values.items()
            if key not in OWN and value != default.get(key)
        }
    )


def settings(text: str, allowed: Collection[str] = ()) -> dict[str, Any]:
    """The values by key of another machine's definition.

    Args:
        allowed: Values that may be code or files, which this machine's owner accepts.

    Raises:
        BadInput: For another text, a key of each machine, or a value that may be code or a file.
    """
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise BadInput("the definition of the run is not JSON; take part in no such run") from None
    known = configuration.structured(Config)
    for key, value in values.items():
        if not re.fullmatch(r"[a-z0-9_]{1,60}", key) or key in OWN:
            raise BadInput(
                f"the definition of the run has the key {key[:60]!r}, which is never accepted"
            )
        if key == "topology" and value not in allowed:
            _check_topology(value)
        for word in _words(value):
            if word not in allowed and (not _WORD.fullmatch(word) or os.path.exists(word)):
                raise BadInput(
                    f"the definition of the run has {key}={word[:200]!r}, which may be code or a "
                    "file of yours; allow it with --allow VALUE if you know it"
                )
        configuration.assign(known, key, value, "the definition of the run: ")
    return values


def shown(values: dict[str, Any]) -> str:
    """The lines of a definition, with no other characters than ASCII."""
    return "\n".join(f"  {key}: {json.dumps(value)}" for key, value in values.items())


def _check_topology(value: Any) -> None:
    from powergossip.topologies import TOPOLOGIES

    if value not in TOPOLOGIES:
        raise BadInput(
            f"the definition of the run has topology={value!r}, which may be a file; allow it with "
            "--allow VALUE if you know it"
        )


def _words(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from (*_words(key), *_words(entry))
    elif isinstance(value, list):
        for entry in value:
            yield from _words(entry)
