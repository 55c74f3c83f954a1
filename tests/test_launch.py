"""A fork is as good as a Python of its own, and the processes of mpirun can be forks."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launch
from tests.harness.helpers import wait_until

SHOW = """
import atexit, json, os, sys
atexit.register(print, "the end")
threads = len(os.listdir("/proc/self/task"))
MPI = "mpi4py.MPI" in sys.modules
import torch
print(json.dumps({
    "name": __name__, "file": __file__, "arguments": sys.argv[1:], "folder": os.getcwd(),
    "first in path": sys.path[0], "variable": os.environ.get("VARIABLE"), "threads": threads,
    "session": os.getsid(0) == os.getpid(), "MPI": MPI, "input": sys.stdin.read(),
    "torch threads": torch.get_num_threads(), "main": sys.modules["__main__"].__file__,
}))
"""


def test_a_fork_is_like_a_fresh_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARIABLE", "a value")
    (tmp_path / "show.py").write_text(SHOW)
    fork = launch.python("show.py", "an argument", "ü", cwd=tmp_path)
    assert (fork.returncode, fork.stderr) == (0, "")
    shown = json.loads(fork.stdout.splitlines()[0])
    assert fork.stdout.splitlines()[1:] == ["the end"]
    assert shown == {
        "name": "__main__",
        "file": "show.py",
        "main": "show.py",
        "arguments": ["an argument", "ü"],
        "folder": str(tmp_path),
        "first in path": str(tmp_path),
        "variable": "a value",
        "session": True,
        "input": "",
        "MPI": False,
        "threads": 1,
        "torch threads": 1,
    }


ENDING = """
import atexit, threading
atexit.register(print, "the end")
threading.Timer(0.1, print, ["a thread"]).start()
print("the script")
def divide():
    1 / 0
divide()
"""


def test_a_fork_ends_like_a_fresh_python(tmp_path: Path) -> None:
    """After its threads, and what is registered. An exception shows its traceback."""
    (tmp_path / "ending.py").write_text(ENDING)
    ended = launch.python("ending.py", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["the script", "a thread", "the end"]
    assert "in divide" in ended.stderr
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
    (tmp_path / "ending.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert launch.python("ending.py", cwd=tmp_path).returncode == -signal.SIGTERM


@pytest.mark.parametrize(("processes", "seconds"), [(None, 1), (2, 4)])
def test_a_program_that_takes_too_long_is_ended(
    processes: int | None, seconds: int, tmp_path: Path
) -> None:
    script = "import os, time\nopen(f'began-{os.getpid()}', 'w')\ntime.sleep(600)"
    (tmp_path / "endless.py").write_text(script)
    with pytest.raises(subprocess.TimeoutExpired):
        launch.python("endless.py", cwd=tmp_path, processes=processes, timeout=seconds)
    began = list(tmp_path.glob("began-*"))
    assert len(began) == (processes or 1)
    wait_until(lambda: not any(map(lives, began)))


def lives(file: Path) -> bool:
    return Path("/proc", file.name.removeprefix("began-")).exists()


@pytest.mark.parametrize(
    "options",
    [
        {"processes": None},
        {"processes": 2},
        pytest.param({"processes": 2, "fresh": True}, marks=pytest.mark.slow),
        pytest.param({"processes": 2, "launcher": "torchrun"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_programs_end_when_the_tests_are_killed(options: dict[str, Any], tmp_path: Path) -> None:
    script = "import os, time\nopen(f'began-{os.getpid()}', 'w')\ntime.sleep(600)"
    (tmp_path / "endless.py").write_text(script)
    tests = "from tests.harness import launch\nlaunch.PRELOADED, launch.SHARED = (), 'NONE'\n"
    tests += f"launch.python('endless.py', cwd={str(tmp_path)!r}, **{options})"
    with subprocess.Popen([sys.executable, "-c", tests], cwd=launch.ROOT) as program:
        try:
            wait_until(lambda: len(list(tmp_path.glob("began-*"))) == (options["processes"] or 1))
        finally:
            program.kill()
    wait_until(lambda: not any(map(lives, tmp_path.glob("began-*"))))
