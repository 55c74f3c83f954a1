"""Jobs run once, to their end, even if the runner is killed: with real processes, a real mpirun,
and a real Slurm where there is one.

The programs that are started are tiny; nothing here depends on how fast they are.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from powergossip.errors import BadInput
from powergossip.runner import jobs, launchers
from powergossip.runner.jobs import Job, last_output
from powergossip.runner.launchers import LAUNCHERS, STOP, Mpirun, OneProcess, Slurm
from tests.harness import slurm
from tests.harness.helpers import wait_until
from tests.harness.launch import ROOT, one_mpirun_at_a_time

HERE = ("mpirun", "torchrun", "process")

# Calls a launcher, as the runner does in a thread of its own, among other threads; exits with the
# job's code.
DRIVER = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from powergossip.runner.jobs import Job
from powergossip.runner.launchers import LAUNCHERS
name, folder, processes, *command = sys.argv[1:]
folder = Path(folder)
job = Job(command, int(processes), folder / "log.txt", folder, f"a job in {folder.name}")
for _ in range(20):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
with ThreadPoolExecutor(1) as pool:
    sys.exit(pool.submit(LAUNCHERS[name](), job).result())
"""

# Until SIGUSR1, or for SECONDS; then it takes a while, as writing a checkpoint does. A second
# signal has its usual effect, as in train.py.
LASTING = """
import os, signal, sys, time
from pathlib import Path
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
stopped = []
def stop(number, _):
    stopped.append(number)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
signal.signal(signal.SIGUSR1, stop)
(folder / f"began-{os.getpid()}").touch()
end = time.monotonic() + seconds
while not stopped and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(1)
(folder / f"ended-{os.getpid()}").touch()
print("the end", flush=True)
sys.exit(128 + stopped[0] if stopped else 5)
"""

MPI = "from mpi4py import MPI; print('process', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)"

TORCHRUN = "import os; print('process', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def job_of(folder: Path, *command: str, processes: int = 1) -> Job:
    return Job(command, processes, folder / "log.txt", folder, f"a job in {folder.name}")


def shell(folder: Path, text: str) -> Job:
    return job_of(folder, "sh", "-c", text)


def python(folder: Path, text: str, *arguments: object, processes: int = 1) -> Job:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return job_of(folder, *command, processes=processes)


def output(job: Job) -> list[str]:
    return last_output(job.log).splitlines()


def starts(job: Job) -> int:
    return job.log.read_text().count("$ ") if job.log.exists() else 0


