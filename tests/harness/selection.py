"""The test files that a run needs, found in their text: importing all of them takes long."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

ROOT = Path(__file__).parents[2]

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


def imported(file: Path) -> set[str]:
    """The modules that a file imports, anywhere in it; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


# --- The files that a change reaches --------------------------------------------------------------


def name_of(file: Path) -> str:
    """powergossip/network/mpi.py → powergossip.network.mpi; a package: its folder's name"""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        text=True,
    )
    files = [ROOT / line for line in listed.splitlines() if (ROOT / line).exists()]
    return {name_of(file): file for file in files}


@functools.cache
def needed(name: str) -> frozenset[str]:
    """The modules that one imports or, in a test that starts programs, names; and their packages.

    powergossip itself imports names on first use: it is needed for those only.
    """
    file = modules()[name]
    text = file.read_text()
    found = imported(file)
    own = {module for module in found if module in modules()}
    if "powergossip" in own:
        objects = {m for m in found if m.startswith("powergossip.") and m not in modules()}
        own -= set() if any(m.count(".") == 1 for m in objects) else {"powergossip"}
    if file.name.startswith("test_") and starts_programs(text):
        own |= {
            "train",
            "gossip_run",
            *re.findall(r"powergossip(?:\.\w+)+", text),
        } & modules().keys()
    packages = {".".join(module.split(".")[:n]) for module in own for n in range(2, 5)}
    return frozenset((own | packages) & modules().keys())


@functools.cache
def changed(since: str) -> frozenset[str]:
    """The modules that differ from a commit. A file of another kind is a part of its package."""
    listed = subprocess.check_output(["git", "diff", "--name-only", since], cwd=ROOT, text=True)
    new = ["git", "ls-files", "--others", "--exclude-standard"]
    listed += subprocess.check_output(new, cwd=ROOT, text=True)
    found: set[str] = set()
    for file in (ROOT / line for line in listed.splitlines()):
        homes = [file] if file.suffix == ".py" else [f / "__init__.py" for f in file.parents]
        below = [name_of(home) for home in homes if home.is_relative_to(ROOT)]
        found |= set([name for name in below if name in modules()][:1])
    return frozenset(found)


def is_reached(file: Path, changes: AbstractSet[str]) -> bool:
    """True if a file imports one of these modules, directly or not, or tests.conftest is one."""
    seen: set[str] = set()
    todo = [name_of(file)]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += needed(name)
    return not (seen | {"tests.conftest"}).isdisjoint(changes)
