"""The package: what it imports, and where it can be used. What it installs: tests/environment/."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from omegaconf import DictConfig, OmegaConf

import algorithms
import compressors
import powergossip
import powergossip.algorithms
import powergossip.algorithms.aggregation
import powergossip.compressors
import powergossip.topologies
import topologies
import train
from powergossip import presets
from powergossip.runs import configuration
from tests.harness import launch, selection

imported = functools.cache(selection.imported)
PACKAGE = launch.ROOT / "powergossip"
TOP_LEVEL = {"algorithms", "compressors", "gossip_run", "topologies", "train"}


# --- Imports --------------------------------------------------------------------------------------

# Below each part of the package: the parts that it may import, besides itself.
BASE = {
    "atomic_files",
    "checks",
    "errors",
    "exits",
    "formatting",
    "launcher",
    "registry_options",
    "parameters",
    "presets",
    "command_line",
    "randomness",
    "reading",
    "sharded_layout",
    "replica_group",
    "tensor_cache",
    "state_trees",
    "ulfm",
    "user_functions",
}
NETWORK = BASE | {"kernels", "topologies"}
ALGORITHMS = NETWORK | {"compressors", "network"}
RUNS = ALGORITHMS | {"algorithms"}
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "compressors": BASE,
    "topologies": BASE,
    "tasks": BASE,
    "kernels": BASE,
    "network": NETWORK,
    "mpi_check": NETWORK | {"network"},
    "algorithms": ALGORITHMS,
    "optimizers": ALGORITHMS | {"algorithms"},
    "runs": RUNS,
    "events": RUNS,
    "training": RUNS | {"events", "runs", "tasks"},
    "compare": RUNS | {"runs"},
    "consensus": RUNS | {"runs"},
    "prediction": RUNS | {"runs", "tasks"},
    "runner": BASE | {"runs", "tasks", "training"},
    "benchmark": RUNS | {"consensus", "runner", "runs", "tasks", "training"},
    "join": RUNS | {"runs", "training"},
}
MODULES = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}


TESTS = {
    file.relative_to(launch.ROOT).as_posix(): file for file in (launch.ROOT / "tests").rglob("*.py")
}


def test_tests_import_from_the_harness_only() -> None:
    """Not from one another. The harness has no tests, and a line in its README for each module."""
    text = (launch.ROOT / "tests" / "harness" / "README.md").read_text()
    for name, file in TESTS.items():
        own = {module for module in imported(file) if module.split(".")[0] == "tests"}
        assert not [m for m in own if not f"{m}.".startswith("tests.harness.")], name
        if name.startswith("tests/harness/"):
            assert re.search(rf"\b{file.stem}\b", text), name
            assert "\ndef test_" not in file.read_text(), name


# Names that Python and pytest offer as private only.
PRIVATE = {
    "tests/conftest.py": {"_tw", "_file"},  # of pytest's reporter
    "tests/harness/fake_device.py": {"_fused_sgd_"},  # of torch
    "tests/harness/forks.py": {"_shutdown", "_run_exitfuncs", "_exit"},  # as Python ends
    "tests/kernels/test_kernels.py": {"_name"},  # of a library of ctypes
    "tests/runs/test_returning.py": {"_exit"},
}
BY_TEXT = {"setattr", "getattr", "delattr", "object"}  # monkeypatch's, patch.object


def is_private(name: str) -> bool:
    """Also in a dotted path: powergossip.network._x. __init__ and _ are not."""
    return any(re.fullmatch("_[A-Za-z].*", part) for part in name.split("."))


def private_names(tree: ast.Module) -> set[str]:
    """Private names of anything but `self` and `cls`, as attributes, imports and texts."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom():
                found |= {alias.name for alias in node.names}
            case ast.Call(func=ast.Name(called) | ast.Attribute(attr=called)) if called in BY_TEXT:
                found |= {str(a.value) for a in node.args[:2] if isinstance(a, ast.Constant)}
            case ast.Subscript(value=ast.Call(func=ast.Name("vars")), slice=ast.Constant(name)):
                found.add(str(name))
    return set(filter(is_private, found))


def test_tests_know_public_names_only() -> None:
    for name, file in TESTS.items():
        found = private_names(ast.parse(file.read_text()))
        assert found <= PRIVATE.get(name, set()), name


def part_of(module: str) -> str:
    """powergossip.network.mpi → network"""
    return module.split(".")[1]


def test_imports_point_one_way() -> None:
    known = {entry.stem if entry.suffix == ".py" else entry.name for entry in PACKAGE.iterdir()}
    for name, file in MODULES.items():
        modules = imported(file)
        driven = {"train"} if name in ("benchmark/entry_runs.py", "join.py") else set()
        outside = {module.partition(".")[0] for module in modules}
        assert outside & {*TOP_LEVEL, "experiments", "tests"} == driven, name
        part = name.partition("/")[0].removesuffix(".py")
        parts = {part_of(module) for module in modules if module.startswith("powergossip.")}
        if name != "__init__.py":
            assert (parts & known) - MAY_IMPORT[part] - {part} == set(), name


def test_no_modules_import_each_other() -> None:
    """No circles of imports inside any package, lazy imports and those for types included."""
    graph: nx.DiGraph = nx.DiGraph()
    modules = {
        f"powergossip.{name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}": file
        for name, file in MODULES.items()
    }
    for module, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{name.name}" for name in node.names]
                graph.add_edges_from((module, m if m in modules else node.module) for m in full)
    circles = [found for found in nx.strongly_connected_components(graph) if len(found) > 1]
    assert circles == []


