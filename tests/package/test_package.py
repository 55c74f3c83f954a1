"""The package: what it installs, what it imports, and where it can be used."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement

import algorithms
import compressors
import gossip_run
import powergossip
import powergossip.algorithms
import powergossip.algorithms.aggregation
import powergossip.compressors
import powergossip.topologies
import topologies
import train
from powergossip import presets
from powergossip.runs import configuration
from tests.harness import compared_runs, launch
from tests.harness.selection import imported

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
    "options",
    "parameters",
    "presets",
    "command_line",
    "randomness",
    "reading",
    "sharded_layout",
    "shards",
    "tensor_cache",
    "trees",
    "ulfm",
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
    "consensus": RUNS | {"events", "runs"},
    "prediction": RUNS | {"runs", "tasks"},
    "runner": BASE | {"runs", "tasks", "training"},
    "benchmark": RUNS | {"compare", "prediction", "runner", "runs", "tasks", "training"},
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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("self._x + cls._y + x.__dict__", set()),
        ("run._x", {"_x"}),
        ("from powergossip.network import _x", {"_x"}),
        ("monkeypatch.setattr(network, '_x', 1)", {"_x"}),
        ("monkeypatch.setattr('powergossip.network._x', 1)", {"powergossip.network._x"}),
        ("vars(rule)['_x']", {"_x"}),
        ("getattr(rule, '_x')", {"_x"}),
    ],
)
def test_private_names_are_found(text: str, names: set[str]) -> None:
    assert private_names(ast.parse(text)) == names


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
        driven = {"train"} if name == "benchmark/program.py" else set()
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
def test_a_catalogue_has_the_same_objects_as_its_package(
    catalogue: Any, package: Any, registries: list[str]
) -> None:
    for name in [*getattr(package, "__all__", ()), *registries]:
        assert getattr(catalogue, name) is getattr(package, name), name


@pytest.mark.parametrize(
    ("catalogue", "registries"),
    [
        (algorithms, ["AVERAGING", "CONSENSUS_ONLY", "AGGREGATIONS"]),
        (compressors, ["COMPRESSORS"]),
        (topologies, ["TOPOLOGIES"]),
    ],
)
def test_a_catalogue_lists_every_row(catalogue: Any, registries: list[str]) -> None:
    words = str(catalogue.__doc__).split()
    for registry in registries:
        assert [name for name in getattr(catalogue, registry) if name not in words] == []


# --- A folder with modules of the user's own ------------------------------------------------------

OWN = ("runs/", "tasks/", "network/", "experiments/", "metrics.py", "errors.py", "parameters.py")
DRIVER = """
import errors, experiments, metrics, network, parameters, runs, tasks
import train
import gossip_run

for module in (errors, experiments, metrics, network, parameters, runs, tasks):
    assert module.MINE, "the user's own"

train.config["task_architecture"] = "MLP"
train.config["n_workers"] = 2
train.config["num_epochs"] = 1
train.config["max_steps_per_epoch"] = 2
train.output_dir = "trained"
train.main()
gossip_run.config["n_workers"] = 4
gossip_run.config["matrix_size"] = 10
gossip_run.config["num_steps"] = 5
gossip_run.output_dir = "gossiped"
gossip_run.main()
"""


def test_a_driver_works_in_a_folder_with_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in OWN:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
            name += "__init__.py"
        (tmp_path / name).write_text("MINE = True\n")
    (tmp_path / "driver.py").write_text(DRIVER)
    ended = launch.python("driver.py", cwd=tmp_path, fresh=True)
    assert ended.returncode == 0, ended.stderr
    assert "After 1 epoch" in ended.stdout
    assert "final error" in ended.stdout
    for folder in ("trained", "gossiped"):
        assert (tmp_path / folder / "metrics.jsonl").stat().st_size > 0


# --- The wheel ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because building writes into the sources."""
    # Not imported: setuptools fails if another test has imported distutils.
    found = [d.version for d in distributions(name="setuptools")]
    if not found or int(found[0].partition(".")[0]) < 77:
        pytest.skip("building a wheel needs setuptools 77 or newer")
    folder: Path = tmp_path_factory.mktemp("wheel")
    left_out = (".*", "__pycache__", "build", "data", "output", "*.egg-info", "docs")
    shutil.copytree(launch.ROOT, folder / "source", ignore=shutil.ignore_patterns(*left_out))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "built"]
    built = launch.python("-m", "pip", "wheel", "./source", *options, cwd=folder)
    assert built.returncode == 0, built.stderr
    (file,) = (folder / "built").glob("*.whl")
    return file


