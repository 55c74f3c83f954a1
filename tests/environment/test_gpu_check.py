"""`make gpu-check` without a GPU: a dry run, wrong results, missing dependencies."""

from pathlib import Path

import pytest

from environment import gpu_check
from environment.gpu_check import PARTS
from tests.harness import launch

DRY = ("--device", "cpu", "--quick")


def test_a_dry_run_has_every_section_and_no_failure(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    ended = launch.python("environment/gpu_check.py", *DRY, "--report", file, timeout=480)
    report = file.read_text()
    assert ended.returncode == 0, report + ended.stderr
    for part in PARTS.values():
        section = report.partition(f"## {part.title}\n")[2].partition("\n## ")[0]
        assert " PASSED\n" in section or "\n| --- |" in section, part.title
    assert "FAILED" not in report
    assert "Left out" not in report


# A rule whose results differ between devices, as a plugin of pytest.
WRONG = """
import itertools
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
"""
# A part that fails, one that ends its process, and one that does not end.
FAILING = """
from environment import gpu_check
from environment.gpu_check import PARTS, Part

PARTS["fails"] = Part("Fails", ["fails"], (), 60)
PARTS["crashes"] = Part("Crashes", ["crashes"], (), 60)
PARTS["hangs"] = Part("Hangs", ["hangs"], (), 1)
raise SystemExit(gpu_check.main())
"""


def test_wrong_results_and_parts_that_fail_are_reported(tmp_path: Path) -> None:
    script, file = tmp_path / "script.py", tmp_path / "report.md"
    script.write_text(FAILING)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "crashes.py").write_text(
        "import os\nprint('found before', flush=True)\nos._exit(7)"
    )
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)")
    wrong = {"PYTHONPATH": f"{tmp_path}:{launch.ROOT}", "PYTEST_ADDOPTS": "-p wrong"}
    parts = "fails,crashes,hangs,correctness"
    ended = launch.python(script, *DRY, "--report", file, "--parts", parts, variables=wrong)
    report = file.read_text()
    assert ended.returncode == 1, ended.stderr
    failures = [line for line in ended.stderr.splitlines() if line.startswith("FAILED")]
    starts = ["FAILED fails: ", "FAILED crashes: ", "FAILED hangs: did", "FAILED correctness: "]
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
    for part in ("runs", "training"):
        assert f"{part}: left out, needs omegaconf\n" in ended.stdout
    assert file.read_text().count("Left out: needs omegaconf") == 2


def test_an_impossible_request_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--parts", "nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
