"""Text and YAML in files of the user."""

import re
import stat
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 2**30


class Unreadable(ValueError):
    """A file or text that cannot be read. The text is the reason alone."""


def text(path: Path) -> str:
    """The contents of a file or pipe in UTF-8. Raises Unreadable."""
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or stat.S_ISDIR(kind)):
            raise Unreadable("it is no file")
        if path.stat().st_size > MOST_BYTES:
            raise Unreadable(f"it has more than {MOST_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise Unreadable("it is not text") from error
    except ValueError as error:  # a path with a null character
        raise Unreadable(str(error)) from error


def value(text: str) -> Any:
    """The value of a text in YAML. Raises Unreadable."""
    return document(text)[0]


def document(text: str) -> tuple[Any, dict[str, int]]:
    """The value of a text in YAML, and key → line (from 1) if it is a mapping.

    Raises Unreadable.
    """
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        found = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise Unreadable(where + (getattr(error, "problem", None) or str(error))) from error
    except RecursionError:
        raise Unreadable("too many levels of lists or mappings") from None
    except ValueError as error:  # a number of thousands of digits
        raise Unreadable(str(error)) from error
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return found, {str(key.value): key.start_mark.line + 1 for key, _ in pairs}


class Loader(yaml.SafeLoader):
    """YAML 1.2 where PyYAML differs: 1e-3 is a number, 010 is ten, on, 1:30 and 2024-01-01 are
    strings, and a duplicate key is an error (YAML 1.2, § 3.2.1.3)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 as PyYAML declares it
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("bool", "float", "int", "timestamp")
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
                    f'key "{key.value}" is also in line {lines[name] + 1}; keep one',
                    key.start_mark,
                )
            lines[name] = line
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?\d+|0o[0-7]+|0x[\da-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$", re.ASCII), list(_first)
    )
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)


class Dumper(yaml.SafeDumper):
    """Quotes strings that Loader would read as another type."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
