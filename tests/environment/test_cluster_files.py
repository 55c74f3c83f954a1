"""The files in environment/ for other machines: gpu_cluster.sh with its text, and images.

Neither GPUs nor Docker are needed: stand-ins take the place of compilers and archives. Files and
programs that the images name are compared with those of the repository.
"""

import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.harness.helpers import executable
from tests.harness.launch import ROOT

ENVIRONMENT = ROOT / "environment"
SCRIPT = ENVIRONMENT / "gpu_cluster.sh"


def bash(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with further environment variables; a variable that is "" is unset."""
    merged = {**os.environ, "CUDA_HOME": "", "GDRCOPY": "no", "VERBS": "no", **variables}
    return subprocess.run(
        ["/bin/bash", script, *arguments],
        env={name: value for name, value in merged.items() if value != ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def versions() -> dict[str, str]:
    """The versions that gpu_cluster.sh pins."""
    return dict(re.findall(r"^([A-Z0-9_]+)=([0-9a-f.]+)$", SCRIPT.read_text(), flags=re.MULTILINE))


# --- gpu_cluster.sh -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        ([], {}, "PREFIX"),
        (["/a", "/b"], {}, "/a and /b"),
        (["mpi"], {}, "PREFIX=mpi"),
        (["/my mpi"], {}, "PREFIX=/my mpi"),
        (["--dry", "/mpi"], {}, "--dry"),
        (["/mpi"], {"JOBS": "0"}, "JOBS=0"),
        (["/mpi"], {"CUDA_HOME": "/nowhere"}, "cuda.h in /nowhere/include"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], variables: dict[str, str], sentence: str
) -> None:
    ended = bash(SCRIPT, *arguments, **variables)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("gpu_cluster: error: ")
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_all_missing_tools_are_named_at_once(tmp_path: Path) -> None:
    for tool in ("dirname", "nproc", "readlink"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    ended = bash(SCRIPT, str(tmp_path / "mpi"), PATH=str(tmp_path))
    assert ended.returncode == 2
    for tool in ("cc", "c++", "make", "tar", "curl or wget", "nvcc (or CUDA_HOME)"):
        assert f" {tool}" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "mpi").exists()


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A folder that looks like a CUDA toolkit."""
    folder = tmp_path / "cuda"
    for file in ("include/cuda.h", "lib64/stubs/libcuda.so"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
    return folder


def test_a_dry_run_shows_the_commands_and_does_nothing(tmp_path: Path, cuda: Path) -> None:
    prefix = tmp_path / "mpi"
    ended = bash(SCRIPT, "--dry-run", str(prefix), CUDA_HOME=str(cuda), VERBS="/usr/verbs")
    assert ended.returncode == 0, ended.stderr
    assert not prefix.exists()
    for name, value in versions().items():
        assert value in ended.stdout, name
    commands = [shlex.split(line) for line in ended.stdout.splitlines() if not line.startswith("#")]
    configure = [words for words in commands if "configure" in words[0]]
    assert [words[0] for words in configure] == ["./contrib/configure-release", "./configure"]
    for words in configure:
        assert {f"--prefix={prefix}", f"--with-cuda={cuda}"} <= set(words)
    assert {"--with-verbs=/usr/verbs", "--without-gdrcopy", "--enable-mt"} <= set(configure[0])
    assert {f"--with-ucx={prefix}", "--with-slurm"} <= set(configure[1])
    assert f"--with-cuda-libdir={cuda}/lib64/stubs" in configure[1]
    (pip,) = [words for words in commands if "pip" in words]
    assert "--no-binary" in pip
    assert pip[-1] == "mpi4py"


def test_a_dry_run_needs_nothing_and_names_the_missing_tools(tmp_path: Path) -> None:
    ended = bash(SCRIPT, "--dry-run", str(tmp_path / "mpi"), CUDA_HOME="/nowhere")
    assert ended.returncode == 0, ended.stderr
    first, *others = ended.stdout.splitlines()
    assert first.startswith("# not here, and needed: ")
    assert "cuda.h in /nowhere/include" in first
    assert any("--with-cuda=/nowhere" in line for line in others)


def test_a_given_header_must_exist(tmp_path: Path, cuda: Path) -> None:
    tools = stand_ins(tmp_path)
    ended = bash(SCRIPT, str(tmp_path / "mpi"), CUDA_HOME=str(cuda), GDRCOPY="/nowhere", PATH=tools)
    assert ended.returncode == 2
    assert "there is no /nowhere/include/gdrapi.h" in ended.stderr


def stand_ins(folder: Path) -> str:
    """A PATH on which every tool is there: compilers do nothing, curl copies from an archive."""
    bin_folder = folder / "bin"
    for tool in ("cc", "c++", "perl", "pkg-config", "bzip2"):
        executable(bin_folder / tool, "exit 0")
    # its last arguments are the file to be made and the address
    executable(bin_folder / "curl", f'cp "{folder}/archives/${{@: -1}}" "${{@: -2:1}}"')
    return f"{bin_folder}:{os.environ['PATH']}"


CONFIGURE = """#!/bin/bash
pwd >>"$LOG"
for word in "$@"; do case "$word" in --prefix=*) prefix=${word#*=} ;; esac; done
mkdir -p "$prefix/bin"
for tool in TOOLS; do
    printf '#!/bin/bash\\necho "%s" "$@" >>"$LOG"; cat "$ANSWERS"\\n' "$tool" >"$prefix/bin/$tool"
    chmod +x "$prefix/bin/$tool"
done
"""
ANSWERS = """configured with: --with-cuda=CUDA
Transport: cuda_copy
mca:mpi:base:param:mpi_built_with_cuda_support:value:true
MCA pml: ucx
13.0
CUDA-aware: yes
"""


@pytest.fixture
def checkout(tmp_path: Path, cuda: Path) -> Path:
    """A repository with gpu_cluster.sh and stand-ins: archives whose configure makes programs that
    answer every question, and a setup.sh and a Python that log what they are asked."""
    folder = tmp_path / "checkout"
    text = SCRIPT.read_text()
    for key, folder_in_it, configure, tools in (
        ("UCX", f"ucx-{versions()['UCX_VERSION']}", "contrib/configure-release", "ucx_info"),
        (
            "OPENMPI",
            f"openmpi-{versions()['OPENMPI_VERSION']}",
            "configure",
            "ompi_info mpirun mpicc",
        ),
    ):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, content in (
                (configure, CONFIGURE.replace("TOOLS", tools)),
                ("Makefile", 'all install:\n\t@echo "make $@" >>"$(LOG)"\n'),
            ):
                entry = tarfile.TarInfo(f"{folder_in_it}/{name}")
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content.encode()))
        address = re.search(rf"^{key}_URL=(.*)$", text, flags=re.MULTILINE)
        assert address
        file = tmp_path / "archives" / f"{key}.tar"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(packed.getvalue())
        text = text.replace(address[1], f"{key}.tar")
        checksum = hashlib.sha256(packed.getvalue()).hexdigest()
        text = text.replace(versions()[f"{key}_SHA256"], checksum)
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "gpu_cluster.sh").write_text(text)
    executable(folder / "environment" / "setup.sh", 'echo "setup $MPI $(which mpirun)" >>"$LOG"')
    executable(folder / ".venv" / "bin" / "python", 'echo "python $*" >>"$LOG"; cat "$ANSWERS"')
    (folder / ".venv" / "bin" / "activate").touch()
    (tmp_path / "answers").write_text(ANSWERS.replace("CUDA", str(cuda), 1))
    return folder