def test_the_wheel_has_the_package_and_five_modules(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"powergossip", *(f"{module}.py" for module in TOP_LEVEL)}
    assert "powergossip/py.typed" in names
    inside = {
        file.relative_to(launch.ROOT).as_posix()
        for pattern in ("*.py", "*.js", "submissions/*.json", "kernels/*.[ch]", "presets/**/*.yaml")
        for file in PACKAGE.rglob(pattern)
    }
    assert {name for name in names if name.startswith("powergossip/")} == {
        "powergossip/py.typed",
        *inside,
    }


def requirements(found: Distribution, extras: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Names of the distributions that one requires here, each with its extras."""
    for text in found.requires or []:
        needed = Requirement(text)
        marker = needed.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield needed.name, *needed.extras


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A virtual environment with the wheel and links to the distributions that it requires.

    Only to those that its metadata name, directly or not: an undeclared one is missing, and nothing
    leads to this checkout. To install them would take minutes and gigabytes.
    """
    folder = wheel.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = ["-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    options = ["--no-deps", "--no-index", str(wheel)]
    done = launch.python(*pip, *options, variables={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("*.dist-info")
    wanted, known = [*requirements(Distribution.at(metadata))], set[tuple[str, ...]]()
    while wanted:
        name, *extras = entry = wanted.pop()
        if entry in known:
            continue
        known.add(entry)
        found = distribution(name)
        wanted += requirements(found, extras)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(found.locate_file(top)))
    return folder


SCRIPTS = {  # with arguments for a small run, and a pattern of its output
    "powergossip-train": (
        "--config cifar10_resnet20/power-gossip task=Digits task_architecture=MLP n_workers=2 "
        "task_options={} batch_size=16 num_epochs=1 max_steps_per_epoch=2 --output-dir run",
        "After 1 epoch",
    ),
    "powergossip-consensus": (
        "--config consensus n_workers=4 matrix_size=10 num_steps=5 --output-dir run",
        "final error",
    ),
    "powergossip-benchmark": ("list", "fashion_mnist"),
    "powergossip-compare": ("m*", "final"),
    "powergossip-predict": (
        "--rate 1mbit --workers 4 --model 10x10 --no-measure",
        "Recommended",
    ),
    "powergossip-mpi-check": ("--quick", "MPI works: 1 process on 1 host"),
}
QUICK = "powergossip-compare"  # does not import torch


ENVIRONMENT = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
# The MPI library is no requirement: this environment's, or the machine's, which mpi4py finds.
for library in Path(sys.prefix, "lib").glob("libmpi.so.*"):
    ENVIRONMENT["MPI4PY_LIBMPI"] = str(library)


def run_installed(installed: Path, name: str, cwd: Path, *arguments: str, **variables: str) -> str:
    """The output of a program of the environment."""
    ended = subprocess.run(
        [installed / "bin" / name, *arguments],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_console_script_is_run_by_a_test() -> None:
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"].keys() == SCRIPTS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n not in ("powergossip-train", QUICK) else [])
        for n in SCRIPTS
    ],
)
def test_console_scripts_run_from_an_empty_folder(
    name: str, installed: Path, tmp_path: Path
) -> None:
    arguments, words = SCRIPTS[name]
    if name == "powergossip-compare":
        compared_runs.write_run(tmp_path / "mine")
    assert words in run_installed(installed, name, tmp_path, *arguments.split())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != QUICK else []) for n in SCRIPTS]
)
def test_console_scripts_have_help_that_writes_nothing(
    name: str, installed: Path, tmp_path: Path
) -> None:
    assert run_installed(installed, name, tmp_path, "--help").startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


SHOW = """
import importlib.metadata, importlib.util, sys
import powergossip
print(powergossip.__version__, importlib.metadata.version("decentralized-deep-learning"))
print("torch" in sys.modules)
print(*sys.path, *(importlib.util.find_spec(m).origin for m in sys.argv[1:]), sep="\\n")
"""


