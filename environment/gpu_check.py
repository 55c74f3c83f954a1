"""A check and a benchmark of this project on a machine with an NVIDIA GPU:  make gpu-check

    python environment/gpu_check.py [--wheels FOLDER] [--device cuda|cpu] [--quick] [--report FILE]

It needs Python 3.11, PyTorch, numpy, scipy and networkx, and no network, MPI or `make setup`. It
runs from a checkout. Dependencies that are missing are installed from the wheels in a folder, if
one is given, to a temporary folder. Parts that need one which is still missing are left out.

    machine      GPUs, driver, versions
    correctness  random numbers, averaging rules and aggregations equal the CPU's; checkpoints
    runs         train.py: one epoch on the GPU, the next one on the CPU, and the reverse
    processes    gloo with messages staged through host memory; NCCL with a GPU for each process
    graphs       averaging steps as CUDA graphs
    steps        time of an averaging step, its lower bound, its kernels
    training     steps per second of ResNet-20 and a transformer, with batched gradients and without

The report is in Markdown. Each part runs in a process of its own: one that fails, hangs or crashes
is a section with a traceback. The exit code is 1 if a result is wrong or a part has failed, and 2
for a request that is impossible. --device cpu is a dry run that compares the CPU with itself.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from environment.gpu.findings import Findings, Setting

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)
REPORT = ROOT / "output" / "gpu_check.md"
# Modules of the dependencies in pyproject.toml, by the name of the package.
MODULES = {
    "matplotlib": "matplotlib",
    "mpi4py": "mpi4py",
    "networkx": "networkx",
    "numpy": "numpy",
    "omegaconf": "omegaconf",
    "pandas": "pandas",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "torch": "torch",
    "tqdm": "tqdm",
}
LIBRARY = ("networkx", "numpy", "scipy")  # needed by every part but the first one
TRAINING = (*LIBRARY, "matplotlib", "omegaconf", "pandas", "pillow", "tqdm")  # by train.py
LIMIT = 470.0  # seconds for all parts, so that there is a report within eight minutes


@dataclass(frozen=True)
class Part:
    """
    title    # of the section
    run      # the module that has the function `run`, or the function
    needs    # packages
    seconds  # after which it is ended
    """

    title: str
    run: "str | Callable[[Setting, Findings], None]"
    needs: Sequence[str]
    seconds: float


PARTS = {
    "correctness": Part("Correctness", "environment.gpu.correctness", LIBRARY, 150),
    "runs": Part("Checkpoints across devices", "environment.gpu.runs", TRAINING, 100),
    "processes": Part("Processes: gloo and NCCL", "environment.gpu.processes", LIBRARY, 150),
    "graphs": Part("CUDA graphs", "environment.gpu.graphs", LIBRARY, 90),
    "steps": Part("Steps of averaging", "environment.gpu.steps", LIBRARY, 150),
    "training": Part("Training", "environment.gpu.training", TRAINING, 120),
}


class BadRequest(Exception):
    """The text is one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, write the report, and return the exit code."""
    try:
        return check(parse(arguments))
    except BadRequest as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises BadRequest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels of missing dependencies")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--report", type=Path, default=REPORT, help=f"by default {REPORT}")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; by default all")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",") if options.parts else list(PARTS)
    for name in options.parts:
        if name not in PARTS:
            raise BadRequest(f"--parts {name}: use some of {','.join(PARTS)}")
    if options.wheels is not None and not options.wheels.is_dir():
        raise BadRequest(f"--wheels {options.wheels}: use a folder")
    return options


def check(options: argparse.Namespace) -> int:
    """Run the parts, and write the report. Returns the exit code."""
    if sys.version_info < PYTHON:
        raise BadRequest(
            f"Python {platform.python_version()} is too old; use {PYTHON[0]}.{PYTHON[1]}"
        )
    if not there("torch"):
        raise BadRequest(
            f"{sys.executable} has no torch; use the Python of an installation of PyTorch, such as "
            "make gpu-check PYTHON=/opt/venv/bin/python"
        )
    # Libraries of linear algebra have threads, which they stop before a fork.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
    report = options.report.absolute()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        folder = Path(place)
        notes = [] if options.wheels is None else install(options.wheels, folder / "site")
        lacking = [package for package in MODULES if not there(package)]
        if lacking:
            lost = [name for name in options.parts if {*PARTS[name].needs} & {*lacking}]
            notes.append(
                f"Missing: {', '.join(lacking)}"
                + (f"; left out: {', '.join(lost)}." if lost else "; no part needs them.")
            )
        for note in notes:
            print(note, flush=True)
        sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
        machine = facts(options.device, folder)
        if options.device == "cuda" and not machine.gpus:
            raise BadRequest("torch sees no GPU; --device cpu is a dry run without one")
        sections, failures = [], []
        for name in options.parts:
            part = PARTS[name]
            if {*part.needs} & {*lacking}:
                needed = [package for package in part.needs if package in lacking]
                sections.append(f"## {part.title}\n\nLeft out: needs {', '.join(needed)}.")
                continue
            left = LIMIT - (time.monotonic() - start)
            began = time.monotonic()
            found = run(
                part, options, machine.gpus, lacking, folder / name, min(part.seconds, left)
            )
            took = f"{time.monotonic() - began:.0f} s"
            failures += [f"{name}: {sentence}" for sentence in found.failures]
            state = f"{len(found.failures)} FAILED" if found.failures else "ok"
            print(f"{name}: {state}, {took}", flush=True)
            sections.append("\n\n".join([f"## {part.title}", *found.paragraphs, f"({took})"]))
        lines = [f"# GPU check: {machine.name}", *notes, summary(failures), machine.markdown]
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text("\n\n".join([*lines, *sections]) + "\n")
    for sentence in failures:
        print(f"FAILED {sentence}", file=sys.stderr)
    print(f"report: {report}")
    return int(bool(failures))


def summary(failures: Sequence[str]) -> str:
    """The result, as the first paragraph of the report."""
    if not failures:
        return "**All results are right.**"
    return "\n".join([f"**{len(failures)} failures:**\n", *(f"- {text}" for text in failures)])


# --- Dependencies ---------------------------------------------------------------------------------


def there(package: str) -> bool:
    """Whether the module of a package can be found."""
    return importlib.util.find_spec(MODULES[package]) is not None


def install(wheels: Path, site: Path) -> list[str]:
    """Install the wheels of packages that are not here to a folder, and append it to the path.

    Returns sentences for the report. What is installed already, such as torch, is not replaced.
    """
    absent = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _installed(wheel)]
    if not absent:
        return [f"{wheels} has no wheel of a package that is missing."]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--disable-pip-version-check", "--target", str(site)]
    failed = []
    for wheel in absent:  # one that does not fit this machine does not stop the others
        ended = subprocess.run(
            [*command, str(wheel)], capture_output=True, text=True, check=False, timeout=120
        )
        if ended.returncode:
            reason = (ended.stderr.strip() or "no reason given").splitlines()[-1]
            failed.append(f"{wheel.name} could not be installed: {reason}")
    sys.path.append(str(site))
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(site)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    importlib.invalidate_caches()
    return failed


def _installed(wheel: Path) -> bool:
    name = wheel.name.partition("-")[0]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- The machine ----------------------------------------------------------------------------------


@dataclass
class Machine:
    """
    name      # of the GPU, or "dry run on a CPU"
    gpus      # their number, 0 in a dry run
    markdown  # the section of the report
    """

    name: str
    gpus: int
    markdown: str


def facts(device: str, folder: Path) -> Machine:
    """Ask a process of its own: after CUDA has started in this one, others could not be forked."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    asker = multiprocessing.get_context("fork").Process(target=_ask, args=(device, writer))
    asker.start()
    writer.close()
    try:
        answer = reader.recv() if reader.poll(90) else None
    except EOFError:
        answer = None
    asker.kill()
    asker.join()
    if answer is None:
        raise BadRequest("CUDA does not start: `python -c 'import torch; torch.zeros(1).cuda()'`")
    names, rows = answer
    rows += [
        ("commit", _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"),
        ("Python", platform.python_version()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("system", f"{platform.system()} {platform.release()}"),
        *((p, _version(p)) for p in ("numpy", "scipy", "networkx", "mpi4py", "omegaconf")),
    ]
    lines = ["## Machine\n", "| | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)]
    name = f"{len(names)} × {names[0]}" if names else "dry run on a CPU"
    return Machine(name, len(names), "\n".join(lines))


def _ask(device: str, writer: "multiprocessing.connection.Connection") -> None:
    """Send the names of the GPUs, and rows for the report."""
    import torch

    rows: list[tuple[str, object]] = [("torch", torch.__version__)]
    names: list[str] = []
    if device == "cuda" and torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = [properties.name for properties in every]
        memory = ", ".join(f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in every)
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        has_nccl = torch.distributed.is_nccl_available()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "missing"
        rows += [
            ("GPUs", memory),
            ("compute capability", f"{every[0].major}.{every[0].minor}"),
            ("driver", (_output(*query) or "unknown").partition("\n")[0]),
            ("CUDA of torch", torch.version.cuda),
            ("cuDNN", torch.backends.cudnn.version()),
            ("NCCL", nccl),
        ]
    writer.send((names, rows))


def _output(*command: str) -> str:
    """The output of a command, or nothing."""
    if shutil.which(command[0]) is None:
        return ""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return ended.stdout.strip() if ended.returncode == 0 else ""


def _processor() -> str:
    try:
        content = Path("/proc/cpuinfo").read_text()
    except OSError:
        content = ""
    name = re.search(r"model name\s*: (.*)", content)
    return name[1] if name else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


# --- Parts ----------------------------------------------------------------------------------------


@dataclass
class Found:
    """The section of a part."""

    paragraphs: list[str]
    failures: list[str]


def run(
    part: Part,
    options: argparse.Namespace,
    gpus: int,
    lacking: Sequence[str],
    folder: Path,
    seconds: float,
) -> Found:
    """Run a part in a process of its own, and return what it has found."""
    from environment.gpu import findings

    folder.mkdir()
    if seconds < 1:
        return Found([], ["no time was left"])
    setting = findings.Setting(
        device=findings.torch.device("cuda", 0) if gpus else findings.torch.device("cpu"),
        gpus=gpus,
        quick=options.quick,
        folder=folder / "files",
        has_training=not {*TRAINING} & {*lacking},
    )
    setting.folder.mkdir()
    child = multiprocessing.get_context("fork").Process(
        target=_run_part, args=(part, setting, folder)
    )
    child.start()
    child.join(seconds)
    ended = child.exitcode
    if ended is None:
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
    paragraphs, failures = findings.read(folder / "findings")
    if ended != 0:
        shown = (folder / "error").read_text() if (folder / "error").exists() else ""
        if not shown:
            shown = (folder / "output").read_text()[-3000:]
        reason = f"did not end within {seconds:.0f} s" if ended is None else f"exit code {ended}"
        last = shown.strip().splitlines()[-1] if shown.strip() else "no output"
        paragraphs.append(f"```\n{shown}\n```")
        failures.append(f"{reason}: {last}")
    return Found(paragraphs, failures)


def _run_part(part: Part, setting: "Setting", folder: Path) -> None:
    """The life of the process of a part, with a process group and an output of its own."""
    from environment.gpu.findings import Findings

    os.setsid()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(ROOT)
    code = 0
    try:
        function = part.run
        if isinstance(function, str):
            function = importlib.import_module(function).run
        function(setting, Findings(folder / "findings"))
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