def build(checkout: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the checkout's script. Returns the log of its stand-ins too."""
    base = checkout.parent
    log = base / "log"
    log.write_text("")
    ended = bash(
        checkout / "environment" / "gpu_cluster.sh",
        str(base / "mpi"),
        CUDA_HOME=str(base / "cuda"),
        PATH=stand_ins(base),
        LOG=str(log),
        ANSWERS=str(base / "answers"),
    )
    return ended, log.read_text().splitlines()


def test_the_steps_come_in_order_and_once(checkout: Path) -> None:
    prefix = checkout.parent / "mpi"
    ended, log = build(checkout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    sources = [f"{prefix}/src/{name}-{versions()[f'{name.upper()}_VERSION']}" for name in NAMES]
    assert log[:7] == [
        *(sources[0], "make all", "make install", sources[1], "make all", "make install"),
        f"setup machine {prefix}/bin/mpirun",
    ]
    assert log[7].startswith("python -m pip install -c environment/constraints.txt")
    assert [line.split()[0] for line in log[8:]] == [
        *("ucx_info", "ucx_info", "ompi_info", "ompi_info", "python", "mpirun")
    ]
    assert "done. Before each use: export PATH=" in ended.stdout

    ended, log = build(checkout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert log[0] == f"setup machine {prefix}/bin/mpirun"


NAMES = ["ucx", "openmpi"]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("configured with", "UCX was built without CUDA"),
        ("Transport", "UCX finds no GPU here"),
        ("mca:mpi:base", "Open MPI was built without CUDA"),
        ("MCA pml", "Open MPI was built without UCX"),
        ("CUDA-aware", "Open MPI says that it is not CUDA-aware"),
    ],
)
def test_a_check_that_fails_is_one_sentence(checkout: Path, answer: str, sentence: str) -> None:
    file = checkout.parent / "answers"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if not line.startswith(answer)))
    ended, _ = build(checkout)
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_archive_with_another_checksum_is_not_unpacked(checkout: Path) -> None:
    with (checkout.parent / "archives" / "UCX.tar").open("ab") as file:
        file.write(b"something else")
    ended, log = build(checkout)
    assert ended.returncode == 1
    assert "checksum" in ended.stderr
    assert log == []


def test_a_failing_step_ends_the_script_with_its_last_line(checkout: Path) -> None:
    executable(checkout.parent / "bin" / "make", "echo the compiler is gone >&2; exit 1")
    ended, log = build(checkout)
    assert ended.returncode == 1
    assert "the compiler is gone" in ended.stderr
    assert "the last command failed" in ended.stderr
    assert len(log) == 1