def count(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


def children(*parents: int) -> list[int]:
    lists = (file for pid in parents for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(pid) for file in lists for pid in file.read_text().split()]


@contextmanager
def killed(name: str, job: Job, running: Callable[[], object]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that has called the launcher, and is killed when `running` is true."""
    arguments = [name, str(job.folder), str(job.processes), *job.command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, *arguments]
    with subprocess.Popen(command, env=environment, start_new_session=True) as program:
        try:
            wait_until(lambda: running() or program.poll() is not None)
            assert program.poll() is None
            yield program
        finally:
            program.kill()


# --- Every launcher on this machine ---------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_a_launcher_returns_the_exit_code_and_keeps_all_output(name: str, tmp_path: Path) -> None:
    launcher = LAUNCHERS[name]()
    launcher.check()
    job = shell(tmp_path, "echo threads $OMP_NUM_THREADS; echo complaint >&2; exit 3")
    assert launcher(job) == 3
    assert output(job) == ["threads 1", "complaint"]
    assert launcher(shell(tmp_path, "echo once more")) == 0
    assert output(job) == ["once more"]
    assert starts(job) == 2
    assert "$ sh -c 'echo once more'\n" in job.log.read_text()


@pytest.mark.parametrize("name", HERE)
def test_exit_codes_of_a_signal_and_of_a_missing_command(name: str, tmp_path: Path) -> None:
    assert LAUNCHERS[name]()(shell(tmp_path, "kill -KILL $$")) == 128 + signal.SIGKILL
    missing = job_of(tmp_path, "no-such-program")
    assert LAUNCHERS[name]()(missing) == 127
    assert output(missing) == ["error: no-such-program: No such file or directory"]


def test_a_started_program_ignores_no_signal(tmp_path: Path) -> None:
    """Python ignores SIGPIPE, and its children would inherit that."""
    code = OneProcess()(shell(tmp_path, "kill -PIPE $$"))
    assert code == 128 + signal.SIGPIPE


def test_no_job_starts_after_ctrl_c_ended_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may end a job that has no session of its own yet, before the runner notices it."""
    launcher = OneProcess()
    with monkeypatch.context() as patched:
        patched.setattr(launchers, "guard", lambda *_: ["sh", "-c", "kill -INT $$"])
        assert launcher(shell(tmp_path, "true")) == 128 + STOP
    with pytest.raises(KeyboardInterrupt):
        launcher(shell(tmp_path, f"touch {tmp_path}/begun"))
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize(
    ("given", "processes", "added"),
    [([], 4, ["n_workers=4"]), (["n_workers=8"], 4, []), (["seed=2"], 1, [])],
)
def test_one_process_hosts_the_workers_of_all_processes(
    given: list[str], processes: int, added: list[str], tmp_path: Path
) -> None:
    job = python(tmp_path, "import sys; print(*sys.argv[1:])", *given, processes=processes)
    assert OneProcess()(job) == 0
    assert output(job) == [" ".join([*given, *added])]


@pytest.mark.parametrize("name", ["mpirun", "torchrun"])
def test_a_launcher_starts_the_given_number_of_processes(name: str, tmp_path: Path) -> None:
    job = python(tmp_path, {"mpirun": MPI, "torchrun": TORCHRUN}[name], processes=2)
    with one_mpirun_at_a_time():
        assert LAUNCHERS[name]()(job) == 0
    assert {"process 0 of 2", "process 1 of 2"} <= set(output(job))
    text = {"mpirun": "mpirun -np 2", "torchrun": "--nproc-per-node 2 --no-python"}[name]
    assert f" {text} {sys.executable} -c " in job.log.read_text()


def test_a_launcher_without_its_program_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"^--launcher mpirun\b"):
        LAUNCHERS["mpirun"]().check()
    with pytest.raises(BadInput, match=r"^--launcher slurm\b.*sbatch"):
        LAUNCHERS["slurm"]().check()
    LAUNCHERS["process"]().check()


# --- Whoever starts a job may be killed -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "processes"),
    [("process", 1), ("mpirun", 2), pytest.param("torchrun", 2, marks=pytest.mark.slow)],
)
def test_a_killed_runner_leaves_nothing_behind(name: str, processes: int, tmp_path: Path) -> None:
    """Its processes get a signal, and the next start waits until they have ended."""
    lasting = LASTING.replace("SIGUSR1", "SIGTERM") if name == "torchrun" else LASTING
    job = python(tmp_path, lasting, tmp_path, 600, processes=processes)
    again = shell(tmp_path, f"ls -d {tmp_path}/ended-*")
    with (
        nullcontext() if name == "process" else one_mpirun_at_a_time(),
        killed(name, job, lambda: count(tmp_path, "began-*") == processes) as program,
    ):
        program.kill()
        program.wait()
        assert LAUNCHERS[name]()(again) == 0
    ended = [line for line in output(again) if line.startswith(f"{tmp_path}/ended-")]
    assert len(ended) == processes
    assert "the end" in job.log.read_text()


def test_the_next_start_waits_for_processes_that_mpirun_has_lost(tmp_path: Path) -> None:
    """The runner is killed, its guard and mpirun too. Only MPI processes would notice."""
    job = python(tmp_path, LASTING, tmp_path, 3, processes=2)
    again = shell(tmp_path, f"ls -d {tmp_path}/ended-*")
    with (
        one_mpirun_at_a_time(),
        killed("mpirun", job, lambda: count(tmp_path, "began-*") == 2) as program,
    ):
        guard = children(program.pid)
        for process in [*guard, *children(*guard), program.pid]:
            os.kill(process, signal.SIGKILL)
        program.wait()
        assert count(tmp_path, "ended-*") == 0
        assert Mpirun()(again) == 0
    assert len(output(again)) == 2


def test_a_start_waits_for_a_limited_time(tmp_path: Path) -> None:
    job = shell(tmp_path, "echo never")
    with jobs.alone(tmp_path, patience=0):
        assert Mpirun(patience=0.2)(job) == 1
    text = job.log.read_text()
    assert text.startswith("error: an earlier start of this run is still there after 0.2 seconds; ")
    assert "never" not in text
    assert Mpirun(patience=0.2)(job) == 0


