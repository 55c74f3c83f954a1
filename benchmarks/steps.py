"""The benchmarks of `make bench`: milliseconds a step, under mpirun and under torchrun, and under
mpirun without compiled loops (powergossip/kernels).

    python -m benchmarks.steps                 all rows
    python -m benchmarks.steps "CHOCO, sign"   the rows whose name contains this

For each row and launcher: the time of a step, and the same in multiples of the lower bound, which
is measured in the same run with the same transport (benchmarks/gossip_step.py). Compressed
gradients are measured beside PyTorch's own (benchmarks/powersgd_step.py, dgc_selection.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powergossip import kernels

ROOT = Path(__file__).parents[1]

# Name, processes, arguments of gossip_step.py
STEPS: list[tuple[str, int, str]] = [
    ("PowerGossip, rank 1", 8, "algorithm=power-gossip model=resnet20 rank=1"),
    ("PowerGossip, rank 4", 8, "algorithm=power-gossip model=resnet20 rank=4"),
    ("D-PSGD", 8, "algorithm=dpsgd model=resnet20"),
    ("all-reduce", 8, "algorithm=all-reduce model=resnet20"),
    ("CHOCO, top 1 %", 8, "algorithm=choco model=resnet20 compressor=top-k"),
    ("CHOCO, sign", 8, "algorithm=choco model=resnet20 compressor=sign-and-norm"),
    ("CHOCO, random 1 %", 8, "algorithm=choco model=resnet20 compressor=random-k"),
    ("CHOCO, QSGD", 8, "algorithm=choco model=resnet20 compressor=qsgd"),
    ("DeepSqueeze, top 1 %", 8, "algorithm=deepsqueeze model=resnet20 compressor=top-k"),
    ("DeepSqueeze, sign", 8, "algorithm=deepsqueeze model=resnet20 compressor=sign-and-norm"),
    ("Moniqua", 8, "algorithm=moniqua model=resnet20"),
    ("PowerGossip, 100 × 100", 8, "model=matrix100"),
    ("PowerGossip, LSTM", 2, "algorithm=power-gossip model=lstm rank=1"),
]
ALONE: list[tuple[str, str]] = [
    ("PowerGossip, 100 × 100, 8 workers in a process", "model=matrix100 n_workers=8"),
    ("PowerGossip, 100 × 100, 1024 workers in a process", "model=matrix100 n_workers=1024"),
]
MPIRUN = ("mpirun", "-np")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--no-python", "--nproc-per-node"),
)
PYTORCH = {kernels.SWITCH: "0"}  # no compiled loops
COLUMNS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "mpirun": (MPIRUN, {}),
    "torchrun": (TORCHRUN, {}),
    "mpirun, PyTorch": (MPIRUN, PYTORCH),
}


def measured(
    program: str,
    arguments: str,
    launcher: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON line of a benchmark."""
    command = [*launcher, sys.executable, "-m", f"benchmarks.{program}", *arguments.split()]
    given = {**os.environ, **(variables or {})}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=given)
    if ended.returncode:
        sys.exit(ended.returncode)
    line: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return line


def _cell(line: dict[str, Any]) -> str:
    return f"{line['ms_per_step']:8.3f} ms {line['ratio']:6.1f} ×"


def main(wanted: str) -> None:
    """Measure the rows whose name contains `wanted`, and print a line for each."""
    print(f"{'':52}" + "".join(f"{column:>20}" for column in COLUMNS), flush=True)
    for name, processes, arguments in STEPS:
        if wanted in name:
            cells = [
                _cell(measured("gossip_step", arguments, (*launcher, str(processes)), variables))
                for launcher, variables in COLUMNS.values()
            ]
            row = f"{name}, {processes} processes"
            print(f"{row:52}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    for name, arguments in ALONE:
        if wanted in name:
            cells = [
                _cell(measured("gossip_step", arguments, variables=variables))
                for variables in ({}, PYTORCH)
            ]
            print(f"{name:52}{cells[0]:>20}{'':20}{cells[1]:>20}", flush=True)
    for rank in (1, 4):
        name = f"PowerSGD, rank {rank}, ResNet-50, 4 processes"
        if wanted in name:
            cells = []
            for launcher in (MPIRUN, TORCHRUN):
                line = measured("powersgd_step", f"rank={rank}", (*launcher, "4"))
                cells.append(f"{line['ours_ms']:8.1f} ms {line['ratio']:5.2f} h")
            print(f"{name:52}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    if wanted in "DGC, selection":
        line = measured("dgc_selection", "")
        print(f"{'DGC, selection':52}{line['selection_ms']:8.1f} ms {line['speedup']:5.1f} × top-k")
    print("×: multiples of the lower bound. h: multiples of PyTorch's hook. × top-k: times faster")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
