"""A run resumes after a power failure, in file systems that the ioctl of a shutdown cuts off."""

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.harness.helpers import wait_until
from tests.harness.launch import ROOT

SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2  # of ext4 and xfs: what is not yet on the disk is lost
ARGUMENTS = ["n_workers=4", "task_architecture=MLP", "num_epochs=40", "checkpoint_interval=4"]


def command(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[None]:
    try:
        command("mount", "-o", "loop", image, place)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device: {error}")
    try:
        yield
    finally:
        command("umount", place)


def training(folder: Path) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "train.py", *ARGUMENTS, "--output-dir", str(folder), "resume=auto"]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def last_step(folder: Path) -> int:
    try:
        last = json.loads((folder / "checkpoints" / "index.json").read_text())["last"]
    except OSError:
        return 0
    return int(last["step"]) if last else 0


def has_advanced(process: "subprocess.Popen[bytes]", folder: Path, before: int) -> bool:
    return last_step(folder) > before or process.poll() is not None


def rows_of(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [str(row | {"seconds": 0}) for row in rows if row["name"] != "phase_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_run_resumes_after_a_power_failure(kind: str, tmp_path: Path) -> None:
    """Of a new run, and of one that was resumed."""
    if shutil.which(f"mkfs.{kind}") is None or os.geteuid() != 0:
        pytest.skip(f"needs mkfs.{kind} and root")
    image, place = tmp_path / "image", tmp_path / "place"
    image.touch()
    os.truncate(image, 320 << 20)
    command(f"mkfs.{kind}", image)
    place.mkdir()
    folder, step = place / "run", 0
    for _ in range(2):
        with mounted(image, place):
            process = training(folder)
            wait_until(partial(has_advanced, process, folder, step))
            assert process.poll() is None, process.communicate()[1].decode()
            step = last_step(folder)
            root = os.open(place, os.O_RDONLY)
            fcntl.ioctl(root, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
            os.close(root)
            process.send_signal(signal.SIGKILL)
            process.communicate()
    with mounted(image, place):
        process = training(folder)
        assert process.wait() == 0, process.communicate()[1].decode()
        shutil.copytree(folder, tmp_path / "resumed")
    assert training(tmp_path / "whole").wait() == 0
    assert rows_of(tmp_path / "resumed") == rows_of(tmp_path / "whole")
