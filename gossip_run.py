"""Consensus on a graph of workers: the error of gossip by step, and by bits sent.

As a program::

    python gossip_run.py n_workers=8                      one process hosts all eight workers
    mpirun -np 8 python gossip_run.py                     eight processes, one worker each
    torchrun --nproc-per-node 8 gossip_run.py             the same, with torch.distributed
    python gossip_run.py n_workers=8 algorithm=[sign_choco,power_gossip] num_steps=1000
    python gossip_run.py n_workers=8 algorithm=all        every algorithm, over its grid of settings

As a driver::

    import gossip_run
    gossip_run.config["topology"] = "torus"
    gossip_run.log_metric = my_function    # called on process 0, with the arguments of the default
    folder = gossip_run.main()

Nothing happens at import: torch is imported when a run begins.
`python gossip_run.py --help` lists the keys.

To add an algorithm: write its class and row in powergossip/algorithms/ (a compressor's in
powergossip/compressors/) and a row in ALGORITHMS. Starting matrices are rows of DATA.

References:
    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, for the experiment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from powergossip.consensus.config import Config
from powergossip.runs import configuration, figures, metrics, summaries
from powergossip.runs.files import FIGURE

if TYPE_CHECKING:
    from powergossip.consensus.config_checks import checked
    from powergossip.consensus.data import DATA
    from powergossip.consensus.methods import ALGORITHMS
    from powergossip.consensus.sweep import Sweep, is_logged
    from powergossip.runs.output import Output
    from powergossip.runs.progress import Progress

__all__ = [
    "ALGORITHMS",
    "DATA",
    "Config",
    "checked",
    "config",
    "is_logged",
    "main",
]


config: DictConfig = configuration.structured(Config)
output_dir: str | None = None  # None: a new dated folder under output/


def __getattr__(name: str) -> Any:
    """ALGORITHMS, DATA, checked and is_logged, imported on their first use."""
    from powergossip.consensus import config_checks, data, methods, sweep

    for home in (config_checks, data, methods, sweep):
        if name in __all__ and name in vars(home):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- Hooks, called on process 0. Drivers may replace them. ----------------------------------------


def log_metric(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
    """Log a measurement: "error", (1/n) Σ_i ‖x_i − x̄_0‖², or "diverged", the step of divergence.

    x_i is worker i's matrix, and x̄_0 the mean of the starting matrices.

    Args:
        values: Keys value, epoch (the step), bits and messages (sent by worker 0), and seconds.
        tags: Keys algorithm, and diffusion_rate and theta of its grid, as strings.
    """
    if _output is not None:
        _output.write(name, values, tags)


def log_info(info: Mapping[str, Any]) -> None:
    """Log metadata, such as {"state.progress": 0.5}, to OUTPUT_DIR/info.json."""
    if _output is not None:
        _output.add_info(info, sync=False)  # often, and nothing resumes


def log_runtime(label: str, mean: float, std: float, instances: int) -> None:
    """Log the seconds of a step of the algorithm `label`, for all settings of a batch together."""


# Written by the default hooks, on process 0 while main() runs.
_output: "Output | None" = None


# --- The run -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> Path:
    """Gossip with the settings in `config`, changed by `arguments` (the command line).

    The arguments apply to this run only: `config` and `output_dir` stay as they are.

    Returns the folder of the run, in all processes.

    Raises:
        BadInput: In all processes, for a configuration that cannot be run.
        errors.Signaled: In a process that receives SIGTERM, SIGINT, SIGHUP or SIGUSR1.
    """
    global _output
    description = (__doc__ or "").split("\n\n")[0]
    request = configuration.request(config, Config, arguments, output_dir, description)

    with configuration.imports():
        from powergossip.consensus.sweep import Sweep
        from powergossip.network import processes
        from powergossip.runs.output import Output
        from powergossip.runs.progress import Progress
        from powergossip.runs.signals import Signals

    comm = processes(request.config.distributed_backend)
    request.check(comm)
    sweep = Sweep(request.config, comm)
    try:
        with comm.agreed():
            _output = Output(request.folder, sweep.config.as_dict()) if comm.rank == 0 else None
        if _output is not None:
            log_info(sweep.facts())
            if sweep.config.log_verbosity > 0:
                print(configuration.changed(sweep.config.as_dict(), Config), flush=True)
        show = comm.rank == 0 and sweep.config.log_verbosity > 0
        # Process 0 reports first. The others go on meanwhile, since it may wait for their messages.
        text, delay = "there is no checkpoint; the rows so far are kept", 0.6 * (comm.rank > 0)
        signals = Signals(at_once=text, delay=delay)
        with Progress(sweep.total_steps, shown=show) as bar, signals:
            sweep.run(_hooks(sweep, bar))
        if _output is not None:
            _report(_output.folder)
        return comm.broadcast(Path() if _output is None else _output.folder)
    finally:
        if _output is not None:
            _output.close()
        _output = None


def _hooks(sweep: "Sweep", bar: "Progress") -> metrics.Hooks:
    """The module's hooks, looked up at each call, and the progress bar."""

    def row(name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
        log_metric(name, values, tags)
        step, steps = values["epoch"], sweep.num_steps(tags["algorithm"])
        if sweep.config.log_verbosity > 1 and (name == "diverged" or step == steps):
            setting = ", ".join(f"{key} {value}" for key, value in tags.items())
            bar.write(f"{setting}: {name} {values['value']:.4g} at step {step}")

    def progress(algorithm: str, steps: int) -> None:
        bar.note(algorithm)
        bar.update(steps)

    return metrics.Hooks(
        log_metric=row,
        log_info=lambda info: log_info(info),
        log_runtime=lambda *values: log_runtime(*values),
        progress=progress,
    )


def _report(folder: Path) -> None:
    """Draw the figure and print the table of the rows in the output folder."""
    rows = metrics.load(folder)
    if "error" not in set(rows["name"]):  # the log_metric of a driver kept them elsewhere
        return
    figure = folder / FIGURE
    figures.consensus_figure(rows, figure)
    table = summaries.consensus_summary(rows)
    print(f"\n{table}\n\nrows: {folder / metrics.FILE}\nfigure: {figure}")


def command() -> None:
    """Run as a program. Bad input prints one sentence and gives exit code 2."""
    configuration.run_entry_point(main)


if __name__ == "__main__":
    command()
