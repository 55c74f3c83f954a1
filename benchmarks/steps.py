"""The benchmarks of `make bench`: milliseconds a step, under mpirun and under torchrun, and under
mpirun without compiled loops (powergossip/kernels).

    python -m benchmarks.steps                 all rows
    python -m benchmarks.steps "CHOCO, sign"   the rows whose name contains this

For each row and launcher: the time of a step, and the same in multiples of the lower bound, which
is measured in the same run with the same transport (benchmarks/gossip_step.py).
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
SMALL = "PowerGossip, 100 × 100"
# Name, processes, arguments of benchmarks/gossip_step.py
CASES: list[tuple[str, int, str]] = [
    *(
        (name, 8, arguments)
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
    ("PowerGossip, LSTM", 2, "algorithm=power-gossip model=lstm options.rank=1"),
    (f"{SMALL}, 8 workers in a process", 1, "model=matrix100 n_workers=8"),
    (f"{SMALL}, 1024 workers in a process", 1, "model=matrix100 n_workers=1024"),
]


def measured(
    arguments: str, launcher: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """The JSON line of a benchmark."""
    command = [*launcher, sys.executable, "-m", "benchmarks.gossip_step", *arguments.split()]
    given = {**os.environ, **variables}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=given)
    if ended.returncode:
        sys.exit(ended.returncode)
    line: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return line


def main(wanted: str) -> None:
    """Measure the rows whose name contains `wanted`, and print a line for each."""
    print(f"{'':52}" + "".join(f"{column:>20}" for column in COLUMNS), flush=True)
    for name, processes, arguments in CASES:
        if wanted not in name:
            continue
        row = f"{name}, {processes} processes" if processes > 1 else name
        print(f"{row:52}", end="", flush=True)
        for column, (launcher, variables) in COLUMNS.items():
            cell = ""
            if processes > 1 or column != "torchrun":
                start = (*launcher, str(processes)) if processes > 1 else ()
                line = measured(arguments, start, variables)
                cell = f"{line['ms_per_step']:8.3f} ms {line['ratio']:6.1f} ×"
            print(f"{cell:>20}", end="", flush=True)
        print()
    print("×: multiples of the lower bound")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
