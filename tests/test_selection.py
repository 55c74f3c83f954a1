"""The selection of test files forgets no test."""

import re
from pathlib import Path

import pytest

from tests.harness import selection

FILES = sorted(Path(__file__).parent.rglob("test_*.py"))


def test_every_number_of_processes_has_a_pass_of_make_test_all() -> None:
    """tests/conftest.py checks in each run that `process_counts` holds every mark it meets."""
    wanted = set().union(*(selection.process_counts(file.read_text()) for file in FILES))
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    passes = re.findall(r"^(?:test-all: )?PROCESSES [?+]= (.*)$", makefile, re.MULTILINE)
    assert wanted - {1} == {int(number) for line in passes for number in line.split()}


def test_files_that_start_programs_are_known_by_their_imports() -> None:
    found = {file.name for file in FILES if selection.starts_programs(file.read_text())}
    assert {
        "test_launchers.py",
        "test_failures.py",
        "test_checkpoints.py",
        "test_wall_clock.py",
    } <= found
    assert not {"test_algorithms.py", "test_compressors.py", "test_topologies.py"} & found


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "reached", "others"),
    [
        ("powergossip.compare.output", ["compare/test_compare_files"], ["network/test_network"]),
        # by a program that the test starts
        (
            "powergossip.training.trainer",
            ["training/test_failures"],
            ["topologies/test_topologies"],
        ),
        ("powergossip.mpi_check", ["environment/test_environment"], ["algorithms/test_algorithms"]),
        ("tests.harness.quadratics", ["algorithms/test_outer"], ["algorithms/test_algorithms"]),
        ("powergossip.topologies", ["topologies/test_topologies", "algorithms/test_dgc"], []),
        ("tests.conftest", ["topologies/test_topologies"], []),
    ],
)
def test_a_change_reaches_the_files_that_import_it(
    change: str, reached: list[str], others: list[str]
) -> None:
    tests = Path(__file__).parent
    assert change in selection.modules()
    assert all(selection.is_reached(tests / f"{name}.py", {change}) for name in reached)
    assert not any(selection.is_reached(tests / f"{name}.py", {change}) for name in others)
