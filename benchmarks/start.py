"""The time until a program answers, and until its first step, beside bounds.

    python -m benchmarks.start

- Processor seconds of an import or a command, beside `import torch`. Most answer without torch.
- Wall seconds until all of 8 processes have made the first step of the default run, beside those
  until 8 processes that mpirun has started have imported torch and computed a gradient of the same
  model and batch size, without any messages.

Medians of rounds where all take turns.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ROUNDS, PROCESSES = 5, 8

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import train": ["-c", "import train"],
    "train.py --help": ["train.py", "--help"],
    "train.py, a bad key": ["train.py", "topolgy=ring"],
    "gossip_run.py --help": ["gossip_run.py", "--help"],
    "powergossip-compare of a run": ["-m", "powergossip.compare", "RUN"],
    "import powergossip.optimizers": ["-c", "import powergossip.optimizers"],
}


def gradient() -> None:
    """In each of the processes: torch and a gradient of the model of the default run."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    loss = nn.functional.cross_entropy(model(torch.randn(16, 1, 8, 8)), torch.randint(10, (16,)))
    loss.backward()


def first_step() -> None:
    """In each of the processes: the default run, up to its first step."""
    import train
    from powergossip.training import execution

    step = execution.Together.train_step

    def last(*arguments: object) -> None:
        step(*arguments)  # type: ignore[arg-type]
        _end()

    execution.Together.train_step = last  # type: ignore[assignment,method-assign]
    train.main(["--output-dir", sys.argv[2], "overwrite=true", "log_verbosity=0"])


def _end() -> None:
    print(f"at {time.time()}", flush=True)
    os._exit(0)


def processor_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def wall_seconds(what: str, folder: str) -> float:
    """Until the last of the processes has come to the end."""
    began = time.time()
    worker = [sys.executable, "-m", "benchmarks.start", what, folder]
    ended = subprocess.run(
        ["mpirun", "-np", str(PROCESSES), *worker], cwd=ROOT, capture_output=True, text=True
    )
    times = [float(line[3:]) for line in ended.stdout.splitlines() if line.startswith("at ")]
    if len(times) < PROCESSES:
        sys.exit(ended.stderr)
    return max(times) - began


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        subprocess.run(
            [sys.executable, "train.py", "--output-dir", run, "num_epochs=1", "n_workers=2"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        found: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, command in COMMANDS.items():
                given = [part.replace("RUN", run) for part in command]
                found.setdefault(name, []).append(processor_seconds(given))
            for what in ("gradient", "first_step"):
                found.setdefault(what, []).append(wall_seconds(what, f"{folder}/other"))
    torch, bound = median(found["import torch"]), median(found["gradient"])
    for name in COMMANDS:
        seconds = median(found[name])
        print(f"{name:36} {seconds:6.2f} s of processor   {seconds / torch:5.2f} × import torch")
    seconds = median(found["first_step"])
    print(f"{PROCESSES} processes, torch and a gradient   {bound:6.2f} s")
    print(
        f"{PROCESSES} processes, first step             {seconds:6.2f} s   {seconds / bound:5.2f} ×"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["gradient"]:
        gradient()
        _end()
    elif sys.argv[1:2] == ["first_step"]:
        first_step()
    else:
        main()