def test_runs_know_no_transport() -> None:
    """How a process ends is the part of exits, not that of a run's files."""
    for name, file in MODULES.items():
        if name.startswith("runs/"):
            assert not any(".resilient" in m or ".torch" in m for m in imported(file))


def test_only_the_network_imports_mpi() -> None:
    """Except the check of an installation, which tests MPI itself."""
    for name, file in MODULES.items():
        if name.partition("/")[0] not in ("network", "mpi_check.py"):
            assert {module for module in imported(file) if module.startswith("mpi4py")} == set()


HEAVY = {
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "networkx",
    "scipy.linalg",
    "sklearn",
    "pandas",
    "matplotlib",
    "powergossip.events",
}
ONE_STEP = "num_epochs=1 max_steps_per_epoch=1 evaluate_workers=false log_verbosity=0"


@pytest.mark.parametrize(
    ("program", "used", "frozen"),
    [
        ("import train, gossip_run", set(), False),
        ("import train; train.main(['--help'])", set(), False),
        (
            "import sys, gossip_run; sys.argv[1:] = ['topolgy=ring']; gossip_run.command()",
            set(),
            True,
        ),
        ("import sys; sys.argv[1:] = ['-h']; import powergossip.compare.__main__", set(), True),
        ("import powergossip.optimizers", {"torch"}, False),
        # Until the end of the run, which draws a figure.
        (
            "import train; train.log_metric = lambda name, *row: name == 'accuracy' and exit(); "
            f"train.main({ONE_STEP.split()!r})",
            {"torch", "scipy.linalg"},  # of the summary of the graph
            True,
        ),
    ],
)
def test_a_program_imports_only_what_it_uses(
    program: str, used: set[str], frozen: bool, tmp_path: Path
) -> None:
    """A command line is read without torch; torch._dynamo takes as long to import as torch.

    No garbage collection visits the objects of torch during a run, and none at all at its end.
    """
    found = f"sorted({HEAVY} & {{*sys.modules}}), gc.get_freeze_count() > 0"
    at_end = f"import atexit, gc, sys; atexit.register(lambda: print({found}))"
    ended = launch.python("-c", f"{at_end}; {program}", cwd=tmp_path)
    assert ended.stdout.splitlines()[-1] == f"{sorted(used)} {frozen}", ended.stderr


@pytest.mark.parametrize(
    ("catalogue", "package", "registries"),
    [
        (algorithms, powergossip.algorithms, ["AVERAGING", "CONSENSUS_ONLY"]),
        (algorithms, powergossip.algorithms.aggregation, ["AGGREGATIONS"]),
        (compressors, powergossip.compressors, ["COMPRESSORS"]),
        (topologies, powergossip.topologies, ["TOPOLOGIES"]),
    ],
)
def test_a_catalogue_has_the_objects_of_its_package_and_lists_every_row(
    catalogue: Any, package: Any, registries: list[str]
) -> None:
    words = str(catalogue.__doc__).split()
    for name in [*getattr(package, "__all__", ()), *registries]:
        assert getattr(catalogue, name) is getattr(package, name), name
    for registry in registries:
        assert [name for name in getattr(catalogue, registry) if name not in words] == []


# --- Presets --------------------------------------------------------------------------------------


def configured(*arguments: str) -> DictConfig:
    config = OmegaConf.structured(train.Config)
    configuration.read_command_line(config, list(arguments), "")
    return config


BASE_FILE = str(presets.FOLDER / "cifar10_resnet20.yaml")
METHOD_FILE = str(presets.FOLDER / "cifar10_resnet20" / "power-gossip.yaml")


def test_a_preset_by_name_reads_its_base_and_its_method() -> None:
    by_name = configured("--config", "cifar10_resnet20/power-gossip")
    assert by_name == configured("--config", BASE_FILE, "--config", METHOD_FILE)
    assert by_name != configured("--config", METHOD_FILE)


def test_a_base_is_read_once_and_methods_can_be_stacked() -> None:
    """The second name must not reset what the first one has changed."""
    stacked = configured(
        *("--config", "cifar10_resnet20/dgc", "--config", "cifar10_resnet20/dgc-half-precision")
    )
    folder = presets.FOLDER / "cifar10_resnet20"
    files = [BASE_FILE, str(folder / "dgc.yaml"), str(folder / "dgc-half-precision.yaml")]
    assert stacked == configured(*(part for file in files for part in ("--config", file)))


def test_a_file_of_the_user_comes_before_a_preset_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("consensus").write_text("batch_size: 77\n")
    assert configured("--config", "consensus").batch_size == 77


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_soon_sleep(given: dict[str, str], expected: str) -> None:
    """Unless the environment says otherwise, and before torch is loaded."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    code = "import os, powergossip; print(os.environ.get('GOMP_SPINCOUNT'))"
    printed = subprocess.check_output(
        [sys.executable, "-c", code], env={**kept, **given}, text=True, cwd=launch.ROOT
    )
    assert printed.strip() == expected


def test_the_check_of_mpi_says_that_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise RuntimeError('cannot load it\\n')")
    done = subprocess.run(
        [sys.executable, "-m", "powergossip.mpi_check", "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"},
    )
    assert done.returncode == 2
    assert done.stderr == "error: this checks an MPI library, and found none: cannot load it\n"
