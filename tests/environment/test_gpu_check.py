"""`make gpu-check` without a GPU: a dry run."""

import subprocess
import sys

from tests.harness.launch import ROOT


def test_a_dry_run_compares_the_cpu_with_itself() -> None:
    words = [
        "make",
        "gpu-check",
        f"PYTHON={sys.executable}",
        "ARGS=--device cpu -m 'gpu and not slow'",
    ]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
