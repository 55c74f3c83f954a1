"""Programs that tests start: Python in a process of its own, or in several under mpirun."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def one_mpirun_at_a_time() -> Iterator[None]:
    """Tests run side by side (pytest-xdist); processes that wait in MPI take whole cores, so that
    two such programs on a small machine slow each other down many times."""
    path = Path(tempfile.gettempdir()) / f"one-mpirun-at-a-time-{os.getuid()}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python(
    *arguments: str | Path, processes: int | None = None, cwd: Path = ROOT, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, under `mpirun -np PROCESSES` if a number is given; it has ended when
    this returns. The project's modules can be imported from any folder."""
    command = [sys.executable, *map(str, arguments)]
    if processes is not None:
        command = ["mpirun", "-np", str(processes), *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (
        one_mpirun_at_a_time() if processes is not None else nullcontext(),
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as program,
    ):
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
