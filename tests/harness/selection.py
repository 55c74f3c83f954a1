"""The test files that a run needs, found in their text: importing all of them takes long."""

import ast
import functools
import re
from collections.abc import Iterable

ALL = frozenset(range(1, 65))
STARTS_PROGRAMS = re.compile(
    r"^(?:import|from) .*\b(?:launch|slurm|subprocess|multiprocessing|harness\.asynchronous)\b"
)


def counts_of(nprocs: int | Iterable[int] = 3) -> set[int]:
    """The numbers of processes that `pytest.mark.parallel(nprocs)` stands for."""
    return {nprocs} if isinstance(nprocs, int) else set(nprocs)


@functools.cache
def process_counts(text: str) -> frozenset[int]:
    """The numbers of processes in the `parallel` marks of a file."""
    if "parallel" not in text:
        return frozenset()
    called: dict[ast.expr, ast.Call] = {}
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):  # a call comes before what it calls
        if isinstance(node, ast.Call):
            called[node.func] = node
        elif isinstance(node, ast.Attribute) and node.attr == "parallel":
            call = called.get(node)
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)] if call else []
            try:
                found |= counts_of(*map(ast.literal_eval, arguments))
            except ValueError:  # computed: it can be any
                found |= ALL
    return frozenset(found)


def starts_programs(text: str) -> bool:
    """Whether the tests of a file start other programs, by its imports."""
    return any(map(STARTS_PROGRAMS.match, text.splitlines()))