def test_a_command_does_not_start_without_its_runner(tmp_path: Path) -> None:
    """The kernel sends the signal for a runner's end only to processes that wait for it already."""
    number = int(signal.SIGUSR1)
    guard = jobs.guard("bound", number, 1 if os.getpid() != 1 else 2)
    done = subprocess.run([*guard, "touch", str(tmp_path / "done")])
    assert done.returncode == 128 + number
    assert not (tmp_path / "done").exists()


def test_a_command_ends_with_its_guard() -> None:
    guard = jobs.guard("bound", int(signal.SIGUSR1), os.getpid())
    command = [*guard, "sh", "-c", "echo here; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "here\n"
        program.kill()
        assert program.stdout.read() == ""  # returns when nobody can write any more


def test_a_process_that_starts_late_leaves_the_folder_to_others(tmp_path: Path) -> None:
    locked = [*jobs.guard("locked", tmp_path / "running"), "echo", "here"]
    with jobs.alone(tmp_path, patience=0):
        done = subprocess.run(locked, capture_output=True, text=True)
    assert done.returncode == 1
    assert "running is locked by another start of this run" in done.stderr
    assert subprocess.run(locked, capture_output=True, text=True).stdout == "here\n"


def test_an_interrupted_start_takes_its_process_along(tmp_path: Path) -> None:
    """Where a launcher is called in the main thread."""
    job = shell(tmp_path, "echo here; exec sleep 600")

    def interrupt() -> None:
        wait_until(lambda: job.log.exists() and "here" in output(job))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        OneProcess()(job)
    other.join()
    assert OneProcess(patience=0)(shell(tmp_path, "true")) == 0


# --- Slurm ----------------------------------------------------------------------------------------


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PATH", slurm.path(tmp_path / "bin"))
    return monkeypatch


@pytest.mark.usefixtures("sbatch")
def test_slurm_runs_jobs_at_the_same_time(tmp_path: Path) -> None:
    """With their exit codes and their output; here and under mpirun. Slurm runs those of a name one
    after the other."""
    folders = [tmp_path / name for name in ("a", "100 % b", "c", "d")]
    jobs = [
        shell(folders[0], "echo threads $OMP_NUM_THREADS; pwd; echo complaint >&2"),
        shell(folders[1], "exit 3"),
        job_of(folders[2], "no-such-program"),
        python(folders[3], MPI, processes=2),
    ]
    launcher = Slurm()
    launcher.check()
    with one_mpirun_at_a_time(), ThreadPoolExecutor(len(jobs)) as pool:
        codes = list(pool.map(launcher, jobs))
    assert codes == [0, 3, 127, 0]
    assert output(jobs[0]) == [
        *(f"Submitted batch job {slurm.NUMBER}", "threads 1", os.getcwd(), "complaint")
    ]
    assert "no-such-program" in output(jobs[2])[-1]
    assert sorted(output(jobs[3])[1:]) == ["process 0 of 2", "process 1 of 2"]
    assert [starts(job) for job in jobs] == [1] * 4
    assert not any((job.folder / "slurm").exists() for job in jobs)


@pytest.mark.usefixtures("sbatch")
def test_a_job_of_slurm_continues_without_the_runner(tmp_path: Path) -> None:
    """Another launcher does not start it meanwhile."""
    job = python(tmp_path, LASTING, tmp_path, 2)
    with killed("slurm", job, lambda: count(tmp_path, "began-*")) as program:
        program.kill()
        program.wait()
    assert Mpirun()(job) == 1
    assert output(job)[-1].startswith(f"error: Slurm's job {slurm.NUMBER} does this run; use ")
    assert count(tmp_path, "ended-*") == 0
    wait_until(lambda: count(tmp_path, "ended-*"))
    assert Slurm()(shell(tmp_path, "true")) == 0
    assert Mpirun()(shell(tmp_path, "true")) == 0


def test_errors_of_sbatch_and_jobs_that_never_begin_are_in_the_log(
    sbatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sbatch reads further options from the environment. For a job that is cancelled before it
    begins, it reports success."""
    for partition, text in (
        ("nowhere", "sbatch: error: invalid partition specified: nowhere\n"),
        ("cancelled", "error: Slurm's job has ended before it began\n"),
    ):
        sbatch.setenv("SBATCH_PARTITION", partition)
        job = shell(tmp_path, "true")
        assert Slurm(patience=0.1)(job) == 1
        assert job.log.read_text().endswith(text)
        assert not (tmp_path / jobs.SLURM).exists()