def test_an_installation_has_its_own_modules(installed: Path, tmp_path: Path) -> None:
    """Not those of this checkout, which this Python knows, and the version of both."""
    modules = ["powergossip", *sorted(TOP_LEVEL)]
    printed = run_installed(installed, "python", tmp_path, "-c", SHOW, *modules)
    versions, has_torch, *lines = printed.splitlines()
    assert versions == f"{powergossip.__version__} {powergossip.__version__}"
    assert has_torch == "False"
    assert str(launch.ROOT) not in lines
    files = lines[-len(modules) :]
    assert all(Path(file).is_relative_to(installed) for file in files)


needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
READ = """
import gossip_run, train
from omegaconf import OmegaConf
from powergossip import presets
from powergossip.benchmark import page, submissions
from powergossip.runs import configuration

for name in presets.names():
    program = gossip_run if name.startswith("consensus") else train
    configuration.read_command_line(OmegaConf.structured(program.Config), ["--config", name], "")
submissions.read_all([submissions.OF_LIBRARY])
print(len(presets.names()), len(page.SORT.read_text()))
"""


@pytest.mark.slow
def test_an_installation_has_presets_and_files_of_the_benchmark(
    installed: Path, tmp_path: Path
) -> None:
    counts = run_installed(installed, "python", tmp_path, "-c", READ).split()
    assert int(counts[0]) == len(presets.names())
    assert int(counts[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "kind"),
    [
        pytest.param("cc", "compiled", marks=needs_compiler),
        ("none", "torch"),
    ],
)
def test_an_installation_compiles_its_kernels_if_it_can(
    compiler: str, kind: str, installed: Path, tmp_path: Path
) -> None:
    arguments = (
        "n_workers=2 task_architecture=MLP num_epochs=1 max_steps_per_epoch=2 --output-dir r"
    )
    cache = str(tmp_path / "cache")
    variables = {"CC": compiler, "XDG_CACHE_HOME": cache}
    run_installed(installed, "powergossip-train", tmp_path, *arguments.split(), **variables)
    assert json.loads((tmp_path / "r" / "info.json").read_text())["kernels"] == kind
    assert len([*Path(cache).rglob("kernels-*.so")]) == (kind == "compiled")


@pytest.mark.slow
def test_sdist_and_wheel_have_no_faults(wheel: Path, tmp_path: Path) -> None:
    """The wheel is built from the sdist, as for a release."""
    for module in ("build", "twine", "check_wheel_contents"):
        pytest.importorskip(module)
    source = wheel.parents[1] / "source"
    for arguments in (
        ["build", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        ["twine", "check", "--strict"],
        ["check_wheel_contents", "--config", str(source / "pyproject.toml")],
    ):
        files = [] if arguments[0] == "build" else sorted(map(str, tmp_path.glob("*.*")))
        if arguments[0] == "check_wheel_contents":
            files = [file for file in files if file.endswith(".whl")]
        done = launch.python("-m", *arguments, *files, cwd=tmp_path, variables={"PYTHONPATH": ""})
        assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in tmp_path.glob("*.whl")} == {wheel.name}


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
    assert by_name.batch_size == 128
    assert by_name.optimizer == "power-gossip"
    changed = configured("--config", "cifar10_resnet20/power-gossip", "batch_size=32")
    assert changed.batch_size == 32


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
    ("script", "name", "close"),
    [
        ("train.py", "cifar10_resnet20/powr-gossip", "cifar10_resnet20/power-gossip"),
        ("gossip_run.py", "consensis", "consensus"),
    ],
)
def test_an_unknown_preset_suggests_close_ones(script: str, name: str, close: str) -> None:
    ended = launch.python(script, "--config", name)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert name in line
    assert close in line


def test_every_preset_is_found_by_its_name() -> None:
    assert "cifar10_resnet20/power-gossip" in presets.names()
    for name in presets.names():
        files = presets.files(name)
        assert files[-1] == presets.FOLDER / f"{name}.yaml"
        assert len(files) == 1 + name.count("/")
        config = OmegaConf.structured(
            gossip_run.Config if name.startswith("consensus") else train.Config
        )
        configuration.read_command_line(config, ["--config", name], "")


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
