"""One report under mpirun, the same examples in every process, and the selection of files.

`make test` runs the tests for one process, then for each N those for N processes under one
`mpirun -np N python -m pytest -m 'parallel[match]'`, which reads only the files that have some.
A plain `pytest` runs everything too: mpi-pytest then starts mpirun for each parallel test, which
takes longer. `pytest --quick` leaves out files that start programs, and long tests; `--since HEAD`
files that import nothing that has changed. `--transport gloo` repeats the tests for several
processes with torch.distributed in place of MPI.
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

gc.disable()  # until the end of imports, whose objects stay
# Jobs in the background of a script ignore it, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is loaded: eight test processes on two cores must not run sixteen threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without mpirun, nothing removes the files of 16 MiB in /dev/shm by which processes communicate.
os.environ.update({} if "OMPI_COMM_WORLD_SIZE" in os.environ else {"OMPI_MCA_btl": "self"})

import hypothesis
import pytest
import torch
from mpi4py import MPI
from omegaconf import OmegaConf

import train
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.algorithms.learning import LEARNING
from powergossip.compressors import COMPRESSORS
from powergossip.network import launch as launch_processes
from powergossip.network import processes
from powergossip.topologies import TOPOLOGIES
from tests.harness import internet, launch, selection
from tests.harness.helpers import files_below

pytest_plugins = ["tests.harness.device"]


def forget_mpi_in_environment() -> None:
    """Let this process start mpirun although it has initialized MPI itself, as mpi-pytest does.

    Open MPI leaves variables behind that make an mpirun below believe it belongs to this process.
    They are known to C only, so what Python knows of is what was there before.
    """
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    entries = takewhile(lambda entry: entry is not None, map(environ.__getitem__, count()))
    # a list first: unsetting moves the entries behind
    for name in [entry.partition(b"=")[0] for entry in entries]:
        if name not in os.environb:
            os.unsetenv(name)


if "OMPI_COMM_WORLD_SIZE" not in os.environ:
    del os.environ["OMPI_MCA_btl"]  # noqa: SIM112 mpirun's spelling
if MPI.COMM_WORLD.size == 1:
    forget_mpi_in_environment()

# A shell's background job (`make test &`) ignores Ctrl-C, and so would all that tests start; but
# some of them are there to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that drew different examples would wait for each other forever; and on a busy machine a
# deadline only says that it is busy.
hypothesis.settings.register_profile(
    "same everywhere", derandomize=True, database=None, deadline=None
)
hypothesis.settings.load_profile("same everywhere")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Equal numbers of torch's generator at the start of a test, in whatever order tests run."""
    torch.manual_seed(0)


REGISTRIES: tuple[dict[str, Any], ...]
REGISTRIES = AVERAGING, AGGREGATIONS, LEARNING, COMPRESSORS, TOPOLOGIES


@pytest.fixture(autouse=True)
def _rows() -> Iterator[None]:
    """Rows that a test adds are gone after it."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, rows in zip(REGISTRIES, before, strict=True):
        if registry != rows:
            registry.clear()
            registry.update(rows)


DEFAULTS = OmegaConf.structured(train.Config)  # a copy takes a quarter of the time


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` as its import leaves it."""
    monkeypatch.setattr(train, "config", DEFAULTS.copy())
    monkeypatch.setattr(train, "output_dir", None)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data; returns the cache on it."""
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("powergossip.tasks.fashion_mnist.DEBIAN_FOLDER", tmp_path / "debian")
    return tmp_path / "cache" / "decentralized-deep-learning"


@pytest.fixture
def rejection(
    tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """A function that runs a program in the folder of the test or another, and returns its error.

    The program is in this process. Its exit code is 2, it prints one line, behind notes, and no
    file changes.
    """
    monkeypatch.chdir(tmp_path)

    def of(program: Callable[[], None], *arguments: str, folder: Path = tmp_path) -> str:
        monkeypatch.chdir(folder)
        before = files_below(folder)
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as ended:
            program()
        error = capsys.readouterr().err
        assert ended.value.code == 2, error
        *notes, line = error.splitlines()
        assert line.startswith("error: ")
        assert all(note.startswith("note: ") for note in notes), error
        assert files_below(folder) == before
        return line

    return of


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "leave out the files whose tests start programs, and tests marked slow or long"
    parser.addoption("--quick", action="store_true", help=help)
    help = "only files that import, directly or not, what differs from this commit"
    parser.addoption("--since", metavar="COMMIT", help=help)
    help = "what connects the processes under mpirun: mpi, gloo of torch.distributed, or a ticket"
    parser.addoption("--transport", default="mpi", choices=("mpi", "gloo", "internet"), help=help)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The processes of `pytest -n auto`. Many tests wait for programs that they have started, so
    that one process per core would leave cores idle; those of --quick start none."""
    return (os.cpu_count() or 1) * (1 if config.getoption("--quick") else 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files are not even imported without a test for this number of processes under mpirun, or
    that --quick or --since leave out."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    size = MPI.COMM_WORLD.size
    if size > 1 and size not in selection.process_counts(text):
        return True
    if config.getoption("--quick") and selection.starts_programs(text):
        return True
    since = config.getoption("--since")
    if since and not selection.is_reached(collection_path, selection.changed(since)):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that no file is forgotten under mpirun, and make every choice of --quick."""
    texts: dict[Path, str] = {}
    for item in items:
        marks = item.get_closest_marker("parallel")
        if marks is not None:
            if item.path not in texts:
                texts[item.path] = item.path.read_text()
            found = selection.process_counts(texts[item.path])
            assert set(selection.counts_of(*marks.args, **marks.kwargs)) <= found, item.nodeid
    if config.getoption("--quick"):
        left_out = {i for i in items if any(map(i.get_closest_marker, ("slow", "long")))}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the objects that imports have made from the garbage collector, and from optimizers of
    several processes, which look through all objects for modules of DDP and FSDP2.

    torch._dynamo, which optimizers import at their first step, has as many as torch.
    """
    if MPI.COMM_WORLD.size > 1 and "powergossip.optimizers" in sys.modules:
        importlib.import_module("torch._dynamo")
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Only process 0 shows progress and the summary. All are connected by --transport. Workers of
    pytest-xdist share a server that forks programs."""
    if config.getoption("numprocesses", None) and not config.getoption("--quick"):
        os.environ[launch.SHARED] = launch.fork_server()
    if MPI.COMM_WORLD.size > 1 and config.getoption("--transport") == "internet":
        launch_processes.use(internet.under_mpi())
    elif MPI.COMM_WORLD.size > 1:
        processes(config.getoption("--transport"))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if MPI.COMM_WORLD.rank > 0 and reporter is not None:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 open until the process ends


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Under mpirun every process tells its failures at once, in a line.

    The summary shows process 0 only, and may never come: the others can be waiting for the failed
    process until the timeout ends them all.
    """
    if MPI.COMM_WORLD.size > 1 and report.failed:
        crash = getattr(report.longrepr, "reprcrash", None) or report.longrepr
        print(f"\nprocess {MPI.COMM_WORLD.rank}: {report.nodeid}: {crash}", file=sys.stderr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """No test for this number of processes is no failure under mpirun, nor no change."""
    launch.end_fork_server()
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and (
        MPI.COMM_WORLD.size > 1 or session.config.getoption("--since")
    ):
        session.exitstatus = pytest.ExitCode.OK
