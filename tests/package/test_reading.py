"""Text and YAML of the user: every value as written, or a reason."""

import os
from pathlib import Path
from typing import Any

import pytest

from powergossip import reading
from powergossip.checks import BadValue
from powergossip.events import scenario
from powergossip.reading import Unreadable


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-3", -3),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1e-3", 1e-3),
        ("5e3", 5e3),
        ("-.5", -0.5),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        (".", "."),
        ("e3", "e3"),
        ("[1, 2.5, [null, true]]", [1, 2.5, [None, True]]),
        ("{a: &b [1], c: *b}", {"a": [1], "c": [1]}),
        ("", None),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = reading.value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["010", "1:30", "1e3", "5.", "0x1f", "on", ".inf", "1_0", "~"])
def test_strings_come_back(value: str) -> None:
    import yaml

    assert reading.value(yaml.dump([value], Dumper=reading.Dumper)) == [value]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (5000 * "[" + 5000 * "]", "levels"),
        ("9" * 5000, "digits"),
        ("!!int x", "x"),
        ("!!python/object:os.system {}", "line 1"),
    ],
    ids=["nested", "digits", "tag", "object"],
)
def test_values_that_are_rejected(text: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason) as found:
        reading.value(text)
    assert len(str(found.value)) < 200
    assert "\n" not in str(found.value)


def test_files_that_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    names = (str(tmp_path / "binary"), str(tmp_path), str(tmp_path / "none"))
    for name in (*names, "/dev/zero", "/dev/null", "a\0b"):
        with pytest.raises(Unreadable):
            reading.text(Path(name))
        with pytest.raises(BadValue):
            scenario.load(name)


def test_a_pipe_is_read() -> None:
    source, target = os.pipe()
    os.write(target, "seed: 1\n".encode("utf-8-sig"))
    os.close(target)
    assert reading.text(Path(f"/dev/fd/{source}")) == "seed: 1\n"
    os.close(source)


def test_a_key_of_a_scenario_is_given_once(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("jitter: 1e-3\n")
    assert scenario.load(file) == {"jitter": 1e-3}
    file.write_text("jitter: 0.1\nlatency: 1.0\njitter: 0.2\n")
    with pytest.raises(BadValue, match="line 3"):
        scenario.load(file)
