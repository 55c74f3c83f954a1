"""A check and a benchmark of this project on a machine with an NVIDIA GPU:  make gpu-check

    python environment/gpu_check.py [--device cuda|cpu] [--quick] [--report FILE]

It needs Python 3.11, PyTorch, numpy, scipy, networkx and pytest, and no network, MPI or `make
setup`. It runs from a checkout. Parts that need a package which is missing are skipped. The first
three parts are the tests of `pytest -m gpu`.

    machine      GPUs, driver, versions
    correctness  random numbers, averaging rules and aggregations equal the CPU's; checkpoints
    runs         train.py: one epoch on the GPU, the next one on the CPU, and the reverse; torchrun
    processes    gloo with messages staged through host memory; NCCL with a GPU for each process
    steps        time of an averaging step, its lower bound, its kernels
    training     steps per second of ResNet-20 and a transformer, with batched gradients and without

The report is in Markdown. Each part runs in its own process: one that fails, hangs or crashes is a
section with a traceback. The exit code is 1 if a result is wrong or a part has failed, and 2 for a
request that is impossible. --device cpu is a dry run that compares the CPU with itself.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)
REPORT = ROOT / "output" / "gpu_check.md"
# Modules of the dependencies in pyproject.toml, and pytest, by the name of the package.
MODULES = {
    "matplotlib": "matplotlib",
    "mpi4py": "mpi4py",
    "networkx": "networkx",
    "numpy": "numpy",
    "omegaconf": "omegaconf",
    "pandas": "pandas",
    "pillow": "PIL",
    "pytest": "pytest",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "torch": "torch",
    "tqdm": "tqdm",
}
LIBRARY = ("networkx", "numpy", "scipy")  # needed by every part but the first one
TRAINING = (*LIBRARY, "matplotlib", "omegaconf", "pandas", "pillow", "tqdm")  # by train.py
LIMIT = 470.0  # seconds for all parts, so that there is a report within eight minutes


# conftest.py and some plugins need MPI, and some options are for these plugins.
PYTEST = (
    *("pytest", "-v", "--tb=short", "--no-header", "--disable-warnings", "-rfEs", "-m", "gpu"),
    *("-p", "tests.harness.device", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"),
    *("-o", "addopts=--import-mode=importlib", "-o", "console_output_style=classic"),
)


@dataclass(frozen=True)
class Part:
    """
    title    # of the section
    command  # module and arguments. It prints the section. FAILED begins a line with a failure
    needs    # packages
    seconds  # after which it is ended
    """

    title: str
    command: Sequence[str]
    needs: Sequence[str]
    seconds: float

    def words(self, options: argparse.Namespace) -> list[str]:
        """The command with the options that concern it."""
        quick = ("-m", "gpu and not slow") if self.is_test else ("--quick",)
        return [*self.command, "--device", options.device, *(quick if options.quick else ())]

    @property
    def is_test(self) -> bool:
        return self.command[0] == "pytest"


def _tests(title: str, file: str, needs: Sequence[str], seconds: float) -> Part:
    return Part(title, (*PYTEST, f"tests/gpu/{file}"), (*needs, "pytest"), seconds)


PARTS = {
    "correctness": _tests("Correctness", "test_results.py", LIBRARY, 150),
    "runs": _tests("Checkpoints across devices", "test_runs.py", TRAINING, 120),
    "processes": _tests("Processes: gloo and NCCL", "test_processes.py", LIBRARY, 150),
    "steps": Part("Steps of averaging", ["environment.gpu.steps"], LIBRARY, 150),
    "training": Part("Training", ["environment.gpu.training"], TRAINING, 120),
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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--report", type=Path, default=REPORT, help=f"by default {REPORT}")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; by default all")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",") if options.parts else list(PARTS)
    for name in options.parts:
        if name not in PARTS:
            raise BadRequest(f"--parts {name}: use some of {','.join(PARTS)}")
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
    report = options.report.absolute()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        lacking = [package for package in MODULES if not there(package)]
        gpus, machine = facts(options.device)
        if not gpus:
            raise BadRequest("torch sees no GPU; --device cpu is a dry run without one")
        sections, failures = [], []
        for name in options.parts:
            part = PARTS[name]
            if {*part.needs} & {*lacking}:
                needed = [package for package in part.needs if package in lacking]
                print(f"{name}: left out, needs {', '.join(needed)}", flush=True)
                sections.append(f"## {part.title}\n\nLeft out: needs {', '.join(needed)}.")
                continue
            left = LIMIT - (time.monotonic() - start)
            began = time.monotonic()
            section, found = run(part, options, folder / name, min(part.seconds, left))
            took = f"{time.monotonic() - began:.0f} s"
            failures += [f"{name}: {sentence}" for sentence in found]
            state = f"{len(found)} FAILED" if found else "ok"
            print(f"{name}: {state}, {took}", flush=True)
            sections.append(f"## {part.title}\n\n{section}\n\n({took})")
        lines = [f"# GPU check: {gpus}", summary(failures), machine]
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


def there(package: str) -> bool:
    """True if the module of a package can be found."""
    return importlib.util.find_spec(MODULES[package]) is not None


# --- The machine ----------------------------------------------------------------------------------


def facts(device: str) -> tuple[str, str]:
    """The name of the GPUs, "" without one, and the section of the report."""
    import torch

    rows: list[tuple[str, object]] = [("torch", torch.__version__)]
    name = "dry run on a CPU" if device == "cpu" else ""
    if device == "cuda" and torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        name = f"{len(every)} × {every[0].name}"
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        has_nccl = torch.distributed.is_nccl_available()
        rows += [
            ("GPUs", ", ".join(f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in every)),
            ("compute capability", f"{every[0].major}.{every[0].minor}"),
            ("driver", (_output(*query) or "unknown").partition("\n")[0]),
            ("CUDA of torch", torch.version.cuda),
            ("cuDNN", torch.backends.cudnn.version()),
            ("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "missing"),
        ]
    rows += [
        ("commit", _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"),
        ("Python", platform.python_version()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("system", f"{platform.system()} {platform.release()}"),
        *((p, importlib.metadata.version(p) if there(p) else "missing") for p in MODULES),
    ]
    lines = ["## Machine\n", "| | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)]
    return name, "\n".join(lines)


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


# --- Parts ----------------------------------------------------------------------------------------


def run(
    part: Part, options: argparse.Namespace, folder: Path, seconds: float
) -> tuple[str, list[str]]:
    """Run a part in its own process. Returns the section, and the failures in it."""
    if seconds < 1:
        return "", ["no time was left"]
    folder.mkdir()
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)}
    # On CI, pytest does not shorten errors.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "100", "CI": "true"}
    output, errors = folder / "output", folder / "errors"
    with output.open("w") as out, errors.open("w") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", *part.words(options)],
            env=environment,
            cwd=ROOT,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        ended: int | None = None
        with suppress(subprocess.TimeoutExpired):
            ended = child.wait(seconds)
        if ended is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    section = output.read_text(errors="replace").strip()
    failures = [
        line.partition(" ")[2]
        for line in section.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if part.is_test:
        section = f"```\n{section}\n```"
    if ended is None or (ended and not failures):
        shown = errors.read_text(errors="replace").strip()[-3000:]
        reason = f"did not end within {seconds:.0f} s" if ended is None else f"exit code {ended}"
        failures.append(f"{reason}: {shown.rpartition(chr(10))[2] or 'no message'}")
        section += f"\n\n```\n{shown}\n```"
    return section, failures


if __name__ == "__main__":
    sys.exit(main())
