"""Programs that tests start: Python in a process of its own, or in several under mpirun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(
    *arguments: str | Path, processes: int | None = None, cwd: Path = ROOT, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, under `mpirun -np PROCESSES` if a number is given; it has ended when
    this returns. The project's modules can be imported from any folder."""
    command = [sys.executable, *map(str, arguments)]
    if processes is not None:
        command = ["mpirun", "-np", str(processes), *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as program:
        try:
            output, errors = program.communicate(timeout=timeout)
        except BaseException:
            program.terminate()  # mpirun then ends its processes, which a kill would leave behind
            try:
                program.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, program.returncode, output, errors)
