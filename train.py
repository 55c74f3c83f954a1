"""Deep learning on a graph of workers.

As a program::

    mpirun -np 8 python train.py                          eight processes, one worker each
    torchrun --nproc-per-node 8 train.py                  the same, with torch.distributed
    python train.py n_workers=8 optimizer=all-reduce      one process hosts all eight

As a driver::

    import train
    train.config["topology"] = "torus"
    train.log_metric = my_function     # called on process 0; see the default's docstring
    folder = train.main()

Nothing happens at import: torch is imported when a run begins.
`python train.py --help` shows the main keys.

A run that was killed resumes from its last checkpoint, also in another layout of processes::

    mpirun -np 8 python train.py --output-dir output/mine resume=true

Its checkpoints can be evaluated again, which changes nothing in the folder::

    python train.py --output-dir output/mine evaluate_only=true checkpoint=best
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from powergossip.errors import BadInput, Diverged
from powergossip.runs import configuration
from powergossip.training import help as help_text
from powergossip.training.config import Config

__all__ = [
    "BadInput",
    "Config",
    "Diverged",
    "config",
    "log_info",
    "log_metric",
    "log_runtime",
    "main",
    "output_dir",
]

config: DictConfig = configuration.structured(Config)
output_dir: str | None = None  # None: a new dated folder under output/


# --- Hooks: functions that drivers may replace; called on process 0 ------------------------------


def log_metric(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
    """A measurement. values: value, epoch, bits and messages (sent by worker 0), seconds."""
    from powergossip.training import recorder

    recorder.write_row(name, values, tags)


def log_info(info: Mapping[str, Any]) -> None:
    """Facts about the run, such as {"state.progress": 0.5}; saved in OUTPUT_DIR/info.json."""
    from powergossip.training import recorder

    recorder.write_facts(info)


def log_runtime(label: str, mean: float, std: float, instances: int) -> None:
    """Seconds of a phase over its `instances` so far. The rows phase_seconds have the sums."""


# --- The run -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> Path:
    """Train with `config`, changed by `arguments`: key=value, --config, --output-dir.

    The arguments apply to this run only: `config` and `output_dir` stay as they are.

    Returns the folder of the run, in all processes.

    Raises, with the same text in all processes: BadInput if a request is impossible, Diverged if a
    worker's loss or parameters become infinite or NaN, errors.Interrupted after a signal. All
    processes can then go on with another run. torch's global generators and number of threads are
    restored.
    """
    description = (__doc__ or "").split("\n\n")[0]
    request = configuration.request(
        config, Config, arguments, output_dir, description, help_text.text
    )

    with configuration.imports():
        from powergossip.exits import exit_is_an_error
        from powergossip.network import torch_kept
        from powergossip.runs.metrics import Hooks
        from powergossip.training import recorder
        from powergossip.training.start import begin

    # The hooks, as they are when a measurement is made.
    hooks = Hooks(
        log_metric=lambda *row: log_metric(*row),
        log_info=lambda facts: log_info(facts),
        log_runtime=lambda *phase: log_runtime(*phase),
    )
    with torch_kept(), exit_is_an_error():
        run = begin(request)
        if run.config.evaluate_only:
            recorder.evaluate(run, hooks)
            return run.evaluated
        record = recorder.Recorder(run, hooks, __file__)
        trainer = run.trainer(record.hooks)
        with record.recording(trainer):
            record.train(trainer)
        return record.folder


def command() -> None:
    """Run as a program: main() with the command line; bad input is one sentence, exit code 2."""
    configuration.run_entry_point(main)


if __name__ == "__main__":
    command()