def test_open_mpi_is_that_of_the_constraints() -> None:
    pinned = re.search(
        r"^openmpi==(.*)$", (ENVIRONMENT / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    assert pinned
    assert versions()["OPENMPI_VERSION"] == pinned[1]


@pytest.mark.parametrize(
    "name",
    ["gpu_cluster.md", "gpu_cluster.sh", "Dockerfile", "apptainer.def", "slurm/train.sbatch"],
)
def test_named_files_exist(name: str) -> None:
    named = re.findall(r"\benvironment/[\w./]*\w", (ENVIRONMENT / name).read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


# --- Images ---------------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: name and the rest."""
    text = (ENVIRONMENT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def definition() -> dict[str, list[str]]:
    """apptainer.def's sections: lines without comments; "" is the header."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in (ENVIRONMENT / "apptainer.def").read_text().splitlines():
        if line.startswith("%"):
            name = line[1:]
            sections[name] = []
        elif line.strip() and not line.strip().startswith("#"):
            sections[name].append(line.strip())
    return sections


def copied_by_docker() -> dict[str, str]:
    """Source → place under /project."""
    copied = {}
    for name, rest in dockerfile():
        if name == "COPY":
            *sources, target = [word for word in rest.split() if not word.startswith("--")]
            for source in sources:
                copied[source] = target.removeprefix("./").rstrip("/") or source
    return copied


def copied_by_apptainer() -> dict[str, str]:
    """Source → place under /project; a folder goes into the one that is named, as with cp -r."""
    pairs = [line.split() for line in definition()["files"]]
    assert all(target == "/project/" for _, target in pairs)
    return {source: source for source, _ in pairs}


COPIES = {"docker": copied_by_docker, "apptainer": copied_by_apptainer}


@pytest.mark.parametrize("image", COPIES)
def test_an_image_copies_all_needed_files(image: str, tmp_path: Path) -> None:
    for source, target in COPIES[image]().items():
        files = list(ROOT.glob(source))
        assert files, source
        for file in files:
            if file.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(file, tmp_path / target, ignore=ignored)
            else:
                shutil.copy(file, tmp_path / file.name)
    settings = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    for module in settings["tool"]["setuptools"]["py-modules"]:
        assert (tmp_path / f"{module}.py").exists()
    for pattern in settings["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert (tmp_path / pattern.partition(".")[0] / "__init__.py").exists()
    for file in settings["project"]["license-files"]:
        assert (tmp_path / file).exists()
    # setup.sh finds what it reads, and gets as far as judging an interpreter, which is unfit here.
    python = executable(tmp_path / "old" / "python", "echo 3.8")
    ended = bash(tmp_path / "environment" / "setup.sh", PYTHON=str(python), MPI="package")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"setup: error: PYTHON={python}: ")


def test_both_images_copy_the_same() -> None:
    assert copied_by_docker() == copied_by_apptainer()


def installations() -> list[str]:
    """The command that installs, of each image."""
    runs = [rest for name, rest in dockerfile() if name == "RUN"]
    return [command for command in [*runs, *definition()["post"]] if "setup.sh" in command]


def test_images_install_with_a_choice_that_setup_sh_offers() -> None:
    offered = re.search(
        r"^case \"\$\{MPI:-\}\" in\n(.*)\) ;;$",
        (ENVIRONMENT / "setup.sh").read_text(),
        flags=re.MULTILINE,
    )
    assert offered
    assert len(installations()) == 2
    for command in installations():
        *settings, shell, script = command.split()
        assert (shell, script) == ("bash", "environment/setup.sh")
        choices = dict(word.split("=") for word in settings)
        assert choices["MPI"] in offered[1].split(" | ")
        assert set(choices) <= {"MPI", "PIP_NO_CACHE_DIR"}


def test_images_have_a_new_enough_python() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    least = tuple(map(int, required.removeprefix(">=").split(".")))
    docker = next(rest for name, rest in dockerfile() if name == "FROM")
    header = dict(line.split(": ") for line in definition()[""])
    assert header == {"Bootstrap": "docker", "From": docker}
    version = re.match(r"python:(\d+)\.(\d+)-", docker)
    assert version
    assert (int(version[1]), int(version[2])) >= least


def test_programs_that_images_start_exist() -> None:
    """Those in the usage on top, too."""
    text = "".join((ENVIRONMENT / name).read_text() for name in ("Dockerfile", "apptainer.def"))
    programs = re.findall(r'(?:python |python", ")(?:/project/)?([\w./]+\.py)', text)
    modules = re.findall(r'python(?:", "| )-m(?:", "| )([\w.]+)', text)
    assert set(programs) == {"train.py"}
    assert set(modules) == {"powergossip.mpi_check"}
    for program in [*programs, *(f"{module.replace('.', '/')}.py" for module in modules)]:
        assert (ROOT / program).exists()


def test_docker_runs_as_another_user_than_root() -> None:
    users = [rest for name, rest in dockerfile() if name == "USER"]
    assert users == ["worker"]
    names = [name for name, _ in dockerfile()]
    assert names.index("USER") < names.index("COPY")
