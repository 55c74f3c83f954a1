"""environment/slurm/train.sbatch: its response to a signal, with stand-ins for mpirun and Slurm."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.helpers import executable, wait_until

TEMPLATE = launch.ROOT / "environment" / "slurm" / "train.sbatch"
STOPPED = 128 + signal.SIGUSR1


# A train.py that waits for the signal; the second time it is sent it would end at once, as the real
# one. What it does then is in $THEN: write a checkpoint, or none, and an exit code.
TRAIN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
(folder / "arguments").write_text("\\n".join(sys.argv[1:]))
written, code = os.environ["THEN"].split()
def stop(number, frame):
    signal.signal(number, signal.SIG_DFL)
    time.sleep(0.3)  # for the script it is as if it were still running
    if written == "checkpoint":
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "index.json").write_text("{}")
    os._exit(int(code))
if written == "at-once":
    sys.exit(int(code))
signal.signal(signal.SIGUSR1, stop)
(folder / "ready").touch()
time.sleep(60)
"""


def _as_from_slurm() -> None:
    """Signals arrive, whatever the tests before have left: bash cannot trap one that is ignored."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


class Job:
    """The script as Slurm starts it: a copy, elsewhere, with Slurm's variables."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.repository = folder / "repository"
        (self.repository / ".venv" / "bin").mkdir(parents=True)
        (self.repository / ".venv" / "bin" / "activate").touch()
        (self.repository / "train.py").write_text(TRAIN)
        (folder / "spool").mkdir()
        (folder / "spool" / "slurm_script").write_text(TEMPLATE.read_text())
        bin_folder = folder / "bin"
        # Like mpirun's, its processes are children, and the signal is handed on by it.
        executable(
            bin_folder / "mpirun",
            """shift 2; trap 'kill -USR1 $!' USR1; "$@" & wait $!; c=$?; """
            'while kill -0 $! 2>/dev/null; do wait $!; c=$?; done; wait $!; exit "$?"',
        )
        executable(bin_folder / "scontrol", f'echo "$@" >>{folder}/scontrol')
        (bin_folder / "python").symlink_to(sys.executable)
        self.variables = {
            "SLURM_JOB_ID": "17",
            "SLURM_NTASKS": "2",
            "SLURM_SUBMIT_DIR": str(self.repository),
            "THEN": f"checkpoint {STOPPED}",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
        }

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.variables, **variables}
        return subprocess.Popen(
            ["/bin/bash", self.folder / "spool" / "slurm_script", *arguments],
            env={name: value for name, value in environment.items() if value},
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_as_from_slurm,
        )

    def signalled(
        self, *arguments: str, output: str = "slurm-17", **variables: str
    ) -> tuple[int, str]:
        """Start it, let Slurm's signal come when train.py is ready; exit code and errors.

        It comes twice; the second time it would end train.py before the checkpoint is written.
        """
        with self.start(*arguments, **variables) as job:
            wait_until((self.repository / "output" / output / "ready").exists)
            for _ in range(2):
                job.send_signal(signal.SIGUSR1)
                time.sleep(0.1)
            _, errors = job.communicate(timeout=30)
        return job.returncode, errors

    def requeued(self) -> list[str]:
        file = self.folder / "scontrol"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_is_requeued_after_a_checkpoint_before_the_time_limit(job: Job) -> None:
    code, errors = job.signalled("topology=torus", "task_options={hidden_size: 64}")
    assert (code, errors) == (STOPPED, "")
    assert job.requeued() == ["requeue 17"]
    output = job.repository / "output" / "slurm-17"
    assert (output / "arguments").read_text().splitlines() == [
        *("--output-dir", "output/slurm-17"),
        *("topology=torus", "task_options={hidden_size: 64}", "resume=auto"),
    ]
    names = sorted(path.name for path in output.iterdir())
    assert names == ["arguments", "checkpoints", "ready"]
    (output / "ready").unlink()
    executable(job.folder / "bin" / "scontrol", "exit 1")
    code, errors = job.signalled()
    assert code == STOPPED
    assert "OUTPUT_DIR=output/slurm-17 sbatch" in errors


@pytest.mark.parametrize(
    ("then", "code", "sentence"),
    [
        ("checkpoint 1", 1, ""),
        ("checkpoint 0", 0, ""),
        # A checkpoint of an earlier job is no progress.
        (f"nothing {STOPPED}", STOPPED, "error: "),
        ("at-once 1", 1, ""),
        (f"at-once {STOPPED}", STOPPED, ""),
    ],
)
def test_a_job_that_failed_or_finished_or_has_no_checkpoint_is_not_requeued(
    job: Job, then: str, code: int, sentence: str
) -> None:
    checkpoints = job.repository / "output" / "slurm-17" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "index.json").touch()
    time.sleep(0.05)  # later than that by any clock of files
    if then.startswith("at-once"):
        with job.start(THEN=then) as started:
            _, errors = started.communicate(timeout=30)
        ended = started.returncode
    else:
        ended, errors = job.signalled(THEN=then)
    assert ended == code
    assert errors.startswith(sentence)
    assert bool(errors) == bool(sentence)
    assert job.requeued() == []


@pytest.mark.parametrize(
    ("variables", "arguments", "sentence"),
    [
        ({"SLURM_SUBMIT_DIR": "/"}, [], "train.py"),
        ({"SLURM_JOB_ID": ""}, [], "Slurm"),
        ({}, ["--output-dir", "mine"], "--output-dir"),
        ({"SLURM_SUBMIT_DIR": "SPOOL"}, [], "bash environment/setup.sh"),
    ],
)
def test_bad_input_is_one_sentence(
    job: Job, variables: dict[str, str], arguments: list[str], sentence: str
) -> None:
    (job.folder / "spool" / "train.py").touch()  # a folder without .venv
    if variables.get("SLURM_SUBMIT_DIR") == "SPOOL":
        variables = {"SLURM_SUBMIT_DIR": str(job.folder / "spool")}
    with job.start(*arguments, **variables) as started:
        output, errors = started.communicate(timeout=30)
    assert (started.returncode, output) == (2, "")
    assert errors.startswith("error: ")
    assert sentence in errors
    assert errors.count("\n") == 1
    assert job.requeued() == []
