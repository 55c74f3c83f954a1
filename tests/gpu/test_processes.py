"""Several processes on the GPUs of a machine, compared with one process on the CPU."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import launch
from tests.harness.on_device import WORKERS

pytestmark = pytest.mark.gpu

PROGRAM = Path(launch.__file__).with_name("gpu_processes.py")


def ended(*arguments: str, processes: int) -> dict[str, Any]:
    """The JSON line with which processes of torchrun's end."""
    found = launch.python(
        *(str(PROGRAM), *arguments),
        processes=processes,
        launcher="torchrun",
        timeout=130,
        variables={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stderr
    last: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return last


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_processes_are_one_process_on_the_cpu(transport: str, device: torch.device) -> None:
    """gloo: two processes share a GPU where there is one. NCCL: each has a GPU of its own."""
    count = 2
    if transport == "nccl":
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        if gpus == 0:
            pytest.skip("NCCL needs a GPU for each process")
        count = max(n for n in range(1, gpus + 1) if WORKERS % n == 0)
    wrong = ended(transport, device.type, processes=count)
    assert not wrong, wrong
