"""`make gpu-check` without a GPU: a dry run, wrong results, missing dependencies."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from environment import gpu_check
from environment.gpu_check import PARTS
from tests.harness import launch

DRY = ("--device", "cpu", "--quick")


def test_a_dry_run_has_every_section_and_no_failure(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    ended = launch.python("environment/gpu_check.py", *DRY, "--report", file, cwd=launch.ROOT)
    report = file.read_text()
    assert ended.returncode == 0, report + ended.stderr
    for part in PARTS.values():
        section = report.partition(f"## {part.title}\n")[2].partition("\n## ")[0]
        assert " PASSED\n" in section or "\n| --- |" in section, part.title
    assert "FAILED" not in report
    assert "Left out" not in report


# A rule whose results differ between devices, a part that fails, and a part that ends the process.
WRONG = """
import itertools
from environment import gpu_check
from environment.gpu_check import PARTS, Part
from powergossip import algorithms

class Wrong(algorithms.ExactMean):
    made = itertools.count()

    def __init__(self, network):
        super().__init__(network)
        self.wrong = 1e-3 * next(self.made)

    def step(self, x):
        yield from super().step(x)
        x[-1, -1] += self.wrong

mean = algorithms.AVERAGING["all-reduce"]
algorithms.AVERAGING["all-reduce"] = lambda network, layout, bits=32: (
    mean(network, layout, bits=bits) if bits < 32 else Wrong(network)
)
PARTS["fails"] = Part("Fails", ["fails"], (), 60)
PARTS["crashes"] = Part("Crashes", ["crashes"], (), 60)
raise SystemExit(gpu_check.main())
"""


def test_wrong_results_and_parts_that_fail_are_reported(tmp_path: Path) -> None:
    script, file = tmp_path / "script.py", tmp_path / "report.md"
    script.write_text(WRONG)
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "crashes.py").write_text(
        "import os\nprint('found before', flush=True)\nos._exit(7)"
    )
    parts = "fails,crashes,correctness"
    ended = launch.python(script, *DRY, "--report", file, "--parts", parts)
    report = file.read_text()
    assert ended.returncode == 1, ended.stderr
    failures = [line for line in ended.stderr.splitlines() if line.startswith("FAILED")]
    starts = ["FAILED fails: ", "FAILED crashes: ", "FAILED correctness: "]
    assert len(failures) == len(starts), failures
    assert all(map(str.startswith, failures, starts)), failures
    assert "[all-reduce]" in failures[-1]
    assert "ZeroDivisionError" in report.partition("## Fails")[2].partition("\n## ")[0]
    assert "found before" in report.partition("## Crashes")[2].partition("\n## ")[0]
    assert "[dpsgd] PASSED" in report


def test_a_missing_dependency_is_a_sentence_and_its_parts_are_left_out(tmp_path: Path) -> None:
    script, file = tmp_path / "script.py", tmp_path / "report.md"
    script.write_text(
        "import sys\n"
        "sys.modules['omegaconf'] = None\n"
        "from environment import gpu_check\n"
        "raise SystemExit(gpu_check.main())\n"
    )
    ended = launch.python(script, *DRY, "--report", file, "--parts", "runs,training")
    assert ended.returncode == 0, ended.stderr
    named = [line for line in ended.stdout.splitlines() if "omegaconf" in line]
    assert len(named) == 1
    assert "runs, training" in named[0]
    assert file.read_text().count("Left out: needs omegaconf") == 2


def test_wheels_of_missing_packages_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that fit. Packages that are installed, such as torch, stay as they are."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    site = tmp_path / "site"
    metadata = "Metadata-Version: 2.1\nName: {0}\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    for name in ("of_gpu_check", "torch"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "VALUE = 3")
            folder = f"{name}-1.0.dist-info"
            wheel.writestr(f"{folder}/METADATA", metadata.format(name))
            wheel.writestr(f"{folder}/WHEEL", tags)
            wheel.writestr(f"{folder}/RECORD", "")
    (tmp_path / "broken_gpu_check-1.0-py3-none-any.whl").write_text("no wheel")
    (sentence,) = gpu_check.install(tmp_path, site)
    assert "broken_gpu_check" in sentence
    assert [file.name for file in site.glob("*/__init__.py")] == ["__init__.py"]
    assert sys.path[-1] == str(site)
    assert os.environ["PYTHONPATH"].endswith(str(site))
    import of_gpu_check  # type: ignore[import-not-found]

    assert of_gpu_check.VALUE == 3


@pytest.mark.parametrize(
    "arguments",
    [["--parts", "nothing"], ["--wheels", "/nowhere"]],
    ids=lambda arguments: arguments[0],
)
def test_an_impossible_request_is_a_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
