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


MPIRUN = ("mpirun", "-np")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--no-python", "--nproc-per-node"),
)
PYTORCH = {kernels.SWITCH: "0"}  # no compiled loops
# Launcher of several processes, and environment variables
COLUMNS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "mpirun": (MPIRUN, {}),
    "torchrun": (TORCHRUN, {}),
    "mpirun, PyTorch": (MPIRUN, PYTORCH),
}
# Of each program: the columns, and a cell as a format of the program's JSON line
CELLS: dict[str, tuple[tuple[str, ...], str]] = {
    "gossip_step": (tuple(COLUMNS), "{ms_per_step:8.3f} ms {ratio:6.1f} ×"),
    "powersgd_step": (("mpirun", "torchrun"), "{ours_ms:8.1f} ms {ratio:5.2f} h"),
    "dgc_selection": (("mpirun",), "{selection_ms:8.1f} ms {speedup:5.1f} × top-k"),
}
SMALL = "PowerGossip, 100 × 100"
# Name, processes, program, its arguments
CASES: list[tuple[str, int, str, str]] = [
    *(
        (name, 8, "gossip_step", arguments)
        for name, arguments in {
            "PowerGossip, rank 1": "algorithm=power-gossip options.rank=1",
            "PowerGossip, rank 4": "algorithm=power-gossip options.rank=4",
            "D-PSGD": "algorithm=dpsgd",
            "all-reduce": "algorithm=all-reduce",
            "CHOCO, top 1 %": "algorithm=choco options.compressor=top-k",
            "CHOCO, sign": "algorithm=choco options.compressor=sign-and-norm",
            "CHOCO, random 1 %": "algorithm=choco options.compressor=random-k",
            "CHOCO, QSGD": "algorithm=choco options.compressor=qsgd",
            "DeepSqueeze, top 1 %": "algorithm=deepsqueeze options.compressor=top-k",
            "DeepSqueeze, sign": "algorithm=deepsqueeze options.compressor=sign-and-norm",
            "Moniqua": "algorithm=moniqua",
            SMALL: "model=matrix100",
        }.items()
    ),
    ("PowerGossip, LSTM", 2, "gossip_step", "algorithm=power-gossip model=lstm options.rank=1"),
    (f"{SMALL}, 8 workers in a process", 1, "gossip_step", "model=matrix100 n_workers=8"),
    (f"{SMALL}, 1024 workers in a process", 1, "gossip_step", "model=matrix100 n_workers=1024"),
    ("PowerSGD, rank 1, ResNet-50", 4, "powersgd_step", "rank=1"),
    ("PowerSGD, rank 4, ResNet-50", 4, "powersgd_step", "rank=4"),
    ("DGC, selection", 1, "dgc_selection", ""),
]


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


def main(wanted: str) -> None:
    """Measure the rows whose name contains `wanted`, and print a line for each."""
    print(f"{'':52}" + "".join(f"{column:>20}" for column in COLUMNS), flush=True)
    for name, processes, program, arguments in CASES:
        if wanted not in name:
            continue
        columns, form = CELLS[program]
        row = f"{name}, {processes} processes" if processes > 1 else name
        print(f"{row:52}", end="", flush=True)
        for column, (launcher, variables) in COLUMNS.items():
            cell = ""
            if column in columns and (processes > 1 or column != "torchrun"):
                start = (*launcher, str(processes)) if processes > 1 else ()
                cell = form.format(**measured(program, arguments, start, variables))
            print(f"{cell:>20}", end="", flush=True)
        print()
    print("×: multiples of the lower bound. h: multiples of PyTorch's hook. × top-k: times faster")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
