"""The wheel, and its programs in an environment that has nothing of this checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import powergossip
from tests.harness import compared_runs, launch

PACKAGE = launch.ROOT / "powergossip"
TOP_LEVEL = {path.stem for path in launch.ROOT.glob("*.py")}


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


def test_the_wheel_has_the_package_and_all_modules_beside_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"powergossip", *(f"{module}.py" for module in TOP_LEVEL)}
    assert "powergossip/py.typed" in names
    inside = {
        file.relative_to(launch.ROOT).as_posix()
        for pattern in ("*.py", "*.js", "results/*.json", "kernels/*.[ch]", "presets/**/*.yaml")
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
    "powergossip-join": ("--help", "powergossip-join TICKET"),
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
def test_console_scripts_have_help_that_writes_nothing_and_run_from_an_empty_folder(
    name: str, installed: Path, tmp_path: Path
) -> None:
    assert name in run_installed(installed, name, tmp_path, "--help")
    assert list(tmp_path.iterdir()) == []
    arguments, words = SCRIPTS[name]
    if name == "powergossip-compare":
        compared_runs.write_run(tmp_path / "mine")
    assert words in run_installed(installed, name, tmp_path, *arguments.split())


SHOW = """
import importlib.metadata, importlib.util, sys
import powergossip
print(powergossip.__version__, importlib.metadata.version("powergossip"))
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
