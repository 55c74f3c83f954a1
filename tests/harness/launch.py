"""Programs that tests start: a Python script in a process of its own, or in several under mpirun or
torchrun.

Scripts are forked from a process that has imported what they need (tests/harness/forks.py). With
`fresh=True`, and for `python -c` and `python -m`, a Python starts as a user starts it: for tests of
imports, and of what a shell sees.
"""

import fcntl
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.forks import Fork

ROOT = Path(__file__).parents[2]
NOT_STARTED = "listener thread failed to start"  # of mpirun, on a busy machine: nothing has run
SHARED = "TESTS_FORK_SERVER"  # a variable with the socket of a server
FORKS = Path(__file__).with_name("forks.py")
# Imported before a fork. None of them starts a thread or MPI (tests/test_launch.py). The project's
# are what an installation has, also where PYTHONPATH is empty.
PRELOADED = (
    *("algorithms", "compressors", "gossip_run", "topologies", "train"),
    *("sklearn.datasets", "matplotlib.figure"),
    "torch._dynamo",  # by the first optimizer: a second of a core
)

Completed = subprocess.CompletedProcess[str]
_ends: list[Callable[[], None]] = []


@contextmanager
def one_mpirun_at_a_time() -> Iterator[None]:
    """Tests run side by side (pytest-xdist); processes that wait in MPI take whole cores, so that
    two such programs on a small machine slow each other down many times."""
    path = Path(tempfile.gettempdir()) / f"one-mpirun-at-a-time-{os.getuid()}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def fork_server() -> str:
    """The socket of a server that ends with this process, or of one that all workers of
    pytest-xdist share. Its socket goes at `end_fork_server`."""
    if SHARED in os.environ:
        return os.environ[SHARED]
    folder = tempfile.mkdtemp(prefix="forks-")  # in a short path, as sockets need it
    place = os.path.join(folder, "socket")
    server = subprocess.Popen(
        [sys.executable, FORKS, "serve", place, *PRELOADED],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"

    def end() -> None:
        server.communicate()  # closes its stdin
        shutil.rmtree(folder)

    _ends.append(end)
    return place


def end_fork_server() -> None:
    """At the end of the tests: end the server, if one was started."""
    while _ends:
        _ends.pop()()
    fork_server.cache_clear()


def stand_in() -> list[str]:
    """A command in place of `python`: it runs a script in a fork, with the same exit code."""
    return [sys.executable, "-I", "-S", str(FORKS), "stand-in", fork_server()]


def torchrun(processes: int, command: list[str]) -> list[str]:
    """A script, to be forked, that runs a command in several processes: torchrun's own."""
    script = importlib.util.find_spec("torch.distributed.run")
    assert script is not None
    assert script.origin is not None
    count = f"--nproc-per-node={processes}"
    return [script.origin, "--standalone", count, "--no-python", *command]


def python(
    *arguments: str | Path,
    processes: int | None = None,
    cwd: Path = ROOT,
    timeout: float = 180,
    fresh: bool = False,
    launcher: str = "mpirun",
    variables: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Completed:
    """`python ARGUMENTS`, under `mpirun -np PROCESSES` or `torchrun --nproc-per-node PROCESSES` if
    a number is given; it has ended when this returns. The project's modules can be imported from
    any folder. variables: added to the environment. options: of mpirun."""
    words = list(map(str, arguments))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= variables or {}
    fresh = fresh or words[0].startswith("-")
    if processes is not None and launcher == "torchrun":
        with one_mpirun_at_a_time():
            return _fork(torchrun(processes, [*stand_in(), *words]), cwd, environment, timeout)
    if processes is not None:
        started = [sys.executable] if fresh else stand_in()
        command = ["mpirun", "-np", str(processes), *options, *started, *words]
        with one_mpirun_at_a_time():
            ended = _run(command, cwd, environment, timeout)
            if NOT_STARTED in ended.stderr:
                ended = _run(command, cwd, environment, timeout)
            return ended
    if fresh:
        return _run([sys.executable, *words], cwd, environment, timeout)
    return _fork(words, cwd, environment, timeout)


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program in a session of its own, which ends after the block, and if the tests are killed.
    The processes of mpirun end with it."""
    bound = [sys.executable, "-I", "-S", str(FORKS), "bound", str(os.getpid())]
    with subprocess.Popen([*bound, *command], start_new_session=True, **options) as program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.terminate()  # mpirun ends its processes, which a kill would leave behind
                try:
                    program.communicate(timeout=10)
                except subprocess.TimeoutExpired:
                    os.killpg(program.pid, signal.SIGKILL)


def _run(command: list[str], cwd: Path, environment: dict[str, str], timeout: float) -> Completed:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, cwd=cwd, env=environment, text=True, **pipes) as program:
        output, errors = program.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, program.returncode, output, errors)


def _fork(words: list[str], cwd: Path, environment: dict[str, str], timeout: float) -> Completed:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        files = (output.fileno(), errors.fileno())
        fork = Fork(fork_server(), words, str(cwd), environment, files)
        try:
            code = fork.wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(words, timeout) from None
        finally:
            fork.close()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, code, output.read(), errors.read())
