"""Resuming a run: its checkpoint, where configuration and model are the same.

A few keys of the configuration may differ, and so may the number of workers (see resizing.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from powergossip.network import Processes
from powergossip.parameters import Parameters
from powergossip.runs.assignments import saved_values
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.files import CONFIG_FILE, OF_COMMAND
from powergossip.training import resizing
from powergossip.training.config import Settings

# Keys that may change when a run is resumed.
FREE_TO_CHANGE = (
    *OF_COMMAND,
    *("cuda_aware", "data_processes", "device", "distributed_backend", "num_epochs"),
    *("ticket", "ticket_options"),
)
# Keys that may change, too, when a checkpoint is evaluated.
OF_EVALUATION = (
    "batch_size",
    "batched_gradients",
    "evaluate_average_model",
    "evaluate_test_data",
    "evaluate_training_data",
    "evaluate_workers",
    "mean_model_statistics",
    "precision",
    "recalibration_batches",
    "torch_compile",
)

# Keys that may change together with the number of workers.
OF_WORKERS = (
    "n_workers",
    "distributed_lr_warmup_factor",  # auto: the number of workers
    "spectrum_logging_worker_pairs",
    "topology",
    "topology_options",
)


class Resumed(NamedTuple):
    """The state of the hosted workers from a checkpoint.

    Attributes:
        metrics_bytes: Bytes of metrics.jsonl that belong to its steps.
        workers_before: Number of workers in the checkpoint.
        checkpoint: Name of the checkpoint: last, or another one of Checkpoints.
    """

    state: dict[str, Any]
    metrics_bytes: int
    workers_before: int
    checkpoint: str


def load_checkpoint(
    folder: Path,
    config: Settings,
    processes: Processes,
    parameters: Parameters,
    start: resizing.Start,
    data: str | None = None,
) -> Resumed | None:
    """Load the hosted workers' state from the checkpoint in a folder that the configuration names.

    Args:
        start: Start of the run, for a checkpoint of another number of workers.
        data: Hash of the data, or None.

    Returns:
        The state, or None where a run has no checkpoint yet.

    Raises:
        BadInput: In all processes, for another run or model.
    """
    saved, which = Checkpoints(folder, processes), config.checkpoint
    entry = saved.describe(which)
    if entry is None:  # killed before the first checkpoint, or a new folder
        with processes.agreed():
            if config.evaluate_only:
                raise ValueError(
                    f"evaluate_only=true: {folder} has no {which} checkpoint; use the folder "
                    "of a run that has one"
                )
            if (folder / CONFIG_FILE).exists():  # of another run, whose rows would be lost
                values = {key: value for key, (value, _) in saved_values(folder).items()}
                check_same_run(folder, values, config)
        return None
    which, entry = saved.intact(which, others=not config.evaluate_only)
    facts = entry["facts"]
    before = facts["config"]["n_workers"]
    with processes.agreed():
        check_same_run(folder, facts["config"], config, processes.can_be_lost)
        if facts.get("data") not in (None, data):
            raise ValueError(
                f"the documents have changed since the checkpoint in {folder} (SHA-256 of the "
                f"tokens {data}, was {facts['data']}); restore them, or use another --output-dir"
            )
    found = {worker for part in entry["parts"] for worker in range(*part["workers"])}
    saved_workers, lost = len(found), len(found) < before
    if lost and before == config.n_workers and not processes.can_be_lost:
        with processes.agreed():
            _check_evaluated_alone(folder, config, processes, saved_workers)
    if before == config.n_workers and saved_workers == before:
        state = saved.load(start.workers, which)
        with processes.agreed():
            _check_same_model(folder, state, parameters)
            present = len(state.get("alive", range(before)))
            if config.evaluate_only and present < before:
                _check_evaluated_alone(folder, config, processes, present)
        return Resumed(state, facts["metrics_bytes"], before, which)

    conversion: Any
    if lost or processes.can_be_lost:
        from powergossip.training.asynchronous.resizing import Restart

        conversion = Restart(before, found, start)
    else:
        conversion = resizing.Conversion(before, found, start)

    def add(workers: range, state: dict[str, Any]) -> None:
        _check_same_model(folder, state, parameters)
        conversion.add(workers, state)

    saved.visit(add, which)
    if config.evaluate_only:
        return Resumed(conversion.evaluated(), facts["metrics_bytes"], saved_workers, which)
    with processes.agreed():
        state = conversion.state(facts["steps_per_epoch"])
    if before == config.n_workers and state["epoch"] >= config.num_epochs:
        saved_workers = before  # the run is complete, whatever it has lost: nobody joins it
    return Resumed(state, facts["metrics_bytes"], saved_workers, which)


def check_rest(config: Settings, step: int, place: tuple[int, int], workers_before: int) -> None:
    """Raise ValueError if a resumed run already has more than num_epochs epochs.

    Args:
        step: Number of completed steps.
        place: Epoch and step in it.
        workers_before: Number of workers in the checkpoint. With another number, the run must have
            fewer epochs than num_epochs: its checkpoint remains otherwise.
    """
    epoch, step_in_epoch = place
    if epoch >= config.num_epochs and workers_before != config.n_workers:
        raise ValueError(
            f"n_workers={config.n_workers}: use {workers_before}, or a larger "
            f"num_epochs; the run was complete after {epoch} epochs"
        )
    if place > (config.num_epochs, 0):
        begun = epoch + (step_in_epoch > 0)
        raise ValueError(
            f"num_epochs={config.num_epochs}: use {begun} or more; the run already has {step} steps"
        )


def _check_evaluated_alone(folder: Path, config: Settings, processes: Processes, left: int) -> None:
    """Raise ValueError unless a checkpoint with lost workers is evaluated in one process."""
    if not config.evaluate_only:
        raise ValueError(
            f"the checkpoint in {folder} has {left} of {config.n_workers} workers, since the "
            "others were lost; resume it with mpirun --with-ft ulfm, as it was started"
        )
    if processes.size > 1:
        raise ValueError(
            f"evaluate_only=true: use one process; the checkpoint in {folder} has {left} of "
            f"{config.n_workers} workers, since the others were lost"
        )


def _check_same_model(folder: Path, state: Mapping[str, Any], parameters: Parameters) -> None:
    if state["x"].dtype != parameters.x.dtype:
        raise ValueError(
            f"the run in {folder} has another model: parameters in {state['x'].dtype}, not "
            f"{parameters.x.dtype}; use the same model"
        )
    for name in ("x", "buffers"):
        saved, now = state[name].shape[1], getattr(parameters, name).shape[1]
        if saved != now:
            raise ValueError(
                f"the run in {folder} has another model: {saved} elements of {name} for each "
                f"worker, not {now}; use the same data and version of this program"
            )


def check_same_run(
    folder: Path, saved: Mapping[str, Any], config: Settings, linked: bool = False
) -> None:
    """Raise ValueError if the saved configuration differs in a key that may not change.

    Args:
        linked: True if processes exchange by edges.
    """
    now = config.as_dict()
    if set(now) != set(saved) and now["optimizer"] == saved.get("optimizer"):
        keys = ", ".join(sorted(set(now) ^ set(saved)))
        raise ValueError(
            f"the run in {folder} is of another version of this program, with other keys ({keys}); "
            "resume it with that version, or use another --output-dir"
        )
    free = (*FREE_TO_CHANGE, *(OF_EVALUATION if config.evaluate_only else ()))
    if _is_elastic(saved, config, linked):
        free = (*free, *OF_WORKERS)
    differing = [
        f"{key}={now.get(key)} (was {saved.get(key)})"
        for key in sorted({*now, *saved})
        if key not in free and now.get(key) != saved.get(key)
    ]
    if differing:
        raise ValueError(
            f"the run in {folder} cannot be resumed with {', '.join(differing)}; "
            "keep these values, or use another --output-dir"
        )


def _is_elastic(before: Mapping[str, Any], config: Settings, linked: bool) -> bool:
    """True if a run is resumed with another number of workers. Raises ValueError."""
    if config.evaluate_only or config.n_workers == before["n_workers"]:
        return False
    if config.by_edges and (config.scenario is not None or not linked):
        raise ValueError(
            f"n_workers={config.n_workers}: use {before['n_workers']}; a run on the virtual clock "
            "resumes with the same number of workers"
        )
    return True
